"""`%devices --free`: releases outputs, the display hook, the last error, and what the gc has not collected yet."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpumagic.heap import holders
from gpumagic.heap import release as releasing
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.held import LAST_TRACEBACK, Holder, Namespace, Root
from gpumagic.heap.kinds import Graphs, non_leaves
from gpumagic.heap.storages import StorageTable, gc_disabled, undisturbed
from gpumagic.memory import allocator
from gpumagic.report.base import grouped
from gpumagic.tensors import scan
from gpumagic.tensors.report import FreedReport, FreedRow, TensorReport, is_on

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def release(
    namespace: Namespace,
    shell: InteractiveShell | None = None,
    devices: Sequence[str] = (),
) -> FreedReport:
    """Make IPython and Python forget outputs and the last error where these keep tensors that no variable reaches.

    Then a collection frees what is left of earlier errors, and what is in cycles.

    Args:
        namespace: the notebook's variables; none of them changes.
        shell: the shell they belong to; without one only Python's own last error is looked at.
        devices: only outputs and errors that keep tensors on these; all without.
    """
    with gc_disabled():
        before = scan.scan(namespace, shell=shell, thorough=True)
        figures = allocator.all_device_stats()
        released: dict[str, None] = {}
        wanted: set[int] = set()
        for row in before:
            if row.releasable and is_on(row.device, devices):
                wanted.update(row.numbers)
        if wanted:
            for holder in _forget(wanted, namespace, shell):
                released[str(holder)] = None
            gc.collect()
            for row in before:
                if row.holder_kind == "cycle" and is_on(row.device, devices):
                    released[str(row.holder)] = None
        now = allocator.all_device_stats()
        after = scan.scan(namespace, shell=shell, thorough=True)
    return FreedReport(
        freed=tuple(_came_back(before, after, figures, now)),
        released=tuple(released),
        left=after.leaks(),
        notes=after.notes,
    )


def _forget(
    wanted: set[int], namespace: Namespace, shell: InteractiveShell | None
) -> list[Holder]:
    """Make the session forget what keeps storages, itself or by an autograd graph; return what that was.

    Args:
        wanted: the numbers of the storages.
        namespace: the notebook's variables.
        shell: the shell they belong to.
    """
    roots = holders.hidden_roots(namespace, shell)
    keeping = _holders_of(wanted, roots, holders.excluded_objects(namespace, shell))
    # Comprehensions, whose variables keep nothing alive.
    roots = [root for root in roots if root[0] in keeping]
    outputs = [root for root in roots if root[0] != LAST_TRACEBACK]
    forgotten = {id(value) for _, value in outputs}
    released = dict.fromkeys(holder for holder, _ in roots)
    outputs.clear()
    if shell is not None:
        releasing.forget_outputs(shell, forgotten)
    roots.clear()
    if LAST_TRACEBACK in keeping:
        releasing.forget_last_error(namespace, shell)
    return list(released)


def _holders_of(
    wanted: set[int], roots: Sequence[Root], excluded: Sequence[object]
) -> set[Holder]:
    """Return which roots lead to storages, or to a tensor whose autograd graph keeps them.

    Args:
        wanted: the numbers of the storages.
        roots: with the holders to tell.
        excluded: what is not searched.
    """
    keeping: set[Holder] = set()
    graph = HeapGraph(excluded)
    table = StorageTable()
    graphs = Graphs()
    try:
        with undisturbed():
            graph.explore(roots)
            for key, found in graph.roots_of().items():
                if keeping.issuperset(found):
                    continue
                tensors = [graph.tensors[key]]
                for result in non_leaves(tensors):
                    tensors += graphs.walk(result.grad_fn) or ()
                numbers: set[int] = set()
                for tensor in tensors:
                    numbers.update(table.numbers(tensor))
                tensors.clear()
                if not wanted.isdisjoint(numbers):
                    keeping.update(found)
    finally:
        graphs.release()
        graph.release()
    return keeping


def _came_back(
    before: TensorReport,
    after: TensorReport,
    figures: Mapping[str, allocator.AllocatorStats],
    now: Mapping[str, allocator.AllocatorStats],
) -> Iterator[FreedRow]:
    """Yield what was freed on each device: by its allocator's figures, or by the tensors where it has none."""
    freed = [row for row in after.since(before) if row.change == "freed"]
    gone = grouped((row.device, row) for row in freed)
    for device in {**figures, **gone}:
        rows = gone.get(device, [])
        if device in figures:
            allocated = figures[device].allocated
            left = now[device].allocated
            yield FreedRow(device, allocated - left, len(rows), allocated, left)
        else:
            nbytes = -sum(row.nbytes or 0 for row in rows)
            yield FreedRow(device, nbytes, len(rows), None, None)
