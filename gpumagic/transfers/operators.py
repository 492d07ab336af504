"""Copies between devices and values that the host reads, counted where torch's dispatcher makes them.

Every copy between two devices is a call of `copy_`, and every value that the host reads one of `_local_scalar_dense`,
whoever asks for it: a line, an operator's own code, autograd, an optimizer, `torch.save`, another thread. While a run
is open, these operators, and those whose kernels tell the host how many elements they have found, have a kernel from
`torch.library` in front of their own. It counts what its thread's run asked for and calls torch's kernel; nothing that
Python sees of torch is changed, and no other operator is slower.

The kernels lie below autograd, autocast, `vmap`, functionalization and fake tensors, so a copy that is only traced does
not reach them. A kernel of torch's may copy by further calls (in CUDA's, a copy that also converts; in one of a sparse
tensor, its parts): then these are counted, and not the outer call.

They stand in the places of the devices' backends, so that what the host copies and reads of itself stays as fast as it
is (optimizers read their steps). Torch lets them call what was there since 2.9; before, they are at `BackendSelect`,
which every call passes on its way to a backend.

Other threads may call torch meanwhile, and torch has no lock for that: one that waits to enter a kernel in Python
enters it also when it is gone from the dispatcher. So kernels that are taken away are kept for a while; before 2.9,
where nothing can keep them, they stay, and kernels that let calls fall through are put over them. Torch's own kernels
need no such care.
Imports torch at its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch.library import Library

from gpumagic._compat import torch_private
from gpumagic.backends import BACKENDS
from gpumagic.transfers import causes
from gpumagic.transfers.recorder import current_recorder

_set_eval_frame: Callable[[object], Any] = torch_private.SET_EVAL_FRAME.get()
_tracing_state: Callable[[], Any] = torch_private.TRACING_STATE.get()
_set_tracing_state: Callable[[object], None] = torch_private.SET_TRACING_STATE.get()
_has_computed_kernel: Callable[[str, str], bool] = (
    torch_private.HAS_COMPUTED_KERNEL.get()
)
_destroy: Callable[[Library], None] = torch_private.DESTROY_LIBRARY.get()
_DispatchKey: Any = torch_private.DISPATCH_KEY.get()
_CAN_CALL_TORCHS = torch_private.COMPUTED_KERNEL.is_there()
"""Whether a kernel can be put in front of torch's own and call it, as it can since torch 2.9."""

_aten, _Tensor = torch.ops.aten, torch.Tensor
_VALUE = torch_private.READ_VALUE.get().default
"""The operator by which the host reads a value."""
_SPARSE = (
    torch_private.COALESCE.get().default if torch_private.COALESCE.is_there() else None
)
"""The one of the operators that are counted that works on sparse tensors."""
_SELECT = "BackendSelect"
FOUND_BYTES: int = torch.int32.itemsize
"""The bytes of the number of elements that such a kernel tells."""
_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
"""What torch makes of the numbers of Python."""

Function = Callable[..., Any]


