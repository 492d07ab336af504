"""Storages with a device and a size and no bytes behind them, made without a compiler. Runs in the worker's process.

torch builds a plain tensor of any device over foreign memory from a DLPack capsule. The memory here is an address that
nothing ever reads. Plain tensors matter: code that asks for `type(p)` must get the answer that it gets on the real
device, and torch adds gradients in place only where nothing else refers to a tensor or its storage, a Python object of
it included. So no Python object of a storage is ever made, and its end is not told by a weak reference: torch calls the
capsule's deleter, which here is C's own ``time``. That needs no Python, which must not run while an exception unwinds.
It writes the time of day to the address that it is given, a mark that `Storages.settle` looks for.

That is safe: torch finds the deleter in the capsule's description, 64 bytes of a page that is never freed, and hands
it the address of these. Nobody reads the first eight of them once the tensor is made: torch has copied the address
that stood there. ``time`` writes eight bytes (a ``time_t``) and nothing else, takes no lock, and may be called
anywhere, even in a signal handler (POSIX). Where C has no such function, a function of Python's leaves the mark.
"""

from __future__ import annotations

import ctypes
import re
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

SPACING = 1 << 40
"""Bytes from one storage's address to the next one's, so that no two overlap. A storage's key is address // SPACING."""
CPU = DispatchKeySet(DispatchKey.CPU)
_EXTENSION_DEVICE = 12  # DLPack's kDLExtDev, which torch reads as PrivateUse1
_ADDRESS = struct.Struct("<Q")
_REST = struct.Struct("<iiiBBHQQQQQ")
"""What follows the address in DLPack's description of a tensor: device, dimensions, type, sizes, strides, deleter."""
_SIZE = _ADDRESS.size + _REST.size
"""Bytes of a description."""
_ON_A_PAGE = 256
"""Descriptions on a page."""
_NOWHERE = bytes(_ADDRESS.size)
"""The address in a description whose storage has no mark: torch has read it, and asks no more."""
_MARK = 3
"""The place of a byte of the address that is not zero once a time of day stands there."""
_UNMARKED = bytes(_ON_A_PAGE)
_find_marks = re.compile(rb"[^\0]").finditer
_KEPT: list[bytearray] = []
"""The memory of all pages: a tensor may outlive those who made it, and at its end torch reads and writes there."""


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))
def _mark_in_python(description: Any) -> None:
    """Do what ``time`` does."""
    description[0] = int(time.time())


