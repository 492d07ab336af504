"""The fake CUDA runtime's libraries: compiled once, for a CUDA build of torch, or one sentence that says why not.

The torch of these tests is a stand-in of two files: what torch asks for is read from its library, and that is enough.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpumagic import fakecuda
from gpumagic.memory import presets

ASKS = """
int cudaMalloc(void **, unsigned long), cudaNeverWritten(void);
int ask(void **at) { return cudaMalloc(at, 1) + cudaNeverWritten(); }
"""
VERSION = "__version__ = '2.99.0'\ndebug = False\ncuda: Optional[str] = {cuda}\n"
NO_TORCH = """
import sys
sys.modules["torch"] = None  # what find_spec then finds is none
from gpumagic.fakecuda.__main__ import main
sys.exit(main())
"""
TOOLS = ("nm", "readelf", "cc", "gcc", "ld", "as", "true", "sh", "env", "kill", "touch")


@pytest.fixture(scope="module")
def torches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of stand-ins: `13.0`, `11.8` and `none`, each with a torch that is built for that CUDA."""
    folder = tmp_path_factory.mktemp("torches")
    for cuda in ("13.0", "11.8", "none"):
        package = folder / cuda / "torch"
        (package / "lib").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "version.py").write_text(
            VERSION.format(cuda="None" if cuda == "none" else repr(cuda))
        )
        if cuda != "none":
            source = folder / "asks.c"
            source.write_text(ASKS)
            library = package / "lib" / "libc10_cuda.so"
            subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return folder


def links(folder: Path) -> Path:
    """Return a folder to be the whole PATH, with what compiling takes."""
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return folder


