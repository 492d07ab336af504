"""What a run of some code changed, put back so that it can run again from where it began, as far as that can be known.

No tensor is kept alive for it and none is copied, so what was written cannot be put back: it can be said. What can be
put back is a gradient that was not there: it is taken away, because a second backward would add to it.

Put back: names that the run bound or replaced, what came into lists, dicts and sets, first gradients, and random
states. Not put back, but said: tensors changed in place, hence an optimizer's steps. Not seen: numpy arrays, files,
and the insides of other objects.

Nothing on an accelerator is kept for it: the run would have had that memory back when it bound the name anew.
"""

from __future__ import annotations

import ast
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from gpumagic.heap import holders, kinds
from gpumagic.heap.storages import undisturbed
from gpumagic.memory import allocator
from gpumagic.source import cell_code


class _Mark(NamedTuple):
    tensor: weakref.ref[Any]
    version: int
    gradient: tuple[int, int] | None
    """Where its gradient lay, and its version; None where it had none."""


class WrittenTensors:
    """The tensors that some variables reach, as they are now.

    Args:
        reached: the tensors by variable; they are not kept.
    """

    def __init__(self, reached: Mapping[str, Iterable[Any]]) -> None:
        self._names = {name: [id(each) for each in tensors] for name, tensors in reached.items()}
        unique = {id(each): each for tensors in reached.values() for each in tensors}
        own = _gradients(list(unique.values()))
        self._marks = {key: _Mark(weakref.ref(each), version(each), own.get(key)) for key, each in unique.items()}

    def changed(self) -> dict[str, set[int]]:
        """Return the tensors written to, by variable, as numbers that tell them apart."""
        alive = {key: mark.tensor() for key, mark in self._marks.items()}
        own = _gradients([each for each in alive.values() if each is not None])
        written = {
            key
            for key, each in alive.items()
            if each is not None
            and (version(each), own.get(key)) != (self._marks[key].version, self._marks[key].gradient)
        }
        return {name: written & set(keys) for name, keys in self._names.items() if written & set(keys)}

    def drop_new_gradients(self) -> None:
        """Take away the gradients that were not there."""
        for mark in self._marks.values():
            tensor = mark.tensor()
            if tensor is not None and mark.gradient is None and tensor.is_leaf and tensor.grad is not None:
                tensor.grad = None


def reached_by(variables: Iterable[tuple[str, object]], namespace: Mapping[str, object], shell: object | None) -> Any:
    """Return the tensors that each variable reaches, ``{name: [tensor, ...]}``; the caller lets go of them."""
    search = holders.tensor_search(namespace, shell)
    reached: dict[str, list[Any]] = {}
    try:
        with undisturbed():
            for key, ways in search.run(variables).items():
                for name in dict.fromkeys(way.root() for way in ways):
                    reached.setdefault(name, []).append(search.tensors[key])
    finally:
        search.release()
    return reached


def version(tensor: Any) -> int:
    """Return how often a tensor has been changed in place; 0 for one of inference mode, which counts nothing."""
    try:
        return int(tensor._version)
    except Exception:
        return 0


def is_on_accelerator(tensor: Any) -> bool:
    """Tell whether a tensor occupies memory of a device."""
    return tensor.device.type not in ("cpu", "meta")


def _gradients(tensors: list[Any]) -> dict[int, tuple[int, int]]:
    """Return where each tensor's gradient lies and its version, by the tensor's `id`."""
    with undisturbed():
        leaves = kinds.leaves(tensors)
        found = kinds.peek_gradients(leaves) or ()
        return {id(leaves[i]): (alias.data_ptr(), version(alias)) for i, alias in found}


Restore = Callable[[], None]


def remember_random_states(namespace: Mapping[str, object]) -> list[Restore]:
    """Return what sets the generators of Python, numpy, torch and the variables back; may be called again and again.

    Only devices in use are asked: any other has drawn nothing yet, and asking would bring it to life.
    """
    return list(_all(namespace))


def _all(namespace: Mapping[str, object]) -> Iterator[Restore]:
    state = random.getstate()
    yield lambda: random.setstate(state)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        legacy = numpy.get_state()
        yield lambda: numpy.set_state(legacy)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield from _of_torch(torch)
    for value in list(namespace.values()):
        yield from _of_variable(value, numpy, torch)


def _of_torch(torch: Any) -> Iterator[Restore]:
    state = torch.get_rng_state()
    yield lambda: torch.set_rng_state(state)
    for device in allocator.all_device_stats():
        backend, _, index = device.partition(":")
        module: Any = allocator.device_module(backend)
        if hasattr(module, "get_rng_state"):
            yield _of_device(module, () if backend == "mps" else (int(index),))


def _of_device(module: Any, place: tuple[int, ...]) -> Restore:
    state = module.get_rng_state(*place)

    def restore() -> None:
        module.set_rng_state(state, *place)

    return restore


def _of_variable(value: Any, numpy: Any, torch: Any) -> Iterator[Restore]:
    """Yield the same for a generator that a variable is."""
    if type(value) is random.Random:
        state = value.getstate()
        yield lambda: value.setstate(state)
    elif numpy is not None and type(value) is numpy.Generator:
        bits = value.bit_generator
        inside = bits.state
        yield lambda: setattr(bits, "state", inside)
    elif torch is not None and type(value) is torch.Generator:
        saved = value.get_state()
        yield lambda: _set(value, saved)


def _set(generator: Any, state: Any) -> None:
    generator.set_state(state)


SCALARS = (bool, int, float, complex, str, bytes, type(None))
MAX_LENGTH = 100_000
"""Entries above which a container's own are not remembered."""

