"""What is compiled on the user's machine: where it is kept, by one process at a time, and safe from other users."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gpumagic.errors import GpuMagicError


def cache_folder(name: str) -> Path:
    """Return where the user's cache keeps what is compiled for a part of gpumagic."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "gpumagic"
        / name
    )


def load_folder(
    home: Path,
    what: str,
    unavailable: type[GpuMagicError],
    is_there: Callable[[], bool],
    make: Callable[[], object],
) -> None:
    """Have a folder made unless it is there, by one process at a time, and refuse what others may have written.

    What is ``unavailable`` where nothing can be kept or loaded is raised with a sentence that begins with ``what``.
    """
    if not is_there():
        with only_process(home, what, unavailable):
            _refuse_what_others_write(what, unavailable, home.parent)
            if not is_there():
                make()
    _refuse_what_others_write(what, unavailable, home.parent, home)


@contextlib.contextmanager
def only_process(
    home: Path, what: str, unavailable: type[GpuMagicError]
) -> Iterator[None]:
    """Let one process at a time make a folder; the folder above it is made for the user alone."""
    # The kernel drops this lock with its process, so an interrupted compile leaves none behind, unlike the file
    # that torch.utils.cpp_extension waits for.
    try:
        import fcntl
    except ImportError:
        raise unavailable(
            f"{what} runs on Linux and macOS; on Windows, use it in WSL"
        ) from None
    try:
        home.parent.parent.mkdir(parents=True, exist_ok=True)
        home.parent.mkdir(mode=0o700, exist_ok=True)
        handle = home.with_name(f"{home.name}.lock").open("w")
    except OSError as error:
        raise unavailable(
            f"{what} cannot be kept in {home.parent} ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    if os.statvfs(home.parent).f_flag & os.ST_NOEXEC:
        handle.close()
        raise unavailable(
            f"{what} cannot be loaded from {home.parent}, which is mounted noexec; "
            "set XDG_CACHE_HOME to a folder that is not"
        )
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def unfinished(home: Path) -> Iterator[Path]:
    """Yield a folder to compile in, which is gone afterwards; what interrupted compiles left behind is removed.

    Nothing there can be taken for finished: the caller renames what it made when it is whole.
    """
    prefix = f"building-{home.name}-"
    for left_behind in home.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=home.parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _refuse_what_others_write(
    what: str, unavailable: type[GpuMagicError], *folders: Path
) -> None:
    """Raise an error where other users could have written, or replaced, what lies in these folders: it is loaded."""
    for folder in folders:
        status = folder.stat()
        replaceable = [
            parent for parent in folder.resolve().parents if _others_can_replace(parent)
        ]
        if status.st_uid not in {os.geteuid(), 0}:
            unsafe = f"{folder} belongs to another user"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            unsafe = f"other users can write to {folder}; take that away with: chmod go-w {folder}"
        elif replaceable:
            unsafe = (
                f"other users can write to {replaceable[0]}, and replace what is in it"
            )
        else:
            continue
        raise unavailable(
            f"{what} loads no code that others may have written: {unsafe}"
        )


def _others_can_replace(folder: Path) -> bool:
    """Return whether other users can replace what is in a folder, which in a sticky one such as ``/tmp`` nobody can."""
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
