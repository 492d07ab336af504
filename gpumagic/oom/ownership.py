"""Who owns the memory of a device: the notebook's names, models and optimizers, and what each part is for.

A storage that two names reach is released only when both are unbound; bytes are therefore counted by the set of names
that share them, so that a `del` can be priced to the byte.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpumagic._compat import torch_private
from gpumagic.advice.facts import (
    METRIC_METHOD,
    SAVING_METHODS,
    Model,
    Optimizer,
    Ownership,
)
from gpumagic.heap import branches, holders, kinds
from gpumagic.heap.graph import MAX_STEPS_OF_ALL, HeapGraph
from gpumagic.heap.storages import Storage, StorageTable, plain, undisturbed
from gpumagic.memory.segments import OccupiedBytes
from gpumagic.report.units import LARGE

UNEVEN = (("BatchNorm", "batch norm"), ("Dropout", "dropout"))
"""Parts of the names of layers' classes, and what the layers are called."""

_CHECKPOINTING_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")
"""The libraries' own switches, which lie in each module that can checkpoint: of transformers and diffusers, of timm."""


def by_names(
    namespace: Mapping[str, object], device: str, shell: object | None = None
) -> list[Ownership]:
    """Return the ownerships of the notebook's variables and displayed values on a device, largest first."""
    named = dict(holders.variables(namespace, shell))
    named.update(displayed(namespace, shell))
    names_of: dict[Storage, set[str]] = {}
    table = StorageTable()
    graph = HeapGraph(holders.excluded_objects(namespace, shell), MAX_STEPS_OF_ALL)
    try:
        with undisturbed():
            graph.explore(named.items())
            for target, names in graph.roots_of().items():
                tensor = graph.tensors[target]
                for kept in (tensor, *kinds.gradients_of([tensor])):
                    storage, parts = table.find(kept)
                    for part in parts or [storage]:
                        names_of.setdefault(part, set()).update(names)
    finally:
        graph.release()
    occupied = OccupiedBytes()
    totals: Counter[frozenset[str]] = Counter()
    for storage, reaching in names_of.items():
        if storage.device == device and storage.nbytes:
            totals[frozenset(reaching)] += occupied.of(
                device, storage.address, storage.nbytes
            )
    owned = []
    for sharing, nbytes in totals.items():
        kind = kind_of(named[min(sharing)])
        owned.append(Ownership(sharing, nbytes, kind))
    return sorted(owned, key=lambda part: (-part.nbytes, sorted(part.names)))


def displayed(
    namespace: Mapping[str, object], shell: object | None
) -> dict[str, object]:
    """Return the values that IPython keeps since it showed them, by the first output that has them.

    A value that was displayed twice counts once: `%xdel` clears both.
    """
    outputs: dict[str, object] = {}
    seen = set[int]()
    for holder, value in holders.hidden_roots(namespace, shell):
        if holder.kind == "output" and id(value) not in seen:
            seen.add(id(value))
            outputs[holder.name] = value
    return outputs


def kind_of(value: object) -> str:
    """Return what a value is to a reader: "module", "optimizer", "tensor", or its type's name.

    "parameter" is a tensor of which no copy is the same: gradients come to it alone.
    """
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    kind: Any = type(value)
    if issubclass(kind, torch.nn.Module):
        return "module"
    if issubclass(kind, torch.optim.Optimizer):
        return "optimizer"
    if not issubclass(kind, torch.Tensor):
        return branches.name_of_type(kind)
    with undisturbed():
        gets_gradients = plain(value, "requires_grad") and plain(value, "is_leaf")
    return "parameter" if gets_gradients else "tensor"


class Variable(NamedTuple):
    """A value by one of its names."""

    name: str
    value: object
    is_local: bool = False
    """Whether only a function's variable has that name."""


class _Submodule(NamedTuple):
    """A module inside another, or that module itself, which comes first and has an empty path."""

    path: str
    """As `named_modules` of torch tells: ``"layers.0.mlp"``."""
    module: Any


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
    for variable in variables:
        module = variable.value
        if not issubclass(type(module), torch.nn.Module):
            continue
        inside = [_Submodule(*step) for step in kinds.modules_in(module)]
        parameters: dict[int, Any] = {}
        for submodule in inside:
            for parameter in _registered(submodule.module, torch_private.PARAMETERS):
                parameters[id(parameter)] = parameter
        for key in parameters:
            names_by_parameter.setdefault(key, set()).add(variable.name)
        here = _on_device(parameters.values(), device)
        # A metric has no parameters.
        is_metric = branches.class_attribute(type(module), METRIC_METHOD) is not None
        if (here or is_metric) and id(module) not in models:
            models[id(module)] = _read_model(variable, inside, here)
    by_size = sorted(models.values(), key=lambda model: -model.nbytes)
    return tuple(by_size), names_by_parameter


