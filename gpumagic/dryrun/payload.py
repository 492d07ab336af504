"""A namespace as code and metadata: what of the notebook a dry run needs, without a byte of the devices'.

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
from collections.abc import Iterable, Mapping
from typing import Any

from gpumagic._compat import torch_private
from gpumagic.dryrun import parts, sendable
from gpumagic.dryrun.targets import CUDA, Target
from gpumagic.heap.kinds import Graphs
from gpumagic.heap.storages import COMPONENTS
from gpumagic.memory.allocator import rounded
from gpumagic.source.frames import names_looked_up

_NOT_SENT = frozenset(
    {"__builtins__", "In", "_ih", "_dh", "get_ipython", "exit", "quit", "open", "_i", "_ii", "_iii"}
)
_CLASS_OWN = frozenset(
    {
        "__dict__",
        "__weakref__",
        "_abc_impl",
        "__static_attributes__",
        "__firstlineno__",
    }
)

_METHODS = (types.FunctionType, property, classmethod, staticmethod)


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
    bad: set[str] = set()
    names = [*names, *(sendable.holders(namespace) if target.is_here else ())]
    while True:
        packed = Payload(namespace, target)
        try:
            failed = packed.fill(names, extra, bad)
        except BaseException:  # Ctrl-C
            packed.shared.close()
            raise
        if failed is None:
            return packed
        packed.shared.close()
        bad.add(failed)


def _undisturbed(obj: Any, reduced: Any) -> Any:
    """Let an object be made anew without a question to its `__getattr__`, which may need attributes to answer."""
    defined = {name for kind in type(obj).__mro__ for name in vars(kind)}
    is_usual = isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__ and len(reduced) > 2  # type: ignore[attr-defined]
    if (
        not is_usual
        or "__getattr__" not in defined
        or "__setstate__" in defined
        or reduced[2] is None
    ):
        return reduced
    return (*reduced, *[None] * (5 - len(reduced)), parts.fill_object)


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
        self._backend, self._has_sparse = target.backend, target.engine == CUDA
        self._graphs, self._keeps_graphs = Graphs(), target.tells_segments()
        self._todo: list[tuple[int, str]] = []
        self._done: set[tuple[int, str]] = set()
        self._storages: dict[int, parts.StoragePart] = {}
        self._held: list[Any] = []  # what ids in the memo stand for must live as long as it does

    def fill(self, names: list[str], extra: object, bad: set[str]) -> str | None:
        """Write everything; return the name that could not be written."""
        self._todo += [(0, name) for name in names]
        if extra is not None:
            self.dump((0, "__dry_run__", extra))
        while self._todo:
            scope, name = self._todo.pop()
            if (scope, name) in self._done or name in _NOT_SENT or name not in self.scopes[scope]:
                continue
            self._done.add((scope, name))
            value = self.scopes[scope][name]
            label = f"{scope}.{name}"
            try:
                self.dump((scope, name, parts.Absent(f"`{name}`") if label in bad else value))
            except Exception:
                return label
        return None

    def _number_of(self, scope: Mapping[str, Any]) -> int | None:
        return next((index for index, known in enumerate(self.scopes) if known is scope), None)

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, dict):
            return None
        scope = self._number_of(obj)
        return sendable.module_of(obj) if scope is None else scope

    def reducer_override(self, obj: Any) -> Any:  # noqa: PLR0911  # one way a kind of object
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return self._tensor(torch, obj)
        if isinstance(obj, types.FunctionType):
            return NotImplemented if sendable.is_importable(obj) else self._function(obj)
        if isinstance(obj, type):
            if obj in {type(None), type(NotImplemented), type(...)} or sendable.is_importable(obj):
                return NotImplemented
            return (
                self._class(obj)
                if obj.__flags__ & sendable.IS_HEAP_TYPE
                else sendable.builtin_class(obj)
            )
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        otherwise = sendable.special(obj)
        if otherwise is not None:
            return otherwise
        if type(obj).__module__ == "dataclasses" and type(obj).__name__.startswith("_"):
            return next(
                (name for name, each in vars(dataclasses).items() if each is obj), NotImplemented
            )
        numpy = sys.modules.get("numpy")
        if (
            numpy is not None
            and type(obj) is numpy.ndarray
            and obj.nbytes > parts.SMALL
            and not obj.flags.forc
        ):
            obj = numpy.ascontiguousarray(obj)  # else it is no buffer
        if isinstance(obj, tuple) and isinstance(type(obj).__new__, types.FunctionType):
            # Of a named tuple it reads a scope that may be filled only after this
            return tuple.__new__, (type(obj), tuple(obj)), getattr(obj, "__dict__", None) or None
        return self._plain(obj)

    def _plain(self, obj: Any) -> Any:
        """Return the object's own way of being pickled; what has none is left out and said."""
        shared = sendable.shared_state(obj)
        if shared is not None:
            return parts.make_sharing, (type(obj),), shared, None, None, parts.fill_object
        dispatch = copyreg.dispatch_table.get(type(obj))
        try:
            reduced = dispatch(obj) if dispatch else obj.__reduce_ex__(5)
        except Exception:
            return parts.Absent, (sendable.described(obj),)
        self._held.append(reduced)
        return _undisturbed(obj, reduced)

    def _tensor(self, torch: Any, tensor: Any) -> Any:
        kind, layout, device = type(tensor), str(tensor.layout), tensor.device.type
        if torch.nn.parameter.is_lazy(
            tensor
        ):  # of a lazy module that has not run: no storage, and few methods
            return (
                kind,
                (tensor.requires_grad, str(tensor.device), tensor.dtype),
                dict(vars(tensor)) or None,
            )
        if device not in {self._backend, "cpu", "meta"}:
            return parts.Absent, (
                f"a tensor on {tensor.device} (make it on {self._backend} in the cell)",
            )
        is_sparse = layout in COMPONENTS and (device == "cpu" or self._has_sparse)
        is_plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)
        if kind not in {torch.Tensor, torch.nn.Parameter} or not (is_plain or is_sparse):
            return parts.Absent, (f"a tensor of the kind {kind.__name__} with layout {layout}",)
        if torch_private.IS_FUNCTIONAL.get()(tensor) or tensor.is_conj() or tensor.is_neg():
            return parts.Absent, ("a lazily conjugated or functional tensor",)
        state = dict(vars(tensor))
        if not tensor.is_leaf:
            state[parts.GRAPH] = self._graph(torch, tensor)
        elif tensor.grad is not None:
            state["grad"] = tensor.grad
        autograd = (tensor.is_leaf and tensor.requires_grad, kind is torch.nn.Parameter)
        make: Any = parts.make_sparse
        arguments: tuple[Any, ...]
        if is_sparse:
            bare = tensor.detach()
            components = [getattr(bare, name)() for name in COMPONENTS[layout]]
            is_coalesced = layout == "torch.sparse_coo" and tensor.is_coalesced()
            arguments = (layout, components, tuple(tensor.shape), is_coalesced, *autograd)
        else:
            is_whole = not (tensor.is_floating_point() or tensor.is_complex())
            geometry = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
            storage, dtype = (
                self._storage(tensor.untyped_storage(), is_whole),
                str(tensor.dtype).removeprefix("torch."),
            )
            make, arguments = parts.make_tensor, (storage, dtype, geometry, *autograd)
        self._held += [state, arguments]
        return make, arguments, state or None, None, None, parts.fill_tensor if state else None

    def _graph(self, torch: Any, tensor: Any) -> tuple[list[parts.StoragePart], list[Any]]:
        """Return the storages on the tensor's device that its graph keeps, where that is known, and its leaves."""
        found = self._graphs.walk(tensor.grad_fn) or ()
        leaves = {id(each): each for each in found if each.is_leaf and each.requires_grad}
        saved = [
            self._storage(each.untyped_storage())
            for each in found
            if self._keeps_graphs
            and each.device == tensor.device
            and id(each) not in leaves
            and each.device.type != "cpu"
            and each.layout == torch.strided
            and not torch_private.IS_FUNCTIONAL.get()(each)
        ]
        if tensor.device.type != "cpu" and not self._keeps_graphs:
            self.notes.append(
                "when memory of graphs of earlier cells is freed: all of it stays in use"
            )
        return saved, list(leaves.values())

    def _storage(self, storage: Any, is_whole: bool = False) -> parts.StoragePart:
        key = torch_private.STORAGE_IDENTITY.get()(storage)
        if key not in self._storages:
            device, nbytes, address = str(storage.device), storage.nbytes(), storage.data_ptr()
            self.device_bytes[device] += rounded(nbytes) if nbytes else 0
            part = self._storages[key] = parts.StoragePart(device, nbytes, address=address)
            if device == "cpu" and nbytes:
                kind = (
                    ctypes.c_byte if is_whole else ctypes.c_char
                )  # which `SharedMemory` tells apart
                part.contents = pickle.PickleBuffer((kind * nbytes).from_address(address))
            self._held.append(storage)
        return self._storages[key]

    def _function(self, function: types.FunctionType) -> Any:
        scope = self._number_of(function.__globals__)
        if scope is None and sendable.module_of(function.__globals__) is None:  # not a library's
            scope = len(self.scopes)
            self.scopes.append(function.__globals__)
        if scope is not None:
            self.files.add(function.__code__.co_filename)
            self._todo += [(scope, name) for name in names_looked_up(function.__code__)]
        state = {
            name: getattr(function, name)
            for name in (
                "__defaults__",
                "__kwdefaults__",
                "__qualname__",
                "__module__",
                "__doc__",
                "__dict__",
            )
        }
        arguments = (
            marshal.dumps(function.__code__),
            function.__globals__,
            function.__name__,
            function.__closure__,
        )
        self._held += [state, arguments]
        return parts.make_function, arguments, state, None, None, parts.fill_attributes

    def _class(self, made: type) -> Any:
        body = {name: value for name, value in vars(made).items() if name not in _CLASS_OWN}
        early: dict[str, Any] = {"__module__": made.__module__, "__qualname__": made.__qualname__}
        if "__orig_bases__" in body:  # which a generic class has to have from the beginning
            early["__orig_bases__"] = body["__orig_bases__"]
        if isinstance(
            made, enum.EnumMeta
        ):  # its members are made with it, by what it says of that itself
            members: Mapping[str, enum.Enum] = made.__members__
            early |= {name: member.value for name, member in members.items()}
            of_members = {"__init__": body.get("__init__"), "_missing_": body.get("_missing_")}
            early |= {name: value for name, value in of_members.items() if value is not None}
            body = {
                name: value
                for name, value in body.items()
                if name not in early and type(value) in _METHODS
            }
        slots = body.pop("__slots__", None)
        if slots is not None:
            early["__slots__"] = slots
            names = (slots,) if isinstance(slots, str) else tuple(slots)
            body = {name: value for name, value in body.items() if name not in names}
        bases = (
            () if typing.is_typeddict(made) else made.__bases__
        )  # its dict comes with its metaclass
        arguments = (type(made), made.__name__, bases, early)
        self._held += [body, arguments]
        return parts.make_class, arguments, body, None, None, parts.fill_attributes
