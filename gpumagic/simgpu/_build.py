"""Compile the backend once and find it again, in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from gpumagic import compiled
from gpumagic.errors import SimgpuUnavailable
from gpumagic.report import progress

NAME = "gpumagic_simgpu"
HERE = Path(__file__).parent
SOURCES = ("simgpu.cpp", "autocast.cpp")
HEADERS = ("allocator.h", "devices.h", "host_call.h", "statistics.h")
WHAT = "the simulated GPU"
FLAGS = ["-O1", "-g0", "-w"]


def load() -> ModuleType:
    """Return the compiled backend; the first call of a new torch, Python or gpumagic compiles it, half a minute.

    Raises:
        SimgpuUnavailable: there is no compiler, no ninja or no setuptools, it does not compile, or cannot be kept.
    """
    built, made = library(), []

    def make() -> None:
        try:
            made.append(_compile(built.parent))
        except (OSError, subprocess.SubprocessError) as error:
            raise SimgpuUnavailable(f"{WHAT} cannot be compiled in {built.parent.parent}: {error}") from error

    compiled.load_folder(built.parent, WHAT, SimgpuUnavailable, built.exists, make)
    return made[0] if made else _import(built)


def library() -> Path:
    """Return where the backend of this torch, Python and gpumagic is, once it is compiled."""
    return cache_folder() / _key() / f"{NAME}.so"


def cache_folder() -> Path:
    """Return where compiled backends are kept: beside torch's own extensions where the user placed those."""
    folder, torchs = compiled.cache_folder("simgpu"), os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(torchs) / "gpumagic" if torchs else folder


def _key() -> str:
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    digest.update(str(torch.compiled_with_cxx11_abi()).encode())
    for source in (*SOURCES, *HEADERS):
        digest.update((HERE / source).read_bytes())
    return f"{sysconfig.get_config_var('SOABI') or sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def _import(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(home: Path) -> ModuleType:
    _check_tools()
    telling = progress.waiting("gpumagic: compiling the simulated GPU, once, about 30 s ...")
    with telling, compiled.unfinished(home) as folder:
        module = _build_in(str(folder))
        home.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{NAME}.so").replace(library())
    return module


def _build_in(folder: str) -> ModuleType:
    # It warns on import where a CUDA toolkit stands but no GPU, as in Colab without one; nothing of CUDA is built here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils import cpp_extension

    sources = [str(HERE / source) for source in SOURCES]
    try:
        with _ninja_on_path():
            built = cpp_extension.load(NAME, sources, extra_cflags=FLAGS, build_directory=folder)
    except RuntimeError as error:
        lines = str(error).splitlines()
        told = next((line for line in lines if "error:" in line), lines[0]).strip()
        raise SimgpuUnavailable(
            f"the simulated GPU does not compile with this torch and compiler ({told}); "
            "it was tried with torch 2.4 and 2.13, and g++ 12"
        ) from error
    assert isinstance(built, ModuleType)
    return built


def _check_tools() -> None:
    compiler = os.environ.get("CXX", "c++").split()[0]
    with _ninja_on_path():
        tools = {
            f"C++ compiler ({compiler})": (shutil.which(compiler), "apt install g++"),
            "setuptools": (importlib.util.find_spec("setuptools"), "pip install setuptools"),
            "ninja": (shutil.which("ninja"), "pip install ninja"),
        }
    for tool, (found, how) in tools.items():
        if found is None:
            raise SimgpuUnavailable(
                f"the simulated GPU is compiled on first use and there is no {tool} here; install it, e.g. `{how}`"
            )


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    # pip puts ninja beside python, which is on PATH only while the environment is activated.
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before
