"""Large data of the CPU's for a rehearsal, in memory that both processes map: copied once, and through no pipe.

On Linux it is memory without a name, which is gone with the process that holds it, however that ends; elsewhere a
temporary file, which the parent removes. The worker maps it privately, so that what a cell writes stays there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from typing import Any

ROOM = 256 << 20
"""Bytes of all that is shelved for one rehearsal."""
_PAGE = mmap.ALLOCATIONGRANULARITY

Slot = tuple[str, int]
"""Where something lies: a path that the worker can open, and an offset."""


class Shelf:
    """What one rehearsal gets."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._path = ""
        self._used = 0

    def put(self, address: int, nbytes: int) -> Slot | None:
        """Return where a copy of memory lies; None where there is no room for it.

        Args:
            address: where it begins, in this process.
            nbytes: how long it is, at least one byte.
        """
        if self._used + nbytes > ROOM:
            return None
        try:
            file = self._open()
            view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            done = 0
            while done < nbytes:
                done += os.pwrite(file, view[done:], self._used + done)
        except OSError:  # no room there either
            return None
        offset, self._used = self._used, -(-(self._used + nbytes) // _PAGE) * _PAGE
        return self._path, offset

    def close(self) -> None:
        """Let go of it; what the worker has mapped stays until it ends."""
        if self._file is not None:
            os.close(self._file)
            if not self._path.startswith("/proc/"):
                with contextlib.suppress(OSError):
                    os.unlink(self._path)  # noqa: PTH108  # next to `os.close`
            self._file = None

    def _open(self) -> int:
        if self._file is None:
            if hasattr(os, "memfd_create"):
                self._file = os.memfd_create("gpumagic", os.MFD_CLOEXEC)
                self._path = f"/proc/{os.getpid()}/fd/{self._file}"
            else:
                self._file, self._path = tempfile.mkstemp(prefix="gpumagic-")
        return self._file


def mapped(slot: Slot, nbytes: int) -> Any:
    """Return what lies there, as memory of this process alone."""
    path, offset = slot
    file = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(file, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    finally:
        os.close(file)
