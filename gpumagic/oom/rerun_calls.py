"""A decorated function that is called again when it runs out of memory, with a smaller argument or elsewhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gpumagic.errors import OptionError
from gpumagic.notebook import guards
from gpumagic.oom.guard import raise_alone
from gpumagic.oom.rerun import Rerun
from gpumagic.source import settings
from gpumagic.transfers.run import DeviceRun

if TYPE_CHECKING:
    from gpumagic.dryrun.other_values import OtherValues
    from gpumagic.oom.guard import OomGuard
    from gpumagic.oom.rerun_plan import Plan

Function = TypeVar("Function", bound=Callable[..., Any])


def decorate(function: Function, plan: Plan, guard: OomGuard) -> Function:
    """Return a function that is called under a guard, and again as the plan says.

    Args:
        function: has a parameter of the plan's name, if the plan has one.
        plan: what to do when memory runs out.
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
    outcome = guards.run(runs, lambda _: function(*bound.args, **bound.kwargs), "")
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
    from gpumagic.dryrun import other_values

    def imagine(value: int) -> tuple[Callable[[], object], dict[str, object]]:
        arguments = bound.signature.bind(*bound.args, **bound.kwargs)
        arguments.arguments[knob.name] = value
        return functools.partial(function, *arguments.args, **arguments.kwargs), {}

    return other_values.OtherValues(knob, imagine, getattr(function, "__globals__", {}))


def _on(device: str, function: Callable[..., Any]) -> DeviceRun:
    code = getattr(function, "__code__", None)
    return DeviceRun(device, namespace=getattr(function, "__globals__", {}), filename=code and code.co_filename)