class CountingKernels:
    """The kernels that count, which stand in front of torch's own while a run is open.

    The dispatcher is the process's, so there is one of these; whoever calls `watch` and `unwatch` lets no other thread
    do so meanwhile.
    """

    def __init__(self) -> None:
        self._runs: list[object] = []
        """The runs for which copies are counted."""
        self._library: Library | None = None
        self._fallthrough_library: Library | None = None
        """What hides the kernels from the dispatcher while no run is open, in torch before 2.9."""
        self._is_complete = False
        """Whether all kernels are registered: an interrupt may come before."""
        self._has_overridden = False
        self._latest: deque[object] = deque(maxlen=1000)
        """The latest kernels, also those that are no longer registered: another thread may be about to call one."""

    def watch(self, run: object) -> None:
        """Count copies until `unwatch` is called with the same run."""
        self._runs.append(run)
        if self._library is None:
            self._is_complete = False
            self._library = Library(
                "aten", "IMPL"
            )  # kept first, so that an interrupt finds it
            self._register(self._library)
            self._is_complete = True
        if self._fallthrough_library is not None:
            _destroy(self._fallthrough_library)
            self._fallthrough_library = None

    def unwatch(self, run: object) -> None:
        """Undo `watch`. Idempotent, so that it can be called after an interrupt anywhere."""
        self._runs[:] = [other for other in self._runs if other is not run]
        if self._library is None or self._runs:
            return
        if _CAN_CALL_TORCHS or not self._is_complete:
            _destroy(self._library)
            self._library = None
        elif self._fallthrough_library is None:  # nothing else would keep the kernels
            self._fallthrough_library = Library("aten", "IMPL")
            for operator in _counted():
                fallthrough = torch.library.fallthrough_kernel
                self._put(self._fallthrough_library, operator, fallthrough, _SELECT)

    def is_idle(self) -> bool:
        """Return whether the dispatcher is as it was found."""
        return self._library is None or self._fallthrough_library is not None

    def _register(self, library: Library) -> None:
        keys = dict.fromkeys(backend.dispatch_key for backend in BACKENDS)
        backends = [key for key in keys if _has_computed_kernel(_VALUE.name(), key)]
        for operator, count in _counted().items():
            for place, kernel in _kernels_of(operator, backends):
                self._put(library, operator, count(kernel), place)
                if _CAN_CALL_TORCHS:
                    self._latest.append(_computed_kernel(operator, place))

    def _put(
        self, library: Library, operator: Any, function: Function, place: str
    ) -> None:
        """Register a kernel; `Library.impl` would forget in the end that other libraries have one there too."""
        name = operator.name()
        is_first = False
        if not self._has_overridden:
            is_first = torch_private.HAS_KERNEL.get()(name, place)
        with _unwarned() if is_first else contextlib.nullcontext():
            library.m.impl(name.removeprefix("aten::"), place, function, True)
        self._has_overridden |= is_first


kernels = CountingKernels()


Counting = Callable[[Function], Function]
"""Takes a kernel of torch's; returns one that calls it and counts."""


def _counted() -> dict[Any, Counting]:
    """Return the operators that are counted, with what makes the kernels for each."""
    operators: dict[Any, Counting] = {}
    operators[_aten.copy_.default] = _copying
    for operator, bytes_read in _readers().items():
        operators[operator] = functools.partial(_reading, operator, bytes_read)
    return operators


def _kernels_of(
    operator: Any, backends: Iterable[str]
) -> Iterator[tuple[str, Function]]:
    """Yield where an operator of a device is caught, and torch's kernel that is called from there."""
    if not _CAN_CALL_TORCHS:
        yield _SELECT, _next_kernel(operator)
        return
    for backend in backends:
        place = f"Sparse{backend}" if operator is _SPARSE else backend
        if not _has_computed_kernel(operator.name(), place):
            continue
        if _is_replaced(operator, place):
            yield place, _computed_kernel(operator, place).call_boxed
        else:
            yield place, _torchs_kernel(operator, place)


def _next_kernel(operator: Any) -> Function:
    """Return what passes a call on from `BackendSelect`, in torch before 2.9."""
    handle = getattr(operator, torch_private.REDISPATCH)
    redispatch = handle.redispatch_boxed  # not `redispatch`, which is slower
    below = torch_private.KEYS_AFTER.get()(_DispatchKey.BackendSelect)
    return lambda keyset, *args: redispatch(keyset & below, *args)


def _is_replaced(operator: Any, place: str) -> bool:
    """Return whether a library in Python has a kernel in the place of torch's; of one in C++ torch does not tell."""
    if not torch_private.LIBRARY_KERNELS.is_there():
        return True
    name = operator.name().replace("::", "/")
    return f"{name}/{place}" in torch_private.LIBRARY_KERNELS.get()


@functools.cache
def _torchs_kernel(operator: Any, place: str) -> Function:
    """Return torch's own kernel; it is looked for once, since torch keeps 48 bytes of each look for good."""
    kernel: Function = _computed_kernel(operator, place).call_boxed
    return kernel


