"""`--engines`: the four magics on the engines of an ipyparallel cluster, and reports of many processes as one.

Start with `queries` for the line magics and with `cells` for the cell magics. The files:

- `connection`: which engines are meant, and which device each of them gets
- `queries`: `%gpuinfo` and `%devices` on every engine
- `cells`: a cell of `%%ondevice` or `%%oomguard` on every engine
- `transport`: sends a request to engines and collects the answers, or why there is none
- `engine_side`, `requests`: run in the engine; the first is sent as text, the second is imported there
- `report`: `ClusterReport`, merging, and GPUs that several engines share
- `view`, `gpus_view`, `tensors_view`: the view, and its parts about GPUs and tensors

`--engines` goes where `%%px` goes, unless `use` selects another client. Nothing here starts an engine. In a script:

    gpumagic.cluster.use(client)
    gpumagic.cluster.gpuinfo()
    gpumagic.cluster.devices(engines="0,2")
"""

from __future__ import annotations

from gpumagic.cluster.connection import use
from gpumagic.cluster.queries import devices, gpuinfo

__all__ = ["devices", "gpuinfo", "use"]
