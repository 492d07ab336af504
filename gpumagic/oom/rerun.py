"""Runs a cell or a function again after it ran out of memory: smaller, or elsewhere.

An int is halved down to 1; then, with its first value, comes another device. Before each further run the guard
releases what the previous one pinned, `Rollback` restores the notebook, and one printed line says what comes next and
what cannot be undone. The cell is left as its last run left it.

Restored are names that the run bound or replaced, lists that it appended to, first gradients (a second backward would
add to them) and random states. Tensors that were changed in place, as by an optimizer, are only named.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from gpumagic._compat import torch_private
from gpumagic.backends import backend_named
from gpumagic.errors import OptionError
from gpumagic.heap import holders, kinds, release
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.storages import plain, undisturbed
from gpumagic.memory import allocator, devices
from gpumagic.memory.devices import Device
from gpumagic.notebook import guards
from gpumagic.notebook.guards import BodyOutcome, Guard, Outcome
from gpumagic.oom.guard import Function, OomGuard, raise_alone
from gpumagic.oom.report import Try
from gpumagic.source import cell_code, settings
from gpumagic.transfers.run import DeviceRun


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
        self._plan, self._guard, self._namespace, self._shell = plan, guard, namespace, shell
        self._function = function
        self._tries: list[Try] = []
        self._elsewhere: DeviceRun | None = None
        self._fits = False

    def begin(self, source: str) -> str:
        """Find the setting and remember the state; raises `OptionError` where there is no such int."""
        name, self._source = self._plan.shrink, source
        self._setting: settings.Setting | None = None
        if name is not None and self._function is not None:
            self._setting = settings.find_in_arguments(name, self._namespace, "--shrink")
        elif name is not None:
            self._setting = settings.find_in_cell(source, name, self._namespace, "--shrink")
        self._size = self._setting.value if self._setting is not None else None
        self._rollback = Rollback(self._namespace, source, self._shell)
        return source

    def guards(self) -> tuple[Guard, ...]:
        """Return the guard, and inside it what sends the run to another device, if it is to."""
        return (self._guard,) if self._elsewhere is None else (self._guard, self._elsewhere)

    def next(self, outcome: BodyOutcome) -> str | None:
        """Return the code to run next, once state and memory are restored; None if the outcome stands."""
        error, self._fits = outcome.error_in_exec, outcome.error_in_exec is None
        failure = None if self._fits else self._guard.failure
        if not self._fits and failure is None:
            return None  # another error, or Ctrl-C
        line = failure.frames.line if failure is not None else None
        last = Try(
            self._size,
            self._elsewhere.device if self._elsewhere is not None else None,
            self._fits,
            line,
        )
        self._tries.append(last)
        if error is None or failure is None or self._elsewhere is not None:
            return None
        if self._size is not None and self._size > 1:
            self._size //= 2
            now = f"{self._plan.shrink} = {self._size}"
        else:
            device = _elsewhere(self._plan.fallback, failure.event.device)
            if device is None:
                return None
            variables = getattr(self._function, "__globals__", self._namespace)
            code = getattr(self._function, "__code__", None)
            self._elsewhere = DeviceRun(
                device, namespace=variables, filename=code and code.co_filename
            )
            self._guard.elsewhere, now = device, f"on {device}"
            self._size = self._setting.value if self._setting is not None else None
        outcome.error_in_exec = outcome.result = None
        self._guard.release_failure(error)
        self._guard.retries += 1
        del error
        lost = self._rollback.undo()
        release.reclaim()
        self._tries[-1] = replace(last, lost=lost)
        what = f"{self._plan.shrink} = {last.size}" if last.size is not None else "the cell"
        where = f" in line {line}" if line is not None else ""
        undone = f" Cannot be undone: {', '.join(lost)}." if lost else ""
        print(f"%%oomguard: {what} ran out of memory{where}; now {now}.{undone}")  # noqa: T201  # as it goes on
        if self._setting is None or self._size is None:
            return self._source
        text, variables = self._setting.with_value(self._size)
        self._namespace.update(variables)
        return text or self._source

    def end(self) -> None:
        """Restore the setting, unless the code passed with another value."""
        if self._setting is not None and not self._fits:
            self._namespace.update(self._setting.with_value(self._setting.value)[1])
        del self._rollback

    def finish(self, outcome: Outcome) -> list[tuple[Guard, object]]:
        """Return the report of the other device where there was one, and that of the runs with what helps."""
        report, setting = self._guard.settle(outcome), self._setting
        if report is None:
            return []
        is_smaller = self._fits and setting is not None and self._size != setting.value
        place = (
            setting.place(self._size)
            if is_smaller and setting is not None and self._size is not None
            else ""
        )
        report = replace(
            report, tries=tuple(self._tries), shrunk=self._plan.shrink or "", place=place
        )
        self._guard.publish(report)
        if self._guard.quiet:
            return []
        there = self._elsewhere
        reports = [(there, there.report)] if there is not None and there.report is not None else []
        return [*reports, (self._guard, report)]


def _elsewhere(name: str | None, failed: str | None) -> str | None:
    """Return the device to fall back to, or None where there is none but the one that failed."""
    if name == "auto" and failed != "cpu":  # the host's memory serves every device
        return (
            devices.most_free([each for each in allocator.accelerators() if each != failed])
            or "cpu"
        )
    device = None if name in (None, "auto") else devices.resolve(name)
    return None if device == failed else device


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
        raise OptionError(
            f"{function.__name__} only starts when it is called: decorate one that runs to its end"
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        guard.reset()
        runs = Rerun(plan, guard, bound.arguments, function=function)
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

    return cast("Function", call)


Versions = tuple[int, int | None]
"""How often a tensor, and its gradient if it has one, was changed in place."""


class Rollback:
    """The state before a run of `source`, which may bind variables of `namespace`; `undo` restores it, repeatedly.

    No tensor is copied, and nothing on an accelerator is kept alive: the run would have got that memory back when it
    rebound the name. Not seen are numpy arrays, files, and the attributes of other objects.
    """

    def __init__(
        self, namespace: MutableMapping[str, object], source: str = "", shell: object | None = None
    ) -> None:
        self._namespace, self._shell = namespace, shell
        cell = cell_code.read_cell(source)
        certain = cell.bound_first if cell is not None else frozenset[str]()
        # A shorter run may pass over the loop that binds a name: what can be kept of its old value is kept.
        self._remade = certain.union(cell.bound_in_blocks) if cell is not None else certain
        self._tensors: dict[int, tuple[weakref.ref[Any], Versions]] = {}
        self._reached: dict[str, set[int]] = {}  # which of them each variable reaches
        self._on_device: set[str] = set()
        if "torch" in sys.modules:
            self._read_tensors()
        mine = self._mine()
        self._bound = holders.Identities(mine)
        self._kept = {
            name: value for name, value in mine.items() if name not in self._on_device | certain
        }
        self._watched: dict[str, weakref.ref[Any]] = {}
        for name in mine.keys() - self._kept.keys():
            with contextlib.suppress(TypeError):  # not everything takes a weak reference
                self._watched[name] = weakref.ref(mine[name])
        self._lengths = {
            name: len(each) for name, each in mine.items() if type(each) in (list, dict, set)
        }
        self._random = list(_random_states())

    def undo(self) -> tuple[str, ...]:
        """Restore what can be restored, and return what cannot, in words."""
        lost = dict.fromkeys(
            [*self._changed_tensors(), *self._restore_lists(), *self._restore_names()]
        )
        for restore in self._random:
            restore()
        return tuple(lost)

    def _mine(self) -> dict[str, Any]:
        """Return the variables except the shell's own."""
        own = getattr(self._shell, "user_ns_hidden", {})
        return {name: value for name, value in list(self._namespace.items()) if name not in own}

    def _read_tensors(self) -> None:
        """Remember the tensors that the variables reach, and the variables that reach memory of a device."""
        graph = HeapGraph(holders.excluded_objects(self._namespace, self._shell))
        try:
            with undisturbed():
                graph.explore(holders.variables(self._namespace, self._shell))
                versions = _versions(graph.tensors.values())
                self._tensors = {
                    key: (weakref.ref(each), versions[key]) for key, each in graph.tensors.items()
                }
                for key, names in graph.roots_of().items():
                    is_there = plain(graph.tensors[key], "device").type not in ("cpu", "meta")
                    self._on_device |= set(names) if is_there else set()
                    for name in names:
                        self._reached.setdefault(name, set()).add(key)
        finally:
            graph.release()

    def _changed_tensors(self) -> Iterator[str]:
        """Remove first gradients, and yield the variables whose tensors were changed, each under its first name."""
        alive = {
            key: tensor
            for key, (found, _) in self._tensors.items()
            if (tensor := found()) is not None
        }
        changed = set()
        for key, (version, gradient) in (_versions(alive.values()) if alive else {}).items():
            before = self._tensors[key][1]
            if gradient is not None and before[1] is None:
                torch_private.TENSOR_BASE.get().grad.__set__(alive[key], None)
                gradient = None  # noqa: PLW2901
            changed |= {key} if (version, gradient) != before else set()
        for name, reached in self._reached.items():
            if changed & reached:
                yield f"changes in place of {name}"
            changed -= reached

    def _restore_lists(self) -> Iterator[str]:
        """Take away what was appended to lists, and yield what else has another length."""
        for name, before in self._lengths.items():
            value: Any = self._namespace.get(name)
            if type(value) is list and self._bound.is_still(name, value):
                del value[before:]
            if self._bound.is_still(name, value) and len(value) != before:
                yield f"changes in place of {name}"

    def _restore_names(self) -> Iterator[str]:
        for name in self._mine().keys() - set(self._bound):
            del self._namespace[name]
        for name in self._bound:
            if name in self._namespace and self._bound.is_still(name, self._namespace[name]):
                continue
            old = self._watched[name]() if name in self._watched else self._kept.get(name)
            if name in self._kept or old is not None:
                self._namespace[name] = old
            elif name not in self._remade:
                yield (
                    f"the new value of {name}"
                    if name in self._namespace
                    else f"the deletion of {name}"
                )
            elif (
                name in self._on_device
            ):  # the run makes a new one; both at once would not fit either
                self._namespace.pop(name, None)


def _versions(tensors: Collection[Any]) -> dict[int, Versions]:
    """Return the versions of tensors by their `id`."""
    with undisturbed():
        leaves = kinds.leaves(tensors)
        gradients = {
            id(leaves[place]): _version(alias)
            for place, alias in kinds.peek_gradients(leaves) or ()
        }
        return {id(each): (_version(each), gradients.get(id(each))) for each in tensors}


def _version(tensor: Any) -> int:
    with contextlib.suppress(Exception):  # an inference tensor has no count
        return int(torch_private.VERSION.get()(tensor))
    return 0


def _random_states() -> Iterator[Callable[[], object]]:
    """Yield what restores the random states of Python, numpy and torch, any number of times.

    Only devices in use are asked: any other has drawn nothing yet, and asking would initialise it.
    """
    yield partial(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield partial(numpy.set_state, numpy.get_state())
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield partial(torch.set_rng_state, torch.get_rng_state())
        for device in allocator.all_device_stats():
            backend, index = Device.parse(device)
            module: Any = allocator.device_module(backend)
            if hasattr(module, "get_rng_state"):
                place = () if backend_named(backend).has_one_device else (index,)
                yield partial(module.set_rng_state, module.get_rng_state(*place), *place)