def _computed_kernel(operator: Any, place: str) -> Any:
    """Return what torch calls at a place of the dispatcher."""
    return torch_private.COMPUTED_KERNEL.get()(
        operator.name(), getattr(_DispatchKey, place)
    )


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Hide torch's warning of the first kernel that a process puts in the place of another."""
    # Once, since it has Python show again what it shows once a place.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _copying(kernel: Function) -> Function:
    def copy_(keyset: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
        __tracebackhide__ = True
        if not isinstance(
            source, _Tensor
        ):  # a number: the dispatcher hands it to Python as such
            source = torch.scalar_tensor(
                source, dtype=_DTYPES[type(source)], device="cpu"
            )
        here, there = source.device, target.device
        if here == there:
            return kernel(keyset, target, source, non_blocking)
        compiling, tracing = _set_eval_frame(None), _tracing_state()
        recorder, outer = None, None
        try:
            if tracing is not None:
                _set_tracing_state(None)
            recorder = current_recorder()
            if recorder is None:
                return kernel(keyset, target, source, non_blocking)
            outer = recorder.copied
            if outer is None:
                recorder.copied = source
            before, start = recorder.counted, perf_counter()
            result = kernel(keyset, target, source, non_blocking)
            seconds = perf_counter() - start
            if recorder.counted == before:
                recorder.add_copy(source, target, here, there, seconds, non_blocking)
            return result
        finally:
            if recorder is not None:
                recorder.copied = outer
            if tracing is not None or compiling is not None:
                _restore_compilers(compiling, tracing)

    return copy_


BytesRead = Callable[[torch.Tensor, tuple[Any, ...]], int]
"""Takes what an operator is called with; returns the bytes that its kernel tells the host."""


def _reading(operator: Any, bytes_read: BytesRead, kernel: Function) -> Function:
    name = operator.name().partition("::")[2]
    asks = causes.READ if operator is _VALUE else f".{name.strip('_2')}"

    def read(keyset: Any, tensor: Any, *args: Any) -> Any:
        __tracebackhide__ = True
        if not isinstance(tensor, _Tensor):
            return tensor if operator is _VALUE else kernel(keyset, tensor, *args)
        if tensor.is_cpu or tensor.is_meta:
            return kernel(keyset, tensor, *args)
        compiling, tracing = _set_eval_frame(None), _tracing_state()
        try:
            if tracing is not None:
                _set_tracing_state(None)
            recorder = current_recorder()
            if recorder is None:
                return kernel(keyset, tensor, *args)
            before, start = recorder.counted, perf_counter()
            result = kernel(keyset, tensor, *args)
            seconds = perf_counter() - start
            if recorder.counted == before:
                recorder.add_read(tensor, bytes_read(tensor, args), seconds, asks)
            return result
        finally:
            if tracing is not None or compiling is not None:
                _restore_compilers(compiling, tracing)

    return read


def _restore_compilers(compiling: Any, tracing: Any) -> None:
    """Let torch trace and compile again what it did before: nothing of what counting does is."""
    if tracing is not None:
        _set_tracing_state(tracing)
    if compiling is not None:
        _set_eval_frame(compiling)


# ---- The operators that read, and how many bytes: those of a value; of how many elements are found, on CUDA an int32,
# but an int64 of `unique`, unless it looks at truth values or compares the slices of a dimension


def _readers() -> dict[Any, BytesRead]:
    """Return the operator by which the host reads a value, and those whose kernels tell it how many they have found."""
    found: dict[Any, BytesRead] = {
        _VALUE: _bytes_of_value,
        _aten.nonzero.default: _bytes_of_count,
        _aten.masked_select.default: _bytes_of_count,
        _aten.unique_dim.default: _bytes_of_count,
        _aten.unique_consecutive.default: _bytes_of_unique_consecutive,
        _aten.unique_dim_consecutive.default: _bytes_of_count,
    }
    if torch_private.UNIQUE.is_there():
        found[torch_private.UNIQUE.get().default] = _bytes_of_unique
    if _SPARSE is not None:
        found[_SPARSE] = _bytes_of_coalesced
    return found


def _bytes_of_value(tensor: torch.Tensor, _: tuple[Any, ...]) -> int:
    return int(tensor.element_size())


def _bytes_of_count(_: torch.Tensor, __: tuple[Any, ...]) -> int:
    return FOUND_BYTES


def _bytes_of_unique(tensor: torch.Tensor, _: tuple[Any, ...]) -> int:
    if tensor.dtype == torch.bool:
        return FOUND_BYTES
    return 2 * FOUND_BYTES if tensor.numel() else 0


def _bytes_of_unique_consecutive(tensor: torch.Tensor, options: tuple[Any, ...]) -> int:
    has_dimension = options[2:] not in ((), (None,))
    return FOUND_BYTES if has_dimension else _bytes_of_unique(tensor, options)


def _bytes_of_coalesced(tensor: torch.Tensor, _: tuple[Any, ...]) -> int:
    stored: int = getattr(tensor, torch_private.STORED_ELEMENTS)()
    return FOUND_BYTES if stored > 1 else 0
