"""The function mode of `%%ondevice`: torch's own device context, which also records.

It is a subclass of the context that `with torch.device(...)` enters, so torch treats it as one everywhere
(`torch.get_default_device`, `torch.compile`, checkpointing, nesting). A function without a handler costs one dictionary
lookup. A handler makes one call: it gives a constructor the default device, and counts what is created; copies are
counted by `operators`.

Since torch 2.11 a device context lies below all function modes, and an inner one replaces the outer one until it exits.
Before, torch puts it there too (pytorch#133729), but fails on leaving two, and `with torch.device(...)` puts it above.
Imports torch at its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpumagic._compat import torch_private
from gpumagic.notebook.interrupts import locked
from gpumagic.transfers.recorder import Function, Recorder, device_contexts, is_real

_DeviceContext: Any = torch_private.DEVICE_CONTEXT.get()


class _NestingContext(_DeviceContext):  # type: ignore[misc, unused-ignore]
    """Torch's device context before 2.11: it replaces the one at the bottom of the modes, and restores it on exit."""

    prev_mode: TorchFunctionMode | None = None
    old_device: Any = None

    def __enter__(self) -> _NestingContext:  # noqa: PYI034  # as torch's own
        state = torch_private.DEVICE_STATE.get()
        self.old_device = state.CURRENT_DEVICE
        state.CURRENT_DEVICE = self.device
        modes = _pop_all()
        if modes and isinstance(modes[-1], _DeviceContext):
            self.prev_mode = modes.pop()
        _push_all([*modes, self])
        return self

    def __exit__(self, *error: object) -> None:
        torch_private.DEVICE_STATE.get().CURRENT_DEVICE = self.old_device
        modes = _pop_all()
        if self in modes:
            place = modes.index(self)
            modes[place : place + 1] = (
                [] if self.prev_mode is None else [self.prev_mode]
            )
        _push_all(modes)


def _pop_all() -> list[Any]:
    """Pop all function modes, the innermost first."""
    pop, number = torch_private.POP_MODE.get(), torch_private.FUNCTION_MODES.get()()
    return [pop() for _ in range(number)]


def _push_all(modes: list[Any]) -> None:
    push = torch_private.PUSH_MODE.get()
    for mode in reversed(modes):
        push(mode)


def _nesting_context() -> Any:
    """Return torch's device context if it can be entered within another, and ours if not."""
    return (
        _DeviceContext
        if hasattr(_DeviceContext("cpu"), "prev_mode")
        else _NestingContext
    )


NestingContext: Any = _nesting_context()


_entered: list[RecordingContext] = []
"""Those of all threads."""
LOCK = RLock()
"""Held while a run puts something in place for all threads, or takes it away."""


class RecordingContext(NestingContext):
    """Torch's own device context, which passes some calls to the handlers."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.device)
        self.recorder = recorder
        self.prev_mode: Any = None
        self.old_device: Any = None
        self._handlers = handlers()
        self._outer: list[tuple[Any, ...]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        __tracebackhide__ = (
            True  # IPython leaves such frames out of the user's traceback
        )
        if func not in self._handlers:  # most calls, and so first
            return func(*args, **kwargs) if kwargs else func(*args)
        if (
            torch.compiler.is_compiling()
        ):  # a graph has torch's own context, and no counting in it
            return super().__torch_function__(func, types, args, kwargs)
        return self._handlers[func](self.recorder, func, args, kwargs or {})

    def __enter__(self) -> RecordingContext:  # noqa: PYI034  # as in DeviceRun
        # Checkpointing re-enters the context of its forward in backward, which torch's own does not support.
        self._outer.append((self.old_device, self.prev_mode))
        self.prev_mode = None
        super().__enter__()
        with locked(LOCK):
            _entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        with locked(LOCK):
            _entered[:] = [context for context in _entered if context is not self]
            # Torch notes one default device for all threads, which those of other threads would restore.
            for context in _entered:
                if context.old_device is self.device:
                    context.old_device = self.old_device
        later = self._entered_later()
        if later is None:
            super().__exit__(*error)
        else:  # the cell called set_default_device: its effect stays, like that of any line
            later.prev_mode, later.old_device = self.prev_mode, self.old_device
        self.old_device, self.prev_mode = self._outer.pop()

    def _entered_later(self) -> Any:
        """Return the device context that was entered after this one and is still in force."""
        for mode in device_contexts():
            if getattr(mode, "prev_mode", None) is self:
                return mode
        return None


# ---- What is done with the functions that the mode has to know: those that create

Handler = Callable[[Recorder, Function, tuple[Any, ...], dict[str, Any]], Any]


def construct(
    recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a constructor with the default device, unless it is given another, or a generator."""
    if kwargs.get("device") is None:
        # A generator works on its own device only; DataLoader's sampler relies on it.
        generator = kwargs.get("generator")
        kwargs["device"] = recorder.device if generator is None else generator.device
    return create(recorder, func, args, kwargs)


def create(
    recorder: Recorder, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function that makes a new tensor."""
    result = func(*args, **kwargs)
    if not (args and result is args[0]) and (
        type(result) is torch.Tensor or is_real(result)
    ):
        recorder.add_created(result)
    return result


_CREATORS = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
)
_METHOD_CREATORS = (
    "new_tensor",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "new_empty_strided",
)


@cache
def handlers() -> dict[Function, Handler]:
    """Return the handler of each function that the mode has to know."""
    found: dict[Function, Handler] = {}
    for function in torch_private.DEVICE_CONSTRUCTORS.get()():
        found[function] = construct
    for name in _CREATORS:
        found[getattr(torch, name)] = create
    for name in _METHOD_CREATORS:
        found[getattr(torch.Tensor, name)] = create
    return found
