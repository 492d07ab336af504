"""What lives around a failure once its frames are empty: what the cell works with, and where else there is room."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from gpumagic.oom.rules.facts import BatchSize, KeptGraph, Loader
from gpumagic.source.cell_code import CellCode, is_batch_name
from gpumagic.tensors import scan

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def kept_graphs(
    device: str,
    spare: AbstractSet[str],
    remade: AbstractSet[str],
    namespace: Mapping[str, object],
    shell: InteractiveShell | None,
) -> KeptGraph | None:
    """Return what the autograd graphs of variables keep on a device, and what lets go of it; None if they keep nothing.

    Args:
        device: such as ``"cuda:0"``.
        spare: names that may lose their graphs, of which one at least must keep each tensor.
        remade: names that may as well, since the cell binds them anew.
        namespace: the notebook's variables.
        shell: the shell they belong to.
    """
    totals: Counter[str] = Counter()
    for row in scan.scan(namespace, devices=(device,), shell=shell):
        if row.in_graph and row.frees:
            totals[row.frees] += row.nbytes or 0
    nbytes, names, statements = 0, frozenset[str](), dict[str, None]()
    for line, size in totals.items():
        parsed = ast.parse(line).body
        keeping = _assigned(parsed)
        if keeping & spare and keeping <= spare | remade:
            nbytes, names = nbytes + size, names | keeping
            statements |= dict.fromkeys(map(ast.unparse, parsed))
    return KeptGraph(names, nbytes, "\n".join(statements)) if nbytes else None


def _assigned(statements: Iterable[ast.stmt]) -> frozenset[str]:
    """Return the variables that assignments change, or change something in."""
    targets = [target for each in statements if isinstance(each, ast.Assign) for target in each.targets]
    return frozenset(node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name))


def batch_sizes(cell: CellCode, names: Iterable[str], namespace: Mapping[str, object]) -> tuple[BatchSize, ...]:
    """Return the batch sizes the cell works with: its literals, then variables it uses, then DataLoaders."""
    found = [BatchSize(literal.name, literal.value, literal.line) for literal in cell.batches]
    written = {literal.name for literal in cell.batches}
    for name in sorted(set(names) - written):
        value = namespace[name]
        if is_batch_name(name) and type(value) is int and value > 1:
            found.append(BatchSize(name, value))
    if not found:  # a loader says no more than the number it was made with
        found += [BatchSize(each.name, each.batch_size, loader=True) for each in loaders(names, namespace)]
    return tuple(found)


def loaders(names: Iterable[str], namespace: Mapping[str, object]) -> tuple[Loader, ...]:
    """Return the DataLoaders among these names that make batches of more than one."""
    from torch.utils import data

    found = []
    for name in sorted(names):
        value: Any = namespace[name]
        if issubclass(type(value), data.DataLoader) and isinstance(value.batch_size, int) and value.batch_size > 1:
            shuffles = type(value.sampler) is data.RandomSampler
            found.append(
                Loader(
                    name, value.batch_size, value.num_workers, shuffles, bool(value.pin_memory), bool(value.drop_last),
                    samples=type(value.sampler) not in (data.RandomSampler, data.SequentialSampler),
                )
            )  # fmt: skip
    return tuple(found)


def names_of_device(device: str, names: Iterable[str], namespace: Mapping[str, object]) -> tuple[str, ...]:
    """Return which of these variables say ``"cuda:0"`` or hold that `torch.device`."""
    import torch

    first = device.partition(":")[0] if device.endswith(":0") else device
    texts = [name for name in names if type(namespace[name]) in (str, torch.device)]
    return tuple(sorted(name for name in texts if str(namespace[name]) in (device, first)))


def settings() -> dict[str, bool]:
    """Return torch's switches that bear on memory and are on."""
    import torch

    return {"cudnn.benchmark": True} if torch.backends.cudnn.benchmark else {}


def other_devices(device: str) -> tuple[dict[str, int], int | None]:
    """Return the free bytes of the other devices of the same type, and what other processes hold on this one.

    Asks the driver's tools, not the devices: `mem_get_info` of a device not yet in use would create a context.
    """
    from gpumagic.gpus import probe

    rows = {row.device: row for row in probe.read_gpus() if row.device is not None}
    backend = device.partition(":")[0]
    free = {
        other: row.memory_free
        for other, row in rows.items()
        if other != device and other.partition(":")[0] == backend and row.memory_free is not None
    }
    return free, rows[device].other_processes if device in rows else None
