"""Who owns the memory of a device: the notebook's names, models and optimizers, and what each part is for.

A storage that two names reach is released only when both are unbound; bytes are therefore counted by the set of names
that share them, so that a `del` can be priced to the byte.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpumagic._compat import torch_private
from gpumagic.advice.facts import SAVING_METHODS, Model, Optimizer, Ownership
from gpumagic.heap import branches, holders, kinds
from gpumagic.heap.graph import MAX_STEPS_OF_ALL, HeapGraph
from gpumagic.heap.storages import Storage, StorageTable, plain, undisturbed
from gpumagic.memory.segments import OccupiedBytes
from gpumagic.report.units import LARGE

UNEVEN = (("BatchNorm", "batch norm"), ("Dropout", "dropout"))
"""Parts of the names of layers' classes, and what the layers are called."""


def by_names(
    namespace: Mapping[str, object], device: str, shell: object | None = None
) -> list[Ownership]:
    """Return the ownerships of the notebook's variables and displayed values on a device, largest first."""
    # A value that was displayed twice counts once: `%xdel` clears both.
    outputs: dict[int, tuple[str, object]] = {}
    for holder, value in holders.hidden_roots(namespace, shell):
        if holder.kind == "output":
            outputs.setdefault(id(value), (holder.name, value))
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
    found = [
        Ownership(names, nbytes, kind_of(named[min(names)])) for names, nbytes in totals.items()
    ]
    return sorted(found, key=lambda each: (-each.nbytes, sorted(each.names)))


def kind_of(value: object) -> str:
    """Return what a value is to a reader: "module", "optimizer", "tensor", or its type's name.

    "parameter" is a tensor of which no copy is the same: gradients come to it alone.
    """
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    kind: Any = type(value)
    if issubclass(kind, torch.Tensor):
        with undisturbed():
            return (
                "parameter"
                if plain(value, "requires_grad") and plain(value, "is_leaf")
                else "tensor"
            )
    named = {torch.nn.Module: "module", torch.optim.Optimizer: "optimizer"}
    return next(
        (word for base, word in named.items() if issubclass(kind, base)),
        branches.name_of_type(kind),
    )


class Variable(NamedTuple):
    """A value by one of its names."""

    name: str
    value: object
    is_local: bool = False
    """Whether only a function's variable has that name."""


def find_models_and_optimizers(
    variables: list[Variable], device: str
) -> tuple[tuple[Model, ...], tuple[Optimizer, ...]]:
    """Return the modules with parameters on the device, largest first, and the optimizers of such; each once."""
    models, names_by_parameter = _find_models(variables, device)
    return models, _find_optimizers(variables, device, names_by_parameter)


def _find_models(
    variables: list[Variable], device: str
) -> tuple[tuple[Model, ...], dict[int, set[str]]]:
    """Return the modules on the device, and for the id of each parameter the names of the modules that have it."""
    import torch

    models: dict[int, Model] = {}
    names_by_parameter: dict[int, set[str]] = {}
    for name, value, is_local in variables:
        if not issubclass(type(value), torch.nn.Module):
            continue
        inside = list(kinds.modules_in(value))
        parameters: dict[int, Any] = {}
        for _, module in inside:
            for _, parameter in kinds.registered(module, torch_private.PARAMETERS):
                parameters[id(parameter)] = parameter
        for key in parameters:
            names_by_parameter.setdefault(key, set()).add(name)
        here = _on_device(parameters.values(), device)
        methods = tuple(
            method
            for method in SAVING_METHODS
            if branches.class_attribute(type(value), method) is not None
        )
        is_metric = SAVING_METHODS[-1] in methods  # it has no parameters
        if (here or is_metric) and id(value) not in models:
            models[id(value)] = _model(name, inside, here, methods, local=is_local)
    by_size = sorted(models.values(), key=lambda model: -model.nbytes)
    return tuple(by_size), names_by_parameter


def _find_optimizers(
    variables: list[Variable], device: str, names_by_parameter: Mapping[int, set[str]]
) -> tuple[Optimizer, ...]:
    """Return the optimizers of parameters on the device, with the names of the modules that have these."""
    import torch

    optimizers: dict[int, Optimizer] = {}
    for name, value, is_local in variables:
        if not issubclass(type(value), torch.optim.Optimizer):
            continue
        optimizer = kinds.unwrapped(value)
        if id(optimizer) in optimizers:
            continue
        groups = kinds.parameter_groups(optimizer)
        here = _on_device((parameter for group in groups for parameter in group["params"]), device)
        if here:
            updated = set[str]()
            for parameter in here:
                updated |= names_by_parameter.get(id(parameter), set())
            optimizers[id(optimizer)] = _optimizer(
                name, optimizer, here, frozenset(updated), local=is_local
            )
    return tuple(optimizers.values())


