"""Who owns the memory of a device: the notebook's names, models and optimizers, and what each part is for.

A storage that two names reach is released only when both are unbound; bytes are therefore counted by the set of names
that share them, so that a `del` can be priced to the byte. Each name is followed by a search of its own, because one
search opens an object that two names share for the first of them only.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpumagic.heap import holders, readers
from gpumagic.heap.kinds import gradients_of
from gpumagic.heap.storages import Storage, StorageTable, undisturbed
from gpumagic.memory.segments import OccupiedBytes
from gpumagic.oom.report import CUBLAS, WORKSPACE, Share
from gpumagic.oom.rules.facts import Model, Optimizer, Ownership
from gpumagic.report.base import Holder
from gpumagic.source import frames
from gpumagic.tensors import scan
from gpumagic.tensors.report import TensorRow, root_of

if TYPE_CHECKING:
    from gpumagic.heap.holders import Search
    from gpumagic.memory.allocator import AllocatorStats


FRAMES = "(failed frames)"
"""Stands among the names for the frames of an error that are kept."""


def by_names(namespace: Mapping[str, object], device: str, shell: object | None = None) -> list[Ownership]:
    """Return the ownerships of the notebook's variables and displayed values on a device, largest first."""
    roots = [*holders.variables(namespace, shell), *_outputs(namespace, shell)]
    return _ownerships(roots, namespace, device, shell)


def in_frames(error: BaseException, namespace: Mapping[str, object], device: str, outside: Collection[int] = ()) -> int:
    """Return the bytes on a device that only the frames of an error reach; graphs may hold more, unseen."""
    locals_ = [each for frame, _ in frames.frames_in(error, outside) for _, each in readers.variables_of(frame)]
    roots = [*holders.variables(namespace, None), (FRAMES, locals_)]
    return released(_ownerships(roots, namespace, device, None), [FRAMES])


def released(ownerships: Iterable[Ownership], names: Iterable[str]) -> int:
    """Return the bytes that unbinding all these names together releases."""
    gone = frozenset(names)
    return sum(each.nbytes for each in ownerships if each.names <= gone)


def outputs(ownerships: Iterable[Ownership]) -> set[str]:
    """Return the entries of the output cache among the ownerships, such as ``"Out[3]"``."""
    return {name for each in ownerships for name in each.names if name.startswith("Out[")}


def rows(ownerships: Iterable[Ownership], device: str, workspaces: int = 0) -> tuple[Holder, ...]:
    """Return the ownerships as rows of a report, largest first; names that share storages stand in one row.

    `workspaces` are the bytes that torch keeps for cuBLAS.
    """
    found = [Holder(", ".join(sorted(each.names)), device, each.nbytes, each.kind) for each in ownerships]
    found += [Holder(CUBLAS, device, workspaces, WORKSPACE)] if workspaces else []
    return tuple(sorted(found, key=lambda each: -each.nbytes))


def _outputs(namespace: Mapping[str, object], shell: object | None) -> Iterator[tuple[str, object]]:
    """Yield the displayed values, one that was displayed twice only once: `%xdel` clears both."""
    seen: set[int] = set()
    for name, value in holders.hidden_roots(namespace, shell):
        if name.startswith("Out[") and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _ownerships(
    roots: Iterable[tuple[str, object]], namespace: Mapping[str, object], device: str, shell: object | None
) -> list[Ownership]:
    table, reached, kinds = StorageTable(), dict[Storage, set[str]](), dict[str, str]()
    for name, value in roots:
        search = holders.tensor_search(namespace, shell)
        try:
            with undisturbed():
                for storage in _storages(search, name, value, table):
                    reached.setdefault(storage, set()).add(name)
                    kinds[name] = kind_of(value)
        finally:
            search.release()
    occupied = OccupiedBytes()
    totals: dict[frozenset[str], int] = {}
    for storage, names in reached.items():
        if storage.device == device and storage.nbytes:
            key = frozenset(names)
            totals[key] = totals.get(key, 0) + occupied.of(device, storage.address, storage.nbytes)
    found = [Ownership(names, nbytes, kinds[min(names)]) for names, nbytes in totals.items()]
    return sorted(found, key=lambda each: (-each.nbytes, sorted(each.names)))


