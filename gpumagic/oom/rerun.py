"""Running a cell or a function again after it ran out of memory: as it was, smaller, at the largest size, elsewhere.

Before each further run the guard frees what the one before pinned, `oom.rollback` puts the notebook back, and one
printed line says what comes next and what cannot be undone. The cell is left as its last run left it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gpumagic.errors import OptionError
from gpumagic.heap import release
from gpumagic.memory import allocator
from gpumagic.notebook import guards
from gpumagic.notebook.guards import BodyOutcome, Guard, NestedGuard, Outcome
from gpumagic.oom.guard import raise_alone
from gpumagic.oom.report import FitReport, OomReport, Try
from gpumagic.oom.rerun_plan import Plan, Step, steps
from gpumagic.oom.rollback import Rollback
from gpumagic.report.units import count, size
from gpumagic.source import cell_code, settings
from gpumagic.transfers import log
from gpumagic.transfers.run import DeviceRun

if TYPE_CHECKING:
    from gpumagic.dryrun.cells import OtherValues
    from gpumagic.dryrun.report import Fit
    from gpumagic.oom.guard import OomGuard
    from gpumagic.oom.rerun_plan import Plan


FindKnob = Callable[[str, str, MutableMapping[str, object], str], settings.Setting]
Ask = Callable[[str, settings.Setting], "OtherValues"]


class Rerun:
    """The runs of one piece of code under one guard.

    Args:
        plan: what to do when memory runs out.
        guard: goes around every run; its report is of the last failure.
        namespace: the variables the code works with.
        shell: the shell it runs in, if one.
        find: finds the int of the plan; see `knobs`.
        on: makes a run on another device.
        say: prints a line.
        ask: returns what rehearses the code with other values of the int.
    """

    def __init__(
        self,
        plan: Plan,
        guard: OomGuard,
        namespace: MutableMapping[str, object],
        shell: object | None = None,
        find: FindKnob = settings.find_in_cell,
        on: Callable[[str], DeviceRun] | None = None,
        say: Callable[[str], None] = print,
        ask: Ask | None = None,
    ) -> None:
        plan.check()
        self._plan, self._guard, self._namespace, self._shell = plan, guard, namespace, shell
        self._find, self._say = find, say
        self._ask = ask or functools.partial(_of_cell, namespace=namespace)
        self._on = on or functools.partial(DeviceRun, namespace=namespace)
        self._knob: settings.Setting | None = None
        self._tries: list[Try] = []
        self._elsewhere: DeviceRun | None = None
        self._fits = False
        self._rehearsed: Fit | None = None

    def begin(self, source: str) -> str:
        """Find the int and remember the state; raises `OptionError` where there is no such int."""
        self._source = source
        if self._plan.name:
            option = "--fit" if self._plan.fit else "--shrink"
            self._knob = self._find(source, self._plan.name, self._namespace, option)
        if self._plan.fit and self._knob is not None:
            self._rehearsed = self._ask(source, self._knob).largest()
        self._rollback = Rollback(self._namespace, source, self._shell)
        size = self._knob.value if self._knob is not None else None
        expected = self._rehearsed.expected if self._rehearsed is not None else None
        self._steps = steps(self._plan, size, self._failed_device, expected)
        self._step = next(self._steps)
        if expected is not None and self._rehearsed is not None:
            self._say(_foretold(self._rehearsed, expected))
        return self._start()

    def guard(self) -> Guard:
        """Return the guard, with the other device inside it where the run is sent to one."""
        if self._step.device is None:
            return self._guard
        self._elsewhere = self._on(self._step.device)
        return NestedGuard(self._guard, self._elsewhere)

    def next(self, outcome: BodyOutcome) -> str | None:
        """Return the code to run next, with everything put back and freed for it, or None to let the outcome stand."""
        self._fits = outcome.error_in_exec is None
        if not self._fits and self._guard.failure is None:
            return None  # another error, or Ctrl-C
        self._tries.append(self._result())
        try:
            step = self._steps.send(self._fits)
        except StopIteration:
            return None
        self._put_back(outcome)
        step, passed_over = self._first_that_may_fit(step)
        self._say(self._announcement(step, passed_over))
        self._step, self._fits = step, False
        return self._start()

    def end(self) -> None:
        """Leave the int as it was, unless the code passed with another."""
        if self._knob is not None and not self._fits:
            self._knob.restore()
        del self._rollback

    def finish(self, outcome: Outcome) -> list[tuple[str, object]]:
        """Return the report of the runs, and the other device's where there was one."""
        failure = self._guard.settle(outcome)
        report: OomReport | FitReport | None = failure
        if failure is not None:
            report = failure = replace(
                failure, tries=tuple(self._tries), shrunk=self._plan.name or "", place=self._new_place()
            )  # fmt: skip
        if self._plan.fit and self._knob is not None and self._tries:
            report = _fit_report(self._knob, self._tries, failure, self._rehearsed)
        if report is None:
            return []
        self._guard.publish(report)
        if self._guard.quiet:
            return []
        elsewhere = self._elsewhere.report if self._elsewhere is not None else None
        return [(self._guard.name, report), *([] if elsewhere is None else [(DeviceRun.name, elsewhere)])]

    def _start(self) -> str:
        """Give the int the value of the coming run, and return the code to run."""
        self._started = time.perf_counter()
        size = self._step.size
        changed = self._knob.apply(size) if self._knob is not None and size not in (None, self._knob.value) else None
        return self._source if changed is None else changed

    def _first_that_may_fit(self, step: Step) -> tuple[Step, list[int]]:
        """Return the step, or where the int is being halved the first that a rehearsal does not say no to."""
        passed_over: list[int] = []
        if not self._plan.shrink or self._knob is None or step.device is not None:
            return step, passed_over
        ask = self._ask(self._source, self._knob)
        while step.size is not None and 1 < step.size < self._knob.value and ask.fits(step.size) is False:
            passed_over.append(step.size)
            step = self._steps.send(False)
        return step, passed_over

    def _put_back(self, outcome: BodyOutcome) -> None:
        error, outcome.error_in_exec, outcome.result = outcome.error_in_exec, None, None
        self._guard.let_go(error)
        del error
        lost = self._rollback.undo()
        release.reclaim()
        self._tries[-1] = replace(self._tries[-1], lost=lost)

    def _new_place(self) -> str:
        """Return how to write the int with which the code passed, where that is not what it was."""
        size = self._step.size
        changed = self._fits and self._knob is not None and size is not None and size != self._knob.value
        return self._knob.place(size) if changed and self._knob is not None and size is not None else ""

    def _failed_device(self) -> str | None:
        return self._guard.failure.device if self._guard.failure is not None else None

    def _result(self) -> Try:
        """Return what the run that ended came to."""
        ran = Try(
            len(self._tries) + 1, self._step.size, self._step.device, fits=self._fits,
            seconds=time.perf_counter() - self._started, allocated=_in_use(self._failed_device()),
        )  # fmt: skip
        failure = self._guard.failure
        if self._fits or failure is None:
            return ran
        there = failure.at_failure.get(failure.device or "")
        in_use = there.allocated if there is not None else None
        return replace(
            ran, allocated=in_use, requested=failure.event.numbers.requested, line=failure.scene.line
        )  # fmt: skip

    def _announcement(self, step: Step, passed_over: list[int]) -> str:
        last = self._tries[-1]
        what = f"{self._plan.name} = {last.size}" if last.size is not None else "the cell"
        where = f" in line {last.line}" if last.line is not None else ""
        became = "fits" if last.fits else f"ran out of memory{where}"
        undone = f" Cannot be undone: {', '.join(last.lost)}." if last.lost else ""
        no = f" Rehearsed: {' and '.join(map(str, passed_over))} would not fit." if passed_over else ""
        return f"%%oomguard: {what} {became}; now {self._described(step)}.{undone}{no}"

    def _described(self, step: Step) -> str:
        if step.device is None:
            return f"{self._plan.name} = {step.size}" if step.size != self._step.size else "the same again"
        names = _names_read(self._source) if self._source else self._namespace.keys()
        used = {name: value for name, value in list(self._namespace.items()) if name in names}
        stay = log.tensors_elsewhere(used, step.device)
        staying = ", ".join(f"{each.name} ({each.device}, {size(each.nbytes)})" for each in stay)
        line = _line_that_names(self._failed_device(), self._source)
        return (
            f"on {step.device}"
            + (f"; what it uses stays where it is: {staying}" if staying else "")
            + (f"; line {line} names {self._failed_device()}, and means it there too" if line is not None else "")
        )


