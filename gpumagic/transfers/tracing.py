"""`--trace` and `--strict`: every operator of this thread seen, with what it allocates and whose tensors it takes.

A dispatch mode sees operators in backward and in optimizers too. Copies are counted elsewhere (`operators`). Imports
torch at its top.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpumagic.heap import storages
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.sampler import CellMemory
from gpumagic.transfers.recorder import Recorder, is_real
from gpumagic.transfers.trace.run import Trace

_READ = torch.ops.aten._local_scalar_dense.default
_UNCOUNTED = ("cpu", "meta")
_NO_USE = ("lift_fresh", "detach", "copy_", "_to_copy")
"""What is no use: `torch.from_numpy` and `.detach()`, and copies, which are checked where they are made."""


class Tracer(TorchDispatchMode):
    """Samples memory after each operator that makes something.

    For a strict recorder, an implicit use of a tensor on another device raises `StrayTensor`.
    """

    def __init__(self, recorder: Recorder, memory: CellMemory | None = None) -> None:
        super().__init__()
        self.memory = memory
        self.trace: Trace | None = None
        self._recorder = recorder
        self._requested: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler to exclude this method

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what a compiler traces does not run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        start = time.perf_counter()
        kwargs = kwargs or {}
        if func is _READ and not isinstance(args[0], torch.Tensor):
            return args[0]  # a number of which `torch.jit.trace` has made a tensor, and the dispatcher a number again
        given = list(_tensors((args, kwargs))) if self._recorder.is_strict else []
        self._refuse_strays(func, given)
        trace, now = None if _is_view(func) else self.trace, None
        allocates = not _is_in_place(func)
        if trace is not None:
            trace.before_operator(allocates=allocates)
        begun = time.perf_counter()
        result = func(*args, **kwargs)
        ended = time.perf_counter()
        made = [] if _allocates_nothing(func) else _made(result)
        if trace is not None:
            now = trace.after_operator(_addresses(made), allocates=allocates)
        if self.memory is not None and made:
            self._sample_memory(self.memory, made, now)
        if self._recorder.is_strict:
            self._note_requested(given, result)
        if self.trace is not None:
            self.trace.took(begun - start + time.perf_counter() - ended)
        return result

    def _sample_memory(self, memory: CellMemory, made: list[torch.Tensor], now: AllocatorStats | None) -> None:
        device, sites = made[0].device, self._recorder.log.sites
        known = now if device == self._recorder.device else None
        memory.sample_after_operator(str(device), _addresses(made), lambda: sites.find().line, known)

    def _refuse_strays(self, func: Any, given: Iterable[torch.Tensor]) -> None:
        __tracebackhide__ = True
        if self._recorder.request is not None or func._opname in _NO_USE:
            return
        for tensor in given:
            if self._is_elsewhere(tensor) and tensor.dim() and _storage_number(tensor) not in self._requested:
                self._recorder.refuse(tensor, f"lives on {tensor.device} and is used by {func._opname}")

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


@cache
def _is_in_place(func: Any) -> bool:
    """Return whether an operator works element by element in a tensor that it was given, without memory of its own.

    Reading the allocator takes longer than such an operator, and half of an optimizer's are of this kind.
    """
    name = func._schema.name
    return bool(name.endswith("_") and "_foreach" not in name and torch.Tag.pointwise in func.tags)


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operator only returns a view of what it was given."""
    return bool(not func._schema.is_mutable and any(each.alias_info is not None for each in func._schema.returns))


def _made(result: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's results that take memory of a device."""
    return [each for each in _tensors(result) if is_real(each) and each.device.type not in _UNCOUNTED and each.numel()]


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
