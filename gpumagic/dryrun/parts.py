"""What a namespace is sent as, on both sides: functions, classes and storages as plain parts, and shared memory.

The worker imports this before torch, so torch is imported where it is used.

On Linux the shared memory has no name and is gone with the process that holds it, however that ends; elsewhere it is a
temporary file, which the parent removes. The worker maps it privately, so that what a cell writes stays there.
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

find_code: Callable[[types.CodeType], types.CodeType] = lambda code: code  # noqa: E731  # the worker puts its own there
"""Returns the code to run for a function's code: the same, or one whose passes of loops are counted."""
coming: Callable[[StoragePart], contextlib.AbstractContextManager[object]]
coming = lambda _: contextlib.nullcontext()  # noqa: E731
"""As above: returns what a storage on a device is made in."""


blanks: list[Any] = []
"""The memory of fractions that were not sent, which reads as zeros until something is put there."""
GRAPH = "graph"
"""In a tensor's state, what its graph saved and the leaves that it leads to."""
gone_back: list[bool] = []
"""Has something for each graph of an earlier cell that a backward pass has gone through."""


class CannotDryRun(RuntimeError):
    """The cell does something whose memory cannot be foretold; the message names it."""


_QUIET = frozenset({
    "write", "writelines", "writerow", "writerows", "flush", "close", "join", "acquire", "release", "notify",
    "notify_all", "execute", "executemany", "executescript", "commit", "rollback", "cursor",
})  # fmt: skip
"""Methods of files, databases, threads and locks of which nothing is missed where they do nothing."""


class Absent:
    """Stands for what could not be sent, and says so as soon as it is used for more than it can stand for.

    A `with` over it runs its body: a lock has nobody to keep out here, and nothing is left to close.

    Args:
        what: what it is, such as ``"an open file"``.
        is_quiet: whether all of its methods do nothing and return it, as for a log of a run.
    """

    def __init__(self, what: str, is_quiet: bool = False) -> None:
        self.__dict__.update(_what=what, _is_quiet=is_quiet)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise CannotDryRun(f"it uses {self.__dict__['_what']}, which cannot be sent to a dry run")

    def _do_nothing(self, *_: object, **__: object) -> Absent:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._do_nothing if self.__dict__["_is_quiet"] or name in _QUIET else self._refuse()

    def __reduce__(self) -> tuple[Any, ...]:
        return Absent, (self.__dict__["_what"], self.__dict__["_is_quiet"])

    def __enter__(self) -> Absent:  # noqa: PYI034  # typing.Self is 3.11
        return self

    def __exit__(self, *_: object) -> None:
        pass

    __torch_function__ = _refuse  # which torch calls where one is among a function's arguments
    __call__ = __iter__ = __len__ = __getitem__ = __setitem__ = __next__ = __bool__ = _refuse
    __add__ = __mul__ = __sub__ = __contains__ = __setattr__ = __float__ = __int__ = _refuse


@dataclass
class StoragePart:
    """A tensor's storage: on the CPU with what is in it, on a device with its address."""

    device: str
    nbytes: int
    contents: Any = None
    """Sent as a `pickle.PickleBuffer`; there it is memory that can be written to."""
    address: int = 0
    made: Any = None


def fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    """Put the contents, if there are any, into a cell."""
    if contents:
        cell.cell_contents = contents[0]


streams: dict[int, Any] = {}
"""The streams here, by the number that each has in the notebook."""


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
    made = module.Event(enable_timing=True)
    made.record()
    return made


def fill_object(made: Any, state: Any) -> None:
    """Give an object its attributes without asking it for anything: its `__getattr__` may need them already."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:  # an object with slots alone has no place for them
        vars(made).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)


def dead_reference() -> weakref.ReferenceType[Any]:
    """Return a weak reference to an object that is gone."""
    return weakref.ref(type("Gone", (), {})())


def make_sharing(kind: Any) -> Any:
    """Return an object that shares its attributes with all others of its class."""
    made = kind.__new__(kind)
    made.__dict__ = kind._shared_state
    return made


def make_function(
    code: bytes, scope: dict[str, Any], name: str, closure: Any
) -> types.FunctionType:
    """Return a function of the notebook's."""
    found = find_code(marshal.loads(code))  # noqa: S302  # from the same Python, over a pipe of ours
    return types.FunctionType(found, scope, name, None, closure)


def make_cached(function: Any, settings: dict[str, Any]) -> Any:
    """Return a function of `functools.lru_cache` that has cached nothing yet."""
    return functools.lru_cache(**settings)(function)


