"""Makes torch believe in a device, and gives it autocast: torch's slot for out-of-tree backends, filled from Python.

Runs in the worker's process. The guard and the hooks that torch asks are torch's own classes for backends that are
written in Python (torch 2.10 has them). They know one device, so the current one is kept here. Backward passes run in
the caller's thread, where the cell's lines are on the stack and where torch needs no queue for each device.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.memory.presets import GPUS
from gpumagic.simgpu._module import DeviceModule, DeviceProperties
from gpumagic.worker.fake.allocator import FakeLedger

OURS = "dryrun"
"""The device's name where torch keeps the name that the code uses for a device of its own."""
gpu = GPUS["A100"]
"""The GPU that the devices are: it decides how kernels share their work out."""


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


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_kept: list[object] = []
"""Objects that torch refers to without keeping them alive."""


def register(name: str, ledger: FakeLedger) -> FakeModule:
    """Make the device torch's out-of-tree one, under a name."""
    module = FakeModule(name, ledger)
    guard = _Guard()
    hooks = _Hooks()
    _kept.extend((module, guard, hooks))
    torch.utils.rename_privateuse1_backend(name)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(name, module)
    sys.modules[f"torch.{name}"] = module
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    torch.autograd.set_multithreading_enabled(False)
    _copy_storages_as_tensors(name)
    return module


def _copy_storages_as_tensors(name: str) -> None:
    """Let storages of the device be copied, as ``copy.deepcopy`` does: torch would need an allocator in C++ for it."""
    clone = torch.UntypedStorage.clone

    def cloned(storage: Any) -> Any:
        if storage.device.type != name:
            return clone(storage)
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage).clone().untyped_storage()

    torch.UntypedStorage.clone = cloned


class FakeModule(DeviceModule):
    """`torch.cuda` for the device of the dry run: its memory figures are the ledger's."""

    def __init__(self, name: str, ledger: FakeLedger) -> None:
        super().__init__(name)
        self._ledger = ledger
        self._current = 0
        self._generator = torch.Generator(
            "cpu"
        )  # one for all devices: it is asked for no numbers

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
        before = self._current
        if index >= 0:
            self._current = index
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
        """Do nothing: the peak that is reported is that of the whole cell."""

    reset_accumulated_memory_stats = reset_max_memory_allocated = (
        reset_peak_memory_stats
    )

    def generator(self, device: Any = None) -> torch.Generator:
        return self._generator

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        account = self._ledger.accounts[self.index(device)]
        total = account.allocator.capacity or _WITHOUT_END
        return DeviceProperties(
            gpu.name, total, "", gpu.multiprocessors, gpu.major, gpu.minor
        )


_WITHOUT_END = 1 << 62
"""Bytes that a device has whose capacity nobody named."""


class Stream(contextlib.nullcontext[None]):
    """A stream or an event: what is put on it is done at once, as nothing runs concurrently here."""

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


# ---- Autocast

