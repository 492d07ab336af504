"""What a namespace is sent as: functions, classes and storages in plain parts, and shared memory.

The notebook's process names the functions here when it packs, and the worker's process calls them when it unpacks. The
worker imports this before torch, so torch is imported where it is used.

On Linux the shared memory has no name and is gone with the process that holds it, however that ends; elsewhere it is a
temporary file, which the notebook's process removes. The worker maps it privately, so that what a cell writes stays
there.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import mmap
import os
import pickle
import sys
import tempfile
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, NoReturn

MakeRoom = Callable[["StoragePart"], contextlib.AbstractContextManager[object]]
"""Returns what a storage on a device is made in."""
FindCode = Callable[[types.CodeType], types.CodeType]
"""Returns the code to run for a function's code: the same, or one in which passes of loops are counted."""


@dataclass
class _Unpacking:
    """How this process unpacks a notebook, which it does once."""

    make_room: MakeRoom = contextlib.nullcontext
    find_code: FindCode = lambda code: code


_unpacking = _Unpacking()


def unpack_with(make_room: MakeRoom, find_code: FindCode) -> None:
    """Set how this process unpacks a notebook.

    Args:
        make_room: returns what a storage on a device is made in.
        find_code: returns the code to run for a function's code.
    """
    _unpacking.make_room = make_room
    _unpacking.find_code = find_code


blanks: list[Any] = []
"""The memory of fractions that were not sent, which reads as zeros until something is put there."""
GRAPH = "graph"
"""In a tensor's state, what its graph has saved and the leaves that it leads to."""
gone_back: list[bool] = []
"""Has an entry for each graph of an earlier cell that a backward pass has gone through."""


class CannotDryRun(RuntimeError):
    """The cell does something whose memory cannot be foretold; the message names it."""


_QUIET = frozenset({
    "write", "writelines", "writerow", "writerows", "flush", "close", "join", "acquire", "release", "notify",
    "notify_all", "execute", "executemany", "executescript", "commit", "rollback", "cursor",
})  # fmt: skip
"""Methods of files, databases, threads and locks of which nothing is missed where they do nothing."""


class Absent:
    """Stands for what could not be sent, and raises `CannotDryRun` where it is used for more than it can stand for.

    A ``with`` over it runs its body: a lock has nobody to keep out here, and nothing is left to close.

    Args:
        what: what it stands for, such as ``"an open file"``.
        is_quiet: whether all of its methods do nothing and return it, as for a log of a run.
    """

    def __init__(self, what: str, is_quiet: bool = False) -> None:
        self.__dict__.update(_what=what, _is_quiet=is_quiet)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise CannotDryRun(
            f"it uses {self.__dict__['_what']}, which cannot be sent to a dry run"
        )

    def _do_nothing(self, *_: object, **__: object) -> Absent:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if self.__dict__["_is_quiet"] or name in _QUIET:
            return self._do_nothing
        return self._refuse()

    def __reduce__(self) -> tuple[Any, ...]:
        return Absent, (self.__dict__["_what"], self.__dict__["_is_quiet"])

    def __enter__(self) -> Absent:  # noqa: PYI034  # typing.Self is 3.11
        return self

    def __exit__(self, *_: object) -> None:
        pass

    __torch_function__ = (
        _refuse  # which torch calls where one is among a function's arguments
    )
    __call__ = __iter__ = __len__ = __getitem__ = __setitem__ = __next__ = __bool__ = (
        _refuse
    )
    __add__ = __mul__ = __sub__ = __contains__ = __setattr__ = __float__ = __int__ = (
        _refuse
    )


@dataclass
class StoragePart:
    """A tensor's storage: on the CPU with what is in it, on a device with its address."""

    device: str
    nbytes: int
    contents: Any = None
    """Sent as a `pickle.PickleBuffer`, and received as memory that can be written to."""
    address: int = 0
    storage: Any = None
    """The storage in the worker, once it is made."""


def fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    """Put the contents, if there are any, into a cell."""
    if contents:
        cell.cell_contents = contents[0]


streams: dict[int, Any] = {}
"""The streams of this process, by the number that each has in the notebook."""


def make_stream(device: str, number: int, priority: int) -> Any:
    """Return a stream for one of the notebook's; 0 is the number of each device's default one."""
    import torch

    module: Any = torch.get_device_module(torch.device(device).type)
    if not number:
        return module.default_stream(device)
    if number not in streams:
        streams[number] = module.Stream(device=device, priority=priority)
    return streams[number]


