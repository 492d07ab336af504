"""`--move`: move named variables to the device before the cell runs.

Names, contents and room are checked first, then every tensor is copied, as `Tensor.to` does; only then modules, leaves
and optimizers get the copies, and the names last. So a missing name or too little memory leaves the notebook as it
was; a module that raises as it takes its copies does not, and the error says what had been moved by then.

Containers are not changed: new ones are made around what moved, so that other references keep the old one.
"""

from __future__ import annotations

import collections
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

from gpumagic.errors import GpuMagicError, OptionError, nearest
from gpumagic.heap import branches, modules
from gpumagic.heap.storages import plain, undisturbed
from gpumagic.memory.devices import room
from gpumagic.notebook import session
from gpumagic.report.units import size
from gpumagic.transfers.log import direction
from gpumagic.transfers.report import TransferRow

CAUSE = "--move"


def check_names(names: Iterable[str], namespace: Mapping[str, Any]) -> None:
    """Raise what `relocate` raises for a name that is missing or holds nothing that could move, and move nothing."""
    for name in names:
        _load(name, namespace)


def relocate(names: Iterable[str], namespace: MutableMapping[str, Any], device: str) -> tuple[TransferRow, ...]:
    """Move variables to a device and return what moved, one row per variable and source device.

    A tensor's name is bound to its copy; a module stays the object it is and its optimizers, found in the namespace,
    follow with their state; lists, tuples, dicts and dataclasses are rebuilt around what moved. Two names of one object
    stay two names of one; two views of one memory become two tensors, as with `Tensor.to`.

    Args:
        names: variables of the namespace.
        namespace: where they are looked up and bound.
        device: a full torch name, such as ``"cuda:1"``.

    Raises:
        OptionError: a name is missing, or holds nothing that could move. Nothing has changed then.
        GpuMagicError: it does not fit, or something cannot be moved; the message says what has been moved, if anything.
    """
    names = list(dict.fromkeys(names))
    if device == "meta" and names:
        raise OptionError(f"{CAUSE}: meta tensors have no values, so moving {', '.join(names)} there would lose them")
    combined, tensors = load_all(names, namespace, device)
    nbytes, free = sum(_nbytes(tensor) for _, tensor in tensors), room(device)
    if free is not None and nbytes > free:
        need = f"{', '.join(names)} need{'s' if len(names) == 1 else ''} {size(nbytes)}"
        raise GpuMagicError(f"{CAUSE}: {need} on {device}, which has {size(free)} free; nothing was moved")
    moved, failure = _Moved(device), None
    try:
        moved.copy(tensors)
        moved.replace(combined, names, namespace)
    except Exception as error:  # from torch, a module or an optimizer: our error has its text
        failure = str(error).partition("\n")[0] or type(error).__name__
    finally:
        moved.copies.clear()  # an interrupt's traceback keeps this frame
    if failure is not None:  # out here: raised inside, it would keep that error, its frames and their tensors
        done = f"{moved.modules} of the modules had been moved" if moved.modules else "nothing was moved"
        raise GpuMagicError(f"{CAUSE}: {', '.join(names)} cannot go to {device}, and {done}: {failure}")
    return tuple(moved.rows())


# ---- What there is to move


