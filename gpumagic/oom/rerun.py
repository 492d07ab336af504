"""Runs a cell or a function again after it ran out of memory: smaller, or elsewhere.

An int is halved down to 1; then, with its first value, comes another device. Before each further run the guard
releases what the previous one pinned, `oom.rollback` restores the notebook, and one printed line says what comes next
and what cannot be undone. The cell is left as its last run left it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gpumagic.errors import OptionError
from gpumagic.heap import release
from gpumagic.memory import allocator, devices
from gpumagic.notebook import guards
from gpumagic.notebook.guards import BodyOutcome, Guard, NestedGuard, Outcome
from gpumagic.oom.guard import raise_alone
from gpumagic.oom.report import Try
from gpumagic.oom.rollback import Rollback
from gpumagic.source import settings
from gpumagic.transfers.run import DeviceRun

if TYPE_CHECKING:
    from gpumagic.oom.guard import OomGuard


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do when memory runs out; every part is optional.

    Attributes:
        shrink: the name of an int to halve until the cell fits.
        fallback: the device to run on last, ``"auto"`` for the one with most free memory.
    """

    shrink: str | None = None
    fallback: str | None = None

    def check(self) -> None:
        """Raise `DeviceNotFound` where the device does not exist."""
        if self.fallback not in (None, "auto"):
            devices.resolve(self.fallback)


def _elsewhere(name: str, failed: str | None) -> str | None:
    """Return the device to fall back to, or None where that would be the one that failed."""
    if name != "auto":
        device = devices.resolve(name)
        return None if device == failed else device
    if failed == "cpu":
        return None  # the host's memory serves every device
    others = [each for each in allocator.accelerators() if each != failed]
    return devices.most_free(others) or "cpu"


