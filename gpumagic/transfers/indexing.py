"""Indexing, which copies where an index or an assigned value is on another device than the tensor.

How torch reads an index is left to torch: the few calls that cross devices run under the mode that counts copies where
torch makes them (`tracing`), and all others cost a check of the index.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from gpumagic.transfers.log import MASK
from gpumagic.transfers.recorder import Function, Recorder, is_free_to_read, watch_gradients
from gpumagic.transfers.tracing import FOUND_BYTES, Tracer

PLAIN = frozenset({int, slice, bool, type(None), type(...)})
"""What selects a view, and nothing else."""
CAUSE = "indexing"
_ADDING = frozenset({bool, type(None)})
"""What adds a dimension."""
_MASKS = (torch.bool, torch.uint8)
_LONGEST_TUPLE = 31
"""Length of the longest list that torch may take for a tuple of indices (until 2.9, and since)."""


def is_plain(index: Any) -> bool:
    """Return whether an index selects a view, so that nothing is copied, whatever the tensor."""
    kind = type(index)
    return kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, index)))


def get(recorder: Recorder, func: Function, args: Any, _: dict[str, Any]) -> Any:
    """Read part of a tensor."""
    __tracebackhide__ = True
    tensor, index = args
    if is_plain(index):
        return func(tensor, index)
    return _call(recorder, func, args, [*_parts(index)], [])


def put(recorder: Recorder, func: Function, args: Any, _: dict[str, Any]) -> Any:
    """Write part of a tensor."""
    __tracebackhide__ = True
    tensor, index, value = args
    if is_plain(index) and not (
        value.device != tensor.device if isinstance(value, torch.Tensor) else _is_one_element(tensor, index)
    ):
        return func(tensor, index, value)
    result = _call(recorder, func, args, [*_parts(index)], [value])
    watch_gradients(recorder, value, tensor)
    return result


def _is_one_element(tensor: torch.Tensor, index: Any) -> bool:
    """Return whether an index selects a single element of a device.

    CUDA copies a number that is written there from the host, and waits; to several elements it is written by a kernel
    (`THPVariable_setitem` in torch/csrc/autograd/python_variable_indexing.cpp, `copy_to` in ATen/TensorIndexing.h).
    """
    if is_free_to_read(tensor):
        return False
    kinds = [type(each) for each in index] if type(index) is tuple else [type(index)]
    return kinds.count(int) == tensor.dim() and _ADDING.isdisjoint(kinds)


def put_at(recorder: Recorder, func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `index_put_`, which takes the indices of each dimension."""
    __tracebackhide__ = True
    indices = args[1] if len(args) > 1 else kwargs.get("indices")
    values = args[2] if len(args) > 2 else kwargs.get("values")
    adds = bool(args[3] if len(args) > 3 else kwargs.get("accumulate"))
    return _call(recorder, functools.partial(func, **kwargs), args, list(indices or ()), [values], adds=adds)


def _call(
    recorder: Recorder, func: Function, args: Any, parts: list[Any], values: list[Any], *, adds: bool = False
) -> Any:
    __tracebackhide__ = True
    tensor = args[0]
    for part, _ in _lists(tensor, parts) if recorder.is_strict else ():
        recorder.refuse(part, f"is copied to {tensor.device} by {CAUSE}, which no line asks for")
    outer = recorder.cause, recorder.number
    recorder.cause, recorder.number = recorder.cause or CAUSE, _number(values)
    try:
        if recorder.is_traced or not _may_copy(tensor, parts, values):
            result = func(*args)
        else:
            with Tracer(recorder):
                result = func(*args)
        for part, nbytes in _lists(tensor, parts):
            recorder.add_copy("cpu", str(tensor.device), nbytes, None, CAUSE, part)
        recorder.cause = outer[0]
        if adds or not _fills(tensor, parts, values):
            for mask in _masks(tensor, parts):
                recorder.add_copy(str(tensor.device), "cpu", FOUND_BYTES, None, MASK, mask)
    finally:
        recorder.cause, recorder.number = outer
    return result


