"""What one run records at the moment, and which run a thread's calls belong to.

The handlers of `calls` and `indexing` write what they see into a `Recorder`. Torch's default device is one thread's,
and so is a run. Other threads may work for its lines: those of a pool, and autograd's, which call the cell's hooks.
Their calls are counted separately for each thread, and nothing else changes for them.

Autograd copies gradients that flow back through a transfer in C++, where no Python function is called. So the graph
node of each transfer gets a hook, which is removed when the run ends; it keeps no tensor and does not change gradients.
A transfer made before the run has none. Imports torch at its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.utils._device import DeviceContext

from gpumagic.errors import StrayTensor
from gpumagic.memory.sampler import CellMemory
from gpumagic.source import frames
from gpumagic.source.frames import CallSites
from gpumagic.transfers.log import CreatedSum, TransferLog, is_host

_MANY = 1000
"""Hooks kept before those whose graphs are gone are removed."""
Function = Callable[..., Any]
Handler = Callable[["Recorder", Function, tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class GradientHooks:
    """The gradient hooks of one run."""

    handles: list[Any] = field(default_factory=list)
    _full: int = _MANY

    def add(self, handle: Any) -> None:
        if len(self.handles) > self._full:
            self.handles = [each for each in self.handles if each.hooks_dict_ref() is not None]
            self._full = 2 * len(self.handles) + _MANY
        self.handles.append(handle)

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()


@dataclass
class Request:
    """A transfer that a line asks for, while it runs; the tracer reports copies made meanwhile as this one."""

    cause: str
    subject: object


@dataclass(eq=False)
class Recorder:
    """One run in one thread: its default device, its log, and the call that is being handled."""

    device: torch.device
    log: TransferLog
    is_traced: bool = False
    """Whether a dispatch mode counts copies, so that handlers only name their cause."""
    counted: int = 0
    """Number of transfers counted so far."""
    has_mode: bool = False
    """Whether calls arrive through a function mode."""
    uses_patches: bool = True
    """Whether torch's functions are patched, so that calls of threads without the mode arrive too."""
    inner_mode: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Enters what brings the calls made inside a handled function to the handlers."""
    cause: str | None = None
    """The cause to report instead of the function itself (`print` calls many)."""
    number: object = None
    """The Python number that is being assigned, which torch may make a tensor of."""
    request: Request | None = None
    is_busy: bool = field(default=False)
    """Whether a handler is at work: calls that the function itself makes are not handled again."""
    is_suspended: bool = False
    """Whether new tensors go where torch would put them, as in `backward` under torch's own context."""
    is_explicit: bool = False
    """Whether the call being handled names its device itself."""
    switch_to_mode: Callable[[str], None] | None = None
    """Continues under the function mode, for the reason given."""
    memory: CellMemory | None = None
    """Where the tracer records what each operator allocates."""
    previous_device: torch.device | None = None
    """The default device that torch had noted before this run."""
    is_strict: bool = False
    """Whether implicit transfers are errors."""
    thread: int = field(default_factory=get_ident)
    earlier_threads: frozenset[int] = field(default_factory=lambda: frozenset(sys._current_frames()))
    created_here: CreatedSum | None = None
    """The sum of tensors created on the default device, once there is one."""
    by_thread: dict[int, Recorder] = field(default_factory=dict)
    """What other threads do for this run; each has sums of its own, so none waits for another."""
    hooks: GradientHooks | None = field(default_factory=GradientHooks)
    """The hooks that see gradients; None where a dispatch mode sees them."""

    def for_thread(self, thread: int, sites: CallSites, *, is_unrelated: bool = False) -> Recorder:
        """Return what records another thread's calls for this run; torch's default device differs there.

        The ``thread`` is negative for calls that are unrelated to this run, of which only transfers are reported.
        """
        found = self.by_thread.get(thread)
        if found is None:
            log = TransferLog(sites, is_unrelated=is_unrelated)
            found = Recorder(self.device, log, is_suspended=True, hooks=self.hooks, thread=abs(thread))
            found = self.by_thread.setdefault(thread, found)
        return found

    def finish(self) -> None:
        """Add up what other threads did, and remove the hooks from graphs."""
        if self.hooks is not None:
            self.hooks.remove()
        while self.by_thread:
            self.log.absorb(self.by_thread.popitem()[1].log)

    def call(self, func: Function, args: Any, kwargs: dict[str, Any], cause: str, subject: object) -> tuple[Any, Any]:
        """Call a function for a line that asks for a transfer; return its result and the seconds it took.

        The seconds are None where a dispatch mode has already counted the transfer.
        """
        __tracebackhide__ = True
        outer, self.request = self.request, Request(self.cause or cause, subject)
        counted, start = self.counted, time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            self.request = outer
        return result, None if self.counted != counted else time.perf_counter() - start

    def add_created(self, tensor: torch.Tensor) -> None:
        device = tensor.device
        nbytes = 0 if device.type == "meta" else unwrapped(tensor).numel() * tensor.element_size()
        if not nbytes and _is_unpickled():
            return
        total = self.log.add_created(device, nbytes)
        if device == self.device and device.type != "meta":
            self.created_here = total

    def add_move(
        self, subject: object, result: torch.Tensor, seconds: float | None, cause: str, *, non_blocking: bool = False
    ) -> None:
        """Count a transfer if ``result`` and ``subject`` are on different devices.

        Where a transfer also converts, CUDA does that on the host, or on the device where it is non-blocking, and
        between devices after the copy (torch's aten/src/ATen/native/cuda/Copy.cu, with peer access between devices).
        """
        __tracebackhide__ = True
        source = str(subject.device) if isinstance(subject, torch.Tensor) else "cpu"
        target = str(result.device)
        if source == target or "meta" in (source, target):
            return
        converted = not non_blocking if is_host(source) else is_host(target) and non_blocking
        crossing = result if converted or not isinstance(subject, torch.Tensor) else subject
        nbytes = unwrapped(result).numel() * crossing.element_size()
        if not nbytes:
            return  # nothing is copied, and there is no sync
        self.add_copy(source, target, nbytes, seconds, cause, subject, result, non_blocking=non_blocking)

    def add_copy(
        self,
        source: str,
        target: str,
        nbytes: int,
        seconds: float | None,
        cause: str,
        subject: object,
        result: object = None,
        *,
        non_blocking: bool = False,
    ) -> None:
        """Count bytes copied from one device to another; the host waits for its copies unless they are non-blocking.

        After a copy from or to the host, CUDA waits for the stream; one between devices is only queued (torch's
        aten/src/ATen/native/cuda/Copy.cu).
        """
        __tracebackhide__ = True
        self.counted += 1
        waits = not non_blocking and is_host(source) != is_host(target)
        self.log.add_move(source, target, nbytes, seconds, self.cause or cause, subject, result, waits=waits)

    def add_read(self, tensor: torch.Tensor, nbytes: int, seconds: float | None, cause: str) -> None:
        """Count what the host reads of a device tensor, a value or a size: a copy to the host, and a sync."""
        if not nbytes:
            return
        self.add_copy(str(tensor.device), "cpu", nbytes, seconds, cause, tensor)

    def refuse(self, subject: object, what: str) -> None:
        """Raise `StrayTensor` for an implicit transfer, with the line, the variable and the code that fixes it."""
        __tracebackhide__ = True
        site = self.log.sites.find(subject)
        where = f"line {site.line}: " if site.line is not None else ""
        kind = "a tensor" if isinstance(subject, torch.Tensor) else f"a {type(subject).__name__}"
        move = f'{site.name}.to("{self.device}")' if isinstance(subject, torch.Tensor) else f"torch.tensor({site.name})"
        fix = f"move it: {site.name} = {move}" if site.name else "move it where a line says so"
        raise StrayTensor(f"{where}{site.name or kind} {what}, in a cell on {self.device}; {fix}")

    @contextlib.contextmanager
    def handling_inner_calls(self, cause: str) -> Iterator[None]:
        """Also handle the calls that the handled function makes, and report them as ``cause``."""
        outer = self.cause, self.is_busy, self.request
        self.cause, self.is_busy, self.request = cause, False, Request(cause, None)
        try:
            with self.inner_mode():
                yield
        finally:
            self.cause, self.is_busy, self.request = outer


