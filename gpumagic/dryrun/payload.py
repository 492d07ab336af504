"""The notebook's variables that a dry run needs, pickled as code and metadata, without a byte of the devices'.

Tensors become shape, dtype, strides, device and storage identity; those on the CPU keep their contents, the large ones
in `SharedMemory`, and what has no room there is assumed to be zeros.
Functions and classes of the notebook go by value, with the names they use; others by reference, as in pickle. What
cannot be sent becomes an `Absent`, which says so if the cell touches it. Nothing here changes what it looks at.

Of a graph that a tensor leads to, its leaves are sent, which get gradients from a backward pass, and the storages that
its nodes saved, which live in the dry run for as long as the graph would. Only where they lie in the allocator's
segments is known: what they leave behind is gaps, and how large those are decides what fits.
"""

from __future__ import annotations

import copyreg
import ctypes
import dataclasses
import enum
import importlib
import io
import marshal
import pickle
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from gpumagic._compat import torch_private
from gpumagic.dryrun import parts, sendable
from gpumagic.dryrun.targets import CUDA, Target
from gpumagic.heap.kinds import Graphs
from gpumagic.heap.storages import COMPONENTS
from gpumagic.memory.allocator import rounded
from gpumagic.source.frames import names_looked_up

_NOT_SENT = frozenset({
    "__builtins__", "In", "_ih", "_dh", "get_ipython", "exit", "quit", "open", "_i", "_ii", "_iii",
})  # fmt: skip
"""What the notebook's process has for itself."""
_CLASS_OWN = frozenset({
    "__dict__", "__weakref__", "_abc_impl", "__static_attributes__", "__firstlineno__",
})  # fmt: skip
"""What a class has of its own making."""
_METHODS = (types.FunctionType, property, classmethod, staticmethod)
_FUNCTION_STATE = (
    "__defaults__", "__kwdefaults__", "__qualname__", "__module__", "__doc__", "__dict__",
)  # fmt: skip
_SINGLETON_TYPES = frozenset({type(None), type(NotImplemented), type(...)})
"""Types of which pickle has its own names."""
_STATE_SETTER = 5
"""The place of the function that sets the state in what `__reduce_ex__` returns."""
Reduced = Any
"""What `__reduce_ex__` returns: how an object is made anew."""


def pack(
    namespace: Mapping[str, Any], names: Iterable[str], extra: object, target: Target
) -> Payload:
    """Return what code that uses these names of the namespace needs.

    Args:
        namespace: the notebook's.
        names: those the code uses.
        extra: one more object, under the name ``__dry_run__``.
        target: the devices that the dry run has; tensors on others are left out. Where it is known what lies where on
            them, what graphs keep is sent with the tensors that lead to them; where none of them is here, nothing is
            sent that only holds tensors, and so stays alive in the dry run.
    """
    names = list(names)
    if target.is_here:
        names += sendable.holders(namespace)
    failed: set[Variable] = set()
    while True:
        packed = Payload(namespace, target)
        try:
            also_failed = packed.fill(names, extra, failed)
        except BaseException:  # Ctrl-C
            packed.shared.close()
            raise
        if not also_failed:
            return packed
        # What was written in part stands in the way of what follows, so all of it is written again without these.
        packed.shared.close()
        failed |= also_failed


class Variable(NamedTuple):
    """A name in one of the scopes that are sent."""

    scope: int
    name: str


