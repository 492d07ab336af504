"""`--move`: move named variables to the device before the cell runs.

Names, contents and room are checked first, then every tensor is copied, as `Tensor.to` does; only then modules, leaves
and optimizers get the copies, and the names last. So a missing name or too little memory leaves the notebook as it
was; a module that raises as it takes its copies does not, and the error says what had been moved by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from gpumagic.errors import GpuMagicError, OptionError, nearest
from gpumagic.heap import branches, modules
from gpumagic.heap.storages import plain, undisturbed
from gpumagic.memory.devices import room
from gpumagic.notebook import session
from gpumagic.report.units import size
from gpumagic.transfers.contents import Contents, rebuilt, slots_of
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
    stay two names of one; a view becomes a tensor of its own, as by `Tensor.to`.

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

        slots = list(slots_of(module))
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