def make_generator(device: str, seed: int) -> Any:
    """Return a generator of a device, whose numbers are not known."""
    import torch

    return torch.Generator(device).manual_seed(seed)


def make_event(device_type: str) -> Any:
    """Return an event that has been recorded."""
    import torch

    module: Any = torch.get_device_module(device_type)
    event = module.Event(enable_timing=True)
    event.record()
    return event


def fill_object(obj: Any, state: Any) -> None:
    """Give an object its attributes without asking it for anything: its `__getattr__` may need them already.

    Args:
        obj: the object.
        state: its attributes, or these and its slots.
    """
    attributes = state
    slots = None
    if isinstance(state, tuple):
        attributes, slots = state
    if attributes:  # an object with slots alone has no place for them
        vars(obj).update(attributes)
    if slots:
        for name, value in slots.items():
            object.__setattr__(obj, name, value)


def dead_reference() -> weakref.ReferenceType[Any]:
    """Return a weak reference to an object that is gone."""
    return weakref.ref(type("Gone", (), {})())


def make_sharing(kind: Any) -> Any:
    """Return an object that shares its attributes with all others of its class."""
    obj = kind.__new__(kind)
    obj.__dict__ = kind._shared_state
    return obj


def make_function(
    code: bytes,
    scope: dict[str, Any],
    name: str,
    closure: Any,
) -> types.FunctionType:
    """Return a function of the notebook's."""
    own = marshal.loads(code)  # noqa: S302  # from the same Python, over a pipe of ours
    return types.FunctionType(_unpacking.find_code(own), scope, name, None, closure)


def make_cached(function: Any, settings: dict[str, Any]) -> Any:
    """Return a function under `functools.lru_cache` that has cached nothing yet."""
    return functools.lru_cache(**settings)(function)


def make_class(
    meta: type, name: str, bases: tuple[type, ...], body: dict[str, Any]
) -> type:
    """Return a class of the notebook's, without its methods yet."""
    keywords = {"metaclass": meta}
    kind = types.new_class(name, bases, keywords, lambda scope: scope.update(body))
    assert isinstance(kind, type)
    is_global = kind.__module__ == "__main__" and kind.__qualname__ == name
    if is_global:  # pickle looks for it there, as when the cell saves a model
        vars(sys.modules["__main__"]).setdefault(name, kind)
    return kind


def fill_attributes(owner: Any, attributes: dict[str, Any]) -> None:
    """Give a function its defaults and attributes, a class its methods and attributes."""
    for name, value in attributes.items():
        if name == "__dict__":
            owner.__dict__.update(value)
        else:
            setattr(owner, name, value)


def make_tensor(
    storage: StoragePart,
    dtype: str,
    geometry: tuple[Any, ...],
    requires_grad: bool,
    parameter: bool,
) -> Any:
    """Return a tensor over its storage.

    Args:
        storage: the storage.
        dtype: its name in torch.
        geometry: its size, its strides and its offset in the storage, in elements.
        requires_grad: whether it does.
        parameter: whether it is one.
    """
    import torch

    whole = _storage(storage)
    size, stride, offset = geometry
    tensor = torch.empty(0, dtype=getattr(torch, dtype), device=whole.device)
    tensor.set_(whole, offset, size, stride)
    return _in_autograd(tensor, requires_grad, parameter)


def make_sparse(
    layout: str,
    components: list[Any],
    shape: tuple[int, ...],
    is_coalesced: bool,
    requires_grad: bool,
    parameter: bool,
) -> Any:
    """Return a sparse tensor over its components.

    Args:
        layout: as torch writes it, such as ``"torch.sparse_coo"``.
        components: its indices and its values.
        shape: its size.
        is_coalesced: whether each index stands there once, in order.
        requires_grad: whether it does.
        parameter: whether it is one.
    """
    import torch

    if layout == "torch.sparse_coo":
        tensor = torch.sparse_coo_tensor(
            *components, shape, is_coalesced=is_coalesced, check_invariants=False
        )
    else:
        kind = getattr(torch, layout.removeprefix("torch."))
        tensor = torch.sparse_compressed_tensor(
            *components, shape, layout=kind, check_invariants=False
        )
    return _in_autograd(tensor, requires_grad, parameter)


