"""`--engines`: the four magics on the engines of an ipyparallel cluster, and reports of many processes as one.

Start with `queries.py` for the line magics and with `cells.py` for the cell magics.

    connection.py   which engines are meant, and which device each of them gets
    queries.py      `%gpuinfo` and `%devices` on every engine
    cells.py        a cell of `%%ondevice` or `%%oomguard` on every engine
    transport.py    sends a request to engines and collects the answers, or why there is none
    engine_side.py  runs in the engine, sent as text; `requests.py` is what it calls there
    report.py       `ClusterReport`, merging, and GPUs that several engines share
    view.py         the answer of all engines, a row for those that say the same, and each engine's own report

`--engines` goes where `%%px` goes, unless `use` selects another client. Nothing here starts an engine. In a script:

    gpumagic.cluster.use(client)
    gpumagic.cluster.gpuinfo()
    gpumagic.cluster.devices(engines="0,2")
"""

from __future__ import annotations

from gpumagic.cluster.connection import use
from gpumagic.cluster.queries import devices, gpuinfo

__all__ = ["devices", "gpuinfo", "use"]
