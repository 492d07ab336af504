"""Who owns the memory of a device: the notebook's names, models and optimizers, and what each part is for.

A storage that two names reach is released only when both are unbound; bytes are therefore counted by the set of names
that share them, so that a `del` can be priced to the byte.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gpumagic.heap import branches, holders, kinds
from gpumagic.heap.graph import MAX_STEPS_OF_ALL, HeapGraph
from gpumagic.heap.storages import Storage, StorageTable, plain, undisturbed
from gpumagic.memory.segments import OccupiedBytes
from gpumagic.oom.rules.facts import SAVING_METHODS, Model, Optimizer, Ownership
from gpumagic.report.units import LARGE

UNEVEN = (("BatchNorm", "batch norm"), ("Dropout", "dropout"))
"""Parts of the names of layers' classes, and what the layers are called."""


def by_names(namespace: Mapping[str, object], device: str, shell: object | None = None) -> list[Ownership]:
    """Return the ownerships of the notebook's variables and displayed values on a device, largest first."""
    # A value that was displayed twice counts once: `%xdel` clears both.
    outputs: dict[int, tuple[str, object]] = {}
    for name, value in holders.hidden_roots(namespace, shell):
        if name.startswith("Out["):
            outputs.setdefault(id(value), (name, value))
    named = dict([*holders.variables(namespace, shell), *outputs.values()])
    table, reached = StorageTable(), dict[Storage, set[str]]()
    graph = HeapGraph(holders.excluded_objects(namespace, shell), MAX_STEPS_OF_ALL)
    try:
        with undisturbed():
            graph.explore(named.items())
            for target, roots in graph.roots_of().items():
                tensor = graph.tensors[target]
                for each in (tensor, *kinds.gradients_of([tensor])):
                    storage, parts = table.find(each)
                    for part in parts or [storage]:
                        reached.setdefault(part, set()).update(roots)
    finally:
        graph.release()
    occupied, totals = OccupiedBytes(), Counter[frozenset[str]]()
    for storage, names in reached.items():
        if storage.device == device and storage.nbytes:
            totals[frozenset(names)] += occupied.of(device, storage.address, storage.nbytes)
    found = [Ownership(names, nbytes, kind_of(named[min(names)])) for names, nbytes in totals.items()]
    return sorted(found, key=lambda each: (-each.nbytes, sorted(each.names)))


def kind_of(value: object) -> str:
    """Return what a value is to a reader: "module", "optimizer", "tensor", or its type's name."""
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    kind = type(value)
    named = {torch.nn.Module: "module", torch.optim.Optimizer: "optimizer", torch.Tensor: "tensor"}
    return next((word for base, word in named.items() if issubclass(kind, base)), branches.name_of_type(kind))


def find_models_and_optimizers(
    known: list[tuple[str, object, bool]], device: str
) -> tuple[tuple[Model, ...], tuple[Optimizer, ...]]:
    """Return the modules with parameters on the device, largest first, and the optimizers of such; each once.

    `known` are names, values, and whether only a function's variable has that name.
    """
    import torch

    models: dict[int, Model] = {}
    optimizers: dict[int, Optimizer] = {}
    having: dict[int, set[str]] = {}  # the names of the modules that have a parameter, by its id
    for name, value, local in known:
        if issubclass(type(value), torch.nn.Module):
            registered = [kinds.registered(each, "_parameters") for _, each in kinds.modules_in(value)]
            parameters = list({id(each): each for own in registered for _, each in own}.values())
            for each in parameters:
                having.setdefault(id(each), set()).add(name)
            here = _on_device(parameters, device)
            is_metric = branches.class_attribute(type(value), SAVING_METHODS[-1]) is not None  # it has no parameters
            if (here or is_metric) and id(value) not in models:
                models[id(value)] = _model(name, value, here, local=local)
    for name, value, local in known:
        optimizer = kinds.unwrapped(value) if issubclass(type(value), torch.optim.Optimizer) else None
        if optimizer is not None and id(optimizer) not in optimizers:
            groups = kinds.parameter_groups(optimizer)
            here = _on_device((each for group in groups for each in group["params"]), device)
            if here:
                updated = frozenset[str]().union(*(having.get(id(each), ()) for each in here))
                optimizers[id(optimizer)] = _optimizer(name, optimizer, here, updated, local=local)
    return tuple(sorted(models.values(), key=lambda model: -model.nbytes)), tuple(optimizers.values())


def tensors_of(owner: Any) -> list[Any]:
    """Return the parameters and the buffers of a module, or the state of an optimizer."""
    if kind_of(owner) == "optimizer":
        state = branches.attributes_of(kinds.unwrapped(owner)).get("state")
        each_of = dict.values(state) if isinstance(state, dict) else ()
        return [value for each in each_of if isinstance(each, dict) for value in dict.values(each)]
    inside = [(each, kind) for _, each in kinds.modules_in(owner) for kind in ("_parameters", "_buffers")]
    return [tensor for each, kind in inside for _, tensor in kinds.registered(each, kind)]


