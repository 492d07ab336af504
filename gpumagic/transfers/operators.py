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
where nothing can keep them, they stay under a cover that lets calls pass. Torch's own kernels need no such care.
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
from torch._C import DispatchKey, DispatchKeySet, _get_tracing_state
from torch._C._dynamo import eval_frame
from torch.library import Library

from gpumagic.transfers import causes
from gpumagic.transfers.recorder import current_recorder

set_eval_frame = eval_frame.set_eval_frame
_set_tracing_state: Callable[[object], None] = torch._C._set_tracing_state  # type: ignore[attr-defined, unused-ignore]
_aten, _Tensor = torch.ops.aten, torch.Tensor
_VALUE = _aten._local_scalar_dense.default
"""The operator by which the host reads a value."""
_FINDERS = (
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim_consecutive.default,
    _aten._coalesce.default,
)
"""Operators whose kernels tell the host how many elements they have found."""
_BACKENDS = ("CUDA", "XPU", "MPS", "PrivateUse1")
_SELECT = "BackendSelect"
_BELOW_SELECT = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
_has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
_kernel_at: Any = getattr(
    torch._C, "_dispatch_get_computed_kernel_for_dispatch_key", None
)  # since torch 2.9
FOUND_BYTES: int = torch.int32.itemsize
"""The bytes of such a number."""

Function = Callable[..., Any]

_open: list[object] = []
"""The runs for which copies are counted."""
_library: Library | None = None
_cover: Library | None = None
"""What hides the kernels from the dispatcher while no run is open, in torch before 2.9."""
_is_registered = False
"""Whether all kernels are: an interrupt may come before."""
_has_overridden = False
_kernels: deque[object] = deque(maxlen=1000)
"""The latest kernels, also those that are no longer registered: another thread may be about to call one."""
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""What torch makes of the numbers of Python."""


def watch(run: object) -> None:
    """Count copies until `unwatch` is called with the same run."""
    global _library, _cover, _is_registered  # noqa: PLW0603  the dispatcher is the process's
    _open.append(run)
    if _library is None:
        _is_registered = False
        _library = Library("aten", "IMPL")  # kept first, so that an interrupt finds it
        _register(_library)
        _is_registered = True
    if _cover is not None:
        _cover._destroy()
        _cover = None


def unwatch(run: object) -> None:
    """Undo `watch`. Idempotent, so that it can be called after an interrupt anywhere."""
    global _library, _cover  # noqa: PLW0603  as in `watch`
    _open[:] = [each for each in _open if each is not run]
    if _library is None or _open:
        return
    if _kernel_at is not None or not _is_registered:
        _library._destroy()
        _library = None
    elif _cover is None:  # nothing else would keep the kernels
        _cover = Library("aten", "IMPL")
        for each in _counted():
            _put(_cover, each, torch.library.fallthrough_kernel, _SELECT)


def is_idle() -> bool:
    """Return whether the dispatcher is as it was found."""
    return _library is None or _cover is not None


def _register(library: Library) -> None:
    backends = [each for each in _BACKENDS if _has_kernel(_VALUE.name(), each)]
    for operator, count in _counted().items():
        for place, kernel in _kernels_of(operator, backends):
            _put(library, operator, count(kernel), place)
            if _kernel_at is not None:
                _kernels.append(_kernel_at(operator.name(), getattr(DispatchKey, place)))


def _counted() -> dict[Any, Callable[[Function], Function]]:
    """Return the operators, and what makes for each a kernel that counts out of one that works."""
    return {
        _aten.copy_.default: _copying,
        **{each: functools.partial(_reading, each) for each in (_VALUE, *_FINDERS)},
    }


def _kernels_of(operator: Any, backends: Iterable[str]) -> Iterator[tuple[str, Function]]:
    """Yield where an operator of a device is caught, and torch's kernel that is called from there."""
    if _kernel_at is None:
        redispatch = operator._handle.redispatch_boxed  # not `redispatch`, which is slower
        yield _SELECT, lambda keyset, *args: redispatch(keyset & _BELOW_SELECT, *args)
        return
    for backend in backends:
        place = f"Sparse{backend}" if operator is _aten._coalesce.default else backend
        if _has_kernel(operator.name(), place):
            # By a library in Python; of one in C++ torch does not tell.
            is_replaced = f"{operator.name().replace('::', '/')}/{place}" in torch.library._impls
            yield (
                place,
                (_find_kernel.__wrapped__ if is_replaced else _find_kernel)(operator, place),
            )


