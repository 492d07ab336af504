"""Copies between devices and values that the host reads, counted where torch's dispatcher makes them.

Every copy between two devices is a call of `copy_`, and every value that the host reads one of `_local_scalar_dense`,
whoever asks for it: a line, an operator's own code, autograd, an optimizer, `torch.save`, another thread. While a run
is open, these operators, and those whose kernels tell the host how many elements they have found, have a kernel from
`torch.library` in front of their own. It counts what its thread's run asked for and calls torch's kernel; nothing that
Python sees of torch is changed, and no other operator is slower.

The kernels lie below autograd, autocast, `vmap`, functionalization and fake tensors, so a copy that is only traced does
not reach them. A kernel of torch's may copy by further calls (in CUDA's, a copy that also converts; in one of a sparse
tensor, its parts): then these are counted, and not the outer call.

`copy_` is one kernel for all backends, so its place for one backend is free, and a copy within the host's memory stays
as fast as it is. `_local_scalar_dense` has a kernel for each backend; since torch 2.9 one can be put in front of it, so
that what the host reads of itself stays as fast too: optimizers read their steps. The other operators, and that one in
earlier torch, are caught at `BackendSelect`, which every call passes on its way to a backend.
Imports torch at its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.library import Library

from gpumagic.transfers import causes
from gpumagic.transfers import recorder as recorders
from gpumagic.transfers.recorder import Recorder, is_free_to_read

_aten = torch.ops.aten
_SELECT = "BackendSelect"
_BELOW_SELECT = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
_read_value = _aten._local_scalar_dense.default._handle.redispatch_boxed  # not `redispatch`, which is slower
_HOST = DispatchKeySet(DispatchKey.CPU)
"""Where `copy_` has the kernel that all backends share."""
_BACKENDS = ("CUDA", "XPU", "MPS", "PrivateUse1")
_FINDERS = (
    _aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default, _aten.unique_dim.default,
    _aten.unique_consecutive.default, _aten.unique_dim_consecutive.default, _aten._coalesce.default,
)  # fmt: skip
"""Operators whose kernels tell the host how many elements they have found."""
FOUND_BYTES: int = torch.int32.itemsize
"""The bytes of such a number."""

_open: list[object] = []
"""The runs for which copies are counted."""
_library: Library | None = None
_has_overridden = False
_inside: list[int] = []
"""The threads that one of the kernels is working for: their code must not be taken away."""


def watch(run: object) -> None:
    """Count copies until `unwatch` is called with the same run."""
    global _library  # noqa: PLW0603  the dispatcher is the process's
    _open.append(run)
    if _library is None:
        _library = Library("aten", "IMPL")  # kept first, so that an interrupt finds it
        _register(_library)


def unwatch(run: object) -> None:
    """Undo `watch`. Idempotent, so that it can be called after an interrupt anywhere."""
    global _library  # noqa: PLW0603  as in `watch`
    _open[:] = [each for each in _open if each is not run]
    # While another thread is in a kernel, they stay, and go with the next run; they count for open runs only.
    if _library is not None and not _open and not _inside:
        _library._destroy()
        _library = None


def is_idle() -> bool:
    """Return whether the dispatcher is as it was found."""
    return _library is None


def _register(library: Library) -> None:
    for place in _places_of_copy():
        library.impl("copy_", _copy_at(place), place, with_keyset=True)
    for place, kernel in _kernels_that_read():
        if place == _SELECT:
            library.impl("_local_scalar_dense", _read_by(kernel), place, with_keyset=True)
        else:
            _override(library, "_local_scalar_dense", _read_by(kernel), place)
    for operator in _FINDERS:
        library.impl(operator.name().removeprefix("aten::"), _finder(operator), _SELECT, with_keyset=True)


def _override(library: Library, name: str, function: Callable[..., Any], place: str) -> None:
    """Put a function in the place of a backend's own, without torch's warning of the first that a process overrides."""
    global _has_overridden  # noqa: PLW0603  as in `watch`
    with contextlib.ExitStack() as quiet:
        if not _has_overridden:  # once: it has Python show again what it shows once a place
            quiet.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        library.impl(name, function, place, with_keyset=True, allow_override=True)
    _has_overridden = True


def _places_of_copy() -> tuple[str, ...]:
    """Return the backends whose own place for `copy_` is free; if one has put something there, what lies before all."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return (_SELECT,) if any(has_kernel("aten::copy_", each) for each in _BACKENDS) else _BACKENDS