# Which operators run in which precision is what `ATen/autocast_mode.h` lists; an out-of-tree device has to apply it
# itself. Operators that torch lists for CUDA and that are in none of these run in float32; those that take a dtype for
# their result are given that.
LOWER = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add stack cat
"""

Reference = weakref.ref[torch.Tensor]
_BELOW = DispatchKeySet(getattr(DispatchKey, "AutocastPrivateUse1"))  # noqa: B009  # missing from torch's own stubs


class Autocast:
    """`torch.autocast` on the device of the dry run, for the life of the process.

    Args:
        device_type: the name of the device of the dry run.
    """

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._cache: dict[int, tuple[Reference, torch.Tensor]] = {}
        """The copies of weights, until the outermost autocast ends: by a weight's identity, the weight and its copy."""
        rest = torch.library.Library("_", "IMPL")
        listed = torch.library.Library("aten", "IMPL")
        _kept.extend((rest, listed))
        rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        policies: dict[str, Policy] = {
            **dict.fromkeys(LOWER.split(), self._in_lower),
            **dict.fromkeys(WIDEST.split(), self._in_widest),
            "binary_cross_entropy": _refuse,
        }
        for registered in torch._C._dispatch_get_registrations_for_dispatch_key(
            "AutocastCUDA"
        ):
            namespace, _, name = registered.partition("::")
            if namespace != "aten" or name.startswith(
                "cudnn"
            ):  # torchvision has some, too
                continue
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            policy = policies.get(name) or self._default_policy(op)
            kernel = functools.partial(_under_autocast, policy, op)
            listed.impl(op, kernel, "AutocastPrivateUse1")
        self._clear_with_torchs()

    def _clear_with_torchs(self) -> None:
        """Clear the cache whenever torch clears its own."""
        clear = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            clear()
            self._cache.clear()

        torch.clear_autocast_cache = clear_autocast_cache

    # ---- Policies

    def _default_policy(self, op: Any) -> Policy:
        takes_dtype = any(argument.name == "dtype" for argument in op._schema.arguments)
        if takes_dtype:
            return self._to_float32
        return functools.partial(self._in, torch.float32)

    def _in_lower(self, op: Any, args: Args, kwargs: Kwargs) -> Any:
        return self._in(torch.get_autocast_dtype(self._type), op, args, kwargs)

    def _in(self, dtype: torch.dtype, op: Any, args: Args, kwargs: Kwargs) -> Any:
        args = self._cast(args, dtype)
        kwargs = self._cast(kwargs, dtype)
        return op(*args, **kwargs)

    def _to_float32(self, op: Any, args: Args, kwargs: Kwargs) -> Any:
        names = [argument.name for argument in op._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if self._is_eligible(args[0]) and given.get("dtype") is None:
            given["dtype"] = torch.float32
        return op(**given)

    def _in_widest(self, op: Any, args: Args, kwargs: Kwargs) -> Any:
        dtype = torch.get_autocast_dtype(self._type)
        for value in (*args, *kwargs.values()):
            tensors = value if isinstance(value, list) else [value]
            if any(self._is_wide(tensor) for tensor in tensors):
                dtype = torch.float32
        return self._in(dtype, op, args, kwargs)

    # ---- Casts

    def _is_wide(self, value: Any) -> bool:
        return self._is_eligible(value) and value.dtype == torch.float32

    def _is_eligible(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        with (
            torch._C.DisableTorchFunction()
        ):  # under `Names` the device would say another name
            is_here = value.device.type == self._type
        return bool(
            is_here and value.is_floating_point() and value.dtype != torch.float64
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an argument with all tensors of the device in a dtype."""
        if isinstance(value, list | tuple):
            return [self._cast(item, dtype) for item in value]
        if isinstance(value, dict):
            return {name: self._cast(item, dtype) for name, item in value.items()}
        if not self._is_eligible(value) or value.dtype == dtype:
            return value
        is_lowered = dtype != torch.float32 and value.dtype == torch.float32
        if is_lowered and _is_weight(value):
            return self._cast_weight(value, dtype)
        return value.to(dtype)

    def _cast_weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cached = self._cache.get(id(weight))
        if cached is not None:
            alive, copy = cached
            if alive() is weight:
                return copy
        copy = weight.to(dtype)
        if torch.is_autocast_cache_enabled():
            self._cache[id(weight)] = (weakref.ref(weight), copy)
        return copy


Policy = Callable[[Any, Args, Kwargs], Any]
"""Calls an operator with its arguments in the precision that it is to run in."""


def _is_weight(tensor: torch.Tensor) -> bool:
    """Return whether torch keeps the copy of a tensor that autocast makes."""
    return bool(tensor.requires_grad and tensor.is_leaf and not tensor._is_view())


def _under_autocast(policy: Policy, op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):
        return policy(op, args, kwargs)


def _refuse(*_: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss instead."
    )