def _on_device(tensors: Iterable[Any], device: str) -> list[Any]:
    import torch

    lazy: Any = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined, unused-ignore]
    made = [each for each in tensors if not issubclass(type(each), lazy)]
    with undisturbed():
        return [each for each in made if str(plain(each, "device")) == device]


def _nbytes(tensors: Iterable[Any], dtype: object = None) -> int:
    with undisturbed():
        counted = (each for each in tensors if dtype is None or plain(each, "dtype") == dtype)
        return sum(int(plain(each, "nbytes")) for each in counted)


def _model(name: str, module: Any, parameters: list[Any], *, local: bool) -> Model:
    import torch

    layers = {branches.name_of_type(type(each)) for _, each in kinds.modules_in(module)}
    with undisturbed():
        frozen = not any(plain(each, "requires_grad") for each in parameters)
        gradients = [each for each in kinds.gradients_of(parameters) if each.layout is torch.strided]
    return Model(
        name, _nbytes(parameters), _nbytes(parameters, torch.float32), frozen=frozen, gradients=_nbytes(gradients),
        training=bool(branches.attributes_of(module).get("training")), checkpoints=_checkpoints(module),
        blocks=_blocks(name, module), embeddings=_embeddings(name, module),
        sequential=issubclass(type(module), torch.nn.Sequential), local=local,
        uneven=tuple(word for part, word in UNEVEN if any(part in each for each in layers)),
        methods=tuple(each for each in SAVING_METHODS if branches.class_attribute(type(module), each) is not None),
    )  # fmt: skip


def _checkpoints(module: Any) -> bool | None:
    """Return whether a module recomputes activations; None where neither a switch nor a wrapped forward tells."""
    inside = [branches.attributes_of(each) for _, each in kinds.modules_in(module)]
    forwards = [each.get("forward") for each in inside]
    if any(type(each) is functools.partial and getattr(each.func, "__name__", "") == "checkpoint" for each in forwards):
        return True
    # The libraries' own switches lie in each module that can checkpoint; transformers and diffusers, then timm
    names = ("gradient_checkpointing", "grad_checkpointing")
    switches = [each[name] for each in inside for name in names if type(each.get(name)) is bool]
    return any(switches) if switches else None


def _blocks(name: str, module: Any) -> str | None:
    """Return code for the longest list of like children with layers of their own, or for all of the module's."""
    import torch

    best, longest = None, 1
    for path, child in kinds.modules_in(module):
        if not issubclass(type(child), torch.nn.ModuleList | torch.nn.Sequential):
            continue
        blocks = [each for _, each in kinds.registered(child, "_modules")]
        is_of_one_kind = all(type(each) is type(blocks[0]) for each in blocks)
        if len(blocks) > longest and is_of_one_kind and any(kinds.registered(blocks[0], "_modules")):
            best, longest = _code(name, path), len(blocks)
    children = [each for _, each in kinds.registered(module, "_modules")]
    if best is None and sum(any(kinds.registered(each, "_modules")) for each in children) > 1:
        return f"{name}.children()"
    return best


def _code(name: str, path: str) -> str:
    """Return the code for a module inside another: ``net.layers[0].mlp``."""
    return name + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".") if part)


def _embeddings(name: str, module: Any) -> tuple[str, ...]:
    """Return code for the large embeddings whose gradients are as large as they are."""
    import torch

    found = []
    for path, each in kinds.modules_in(module):
        if issubclass(type(each), torch.nn.Embedding | torch.nn.EmbeddingBag):
            weight = dict(kinds.registered(each, "_parameters")).get("weight")
            is_sparse = branches.attributes_of(each).get("sparse")
            found += [_code(name, path)] if weight is not None and not is_sparse and _nbytes([weight]) >= LARGE else []
    return tuple(found)


def _optimizer(
    name: str, optimizer: Any, parameters: list[Any], models: frozenset[str], *, local: bool
) -> Optimizer:  # fmt: skip
    import torch

    own = {id(each) for each in parameters}
    stored = branches.attributes_of(optimizer)
    kept, defaults = stored.get("state"), stored.get("defaults")
    items = dict.items(kept) if isinstance(kept, dict) else ()
    states: list[Any] = [state for each, state in items if id(each) in own and isinstance(state, dict)]
    defaults = defaults if isinstance(defaults, dict) else {}
    return Optimizer(
        name=name,
        kind=branches.name_of_type(type(optimizer)),
        nbytes=_nbytes(parameters),
        state=_nbytes(
            value for state in states for value in dict.values(state)
            if issubclass(type(value), torch.Tensor) and torch._C.TensorBase.numel(value) > 1
        ),
        fused=dict.get(defaults, "fused"),
        local=local,
        models=models,
    )  # fmt: skip