class Command:
    """`python -m gpumagic.fakecuda` with a torch, a cache and a PATH of its own."""

    def __init__(self, torch: Path, cache: Path, tools: Path) -> None:
        self.environment = {
            "PYTHONPATH": f"{torch}{os.pathsep}{Path(fakecuda.__file__).parents[2]}",
            "XDG_CACHE_HOME": str(cache),
            "PATH": str(tools),
            "HOME": str(cache),
        }

    def __call__(
        self, *arguments: str, start: tuple[str, ...] = ("-m", "gpumagic.fakecuda"), **more: str
    ):
        return subprocess.run(
            [sys.executable, *start, *arguments], env={**self.environment, **more}, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip

    def refusal(self, *arguments: str, **more) -> str:
        """Return the one sentence with which it ends."""
        ended = self(*(arguments or ("--", "true")), **more)
        assert ended.returncode == 2, ended
        assert not ended.stdout
        assert ended.stderr.count("\n") == 1, ended.stderr
        return ended.stderr.strip()


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return links(tmp_path / "tools")


@pytest.fixture
def command(torches: Path, tmp_path: Path, tools: Path) -> Command:
    """Return the command over a torch for CUDA 13, with nothing compiled yet."""
    return Command(torches / "13.0", tmp_path / "cache", tools)


@pytest.fixture(scope="module")
def compiled(torches: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Return the command over a torch for CUDA 13, whose libraries are compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    command = Command(torches / "13.0", folder / "cache", links(folder / "tools"))
    assert command("--", "true").returncode == 0
    return command


# What is compiled


def test_it_is_compiled_once_and_needs_no_compiler_again(compiled: Command) -> None:
    (home,) = [
        path
        for path in Path(compiled.environment["XDG_CACHE_HOME"]).glob("*/fakecuda/*")
        if path.is_dir()
    ]
    made = sorted((path.name, path.stat().st_mtime_ns) for path in home.iterdir())
    asks = "import ctypes; print(ctypes.CDLL(None).cudaNeverWritten(), ctypes.CDLL(None).fakecuda_syncs())"
    again = compiled("--", sys.executable, "-c", asks, CC="/not/there", PATH="")
    assert (again.returncode, again.stdout) == (0, "801 0\n"), again.stderr
    assert "libcudart has no cudaNeverWritten here" in again.stderr
    assert sorted((path.name, path.stat().st_mtime_ns) for path in home.iterdir()) == made
    wanted = {"libcudart.so", "libcuda.so.1", "libcuda.so", "libfakecuda.so", "libnvidia-ml.so.1"}
    assert wanted <= {name for name, _ in made}


def test_an_interrupted_compile_leaves_nothing_behind(
    command: Command, tmp_path: Path, tools: Path
) -> None:
    home = tmp_path / "cache/gpumagic/fakecuda"
    compiler = tmp_path / "compiler"
    for signal, left in (("INT", 0), ("KILL", 1)):
        compiler.write_text(f"#!/bin/sh\nkill -{signal} $PPID\n")
        compiler.chmod(0o755)
        assert command("--", "true", CC=str(compiler)).returncode
        assert len([path for path in home.iterdir() if path.is_dir()]) == left
    assert command("--", "true", CC="env cc").returncode == 0
    (folder,) = [path for path in home.iterdir() if path.is_dir()]
    assert not folder.name.startswith("building")


# Why it cannot be


def test_without_torch(command: Command) -> None:
    told = command.refusal(start=("-c", NO_TORCH))
    assert (
        told
        == "gpumagic: fakecuda needs torch, and there is none here; install it with: pip install torch"
    )


def test_with_a_cpu_build_of_torch(torches: Path, tmp_path: Path, tools: Path) -> None:
    told = Command(torches / "none", tmp_path / "cache", tools).refusal()
    assert told.startswith(
        "gpumagic: fakecuda runs torch's CUDA build, and torch 2.99.0 here is none; pip takes one"
    )
    assert not (tmp_path / "cache").exists()


def test_with_a_torch_for_a_cuda_that_is_not_stood_in_for(
    torches: Path, tmp_path: Path, tools: Path
) -> None:
    told = Command(torches / "11.8", tmp_path / "cache", tools).refusal()
    assert (
        told
        == "gpumagic: fakecuda stands in for CUDA 12 and 13, and torch 2.99.0 here is built for CUDA 11.8"
    )


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [(("cc", "gcc"), "`apt install gcc`"), (("nm",), "nm; install it: `apt install binutils`")],
)
def test_without_a_tool(
    command: Command, tools: Path, missing: tuple[str, ...], remedy: str
) -> None:
    for name in missing:
        (tools / name).unlink()
    assert command.refusal().endswith(remedy)


def test_where_it_does_not_compile(command: Command, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'memory.c:1: error: no such header'\nexit 1\n")
    compiler.chmod(0o755)
    told = command.refusal(CC=str(compiler))
    assert told == "gpumagic: fakecuda does not compile here: memory.c:1: error: no such header"


def test_where_nothing_can_be_kept(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = command.refusal(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert told.startswith("gpumagic: fakecuda cannot be kept in ")
    assert told.endswith("set XDG_CACHE_HOME to a folder that can be written")


def test_in_a_folder_whose_path_the_loader_would_split(command: Command, tmp_path: Path) -> None:
    assert "LD_PRELOAD takes no path with a space" in command.refusal(
        XDG_CACHE_HOME=str(tmp_path / "a cache")
    )


@pytest.mark.parametrize("fresh", [False, True])
def test_from_a_folder_that_others_can_write_to(
    request: pytest.FixtureRequest, tmp_path: Path, fresh: bool
) -> None:
    command = request.getfixturevalue("command" if fresh else "compiled")
    if not fresh:
        shutil.copytree(command.environment["XDG_CACHE_HOME"], tmp_path / "cache", symlinks=True)
    home = tmp_path / "cache/gpumagic/fakecuda"
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o777)
    told = command.refusal(XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert told == (
        f"gpumagic: fakecuda loads no code that others may have written: other users can write to {home}; "
        f"take that away with: chmod go-w {home}"
    )
    home.chmod(0o700)
    home.parent.chmod(0o777)
    assert command.refusal(XDG_CACHE_HOME=str(tmp_path / "cache")).endswith(
        "and replace what is in it"
    )


# The command


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--gpu", "H300"), "'H300' is not a GPU that is known here; did you mean H200 or "),
        (("--gpu", "Radeon"), "'Radeon' is not a GPU that is known here; there are T4, L4, A10G"),
        (("--devices", "17"), "17 devices are not possible; ask for 0 to 16"),
        (("--devices", "-1"), "-1 devices are not possible; ask for 0 to 16"),
        (
            ("--gpu", "T4", "--gpu", "L4", "--devices", "3"),
            "3 devices cannot be made of 2 GPUs; name one, or one for",
        ),
        (
            ("--capacity", "much"),
            "'much' is not a size; write bytes or a unit: 4096, 100MiB, 1.5GiB",
        ),
        (("--others", "-3"), "'-3' is not a size"),
    ],
)
def test_a_wrong_argument_is_one_line(
    command: Command, arguments: tuple[str, ...], told: str
) -> None:
    assert command.refusal(*arguments, "--", "true").startswith(f"gpumagic: {told}")


def test_a_command_that_is_not_there_is_one_line(command: Command) -> None:
    assert (
        command.refusal("--", "no-such-command")
        == "gpumagic: no-such-command: No such file or directory"
    )


def test_the_command_ends_as_it_would_alone(compiled: Command) -> None:
    assert compiled("--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    interrupted = compiled(
        "--", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    )
    assert interrupted.returncode == -2
    assert "KeyboardInterrupt" in interrupted.stderr


def test_without_a_command_the_variables_are_printed_for_a_shell(compiled: Command) -> None:
    printed = compiled("--gpu", "T4", "--devices", "2", "--others", "1GiB").stdout
    asked = 'echo "$GPUMAGIC_FAKECUDA" && exec "$0" -c "from gpumagic import fakecuda; print(fakecuda.is_enabled())"'
    ended = compiled("-c", f"{printed}\n{asked}", sys.executable, start=("-c", RUN_SHELL))
    settings, enabled = ended.stdout.splitlines()
    assert settings.count("name=Tesla T4,") == settings.count(f"others={1024**3}") == 2
    assert enabled == "True"


RUN_SHELL = "import os, sys; os.execvp('sh', ['sh', *sys.argv[1:]])"


def test_what_is_asked_for_is_what_a_device_is_told() -> None:
    gpu = presets.GPUS[presets.name_of("rtx-4090")]
    assert gpu is presets.GPUS["RTX 4090"]
    assert presets.settings(gpu, 3, 5).split(",")[0] == "name=NVIDIA GeForce RTX 4090"