class Payload(pickle.Pickler):
    """What is sent.

    Args:
        namespace: the notebook's variables.
        target: the devices that the dry run has.

    Attributes:
        buffer: the names and their values.
        device_bytes: the bytes of the storages on each device, each rounded as an allocator does.
        scopes: the namespaces that functions of it have, of which the first is the notebook's.
        notes: what is not as in the notebook.
        files: the files whose code is in it: cells.
        shared: what the worker maps while it dry-runs.
    """

    def __init__(self, namespace: Mapping[str, Any], target: Target) -> None:
        self.buffer = io.BytesIO()
        self.shared = parts.SharedMemory()
        super().__init__(self.buffer, protocol=5, buffer_callback=self.shared.put)
        self.device_bytes: Counter[str] = Counter()
        self.scopes: list[Mapping[str, Any]] = [namespace]
        self.notes: list[str] = []
        self.files: set[str] = set()
        self._backend = target.backend
        self._has_sparse = target.engine == CUDA
        self._graphs = Graphs()
        self._keeps_graphs = target.tells_segments()
        self._todo: list[Variable] = []
        self._done: set[Variable] = set()
        self._storages: dict[int, parts.StoragePart] = {}
        self._held: list[
            Any
        ] = []  # what ids in the memo stand for must live as long as it does

    def fill(
        self, names: Iterable[str], extra: object, absent: Collection[Variable]
    ) -> set[Variable]:
        """Write everything; return what could not be written, after which the rest cannot be read.

        Args:
            names: of the first scope; what their values use follows.
            extra: one more object; None for none.
            absent: what is left out.
        """
        failed = set()
        for name in names:
            self._todo.append(Variable(0, name))
        if extra is not None:
            self.dump((0, "__dry_run__", extra))
        while self._todo:
            variable = self._todo.pop()
            scope = self.scopes[variable.scope]
            if (
                variable in self._done
                or variable.name in _NOT_SENT
                or variable.name not in scope
            ):
                continue
            self._done.add(variable)
            value = scope[variable.name]
            if variable in absent:
                value = parts.Absent(f"`{variable.name}`")
            try:
                self.dump((*variable, value))
            except Exception:
                failed.add(variable)
        return failed

    def _number_of(self, scope: Mapping[str, Any]) -> int | None:
        """Return the number of a scope that is sent."""
        for number, known in enumerate(self.scopes):
            if known is scope:
                return number
        return None

    def persistent_id(self, obj: Any) -> int | str | None:
        """Return what stands for the names of a scope or of a module, which are not sent with what uses them."""
        if not isinstance(obj, dict):
            return None
        scope = self._number_of(obj)
        return sendable.module_of(obj) if scope is None else scope

    def reducer_override(self, obj: Any) -> Reduced:  # one way a kind of object
        """Return how an object is made anew; `NotImplemented` where pickle knows."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return self._tensor(torch, obj)
        if isinstance(obj, types.FunctionType):
            return (
                NotImplemented if sendable.is_importable(obj) else self._function(obj)
            )
        if isinstance(obj, type):
            return self._type(obj)
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        special = sendable.special(obj)
        if special is not None:
            return special
        if type(obj).__module__ == "dataclasses" and type(obj).__name__.startswith("_"):
            return _name_in_dataclasses(obj)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(obj) is numpy.ndarray:
            is_large = obj.nbytes > parts.SMALL
            if is_large and not obj.flags.forc:
                obj = numpy.ascontiguousarray(obj)  # else it is no buffer
        if isinstance(obj, tuple) and isinstance(type(obj).__new__, types.FunctionType):
            # Of a named tuple it reads a scope that may be filled only after this
            return (
                tuple.__new__,
                (type(obj), tuple(obj)),
                getattr(obj, "__dict__", None) or None,
            )
        return self._plain(obj)

    def _type(self, kind: type) -> Reduced:
        if kind in _SINGLETON_TYPES or sendable.is_importable(kind):
            return NotImplemented
        if kind.__flags__ & sendable.IS_HEAP_TYPE:
            return self._class(kind)
        return sendable.builtin_class(kind)

    def _plain(self, obj: Any) -> Reduced:
        """Return the object's own way of being pickled; what has none is left out and said."""
        shared = sendable.shared_state(obj)
        if shared is not None:
            return (
                parts.make_sharing,
                (type(obj),),
                shared,
                None,
                None,
                parts.fill_object,
            )
        dispatch = copyreg.dispatch_table.get(type(obj))
        try:
            reduced = dispatch(obj) if dispatch else obj.__reduce_ex__(5)
        except Exception:
            return parts.Absent, (sendable.described(obj),)
        self._held.append(reduced)
        return _undisturbed(obj, reduced)

    # ---- Tensors

    def _tensor(self, torch: Any, tensor: Any) -> Reduced:
        if torch.nn.parameter.is_lazy(tensor):
            return _lazy_tensor(tensor)
        missing = self._cannot_send(torch, tensor)
        if missing:
            return parts.Absent, (missing,)
        state = dict(vars(tensor))
        if not tensor.is_leaf:
            state[parts.GRAPH] = self._graph(torch, tensor)
        elif tensor.grad is not None:
            state["grad"] = tensor.grad
        requires_grad = tensor.is_leaf and tensor.requires_grad
        is_parameter = type(tensor) is torch.nn.Parameter
        make: Callable[..., Any]
        arguments: tuple[Any, ...]
        if str(tensor.layout) in COMPONENTS:
            make = parts.make_sparse
            arguments = (*_sparse_parts(tensor), requires_grad, is_parameter)
        else:
            is_whole = not (tensor.is_floating_point() or tensor.is_complex())
            storage = self._storage(tensor.untyped_storage(), is_whole)
            dtype = str(tensor.dtype).removeprefix("torch.")
            geometry = (
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.storage_offset(),
            )
            make = parts.make_tensor
            arguments = storage, dtype, geometry, requires_grad, is_parameter
        self._held += [state, arguments]
        if not state:
            return make, arguments
        return make, arguments, state, None, None, parts.fill_tensor

    def _cannot_send(self, torch: Any, tensor: Any) -> str:
        """Return what a tensor is that cannot be sent; nothing for one that can."""
        kind, device = type(tensor), tensor.device.type
        if device not in {self._backend, "cpu", "meta"}:
            return (
                f"a tensor on {tensor.device} (make it on {self._backend} in the cell)"
            )
        layout = str(tensor.layout)
        if layout in COMPONENTS:
            is_known = device == "cpu" or self._has_sparse
        else:
            is_nested = tensor.is_quantized or tensor.is_nested
            is_known = tensor.layout == torch.strided and not is_nested
        if not is_known or kind not in {torch.Tensor, torch.nn.Parameter}:
            return f"a tensor of the kind {kind.__name__} with layout {layout}"
        if (
            torch_private.IS_FUNCTIONAL.get()(tensor)
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return "a lazily conjugated or functional tensor"
        return ""

    def _graph(
        self, torch: Any, tensor: Any
    ) -> tuple[list[parts.StoragePart], list[Any]]:
        """Return the storages on the tensor's device that its graph keeps, where that is known, and its leaves."""
        leaves: dict[int, Any] = {}
        saved = []
        for other in self._graphs.walk(tensor.grad_fn) or ():
            if other.is_leaf and other.requires_grad:
                leaves[id(other)] = other
            elif self._keeps_graphs and _is_plainly_on(tensor.device, torch, other):
                saved.append(self._storage(other.untyped_storage()))
        if tensor.device.type != "cpu" and not self._keeps_graphs:
            self.notes.append(
                "when memory of graphs of earlier cells is freed: all of it stays in use"
            )
        return saved, list(leaves.values())

    def _storage(self, storage: Any, is_whole: bool = False) -> parts.StoragePart:
        """Return what a storage is sent as, the same for all of its tensors.

        Args:
            storage: it.
            is_whole: whether it holds whole numbers, if it is known what it holds.
        """
        key = torch_private.STORAGE_IDENTITY.get()(storage)
        if key not in self._storages:
            device, nbytes, address = (
                str(storage.device),
                storage.nbytes(),
                storage.data_ptr(),
            )
            part = self._storages[key] = parts.StoragePart(
                device, nbytes, address=address
            )
            if nbytes:
                self.device_bytes[device] += rounded(nbytes)
            if nbytes and device == "cpu":
                # `SharedMemory` tells whole numbers by this type.
                kind = ctypes.c_byte if is_whole else ctypes.c_char
                part.contents = pickle.PickleBuffer(
                    (kind * nbytes).from_address(address)
                )
            self._held.append(storage)
        return self._storages[key]

    # ---- Functions and classes

    def _function(self, function: types.FunctionType) -> Reduced:
        code, scope = function.__code__, function.__globals__
        number = self._number_of(scope)
        if number is None and sendable.module_of(scope) is None:  # not a library's
            number = len(self.scopes)
            self.scopes.append(scope)
        if number is not None:
            self.files.add(code.co_filename)
            self._todo += [Variable(number, name) for name in names_looked_up(code)]
        state = {name: getattr(function, name) for name in _FUNCTION_STATE}
        arguments = marshal.dumps(code), scope, function.__name__, function.__closure__
        self._held += [state, arguments]
        return parts.make_function, arguments, state, None, None, parts.fill_attributes

    def _class(self, made: type) -> Reduced:
        """Return how a class of the notebook's is made: with what has to be there early, then with its body."""
        body = {
            name: value for name, value in vars(made).items() if name not in _CLASS_OWN
        }
        early: dict[str, Any] = {
            "__module__": made.__module__,
            "__qualname__": made.__qualname__,
        }
        if (
            "__orig_bases__" in body
        ):  # which a generic class has to have from the beginning
            early["__orig_bases__"] = body["__orig_bases__"]
        if isinstance(made, enum.EnumMeta):
            early |= _members_of(made, body)
            for name, value in list(body.items()):
                if name in early or type(value) not in _METHODS:
                    del body[name]
        slots = body.pop("__slots__", None)
        if slots is not None:
            early["__slots__"] = slots
            for name in (slots,) if isinstance(slots, str) else slots:
                body.pop(name, None)  # the descriptor of a slot
        bases = made.__bases__
        if typing.is_typeddict(made):
            bases = ()  # its dict comes with its metaclass
        arguments = (type(made), made.__name__, bases, early)
        self._held += [body, arguments]
        return parts.make_class, arguments, body, None, None, parts.fill_attributes


def _undisturbed(obj: Any, reduced: Reduced) -> Reduced:
    """Let an object be made anew without a question to its `__getattr__`, which may need attributes to answer."""
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    make, state = reduced[0], reduced[2]
    if make is not copyreg.__newobj__ or state is None:  # type: ignore[attr-defined]
        return reduced
    defined: set[str] = set()
    for kind in type(obj).__mro__:
        defined.update(vars(kind))
    if "__getattr__" not in defined or "__setstate__" in defined:
        return reduced
    padding = [None] * (_STATE_SETTER - len(reduced))
    return (*reduced, *padding, parts.fill_object)


def _name_in_dataclasses(obj: Any) -> Reduced:
    """Return the name of a marker of the module `dataclasses`, such as that of fields that are keywords only."""
    for name, value in vars(dataclasses).items():
        if value is obj:
            return name
    return NotImplemented


def _lazy_tensor(tensor: Any) -> Reduced:
    """Return how a tensor of a lazy module that has not run is made anew: it has no storage, and few methods."""
    arguments = tensor.requires_grad, str(tensor.device), tensor.dtype
    return type(tensor), arguments, dict(vars(tensor)) or None


def _sparse_parts(tensor: Any) -> tuple[Any, ...]:
    """Return what a sparse tensor is made of."""
    layout = str(tensor.layout)
    bare = tensor.detach()
    components = []
    for name in COMPONENTS[layout]:
        component = getattr(bare, name)
        components.append(component())
    is_coalesced = layout == "torch.sparse_coo" and tensor.is_coalesced()
    return layout, components, tuple(tensor.shape), is_coalesced


def _is_plainly_on(device: Any, torch: Any, tensor: Any) -> bool:
    """Return whether a tensor that a graph has saved has a storage of its own on a device other than the host."""
    if tensor.device != device or device.type == "cpu":
        return False
    return tensor.layout == torch.strided and not torch_private.IS_FUNCTIONAL.get()(
        tensor
    )


def _members_of(made: enum.EnumMeta, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an enum has to have from the beginning: its members, and what it says of their making."""
    members: Mapping[str, enum.Enum] = made.__members__
    early = {name: member.value for name, member in members.items()}
    for name in ("__init__", "_missing_"):
        if body.get(name) is not None:
            early[name] = body[name]
    return early
