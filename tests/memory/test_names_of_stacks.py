"""To name the frames of stacks torch would import its compiler: only the reading thread does without."""

from __future__ import annotations

import subprocess
import sys

USE = """
import sys, threading
import torch
from gpumagic import _compat

def use():
    from torch import _inductor
    seen.append(_inductor.compile.__module__)

seen = []
with _compat.names_of_stacks():
    print(hasattr(torch._inductor, "codecache"), "torch._inductor" in sys.modules)
    kept = torch._inductor
    {inside}
was_imported = "torch._inductor" in sys.modules
print(was_imported, kept.compile.__module__, torch._inductor is sys.modules["torch._inductor"], seen)
"""


def run(inside: str) -> list[str]:
    code = USE.format(inside=inside)
    return subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()


def test_the_reading_thread_finds_it_empty_and_imports_nothing() -> None:
    assert run("pass") == ["False False", "False torch._inductor True []"]


def test_another_thread_that_uses_the_compiler_meanwhile_gets_the_real_one() -> None:
    inside = "other = threading.Thread(target=use); other.start(); other.join()"
    assert run(inside) == ["False False", "True torch._inductor True ['torch._inductor']"]
