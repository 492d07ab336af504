"""`--engines`: the four magics on the engines of an ipyparallel cluster, and reports of many processes as one.

    engines.py  which engines are meant and what each answers; line magics and cells on all of them
    report.py   `ClusterReport`, merging, and GPUs that several engines share
    view.py     the answer of all engines, a row for those that say the same, and each engine's own report

`--engines` goes where `%%px` goes, unless `use` selects another client. Nothing here starts an engine. In a script,
`gpumagic.merge` makes one report of what ``client[:].apply_sync(gpumagic.gpuinfo)`` returns.
"""

from __future__ import annotations

from gpumagic.cluster.engines import use

__all__ = ["use"]
