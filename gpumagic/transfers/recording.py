"""The recording of a run: torch's device context, the count of copies, and what else a run puts in place.

Measured side by side on 2 cores, torch 2.13, as times of the bare small-operator training step and of 10,000 additions:

    an empty function mode in Python          1.62x  1.58x  what any default device costs that is one thread's
    torch.device                              1.72x  1.68x
    a run                                     1.9x   1.6x   it was 2 us more a value that the host reads of itself
    an empty TorchDispatchMode                2.7x

Torch calls a mode for every function, whatever it is for. What would be cheaper: wrappers in the place of torch's
functions (1.1x) see only calls that go through them, so they must know whoever else holds these functions (libraries
do, in tuples and closures), and the user's code sees them; `set_default_tensor_type` is one for all threads and knows
no index; at the dispatcher an absent device cannot be told from `cpu`. Imports torch at its top, so it is imported only
when a cell runs on a device.
"""

from __future__ import annotations

from threading import RLock
from types import FunctionType

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gpumagic import _compat
from gpumagic.memory.sampler import CellMemory, exclusive
from gpumagic.transfers import calls, device_mode, operators, tracebacks, tracing, waits
from gpumagic.transfers import recorder as recorders
from gpumagic.transfers.device_mode import RecordingContext
from gpumagic.transfers.log import TransferLog
from gpumagic.transfers.recorder import Recorder, device_context
from gpumagic.transfers.trace import lines, meter, modules, run, streams
from gpumagic.transfers.trace.run import Trace
from gpumagic.transfers.tracing import Tracer

_lock = RLock()


class Recording:
    """The default device of a block, and the record of what its calls create and copy."""

    def __init__(self, device: str, log: TransferLog, *, trace: bool, strict: bool) -> None:
        self.recorder = Recorder(torch.device(device), log, is_strict=strict)
        self.tracer = Tracer(self.recorder) if trace or strict else None
        self._modes: list[RecordingContext | Tracer] = []

    def follow_memory(self, memory: CellMemory) -> None:
        """Sample memory after every operator, if this traces."""
        if self.tracer is not None:
            self.tracer.memory = memory

    def follow_operators(self, trace: Trace) -> None:
        """Tell a trace of every operator."""
        if self.tracer is not None:
            self.tracer.trace = trace

    def open(self) -> None:
        """Start recording, in the calling thread."""
        try:
            recorders.begin(self.recorder)
            with exclusive(_lock):
                operators.watch(self)
                waits.watch(self, self.recorder.device.type)
                tracebacks.watch(self)
            self._enter(RecordingContext(self.recorder))
            if self.tracer is not None:
                self._enter(self.tracer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop recording, and restore everything; again after an interrupt anywhere."""
        try:
            self._leave_modes()
        finally:
            try:
                with exclusive(_lock):
                    tracebacks.unwatch(self)
                    waits.unwatch(self)
                    operators.unwatch(self)
            finally:
                recorders.end(self.recorder)
                self.recorder.finish()

    def _enter(self, mode: RecordingContext | Tracer) -> None:
        self._modes.append(mode)  # first, so that an interrupt finds it
        mode.__enter__()

    def _leave_modes(self) -> None:
        while self._modes:
            if _is_in_force(self._modes[-1]):
                self._modes[-1].__exit__(None, None, None)
            self._modes.pop()


def _is_in_force(mode: RecordingContext | Tracer) -> bool:
    if not isinstance(mode, RecordingContext):
        return any(each is mode for each in _get_current_dispatch_mode_stack())
    context = device_context()
    while context is not None and context is not mode:
        context = getattr(context, "prev_mode", None)
    return context is not None


def is_idle() -> bool:
    """Return whether torch is as it was found: no run is open."""
    return recorders.is_idle() and operators.is_idle() and waits.is_idle()


def _skip_in_compilers() -> None:
    """Have `torch.compile` run what is called for torch's functions as it is, where it comes upon it between graphs."""
    for module in (calls, device_mode, operators, tracing, lines, meter, modules, run, streams):
        classes = [each for each in vars(module).values() if isinstance(each, type)]
        for each in (value for owner in (module, *classes) for value in vars(owner).values()):
            function = getattr(each, "__wrapped__", each)
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                _compat.skip_in_compilers(function.__code__)


_skip_in_compilers()
