"""Tells what the blocks of a run are and whose, by watching what torch does.

A block is a parameter, a gradient, an optimizer's state, an activation; it belongs to the module whose forward or
backward asked for it, or whose parameter it goes with. Forward passes are seen by hooks of all modules, recomputed ones
under checkpointing too. In a backward pass the node of the graph that made a module's output tells that its backward
begins, and the one that made its input that it has ended.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpumagic.dryrun import parts
from gpumagic.heap.branches import attributes_of, name_of_type
from gpumagic.heap.kinds import Graphs, modules_in
from gpumagic.heap.storages import COMPONENTS, local_of
from gpumagic.memory.ledger import Ledger, Place

_SEEN = "gpumagic"


class Modules:
    """Marks blocks in the ledger while the cell runs.

    Args:
        note: called with a method of the ledger's and what it is to be called with, now or when there is one.
        key_of: what the ledger calls a tensor's storage; 0 for one that is not on the device of the dry run.
        where: tells where the cell stands.

    Attributes:
        names: by number the shortest way to a module from a variable, as ``"model.blocks.3.attn"``; else its class.
    """

    def __init__(
        self,
        note: Callable[..., None],
        key_of: Callable[[torch.Tensor], int],
        where: Callable[[], Place],
    ) -> None:
        self.names: list[str] = []
        self._note = note
        self._key_of = key_of
        self._where = where
        self._numbers: dict[
            int, tuple[ref[nn.Module], int]
        ] = {}  # by identity: no `__hash__` of the user's
        self._owners: dict[int, int] = {}
        self._leaves: dict[torch.Tensor, int] = {}
        """The parameters and whose they are, once the cell has ended: until then nothing keeps one alive."""
        self._running: list[int] = []

    def watch(self, namespace: Mapping[str, Any]) -> None:
        """Follow modules, optimizers and backward passes for the rest of the process."""
        self._name_all(namespace)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_post_hook(self._after_step)
        for name in ("backward", "grad"):
            setattr(torch.autograd, name, self._around(getattr(torch.autograd, name)))

    # ---- Modules by number

    def _name_all(self, namespace: Mapping[str, Any]) -> None:
        """Name the modules that variables lead to, by themselves or as attributes such as a trainer's."""
        shown = {name: value for name, value in list(namespace.items()) if not name.startswith("_")}
        held = (
            (f"{name}.{attribute}", each)
            for name, value in shown.items()
            if not issubclass(type(value), (type, nn.Module))
            for attribute, each in attributes_of(value).items()
            if not attribute.startswith("_")
        )
        named: set[int] = set()
        for name, value in [*shown.items(), *held]:
            for path, module in modules_in(value) if issubclass(type(value), nn.Module) else ():
                if id(module) not in named:
                    named.add(id(module))
                    self.names[self._number(module)] = ".".join(filter(None, (name, path)))

    def _number(self, module: nn.Module) -> int:
        """Return a module's number; one that no variable leads to is named by the class that it is in."""
        known = self._known(module)
        if known is not None:
            return known
        for path, each in modules_in(module):
            if self._known(each) is None:
                self._numbers[id(each)] = ref(each), len(self.names)
                self.names.append(".".join(filter(None, (name_of_type(type(module)), path))))
        return self._numbers[id(module)][1]

    def _known(self, module: nn.Module) -> int | None:
        alive, number = self._numbers.get(id(module), (None, None))
        return number if alive is not None and alive() is module else None

    # ---- Which module runs

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        number = self._number(module)
        self._follow_back(args, self._innermost())
        self._tensors_of(module, number)
        self._running.append(number)
        self._note(Ledger.run, number)

    def _leave(self, module: nn.Module, _: object, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        number = self._number(module)
        self._follow_back(output, number)
        if number in self._running:
            while self._running.pop() != number:
                pass
        self._note(Ledger.run, self._innermost())

    def _innermost(self) -> int | None:
        return self._running[-1] if self._running else None

    def _follow_back(self, value: Any, number: int | None) -> None:
        """Let the nodes that made some tensors tell that the backward of the innermost module begins."""
        for tensor in tensors_in(value):
            node = tensor.grad_fn
            if node is not None and _SEEN not in node.metadata:
                node.metadata[_SEEN] = True
                node.register_prehook(lambda _: self._note(Ledger.run, number))

    # ---- What a block is

    def look_around(self, namespace: Mapping[str, Any]) -> list[str]:
        """Mark at the end what no hook saw, and what graphs still keep; return the modules' names by number."""
        self._name_all(namespace)
        for alive, number in list(self._numbers.values()):
            module = alive()
            if module is not None:
                self._tensors_of(module, number)
                self._leaves |= {
                    leaf: number for leaf in module._parameters.values() if leaf is not None
                }
        roots = []
        for each in gc.get_objects():
            kind = type(each)
            if issubclass(kind, nn.Parameter):
                self._leaf(each)
            elif issubclass(kind, nn.Module):
                self._tensors_of(each, None)
            elif issubclass(kind, torch.optim.Optimizer):
                self._after_step(each)
            elif kind is torch.Tensor:
                with contextlib.suppress(
                    RuntimeError
                ):  # a view of what was changed in place since, as FSDP has
                    roots += [each.grad_fn] if each.grad_fn is not None else []
        for each in Graphs().walk(*roots) or ():
            self._mark(each, "parameters" if isinstance(each, nn.Parameter) else "activations")
        return self.names

    def _tensors_of(self, module: nn.Module, number: int | None) -> None:
        """Say what a module's own parameters and buffers are, and whose, if it has a number."""
        for kind in "parameters", "buffers":
            for each in (vars(module).get(f"_{kind}") or {}).values():
                self._mark(each, kind, number)

    def _mark(self, tensor: object, kind: str, number: int | None = None) -> None:
        with torch._C.DisableTorchFunction():  # under `Names` the device would say another name
            keys = [key for each in with_storages(tensor) if (key := self._key_of(each))]
        for key in keys:
            self._note(Ledger.mark, key, kind)
            if number is not None and self._owners.get(key) != number:
                self._owners[key] = number
                self._note(Ledger.own, key, number)

    def _leaf(self, leaf: torch.Tensor) -> None:
        if isinstance(leaf, parts.Absent):
            return
        if isinstance(leaf, nn.Parameter):
            self._mark(leaf, "parameters")
        if leaf.is_leaf and leaf.grad is not None:
            self._mark(leaf.grad, "gradients", self._leaves.get(leaf))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for leaf, state in optimizer.state.items():
            for value in state.values() if isinstance(state, dict) else ():
                self._mark(value, "optimizer state", self._leaves.get(leaf))
        for group in optimizer.param_groups:
            for leaf in group["params"]:
                self._mark(leaf, "parameters")
                self._leaf(leaf)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            leaves = list(
                leaves_of(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
            )
            for leaf in leaves:
                self._leaf(leaf)
            self._note(Ledger.go_back, 1, self._where())
            try:
                return function(*args, **kwargs)
            finally:
                self._note(Ledger.go_back, -1, self._where())
                self._note(Ledger.run, self._innermost())
                for leaf in leaves:
                    self._leaf(leaf)

        return watched


def with_storages(tensor: object) -> Iterator[torch.Tensor]:
    """Yield a tensor if it has a storage, what a sparse one consists of, and what this process has of a DTensor.

    One that stands for another inside `vmap` or `grad`, or for one of a lazy module to come, has none.
    """
    if not isinstance(tensor, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    ):
        return
    if is_lazy(tensor):
        return
    tensor = local_of(tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.layout is torch.strided:
        yield tensor
    for name in COMPONENTS.get(str(tensor.layout), ()):
        yield getattr(tensor, name)()


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


def leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """Yield the leaves that a backward pass from these tensors reaches."""
    tensors = roots if isinstance(roots, list | tuple) else [roots]
    todo = [
        each.grad_fn
        for each in tensors
        if isinstance(each, torch.Tensor) and each.grad_fn is not None
    ]
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
