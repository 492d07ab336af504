"""What one run records at the moment, and which run a thread's copies belong to.

A run is one thread's, and so is torch's default device. Other threads may work for its lines: those of a pool, and
autograd's. What they copy is counted separately for each thread, and nothing else changes for them. Imports torch at
its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from gpumagic._compat import torch_frames, torch_private
from gpumagic.heap import storages
from gpumagic.source import frames
from gpumagic.transfers import causes
from gpumagic.transfers.log import TransferLog
from gpumagic.transfers.sites import CallSites

Function = Callable[..., Any]


@dataclass(eq=False)
class Recorder:
    """One run in one thread: its default device, its log, and the copy that is being made."""

    device: torch.device
    log: TransferLog
    copied: torch.Tensor | None = None
    """What the outermost of the kernels that run is given to copy: they may copy further tensors to that end."""
    counted: int = 0
    """Number of copies counted so far."""
    thread: int = field(default_factory=get_ident)
    earlier_threads: frozenset[int] = field(
        default_factory=lambda: frozenset(sys._current_frames())
    )
    by_thread: dict[int, Recorder] = field(default_factory=dict)
    """What other threads do for this run; each has sums of its own, so none waits for another."""

    def finish(self) -> None:
        """Add up what other threads did."""
        while self.by_thread:
            _, of_thread = self.by_thread.popitem()
            self.log.merge(of_thread.log)

    def add_created(self, tensor: torch.Tensor) -> None:
        """Count a new tensor."""
        nbytes = 0 if tensor.is_meta else storages.nbytes_of(unwrapped(tensor))
        if (
            nbytes or tensor.is_meta
        ):  # `torch.load` creates empty ones and then fills them
            self.log.add_created(tensor.device, nbytes)

    def add_copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        here: torch.device,
        there: torch.device,
        seconds: float,
        non_blocking: bool,
    ) -> None:
        """Count the values of one tensor written to another, on another device.

        Where that also converts, CUDA does so on the host, or on the device where it is non-blocking, and between
        devices after the copy (torch's aten/src/ATen/native/cuda/Copy.cu, with peer access between devices).
        """
        if source.is_meta or target.is_meta:
            return
        from_host, to_host = source.is_cpu, target.is_cpu
        converted = not non_blocking if from_host else to_host and non_blocking
        nbytes = target.numel() * (target if converted else source).element_size()
        if nbytes:  # else nothing is copied, and there is no sync
            # After a copy from or to the host, CUDA waits for the stream; one between devices is only queued.
            waits = not non_blocking and from_host is not to_host
            self.counted += 1
            self.log.add_transfer(
                causes.COPY,
                here,
                there,
                nbytes,
                seconds,
                waits,
                self.copied,
                is_copy=True,
            )

    def add_read(
        self, tensor: torch.Tensor, nbytes: int, seconds: float, asks: str
    ) -> None:
        """Count what the host reads of a device tensor, a value or a size: a copy to the host, and a sync."""
        if nbytes:
            self.counted += 1
            self.log.add_transfer(
                asks, tensor.device, _HOST, nbytes, seconds, True, tensor
            )


_HOST = torch.device("cpu")
_is_wrapped: Callable[[torch.Tensor], bool] = torch_private.IS_WRAPPED.get()
_unwrap: Callable[[torch.Tensor], torch.Tensor] = torch_private.UNWRAPPED.get()
_graph_task: Callable[[], int] = torch_private.GRAPH_TASK.get()
_count_modes: Callable[[], int] = torch_private.FUNCTION_MODES.get()
_mode_at: Callable[[int], Any] = torch_private.FUNCTION_MODE_AT.get()
_DeviceContext: Any = torch_private.DEVICE_CONTEXT.get()


def is_real(value: object) -> bool:
    """Return whether a value is a tensor with memory of its own, and not a fake one of a compiler's."""
    fakes = sys.modules.get(torch_frames.FAKE_TENSORS)
    return isinstance(value, torch.Tensor) and not (
        fakes is not None and isinstance(value, fakes.FakeTensor)
    )


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of all examples where `vmap` shows a function a single one."""
    while _is_wrapped(tensor):
        tensor = _unwrap(tensor)
    return tensor


open_runs: dict[int, list[Recorder]] = {}
"""By thread, the open runs, the innermost last."""


def begin(recorder: Recorder) -> None:
    """Let this thread's copies belong to a run from now on."""
    open_runs.setdefault(get_ident(), []).append(recorder)


def end(recorder: Recorder) -> None:
    """Undo `begin`, for the runs within it too. Idempotent, so that it can be called after an interrupt anywhere."""
    runs = open_runs.get(recorder.thread, [])
    for place, run in enumerate(runs):
        if run is recorder:
            del runs[place:]
            break
    if not runs:
        open_runs.pop(recorder.thread, None)


def current_recorder() -> Recorder | None:
    """Return this thread's innermost run, or what records for the run that it works for."""
    runs = open_runs.get(get_ident())
    return runs[-1] if runs else _recorder_of_worker()


def _recorder_of_worker() -> Recorder | None:
    """Return what records for the run that this thread works for, having no run of its own.

    It works for a run whose code is on its stack; and, while only one thread has runs, for the innermost if that began
    before the thread or called autograd.
    """
    running: list[Recorder] = []
    for runs in list(open_runs.values()):
        running += runs
    if not running:
        return None
    # Checkpoints take the mode with them.
    checkpointed = getattr(next(device_contexts(), None), "recorder", None)
    if isinstance(checkpointed, Recorder):
        return checkpointed
    calling = _run_on_stack(running)
    if calling is None and len({run.thread for run in running}) > 1:
        return None
    run = calling or running[-1]
    is_autograd = _graph_task() != -1
    if get_ident() in run.earlier_threads and not (is_autograd or calling):
        return None
    return _recorder_in_thread(run, is_autograd=is_autograd)


def _run_on_stack(running: list[Recorder]) -> Recorder | None:
    """Return the innermost run whose code this thread runs."""
    files = {frame.f_code.co_filename for frame in frames.stack(sys._getframe(2))}
    for run in reversed(running):
        if run.log.sites.filename in files:
            return run
    return None


def _recorder_in_thread(run: Recorder, *, is_autograd: bool) -> Recorder:
    """Return what records for a run in this thread; in one of autograd's its lines are those of the caller."""
    thread = get_ident()
    recorder = run.by_thread.get(thread)
    if recorder is None:
        sites = run.log.sites
        waiting = run.thread if is_autograd else None
        own = TransferLog(CallSites(sites.namespace, sites.filename, waiting))
        # Not looked up again: the run may end meanwhile, and then takes it away.
        recorder = run.by_thread.setdefault(
            thread, Recorder(run.device, own, thread=thread)
        )
    return recorder


def device_contexts() -> Iterator[Any]:
    """Yield this thread's device contexts from the one in force outward: those on the stack, and those they replace."""
    for depth in reversed(range(_count_modes())):
        mode = _mode_at(depth)
        while isinstance(mode, _DeviceContext):
            yield mode
            mode = getattr(
                mode, "prev_mode", None
            )  # since torch 2.11; before, ours alone have it
