"""Which types can hold a tensor, and how each is opened."""

from __future__ import annotations

import functools
import queue
import sys
from collections.abc import Callable, Iterator
from types import (
    BuiltinMethodType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
)
from typing import Any

from gpumagic.heap import callables, calls
from gpumagic.heap.anatomy import (
    CONTAINERS,
    Branch,
    Opener,
    fields_of,
    inner_tensors,
    instance,
    made_by_class,
    module,
    nothing,
    optimizer,
)

Open = Callable[[Any, Opener], Iterator[Branch]]

_EXACTLY: dict[type, Open] = {
    FunctionType: callables.function,
    MethodType: callables.bound,
    BuiltinMethodType: callables.bound,
    FrameType: calls.call,
    TracebackType: calls.traceback,
    queue.SimpleQueue: callables.opaque,
    **dict.fromkeys(calls.SUSPENDED, calls.suspended),
    **dict.fromkeys(callables.OPAQUE, callables.opaque),
}
"""Types of which there are no subclasses to speak of."""


def opener_of(kind: type) -> Opener | None:
    """Return how to open the instances of a type, or None if they cannot hold a tensor."""
    import torch

    if kind in (torch.Tensor, torch.nn.Parameter):
        return Opener(nothing, is_tensor=True)
    if issubclass(kind, torch.Tensor):
        return Opener(inner_tensors, fields_of(kind), is_tensor=True)
    if kind in _EXACTLY:
        return Opener(_EXACTLY[kind])
    return None if _runs_the_session(kind) else _opener_by_base(kind)


def _opener_by_base(kind: type) -> Opener | None:
    for base, open_ in _bases():
        if issubclass(kind, base):
            container = base if base in CONTAINERS else None
            return Opener(open_, None if kind is container else fields_of(kind), container)
    if issubclass(kind, ModuleType) or not (made_by_class(kind) or kind is SimpleNamespace):
        return None
    fields = fields_of(kind)
    return Opener(instance, fields) if fields else None


def _runs_the_session(kind: type) -> bool:
    """Return whether a type is IPython's or the kernel's: through `get_ipython` or `exit` they lead everywhere."""
    configurable = sys.modules.get("traitlets.config.configurable")
    return configurable is not None and issubclass(kind, configurable.Configurable)


def _bases() -> Iterator[tuple[type, Open]]:
    import torch

    yield torch.nn.Module, module
    yield torch.optim.Optimizer, optimizer
    yield from CONTAINERS.items()
    yield BaseException, calls.error
    yield type, callables.klass
    yield functools.partial, callables.partial
    if "_asyncio" in sys.modules:
        yield sys.modules["_asyncio"].Future, callables.opaque  # also tasks