def make_class(meta: type, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    """Return a class of the notebook's, without its methods yet."""
    made = types.new_class(name, bases, {"metaclass": meta}, lambda scope: scope.update(body))
    assert isinstance(made, type)
    if made.__module__ == "__main__" and made.__qualname__ == name:
        vars(sys.modules["__main__"]).setdefault(
            name, made
        )  # where pickle looks, as when the cell saves a model
    return made


def fill_attributes(made: Any, attributes: dict[str, Any]) -> None:
    """Give a function its defaults and attributes, a class its methods and attributes."""
    for name, value in attributes.items():
        if name == "__dict__":
            made.__dict__.update(value)
        else:
            setattr(made, name, value)


def make_tensor(
    storage: StoragePart,
    dtype: str,
    geometry: tuple[Any, ...],
    requires_grad: bool,
    parameter: bool,
) -> Any:
    """Return a tensor over its storage."""
    import torch

    whole = _storage(storage)
    made = torch.empty(0, dtype=getattr(torch, dtype), device=whole.device)
    return _in_autograd(
        made.set_(whole, geometry[2], geometry[0], geometry[1]), requires_grad, parameter
    )


def make_sparse(
    layout: str,
    components: list[Any],
    shape: tuple[int, ...],
    is_coalesced: bool,
    requires_grad: bool,
    parameter: bool,
) -> Any:
    """Return a sparse tensor over its components."""
    import torch

    if layout == "torch.sparse_coo":
        made = torch.sparse_coo_tensor(
            *components, shape, is_coalesced=is_coalesced, check_invariants=False
        )
    else:
        kind = getattr(torch, layout.removeprefix("torch."))
        made = torch.sparse_compressed_tensor(
            *components, shape, layout=kind, check_invariants=False
        )
    return _in_autograd(made, requires_grad, parameter)


def _in_autograd(made: Any, requires_grad: bool, parameter: bool) -> Any:
    import torch

    return (
        torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)
    )


def fill_tensor(tensor: Any, state: dict[str, Any]) -> None:
    """Give a tensor its gradient, the end of its graph, and the attributes that the user set."""
    graph, grad = state.pop(GRAPH, None), state.pop("grad", None)
    if graph is not None:
        _lead_back(tensor, *graph)
    if grad is not None and not isinstance(grad, Absent):
        tensor.grad = grad
    vars(tensor).update(state)


def _lead_back(tensor: Any, saved: list[StoragePart], leaves: list[Any]) -> None:
    """Put a node behind a tensor for its graph: it keeps what that saved, and gives the leaves gradients."""
    import torch

    kept = [make_tensor(each, "uint8", ((each.nbytes,), (1,), 0), False, False) for each in saved]
    # One leaf of our own, as all of the others may be unknown.
    known = [
        torch.empty(0, requires_grad=True),
        *(each for each in leaves if not isinstance(each, Absent)),
    ]
    _earlier_graph().apply(tensor, kept, *known)


@functools.cache
def _earlier_graph() -> Any:
    import torch

    class EarlierGraph(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, made: Any, kept: list[Any], *leaves: Any) -> Any:
            ctx.mark_dirty(made)
            ctx.kept, ctx.leaves = kept, leaves
            return made

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            gone_back.append(True)
            ctx.kept = None
            return None, None, *map(torch.zeros_like, ctx.leaves)

    return EarlierGraph


def _storage(part: StoragePart) -> Any:
    import torch

    if part.made is None:
        if part.contents is not None:
            flat = torch.frombuffer(part.contents, dtype=torch.uint8)
        else:
            with coming(part):
                flat = torch.empty(part.nbytes, dtype=torch.uint8, device=part.device)
        part.made = flat.untyped_storage()
    return part.made


SMALL = 1 << 20
"""Bytes up to which contents go with the rest, in place of through shared memory."""
ROOM = 256 << 20
"""Bytes of all that is shared with one dry run."""
_PAGE = mmap.ALLOCATIONGRANULARITY
_FRACTIONS = "efdgc"
"""The ends of formats of fractions; that of a tensor's storage is ``c`` or, of whole numbers, ``b``."""


class Slot(NamedTuple):
    """Where memory of the notebook lies in what is shared."""

    offset: int | None
    """None where there was no room."""
    nbytes: int
    is_whole: bool
    """Whether it holds whole numbers."""


class SharedMemory:
    """What one dry run gets.

    Attributes:
        path: what the worker opens.
        slots: where large contents lie, in the order in which they were sent.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file: IO[bytes] = open(os.memfd_create("gpumagic", os.MFD_CLOEXEC), "w+b")  # noqa: PTH123, SIM115
            self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="gpumagic-")  # noqa: SIM115  # until `close`
            self.path = self._file.name
        self.slots: list[Slot] = []
        self._used = 0

    def put(self, buffer: pickle.PickleBuffer) -> bool:
        """Copy contents that are sent; return whether they are small, and go with the rest."""
        contents, is_whole = buffer.raw(), (memoryview(buffer).format or "")[-1:] not in _FRACTIONS
        if contents.nbytes <= SMALL:
            return True
        offset = None
        if self._used + contents.nbytes <= ROOM:
            with contextlib.suppress(OSError):  # no room there either
                self._file.seek(self._used)
                self._file.write(contents)
                self._file.flush()
                offset, self._used = self._used, -(-(self._used + contents.nbytes) // _PAGE) * _PAGE
        self.slots.append(Slot(offset, contents.nbytes, is_whole))
        return False

    def close(self) -> None:
        """Let go of it; what the worker has mapped stays until it ends."""
        self._file.close()


def mapped(descriptor: int, slot: Slot) -> Any:
    """Return what lies there, as memory of this process alone; what is not there reads as zeros, and takes no pages.

    Args:
        descriptor: of the shared memory.
        slot: where.
    """
    if slot.offset is not None:
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(descriptor, slot.nbytes, flags, access, offset=slot.offset)
    memory = mmap.mmap(-1, slot.nbytes)
    if not slot.is_whole:
        blanks.append(memory)
    return memory