class Rerun(guards.BodyRuns):
    """The runs of a cell under one guard, whose report is of the last failure.

    Args:
        plan: what to do when memory runs out.
        guard: goes around every run.
        namespace: the variables that the cell works with.
        shell: the shell it runs in, if any.
        say: prints a line.
    """

    def __init__(
        self, plan: Plan, guard: OomGuard, namespace: MutableMapping[str, object], shell: object | None = None,
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        plan.check()
        self._plan, self._guard, self._namespace, self._shell, self._say = plan, guard, namespace, shell, say
        self._setting: settings.Setting | None = None
        self._tries: list[Try] = []
        self._size: int | None = None
        self._device: str | None = None
        self._elsewhere: DeviceRun | None = None
        self._fits = False

    def find(self, name: str) -> settings.Setting:
        """Return the int that goes down from run to run."""
        return settings.find_in_cell(self._source, name, self._namespace, "--shrink")

    def on(self, device: str) -> DeviceRun:
        """Return what sends a run to another device."""
        return DeviceRun(device, namespace=self._namespace)

    def begin(self, source: str) -> str:
        """Find the setting and remember the state; raises `OptionError` where there is no such int."""
        self._source = source
        self._setting = self.find(self._plan.shrink) if self._plan.shrink else None
        self._rollback = Rollback(self._namespace, source, self._shell)
        self._size = self._setting.value if self._setting is not None else None
        return self._start()

    def guard(self) -> Guard:
        """Return the guard, with the other device inside it where the run is sent to one."""
        if self._device is None:
            return self._guard
        self._elsewhere = self.on(self._device)
        return NestedGuard(self._guard, self._elsewhere)

    def next(self, outcome: BodyOutcome) -> str | None:
        """Return the code to run next, once state and memory are restored; None if the outcome stands."""
        self._fits = outcome.error_in_exec is None
        if not self._fits and self._guard.failure is None:
            return None  # another error, or Ctrl-C
        self._tries.append(self._result())
        if self._fits or self._device is not None:
            return None
        is_halved = self._size is not None and self._size > 1
        if not is_halved and self._plan.fallback is not None:
            self._device = _elsewhere(self._plan.fallback, self._failed_device())
        if not is_halved and self._device is None:
            return None
        error, outcome.error_in_exec, outcome.result = outcome.error_in_exec, None, None
        self._guard.release_failure(error)
        del error
        lost = self._rollback.undo()
        release.reclaim()
        self._tries[-1] = replace(self._tries[-1], lost=lost)
        if is_halved:
            self._size = (self._size or 0) // 2
        self._say(self._announcement())
        self._fits = False
        return self._start()

    def end(self) -> None:
        """Restore the setting, unless the code passed with another value."""
        if self._setting is not None and not self._fits:
            self._setting.restore()
        del self._rollback

    def finish(self, outcome: Outcome) -> list[tuple[str, object]]:
        """Return the report of the runs, and the other device's where there was one."""
        failure = self._guard.settle(outcome)
        if failure is None:
            return []
        size, setting = self._size, self._setting
        is_smaller = self._fits and setting is not None and size not in (None, setting.value)
        place = setting.place(size or 1) if setting is not None and is_smaller else ""
        report = replace(failure, tries=tuple(self._tries), shrunk=self._plan.shrink or "", place=place)
        self._guard.publish(report)
        if self._guard.quiet:
            return []
        elsewhere = self._elsewhere.report if self._elsewhere is not None else None
        return [(self._guard.name, report), *([] if elsewhere is None else [(DeviceRun.name, elsewhere)])]

    def _start(self) -> str:
        """Set the value for the coming run, and return the code to run."""
        if self._device is not None and self._setting is not None:
            self._size = self._setting.value
            self._setting.restore()
        if self._setting is None or self._size is None or self._size == self._setting.value:
            return self._source
        changed = self._setting.apply(self._size)
        return self._source if changed is None else changed

    def _failed_device(self) -> str | None:
        return self._guard.failure.facts.device if self._guard.failure is not None else None

    def _result(self) -> Try:
        """Return the record of the run that ended."""
        line = self._guard.failure.facts.line if self._guard.failure is not None and not self._fits else None
        return Try(self._size, self._device, self._fits, line)

    def _announcement(self) -> str:
        last = self._tries[-1]
        what = f"{self._plan.shrink} = {last.size}" if last.size is not None else "the cell"
        where = f" in line {last.line}" if last.line is not None else ""
        undone = f" Cannot be undone: {', '.join(last.lost)}." if last.lost else ""
        now = f"{self._plan.shrink} = {self._size}" if self._device is None else f"on {self._device}"
        return f"%%oomguard: {what} ran out of memory{where}; now {now}.{undone}"


Function = TypeVar("Function", bound=Callable[..., Any])


def decorate(plan: Plan, function: Function, guard: OomGuard) -> Function:
    """Return a function that is called under a guard, and again as the plan says.

    Raises:
        OptionError: the function has no such parameter, or only starts when it is called.
    """
    signature = inspect.signature(function)
    if plan.shrink is not None and plan.shrink not in signature.parameters:
        raise OptionError(
            f"{function.__name__} has no parameter {plan.shrink!r}; it has {', '.join(signature.parameters) or 'none'}"
        )
    if any(ask(function) for ask in (inspect.iscoroutinefunction, inspect.isgeneratorfunction)):
        raise OptionError(f"{function.__name__} only starts when it is called: decorate one that runs to its end")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _call(function, bound, plan, guard)

    return cast("Function", call)


class _CallRerun(Rerun):
    """The calls of a function, whose arguments are its variables."""

    def __init__(
        self, plan: Plan, guard: OomGuard, function: Callable[..., Any], bound: inspect.BoundArguments
    ) -> None:
        super().__init__(plan, guard, bound.arguments)
        self._function, self._call = function, bound

    def find(self, name: str) -> settings.Setting:
        return settings.find_in_arguments(name, self._namespace, "--shrink")

    def on(self, device: str) -> DeviceRun:
        code = getattr(self._function, "__code__", None)
        variables = getattr(self._function, "__globals__", {})
        return DeviceRun(device, namespace=variables, filename=code and code.co_filename)


def _call(function: Callable[..., Any], bound: inspect.BoundArguments, plan: Plan, guard: OomGuard) -> Any:
    __tracebackhide__ = True
    guard.reset()
    runs = _CallRerun(plan, guard, function, bound)
    runs.begin("")
    outcome = guards.run_guarded(runs, lambda _: function(*bound.args, **bound.kwargs), "")
    failed = guard.failure is not None
    runs.finish(outcome)
    result, error = outcome.result, outcome.error_in_exec
    del outcome, runs
    if error is None:
        return result
    try:
        if failed:
            raise_alone(error)
        raise error
    finally:
        del error