Entries = Mapping[int, int] | tuple[int, ...]
"""The ids of what a container holds, of a dict by those of its keys."""


class Rollback:
    """The state before a run; `undo` goes back to it, any number of times.

    Args:
        namespace: the variables that the run may bind.
        source: the code that runs, "" where it binds none of them.
        shell: the shell, whose own names are left alone.
    """

    def __init__(self, namespace: MutableMapping[str, object], source: str = "", shell: object | None = None) -> None:
        self._namespace, self._shell = namespace, shell
        self._remade, self._rebound = _stores(source)
        mine = self._mine()
        self._bound = {name: id(value) for name, value in mine.items()}
        self._kept: dict[str, object] = {}
        self._watched: dict[str, weakref.ref[Any]] = {}
        reached = self._reached()
        self._tensors = WrittenTensors(reached)
        for name, value in mine.items():
            self._keep(name, value, any(map(is_on_accelerator, reached.get(name, ()))))
        self._steps = {name: _steps(value) for name, value in mine.items() if _is_optimizer(value)}
        self._contents = {name: _entries(value) for name, value in mine.items() if _is_container(value)}
        self._random = remember_random_states(mine)

    def undo(self) -> tuple[str, ...]:
        """Put back what can be, and return what cannot, in words."""
        self._tensors.drop_new_gradients()
        lost = [*self._written(), *self._restore_contents(), *self._restore_names()]
        for restore in self._random:
            restore()
        return tuple(lost)

    def _mine(self) -> dict[str, object]:
        """Return the variables but for the shell's own."""
        own = getattr(self._shell, "user_ns_hidden", {})
        return {name: value for name, value in list(self._namespace.items()) if name not in own}

    def _reached(self, *names: str) -> dict[str, list[Any]]:
        if "torch" not in sys.modules:
            return {}
        variables = [(name, self._namespace[name]) for name in names]
        found: dict[str, list[Any]] = reached_by(
            variables or holders.variables(self._namespace, self._shell), self._namespace, self._shell
        )  # fmt: skip
        return found

    def _keep(self, name: str, value: object, on_accelerator: bool) -> None:
        if type(value) in SCALARS or (name in self._rebound and name not in self._remade and not on_accelerator):
            self._kept[name] = value
        elif type(value).__weakrefoffset__:
            self._watched[name] = weakref.ref(value)

    def _written(self) -> Iterator[str]:
        changed = self._tensors.changed()
        stepped = {
            name: _steps(self._namespace[name]) - before for name, before in self._steps.items() if self._has(name)
        }
        for name, taken in stepped.items():
            if taken > 0:
                yield f"{taken} step{'s' if taken > 1 else ''} of {name}"
        told: set[int] = set()
        for name in sorted(changed, key=lambda each: each in stepped):  # a model before its optimizer
            if not changed[name] <= told and stepped.get(name, 0) <= 0:
                told |= changed[name]
                yield f"changes in place of {name}"

    def _has(self, name: str) -> bool:
        """Tell whether a name is bound to what it was."""
        return name in self._namespace and id(self._namespace[name]) == self._bound[name]

    def _restore_contents(self) -> Iterator[str]:
        for name, entries in self._contents.items():
            if self._has(name) and not _restore_entries(self._namespace[name], entries):
                yield f"what was replaced in or taken out of {name}"

    def _restore_names(self) -> Iterator[str]:
        for name in self._mine().keys() - self._bound.keys():
            del self._namespace[name]
        for name in [each for each in self._bound if not self._has(each)]:
            watched = self._watched.get(name)
            old = self._kept.get(name) if watched is None else watched()
            if name in self._kept or old is not None:
                self._namespace[name] = old
            elif name not in self._remade:
                yield f"the new value of {name}" if name in self._namespace else f"the deletion of {name}"
            elif name in self._namespace and any(map(is_on_accelerator, self._reached(name).get(name, ()))):
                del self._namespace[name]  # the run makes it anew; both alive at once would not fit either


def _stores(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that code binds before it reads them, and all that it binds or deletes."""
    cell = cell_code.read_cell(source)
    if cell is None or cell.text is None:
        return frozenset(), frozenset()
    names = (node for node in cell.text.nodes() if isinstance(node, ast.Name))
    return cell.bound_first, frozenset(node.id for node in names if not isinstance(node.ctx, ast.Load))


def _is_optimizer(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.optim.Optimizer)


def _steps(optimizer: Any) -> int:
    """Return how many steps an optimizer has taken, from how often its counters were changed: no device is read."""
    states = [state for state in list(optimizer.state.values()) if isinstance(state, dict)]
    counters = [state["step"] for state in states if "step" in state]
    return max((each if isinstance(each, int) else version(each) for each in counters), default=0)


def _is_container(value: object) -> bool:
    return type(value) in (list, dict, set) and len(value) <= MAX_LENGTH  # type: ignore[arg-type]


def _entries(value: Any) -> Entries:
    if type(value) is dict:
        return {id(key): id(each) for key, each in value.items()}
    return tuple(map(id, value))


def _restore_entries(value: Any, before: Entries) -> bool:
    """Take out of a container what came in, and tell whether it holds again what it held."""
    if type(value) is list:
        if tuple(map(id, value[: len(before)])) == before:
            del value[len(before) :]
    else:
        known = set(before)
        for key in [each for each in value if id(each) not in known]:
            value.pop(key) if type(value) is dict else value.remove(key)
    now = _entries(value)
    return set(now) == set(before) if type(value) is set else now == before
