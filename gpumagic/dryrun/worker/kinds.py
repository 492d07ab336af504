"""Tells what the blocks are: parameters, gradients, optimizer state, activations; by watching what torch does."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpumagic.dryrun.worker import cell
from gpumagic.dryrun.worker.cuda.history import History
from gpumagic.dryrun.worker.guesses import THREAD, Key
from gpumagic.dryrun.worker.storages import key_of
from gpumagic.heap.kinds import Graphs
from gpumagic.heap.storages import COMPONENTS, local_of
from gpumagic.memory.ledger import Ledger, Place
from gpumagic.source.text import span_at


class Kinds:
    """Marks blocks in the ledger while the cell runs.

    Args:
        ledger: where.
        device_type: the name of the device of the dry run.
        key_of: what the ledger calls a tensor's storage.
    """

    def __init__(
        self, ledger: Ledger | History, device_type: str, key_of: Callable[[torch.Tensor], int] = key_of
    ) -> None:
        self._ledger = ledger
        self._type = device_type
        self._key_of = key_of

    def watch(self) -> None:
        """Follow modules, optimizers and backward passes for the rest of the process."""
        register_module_forward_pre_hook(self._before_forward)
        register_optimizer_step_post_hook(self._after_step)
        for name in ("backward", "grad"):
            setattr(torch.autograd, name, self._around(getattr(torch.autograd, name)))

    def look_around(self) -> None:
        """Mark what can be found at the end: parameters and optimizers that no hook saw, what graphs still keep."""
        roots = []
        for each in gc.get_objects():
            kind = type(each)
            if issubclass(kind, torch.nn.Parameter):
                self._leaf(each)
            elif issubclass(kind, torch.nn.Module):
                self._before_forward(each)
            elif issubclass(kind, torch.optim.Optimizer):
                self._after_step(each)
            elif kind is torch.Tensor:
                with contextlib.suppress(RuntimeError):  # a view of what was changed in place since, as FSDP has
                    roots += [each.grad_fn] if each.grad_fn is not None else []
        graph = Graphs().walk(*roots)
        for each in graph.tensors if graph is not None else ():
            self._mark(each, "parameters" if isinstance(each, torch.nn.Parameter) else "activations")

    def _mark(self, tensor: Any, kind: str) -> None:
        with torch._C.DisableTorchFunction():  # under `Names` the device would say another name
            for each in with_storages(tensor):
                if each.device.type == self._type:
                    self._ledger.mark(self._key_of(each), kind)

    def _leaf(self, leaf: torch.Tensor) -> None:
        if isinstance(leaf, torch.nn.Parameter):
            self._mark(leaf, "parameters")
        if leaf.is_leaf and leaf.grad is not None:
            self._mark(leaf.grad, "gradients")

    def _before_forward(self, module: torch.nn.Module, _: object = None) -> None:
        if torch.compiler.is_compiling():
            return
        for kind in "parameters", "buffers":
            for each in (vars(module).get(f"_{kind}") or {}).values():
                self._mark(each, kind)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                self._mark(value, "optimizer state")
        for group in optimizer.param_groups:
            for leaf in group["params"]:
                self._mark(leaf, "parameters")
                self._leaf(leaf)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            leaves = list(leaves_of(roots))
            self._before_backward(leaves)
            self._ledger.in_backward += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._ledger.in_backward -= 1
                for leaf in leaves:
                    self._leaf(leaf)

        return watched

    def _before_backward(self, leaves: list[torch.Tensor]) -> None:
        for leaf in leaves:
            self._leaf(leaf)
        self._ledger.mark_activations()


def with_storages(tensor: object) -> Iterator[torch.Tensor]:
    """Yield a tensor if it has a storage, what a sparse one consists of, and what this process has of a DTensor.

    One that stands for another inside `vmap` or `grad`, or for one of a lazy module to come, has none.
    """
    if not isinstance(tensor, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return
    if torch.nn.parameter.is_lazy(tensor):
        return
    tensor = local_of(tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.layout is torch.strided:
        yield tensor
    for name in COMPONENTS.get(str(tensor.layout), ()):
        yield getattr(tensor, name)()


def leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """Yield the leaves that a backward pass from these tensors reaches."""
    tensors = roots if isinstance(roots, list | tuple) else [roots]
    todo = [each.grad_fn for each in tensors if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


_NOWHERE = Place()


class Lines:
    """Finds the cell's running line from anywhere below it.

    Args:
        filename: that of the cell's code.
        sources: the text of the cell and of the notebook's other files, by file name.
    """

    def __init__(self, filename: str, sources: dict[str, str]) -> None:
        self._cell = filename
        self._lines = {name: text.splitlines() for name, text in sources.items()}
        self._places: dict[tuple[Any, ...], Place] = {}
        self._expressions: dict[tuple[CodeType, int], str] = {}

    def where(self) -> Place:
        """Return the cell's innermost running line, and the notebook's function it is in where that is another's."""
        frame: FrameType | None = sys._getframe(1)
        innermost: FrameType | None = None
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self._cell:
                break
            if innermost is None and name in self._lines:
                innermost = frame
            frame = frame.f_back
        if frame is None:
            frame, innermost = innermost, None
        if frame is None:
            return _NOWHERE
        key = frame.f_code, frame.f_lineno, innermost and innermost.f_code, innermost and innermost.f_lineno
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._place(_location(frame), _location(innermost) if innermost else None)
        return place

    def reading(self) -> Key | None:
        """Return the cell's running line, and the notebook's innermost expression; None while kernels are measured."""
        if cell.runs_in(*cell.COMPILERS):
            return None
        inner: FrameType | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._cell:
            if inner is None and frame.f_code.co_filename in self._lines:
                inner = frame
            frame = frame.f_back
        inner = inner or frame
        return THREAD if inner is None else ((frame or inner).f_lineno, self._expression(inner))

    def _expression(self, frame: FrameType) -> str:
        at = (frame.f_code, frame.f_lasti)
        if at not in self._expressions:
            self._expressions[at] = self._text(frame)
        return self._expressions[at]

    def _text(self, frame: FrameType) -> str:
        """Return what a frame's instruction was compiled from; all of its line where Python does not say (3.10)."""
        lines = self._lines.get(frame.f_code.co_filename, [])
        line = lines[frame.f_lineno - 1] if 0 < frame.f_lineno <= len(lines) else ""
        span = span_at(frame.f_code, frame.f_lasti)
        if span is not None and span[0] == span[1] == frame.f_lineno:
            line = line.encode()[span[2] : span[3]].decode()
        return line.strip()

    def of(self, frames: Iterable[tuple[str, str, int]]) -> Place:
        """Return the same from the file, function and line of each frame, the innermost first."""
        innermost: tuple[str, str, int] | None = None
        for frame in frames:
            if frame[0] == self._cell:
                return self._place(frame, innermost)
            if innermost is None and frame[0] in self._lines:
                innermost = frame
        return Place() if innermost is None else self._place(innermost, None)

    def _place(self, frame: tuple[str, str, int], inner: tuple[str, str, int] | None) -> Place:
        filename, _, line = frame
        lines = self._lines.get(filename, [])
        code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return Place(line, code, "" if inner is None else f"{inner[1]}, line {inner[2]}")


def _location(frame: FrameType) -> tuple[str, str, int]:
    return frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
