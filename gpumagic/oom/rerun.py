"""Runs a cell or a function again after it ran out of memory: smaller, or elsewhere.

An int is halved down to 1; then, with its first value, comes another device. Before each further run the guard
releases what the previous one pinned, `Rollback` restores the notebook, and one printed line says what comes next and
what cannot be undone. The cell is left as its last run left it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from gpumagic.errors import OptionError
from gpumagic.heap import release
from gpumagic.memory import allocator, devices
from gpumagic.notebook import guards
from gpumagic.notebook.guards import BodyOutcome, Guard, Outcome
from gpumagic.oom.guard import Function, OomGuard, raise_alone
from gpumagic.oom.report import Try
from gpumagic.oom.rollback import Lost, Rollback
from gpumagic.report.units import few
from gpumagic.source import settings
from gpumagic.transfers.run import DeviceRun

_MOST_UNSEEN = 3
"""Variables that a sentence names in which a change would not be noticed."""


class Plan(NamedTuple):
    """What to do when memory runs out."""

    shrink: str | None = None
    """The name of an int to halve until the cell fits."""
    fallback: str | None = None
    """The device to run on last, ``"auto"`` for the one with most free memory."""

    def check(self) -> None:
        """Raise `DeviceNotFound` where the device does not exist."""
        if self.fallback not in (None, "auto"):
            devices.resolve(self.fallback)


class Rerun(guards.BodyRuns):
    """The runs of a cell under one guard, whose report is of the last failure.

    Args:
        plan: what to do when memory runs out.
        guard: goes around every run.
        namespace: the variables that the cell works with; the arguments of a function.
        shell: the shell it runs in, if any.
        function: what is called, where it is no cell.
    """

    def __init__(
        self,
        plan: Plan,
        guard: OomGuard,
        namespace: MutableMapping[str, Any],
        shell: object | None = None,
        function: Callable[..., object] | None = None,
    ) -> None:
        super().__init__(guard)
        plan.check()
        self._plan = plan
        self._guard = guard
        self._namespace = namespace
        self._shell = shell
        self._function = function
        self._tries: list[Try] = []
        self._elsewhere: DeviceRun | None = None
        self._fits = False

    def begin(self, source: str) -> str:
        """Find the setting and remember the state; raises `OptionError` where there is no such int."""
        self._source = source
        name = self._plan.shrink
        self._setting: settings.Setting | None = None
        if name is not None and self._function is not None:
            self._setting = settings.find_in_arguments(
                name, self._namespace, "--shrink"
            )
        elif name is not None:
            self._setting = settings.find_in_cell(
                source, name, self._namespace, "--shrink"
            )
        self._size = self._setting.value if self._setting is not None else None
        self._rollback = Rollback(self._namespace, source, self._shell)
        return source

    def guards(self) -> tuple[Guard, ...]:
        """Return the guard, and inside it what sends the run to another device, if it is to."""
        return (
            (self._guard,)
            if self._elsewhere is None
            else (self._guard, self._elsewhere)
        )

    def next(self, outcome: BodyOutcome) -> str | None:
        """Return the code to run next, once state and memory are restored; None if the outcome stands."""
        error = outcome.error_in_exec
        failure = self._guard.failure
        self._fits = error is None
        if error is not None and failure is None:
            return None  # another error, or Ctrl-C
        failed = Try(
            size=self._size,
            device=self._elsewhere.device if self._elsewhere is not None else None,
            fits=self._fits,
            line=failure.frames.line
            if error is not None and failure is not None
            else None,
        )
        self._tries.append(failed)
        if error is None or failure is None or self._elsewhere is not None:
            return None
        change = self._change_setup(failure.event.device)
        if change is None:
            return None
        outcome.error_in_exec = None
        outcome.result = None
        self._guard.release_frames(error)
        self._guard.retries += 1
        del error
        lost = self._rollback.undo()
        release.reclaim()
        self._tries[-1] = replace(failed, lost=lost.changes, unseen=lost.unseen)
        print(self._sentence(failed, change, lost))  # noqa: T201  # as it goes on
        return self._changed_source()

    def _change_setup(self, failed_on: str | None) -> str | None:
        """Choose a smaller number or another device for the next run, and return it in words; None if none is left."""
        if self._size is not None and self._size > 1:
            self._size //= 2
            return f"{self._plan.shrink} = {self._size}"
        device = _other_device(self._plan.fallback, failed_on)
        if device is None:
            return None
        code = getattr(self._function, "__code__", None)
        self._elsewhere = DeviceRun(
            device,
            namespace=getattr(self._function, "__globals__", self._namespace),
            filename=code.co_filename if code is not None else None,
        )
        self._guard.elsewhere = device
        self._size = self._setting.value if self._setting is not None else None
        return f"on {device}"

    def _sentence(self, failed: Try, change: str, lost: Lost) -> str:
        """Return what is said between two runs."""
        what = (
            f"{self._plan.shrink} = {failed.size}"
            if failed.size is not None
            else "the cell"
        )
        where = f" in line {failed.line}" if failed.line is not None else ""
        sentence = f"%%oomguard: {what} ran out of memory{where}; now {change}."
        if lost.changes:
            sentence += f" Cannot be undone: {', '.join(lost.changes)}."
        if lost.unseen:
            names = few(lost.unseen, _MOST_UNSEEN)
            sentence += f" Changes inside {names} would not be noticed."
        return sentence

    def _changed_source(self) -> str:
        """Return the code with the size that is to be tried next, and set the variable that has it."""
        if self._setting is None or self._size is None:
            return self._source
        source, variables = self._setting.with_value(self._size)
        self._namespace.update(variables)
        return source or self._source

    def end(self) -> None:
        """Restore the setting, unless the code passed with another value."""
        if self._setting is not None and not self._fits:
            self._namespace.update(self._setting.with_value(self._setting.value)[1])
        del self._rollback

    def finish(self, outcome: Outcome) -> list[tuple[Guard, object]]:
        """Return the report of the other device where there was one, and that of the runs with what helps."""
        report = self._guard.release_and_report(outcome)
        if report is None:
            return []
        report = replace(
            report,
            tries=tuple(self._tries),
            shrunk=self._plan.shrink or "",
            place=self._place(),
        )
        self._guard.set_report(report)
        if self._guard.quiet:
            return []
        there = self._elsewhere
        if there is None or there.report is None:
            return [(self._guard, report)]
        return [(there, there.report), (self._guard, report)]

    def _place(self) -> str:
        """Return where the size stands and what it has to be, where the code passed with a smaller one."""
        setting = self._setting
        if setting is None or self._size is None or not self._fits:
            return ""
        return setting.place(self._size) if self._size != setting.value else ""


def _other_device(wanted: str | None, failed: str | None) -> str | None:
    """Return the device to fall back to, or None where there is none but the one that failed."""
    if wanted == "auto" and failed != "cpu":  # the host's memory serves every device
        others = [device for device in allocator.accelerators() if device != failed]
        return devices.most_free(others) or "cpu"
    if wanted is None or wanted == "auto":
        return None
    device = devices.resolve(wanted)
    return None if device == failed else device


def decorate(plan: Plan, function: Function, guard: OomGuard) -> Function:
    """Return a function that is called under a guard, and again as the plan says.

    Raises:
        OptionError: the function has no such parameter, or only starts when it is called.
    """
    signature = inspect.signature(function)
    if plan.shrink is not None and plan.shrink not in signature.parameters:
        names = ", ".join(signature.parameters) or "none"
        raise OptionError(
            f"{function.__name__} has no parameter {plan.shrink!r}; it has {names}"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise OptionError(
            f"{function.__name__} only starts when it is called: decorate one that runs to its end"
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        guard.forget_last_run()
        runs = Rerun(plan, guard, bound.arguments, function=function)
        runs.begin("")
        outcome = guards.run_guarded(
            runs, lambda _: function(*bound.args, **bound.kwargs), ""
        )
        failed = guard.failure is not None
        runs.finish(outcome)
        result = outcome.result
        error = outcome.error_in_exec
        del outcome, runs
        if error is None:
            return result
        try:
            if failed:
                raise_alone(error)
            raise error
        finally:
            del error

    return cast("Function", call)