def _address_of(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _marking_function() -> int:
    """Return the address of C's ``time`` if it leaves a mark, or else of a function of Python's that does."""
    mark = ctypes.c_int64(0)
    try:
        leave_mark = ctypes.CDLL(None).time
        leave_mark(ctypes.byref(mark))
    except (AttributeError, OSError, TypeError):
        return _address_of(_mark_in_python)
    left = bytes(mark)[_MARK] != 0
    return _address_of(leave_mark if left else _mark_in_python)


_LEAVE_A_MARK = _marking_function()

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_CODES = {
    torch.uint8: 1,
    torch.int8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.complex64: 5,
    torch.complex128: 5,
    torch.bool: 6,
}
"""DLPack's names for the types that every torch here takes; others are made as views of bytes."""


class Form:
    """How a new tensor looks: what is the same for all tensors of one size, stride, type and device.

    Args:
        size: of the tensor.
        stride: of the tensor.
        dtype: of the tensor.
        device: its index.
        nbytes: of its storage; what size and stride need by default.
    """

    __slots__ = ("_arrays", "device", "nbytes", "rest", "view")

    def __init__(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: int,
        nbytes: int | None = None,
    ) -> None:
        needed = span(size, stride) * dtype.itemsize
        self.device = device
        self.nbytes = needed if nbytes is None else nbytes
        self.view: tuple[torch.dtype, Sequence[int], Sequence[int]] | None = None
        """What the tensor is a view as of its storage, where DLPack cannot describe it."""
        if dtype not in _CODES or needed != self.nbytes:
            self.view = (dtype, size, stride)
            dtype = torch.uint8
            size = (self.nbytes,)
            stride = (1,)
        array = ctypes.c_int64 * len(size)
        sizes = array(*size)
        strides = array(*stride)
        self._arrays = (
            sizes,
            strides,
        )  # which keeps them alive: torch reads them at each tensor
        self.rest = _REST.pack(
            _EXTENSION_DEVICE,
            device,
            len(size),
            _CODES[dtype],
            8 * dtype.itemsize,
            1,  # lanes of a vector type
            ctypes.addressof(sizes),
            ctypes.addressof(strides),
            0,  # where in the memory it begins
            0,  # who made it
            _LEAVE_A_MARK,
        )


def form_of_bytes(nbytes: int, device: int) -> Form:
    """Return the form of a storage that is nobody's tensor yet."""
    return Form((nbytes,), (1,), torch.uint8, device)


class Storages:
    """Makes storages, and says when one begins and when it has ended.

    Args:
        on_begin: called with a storage's key, device index and bytes.
        on_end: called with the key.
    """

    def __init__(
        self,
        on_begin: Callable[[int, int, int], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self.nbytes: dict[int, int] = {}
        """The bytes of each storage that is alive and has some, by its key."""
        self._count = 0
        self._pages: list[_Page] = []

    def make(self, form: Form) -> torch.Tensor:
        """Return a tensor over a new storage."""
        self.settle()
        self._count += 1
        key = self._count
        if form.nbytes:
            self._on_begin(key, form.device, form.nbytes)
            self.nbytes[key] = form.nbytes
        for page in self._pages:
            if page.free:
                break
        else:
            page = _Page()
            self._pages.append(page)
        tensor = page.make(key, form.rest)
        if form.view is None:
            return tensor
        return as_view(tensor, *form.view, 0)

    def nbytes_of(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the whole storage of a tensor of the dry run's."""
        return self.nbytes.get(key_of(tensor), 0)

    def settle(self) -> None:
        """Say which storages have ended since."""
        for page in self._pages:
            marks = page.memory[_MARK::_SIZE]
            if marks != _UNMARKED:
                for mark in _find_marks(marks):
                    key = page.end(mark.start())
                    if self.nbytes.pop(key, 0):
                        self._on_end(key)


class _Page:
    """Descriptions of storages, each of which gets a mark in place of its address when its storage ends."""

    def __init__(self) -> None:
        self.memory = bytearray(_ON_A_PAGE * _SIZE)
        _KEPT.append(self.memory)
        self.free = list(range(_ON_A_PAGE))
        """The places of descriptions that are not in use."""
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._keys = [0] * _ON_A_PAGE

    def make(self, key: int, rest: bytes) -> torch.Tensor:
        """Return a tensor over a new storage, from its key and what follows the address in its description."""
        place = self.free.pop()
        self._keys[place] = key
        offset = place * _SIZE
        self.memory[offset : offset + _SIZE] = _ADDRESS.pack(key * SPACING) + rest
        capsule = _capsule(self._start + offset, b"dltensor", None)
        tensor: torch.Tensor = torch._C._from_dlpack(capsule)
        self.memory[offset : offset + _ADDRESS.size] = _NOWHERE
        return tensor

    def end(self, place: int) -> int:
        """Return the key of the storage there, which has ended, and free its place."""
        offset = place * _SIZE
        self.memory[offset : offset + _ADDRESS.size] = _NOWHERE
        self.free.append(place)
        return self._keys[place]


def as_view(
    owner: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return another tensor over a tensor's storage."""
    aten = torch.ops.aten
    if owner.dtype != dtype:
        owner = aten.view.dtype.redispatch(CPU, owner, dtype)
    view: torch.Tensor = aten.as_strided.default.redispatch(
        CPU, owner, size, stride, offset
    )
    return view


def key_of(tensor: torch.Tensor) -> int:
    """Return the key of a tensor of the dry run's storage."""
    return int(tensor.data_ptr()) // SPACING


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie from a tensor's first to its last, both included; 0 for an empty one."""
    if 0 in size:
        return 0
    steps = 0
    for extent, step in zip(size, stride, strict=True):
        steps += (extent - 1) * step
    return 1 + steps