def _is_unpickled() -> bool:
    """Return whether a new tensor is the empty one that `torch.load` creates and then fills."""
    modules = (str(each.f_globals.get("__name__")) for each in frames.stack(sys._getframe(2)))
    return next((each for each in modules if not each.startswith("gpumagic.")), None) == "torch._utils"


def is_free_to_read(tensor: torch.Tensor) -> bool:
    """Return whether reading the tensor's values costs no copy."""
    return tensor.device.type in ("cpu", "meta")


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of all examples where `vmap` shows a function a single one."""
    if torch.compiler.is_compiling():  # the compiler traces this function and cannot trace the next
        return tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def watch_gradients(recorder: Recorder, source: object, result: object) -> None:
    """Count the copy that a gradient makes on its way back from ``result`` to ``source``, if there is one."""
    if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)) or recorder.hooks is None:
        return
    if not source.requires_grad or source.device == result.device or "meta" in (source.device.type, result.device.type):
        return
    node = _copy_node(result)
    if node is None:  # under no_grad
        return
    run = weakref.ref(recorder)

    def count(given: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]) -> None:
        recorder = run()
        if recorder is not None:
            _count_gradients(recorder, given, arrived)

    recorder.hooks.add(node.register_hook(count))


def _copy_node(result: torch.Tensor) -> Any:
    """Return the graph node that copies back; for a value written to a view, its base's."""
    node, base = result.grad_fn, result._base
    is_view = node is not None and base is not None and "Copy" not in node.name()
    return base.grad_fn if is_view and base is not None else node


