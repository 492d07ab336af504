"""The recording of a run: torch's device context, the count of copies, and what else a run puts in place.

Torch calls a function mode for every function, whatever it is for: an empty one in Python makes a small-operator step
take 1.6 times as long, `torch.device` 1.7, an empty TorchDispatchMode 2.7. What would be cheaper: wrappers in the
place of torch's functions (1.1) see only calls that go through them, so they must know whoever else holds these
functions (libraries do, in tuples and closures), and the user's code sees them; `set_default_tensor_type` is one for
all threads and knows no index; at the dispatcher an absent device cannot be told from `cpu`. Imports torch at its top,
so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from gpumagic import _compat
from gpumagic._compat import torch_frames
from gpumagic.memory import allocator
from gpumagic.notebook import interrupts
from gpumagic.notebook.interrupts import locked
from gpumagic.source import frames
from gpumagic.transfers import device_mode, lines, operators, tracing
from gpumagic.transfers import recorder as recorders
from gpumagic.transfers.device_mode import LOCK, RecordingContext
from gpumagic.transfers.log import TransferLog
from gpumagic.transfers.recorder import Recorder, device_contexts


class Recording:
    """The default device of a block, and the record of what its calls create and copy."""

    def __init__(self, device: str, log: TransferLog) -> None:
        self.recorder = Recorder(torch.device(device), log)
        self._context: RecordingContext | None = None

    def open(self) -> None:
        """Start recording, in the calling thread."""
        try:
            recorders.begin(self.recorder)
            with locked(LOCK):
                operators.kernels.watch(self)
                watch_waits(self, self.recorder.device.type)
                watch_tracebacks()
            # Kept first, so that an interrupt finds it.
            self._context = RecordingContext(self.recorder)
            self._context.__enter__()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop recording, and restore everything; again after an interrupt anywhere."""
        try:
            self._leave_context()
        finally:
            try:
                with locked(LOCK):
                    unwatch_waits(self)
                    unwatch_tracebacks()
                    operators.kernels.unwatch(self)
            finally:
                recorders.end(self.recorder)
                self.recorder.finish()

    def drop_own_frames(self, error: BaseException | None) -> None:
        """Leave the frames between a line and torch out of an error's traceback."""
        drop_own_frames(error)

    def _leave_context(self) -> None:
        context = self._context
        if context is not None and any(mode is context for mode in device_contexts()):
            context.__exit__(None, None, None)  # else it has been left already
        self._context = None


def is_idle() -> bool:
    """Return whether torch is as it was found: no run is open."""
    return not recorders.open_runs and operators.kernels.is_idle() and not _patches


# ---- Calls by which a line waits for a device, a stream or an event. Their names are bound to wrappers while a run is
# open: torch has no other way to learn of them.

Function = Callable[..., Any]


_NAME = "synchronize"


class _Patch(NamedTuple):
    """A function that is replaced while a run is open."""

    owner: Any
    """The module or the class that has it."""
    function: Function
    wrapper: Function


_waiting: list[object] = []
"""The runs for which waits are counted."""
_patches: list[_Patch] = []


def watch_waits(run: object, backend: str) -> None:
    """Count the waits for a backend's devices until `unwatch_waits` is called with the same run."""
    _waiting.append(run)
    wrappers = [patch.wrapper for patch in _patches]
    for owner, function in _functions(backend):
        if function not in wrappers:
            patch = _Patch(owner, function, _wrap(function))
            _patches.append(patch)
            setattr(owner, _NAME, patch.wrapper)


def unwatch_waits(run: object) -> None:
    """Undo `watch_waits`, except where something else has been put there since. Idempotent."""
    _waiting[:] = [other for other in _waiting if other is not run]
    while _patches and not _waiting:
        patch = _patches[-1]
        if vars(patch.owner).get(_NAME) is patch.wrapper:
            setattr(patch.owner, _NAME, patch.function)
        _patches.pop()


def _functions(backend: str) -> Iterator[tuple[Any, Function]]:
    """Yield the modules and classes that have a function to wait for a device, a stream or an event, with it."""
    owners: list[Any] = []
    for module in (torch.accelerator, allocator.device_module(backend)):
        if module is not None:
            owners += [
                module,
                getattr(module, "Stream", None),
                getattr(module, "Event", None),
            ]
    in_cpp = (torch.Stream, torch.Event)  # which cannot be patched
    for owner in owners:
        if owner is not None and owner not in in_cpp and _NAME in vars(owner):
            yield owner, vars(owner)[_NAME]


def _wrap(function: Function) -> Function:
    @functools.wraps(function)
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        result = function(*args, **kwargs)
        recorder = (
            None if torch.compiler.is_compiling() else recorders.current_recorder()
        )
        if recorder is not None:
            recorder.log.add_sync()
        return result

    return synchronize


# ---- Tracebacks of the user's errors, without the frames that are between a line and torch

_BETWEEN = frozenset({device_mode.__name__, operators.__name__, __name__})
_CALLED_BY_THESE = frozenset(
    {torch_frames.OPERATORS_MODULE, torch_frames.DEVICE_MODULE}
)
_SHOW = "showtraceback"
_shells: list[Any] = []


def drop_own_frames(error: BaseException | None) -> None:
    """Leave these frames out of the tracebacks of an error and of those that it is chained to."""
    if error is None:
        return
    for related in frames.related_exceptions(error):
        for step in frames.traceback_steps(related.__traceback__):
            after = _after_own_frames(step.tb_next)
            if after is not step.tb_next:
                step.tb_next = after


def _after_own_frames(step: TracebackType | None) -> TracebackType | None:
    """Return the first step of a traceback that is none of these frames, nor of what they have called."""
    while step is not None and frames.module_of(step.tb_frame) in _BETWEEN:
        step = step.tb_next
        while step is not None and frames.module_of(step.tb_frame) in _CALLED_BY_THESE:
            step = step.tb_next
    return step


def watch_tracebacks() -> None:
    """Have IPython, which shows a cell's traceback before the run ends, leave them out until `unwatch_tracebacks`."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and _SHOW not in vars(shell):
        _shells.append(shell)
        show = shell.showtraceback

        def showtraceback(*args: Any, **kwargs: Any) -> Any:
            drop_own_frames(sys.exc_info()[1])
            return show(*args, **kwargs)

        vars(shell)[_SHOW] = showtraceback


def unwatch_tracebacks() -> None:
    """Undo `watch_tracebacks` with the last run. Idempotent, so that it can be called after an interrupt anywhere."""
    while _shells and not _waiting:
        vars(_shells[-1]).pop(_SHOW, None)
        _shells.pop()


def _skip_in_compilers() -> None:
    """Have `torch.compile` run what is called for torch's functions as it is, where it comes upon it between graphs."""
    for module in (device_mode, operators, lines, tracing, interrupts):
        for function in _functions_of(module):
            for code in frames.code_objects(function.__code__):
                _compat.skip_in_compilers(code)


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions that a module and its classes define, without their decorators."""
    owners = [
        module,
        *(value for value in vars(module).values() if isinstance(value, type)),
    ]
    for owner in owners:
        for value in list(vars(owner).values()):
            function = getattr(value, "__wrapped__", value)
            if (
                isinstance(function, FunctionType)
                and function.__module__ == module.__name__
            ):
                yield function


_skip_in_compilers()