def _storages(search: Search, name: str, value: object, table: StorageTable) -> Iterator[Storage]:
    search.run([(name, value)])
    tensors = list(search.tensors.values())
    for tensor in (*tensors, *gradients_of(tensors)):
        storage, parts = table.find(tensor)
        yield from parts or [storage]


def kind_of(value: object) -> str:
    """Return what a value is to a reader: "module", "optimizer", "tensor", or its type's name."""
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    kind = type(value)
    named = {torch.nn.Module: "module", torch.optim.Optimizer: "optimizer", torch.Tensor: "tensor"}
    return next((word for base, word in named.items() if issubclass(kind, base)), kind.__name__)


PURPOSES = {
    "parameter": "parameters", "buffer": "buffers", "gradient": "gradients",
    "optimizer state": "optimizer state", "activation": "activations",
}  # fmt: skip
"""What a kind of tensor is counted under, whoever names it."""

NAMES = 3
"""How many names of each part are kept."""


def find_shares(
    namespace: Mapping[str, object], bound: Mapping[str, int], device: str, shell: object | None,
    figures: AllocatorStats | None,
) -> tuple[Share, ...]:  # fmt: skip
    """Return what the bytes of a device are for, largest first, then what the allocator kept for reuse.

    `bound` is ``{name: id of its value}`` when the cell began; `figures` is None for an allocator that does not count.
    """
    report = scan.scan(namespace, shell=shell)
    rows = [row for row in report if row.device == device and row.nbytes]
    parts: dict[str, list[TensorRow]] = {}
    for row in sorted(rows, key=lambda each: -(each.nbytes or 0)):
        parts.setdefault(_part(row, namespace, bound), []).append(row)
    found = [Share(what, sum(row.nbytes or 0 for row in those), _names(those)) for what, those in parts.items()]
    kept = sum(row.workspaces or 0 for row in report.by_device if row.device == device)
    found += [Share("cuBLAS workspaces", kept)] if kept else []
    if figures is not None:
        unseen = figures.allocated - sum(share.nbytes for share in found)
        found += [Share("what had no name (graphs, C++, unfinished lists)", unseen)] if unseen > 0 else []
    found.sort(key=lambda share: -share.nbytes)
    cached = figures.reserved - figures.allocated if figures is not None else 0
    return (*found, Share("cache", cached)) if cached > 0 else tuple(found)


def _part(row: TensorRow, namespace: Mapping[str, object], bound: Mapping[str, int]) -> str:
    if row.kind in PURPOSES:
        return PURPOSES[row.kind]
    if row.name is not None:
        roots = {root_of(name) for name in row.names}
        old = any(root in bound and bound[root] == id(namespace.get(root)) for root in roots)
        return "names of earlier cells" if old else "names of this cell"
    if row.holder is not None and row.holder.startswith("Out["):
        return "outputs"
    return "variables of failed functions"


