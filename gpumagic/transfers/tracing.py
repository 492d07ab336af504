"""`--trace` and `--strict`: copies counted where torch makes them, including those that no line asks for.

A dispatch mode sees every operator, in backward and in optimizers too. An operator with tensors of several devices, or
one whose kernel reads values, is called with the mode in force inside it, so the copies that its own code makes are
counted as well. What kernels copy without an operator is not seen, such as the sizes in `coalesce`. A copy made while a
handler of `calls` has a request is explicit; others are implicit. Imports torch at its top.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpumagic import _compat
from gpumagic.heap import storages
from gpumagic.transfers.recorder import Recorder, is_free_to_read

_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default,)
_FINDERS = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
FOUND_BYTES: int = torch.int32.itemsize
"""The bytes of the number of elements that a kernel finds."""
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_READERS = frozenset({"masked_fill", "masked_fill_", "bincount", "histc", "_ctc_loss", "_to_sparse", "one_hot"})
"""Operators whose kernels read values from the device by calling other operators."""
_UNCOUNTED = ("cpu", "meta")
_NO_USE = ("lift_fresh", "detach")  # what a dispatch mode sees of torch.from_numpy and .detach()


class Tracer(TorchDispatchMode):
    """Counts the copies between devices that operators make.

    For a strict recorder, an implicit copy and an implicit use of a tensor on another device raise `StrayTensor`.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._strict = recorder.is_strict
        self._operator = ""
        self._requested: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler to exclude this method

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        kwargs = kwargs or {}
        if _compat.can_decompose(func):  # in inference mode and inside kernels; elsewhere autograd has done it
            with self:
                return func.decompose(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        if self._strict:
            self._refuse_strays(func, given)
        start = time.perf_counter()
        looks_inside = _is_mixed(given) or (func._opname in _READERS and not all(map(is_free_to_read, given)))
        result = self._inside(func, args, kwargs) if looks_inside else func(*args, **kwargs)
        self._count(func, args, kwargs, result, time.perf_counter() - start)
        if self._recorder.memory is not None and not (self._operator or _allocates_nothing(func)):
            self._sample_memory(result)
        if self._strict:
            self._note_requested(given, result)
        return result

    def _sample_memory(self, result: Any) -> None:
        memory, sites = self._recorder.memory, self._recorder.log.sites
        made = [each for each in _tensors(result) if each.device.type not in _UNCOUNTED and each.numel()]
        if memory is not None and made:
            memory.sample_after_operator(str(made[0].device), _addresses(made), lambda: sites.find().line)

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operator's kernel for the accelerator with this mode still in force."""
        __tracebackhide__ = True
        device = next(each.device for each in _tensors((args, kwargs)) if not is_free_to_read(each))
        if func in (_aten.copy_.default, _aten._to_copy.default):
            return func(*args, **kwargs)
        key = torch._C._parse_dispatch_key(torch._C._dispatch_key_for_device(device.type))
        outer, self._operator = self._operator, func._opname
        try:
            with torch._C._AutoDispatchBelowAutograd(), self:
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        finally:
            self._operator = outer

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, seconds: float) -> None:
        __tracebackhide__ = True
        recorder = self._recorder
        if func in _READS and not is_free_to_read(args[0]):
            recorder.add_read(args[0], args[0].element_size(), seconds, self._cause(func))
        elif func is _aten._to_copy.default:
            self._add_move(func, args[0], result, seconds, bool(kwargs.get("non_blocking")))
        elif func is _aten.copy_.default:
            self._add_move(func, args[1], args[0], seconds, bool(args[2] if len(args) > 2 else False))
        elif func._opname in ("equal", "allclose") and _reads_truth(args[0], args[1]):
            recorder.add_read(args[0], 1, seconds, self._cause(func))
        elif func._opname in _FINDERS and not is_free_to_read(args[0]) and self._operator not in _INDEXED:
            nbytes = bytes_of_size(func._opname, args[0], in_slices=_is_in_slices(func, args, kwargs))
            recorder.add_read(args[0], nbytes, seconds, self._cause(func))

    def _add_move(self, func: Any, source: torch.Tensor, target: torch.Tensor, seconds: float, quick: bool) -> None:
        __tracebackhide__ = True
        if self._strict and self._recorder.request is None and source.device != target.device:
            number = self._recorder.number
            self._refuse(
                source if number is None or source.dim() else number,
                f"is copied to {target.device} by {self._recorder.cause or self._cause(func)}, which no line asks for",
            )
        self._recorder.add_move(source, target, seconds, self._cause(func), non_blocking=quick)

    def _cause(self, func: Any) -> str:
        request = self._recorder.request
        if request is not None:
            return request.cause
        return self._operator or ("backward" if torch._C._current_graph_task_id() != -1 else func._opname)

    def _refuse_strays(self, func: Any, given: Iterable[torch.Tensor]) -> None:
        __tracebackhide__ = True
        if self._recorder.request is not None or self._operator or func._opname in _NO_USE:
            return
        for tensor in given:
            if self._is_elsewhere(tensor) and tensor.dim() and _storage_number(tensor) not in self._requested:
                self._refuse(tensor, f"is used by {func._opname}")

    def _refuse(self, subject: object, what: str) -> None:
        __tracebackhide__ = True
        lives = f"lives on {subject.device} and " if isinstance(subject, torch.Tensor) else ""
        self._recorder.refuse(subject, lives + what)

    def _note_requested(self, given: list[torch.Tensor], result: Any) -> None:
        """Remember what a line asked to be elsewhere, and what is computed from it."""
        explicit = self._recorder.request is not None or self._recorder.is_explicit
        for tensor in _tensors(result):
            if self._is_elsewhere(tensor) and (
                explicit or any(_storage_number(each) in self._requested for each in given)
            ):
                self._requested.add(_storage_number(tensor))

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and tensor.device != self._recorder.device


@cache
def _allocates_nothing(func: Any) -> bool:
    """Return whether an operator returns what it was given, or a view of it."""
    return bool(func._schema.is_mutable or any(each.alias_info is not None for each in func._schema.returns))


def _storage_number(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage, also against one that gets its address later."""
    try:
        return storages.number_of(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse, or in a layout of its own
        return storages.number_of_tensor(tensor)


def _addresses(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    for each in tensors:
        with contextlib.suppress(RuntimeError):  # sparse and fake tensors have no memory of their own
            yield each.data_ptr()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _reads_truth(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether comparing two tensors needs the device; shapes and addresses may decide without it."""
    same = tensor is other or (tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride())
    return not is_free_to_read(tensor) and tensor.size() == other.size() and tensor.numel() > 0 and not same


def _is_in_slices(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether `unique` compares the slices of a dimension."""
    dim = kwargs.get("dim", args[3] if len(args) > 3 else None)
    return "unique_dim" in func._opname or (func._opname == "unique_consecutive" and dim is not None)


def bytes_of_size(name: str, tensor: torch.Tensor, *, in_slices: bool = False) -> int:
    """Return the bytes in which CUDA tells the host how many elements an operator finds.

    That is an int32, but an int64 of `unique`, unless it looks at truth values or ``in_slices`` of a dimension.
    """
    if "unique" not in name or in_slices or tensor.dtype == torch.bool:
        return FOUND_BYTES
    return 2 * FOUND_BYTES if tensor.numel() else 0


def _is_mixed(given: list[torch.Tensor]) -> bool:
    return len({each.device for each in given if not each.is_meta}) > 1