@dataclass
class Contents:
    """The tensors, modules and optimizers that variables hold, each once, in the order found."""

    tensors: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    _seen: dict[int, object] = field(default_factory=dict)

    def add(self, value: object) -> bool:
        """Add what a value holds; return whether anything in it has a device."""
        kind = type(value)  # not isinstance(): a proxy's __class__ may evaluate or raise
        if kind in _ATOMS:
            return False
        known = self._list_of(kind)
        if known is self.optimizers:
            value = modules.unwrapped(value)
        parts = parts_of(value) if known is None else []
        is_new = id(value) not in self._seen
        if known is not None or parts:
            self._seen[id(value)] = value  # alive while its id is used
        if known is not None and is_new:
            known.append(value)
        inside = [self.add(part) for _, part in parts if type(part) not in _ATOMS] if is_new else [bool(parts)]
        return known is not None or any(inside)

    def _list_of(self, kind: type) -> list[Any] | None:
        import torch

        if issubclass(kind, torch.Tensor):
            return self.tensors
        if issubclass(kind, torch.nn.Module):
            return self.modules
        return self.optimizers if issubclass(kind, torch.optim.Optimizer) else None

    def with_gradients(self) -> Iterator[Any]:
        """Yield every tensor, those of modules and optimizers' parameters too, each with its gradient."""
        of_modules = (tensor for module in self.modules for _, _, tensor in _slots(module))
        for tensor in (*of_modules, *self._others()):
            yield tensor
            with undisturbed():
                gradient = plain(tensor, "grad") if plain(tensor, "is_leaf") else None
            if gradient is not None:
                yield gradient

    def _others(self) -> list[Any]:
        groups = [group for optimizer in self.optimizers for group in modules.parameter_groups(optimizer)]
        return [*self.tensors, *(each for group in groups for each in group["params"])]

    def leaves(self) -> list[Any]:
        """Return the leaf tensors that require gradients, apart from those of modules."""
        with undisturbed():
            return [each for each in self._others() if plain(each, "is_leaf") and plain(each, "requires_grad")]


def load_all(names: list[str], namespace: Mapping[str, Any], device: str) -> tuple[Contents, list[tuple[str, Any]]]:
    """Return what the names hold together, and the tensors that are not on the device yet, with the first's name."""
    combined, taken = Contents(), dict[int, tuple[str, Any]]()
    for name in names:
        contents = _load(name, namespace)
        combined.add(namespace[name])
        _take(name, contents.with_gradients(), taken, device)
    moving = {id(each) for each in combined.with_gradients()}
    for name, optimizer in _followers(combined, moving, namespace):
        if all(optimizer is not each for each in combined.optimizers):
            combined.optimizers.append(optimizer)
        _take(name, _state_to_move(optimizer, moving), taken, device)
    return combined, list(taken.values())


def _take(name: str, tensors: Iterable[Any], taken: dict[int, tuple[str, Any]], device: str) -> None:
    for tensor in tensors:
        with undisturbed():
            is_there = str(plain(tensor, "device")) == device
        if not is_there:
            taken.setdefault(id(tensor), (name, tensor))


def _load(name: str, namespace: Mapping[str, Any]) -> Contents:
    """Return what a variable holds; raise `OptionError` if it is missing or holds nothing with a device."""
    if name not in namespace:
        near = nearest(name, session.names_of_users(namespace))
        hint = f"did you mean {near}?" if near else "write names of variables, such as --move model,x"
        raise OptionError(f"{CAUSE}: there is no variable {name!r}; {hint}")
    found = Contents()
    if not found.add(namespace[name]):
        kind = branches.name_of_type(type(namespace[name]))
        hint = "; torch.from_numpy makes it a tensor" if kind == "ndarray" else ""
        if branches.class_attribute(type(namespace[name]), "to") is not None:
            hint = f"; it has a .to() of its own: {name} = {name}.to(...)"
        raise OptionError(f"{CAUSE}: {name!r} ({kind}) holds no tensor, module or optimizer that could move{hint}")
    return found


