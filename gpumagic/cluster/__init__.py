"""The same probes and cells on the engines of an ipyparallel cluster, as one report.

`--engines` on any of the four magics goes where `%%px` goes; `use` says otherwise. Nothing here starts an engine.
In a script:

    gpumagic.cluster.use(client)
    gpumagic.cluster.gpuinfo()
    gpumagic.cluster.devices(engines="0,2")
"""

from __future__ import annotations

from gpumagic.cluster.connection import use
from gpumagic.cluster.queries import devices, gpuinfo

__all__ = ["devices", "gpuinfo", "use"]