def _names_read(source: str) -> frozenset[str]:
    """Return the variables that code reads before it binds them anew."""
    cell = cell_code.read_cell(source)
    return cell.reads - cell.bound_first if cell is not None else frozenset()


def _line_that_names(device: str | None, source: str) -> int | None:
    """Return the first line of some code with a device's name in quotes: a default device does not change that one."""
    nodes = ast.walk(ast.parse(source))
    return min((node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value == device), default=None)


def _in_use(device: str | None) -> int | None:
    """Return the bytes in use on a device, or on the fullest one."""
    now = {each: figures.allocated for each, figures in allocator.all_device_stats().items()}
    return now.get(device) if device is not None else max(now.values(), default=None)


def _of_cell(source: str, knob: settings.Setting, namespace: MutableMapping[str, object]) -> OtherValues:
    from gpumagic.dryrun import cells

    return cells.with_other_values(source, knob, namespace)


def _foretold(rehearsed: Fit, expected: int) -> str:
    """Return the line before the first run of a search that rehearsals have done already."""
    asked = count(len(rehearsed.tried), "size")
    if rehearsed.largest is None:
        return f"%%oomguard: rehearsed with {asked}: {rehearsed.reason}; now {rehearsed.name} = {expected}."
    of = f" of {size(rehearsed.capacity)}" if rehearsed.capacity is not None else ""
    return (
        f"%%oomguard: rehearsed with {asked}: {rehearsed.name} = {expected} fits, {size(rehearsed.peak)}{of}; "
        "now it runs with that."
    )


