"""Storages with a device and a size and no bytes behind them, made without a compiler.

torch builds a plain tensor of any device over foreign memory from a DLPack capsule. The memory here is an address
that nothing ever reads; a weak reference to torch's storage object tells when the last tensor of it is gone. A
plain tensor matters: code that asks for `type(p)` must get the answer it gets on the real device.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
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

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_BYTES = _Type(1, 8, 1)


class Storages:
    """Makes storages, and tells when one is born and when it dies.

    Args:
        born: called with the storage's key, device index and bytes.
        died: called with the key.
    """

    def __init__(self, born: Callable[[int, int, int], None], died: Callable[[int], None]) -> None:
        self._born = born
        self._died = died
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._count = 0
        # torch copies the description, and at the end reads only that there is no deleter: one serves for all.
        self._length = (ctypes.c_int64 * 1)()
        self._managed = _Managed()
        self._managed.tensor.ndim, self._managed.tensor.dtype, self._managed.tensor.shape = 1, _BYTES, self._length
        self._pointer = ctypes.addressof(self._managed)

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

    def _bytes(self, nbytes: int, device: int) -> torch.Tensor:
        self._count += 1
        key = self._count
        self._managed.tensor.data = key * _SPACING
        self._managed.tensor.device = _Device(_EXTENSION_DEVICE, device)
        self._length[0] = nbytes
        if nbytes:
            self._born(key, device, nbytes)
        flat: torch.Tensor = torch._C._from_dlpack(_capsule(self._pointer, b"dltensor", None))
        if nbytes:
            # A callback in C would be called while an exception unwinds, where ctypes must not run Python.
            self._alive[key] = weakref.ref(flat.untyped_storage(), functools.partial(self._end, key))
        return flat

    def _end(self, key: int, _: object) -> None:
        del self._alive[key]
        self._died(key)


def key_of(tensor: torch.Tensor) -> int:
    """Return the key of a rehearsed tensor's storage."""
    return int(tensor.untyped_storage().data_ptr()) // _SPACING


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements a tensor's first and last are apart, both counted; 0 for an empty one."""
    if 0 in size:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