def _followers(combined: Contents, moving: set[int], namespace: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the optimizers that are named or whose parameters move, each with a name."""
    import torch

    found: dict[int, tuple[str, Any]] = {}
    for name, value in list(namespace.items()):
        if issubclass(type(value), torch.optim.Optimizer) and not name.startswith("_"):
            optimizer = modules.unwrapped(value)
            works_on = {id(each) for group in modules.parameter_groups(optimizer) for each in group["params"]}
            if works_on & moving:
                found.setdefault(id(optimizer), (name, optimizer))
    for optimizer in combined.optimizers:
        found.setdefault(id(optimizer), ("optimizer", optimizer))
    return list(found.values())


def _state_to_move(optimizer: Any, parameters: set[int]) -> list[Any]:
    """Return an optimizer's state tensors for the parameters of these ids.

    A step counter stays on the host unless the optimizer says otherwise, as in `Optimizer.load_state_dict`.
    """
    found = Contents()
    kept = branches.attributes_of(optimizer).get("state")
    states = {id(each): state for each, state in dict.items(kept)} if isinstance(kept, dict) else {}
    for group in modules.parameter_groups(optimizer):
        for parameter in group["params"]:
            state = states.get(id(parameter)) if id(parameter) in parameters else None
            for key, value in (state or {}).items():
                if key != "step" or group.get("capturable") or group.get("fused"):
                    found.add(value)
    return found.tensors


def _slots(module: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the parameters and buffers of a module and its submodules: the dict that has it, the key, the tensor."""
    for _, part in modules.modules_in(module):
        own = branches.attributes_of(part)
        for kept in (own.get("_parameters"), own.get("_buffers")):
            if isinstance(kept, dict):
                yield from ((kept, key, tensor) for key, tensor in list(dict.items(kept)) if tensor is not None)


def _nbytes(tensor: Any) -> int:
    from torch.nn.parameter import is_lazy

    return 0 if is_lazy(tensor) else int(tensor.numel() * tensor.element_size())


# ---- The move


class _Moved:
    """The copies, and what has them by now."""

    def __init__(self, device: str) -> None:
        self.copies: dict[int, Any] = {}
        """By the `id` of a tensor, which the caller keeps alive: its copy."""
        self.modules = 0
        """How many have theirs."""
        self._device = device
        self._final: dict[int, Any] = {}
        """What is to be had for a tensor of a module, or a leaf: itself, where torch puts new data into it."""
        self._sums: dict[tuple[str, str], tuple[int, int, float]] = {}

    def copy(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy tensors, each for a name."""
        import torch

        for name, tensor in tensors:
            start, source, nbytes = time.perf_counter(), str(tensor.device), _nbytes(tensor)
            # A tensor that a graph made stays in the graph, as with `x = x.to(...)`.
            with torch.set_grad_enabled(tensor.grad_fn is not None):
                self.copies[id(tensor)] = tensor.to(self._device)
            if nbytes:
                count, total, seconds = self._sums.get((name, source), (0, 0, 0.0))
                self._sums[name, source] = count + 1, total + nbytes, seconds + time.perf_counter() - start

    def rows(self) -> Iterator[TransferRow]:
        """Yield what was copied."""
        for (name, source), figures in self._sums.items():
            way = direction(source, self._device)
            yield TransferRow(way, source, self._device, *figures, line=None, code=None, name=name, cause=CAUSE)

    def replace(self, contents: Contents, names: list[str], namespace: MutableMapping[str, Any]) -> None:
        """Put the copies into modules, leaves and optimizers, and bind the names."""
        import torch

        done: dict[int, Any] = {}
        for name in names:
            rebuilt(namespace[name], lambda tensor: tensor, done)  # raises for what holds itself
        # Those that may refuse, as quantized ones do, come first.
        for module in sorted(contents.modules, key=lambda module: type(module).to is torch.nn.Module.to):
            self._move_module(module)
        for leaf in contents.leaves():
            self._move_leaf(leaf)
        for optimizer in contents.optimizers:
            self._move_optimizer(optimizer)
        done = {}
        namespace.update({name: rebuilt(namespace[name], self._new, done) for name in names})

    def _new(self, tensor: Any) -> Any:
        return self._final.get(id(tensor), self.copies.get(id(tensor), tensor))

    def _move_module(self, module: Any) -> None:
        """Do what `Module.to` does, by the module's own `_apply`; then its own `to`, if it has one."""
        import torch

        slots = list(_slots(module))
        module._apply(lambda tensor: self.copies.get(id(tensor), tensor))
        for kept, key, tensor in slots:  # a tied weight stays one where torch makes new parameters
            kept[key] = self._final.setdefault(id(tensor), kept[key])
        if type(module).to is not torch.nn.Module.to:
            module.to(self._device)
        self.modules += 1

    def _move_leaf(self, leaf: Any) -> None:
        """Put the copy into a leaf that requires gradients, or make a new one where torch cannot."""
        import torch

        new = self.copies.get(id(leaf))
        if new is None or id(leaf) in self._final:
            return  # it is there already, or belongs to a module
        gradient = None if leaf.grad is None else self._new(leaf.grad)
        if torch._has_compatible_shallow_copy_type(leaf, new):
            leaf.grad, leaf.data = None, new
            made = leaf
        else:
            made = torch.nn.Parameter(new) if isinstance(leaf, torch.nn.Parameter) else new.requires_grad_()
        made.grad = gradient
        self._final[id(leaf)] = made

    def _move_optimizer(self, optimizer: Any) -> None:
        """Give an optimizer its parameters and their state, in its own dictionaries."""
        done: dict[int, Any] = {}
        state = {self._new(key): rebuilt(value, self._new, done) for key, value in optimizer.state.items()}
        for group in optimizer.param_groups:
            group["params"][:] = [self._new(each) for each in group["params"]]
        optimizer.state.clear()
        optimizer.state.update(state)


# ---- Containers

Step: TypeAlias = "tuple[str, Any]"
"""How a container holds a part: ``("item", key)`` or ``("attribute", name)``."""
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})