def _may_copy(tensor: torch.Tensor, parts: list[Any], values: list[Any]) -> bool:
    """Return whether the call has to be watched for copies between devices."""
    if is_free_to_read(tensor) and not any(isinstance(each, torch.Tensor) for each in (*parts, *values)):
        return False
    if any(_crosses(tensor, each) for each in (*parts, *values)):
        return True
    return _number(values) is not None and not _fills(tensor, parts, values)


def _number(values: list[Any]) -> object:
    """Return the Python number that is assigned, if one is: torch makes a tensor of it."""
    return next((each for each in values if isinstance(each, (bool, int, float, complex))), None)


def _parts(index: object) -> Iterator[object]:
    """Yield the indices of each dimension, as torch separates them."""
    if isinstance(index, tuple) or _is_like_a_tuple(index):
        yield from index  # type: ignore[misc]
    else:
        yield index


def _is_like_a_tuple(index: object) -> bool:
    return isinstance(index, list) and len(index) <= _LONGEST_TUPLE and any(map(_makes_a_tuple, index))


def _makes_a_tuple(item: object) -> bool:
    return item is None or item is ... or isinstance(item, slice) or hasattr(item, "__len__")


def _crosses(tensor: torch.Tensor, part: object) -> bool:
    """Return whether an index or an assigned value leaves its device; a tensor with one element is read."""
    if not isinstance(part, torch.Tensor):
        return hasattr(part, "dtype") and hasattr(part, "__len__") and not is_free_to_read(tensor)  # numpy's
    return part.device != tensor.device or not (part.dim() or is_free_to_read(part))


def _is_mask(part: object) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in _MASKS


def _masks(tensor: torch.Tensor, parts: list[Any]) -> list[Any]:
    """Return the masks whose elements the device of the tensor has to find."""
    if is_free_to_read(tensor):
        return []
    masks = [each for each in parts if _is_mask(each) and each.device == tensor.device]
    return [*masks, *(each for each, _ in _lists(tensor, parts) if _is_list_of_truths(each))]


def _fills(tensor: torch.Tensor, parts: list[Any], values: list[Any]) -> bool:
    """Return whether one value of the host is written under one mask, whose elements need not be found for that."""
    is_single = bool(values) and (not isinstance(values[0], torch.Tensor) or _is_host_number(values[0]))
    selecting = [each for each in parts if type(each) not in PLAIN]
    return is_single and len(selecting) == 1 and len(_masks(tensor, parts)) == 1


def _is_host_number(tensor: torch.Tensor) -> bool:
    return is_free_to_read(tensor) and tensor.numel() == 1


def _lists(tensor: torch.Tensor, parts: list[Any]) -> Iterator[tuple[Any, int]]:
    """Yield the lists among the indices of a tensor on a device; torch turns them into tensors that no mode sees."""
    for part in parts:
        if not is_free_to_read(tensor) and hasattr(part, "__len__") and not hasattr(part, "dtype"):
            nbytes = _bytes_as_index(part)
            if nbytes:
                yield part, nbytes


def _bytes_as_index(values: Any) -> int:
    """Return the bytes of the tensor that torch makes of a list: of bool, or of int64."""
    leaves = list(_leaves(values))
    return len(leaves) * (1 if all(isinstance(each, bool) for each in leaves) else torch.int64.itemsize)


def _is_list_of_truths(values: Any) -> bool:
    """Return whether a list is one of truth values, which is a mask."""
    leaves = list(_leaves(values))
    return bool(leaves) and all(isinstance(each, bool) for each in leaves)


def _leaves(values: Any) -> Iterator[object]:
    for each in values:
        if hasattr(each, "__len__"):
            yield from _leaves(each)
        else:
            yield each