def _count_gradients(recorder: Recorder, given: tuple[Any, ...], arrived: tuple[Any, ...]) -> None:
    start = next((each for each in arrived if each is not None), None)
    if start is None:
        return
    thread = get_ident()  # may be one of autograd's
    here = recorder if thread == recorder.thread else recorder.for_thread(thread, recorder.log.sites)
    for gradient in given:
        if gradient is not None and gradient.device != start.device:
            here.add_move(start, gradient, None, "backward")
            watch_gradients(recorder, start, gradient)  # where the gradient itself is differentiated


active: dict[int, Recorder] = {}
"""By thread, the recorder that handles calls of patched functions."""
_runs: dict[int, list[Recorder]] = {}
"""By thread, the open runs, the innermost last."""


def begin(recorder: Recorder) -> None:
    """Let this thread's calls belong to a run from now on."""
    _runs.setdefault(get_ident(), []).append(recorder)
    _activate()


def end(recorder: Recorder) -> None:
    """Undo `begin`. Idempotent, so that it can be called after an interrupt anywhere."""
    runs = _runs.get(get_ident(), [])
    index = next((index for index in reversed(range(len(runs))) if runs[index] is recorder), None)
    if index is not None:
        del runs[index:]
    _activate()
    for thread, other in list(active.items()):
        if other is recorder.by_thread.get(thread):
            active.pop(thread, None)


def _activate() -> None:
    """Let this thread's innermost run handle calls of patched functions, unless its function mode sees them."""
    thread = get_ident()
    runs = _runs.get(thread)
    if runs and not runs[-1].has_mode:
        active[thread] = runs[-1]
    else:
        active.pop(thread, None)
    if not runs:
        _runs.pop(thread, None)


def is_idle() -> bool:
    """Return whether no thread has a run open."""
    return not active and not _runs


def current_recorder() -> Recorder | None:
    """Return this thread's innermost run, or what records for the run that it works for."""
    runs = _runs.get(get_ident())
    return runs[-1] if runs else worker_recorder()


def worker_recorder() -> Recorder | None:
    """Return what records for the run that this thread works for, if it has no run of its own.

    It works for a run whose code is on its stack, or that began before the thread or called autograd. While only one
    thread has runs, what any other thread transfers is reported by the innermost, as done by other code.
    """
    thread = get_ident()
    if not _runs or thread in _runs:
        return None
    if isinstance(getattr(device_context(), "recorder", None), Recorder):  # checkpoints take the mode with them
        return None
    open_runs = [run for runs in list(_runs.values()) for run in runs]
    files = {frame.f_code.co_filename for frame in frames.stack(sys._getframe(1))}
    calling = next((run for run in reversed(open_runs) if run.log.sites.filename in files), None)
    if calling is None and len({run.thread for run in open_runs}) != 1:
        return None
    run = calling or open_runs[-1]
    is_autograd = torch._C._current_graph_task_id() != -1
    if not run.uses_patches or (run.is_traced and is_autograd):
        return None  # a mode follows autograd into its threads
    sites = CallSites(run.log.sites.namespace, run.log.sites.filename, run.thread if is_autograd else None)
    if thread in run.earlier_threads and not is_autograd:
        return run.for_thread(thread, sites) if calling else run.for_thread(-thread, sites, is_unrelated=True)
    found = run.for_thread(thread, sites)
    if not run.has_mode:
        active[thread] = found
    return found


def device_context() -> DeviceContext | None:
    """Return the device context that is in force in this thread.

    Torch keeps it at the bottom of its function modes; torch 2.4 keeps it where it was entered.
    """
    modes = (_get_function_stack_at(each) for each in range(_len_torch_function_stack()))
    return next((mode for mode in modes if isinstance(mode, DeviceContext)), None)
