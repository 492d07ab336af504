"""`torch.simgpu`: the names of `torch.cuda` for the simulated GPUs; how these are compiled and registered with torch.

`DeviceModule` has those names for any out-of-tree device: a dry run's on fake tensors is one, too.
"""

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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch

from gpumagic import compiled
from gpumagic._compat import torch_private
from gpumagic.errors import SimgpuUnavailable
from gpumagic.report import progress

DeviceLike: TypeAlias = torch.device | str | int | None

BACKEND = "simgpu"
native: ModuleType
"""The compiled backend, once `register` has run."""


def register() -> None:
    """Compile the backend if it has to be, and make it torch's out-of-tree device.

    Raises:
        SimgpuUnavailable: as `load`, or another backend is there already.
    """
    global native  # noqa: PLW0603  there is one for the life of the process
    taken = torch_private.OUT_OF_TREE_BACKEND.get()()
    if taken not in {"privateuseone", BACKEND}:
        raise SimgpuUnavailable(
            f"torch has one slot for an out-of-tree device and {taken!r} holds it; "
            "use simulated GPUs in a process that does not load it"
        )
    native = load()
    native.start()
    torch.utils.rename_privateuse1_backend(BACKEND)
    torch_private.REGISTER_DEVICE_MODULE.get()(BACKEND, _Simgpu(BACKEND))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


@dataclass(frozen=True)
class DeviceProperties:
    """What a device says of itself."""

    name: str
    total_memory: int
    uuid: str = ""
    multi_processor_count: int = 1
    major: int = 8
    minor: int = 0
    is_integrated: bool = False


class DeviceModule(ModuleType):
    """What `torch.cuda` has, for the devices of a backend, which tells how many there are, their figures and so on.

    Args:
        backend: the devices' type.
    """

    device_count: Callable[[], int]
    is_initialized: Callable[[], bool]
    """Whether any device has been used."""
    current_device: Callable[[], int]
    exchange_device: Callable[[int], int]
    """Makes a device the current one of this thread, none if the index is negative; returns which was."""
    figures: Callable[[int], dict[str, int]]
    """What the allocator of the device of that index has, under names of `torch.cuda.memory_stats`."""
    generator: Callable[..., torch.Generator]
    """A device's generator of random numbers."""
    get_device_properties: Callable[..., DeviceProperties]

    def __init__(self, backend: str) -> None:
        super().__init__(f"torch.{backend}")

    # ---- Devices

    @property
    def _initialized(self) -> bool:
        # torch.utils.checkpoint saves the generators' states only where this is true.
        return self.is_initialized()

    def is_available(self) -> bool:
        """Return whether there is a device."""
        return bool(self.device_count())

    def init(self) -> None:
        """Do nothing: a device needs no initialisation."""

    _lazy_init = init

    def _is_in_bad_fork(self) -> bool:
        return False  # a forked child has a copy of the cards that works

    def set_device(self, device: DeviceLike) -> None:
        """Make a device the current one of this thread."""
        self.exchange_device(self.index(device))

    @contextlib.contextmanager
    def device(self, device: DeviceLike) -> Iterator[None]:
        """Make a device the current one inside a `with`; `None` or a negative index changes nothing."""
        index = -1 if device is None else self.index(device)
        before = self.exchange_device(index)
        try:
            yield
        finally:
            self.exchange_device(before)

    def device_of(self, obj: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Make a tensor's device the current one inside a `with`; a tensor elsewhere changes nothing."""
        is_ours = self.__name__ == f"torch.{obj.device.type}"
        return self.device(obj.get_device() if is_ours else None)

    def index(self, device: DeviceLike = None) -> int:
        """Return the index that a device, a number, a name or None means."""
        if isinstance(device, int):
            return device
        index = None if device is None else _named(str(device)).index
        if index is None:
            return self.current_device()
        return int(index)

    def synchronize(self, device: DeviceLike = None) -> None:
        """Do nothing: work is done when the call returns."""

    def get_device_name(self, device: DeviceLike = None) -> str:
        """Return the name of a device."""
        return str(self.get_device_properties(device).name)

    def get_device_capability(self, device: DeviceLike = None) -> tuple[int, int]:
        """Return a compute capability, for code that asks: that of a card which knows bfloat16."""
        properties = self.get_device_properties(device)
        return properties.major, properties.minor

    def is_bf16_supported(self) -> bool:
        """Return True: every kernel here knows bfloat16."""
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types that autocast may use."""
        return [torch.float16, torch.bfloat16, torch.float32]

    # ---- Memory

    def memory_allocated(self, device: DeviceLike = None) -> int:
        """Return the bytes in live storages, each rounded up to 512."""
        return self.figures(self.index(device))["allocated_bytes.all.current"]

    def max_memory_allocated(self, device: DeviceLike = None) -> int:
        """Return the highest `memory_allocated` since `reset_peak_memory_stats`."""
        return self.figures(self.index(device))["allocated_bytes.all.peak"]

    def memory_reserved(self, device: DeviceLike = None) -> int:
        """Return the bytes that the allocator holds of the device, in use or cached."""
        return self.figures(self.index(device))["reserved_bytes.all.current"]

    def max_memory_reserved(self, device: DeviceLike = None) -> int:
        """Return the highest `memory_reserved` since `reset_peak_memory_stats`."""
        return self.figures(self.index(device))["reserved_bytes.all.peak"]

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        """Return the device's free and total bytes."""
        total = int(self.get_device_properties(device).total_memory)
        return total - self.memory_reserved(device), total

    # ---- Random numbers

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """Each device's generator."""
        indices = range(self.device_count())
        return tuple(map(self.generator, indices))

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self.generator().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device's generator; torch.manual_seed calls this."""
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the seed of the current device's generator."""
        return int(self.generator().initial_seed())

    def get_rng_state(self, device: DeviceLike = None) -> torch.Tensor:
        """Return the state of a device's generator, a tensor of bytes on the CPU."""
        return self.generator(device).get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: DeviceLike = None) -> None:
        """Set the state of a device's generator."""
        self.generator(device).set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return the state of every device's generator."""
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the state of every device's generator."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)


