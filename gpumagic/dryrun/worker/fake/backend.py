"""Makes torch believe in a device: torch's slot for out-of-tree backends, filled from Python.

The guard and the hooks that torch asks are its own, written for backends in Python (torch 2.10 has them); they know
one device, so which one is current is kept here. Backward runs in the caller's thread, where the cell's lines are
on the stack and where torch needs no queue for each device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.dryrun.worker.fake.allocator import FakeLedger

OURS = "dryrun"
"""The device's name where CUDA's is taken by torch's own."""


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True


_kept: list[object] = []
"""What torch refers to without keeping it alive."""


def register(name: str, ledger: FakeLedger) -> DeviceModule:
    """Make the device torch's out-of-tree one, under a name."""
    module = DeviceModule(name, ledger)
    guard, hooks = _Guard(), _Hooks()
    _kept.extend((module, guard, hooks))
    torch.utils.rename_privateuse1_backend(name)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(name, module)
    sys.modules[f"torch.{name}"] = module
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    torch.autograd.set_multithreading_enabled(False)
    torch.UntypedStorage.clone = _cloning(torch.UntypedStorage.clone, name)
    return module


def _cloning(clone: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    """Return how a storage is copied, which `copy.deepcopy` of a tensor does: torch needs an allocator in C++."""

    def cloned(storage: Any) -> Any:
        if storage.device.type != name:
            return clone(storage)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    return cloned


class DeviceModule(ModuleType):
    """`torch.cuda` for the device of the dry run: its memory figures are the ledger's."""

    def __init__(self, name: str, ledger: FakeLedger) -> None:
        super().__init__(f"torch.{name}")
        self._backend = name
        self._ledger = ledger
        self._current = 0

    def __getattr__(self, name: str) -> Any:
        if name == "default_generators":
            return tuple(torch.default_generator for _ in self._ledger.accounts)
        if name.startswith("__") or name == "is_built":
            raise AttributeError(name)
        raise CannotDryRun(f"torch.{self._backend}.{name} is not part of a dry run")

    _initialized = True

    def is_available(self) -> bool:
        return True

    is_initialized = is_available
    is_bf16_supported = is_available

    def init(self) -> None:
        pass

    _lazy_init = init

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return len(self._ledger.accounts)

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = self.index(device)

    def index(self, device: Any = None) -> int:
        """Return the index that a device, a number, a name or None means."""
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return self._current if found is None else int(found)

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        self._ledger.empty_caches()

    def memory_allocated(self, device: Any = None) -> int:
        return self._ledger.figures()[self.index(device)]

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._ledger.accounts[self.index(device)].peak.allocated

    def memory_reserved(self, device: Any = None) -> int:
        return self._ledger.accounts[self.index(device)].allocator.reserved

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._ledger.accounts[self.index(device)].allocator.peak_reserved

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        allocator = self._ledger.accounts[self.index(device)].allocator
        total = allocator.capacity or 1 << 62
        return total - allocator.reserved, total

    get_memory_info = mem_get_info  # as torch.accelerator calls it

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Do nothing: the peak reported is the cell's own."""

    reset_accumulated_memory_stats = reset_peak_memory_stats
    reset_max_memory_allocated = reset_peak_memory_stats

    def manual_seed(self, seed: int) -> None:
        pass

    manual_seed_all = manual_seed

    def seed(self) -> None:
        pass

    seed_all = seed

    def initial_seed(self) -> int:
        return 0

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        pass

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state() for _ in self._ledger.accounts]

    def set_rng_state_all(self, new_states: Any) -> None:
        pass

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return 8, 0

    def get_device_name(self, device: Any = None) -> str:
        return "device of a dry run"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Return what code asks for that shares work out among devices: those of an A100."""
        major, minor = self.get_device_capability()
        total = self.mem_get_info(device)[1]
        return SimpleNamespace(name=self.get_device_name(), major=major, minor=minor, total_memory=total,
                               multi_processor_count=108, is_integrated=False)  # fmt: skip

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    class device:  # noqa: N801  torch.cuda's name
        """Make a device current inside a `with`."""

        def __init__(self, device: Any) -> None:
            self.wanted = device

        def __enter__(self) -> None:
            module = _kept[0]
            assert isinstance(module, DeviceModule)
            self.module, self.before = module, module.current_device()
            module.set_device(self.wanted)

        def __exit__(self, *error: object) -> None:
            self.module.set_device(self.before)


class Stream:
    """A stream that runs what the others run: none is concurrent here, and all share one cache."""

    cuda_stream = stream_id = priority = 0

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device = device

    def query(self) -> bool:
        """Return that it is done."""
        return True

    def synchronize(self, *_: object) -> None:
        """Wait for nothing."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event."""
        return event or Event()

    def __enter__(self) -> Stream:  # noqa: PYI034  # typing.Self is 3.11
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    """An event that has happened."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def record(self, *_: object) -> None:
        """Record nothing."""

    wait = synchronize = record

    def elapsed_time(self, end_event: Event) -> float:
        """Return a time in ms that means nothing."""
        return 1.0


def stream(chosen: Stream | None) -> Stream:
    """Return what makes a stream the current one inside a `with`."""
    return chosen or Stream()


def current_stream(device: object = None) -> Stream:
    """Return a stream."""
    return Stream(device)
