"""Storages with a device and a size and no bytes behind them, made without a compiler.

torch builds a plain tensor of any device over foreign memory from a DLPack capsule. The memory here is an address
that nothing ever reads. Plain tensors matter: code that asks for `type(p)` must get the answer it gets on the real
device, and torch adds gradients in place only where nothing else refers to a tensor or its storage, a Python object
of it included. So no Python object of a storage is ever made, and its end is not told by a weak reference: torch
calls the capsule's deleter, which is C's own ``time``. It needs no Python, which must not run while an exception
unwinds, and writes the time of day to the address that it is given. Who asks afterwards sees that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch._C import DispatchKey, DispatchKeySet

_EXTENSION_DEVICE = 12  # DLPack's kDLExtDev, which torch reads as PrivateUse1
_SPACING = 1 << 40  # addresses of two storages do not overlap
CPU = DispatchKeySet(DispatchKey.CPU)


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("index", ctypes.c_int))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int), ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    pass


_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))
_SIZE = ctypes.sizeof(_Managed)
_LEAVE_A_MARK = ctypes.cast(ctypes.CDLL(None).time, ctypes.c_void_p).value

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_BYTES = _Type(1, 8, 1)
_ON_A_PAGE = 256


class Storages:
    """Makes storages, and tells when one is born and when it dies.

    Args:
        born: called with the storage's key, device index and bytes.
        died: called with the key.
    """

    def __init__(self, born: Callable[[int, int, int], None], died: Callable[[int], None]) -> None:
        self._born = born
        self._died = died
        self._nbytes: dict[int, int] = {}
        self._count = 0
        self._length = (ctypes.c_int64 * 1)()  # torch copies the description, so that one length serves for all
        self._pages: list[_Page] = []

    def new(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: int, nbytes: int | None = None
    ) -> torch.Tensor:
        """Return a tensor over a new storage of ``nbytes``, or of what its size and stride need."""
        if nbytes is None:
            nbytes = span(size, stride) * dtype.itemsize
        flat = self._bytes(nbytes, device)
        typed = torch.ops.aten.view.dtype.redispatch(CPU, flat, dtype) if dtype != torch.uint8 else flat
        made: torch.Tensor = torch.ops.aten.as_strided.default.redispatch(CPU, typed, size, stride, 0)
        return made

    def nbytes_of(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor of the dry run's whole storage."""
        return self._nbytes.get(key_of(tensor), 0)

    def settle(self) -> None:
        """Tell of the storages that have died since."""
        for page in self._pages:
            for key in page.ended():
                if self._nbytes.pop(key, 0):
                    self._died(key)

    def _bytes(self, nbytes: int, device: int) -> torch.Tensor:
        self.settle()
        self._count += 1
        key = self._count
        if nbytes:
            self._born(key, device, nbytes)
            self._nbytes[key] = nbytes
        self._length[0] = nbytes
        page = next((each for each in self._pages if each.has_room()), None)
        if page is None:
            page = _Page(ctypes.addressof(self._length))
            self._pages.append(page)
        return page.make(key, device)


class _Page:
    """Descriptions of storages, each of which gets a mark when its storage ends.

    Args:
        length: the address of the number that is every storage's length when it is made.
    """

    def __init__(self, length: int) -> None:
        self._memory = bytearray(_ON_A_PAGE * _SIZE)
        self._all = (_Managed * _ON_A_PAGE).from_buffer(self._memory)
        for each in self._all:
            each.tensor.ndim, each.tensor.dtype, each.tensor.device = 1, _BYTES, _Device(_EXTENSION_DEVICE, 0)
            each.tensor.shape = ctypes.cast(length, ctypes.POINTER(ctypes.c_int64))
            each.deleter = _LEAVE_A_MARK
        self._unmarked = bytes(self._memory)
        self._free = list(range(_ON_A_PAGE))
        self._keys: dict[int, int] = {}

    def has_room(self) -> bool:
        return bool(self._free)

    def make(self, key: int, device: int) -> torch.Tensor:
        """Return a tensor of bytes over a new storage."""
        at = self._free.pop()
        self._keys[at] = key
        described = self._all[at].tensor
        described.data, described.device.index = key * _SPACING, device
        made: torch.Tensor = torch._C._from_dlpack(_capsule(ctypes.addressof(self._all[at]), b"dltensor", None))
        described.data, described.device.index = None, 0
        return made

    def ended(self) -> list[int]:
        """Return the keys of the storages that have ended since this was last asked."""
        if self._memory == self._unmarked:
            return []
        marks = memoryview(self._memory).cast("Q")[:: _SIZE // 8].tolist()
        places = [at for at, mark in enumerate(marks) if mark]
        for at in places:
            self._all[at].tensor.data = None
        self._free += places
        return [self._keys.pop(at) for at in places]


def key_of(tensor: torch.Tensor) -> int:
    """Return the key of a tensor of the dry run's storage."""
    return int(tensor.data_ptr()) // _SPACING


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements a tensor's first and last are apart, both counted; 0 for an empty one."""
    if 0 in size:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
