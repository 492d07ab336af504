"""Tells which module runs: whose forward is the innermost, or whose backward.

Forward passes are seen by hooks of all modules, recomputed ones under checkpointing too. In a backward pass the node of
the graph that made a module's output tells that its backward begins, and the one that made its input that it has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gpumagic.heap.branches import attributes_of, modules_in, name_of_type

_SEEN = "gpumagic"
_queue = torch.autograd.Variable._execution_engine.queue_callback


class NamedModules:
    """Modules by number.

    Attributes:
        names: by number the shortest way to a module from a variable, as ``"model.blocks.3.attn"``; else its class.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[int, tuple[ref[torch.nn.Module], int]] = {}  # by identity: no `__hash__` of the user's

    def name_all(self, namespace: Mapping[str, Any]) -> None:
        """Name the modules that variables lead to, by the shortest way."""
        named: set[int] = set()
        for name, value in [*_roots(namespace), *_held(namespace)]:
            for path, module in modules_in(value):
                if id(module) not in named:
                    named.add(id(module))
                    self.names[self.number(module)] = ".".join(filter(None, (name, path)))

    def number(self, module: torch.nn.Module) -> int:
        """Return a module's number; one that no variable leads to is named by the class that it is in."""
        known = self._known(module)
        if known is not None:
            return known
        for path, each in modules_in(module):
            if self._known(each) is None:
                self._numbers[id(each)] = ref(each), len(self.names)
                self.names.append(".".join(filter(None, (name_of_type(type(module)), path))))
        return self._numbers[id(module)][1]

    def numbered(self) -> list[tuple[torch.nn.Module, int]]:
        """Return the modules that are alive, each with its number."""
        found = [(alive(), number) for alive, number in list(self._numbers.values())]
        return [(module, number) for module, number in found if module is not None]

    def _known(self, module: torch.nn.Module) -> int | None:
        alive, number = self._numbers.get(id(module), (None, None))
        return number if alive is not None and alive() is module else None


class RunningModule(NamedModules):
    """Tells which of the modules runs.

    Args:
        tell: called with the number of the module that runs from now on, None for none.
    """

    def __init__(self, tell: Callable[[int | None], None]) -> None:
        super().__init__()
        self._tell = tell
        self._running: list[int] = []
        self._backward: int | None = None

    def watch(self, namespace: Mapping[str, Any]) -> None:
        """Follow the modules for the rest of the process."""
        self.name_all(namespace)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)

    def entered(self, module: torch.nn.Module) -> None:
        """Do what is to be done before a module's forward."""

    # ---- Forward

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        outer = self._running[-1] if self._running else None
        number = self.number(module)
        self._follow_back(args, outer)
        self.entered(module)
        self._running.append(number)
        self._tell(number)

    def _leave(self, module: torch.nn.Module, _: object, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        number = self.number(module)
        self._follow_back(output, number)
        if number in self._running:
            while self._running.pop() != number:
                pass
        self._tell(self._running[-1] if self._running else None)

    # ---- Backward

    def _follow_back(self, value: Any, number: int | None) -> None:
        """Let the nodes that made some tensors tell that the backward of the innermost module begins."""
        for tensor in tensors_in(value):
            node = tensor.grad_fn
            if node is not None and _SEEN not in node.metadata:
                node.metadata[_SEEN] = True
                node.register_prehook(functools.partial(self._go_back, number))

    def _go_back(self, number: int | None, _: object) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward = task
            _queue(self._end_backward)
        self._tell(number)

    def _end_backward(self) -> None:
        self._backward = None
        self._tell(self._running[-1] if self._running else None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's or a module's arguments, or its results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def _roots(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    yield from (
        (name, value)
        for name, value in namespace.items()
        if issubclass(type(value), torch.nn.Module) and not name.startswith("_")
    )


def _held(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that variables have as attributes, such as a trainer's."""
    for name, value in list(namespace.items()):
        if not name.startswith("_") and not issubclass(type(value), (type, torch.nn.Module)):
            yield from ((f"{name}.{attribute}", module) for attribute, module in _roots(attributes_of(value)))