@functools.cache
def _find_kernel(operator: Any, place: str) -> Function:
    """Return torch's own kernel; it is looked for once, since torch keeps 48 bytes of each look for good."""
    kernel: Function = _kernel_at(operator.name(), getattr(DispatchKey, place)).call_boxed
    return kernel


def _put(library: Library, operator: Any, function: Function, place: str) -> None:
    """Register a kernel; not by `Library.impl`, which forgets in the end that other libraries have one there too."""
    is_first = (
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), place)
        and not _has_overridden
    )
    with _unwarned() if is_first else contextlib.nullcontext():
        library.m.impl(operator.name().removeprefix("aten::"), place, function, True)


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Hide torch's warning of the first kernel that a process puts in the place of another."""
    global _has_overridden  # noqa: PLW0603  as in `watch`
    # Once, since it has Python show again what it shows once a place.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    _has_overridden = True


def _copying(kernel: Function) -> Function:
    def copy_(keyset: DispatchKeySet, target: Any, source: Any, non_blocking: bool = False) -> Any:
        __tracebackhide__ = True
        if not isinstance(
            source, _Tensor
        ):  # a number, which the dispatcher hands to Python as such
            source = torch.scalar_tensor(source, dtype=_DTYPES[type(source)], device="cpu")
        here, there = source.device, target.device
        if here == there:
            return kernel(keyset, target, source, non_blocking)
        compiling, tracing = set_eval_frame(None), _get_tracing_state()
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
                recorder.add_move(source, target, here, there, seconds, non_blocking)
            return result
        finally:
            if recorder is not None:
                recorder.copied = outer
            if tracing is not None or compiling is not None:
                _count_no_more(compiling, tracing)

    return copy_


def _reading(operator: Any, kernel: Function) -> Function:
    name = operator._opname
    asks = causes.READ if operator is _VALUE else f".{name.strip('_2')}"

    def read(keyset: DispatchKeySet, tensor: Any, *args: Any) -> Any:
        __tracebackhide__ = True
        if not isinstance(tensor, _Tensor):
            return tensor if operator is _VALUE else kernel(keyset, tensor, *args)
        if tensor.is_cpu or tensor.is_meta:
            return kernel(keyset, tensor, *args)
        compiling, tracing = set_eval_frame(None), _get_tracing_state()
        try:
            if tracing is not None:
                _set_tracing_state(None)
            recorder = current_recorder()
            before, start = 0 if recorder is None else recorder.counted, perf_counter()
            result = kernel(keyset, tensor, *args)
            seconds = perf_counter() - start
            if recorder is not None and recorder.counted == before:
                recorder.add_read(tensor, _bytes_read(name, tensor, args), seconds, asks)
            return result
        finally:
            if tracing is not None or compiling is not None:
                _count_no_more(compiling, tracing)

    return read


def _count_no_more(compiling: Any, tracing: Any) -> None:
    """Let torch trace and compile again what it did before: nothing of what counting does is."""
    if tracing is not None:
        _set_tracing_state(tracing)
    if compiling is not None:
        set_eval_frame(compiling)


def _bytes_read(operator: str, tensor: torch.Tensor, options: tuple[Any, ...]) -> int:
    """Return the bytes of a value that the host reads, or those in which CUDA tells it how many elements are found.

    That is an int32, but an int64 of `unique`, unless it looks at truth values or compares the slices of a dimension.
    """
    if operator == "_local_scalar_dense":
        return int(tensor.element_size())
    if operator == "_coalesce":
        return FOUND_BYTES if tensor._nnz() > 1 else 0
    in_slices = "_dim" in operator or (
        operator == "unique_consecutive" and options[2:] not in ((), (None,))
    )
    if "unique" not in operator or in_slices or tensor.dtype == torch.bool:
        return FOUND_BYTES
    return 2 * FOUND_BYTES if tensor.numel() else 0
