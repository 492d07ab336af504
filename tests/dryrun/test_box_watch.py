"""What the process that watches a dry run reads of the calls that wait for its answer."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import pytest

from gpumagic.dryrun import effects
from gpumagic.worker import box

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the box is Linux's")
COMPILER = b"/opt/venv/lib/python3.12/site-packages/triton/backends/nvidia/bin/ptxas\0"


@pytest.mark.parametrize("before_the_end", [8, 40, len(COMPILER) - 1, len(COMPILER), 4000])
def test_a_programs_path_is_read_whole_wherever_in_memory_it_lies(before_the_end: int) -> None:
    """A path that was read up to the end of its page only made torch.compile's own compiler a refused program."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = mmap.PAGESIZE - before_the_end
    memory[start : start + len(COMPILER)] = COMPILER
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert box._text_of(os.getpid(), address + start) == COMPILER[:-1].decode()


def test_what_is_not_there_is_an_empty_text() -> None:
    assert box._text_of(os.getpid(), 0) == ""


@pytest.mark.parametrize(
    "name", ["gcc", "gcc-real", "x86_64-linux-gnu-gcc-12", "cc1plus", "clang++-18", "ptxas"]
)
def test_compilers_are_known_by_the_names_that_they_have(name: str) -> None:
    assert effects.COMPILERS.fullmatch(name)


@pytest.mark.parametrize("name", ["gccx", "curl", "bash", "real", "python3.12"])
def test_other_programs_are_not_taken_for_compilers(name: str) -> None:
    assert not effects.COMPILERS.fullmatch(name)
