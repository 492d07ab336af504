"""Releases what no variable reaches: outputs, the display hook, the last error, what the gc has not collected yet."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gpumagic.heap import holders
from gpumagic.heap import release as releasing
from gpumagic.heap.cycles import CYCLE
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.kinds import Graphs, non_leaves
from gpumagic.heap.storages import StorageTable, gc_disabled, undisturbed
from gpumagic.memory import allocator
from gpumagic.tensors import scan
from gpumagic.tensors.leaks_report import FreedReport, FreedRow
from gpumagic.tensors.report import TensorReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def release(namespace: Mapping[str, object], shell: InteractiveShell | None = None) -> FreedReport:
    """Make IPython and Python forget outputs and the last error where these keep tensors that no variable reaches.

    Then a collection frees what is left of earlier errors, and what is in cycles.

    Args:
        namespace: the notebook's variables; none of them changes.
        shell: the shell they belong to; without one only Python's own last error is looked at.
    """
    with gc_disabled():
        before = scan.scan(namespace, shell=shell, thorough=True)
        figures = allocator.all_device_stats()
        wanted = {number for row in before if row.releasable for number in row.numbers}
        released = _forget(wanted, namespace, shell) if wanted else ()
        if wanted:
            gc.collect()
            found = (row.holder or "" for row in before)
            released += tuple(dict.fromkeys(holder for holder in found if holder.startswith(CYCLE)))
        now = allocator.all_device_stats()
        after = scan.scan(namespace, shell=shell, thorough=True)
    return FreedReport(tuple(_freed(before, after, figures, now)), released, after.leaks(), after.notes)


def _forget(wanted: set[int], namespace: Mapping[str, object], shell: InteractiveShell | None) -> tuple[str, ...]:
    """Make the session forget what keeps the storages with these numbers; return what that was."""
    roots = holders.hidden_roots(namespace, shell)
    keeping = _keeping(wanted, roots, namespace, shell)
    forgotten = {id(value) for label, value in roots if label in keeping and label != holders.TRACEBACK}
    labels = dict.fromkeys(label for label, _ in roots if label in keeping)
    if shell is not None:
        releasing.forget_outputs(shell, forgotten)
    roots.clear()
    if holders.TRACEBACK in keeping:
        releasing.forget_last_error(namespace, shell)
    return tuple(labels)


def _keeping(
    wanted: set[int], roots: list[tuple[str, object]], namespace: Mapping[str, object], shell: object | None
) -> set[str]:
    """Return the roots that keep one of the storages with these numbers, themselves or by an autograd graph."""
    graph, table, graphs = HeapGraph(holders.excluded_objects(namespace, shell)), StorageTable(), Graphs()
    found: set[str] = set()
    try:
        with undisturbed():
            graph.explore(roots)
            for key, labels in graph.roots_of().items():
                tensors = [graph.tensors[key]]
                for result in [] if found.issuperset(labels) else non_leaves(tensors):
                    kept = graphs.walk(result.grad_fn)
                    tensors += kept.tensors if kept is not None else ()
                if any(not wanted.isdisjoint(table.numbers(tensor)) for tensor in tensors):
                    found.update(labels)
        return found
    finally:
        graphs.release()
        graph.release()


def _freed(
    before: TensorReport,
    after: TensorReport,
    figures: Mapping[str, allocator.AllocatorStats],
    now: Mapping[str, allocator.AllocatorStats],
) -> Iterator[FreedRow]:
    gone = [row for row in after.since(before) if row.change == "went"]
    for device in [*figures, *dict.fromkeys(row.device for row in gone if row.device not in figures)]:
        mine = [row for row in gone if row.device == device]
        if device in figures:
            allocated, left = figures[device].allocated, now[device].allocated
            yield FreedRow(device, allocated - left, len(mine), allocated, left)
        else:
            yield FreedRow(device, -sum(row.nbytes or 0 for row in mine), len(mine), None, None)