def tensors_of(owner: Any) -> list[Any]:
    """Return the parameters and the buffers of a module, or the state of an optimizer."""
    if kind_of(owner) == "optimizer":
        state = branches.attributes_of(kinds.unwrapped(owner)).get("state")
        each_of = dict.values(state) if isinstance(state, dict) else ()
        return [value for each in each_of if isinstance(each, dict) for value in dict.values(each)]
    found = []
    for _, module in kinds.modules_in(owner):
        for kind in (torch_private.PARAMETERS, torch_private.BUFFERS):
            found += [tensor for _, tensor in kinds.registered(module, kind)]
    return found


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


def _model(
    name: str,
    inside: list[tuple[str, Any]],
    parameters: list[Any],
    methods: tuple[str, ...],
    *,
    local: bool,
) -> Model:
    """Return what is known of a module, which is the first of those `inside` it with their paths."""
    import torch

    (_, module), layers = inside[0], {branches.name_of_type(type(each)) for _, each in inside}
    with undisturbed():
        frozen = not any(plain(each, "requires_grad") for each in parameters)
        gradients = [
            each for each in kinds.gradients_of(parameters) if each.layout is torch.strided
        ]
    weights = (
        (
            path,
            [
                weight
                for label, weight in kinds.registered(each, torch_private.PARAMETERS)
                if label == "weight"
            ],
        )
        for path, each in inside
        if issubclass(type(each), torch.nn.Embedding | torch.nn.EmbeddingBag)
        and not branches.attributes_of(each).get("sparse")
    )
    return Model(
        name,
        _nbytes(parameters),
        _nbytes(parameters, torch.float32),
        frozen=frozen,
        gradient_nbytes=_nbytes(gradients),
        training=bool(branches.attributes_of(module).get("training")),
        checkpoints=_checkpoints(inside),
        blocks=_blocks(name, inside),
        local=local,
        saving_methods=methods,
        embeddings=tuple(
            _code(name, path, inside) for path, weight in weights if _nbytes(weight) >= LARGE
        ),
        sequential=issubclass(type(module), torch.nn.Sequential),
        writes_in_place=any(
            branches.attributes_of(each).get("inplace") is True for _, each in inside
        ),
        uneven_layers=tuple(word for part, word in UNEVEN if any(part in each for each in layers)),
    )


def _checkpoints(inside: list[tuple[str, Any]]) -> bool | None:
    """Return whether a module recomputes activations; None where neither a switch nor a wrapped forward tells."""
    stored = [branches.attributes_of(each) for _, each in inside]
    forwards = [each.get("forward") for each in stored]
    if any(
        type(each) is functools.partial and getattr(each.func, "__name__", "") == "checkpoint"
        for each in forwards
    ):
        return True
    # The libraries' own switches lie in each module that can checkpoint; transformers and diffusers, then timm
    names = ("gradient_checkpointing", "grad_checkpointing")
    switches = [each[name] for each in stored for name in names if type(each.get(name)) is bool]
    return any(switches) if switches else None


def _blocks(name: str, inside: list[tuple[str, Any]]) -> str | None:
    """Return code for the longest list of like children with layers of their own, or for all of the module's."""
    import torch

    best, longest = None, 1
    for path, child in inside:
        blocks = [each for _, each in kinds.registered(child, torch_private.MODULES)]
        if len(blocks) > longest and issubclass(
            type(child), torch.nn.ModuleList | torch.nn.Sequential
        ):
            is_of_one_kind = all(type(each) is type(blocks[0]) for each in blocks)
            if is_of_one_kind and any(kinds.registered(blocks[0], torch_private.MODULES)):
                best, longest = _code(name, path, inside), len(blocks)
    children = [each for _, each in kinds.registered(inside[0][1], torch_private.MODULES)]
    if (
        best is None
        and sum(any(kinds.registered(each, torch_private.MODULES)) for each in children) > 1
    ):
        return f"{name}.children()"
    return best


def _code(name: str, path: str, inside: list[tuple[str, Any]]) -> str:
    """Return the code for a module inside another: ``net.layers[0].mlp``, of a `ModuleDict` ``net["0"]``."""
    import torch

    above, modules = "", dict(inside)
    for part in path.split(".") if path else ():
        is_key = issubclass(type(modules[above]), torch.nn.ModuleDict)
        name += f'["{part}"]' if is_key else f"[{part}]" if part.isdecimal() else f".{part}"
        above = f"{above}.{part}" if above else part
    return name


def _optimizer(
    name: str, optimizer: Any, parameters: list[Any], models: frozenset[str], *, local: bool
) -> Optimizer:
    import torch

    own, stored = {id(each) for each in parameters}, branches.attributes_of(optimizer)
    kept, defaults = (
        each if isinstance(each, dict) else {} for each in map(stored.get, ("state", "defaults"))
    )
    states: list[Any] = [
        state for each, state in dict.items(kept) if id(each) in own and isinstance(state, dict)
    ]
    tensors = (
        value
        for state in states
        for value in dict.values(state)
        if issubclass(type(value), torch.Tensor)
        and torch_private.TENSOR_BASE.get().numel(value) > 1
    )
    return Optimizer(
        name,
        branches.name_of_type(type(optimizer)),
        _nbytes(parameters),
        state_nbytes=_nbytes(tensors),
        fused=dict.get(defaults, "fused"),
        local=local,
        models=models,
    )