def _kernels_that_read() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield where values are read, and what reads them there."""
    get_kernel: Any = getattr(torch.library, "get_kernel", None)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if get_kernel is None:
        yield _SELECT, lambda keyset, tensor: _read_value(keyset & _BELOW_SELECT, tensor)
        return
    for place in _BACKENDS:
        if has_kernel("aten::_local_scalar_dense", place):
            yield place, get_kernel(_aten._local_scalar_dense.default, place).call_boxed


def _copy_at(place: str) -> Callable[..., Any]:
    def copy_(keyset: DispatchKeySet, target: Any, source: Any, non_blocking: bool = False) -> Any:
        __tracebackhide__ = True
        below = keyset & _BELOW_SELECT if place == _SELECT else _HOST
        if not isinstance(source, torch.Tensor):  # a number, which the dispatcher hands to Python as such
            source = torch.scalar_tensor(source, dtype=_dtype_of_number(source), device="cpu")
        redispatch = _aten.copy_.default.redispatch
        if target.device == source.device:
            return redispatch(below, target, source, non_blocking)
        with _counting() as recorder:
            if recorder is None:
                return redispatch(below, target, source, non_blocking)
            asked = causes.of_copy(recorder, source)
            recorder.check_copy(source, target.device, asked)
            before, start = recorder.counted, time.perf_counter()
            result = redispatch(below, target, source, non_blocking)
            if recorder.counted == before:
                recorder.add_move(source, target, time.perf_counter() - start, asked, non_blocking=non_blocking)
            return result

    return copy_


def _read_by(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def read(keyset: DispatchKeySet, tensor: Any) -> Any:
        __tracebackhide__ = True
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if tensor.is_cpu or tensor.is_meta:
            return kernel(keyset, tensor)
        with _counting() as recorder:
            start = time.perf_counter()
            result = kernel(keyset, tensor)
            if recorder is not None:
                asked = causes.of_read(recorder, tensor)
                recorder.add_read(tensor, tensor.element_size(), time.perf_counter() - start, asked)
            return result

    return read


def _finder(operator: Any) -> Callable[..., Any]:
    def find(keyset: DispatchKeySet, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not isinstance(tensor, torch.Tensor) or is_free_to_read(tensor):
            return operator.redispatch(keyset & _BELOW_SELECT, tensor, *args, **kwargs)
        with _counting() as recorder:
            before, start = 0 if recorder is None else recorder.counted, time.perf_counter()
            result = operator.redispatch(keyset & _BELOW_SELECT, tensor, *args, **kwargs)
            if recorder is not None and recorder.counted == before:
                nbytes = _bytes_of_size(operator._opname, tensor, args)
                asked = causes.of_size(recorder, operator._opname, tensor)
                recorder.add_read(tensor, nbytes, time.perf_counter() - start, asked)
            return result

    return find


@contextlib.contextmanager
def _counting() -> Iterator[Recorder | None]:
    """Yield this thread's recorder, if there is one; nothing of what counting does is traced or compiled."""
    _inside.append(get_ident())
    tracing, compiling = torch._C._get_tracing_state(), set_eval_frame(None)
    try:
        if tracing is not None:
            torch._C._set_tracing_state(None)
        yield recorders.current_recorder()
    finally:
        if tracing is not None:
            torch._C._set_tracing_state(tracing)
        set_eval_frame(compiling)
        _inside.remove(get_ident())


def _dtype_of_number(number: object) -> torch.dtype:
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    return kinds[type(number)]


def _bytes_of_size(operator: str, tensor: torch.Tensor, options: tuple[Any, ...]) -> int:
    """Return the bytes in which CUDA tells the host how many elements an operator finds.

    That is an int32, but an int64 of `unique`, unless it looks at truth values or compares the slices of a dimension.
    """
    if operator == "_coalesce":
        return FOUND_BYTES if tensor._nnz() > 1 else 0
    in_slices = "_dim" in operator or (operator == "unique_consecutive" and options[2:] not in ((), (None,)))
    if "unique" not in operator or in_slices or tensor.dtype == torch.bool:
        return FOUND_BYTES
    return 2 * FOUND_BYTES if tensor.numel() else 0
