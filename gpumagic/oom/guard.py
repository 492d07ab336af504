"""`oomguard`: guards a block, and when it runs out of memory, releases the memory and reports why and what helps.

While nothing goes wrong it reads the allocator's figures once and does nothing else. The order after a failure:
recognise it, read its frames, let whoever handles the exception finish, empty the frames, then read what
is left. See `heap/release.py` for why not earlier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from gpumagic import notebook
from gpumagic.advice.facts import Memory
from gpumagic.errors import OptionError
from gpumagic.heap import release
from gpumagic.heap.holders import Identities
from gpumagic.memory import allocator
from gpumagic.notebook import interrupts
from gpumagic.oom import failure, recognition
from gpumagic.oom.failure import Failure, GuardState, Recognized
from gpumagic.oom.shell import LateTraceback
from gpumagic.oom.watch import CellWatch
from gpumagic.source import frames

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumagic.oom.report import OomReport
    from gpumagic.report.base import Report

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(eq=False, repr=False)
class OomGuard(contextlib.ContextDecorator):
    """Guard a block against running out of memory; `report` says what happened, None if nothing did.

    As a cell's guard, the user sees IPython's own traceback and then the report, and the cell fails with the
    one-line `OutOfMemory`. As a `with` block or decorator it raises `OutOfMemory`. Variables of a function
    that is still running when the block ends stay alive as long as that function's frame does.

    What happens, in this order; a cell's session calls the first, third and fifth, and the last:

        open                  read the figures, watch what the block does, hold tracebacks back
        the block runs
        close                 stop watching (`restore`); after out-of-memory read the frames, while they are whole
        restore               once more, where an interrupt has kept `close` from it
        finish                `release_and_report`: release what the frames pin, replace the error, make the report and
                              set it (`set_report`)
        show_error            show the traceback that was held back

    A block that is run again comes to `open` anew after each `close`, once `release_frames` was called on its error,
    and to `finish` after the last. `forget_last_run` comes before a block that is no further run of the last one.
    """

    name = "oomguard"

    shell: InteractiveShell | None = None
    """Shows the traceback; its copies of the error are forgotten with it."""
    _: KW_ONLY
    debug: bool = False
    """Leave the failed frames as they are, for `%debug`, and say what they hold at most."""
    keep_going: bool = False
    """Swallow the failure after the report."""
    store: Callable[[Report[Any]], None] | None = None
    """Called with the finished report."""
    namespace: Mapping[str, object] | None = None
    """The globals of the guarded code, where names are looked up; the shell's, or ``__main__``'s."""
    rerun: Callable[[Callable[..., Any], OomGuard], Callable[..., Any]] | None = None
    """Wraps a function that the guard decorates so that it is called again; see `rerun.decorate`."""
    quiet: bool = False
    """Show no report when a cell ends."""
    is_running: bool = False
    """Whether the cell runs already when this opens."""
    seconds: float = 0.0
    """How long dry runs may try the advice, without the start of their worker and what others compute meanwhile;
    0 tries nothing."""
    report: OomReport | None = field(default=None, init=False)
    """Of the last failure, once it is finished."""
    failure: Failure | None = field(default=None, init=False)
    """What is known of the last run that ran out of memory, until it is reported."""
    elsewhere: str = field(default="", init=False)
    """The device that the last run was sent to; empty where it ran as it is."""
    retries: int = field(default=0, init=False)
    """How often the block was run again."""
    _recovered: bool = field(default=False, init=False)
    _traceback: LateTraceback | None = field(default=None, init=False)
    _recognized: Recognized | None = field(default=None, init=False)
    """The last error that the shell was about to show, if it is out-of-memory."""

    def __post_init__(self) -> None:
        names = self.namespace
        if names is None:
            names = notebook.user_variables(self.shell)
        self._state = GuardState(names, Identities({}), {}, self.shell)

    def open(self) -> None:
        """Read the allocator's figures and which names are bound; costs well under a millisecond."""
        self._state.watch.close()  # of a decorated function that calls itself
        try:
            if (
                not self.retries
            ):  # a further try is measured against the state before the first
                if self.shell is not None:
                    self._traceback = LateTraceback(
                        self.shell, self._recognises, as_text=self.keep_going
                    )
                    self._traceback.install()
                names = self._state.namespace
                self._state = GuardState(
                    namespace=names,
                    bound=Identities(names),
                    before=allocator.all_device_stats(),
                    shell=self.shell,
                    outside=frames.handled_exception_ids(),
                    watch=CellWatch(names, is_running=self.is_running),
                )
            self._state.watch.open()
        except BaseException:  # Ctrl-C: what did not open is not closed
            self.restore()
            raise

    @interrupts.held()
    def close(self, error: BaseException | None) -> None:
        """Record how the block ended; after out-of-memory, read its frames while they are whole."""
        self.restore()
        self._recovered = error is None and self.failure is not None
        recognized = self._recognized
        self._recognized = None
        if error is not None:
            if recognized is None or not recognized.is_of(error):
                recognized = failure.recognise(error, self._state.outside)
            if recognized is not None:
                self.failure = failure.examine(error, recognized, self._state)
            else:
                self.failure = None
        if self.failure is None:
            self.show_error()

    def restore(self) -> None:
        """Stop watching, and let the shell show errors as before; again after an interrupt."""
        try:
            self._state.watch.close()
        finally:
            if self._traceback is not None:
                self._traceback.uninstall()

    def finish(self, result: Any = None) -> OomReport | None:
        """Release, and return the report if it is to be shown."""
        report = self.release_and_report(result)
        return None if self.quiet else report

    def show_error(self) -> None:
        """Show the traceback that was held back; after the report."""
        late = self._traceback
        if late is not None:
            late.uninstall()  # again, where an interrupt has kept it from being done
            self._traceback = None
            late.show(keep=self.debug)

    @interrupts.held()
    def release_and_report(self, result: Any = None) -> OomReport | None:
        """Release what the failure pins and return the report, once IPython has shown and stored the traceback.

        `result` is IPython's of the cell; its error is replaced by `OutOfMemory`, or by None to go on.
        """
        if self.failure is not None and not self._recovered:
            if self.seconds and self.failure.event.memory is Memory.DEVICE:
                from gpumagic.advice.runs import start_worker

                start_worker(self.failure.event.device or "")
            if not self.debug:
                self.release_frames(result.error_in_exec)
                # The result would keep what the error's arguments hold; without a report the cell has failed as well.
                result.error_in_exec = self._one_line_error()
                release.reclaim()
            if self.keep_going:
                result.error_in_exec = None
        return self._make_report()

    def __call__(self, function: Function) -> Function:
        """Return the function guarded, and run again as the options say."""
        self.is_running = True
        if self.rerun is None:
            decorated: Function = super().__call__(function)
            return decorated
        return cast("Function", self.rerun(function, self))

    def forget_last_run(self) -> None:
        """Forget the last failure and its report, before another block."""
        self.report = None
        self.failure = None
        self.retries = 0
        self.elsewhere = ""

    def __enter__(self) -> OomGuard:  # noqa: PYI034  # typing.Self is 3.11, and this class has no heirs
        if self.rerun is not None:
            raise OptionError(
                "a with block cannot run again: decorate a function, "
                'such as @gpumagic.oomguard(shrink="batch_size"), or leave out shrink and fallback'
            )
        self.forget_last_run()
        self.is_running = True
        self.open()
        return self

    def __exit__(
        self, exc_type: object, error: BaseException | None, traceback: object
    ) -> bool:
        del exc_type, traceback
        self.close(error)
        if self.failure is None:
            return False
        raised = None
        if error is not None and not self.debug:
            raised = self._one_line_error()
            self.release_frames(error)
            del error
            release.reclaim()
        self._make_report()
        if raised is not None and not self.keep_going:
            raise_alone(raised)
        return self.keep_going

    def release_frames(self, error: BaseException) -> None:
        """Empty the frames of an error; `release.reclaim` is left to the caller, who may hold the error."""
        release.clear_exception(error, self.shell, self._state.outside)

    def set_report(self, report: OomReport) -> None:
        """Set the guard's report, and hand it to whoever stores it."""
        self.report = report
        if self.store is not None:
            self.store(report)

    def _recreate_cm(self) -> OomGuard:
        return self  # one report, of the last call that failed

    def _recognises(self, error: BaseException) -> bool:
        """Return whether the shell is about to show an out-of-memory error, which `close` then need not recognise."""
        self._recognized = failure.recognise(error, self._state.outside)
        return self._recognized is not None

    def _one_line_error(self) -> BaseException:
        """Return the error that a guarded cell fails with; it keeps nothing alive."""
        assert self.failure is not None
        event, line = self.failure.event, self.failure.frames.line
        what = f"{event.device} ran out of memory" if event.device else "out of memory"
        where = f" in line {line}" if line is not None else ""
        error: BaseException = recognition.OutOfMemory(
            f"{what}{where} ({event.message})"
        )
        return error

    @interrupts.held()
    def _make_report(self) -> OomReport | None:
        """Make, set and return the report of the last failure, from what is alive now; forget the failure."""
        if self.failure is None:
            return None
        from gpumagic.oom.conclusion import conclude

        failure = self.failure
        self.failure = None
        report = conclude(
            failure,
            self._state,
            is_kept=self.debug and not self._recovered,
            retries=self.retries,
            recovered=self._recovered,
            seconds=self.seconds,
            elsewhere=self.elsewhere,
        )
        self.set_report(report)
        return report


def raise_alone(error: BaseException) -> NoReturn:
    """Raise without the exception being handled as context, which keeps its arguments alive."""
    try:
        raise error
    finally:
        error.__context__ = None
        error.__suppress_context__ = True
        del error
