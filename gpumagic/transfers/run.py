"""`ondevice`: a block that runs with a default device, and tells afterwards what moved."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from gpumagic import _compat
from gpumagic.errors import OptionError
from gpumagic.heap import kinds
from gpumagic.memory import allocator
from gpumagic.memory.sampler import CellMemory
from gpumagic.memory.timeline import KeptStorages, MemoryTimeline
from gpumagic.source import lines
from gpumagic.source.call_sites import CallSites
from gpumagic.source.lines import WatchedCode
from gpumagic.transfers import explain, log, move, storage_copies
from gpumagic.transfers.report import Explanation, TransferReport

if TYPE_CHECKING:
    from gpumagic.transfers.recording import Recording


Given = ParamSpec("Given")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class RunOnDevice(Protocol[Given, Result_co]):
    """What an editor knows of a decorated function: it is called as before, and its `run` has the last report."""

    run: DeviceRun

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result_co: ...

    def __get__(
        self: RunOnDevice[Concatenate[Any, Rest], Result], instance: object, owner: type | None = None
    ) -> Callable[Rest, Result]: ...


class DeviceRun:
    """Run a block with new tensors landing on a device; `report` says what it created and moved.

    Args:
        device: a full torch name, such as ``"cuda:1"``.
        namespace: the globals in which the block runs; the caller's, where it is a `with` block.
        move: names in it that go to the device first.
        filename: the file whose lines are reported; None for a notebook's cell.
        trace: whether implicit copies are counted too.
        strict: whether they, and tensors of other devices that are used unasked, are errors; traces, too.
        show: whether the report is shown when a cell ends.
        store: called with the finished report.
        is_running: whether the cell runs already when this opens.

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
        trace: bool = False,
        strict: bool = False,
        show: bool = True,
        store: Callable[[TransferReport], None] | None = None,
        is_running: bool = False,
    ) -> None:
        self.device = device
        self.report: TransferReport | None = None
        self._namespace = namespace
        self._move = tuple(move)
        self._filename = filename
        self._trace, self._strict = trace, strict
        self._show = show
        self._store = store
        self._code = WatchedCode(namespace, filename)
        self._block: CodeType | None = None
        self._is_running = is_running
        self._memory: CellMemory | None = None
        self._frame: FrameType | None = None

    def open(self) -> None:
        """Make the device the default and the current one, and start counting."""
        from gpumagic.transfers.recording import Recording

        self._watch = log.Watch()
        self._moved = move.relocate(self._move, self._namespace, self.device) if self._move else ()
        self._sites = CallSites(self._namespace, self._filename)
        self._sites.find()  # learns the cell's file while it is on the stack
        self._log = log.TransferLog(self._sites, self._trace or self._strict)
        self._recording: Recording = Recording(
            self.device, self._log, self._namespace, self._cell(), trace=self._trace, strict=self._strict
        )
        self._previous = _make_current(self.device)
        try:
            self._recording.open()
            storage_copies.begin(self._log)
            self._follow_memory(is_traced=self._recording.recorder.is_traced)
        except BaseException:  # Ctrl-C: nobody closes what did not open
            self._restore()
            raise

    def close(self, error: BaseException | None) -> None:
        """Put the default and the current device back as they were, and take the closing figures."""
        try:
            self._watch.stop()
        finally:
            self._restore()
        explanation = None if error is None else self._explain(error)
        self.report = log.report(
            self.device, self._log, self._watch, self._variables(), error, self._moved, explanation, self._code.lines(),
            self._recording.hindrance,
            self._timeline(),
        )  # fmt: skip
        if self._store is not None:
            self._store(self.report)

    def finish(self, result: object) -> TransferReport | None:
        """Return the report if it is to be shown."""
        return self.report if self._show else None

    def __enter__(self) -> DeviceRun:  # noqa: PYI034  # typing.Self is 3.11, and this class has no heirs
        if self._code.line is None:
            self._code = WatchedCode(self._namespace, self._filename, sys._getframe(1).f_lineno)
            self._block = sys._getframe(1).f_code
        self.open()
        return self

    def __exit__(self, exc_type: object, error: BaseException | None, traceback: object) -> None:
        self._frame = sys._getframe(1)
        try:
            self.close(error)
        finally:
            self._frame = None
        if error is not None and self.report is not None and self.report.explanation is not None:
            _compat.add_note(error, str(self.report.explanation))

    def __call__(self, func: Callable[Given, Result]) -> RunOnDevice[Given, Result]:
        """Have every call of a function be a run of its own; `func.run.report` is the last one's report.

        Raises:
            OptionError: a coroutine or a generator function, whose body does not run when it is called.
        """
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise OptionError(f"{func.__name__}() runs after its call; write `with gpumagic.ondevice(...)` inside it")

        @functools.wraps(func)
        def on_device(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            __tracebackhide__ = True
            with self._one_call(func):
                return func(*args, **kwargs)

        on_device.run = self  # type: ignore[attr-defined]
        return cast("RunOnDevice[Given, Result]", on_device)

    def _one_call(self, func: Callable[..., Any]) -> DeviceRun:
        run = DeviceRun(
            self.device, namespace=self._namespace, move=self._move, filename=self._filename,
            trace=self._trace, strict=self._strict, show=self._show, store=self._keep,
        )  # fmt: skip
        code = getattr(inspect.unwrap(func), "__code__", None)
        if code is not None:
            run._code = lines.code_of_function(code, self._namespace)
            run._block = code
        return run

    def _follow_memory(self, *, is_traced: bool) -> None:
        self._memory = CellMemory(
            self._watch.before, self._namespace, self._block, self._code.line,
            is_running=self._is_running, by_clock=not is_traced,
        )  # fmt: skip
        self._lasting = self._look_for_lasting() if self._watch.before else {}  # else no device has anything yet
        if is_traced:
            self._recording.recorder.memory = self._memory
        if self._moved:
            self._memory.look()  # what the move allocated is not the next line's
        self._memory.start()

    def _timeline(self) -> MemoryTimeline | None:
        if self._memory is None:
            return None
        at_end = self._look_for_lasting() if self._watch.after else {}
        return self._memory.finished(self._watch.after, (self._lasting, at_end))

    def _look_for_lasting(self) -> KeptStorages:
        return kinds.find_kept(self._namespace, None if self._recording.recorder.is_traced else kinds.MOST_TENSORS)

    def _restore(self) -> None:
        try:
            if self._memory is not None:
                self._memory.stop()
            storage_copies.end(self._log)
            self._recording.close()
        finally:
            if self._previous is not None:
                _make_current(self._previous)

    def _cell(self) -> str:
        """Return the text of the cell; "" for a block in a file, which may be a small part of it."""
        filename = self._sites.filename
        return "" if filename is None or self._filename is not None else "".join(linecache.getlines(filename))

    def _explain(self, error: BaseException) -> Explanation | None:
        return explain.explain(error, self._namespace, self.device, in_cell=self._filename is None)

    def _keep(self, report: TransferReport) -> None:
        self.report = report
        if self._store is not None:
            self._store(report)

    def _variables(self) -> Mapping[str, object]:
        self._code.filename = self._code.filename or self._sites.filename
        if self._frame is not None:
            self._code.look(self._frame)
        return self._code.variables()


def for_caller(
    device: str, move: Sequence[str] = (), *, trace: bool = False, strict: bool = False, depth: int = 2
) -> DeviceRun:
    """Return a run for a `with` block of the function ``depth`` frames up.

    Raises:
        OptionError: a name to move that is a variable of a function, which cannot be bound from outside.
    """
    caller = sys._getframe(depth)
    code = caller.f_code
    if code.co_flags & inspect.CO_OPTIMIZED:
        own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars} & set(move)
        for name in sorted(own):
            raise OptionError(
                f"move: {name!r} is a variable of {code.co_name}(), and only those of a module or a notebook can be "
                f'bound from outside; write {name} = {name}.to("{device}")'
            )
    return DeviceRun(
        device, namespace=caller.f_globals, move=move, filename=code.co_filename, trace=trace, strict=strict
    )


def _make_current(device: str) -> str | None:
    """Make an accelerator its backend's current device, so that `.cuda()` means it; return the one before."""
    backend, _, index = device.partition(":")
    module = allocator.device_module(backend)
    if module is None or not hasattr(module, "set_device"):
        return None
    previous = f"{backend}:{module.current_device()}"
    module.set_device(int(index))
    return previous