@cache
def _named(device: str) -> torch.device:
    return torch.device(device)


class _Simgpu(DeviceModule):
    """`torch.simgpu`."""

    # Those of torch, which work for every accelerator.
    Stream = torch.Stream
    Event = torch.Event
    Generator = torch.Generator

    def device_count(self) -> int:
        return int(native.device_count())

    def is_initialized(self) -> bool:
        indices = range(self.device_count())
        return any(map(native.used, indices))

    def current_device(self) -> int:
        return int(native.current_device())

    def exchange_device(self, index: int) -> int:
        return int(native.exchange_device(index))

    def set_device(self, device: DeviceLike) -> None:
        native.set_device(self.index(device))

    def index(self, device: DeviceLike = None) -> int:
        if isinstance(device, torch.device | str):
            backend = _named(str(device)).type
            if backend != BACKEND:
                raise ValueError(f"Expected a {BACKEND} device, but got: {device}")
        return super().index(device)

    def current_stream(self, device: DeviceLike = None) -> torch.Stream:
        """Return the one stream of a device."""
        return torch.accelerator.current_stream(self.index(device))

    default_stream = current_stream

    def figures(self, index: int) -> dict[str, int]:
        return dict(native.memory_stats(index))

    def memory_stats(self, device: DeviceLike = None) -> OrderedDict[str, int]:
        """Return the allocator's figures under torch.cuda's names, sorted."""
        figures = self.figures(self.index(device))
        return OrderedDict(sorted(figures.items()))

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Return every segment with its blocks, as torch.cuda does; a block in use has the address its tensors give."""
        return list(native.memory_snapshot())

    def record_history(self, is_on: bool) -> None:
        """Keep what the allocators hand out and take back from now on, the last million of each; or end that."""
        native.record_history(is_on)

    def history(self, device: DeviceLike = None) -> list[tuple[int, int, float]]:
        """Return what has been recorded: address, bytes (negative where they were given back), monotonic seconds."""
        return list(native.history(self.index(device)))

    def reset_peak_memory_stats(self, device: DeviceLike = None) -> None:
        """Start the peaks again from the present figures."""
        native.reset_peaks(self.index(device))

    def reset_accumulated_memory_stats(self, device: DeviceLike = None) -> None:
        """Start the running totals again from zero."""
        native.reset_accumulated(self.index(device))

    def empty_cache(self) -> None:
        """Give every segment without a live block back to its device."""
        native.empty_cache()

    def get_device_properties(self, device: DeviceLike = None) -> DeviceProperties:
        """Return name, memory and UUID of a device."""
        index = self.index(device)
        return DeviceProperties(
            "Simulated GPU",
            native.capacity(index),
            f"00000000-0000-0000-0000-{index:012x}",
        )

    def generator(self, device: DeviceLike = None) -> torch.Generator:
        found: torch.Generator = native.default_generator(self.index(device))
        return found


# ---- The backend is compiled once, and found again in the user's cache

NAME = "gpumagic_simgpu"
HERE = Path(__file__).parent
SOURCES = ("simgpu.cpp", "autocast.cpp")
HEADERS = ("allocator.h", "devices.h", "host_call.h", "statistics.h")
WHAT = "the simulated GPU"


def load() -> ModuleType:
    """Return the compiled backend; the first call of a new torch, Python or gpumagic compiles it, half a minute.

    Raises:
        SimgpuUnavailable: there is no compiler, no ninja or no setuptools, it does not compile, or cannot be kept.
    """
    built = library()
    home = built.parent
    made: list[ModuleType] = []

    def make() -> None:
        try:
            made.append(_compile(home))
        except (OSError, subprocess.SubprocessError) as error:
            raise SimgpuUnavailable(
                f"{WHAT} cannot be compiled in {home.parent}: {error}"
            ) from error

    compiled.load_folder(home, WHAT, SimgpuUnavailable, built.exists, make)
    if made:
        return made[0]
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(built))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def library() -> Path:
    """Return where the backend of this torch, Python and gpumagic is, once it is compiled.

    That is beside torch's own extensions where the user placed those.
    """
    folder = compiled.cache_folder("simgpu")
    torchs_folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if torchs_folder:
        folder = Path(torchs_folder) / "gpumagic"
    digest = hashlib.sha256(torch.__version__.encode())
    digest.update(str(torch.compiled_with_cxx11_abi()).encode())
    for source in (*SOURCES, *HEADERS):
        digest.update((HERE / source).read_bytes())
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    key = f"{python}-{digest.hexdigest()[:16]}"
    return folder / key / f"{NAME}.so"


def _compile(home: Path) -> ModuleType:
    _check_tools()
    telling = progress.waiting(f"gpumagic: compiling {WHAT}, once, about 30 s ...")
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
            built = cpp_extension.load(
                NAME, sources, extra_cflags=["-O1", "-g0", "-w"], build_directory=folder
            )
    except RuntimeError as error:
        lines = str(error).splitlines()
        reasons = [line for line in lines if "error:" in line] or lines
        raise SimgpuUnavailable(
            f"{WHAT} does not compile with this torch and compiler ({reasons[0].strip()}); "
            "it was tried with torch 2.6 and 2.13, and g++ 12"
        ) from error
    assert isinstance(built, ModuleType)
    return built


def _check_tools() -> None:
    compiler = os.environ.get("CXX", "c++").split()[0]
    with _ninja_on_path():
        tools = (
            (f"C++ compiler ({compiler})", shutil.which(compiler), "apt install g++"),
            (
                "setuptools",
                importlib.util.find_spec("setuptools"),
                "pip install setuptools",
            ),
            ("ninja", shutil.which("ninja"), "pip install ninja"),
        )
    for tool, place, how in tools:
        if place is None:
            raise SimgpuUnavailable(
                f"{WHAT} is compiled on first use and there is no {tool} here; install it, e.g. `{how}`"
            )


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    # pip puts ninja beside python, which is on PATH only while the environment is activated.
    before = os.environ.get("PATH", "")
    beside_python = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([before, beside_python])
    try:
        yield
    finally:
        os.environ["PATH"] = before
