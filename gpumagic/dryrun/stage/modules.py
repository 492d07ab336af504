"""Tells which module a block belongs to: whose forward or backward asked for it, or whose parameter it goes with.

Forward passes are seen by hooks of all modules, recomputed ones under checkpointing too. In a backward pass the node of
the graph that made a module's output tells that its turn has come, and the one that made its input that it is over.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gpumagic.dryrun.stage.kinds import is_wrapped
from gpumagic.dryrun.stage.ledger import Ledger
from gpumagic.dryrun.stage.storages import tensors_in

REST = ""
"""The name of what belongs to no module."""
_SEEN = "gpumagic"


class Journal(Protocol):
    """What is told."""

    module: int | None
    """Whose are the blocks that are asked for from now on."""

    def own(self, key: int, module: int) -> None:
        """Say whose a storage is that is in use."""


class Modules:
    """The modules of one run, by number.

    Args:
        journal: what is told.
        key_of: tells the storage of a tensor, if it is on the device of the dry run; else 0.
    """

    def __init__(self, journal: Journal, key_of: Callable[[torch.Tensor], int]) -> None:
        self._journal = journal
        self._key_of = key_of
        self._numbers: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
        self._names: list[str] = []
        self._owners: dict[int, int] = {}
        self._running: list[int] = []

    def watch(self, namespace: Mapping[str, Any]) -> None:
        """Follow the modules for the rest of the process."""
        self._name_all(namespace)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        for name in ("backward", "grad"):
            setattr(torch.autograd, name, self._around(getattr(torch.autograd, name)))

    def look_around(self, namespace: Mapping[str, Any]) -> list[str]:
        """Say whose the parameters, gradients and optimizers' state are; return the modules' names by number."""
        self._name_all(namespace)
        for module in list(self._numbers):
            self._own_parameters(module)
        of_leaf = {
            leaf: number for module, number in self._numbers.items() for leaf in module._parameters.values()
            if leaf is not None
        }  # fmt: skip
        for leaf, number in of_leaf.items():
            if leaf.grad is not None:
                self._own(leaf.grad, number)
        for each in gc.get_objects():
            if issubclass(type(each), torch.optim.Optimizer):
                for leaf, state in each.state.items():
                    for value in state.values() if isinstance(state, dict) and leaf in of_leaf else ():
                        self._own(value, of_leaf[leaf])
        return self._names

    # ---- Names

    def _name_all(self, namespace: Mapping[str, Any]) -> None:
        """Name the modules that variables lead to, by the shortest way."""
        named: set[torch.nn.Module] = set()
        for name, value in [*_roots(namespace), *_held(namespace)]:
            for path, module in value.named_modules():
                if module not in named:
                    named.add(module)
                    self._names[self._number(module)] = ".".join(filter(None, (name, path)))

    def _number(self, module: torch.nn.Module) -> int:
        """Return a module's number; one that no variable leads to is named by the class that it is in."""
        known = self._numbers.get(module)
        if known is not None:
            return known
        for path, each in module.named_modules():
            if each not in self._numbers:
                self._numbers[each] = len(self._names)
                self._names.append(".".join(filter(None, (type(module).__name__, path))))
        return self._numbers[module]

    # ---- Forward

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        outer = self._running[-1] if self._running else None
        number = self._number(module)
        self._follow_back(args, outer)
        self._own_parameters(module)
        self._running.append(number)
        self._journal.module = number

    def _leave(self, module: torch.nn.Module, _: object, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        number = self._number(module)
        self._follow_back(output, number)
        if number in self._running:
            while self._running.pop() != number:
                pass
        self._journal.module = self._running[-1] if self._running else None

    def _own_parameters(self, module: torch.nn.Module) -> None:
        number = self._numbers[module]
        for each in (*module._parameters.values(), *module._buffers.values()):
            self._own(each, number)

    def _own(self, tensor: object, number: int) -> None:
        key = self._key_of(tensor) if isinstance(tensor, torch.Tensor) and not is_wrapped(tensor) else 0
        if key and self._owners.get(key) != number:
            self._owners[key] = number
            self._journal.own(key, number)

    # ---- Backward

    def _follow_back(self, value: Any, number: int | None) -> None:
        """Let the nodes that made some tensors tell whose turn has come: that of the innermost module."""
        for tensor in tensors_in(value):
            node = tensor.grad_fn
            if node is not None and _SEEN not in node.metadata:
                node.metadata[_SEEN] = True
                node.register_prehook(functools.partial(self._go_back, number))

    def _go_back(self, number: int | None, _: object) -> None:
        self._journal.module = number

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                self._journal.module = self._running[-1] if self._running else None

        return watched


def by_module(ledger: Ledger, device: int, names: list[str]) -> list[tuple[str, dict[str, int]]]:
    """Return the bytes at a device's peak by module and kind, the largest first; their sum is the peak."""
    time = ledger.accounts[device].peak.time
    found: dict[str, dict[str, int]] = {}
    for life in ledger.lives:
        if life.device == device and life.is_alive_at(time):
            parts = found.setdefault(REST if life.module is None else names[life.module], {})
            parts[life.part()] = parts.get(life.part(), 0) + life.nbytes
    return sorted(found.items(), key=lambda item: -sum(item[1].values()))


def _roots(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    yield from (
        (name, value)
        for name, value in namespace.items()
        if isinstance(value, torch.nn.Module) and not name.startswith("_")
    )


def _held(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that variables have as attributes, such as a trainer's."""
    for name, value in list(namespace.items()):
        if not name.startswith("_") and not isinstance(value, type | torch.nn.Module):
            inner = getattr(value, "__dict__", None)
            if type(inner) is dict:
                yield from ((f"{name}.{attribute}", module) for attribute, module in _roots(inner))
