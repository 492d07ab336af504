"""Releases what only the session keeps: outputs, the display hook, the last error; nothing of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gpumagic.heap import holders, outputs
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

    Args:
        namespace: the notebook's variables; none of them changes.
        shell: the shell they belong to; without one only Python's own last error is looked at.
    """
    with gc_disabled():  # what is freed has to be what was released, not what a collection found
        before = scan.scan(namespace, shell=shell, thorough=True)
        figures = allocator.all_device_stats()
        wanted = {number for row in before if row.releasable for number in row.numbers}
        released = _forget(wanted, namespace, shell) if wanted else ()
        now = allocator.all_device_stats()
        after = scan.scan(namespace, shell=shell, thorough=True)
    return FreedReport(tuple(_freed(before, after, figures, now)), released, after.leaks(), after.notes)


def _forget(wanted: set[int], namespace: Mapping[str, object], shell: InteractiveShell | None) -> tuple[str, ...]:
    labels: list[str] = []
    if shell is not None:
        values = {}
        for label, value in outputs.shown_outputs(shell):
            if id(value) not in values and _reaches(value, wanted, namespace, shell):
                values[id(value)] = value
                labels.append(label)
        outputs.forget_outputs(shell, values)
        values.clear()
    if any(_reaches(each, wanted, namespace, shell) for each in outputs.remembered_errors(shell)):
        outputs.forget_last_error(namespace, shell)
        labels.append(holders.TRACEBACK)
    return tuple(labels)


def _reaches(value: object, wanted: set[int], namespace: Mapping[str, object], shell: InteractiveShell | None) -> bool:
    """Tell whether a value keeps one of the storages with these numbers, itself or by an autograd graph."""
    search, table, graphs = holders.tensor_search(namespace, shell), StorageTable(), Graphs()
    try:
        with undisturbed():
            search.run([("it", value)])
            tensors = list(search.tensors.values())
            for result in non_leaves(tensors):
                graph = graphs.walk(result.grad_fn)
                tensors += graph.tensors if graph is not None else ()
            return any(not wanted.isdisjoint(table.numbers(tensor)) for tensor in tensors)
    finally:
        graphs.release()
        search.release()


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
