"""`--engines`: the four magics on the engines of an ipyparallel cluster, and reports of many processes as one.

Start with `connection.py` for the line magics and with `cells.py` for the cell magics.

    connection.py   which engines are meant, which device each gets, what each answers and how; line magics on them
    cells.py        a cell of `%%ondevice` or `%%oomguard` on every engine
    report.py       `ClusterReport`, merging, and GPUs that several engines share
    view.py         the answer of all engines, a row for those that say the same, and each engine's own report

`--engines` goes where `%%px` goes, unless `use` selects another client. Nothing here starts an engine. In a script,
`gpumagic.merge` makes one report of what ``client[:].apply_sync(gpumagic.gpuinfo)`` returns.
"""

from __future__ import annotations

from gpumagic.cluster.connection import use

__all__ = ["use"]
