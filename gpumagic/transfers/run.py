"""`ondevice`: run a block with a default device, and report what it created and transferred."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from gpumagic import _compat
from gpumagic._compat import torch_private
from gpumagic._compat.private_names import MissingName
from gpumagic.errors import OptionError
from gpumagic.heap import storages
from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.report import base
from gpumagic.source import frames
from gpumagic.source.frames import WatchedCode
from gpumagic.transfers import device_errors, log, move
from gpumagic.transfers.advice import suggestions
from gpumagic.transfers.lines import Function, find_functions
from gpumagic.transfers.placed import tensors_elsewhere
from gpumagic.transfers.report import TransferReport
from gpumagic.transfers.sites import CallSites

if TYPE_CHECKING:
    from gpumagic.transfers.tracing import Trace


Given = ParamSpec("Given")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class RunOnDevice(Protocol[Given, Result_co]):
    """The type of a decorated function: it is called as before, and its `run` has the last report."""

    run: DeviceRun

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result_co: ...

    def __get__(
        self: RunOnDevice[Concatenate[Any, Rest], Result],
        instance: object,
        owner: type | None = None,
    ) -> Callable[Rest, Result]: ...


class DefaultDevice(Protocol):
    """What makes a device the default of a thread, and mostly records what is created and copied meanwhile."""

    def open(self) -> None:
        """Make the device the default."""

    def close(self) -> None:
        """Undo it; again after an interrupt anywhere."""

    def drop_own_frames(self, error: BaseException | None) -> None:
        """Leave the frames of what records out of an error's traceback."""


class Unrecorded:
    """A device that is the default by torch's own means, where what records cannot be set up."""

    def __init__(self, device: str) -> None:
        import torch

        self._device: Any = torch.device(device)
        self._is_entered = False

    def open(self) -> None:
        self._device.__enter__()
        self._is_entered = True

    def close(self) -> None:
        if self._is_entered:
            self._is_entered = False
            self._device.__exit__(None, None, None)

    def drop_own_frames(self, error: BaseException | None) -> None:
        """Leave the traceback as it is: there are no such frames."""