def _find_optimizers(
    variables: list[Variable], device: str, names_by_parameter: Mapping[int, set[str]]
) -> tuple[Optimizer, ...]:
    """Return the optimizers of parameters on the device, with the names of the modules that have these."""
    import torch

    optimizers: dict[int, Optimizer] = {}
    for variable in variables:
        if not issubclass(type(variable.value), torch.optim.Optimizer):
            continue
        optimizer = kinds.unwrapped(variable.value)
        if id(optimizer) in optimizers:
            continue
        parameters: list[Any] = []
        for group in kinds.parameter_groups(optimizer):
            parameters += group["params"]
        here = _on_device(parameters, device)
        if here:
            updated = set[str]()
            for parameter in here:
                updated |= names_by_parameter.get(id(parameter), set())
            optimizers[id(optimizer)] = _read_optimizer(
                variable, optimizer, here, frozenset(updated)
            )
    return tuple(optimizers.values())


def tensors_of(owner: Any) -> list[Any]:
    """Return the parameters and the buffers of a module, or the state of an optimizer."""
    tensors: list[Any] = []
    if kind_of(owner) == "optimizer":
        for _, state in _states(kinds.unwrapped(owner)):
            tensors += dict.values(state)
        return tensors
    for _, module in kinds.modules_in(owner):
        tensors += _registered(module, torch_private.PARAMETERS)
        tensors += _registered(module, torch_private.BUFFERS)
    return tensors


def _registered(module: object, kind: str) -> list[Any]:
    """Return the parameters, the buffers or the modules of a module alone."""
    return [value for _, value in kinds.registered(module, kind)]


def _states(optimizer: Any) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Yield each parameter of which an optimizer has a state, with that; states of another kind are left out."""
    states = branches.attributes_of(optimizer).get("state")
    if isinstance(states, dict):
        for parameter, state in dict.items(states):
            if isinstance(state, dict):
                yield parameter, state


def _on_device(tensors: Iterable[Any], device: str) -> list[Any]:
    import torch

    lazy: Any = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined, unused-ignore]
    made = [tensor for tensor in tensors if not issubclass(type(tensor), lazy)]
    with undisturbed():
        return [tensor for tensor in made if str(plain(tensor, "device")) == device]


def _nbytes(tensors: Iterable[Any]) -> int:
    with undisturbed():
        return sum(int(plain(tensor, "nbytes")) for tensor in tensors)


def _read_model(
    variable: Variable, inside: Sequence[_Submodule], parameters: Sequence[Any]
) -> Model:
    """Return what is known of a module.

    Args:
        variable: has the module.
        inside: the module and those in it.
        parameters: those of its parameters that are on the device.
    """
    import torch

    cls = type(variable.value)
    with undisturbed():
        frozen = not any(plain(parameter, "requires_grad") for parameter in parameters)
        in_float32 = [
            parameter
            for parameter in parameters
            if plain(parameter, "dtype") == torch.float32
        ]
        gradients = [
            gradient
            for gradient in kinds.gradients_of(parameters)
            if gradient.layout is torch.strided
        ]
    attributes = [branches.attributes_of(submodule.module) for submodule in inside]
    saving_methods = [
        method
        for method in SAVING_METHODS
        if branches.class_attribute(cls, method) is not None
    ]
    return Model(
        name=variable.name,
        nbytes=_nbytes(parameters),
        float32_nbytes=_nbytes(in_float32),
        training=bool(attributes[0].get("training")),
        checkpoints=_checkpoints(attributes),
        frozen=frozen,
        sequential=issubclass(cls, torch.nn.Sequential),
        writes_in_place=any(stored.get("inplace") is True for stored in attributes),
        blocks=_blocks(variable.name, inside),
        gradient_nbytes=_nbytes(gradients),
        embeddings=tuple(_large_embeddings(variable.name, inside)),
        local=variable.is_local,
        saving_methods=tuple(saving_methods),
        uneven_layers=tuple(_uneven_layers(inside)),
    )


def _large_embeddings(name: str, inside: Sequence[_Submodule]) -> Iterator[str]:
    """Yield the code for each large embedding in a module whose gradients are not sparse."""
    import torch

    for path, module in inside:
        if not issubclass(type(module), torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        weight = dict(kinds.registered(module, torch_private.PARAMETERS)).get("weight")
        is_sparse = branches.attributes_of(module).get("sparse")
        if weight is not None and not is_sparse and _nbytes([weight]) >= LARGE:
            yield _code(name, path, inside)


def _uneven_layers(inside: Iterable[_Submodule]) -> Iterator[str]:
    """Yield the kinds of layers in a module that compute another result of a part of the data."""
    classes = {branches.name_of_type(type(submodule.module)) for submodule in inside}
    for part, word in UNEVEN:
        if any(part in name for name in classes):
            yield word


def _checkpoints(attributes: Iterable[Mapping[str, Any]]) -> bool | None:
    """Return whether a module recomputes activations; None where neither a switch nor a wrapped forward tells.

    `attributes` are those of the module and of the modules in it.
    """
    switches: list[Any] = []
    for stored in attributes:
        if _is_checkpointed(stored.get("forward")):
            return True
        switches += (stored.get(name) for name in _CHECKPOINTING_SWITCHES)
    switches = [switch for switch in switches if type(switch) is bool]
    return any(switches) if switches else None


def _is_checkpointed(forward: Any) -> bool:
    """Return whether a module's own `forward` calls `torch.utils.checkpoint.checkpoint`."""
    if type(forward) is not functools.partial:
        return False
    return getattr(forward.func, "__name__", "") == "checkpoint"


