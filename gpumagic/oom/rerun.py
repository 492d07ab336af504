"""Runs a cell or a function again after it ran out of memory: smaller, or elsewhere.

An int is halved down to 1, past what dry runs rule out; then, with its first value, comes another device. Before each
further run the guard releases what the previous one pinned, `oom.rollback` restores the notebook, and one printed line
says what comes next and what cannot be undone. The cell is left as its last run left it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import time
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
from gpumagic.report.units import size
from gpumagic.source import cell_code, settings
from gpumagic.transfers import log
from gpumagic.transfers.run import DeviceRun

if TYPE_CHECKING:
    from gpumagic.dryrun.cells import OtherValues
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


FindSetting = Callable[[str, str, MutableMapping[str, object], str], settings.Setting]
Ask = Callable[[str, settings.Setting], "OtherValues"]


class Rerun:
    """The runs of one piece of code under one guard, whose report is of the last failure.

    Args:
        plan: what to do when memory runs out.
        guard: goes around every run.
        namespace: the variables the code works with.
        shell: the shell it runs in, if any.
        find: finds the setting that the plan names.
        on: makes a run on another device.
        say: prints a line.
        ask: returns the dry runs of the code with other values of the setting.
    """

    def __init__(
        self,
        plan: Plan,
        guard: OomGuard,
        namespace: MutableMapping[str, object],
        shell: object | None = None,
        find: FindSetting = settings.find_in_cell,
        on: Callable[[str], DeviceRun] | None = None,
        say: Callable[[str], None] = print,
        ask: Ask | None = None,
    ) -> None:
        plan.check()
        self._plan, self._guard, self._namespace, self._shell = plan, guard, namespace, shell
        self._find, self._say = find, say
        self._ask = ask or functools.partial(_ask_for_cell, namespace=namespace)
        self._on = on or functools.partial(DeviceRun, namespace=namespace)
        self._setting: settings.Setting | None = None
        self._tries: list[Try] = []
        self._size: int | None = None
        self._device: str | None = None
        self._elsewhere: DeviceRun | None = None
        self._fits = False

    def begin(self, source: str) -> str:
        """Find the setting and remember the state; raises `OptionError` where there is no such int."""
        self._source = source
        if self._plan.shrink:
            self._setting = self._find(source, self._plan.shrink, self._namespace, "--shrink")
        self._rollback = Rollback(self._namespace, source, self._shell)
        self._size = self._setting.value if self._setting is not None else None
        return self._start()

    def guard(self) -> Guard:
        """Return the guard, with the other device inside it where the run is sent to one."""
        if self._device is None:
            return self._guard
        self._elsewhere = self._on(self._device)
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
        self._say(self._announcement(self._halve() if is_halved else []))
        self._fits = False
        return self._start()

    def _halve(self) -> list[int]:
        """Halve the size until a dry run does not rule it out, and return those that are passed over."""
        assert self._setting is not None
        assert self._size is not None
        ask, skipped = self._ask(self._source, self._setting), list[int]()
        self._size //= 2
        while self._size > 1 and ask.fits(self._size) is False:
            skipped.append(self._size)
            self._size //= 2
        return skipped

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
        report = replace(
            failure, tries=tuple(self._tries), shrunk=self._plan.shrink or "", place=self._new_place()
        )  # fmt: skip
        self._guard.publish(report)
        if self._guard.quiet:
            return []
        elsewhere = self._elsewhere.report if self._elsewhere is not None else None
        return [(self._guard.name, report), *([] if elsewhere is None else [(DeviceRun.name, elsewhere)])]

    def _start(self) -> str:
        """Set the value for the coming run, and return the code to run."""
        self._started = time.perf_counter()
        if self._device is not None and self._setting is not None:
            self._size = self._setting.value
            self._setting.restore()
        if self._setting is None or self._size is None or self._size == self._setting.value:
            return self._source
        changed = self._setting.apply(self._size)
        return self._source if changed is None else changed

    def _new_place(self) -> str:
        """Return how to write the value with which the code passed, where that is not the original."""
        size, setting = self._size, self._setting
        return "" if not self._fits or setting is None or size in (None, setting.value) else setting.place(size or 1)

    def _failed_device(self) -> str | None:
        return self._guard.failure.facts.device if self._guard.failure is not None else None

    def _result(self) -> Try:
        """Return the record of the run that ended."""
        ran = Try(
            len(self._tries) + 1, self._size, self._device, fits=self._fits,
            seconds=time.perf_counter() - self._started, allocated=_in_use(self._failed_device()),
        )  # fmt: skip
        failure = self._guard.failure
        if self._fits or failure is None:
            return ran
        facts = failure.facts
        in_use = facts.at_failure.allocated if facts.at_failure is not None else None
        return replace(ran, allocated=in_use, requested=facts.requested, line=facts.line)

    def _announcement(self, skipped: list[int]) -> str:
        last = self._tries[-1]
        what = f"{self._plan.shrink} = {last.size}" if last.size is not None else "the cell"
        where = f" in line {last.line}" if last.line is not None else ""
        became = "fits" if last.fits else f"ran out of memory{where}"
        undone = f" Cannot be undone: {', '.join(last.lost)}." if last.lost else ""
        no = f" By dry runs {' and '.join(map(str, skipped))} would not fit." if skipped else ""
        return f"%%oomguard: {what} {became}; now {self._described()}.{undone}{no}"

    def _described(self) -> str:
        if self._device is None:
            return f"{self._plan.shrink} = {self._size}"
        cell = cell_code.read_cell(self._source)  # what it reads before it rebinds it
        names = (cell.reads - cell.bound_first if cell is not None else ()) if self._source else self._namespace.keys()
        used = {name: value for name, value in list(self._namespace.items()) if name in names}
        stay = log.tensors_elsewhere(used, self._device)
        staying = ", ".join(f"{each.name} ({each.device}, {size(each.nbytes)})" for each in stay)
        quoted = [each for each in ast.walk(ast.parse(self._source)) if isinstance(each, ast.Constant)]
        # A default device does not change the name of one that stands in quotes.
        line = min((each.lineno for each in quoted if each.value == self._failed_device()), default=None)
        return (
            f"on {self._device}"
            + (f"; what it uses stays where it is: {staying}" if staying else "")
            + (f"; line {line} names {self._failed_device()}, and means it there too" if line is not None else "")
        )


def _in_use(device: str | None) -> int | None:
    """Return the bytes in use on a device, or on the fullest one."""
    now = {each: figures.allocated for each, figures in allocator.all_device_stats().items()}
    return now.get(device) if device is not None else max(now.values(), default=None)


def _ask_for_cell(source: str, setting: settings.Setting, namespace: MutableMapping[str, object]) -> OtherValues:
    from gpumagic.dryrun import cells

    return cells.with_other_values(source, setting, namespace)


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


def _call(function: Callable[..., Any], bound: inspect.BoundArguments, plan: Plan, guard: OomGuard) -> Any:
    __tracebackhide__ = True
    guard.reset()
    runs = Rerun(
        plan, guard, bound.arguments, find=lambda _, *wanted: settings.find_in_arguments(*wanted),
        on=functools.partial(_device_run, function=function), ask=functools.partial(_ask_for_call, function, bound),
    )  # fmt: skip
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


def _ask_for_call(
    function: Callable[..., Any], bound: inspect.BoundArguments, _: str, setting: settings.Setting
) -> OtherValues:
    """Return the dry runs of the call with other values of an argument."""
    from gpumagic.dryrun import cells

    def imagine(value: int) -> tuple[Callable[[], object], dict[str, object]]:
        arguments = bound.signature.bind(*bound.args, **bound.kwargs)
        arguments.arguments[setting.name] = value
        return functools.partial(function, *arguments.args, **arguments.kwargs), {}

    return cells.OtherValues(setting, imagine, getattr(function, "__globals__", {}))


def _device_run(device: str, function: Callable[..., Any]) -> DeviceRun:
    code = getattr(function, "__code__", None)
    return DeviceRun(device, namespace=getattr(function, "__globals__", {}), filename=code and code.co_filename)