class DeviceRun:
    """Run a block with new tensors created on a device; `report` says what it created and transferred.

    Args:
        device: a full torch name, such as ``"cuda:1"``.
        namespace: the globals in which the block runs; the caller's for a `with` block.
        move: names in it that are moved to the device first.
        filename: the file whose lines are reported; None for a notebook's cell.
        trace: whether each line is followed, and each block of memory; or functions, or their names, whose lines are
            followed too.
        show: whether the report is shown when a cell ends.
        store: called with the finished report.

    Attributes:
        report: the `TransferReport`, once the block has ended; None before.
    """

    name = "ondevice"

    def __init__(
        self,
        device: str,
        *,
        namespace: MutableMapping[str, Any],
        move: Sequence[str] = (),
        filename: str | None = None,
        trace: bool | Sequence[Function] = False,
        show: bool = True,
        store: Callable[[TransferReport], None] | None = None,
    ) -> None:
        self.device = device
        self.report: TransferReport | None = None
        self._namespace = namespace
        self._move = tuple(move)
        self._filename = filename
        self._trace = trace
        self._functions = find_functions(
            () if isinstance(trace, bool) else trace, namespace
        )
        self._traced: Trace | None = None
        self._show = show
        self._store = store
        self._code = WatchedCode(namespace, filename)
        self._block: CodeType | None = None
        self._frame: FrameType | None = None
        self._opens = False
        self._recording: DefaultDevice | None = None
        self._unrecorded = ""
        """Why nothing is recorded."""
        self._previous: str | None = None

    def open(self) -> None:
        """Make the device the default and the current one, and start recording."""
        self._clock = _Clock()
        self._sites = CallSites(self._namespace, self._filename)
        self._sites.start()
        self._log = log.TransferLog(self._sites)
        self._opens = True
        backend = Device.parse(self.device).backend
        module = allocator.device_module(backend)
        # Before anything changes: an interrupt may come at any line.
        if module is not None and hasattr(module, "set_device"):
            self._previous = f"{backend}:{module.current_device()}"
        try:
            if self._previous is not None:
                _make_current(self.device)
            self._start_recording()
            if self._move:
                move.relocate(self._move, self._namespace, self.device, self._sites)
            if self._trace:
                from gpumagic.transfers.tracing import Trace

                self._traced = Trace(
                    self.device, self._sites, self._code, self._block, self._functions
                )
                self._traced.start()
        except BaseException:  # Ctrl-C: what did not open is not closed
            self.restore()
            raise

    def _start_recording(self) -> None:
        """Make the device the default, and record if that can be set up: the block runs on the device in any case."""
        try:
            from gpumagic.transfers.recording import Recording

            self._recording = Recording(
                self.device, self._log
            )  # kept first, for an interrupt
            self._recording.open()
        except Exception as fault:
            what = "" if isinstance(fault, MissingName) else f"{type(fault).__name__}: "
            self._unrecorded = f"{what}{fault}"
            self._recording = Unrecorded(self.device)
            self._recording.open()

    def close(self, error: BaseException | None) -> None:
        """Restore the default and the current device, and build the report."""
        try:
            self._clock.stop()
        finally:
            self.restore()
        if self._recording is not None:
            self._recording.drop_own_frames(error)
        self.report = self._report(error)
        if self._store is not None:
            self._store(self.report)

    def _report(self, error: BaseException | None) -> TransferReport:
        storages.forget_expired()
        explanation = None
        if error is not None:
            explanation = device_errors.explain(error, self._namespace, self.device)
        self._code.filename = self._code.filename or self._sites.filename
        variables = self._code.variables(self._frame)
        lines = self._code.lines()
        moves = self._log.rows()
        syncs = self._log.syncs()
        by_line = None
        if self._traced is not None:
            by_line = self._traced.by_line(lines, self._clock.elapsed)
        return TransferReport(
            device=self.device,
            moves=moves,
            created=self._created(),
            syncs=syncs,
            peak=self._clock.peak(),
            allocations=self._clock.allocations(),
            elapsed=self._clock.elapsed,
            elsewhere=tuple(tensors_elsewhere(variables, self.device)),
            advice=suggestions(
                moves, syncs, lines, has_loader=_has_loader(lines, variables)
            ),
            error=type(error).__name__ if error is not None else None,
            explanation=explanation,
            lines=lines,
            notes=tuple(torch_private.lacking(self.name)),
            unrecorded=self._unrecorded,
            origin=base.current_origin(),
            by_line=by_line,
        )

    def _created(self) -> dict[str, tuple[int, int]]:
        """Return the count and the bytes of new tensors by device."""
        created = {}
        for device, (number, nbytes) in self._log.created.items():
            created[str(device)] = (number, nbytes)
        return dict(sorted(created.items()))

    def finish(self, result: object) -> TransferReport | None:
        """Return the report if it should be shown."""
        return self.report if self._show else None

    def __enter__(self) -> DeviceRun:  # noqa: PYI034  # typing.Self is 3.11, and this class has no subclasses
        if self._code.line is None:
            caller = sys._getframe(1)
            above = frames.lines_above(caller, self._filename) or 0
            self._code = WatchedCode(
                self._namespace, self._filename, caller.f_lineno + above
            )
            self._block = caller.f_code
        self.open()
        return self

    def __exit__(
        self, exc_type: object, error: BaseException | None, traceback: object
    ) -> None:
        self._frame = sys._getframe(1)
        try:
            self.close(error)
        finally:
            self._frame = None
        if (
            error is not None
            and self.report is not None
            and self.report.explanation is not None
        ):
            _compat.add_note(error, str(self.report.explanation))

    def __call__(self, func: Callable[Given, Result]) -> RunOnDevice[Given, Result]:
        """Make every call of a function a run of its own; `func.run.report` is the report of the last one.

        Raises:
            OptionError: a coroutine or a generator function, whose body does not run when it is called.
        """
        if (
            inspect.iscoroutinefunction(func)
            or inspect.isgeneratorfunction(func)
            or inspect.isasyncgenfunction(func)
        ):
            raise OptionError(
                f"{func.__name__}() runs after its call; write `with gpumagic.ondevice(...)` inside it"
            )

        @functools.wraps(func)
        def on_device(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            __tracebackhide__ = True
            with self._one_call(func):
                return func(*args, **kwargs)

        on_device.run = self  # type: ignore[attr-defined]
        return cast("RunOnDevice[Given, Result]", on_device)

    def _one_call(self, func: Callable[..., Any]) -> DeviceRun:
        run = DeviceRun(
            self.device,
            namespace=self._namespace,
            move=self._move,
            filename=self._filename,
            trace=self._trace,
            show=self._show,
            store=self._keep,
        )
        code = getattr(inspect.unwrap(func), "__code__", None)
        if code is not None:
            run._code = WatchedCode(
                self._namespace, code.co_filename, code.co_firstlineno
            )
            run._block = code
        return run

    def restore(self) -> None:
        """Restore the default device and torch's functions, then the current device; again after an interrupt."""
        if not self._opens:
            return
        if self._traced is not None:
            self._traced.stop()
        recording = self._recording
        try:
            if recording is not None:
                recording.close()
        except (
            BaseException
        ):  # Ctrl-C: a `with` block has no next cell that would do the rest
            if recording is not None:
                recording.close()
            raise
        finally:
            if self._previous is not None:
                _make_current(self._previous)

    def _keep(self, report: TransferReport) -> None:
        self.report = report
        if self._store is not None:
            self._store(report)


def for_caller(
    device: str,
    move: Sequence[str] = (),
    *,
    trace: bool | Sequence[Function] = False,
) -> DeviceRun:
    """Return a run for a `with` block of the function that has called the caller of this one.

    Raises:
        OptionError: a name to move that is a variable of a function, which cannot be bound from outside.
    """
    caller = sys._getframe(2)
    code = caller.f_code
    if code.co_flags & inspect.CO_OPTIMIZED:
        own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars} & set(move)
        for name in sorted(own):
            raise OptionError(
                f"move: {name!r} is a variable of {code.co_name}(), and only those of a module or a notebook can be "
                f'bound from outside; write {name} = {name}.to("{device}")'
            )
    return DeviceRun(
        device,
        namespace=caller.f_globals,
        move=move,
        filename=frames.cell_file(caller),
        trace=trace,
    )


