"""Makes torch believe in a device: torch's slot for out-of-tree backends, filled from Python.

The guard and the hooks that torch asks are its own, written for backends in Python (torch 2.10 has them); they know
one device, so which one is current is kept here. Backward runs in the caller's thread, where the cell's lines are
on the stack and where torch needs no queue for each device.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.dryrun.worker.fake.allocator import FakeLedger
from gpumagic.simgpu._module import DeviceModule, DeviceProperties

OURS = "dryrun"
"""The device's name where CUDA's is taken by torch's own."""
PROCESSORS = 108
"""Of an A100, which is what an imagined device is."""


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


def register(name: str, ledger: FakeLedger) -> FakeModule:
    """Make the device torch's out-of-tree one, under a name."""
    module = FakeModule(name, ledger)
    guard, hooks = _Guard(), _Hooks()
    _kept.extend((module, guard, hooks))
    torch.utils.rename_privateuse1_backend(name)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(name, module)
    sys.modules[f"torch.{name}"] = module
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    torch.autograd.set_multithreading_enabled(False)
    clone = torch.UntypedStorage.clone

    def cloned(storage: Any) -> Any:
        """Copy a storage, as ``copy.deepcopy`` of a tensor does: torch needs an allocator in C++ for that."""
        if storage.device.type != name:
            return clone(storage)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    torch.UntypedStorage.clone = cloned
    return module


class FakeModule(DeviceModule):
    """`torch.cuda` for the device of the dry run: its memory figures are the ledger's."""

    def __init__(self, name: str, ledger: FakeLedger) -> None:
        super().__init__(name)
        self._ledger = ledger
        self._current = 0
        self._generator = torch.Generator("cpu")  # of all devices: they make no numbers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "is_built":
            raise AttributeError(name)
        raise CannotDryRun(f"{self.__name__}.{name} is not part of a dry run")

    def device_count(self) -> int:
        return len(self._ledger.accounts)

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self._current

    def exchange_device(self, index: int) -> int:
        before, self._current = self._current, index if index >= 0 else self._current
        return before

    def figures(self, index: int) -> dict[str, int]:
        account = self._ledger.accounts[index]
        return {
            "allocated_bytes.all.current": self._ledger.figures()[index],
            "allocated_bytes.all.peak": account.peak.allocated,
            "reserved_bytes.all.current": account.allocator.reserved,
            "reserved_bytes.all.peak": account.allocator.peak_reserved,
        }

    get_memory_info = DeviceModule.mem_get_info  # as torch.accelerator calls it

    def empty_cache(self) -> None:
        self._ledger.empty_caches()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Do nothing: the peak reported is the cell's own."""

    reset_accumulated_memory_stats = reset_max_memory_allocated = reset_peak_memory_stats

    def generator(self, device: Any = None) -> torch.Generator:
        return self._generator

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """Return what code asks for that shares work out among devices: those of an A100."""
        total = self._ledger.accounts[self.index(device)].allocator.capacity or 1 << 62
        return DeviceProperties("device of a dry run", total, multi_processor_count=PROCESSORS)


class Stream(contextlib.nullcontext[None]):
    """A stream or an event: what is put on it has been done, since none is concurrent here and all share one cache."""

    cuda_stream = stream_id = priority = 0

    def __init__(self, device: object = None, *_: object, **__: object) -> None:
        super().__init__()
        self.device = device

    def query(self) -> bool:
        """Return that it is done."""
        return True

    def synchronize(self, *_: object) -> None:
        """Wait for nothing."""

    wait = wait_stream = wait_event = record = synchronize

    def record_event(self, event: Stream | None = None) -> Stream:
        """Return an event."""
        return event or Stream()

    def elapsed_time(self, end_event: Stream) -> float:
        """Return a time in ms that means nothing."""
        return 1.0