def _fit_report(
    knob: settings.Setting, tries: list[Try], failure: OomReport | None, rehearsed: Fit | None
) -> FitReport:
    sized = [(each.size, each.fits) for each in tries if each.device is None and each.size is not None]
    best = max((size for size, fits in sized if fits), default=None)
    ceiling = min((size for size, fits in sized if not fits), default=None)
    notes = []
    foretold = rehearsed is not None and rehearsed.expected is not None
    if rehearsed is not None and not foretold:
        notes.append(f"The sizes were run, not rehearsed: {rehearsed.reason}.")
    elif rehearsed is not None and ceiling is None:
        ceiling = rehearsed.ceiling
        notes += _of_rehearsal(rehearsed)
    if best is not None and ceiling is None and not foretold:
        notes.append(f"Nothing up to {best} failed, and there the search ended: the cell's memory may not go with it.")
    place = knob.place(best) if best is not None else ""
    return FitReport(knob.name, best, ceiling, tuple(tries), place, failure, tuple(notes), rehearsed)


def _of_rehearsal(rehearsed: Fit) -> list[str]:
    if rehearsed.largest is None:
        return [f"Rehearsed: {rehearsed.reason}."]
    law = f"{size(rehearsed.base)} and {size(round(rehearsed.each))} for each 1"
    assumed = f" Assumed: {'; '.join(rehearsed.assumed)}." if rehearsed.assumed else ""
    no = f" {rehearsed.ceiling} was rehearsed and does not fit." if rehearsed.ceiling is not None else ""
    return [f"By the rehearsals the cell needs {law}.{no}{assumed}"]


Function = TypeVar("Function", bound=Callable[..., Any])


def decorate(plan: Plan, function: Function, guard: OomGuard) -> Function:
    """Return a function that is called under a guard, and again as the plan says.

    Args:
        plan: what to do when memory runs out.
        function: has a parameter of the plan's name, if the plan has one.
        guard: its `report` is of the last call.

    Raises:
        OptionError: the function has no such parameter, or only starts when it is called.
    """
    signature = inspect.signature(function)
    if plan.name is not None and plan.name not in signature.parameters:
        raise OptionError(
            f"{function.__name__} has no parameter {plan.name!r}; it has {', '.join(signature.parameters) or 'none'}"
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
        on=functools.partial(_on, function=function), ask=functools.partial(_ask, function, bound),
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


def _ask(function: Callable[..., Any], bound: inspect.BoundArguments, _: str, knob: settings.Setting) -> OtherValues:
    """Return what rehearses the call with other values of an argument."""
    from gpumagic.dryrun import cells

    def imagine(value: int) -> tuple[Callable[[], object], dict[str, object]]:
        arguments = bound.signature.bind(*bound.args, **bound.kwargs)
        arguments.arguments[knob.name] = value
        return functools.partial(function, *arguments.args, **arguments.kwargs), {}

    return cells.OtherValues(knob, imagine, getattr(function, "__globals__", {}))


def _on(device: str, function: Callable[..., Any]) -> DeviceRun:
    code = getattr(function, "__code__", None)
    return DeviceRun(device, namespace=getattr(function, "__globals__", {}), filename=code and code.co_filename)