def _has_loader(
    lines: Sequence[tuple[int, str]], variables: Mapping[str, object]
) -> bool:
    """Return whether the code names a loader, or a variable of it is one."""
    for _, text in lines:
        if "DataLoader" in text:
            return True
    loader = sys.modules["torch"].utils.data.DataLoader
    return any(issubclass(type(value), loader) for value in variables.values())


class _Clock:
    """The time and the allocators' figures at the start and at the end of a block."""

    def __init__(self) -> None:
        self.before = allocator.all_device_stats()
        self._start = time.perf_counter()
        self.elapsed = 0.0
        self.after: dict[str, AllocatorStats] = {}

    def stop(self) -> None:
        self.elapsed = time.perf_counter() - self._start
        self.after = allocator.all_device_stats()

    def allocations(self) -> dict[str, int]:
        """Return how many blocks of memory each device has allocated since the start."""
        allocations = {}
        for device, now in self.after.items():
            earlier = self.before.get(device)
            allocations[device] = now.allocations - (
                earlier.allocations if earlier else 0
            )
        return allocations

    def peak(self) -> dict[str, int]:
        """Return the block's peak by device, where it is known without a reset of the user's counter.

        The counter is the highest since the process began, so it is this block's peak only if the block raised it.
        """
        peaks = {}
        for device, now in self.after.items():
            earlier = self.before.get(device)
            highest_before = (earlier.peak if earlier else None) or 0
            if now.peak is not None and now.peak > highest_before:
                peaks[device] = now.peak
        return peaks


def _make_current(device: str) -> None:
    """Make an accelerator its backend's current device, so that `.cuda()` uses it."""
    import torch

    backend, index = Device.parse(device)
    getattr(torch, backend).set_device(index)