def parts_of(value: Any) -> list[tuple[Step, object]]:
    """Return the parts of a container or a dataclass, and nothing for any other value."""
    from torch.nn.utils.rnn import PackedSequence

    kind = type(value)
    if issubclass(kind, PackedSequence):  # its batch sizes must stay on the host
        return [(("item", place), part) for place, part in enumerate(tuple.__iter__(value)) if place != 1]
    parts: list[tuple[Step, object]] = []
    if issubclass(kind, dict) and not _ATOMS.issuperset(map(type, dict.values(value))):
        parts += [(("item", key), part) for key, part in dict.items(value)]
    elif issubclass(kind, list | tuple):
        items = list((tuple if issubclass(kind, tuple) else list).__iter__(value))
        if not _ATOMS.issuperset(map(type, items)):  # a million numbers, quickly
            parts += [(("item", place), part) for place, part in enumerate(items)]
    return parts + [(("attribute", name), part) for name, part in _attributes(value, kind)]


def _attributes(value: Any, kind: type) -> list[tuple[str, object]]:
    """Return a dataclass's fields, and the attributes that container subclasses have along with their items."""
    fields = branches.class_attribute(kind, "__dataclass_fields__")
    if isinstance(fields, dict):
        own = branches.attributes_of(value)
        return [(name, own[name]) for name in fields if name in own]
    keeps = (dict, list, collections.UserDict, collections.UserList, SimpleNamespace)
    return list(branches.attributes_of(value).items()) if issubclass(kind, keeps) else []


def rebuilt(value: object, replacement: Callable[[Any], object], done: dict[int, Any] | None = None) -> Any:
    """Return a copy of a tensor, container or dataclass with each tensor replaced, or itself if nothing differs.

    ``done`` is ``{id: result}`` for containers already rebuilt, so that two names of one stay two names of one.

    Raises:
        ValueError: a container holds itself.
    """
    import torch

    if type(value) in _ATOMS:
        return value
    done = {} if done is None else done
    if issubclass(type(value), torch.Tensor):
        return replacement(value)
    parts = parts_of(value)
    if not parts:
        return value
    if id(value) in done:
        if done[id(value)] is _UNFINISHED:
            raise ValueError("it holds itself")
        return done[id(value)]
    done[id(value)] = _UNFINISHED
    new = [(step, part if type(part) in _ATOMS else rebuilt(part, replacement, done)) for step, part in parts]
    same = all(part is old for (_, part), (_, old) in zip(new, parts, strict=True))
    done[id(value)] = value if same else _like(value, new)
    return done[id(value)]


_UNFINISHED = object()


def _like(value: Any, parts: list[tuple[Step, object]]) -> object:
    if issubclass(type(value), tuple):
        return _tuple_like(value, {place: part for (_, place), part in parts})
    made = copy.copy(value)
    for (kind, key), part in parts:
        if kind == "attribute":
            object.__setattr__(made, key, part)  # a frozen dataclass too: nothing else has the new one yet
        else:
            (dict if issubclass(type(made), dict) else list).__setitem__(made, key, part)
    return made


def _tuple_like(value: tuple[Any, ...], parts: dict[int, object]) -> object:
    new = [parts.get(place, part) for place, part in enumerate(value)]
    kind: Any = type(value)
    if hasattr(kind, "_make"):
        return kind._make(new)
    if hasattr(kind, "n_sequence_fields"):  # what torch.max and its like return
        return kind(new)
    return tuple.__new__(kind, new)
