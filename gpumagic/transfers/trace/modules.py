"""Time and memory by module: each has its own figures, without those of the modules in it.

So all of them, backward passes and what else ran outside add up to what the run took. Which module holds the memory at
the peak is known from where the blocks are: a parameter, gradient or optimizer state is that of its module, a result of
an operator that of the module that ran.

A module runs while the function of torch's by which all are called does, of which Python tells as of any code that is
traced; hooks would take longer, and `torch.compile` would compile again for them. Which module's part of a backward
pass runs, only a hook of each node of the graph could tell, which takes as long as the node. Imports torch at its top.
"""

from __future__ import annotations

import inspect
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from threading import get_ident
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from gpumagic.heap import branches
from gpumagic.heap.branches import registered
from gpumagic.heap.named_modules import NamedModules
from gpumagic.heap.storages import local_of
from gpumagic.memory.ledger import OF_MODULES, REST
from gpumagic.transfers.trace.memory import Owner, TracedMemory
from gpumagic.transfers.trace.report import BACKWARD, ModuleReport, ModuleRow

_CALL = torch.nn.Module._call_impl.__code__
CALLS = (_CALL, *(inspect.unwrap(each).__code__ for each in (torch.autograd.backward, torch.autograd.grad)))
"""Torch's code by which modules and backward passes are run."""
_OUTSIDE = -1


class ModuleLog(NamedModules):
    """The modules of one run, filled by `events`: their calls and times, and whose the memory of a device is."""

    def __init__(self, device: str, namespace: Mapping[str, Any]) -> None:
        super().__init__()
        self.name_all(namespace)
        self._backward = len(self.names)
        self.names.append(BACKWARD)
        self.memory = TracedMemory(device, self._kept)
        self._namespace = namespace
        self._thread = get_ident()
        self._stacks: dict[int, list[int]] = defaultdict(list)
        self._turns = array("q")
        """Times, with the number of the module that runs from then on, and 1 where it begins."""
        self.close()

    def enter(self, code: CodeType, frame: FrameType) -> None:
        """A module or a backward pass begins in this thread."""
        thread = get_ident()
        stack = self._stacks[thread]
        number = self.number(frame.f_locals["self"]) if code is _CALL else self._backward
        is_again = number == self._backward and stack[-1:] == [number]  # torch's function modes have it called twice
        stack.append(number)
        self._turn(thread, number, not is_again)

    def leave(self, code: CodeType) -> None:
        """It ends; what checkpoints run again in a thread of autograd's is within the backward pass of the run's."""
        thread = get_ident()
        stack = self._stacks[thread]
        if stack:  # else it began before the trace
            stack.pop()
        outer = stack or self._stacks[self._thread]
        self._turn(thread, outer[-1] if outer else _OUTSIDE, 0)

    def close(self) -> None:
        """End the time of what runs."""
        self._turn(get_ident(), _OUTSIDE, 0)

    def _turn(self, thread: int, number: int, calls: int) -> None:
        at = perf_counter_ns()
        self._turns.extend((at, number, calls))
        if thread == self._thread:
            self.memory.begin_turn(at)

    def report(self) -> ModuleReport:
        """Return the rows of the modules that ran or hold memory."""
        turns = np.array(self._turns).reshape(-1, 3)
        taken, freed, at_peak = self.memory.by_module(turns, self._backward)
        places, count = turns[:, 1] + 1, len(self.names) + 1
        calls = np.bincount(places, turns[:, 2], count).astype(int).tolist()
        seconds = np.bincount(places[:-1], np.diff(turns[:, 0]) / 1e9, count).tolist()
        rows = []
        for number, path in ((_OUTSIDE, REST), *enumerate(self.names)):
            figures = calls[number + 1], seconds[number + 1], taken[number], freed[number]
            held = at_peak[number]
            if any(figures) or held:
                parts = {kind.replace(" ", "_"): held[kind] for kind in OF_MODULES}
                rows.append(ModuleRow(path, *figures, **parts, at_peak=sum(parts.values())))
        return ModuleReport(self.memory.device, tuple(rows), sum(row.at_peak for row in rows))

    def _kept(self) -> Iterator[Owner]:
        """Yield where parameters, buffers, gradients and optimizers' state are, with their modules."""
        of_parameter: dict[int, int] = {}
        for module, number in self.numbered():
            for _, each in registered(module, "_parameters"):
                of_parameter[id(each)] = number
                yield from _owner(each, number, "parameters")
                yield from _owner(each.grad, number, "gradients")
            for _, buffer in registered(module, "_buffers"):
                yield from _owner(buffer, number, "buffers")
        for value in list(self._namespace.values()):
            if issubclass(type(value), torch.optim.Optimizer):
                state = branches.attributes_of(value).get("state")
                for leaf, entries in list(dict.items(state)) if isinstance(state, dict) else []:
                    for each in dict.values(entries) if isinstance(entries, dict) else ():
                        yield from _owner(each, of_parameter.get(id(leaf), _OUTSIDE), "optimizer state")


def _owner(tensor: Any, module: int, kind: str) -> Iterator[Owner]:
    tensor = local_of(tensor)
    if issubclass(type(tensor), torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError, ValueError):  # fake, lazy, or without memory of its own
            return
        if address:
            yield Owner(address, module, kind)
