"""Labels the blocks of a run by what they are and by the module that they belong to, by watching what torch does.

Runs in the worker's process. A block is a parameter, a gradient, an optimizer's state, an activation; it belongs to the
module whose forward or backward pass asked for it, or whose parameter it goes with. Forward passes are seen by hooks of
all modules, also those that are run again under checkpointing. In a backward pass, the node of the graph that made a
module's output says that the module's part begins, and the node that made its input that it has ended.
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
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpumagic.dryrun import parts
from gpumagic.heap.branches import attributes_of, name_of_type
from gpumagic.heap.kinds import Graphs, modules_in
from gpumagic.heap.storages import COMPONENTS, local_of
from gpumagic.memory.ledger import Ledger, Place

Function = Callable[..., Any]
_SEEN = "gpumagic"
"""The key by which a node's metadata says that it has a hook of ours."""
PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer state"
ACTIVATIONS = "activations"
"""What a block is, as the ledger has it."""


class Modules:
    """Labels blocks in the ledger while the cell runs.

    Args:
        note: called with a method of the ledger and its arguments, which is called at once or when there is a ledger.
        key_of: returns what the ledger knows a tensor's storage by; 0 for one that is not on the device of the dry run.
        where: returns where the cell stands.

    Attributes:
        names: by a module's number the shortest way to it from a variable, as ``"model.layers.3"``; else its class.
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
        self._numbers: dict[int, tuple[ref[nn.Module], int]] = {}
        """Each module and its number, by its identity: a `__hash__` of the user's may do anything."""
        self._owners: dict[int, int] = {}
        """The number of the module that a block belongs to, by the block's key."""
        self._leaves: dict[torch.Tensor, int] = {}
        """The parameters and the numbers of their modules, once the cell has ended; before, nothing may keep one."""
        self._running: list[int] = []
        """The modules whose forward passes run, the innermost last."""

    def watch(self, namespace: Mapping[str, Any]) -> None:
        """Follow modules, optimizers and backward passes for the rest of the process."""
        self._name_all(namespace)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._around(torch.autograd.backward)
        torch.autograd.grad = self._around(torch.autograd.grad)

    # ---- Modules by number

    def _name_all(self, namespace: Mapping[str, Any]) -> None:
        """Name the modules that variables lead to, by themselves or by their attributes, such as a trainer's."""
        named: set[int] = set()
        for name, root in _modules_of(namespace):
            for path, module in modules_in(root):
                if id(module) not in named:
                    named.add(id(module))
                    number = self._number(module)
                    self.names[number] = _joined(name, path)

    def _number(self, module: nn.Module) -> int:
        """Return a module's number; a new one, and those in it, are named by its class for now."""
        known = self._known(module)
        if known is not None:
            return known
        class_name = name_of_type(type(module))
        for path, inner in modules_in(module):
            if self._known(inner) is None:
                number = len(self.names)
                self._numbers[id(inner)] = (ref(inner), number)
                self.names.append(_joined(class_name, path))
        _, number = self._numbers[id(module)]
        return number

    def _known(self, module: nn.Module) -> int | None:
        known = self._numbers.get(id(module))
        if known is None:
            return None
        alive, number = known
        return number if alive() is module else None

    # ---- Which module runs

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        number = self._number(module)
        self._follow_back(args, self._innermost())
        self._label_tensors_of(module, number)
        self._running.append(number)
        self._note(Ledger.enter_module, number)

    def _leave(self, module: nn.Module, _: object, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        number = self._number(module)
        self._follow_back(output, number)
        if number in self._running:
            while self._running.pop() != number:
                pass
        self._note(Ledger.enter_module, self._innermost())

    def _innermost(self) -> int | None:
        return self._running[-1] if self._running else None

    def _follow_back(self, value: Any, number: int | None) -> None:
        """Let the nodes that made some tensors say in a backward pass that a module's part begins."""
        for tensor in tensors_in(value):
            node = tensor.grad_fn
            if node is not None and _SEEN not in node.metadata:
                node.metadata[_SEEN] = True
                node.register_prehook(lambda _: self._note(Ledger.enter_module, number))

    # ---- What a block is

    def label_remaining_blocks(self, namespace: Mapping[str, Any]) -> list[str]:
        """Label at the end what no hook saw, and what graphs still keep; return the modules' names by number."""
        self._name_all(namespace)
        for alive, number in list(self._numbers.values()):
            module = alive()
            if module is not None:
                self._label_tensors_of(module, number)
                for leaf in module._parameters.values():
                    if leaf is not None:
                        self._leaves[leaf] = number
        nodes = self._label_living_objects()
        for tensor in Graphs().walk(*nodes) or ():
            is_parameter = isinstance(tensor, nn.Parameter)
            self._label(tensor, PARAMETERS if is_parameter else ACTIVATIONS)
        return self.names

    def _label_living_objects(self) -> list[Any]:
        """Label the blocks of all parameters, modules and optimizers; return the nodes that made the other tensors."""
        nodes = []
        for obj in gc.get_objects():
            kind = type(obj)
            if issubclass(kind, nn.Parameter):
                self._label_leaf(obj)
            elif issubclass(kind, nn.Module):
                self._label_tensors_of(obj, None)
            elif issubclass(kind, torch.optim.Optimizer):
                self._after_step(obj)
            elif kind is torch.Tensor:
                # A view of what was changed in place since, as FSDP has some, raises an error.
                with contextlib.suppress(RuntimeError):
                    nodes.append(obj.grad_fn)
        return [node for node in nodes if node is not None]

    def _label_tensors_of(self, module: nn.Module, number: int | None) -> None:
        """Label a module's own parameters and buffers, as belonging to it if it has a number."""
        attributes = vars(module)
        for kind in PARAMETERS, BUFFERS:
            tensors = attributes.get(f"_{kind}") or {}
            for tensor in tensors.values():
                self._label(tensor, kind, number)

    def _label(self, tensor: object, kind: str, number: int | None = None) -> None:
        """Label the blocks of a tensor.

        Args:
            tensor: anything; only a tensor on the device of the dry run has some.
            kind: what it is.
            number: the number of the module that it belongs to, if that is known.
        """
        with (
            torch._C.DisableTorchFunction()
        ):  # under `Names` the device would say another name
            keys = [self._key_of(part) for part in with_storages(tensor)]
        for key in keys:
            if not key:
                continue
            self._note(Ledger.mark, key, kind)
            if number is not None and self._owners.get(key) != number:
                self._owners[key] = number
                self._note(Ledger.set_module, key, number)

    def _label_leaf(self, leaf: torch.Tensor) -> None:
        """Label a leaf of a graph, if it is a parameter, and its gradient."""
        if isinstance(leaf, parts.Absent):
            return
        if isinstance(leaf, nn.Parameter):
            self._label(leaf, PARAMETERS)
        if leaf.is_leaf and leaf.grad is not None:
            self._label(leaf.grad, GRADIENTS, self._leaves.get(leaf))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for leaf, state in optimizer.state.items():
            if isinstance(state, dict):
                for value in state.values():
                    self._label(value, OPTIMIZER_STATE, self._leaves.get(leaf))
        for group in optimizer.param_groups:
            for leaf in group["params"]:
                self._label(leaf, PARAMETERS)
                self._label_leaf(leaf)

    def _around(self, function: Function) -> Function:
        """Return a function that begins a backward pass, and notes when that begins and ends."""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if args:
                roots = args[0]
            else:
                roots = kwargs.get("tensors", kwargs.get("outputs"))
            leaves = list(leaves_of(roots))
            for leaf in leaves:
                self._label_leaf(leaf)
            self._note(Ledger.begin_backward, self._where())
            try:
                return function(*args, **kwargs)
            finally:
                self._note(Ledger.end_backward, self._where())
                self._note(Ledger.enter_module, self._innermost())
                for leaf in leaves:
                    self._label_leaf(leaf)

        return watched


def _joined(name: str, path: str) -> str:
    """Return the way to a module in another one, which may be that itself."""
    return f"{name}.{path}" if path else name


def _modules_of(namespace: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    """Return the modules that variables hold, by name, and then those that are attributes of what they hold."""
    variables = []
    attributes = []
    for name, value in list(namespace.items()):
        kind = type(value)
        if name.startswith("_"):
            continue
        if issubclass(kind, nn.Module):
            variables.append((name, value))
        elif not issubclass(kind, type):
            for attribute, held in attributes_of(value).items():
                if issubclass(type(held), nn.Module) and not attribute.startswith("_"):
                    attributes.append((f"{name}.{attribute}", held))
    return variables + attributes


def with_storages(tensor: object) -> Iterator[torch.Tensor]:
    """Yield a tensor if it has a storage, the parts of a sparse one, and what this process has of a DTensor.

    What stands for another tensor inside `vmap` or `grad`, or for a parameter of a lazy module, has no storage.
    """
    if not isinstance(tensor, torch.Tensor):
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or is_lazy(tensor):
        return
    tensor = local_of(tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.layout is torch.strided:
        yield tensor
    for name in COMPONENTS.get(str(tensor.layout), ()):
        yield getattr(tensor, name)()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or the results of an operator or a module."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """Yield the leaves that a backward pass from these tensors reaches."""
    todo = []
    for tensor in roots if isinstance(roots, list | tuple) else [roots]:
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            todo.append(tensor.grad_fn)
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
