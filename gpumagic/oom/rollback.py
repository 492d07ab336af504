"""What a run of some code changed, put back so that it can run again from where it began, as far as that can be known.

Put back: names that the run bound or replaced, what came into lists, dicts and sets, first gradients, and random
states. Not put back, but said: tensors changed in place, hence an optimizer's steps. Not seen: numpy arrays, files,
and the insides of other objects.

Nothing on an accelerator is kept for it: the run would have had that memory back when it bound the name anew.
"""

from __future__ import annotations

import ast
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from gpumagic.heap import holders
from gpumagic.oom import random_states
from gpumagic.oom.written_tensors import WrittenTensors, is_on_accelerator, reached_by, version
from gpumagic.source import cell_code

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
        self._random = random_states.remember(mine)

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
    if cell is None:
        return frozenset(), frozenset()
    nodes = ast.walk(ast.parse(source))
    stored = (node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    return cell.remade, frozenset(stored)


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
