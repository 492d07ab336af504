"""How the backend is compiled, found again, and what is said where it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpumagic import compiled
from gpumagic.errors import SimgpuUnavailable
from gpumagic.simgpu import _module
from tests.forks import Forks

ENABLE = """
from gpumagic import simgpu
simgpu.enable_from_environment()
import torch
print(torch.ones(2, device="simgpu").sum())
"""
REFUSE = """
from gpumagic import simgpu
from gpumagic.errors import SimgpuUnavailable
{before}
try:
    simgpu.enable()
except SimgpuUnavailable as error:
    answer = str(error)
"""


ENABLE_TWICE = """
import threading
from gpumagic import simgpu
barrier = threading.Barrier(2)
answer = []
def enable():
    barrier.wait()
    try:
        simgpu.enable(1, "64MiB")
    except Exception as error:
        answer.append(str(error))
threads = [threading.Thread(target=enable) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

COMPILER = """#!/bin/sh
for argument; do
    test "$before" = -o && made=$argument
    before=$argument
done
case " $* " in
    *" -c "*) touch "$made" ;;
    *" -shared "*) cp "{library}" "$made" ;;
    *) exec c++ "$@" ;;
esac
"""
"""Stands in for a compiler: it makes what was compiled before."""


def python(code: str, cache: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a Python that keeps compiled backends in a folder of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_EXTENSIONS_DIR"}
    environment |= {"XDG_CACHE_HOME": str(cache), "GPUMAGIC_SIMGPU": "1x64MiB", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Processes in which nothing has been compiled or loaded yet."""
    forks = Forks(
        "import IPython.core.interactiveshell, torch.utils.cpp_extension", TORCH_EXTENSIONS_DIR=""
    )
    yield forks
    forks.close()


@pytest.fixture
def refusal(forks: Forks) -> Callable[..., str]:
    """Return what returns why simgpu is refused where a process has only one folder on PATH."""

    def refusal(cache: Path, path: Path, before: str = "") -> str:
        told: str = forks.run(
            REFUSE.format(before=before), XDG_CACHE_HOME=str(cache), PATH=str(path)
        )
        return told

    return refusal


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """Return the path of a compiler that takes no time."""
    path = tmp_path / "stand-in"
    path.write_text(COMPILER.format(library=_module.library()))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_two_processes_compile_once_over_the_rest_of_an_interrupted_compile(
    tmp_path: Path, stand_in: str, real: bool
) -> None:
    """One compiles and says so, the other waits; neither is held up by what a killed process left."""
    home, key = tmp_path / "gpumagic" / "simgpu", _module.library().parent.name
    left_behind = home / f"building-{key}-killed"
    left_behind.mkdir(parents=True)
    (left_behind / "lock").touch()
    (home / key).mkdir()
    compiler = {} if real else {"CXX": stand_in}
    both = [python(ENABLE, tmp_path, **compiler) for _ in range(2)]
    told = [process.communicate(timeout=500) for process in both]
    assert [out.strip() for out, _ in told] == ["tensor(2., device='simgpu:0')"] * 2
    lines = [line for _, err in told for line in err.splitlines() if "gpumagic" in line]
    assert lines == ["gpumagic: compiling the simulated GPU, once, about 30 s ..."]
    assert sorted(path.name for path in home.iterdir()) == [key, f"{key}.lock"]
    with python(ENABLE, tmp_path, PATH="") as again:
        assert again.communicate()[1] == "", "the second start needs no compiler and says nothing"


def test_two_threads_may_enable_it_at_once(forks: Forks) -> None:
    """As two cells in subshells do; torch takes one backend of the name."""
    assert forks.run(ENABLE_TWICE) == []


def test_no_compiler_is_one_sentence_with_the_remedy(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """With an empty PATH."""
    told = refusal(tmp_path / "cache", tmp_path)
    assert "C++ compiler" in told
    assert told.endswith("install it, e.g. `apt install g++`")
    assert "\n" not in told


def test_no_ninja_is_one_sentence_with_the_remedy(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """With a compiler and nothing else."""
    (tmp_path / "c++").symlink_to(shutil.which("c++") or "/usr/bin/c++")
    # Its folder is searched too: pip puts ninja there.
    told = refusal(tmp_path / "cache", tmp_path, "import sys; sys.executable = '/nowhere/python'")
    assert told.endswith("install it, e.g. `pip install ninja`")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_cache_that_others_can_write_to_is_refused(
    tmp_path: Path, fresh: bool, refusal: Callable[..., str]
) -> None:
    """Whoever writes there would choose what this process runs."""
    home = tmp_path / "cache/gpumagic/simgpu"
    home.mkdir(parents=True, mode=0o700)
    if not fresh:
        shutil.copytree(_module.library().parent, home / _module.library().parent.name)
    home.chmod(0o777)
    told = refusal(tmp_path / "cache", Path(os.environ["PATH"].partition(":")[0]))
    assert told == (
        f"the simulated GPU loads no code that others may have written: other users can write to {home}; "
        f"take that away with: chmod go-w {home}"
    )
    if not fresh:
        home.chmod(0o700)
        (home / _module.library().parent.name).chmod(0o770)
        told = refusal(tmp_path / "cache", tmp_path)
        assert told.startswith(
            "the simulated GPU loads no code that others may have written: other users can write"
        )


def test_a_cache_that_cannot_be_written_says_what_to_set(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """A file where the folder should be."""
    (tmp_path / "file").touch()
    told = refusal(tmp_path / "file", tmp_path)
    assert told.endswith("set XDG_CACHE_HOME to a folder that can be written")


LOAD = """
import contextlib, io
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False  # others may have the user's open
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
    shell = InteractiveShell.instance(config=config)
    print(shell.extension_manager.load_extension("gpumagic"))
    shell.run_cell("%gpuinfo --help")
    print(shell.extension_manager.unload_extension("gpumagic"), "gpuinfo" in shell.magics_manager.magics["line"])
answer = out.getvalue(), err.getvalue()
"""


@pytest.mark.parametrize("compiler", ["false", "/bin/false", "{folder}/no-room"])
def test_the_extension_is_loaded_and_unloaded_whatever_keeps_simgpu_from_compiling(
    tmp_path: Path, compiler: str, forks: Forks
) -> None:
    """A compiler that fails without a word, and a full disk: the magics are there, and one line says why it is not."""
    full = tmp_path / "no-room"
    full.write_text("#!/bin/sh\necho 'fatal error: No space left on device' >&2\nexit 1\n")
    full.chmod(0o755)
    out, err = forks.run(
        LOAD,
        CXX=compiler.format(folder=tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        GPUMAGIC_SIMGPU="1x64MiB",
    )
    assert "usage: %gpuinfo" in out
    assert out.splitlines()[0] == "None", "it is loaded"
    assert out.splitlines()[-1] == "None False", "and unloaded, its magics gone"
    said = [line for line in err.splitlines() if line.startswith("gpumagic: ")]
    why = [line for line in said if not line.startswith("gpumagic: compiling")]
    assert len(why) == 1, err
    assert why[0].startswith("gpumagic: the simulated GPU ")


def test_another_backend_in_torchs_only_slot_is_named(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """There is one slot for out-of-tree devices."""
    told = refusal(
        tmp_path, tmp_path, "import torch; torch.utils.rename_privateuse1_backend('npu')"
    )
    assert "'npu' holds it" in told


def test_importing_simgpu_imports_no_torch() -> None:
    """Nor does asking whether it is enabled, or for the copies."""
    code = (
        "import sys; from gpumagic import simgpu; simgpu.is_enabled(), simgpu.copies(), simgpu.reset_copies();"
        "print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


def test_a_cache_from_which_no_code_is_loaded_is_refused_before_anything_is_compiled(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    home = tmp_path / "cache" / "key"
    refused = pytest.raises(
        SimgpuUnavailable, match=r"cannot be loaded from .* mounted noexec; set XDG_CACHE_HOME"
    )
    with refused, compiled.only_process(home, "the simulated GPU", SimgpuUnavailable):
        pytest.fail("it would be compiled now")