def _names(rows: Iterable[TensorRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(root_of(row.name) for row in rows if row.name is not None))[:NAMES]


Named = Iterable[tuple[str, object, bool]]
"""``(name, value, whether only a function's variable names it)``."""


def find_models(named: Named, device: str) -> tuple[Model, ...]:
    """Return the modules among these that have parameters on the device, largest first, each once."""
    import torch

    found: dict[int, Model] = {}
    for name, value, local in named:
        if issubclass(type(value), torch.nn.Module) and id(value) not in found:
            module: Any = value
            made = [each for each in module.parameters() if not torch.nn.parameter.is_lazy(each)]
            here = [each for each in made if str(each.device) == device]
            if here:
                found[id(value)] = _model(name, module, here, local=local)
    return tuple(sorted(found.values(), key=lambda model: -model.nbytes))


def find_optimizers(named: Named, device: str) -> tuple[Optimizer, ...]:
    """Return the optimizers among these with parameters on the device."""
    import torch

    found: dict[int, Optimizer] = {}
    for name, value, local in named:
        if issubclass(type(value), torch.optim.Optimizer) and id(value) not in found:
            optimizer: Any = value
            here = [each for group in optimizer.param_groups for each in group["params"] if str(each.device) == device]
            if here:
                found[id(value)] = _optimizer(name, optimizer, here, local=local)
    return tuple(found.values())


def progress(modules: list[Any]) -> float | None:
    """Return how far the innermost of nested running modules stands among all leaves of the outermost, 0 to 1."""
    if len(modules) < 2:
        return None
    leaves = [each for each in modules[0].modules() if not any(each.children())]
    inside = {id(each) for each in modules[-1].modules()}
    place = next((i for i, leaf in enumerate(leaves) if id(leaf) in inside), None)
    return None if place is None or len(leaves) < 2 else (place + 1) / len(leaves)


def _model(name: str, module: Any, parameters: list[Any], *, local: bool) -> Model:
    import torch

    blocks, depth, leaves = _blocks(name, module)
    return Model(
        name=name,
        nbytes=sum(each.nbytes for each in parameters),
        float32_nbytes=sum(each.nbytes for each in parameters if each.dtype == torch.float32),
        training=module.training,
        checkpoints=_checkpoints(module),
        gradients=sum(each.nbytes for each in gradients_of(parameters)),
        blocks=blocks,
        depth=depth,
        leaves_in_block=leaves,
        sequential=issubclass(type(module), torch.nn.Sequential),
        local=local,
    )


def _checkpoints(module: Any) -> bool | None:
    """Return whether a module recomputes activations; None where neither a switch nor a wrapped forward tells."""
    if any(_is_wrapped(each) for each in module.modules()):
        return True
    switch = getattr(module, "is_gradient_checkpointing", None)
    if isinstance(switch, bool):
        return switch
    return False if callable(getattr(type(module), "gradient_checkpointing_enable", None)) else None


def _is_wrapped(module: Any) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and getattr(forward.func, "__name__", "") == "checkpoint"


def _blocks(name: str, module: Any) -> tuple[str | None, int, int]:
    """Return code for the longest list of like children with layers of their own, its length, and their layers."""
    import torch

    best: tuple[str | None, int, int] = (None, 0, 0)
    for path, child in module.named_modules():
        if not issubclass(type(child), torch.nn.ModuleList | torch.nn.Sequential):
            continue
        blocks = list(child)
        if len(blocks) > max(best[1], 1) and len({type(each) for each in blocks}) == 1 and any(blocks[0].children()):
            leaves = sum(not any(each.children()) for each in blocks[0].modules())
            best = (_code(name, path), len(blocks), leaves)
    return best


def _code(name: str, path: str) -> str:
    parts = [f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".") if part]
    return name + "".join(parts)


def _optimizer(name: str, optimizer: Any, parameters: list[Any], *, local: bool) -> Optimizer:
    own = {id(each) for each in parameters}
    states: list[Mapping[str, Any]] = [dict(state) for each, state in optimizer.state.items() if id(each) in own]
    return Optimizer(
        name=name,
        kind=type(optimizer).__name__,
        nbytes=sum(each.nbytes for each in parameters),
        state=sum(value.nbytes for state in states for value in _state_tensors(state)),
        foreach=optimizer.defaults.get("foreach"),
        fused=optimizer.defaults.get("fused"),
        local=local,
    )


def _state_tensors(state: Mapping[str, Any]) -> Iterator[Any]:
    import torch

    for value in state.values():
        if issubclass(type(value), torch.Tensor) and value.numel() > 1:
            yield value