def _in_autograd(tensor: Any, requires_grad: bool, parameter: bool) -> Any:
    import torch

    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def fill_tensor(tensor: Any, state: dict[str, Any]) -> None:
    """Give a tensor its gradient, the end of its graph, and the attributes that the user set."""
    graph = state.pop(GRAPH, None)
    grad = state.pop("grad", None)
    if graph is not None:
        _lead_back(tensor, *graph)
    if grad is not None and not isinstance(grad, Absent):
        tensor.grad = grad
    vars(tensor).update(state)


def _lead_back(tensor: Any, saved: list[StoragePart], leaves: list[Any]) -> None:
    """Put a node behind a tensor for its graph: it keeps what that has saved, and gives the leaves gradients."""
    import torch

    kept = []
    for part in saved:
        whole = ((part.nbytes,), (1,), 0)
        kept.append(
            make_tensor(part, "uint8", whole, requires_grad=False, parameter=False)
        )
    known = [
        torch.empty(0, requires_grad=True)
    ]  # one of our own, as all others may be unknown
    for leaf in leaves:
        if not isinstance(leaf, Absent):
            known.append(leaf)
    _earlier_graph().apply(tensor, kept, *known)


@functools.cache
def _earlier_graph() -> Any:
    """Return the class of the nodes that stand for graphs of earlier cells."""
    import torch

    class EarlierGraph(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any, kept: list[Any], *leaves: Any) -> Any:
            ctx.mark_dirty(tensor)
            ctx.kept = kept
            ctx.leaves = leaves
            return tensor

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            gone_back.append(True)
            ctx.kept = None
            return None, None, *map(torch.zeros_like, ctx.leaves)

    return EarlierGraph


def _storage(part: StoragePart) -> Any:
    import torch

    if part.storage is None:
        if part.contents is not None:
            flat = torch.frombuffer(part.contents, dtype=torch.uint8)
        else:
            with _unpacking.make_room(part):
                flat = torch.empty(part.nbytes, dtype=torch.uint8, device=part.device)
        part.storage = flat.untyped_storage()
    return part.storage


SMALL = 1 << 20
"""Bytes up to which contents are sent with the rest, and not through shared memory."""
ROOM = 256 << 20
"""Bytes at most of all that is shared with one dry run."""
_PAGE = mmap.ALLOCATIONGRANULARITY
_FRACTIONS = ("e", "f", "d", "g", "c")
"""How the formats of fractions end; that of a tensor's storage is ``c``, or ``b`` where it has whole numbers."""


class Slot(NamedTuple):
    """Where memory of the notebook lies in what is shared."""

    offset: int | None
    """None where there was no room."""
    nbytes: int
    is_whole: bool
    """Whether it holds whole numbers."""


class SharedMemory:
    """The contents of the host's memory that one dry run gets; held by the notebook's process.

    Attributes:
        path: what the worker opens.
        slots: where large contents lie, in the order in which they were sent.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("gpumagic", os.MFD_CLOEXEC)
            self._file: IO[bytes] = open(descriptor, "w+b")  # noqa: PTH123, SIM115
            self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="gpumagic-")  # noqa: SIM115  # until `close`
            self.path = self._file.name
        self.slots: list[Slot] = []
        self._used = 0

    def put(self, buffer: pickle.PickleBuffer) -> bool:
        """Copy contents that are sent; return whether they are small, and are sent with the rest."""
        contents = buffer.raw()
        if contents.nbytes <= SMALL:
            return True
        element = memoryview(buffer).format or ""
        is_whole = not element.endswith(_FRACTIONS)
        offset = self._copy(contents)
        self.slots.append(Slot(offset, contents.nbytes, is_whole))
        return False

    def _copy(self, contents: memoryview) -> int | None:
        """Return where contents lie, in pages of their own; None where there is no room."""
        end = self._used + contents.nbytes
        if end > ROOM:
            return None
        offset = self._used
        try:
            self._file.seek(offset)
            self._file.write(contents)
            self._file.flush()
        except OSError:  # the machine has no room either
            return None
        pages = -(-end // _PAGE)
        self._used = pages * _PAGE
        return offset

    def close(self) -> None:
        """Let go of it; what the worker has mapped stays until it ends."""
        self._file.close()


def mapped(descriptor: int, slot: Slot) -> Any:
    """Return shared contents as memory of this process alone; what is not there reads as zeros, and takes no pages.

    Args:
        descriptor: of the shared memory.
        slot: where in it they lie.
    """
    if slot.offset is not None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(
            descriptor, slot.nbytes, mmap.MAP_PRIVATE, access, offset=slot.offset
        )
    memory = mmap.mmap(-1, slot.nbytes)
    if not slot.is_whole:
        blanks.append(memory)
    return memory