def _blocks(name: str, inside: Sequence[_Submodule]) -> str | None:
    """Return code for the longest list of like children with layers of their own, or for all of the module's."""
    import torch

    longest: str | None = None
    most = 1
    for path, module in inside:
        if not issubclass(type(module), torch.nn.ModuleList | torch.nn.Sequential):
            continue
        blocks = _registered(module, torch_private.MODULES)
        if len(blocks) <= most:
            continue
        is_of_one_kind = all(type(block) is type(blocks[0]) for block in blocks)
        if is_of_one_kind and _has_layers(blocks[0]):
            longest = _code(name, path, inside)
            most = len(blocks)
    if longest is not None:
        return longest
    children = _registered(inside[0].module, torch_private.MODULES)
    with_layers = [child for child in children if _has_layers(child)]
    return f"{name}.children()" if len(with_layers) > 1 else None


def _has_layers(module: object) -> bool:
    return bool(kinds.registered(module, torch_private.MODULES))


def _code(name: str, path: str, inside: Sequence[_Submodule]) -> str:
    """Return the code for a module inside another: ``net.layers[0].mlp``, of a `ModuleDict` ``net["0"]``."""
    import torch

    if not path:
        return name
    modules = dict(inside)
    code = name
    above = ""
    for part in path.split("."):
        if issubclass(type(modules[above]), torch.nn.ModuleDict):
            code += f'["{part}"]'
        elif part.isdecimal():
            code += f"[{part}]"
        else:
            code += f".{part}"
        above = f"{above}.{part}" if above else part
    return code


def _read_optimizer(
    variable: Variable,
    optimizer: Any,
    parameters: Sequence[Any],
    models: frozenset[str],
) -> Optimizer:
    """Return what is known of an optimizer.

    Args:
        variable: has it, or a wrapper around it.
        optimizer: the optimizer itself.
        parameters: those of its parameters that are on the device.
        models: names of the modules that have these.
    """
    import torch

    numel = torch_private.TENSOR_BASE.get().numel
    ids = {id(parameter) for parameter in parameters}
    tensors: list[Any] = []
    for parameter, state in _states(optimizer):
        if id(parameter) in ids:
            values = [
                value
                for value in dict.values(state)
                if issubclass(type(value), torch.Tensor)
            ]
            tensors += (tensor for tensor in values if numel(tensor) > 1)
    defaults = branches.attributes_of(optimizer).get("defaults")
    return Optimizer(
        name=variable.name,
        kind=branches.name_of_type(type(optimizer)),
        nbytes=_nbytes(parameters),
        state_nbytes=_nbytes(tensors),
        fused=dict.get(defaults, "fused") if isinstance(defaults, dict) else None,
        local=variable.is_local,
        models=models,
    )
