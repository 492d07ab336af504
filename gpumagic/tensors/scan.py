"""The live tensors of this process -> one row a storage, and each device's sum against its allocator.

Every object is let go before this returns, also when it fails.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence

from gpumagic.heap import storages
from gpumagic.heap.storages import uncollected, undisturbed
from gpumagic.report import origin
from gpumagic.tensors import reconcile
from gpumagic.tensors.census import Census
from gpumagic.tensors.cycle_rows import WORTH_LOOKING, name_cycles
from gpumagic.tensors.report import TensorReport, TensorRow


def scan(
    namespace: Mapping[str, object] | None = None,
    *,
    devices: Sequence[str] = (),
    minimum: int = 0,
    sort: str = "size",
    group_by: str | None = None,
    limit: int | None = 20,
    shell: object | None = None,
    names: bool = True,
    thorough: bool = False,
) -> TensorReport:
    """Return every live tensor of this process, one row a storage. Never imports torch, runs no gc.

    Args:
        namespace: where names are looked up; the main module's globals by default.
        devices: only these, such as ``"cuda:1"``, or ``"cuda"`` for all of a backend; all without.
        minimum: only storages of at least this many bytes.
        sort: ``"size"``, ``"name"``, ``"device"``, ``"dtype"`` or ``"kind"``.
        group_by: the key to show totals by instead of rows.
        limit: how many rows to show; the report has all.
        shell: the IPython shell, whose outputs and last error may keep tensors alive.
        names: whether to look for names, holders and graphs; without, only what there is and how big it is.
        thorough: whether to look for reference cycles behind whatever nothing else keeps, not only behind what is worth
            the passes over all objects that it takes; and for installed modules that keep what the session keeps.
    """
    if "torch" not in sys.modules:
        return TensorReport(
            (), limit=limit, group_by=group_by, notes=("torch is not imported: no tensors",), origin=origin.here()
        )
    census = Census(vars(sys.modules["__main__"]) if namespace is None else namespace, shell, names, thorough)
    with uncollected():
        rows = _taken(census)
        rows = name_cycles(rows, 0 if thorough else WORTH_LOOKING) if names else rows
        summary = reconcile.by_device(rows)
        report = TensorReport(
            tensors=tuple(rows),
            by_device=summary,
            limit=limit,
            group_by=group_by,
            notes=(*census.notes, *reconcile.notes(rows, summary)),
            process=storages.PROCESS,
            graphs=census.graphs,
            sources=census.sources,
            origin=origin.here(),
        )
        return report.narrowed(devices, minimum, sort)


def _taken(census: Census) -> list[TensorRow]:
    try:
        with undisturbed():
            return census.take()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # or it would keep every tensor of the process
        raise
    finally:
        census.release()
