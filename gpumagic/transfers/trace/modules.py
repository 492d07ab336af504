"""Time and memory by module: the difference of the running sums from when one module runs to when the next does.

Each module has its own figures, without those of the modules in it, so that all of them and what ran outside add up to
what the run took. Which module holds the memory at the peak is in the ledger of blocks: a parameter, gradient or
optimizer state is that of its module, a result of an operator that of the module that ran. Imports torch at its top.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.heap import branches
from gpumagic.heap.modules import registered
from gpumagic.heap.running_module import RunningModule
from gpumagic.heap.storages import local_of
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.ledger import REST, Ledger
from gpumagic.memory.parts import OF_MODULES
from gpumagic.transfers.trace.lines import Meter
from gpumagic.transfers.trace.memory import Owner, TracedMemory
from gpumagic.transfers.trace.report import ModuleReport, ModuleRow


@dataclass(slots=True)
class _ModuleSum:
    calls: int = 0
    seconds: float = 0.0
    backward_seconds: float = 0.0
    allocated: int = 0
    freed: int = 0


class ModuleLog(RunningModule):
    """The sums of one run by module."""

    def __init__(self, meter: Meter, namespace: Mapping[str, Any]) -> None:
        super().__init__(self._switch)
        self.memory = TracedMemory(meter.device, self._kept)
        self._meter = meter
        self._namespace = namespace
        self._now: int | None = None
        self._was_backward = False
        self._sums: dict[int | None, _ModuleSum] = {None: _ModuleSum()}
        self._before = meter.memory()
        self._at = time.perf_counter()
        self._seconds = self._at - meter.own_seconds

    def report(self, book: Ledger) -> ModuleReport:
        """Return the rows of the modules that ran or hold memory."""
        self._add()
        names: dict[int | None, str] = {None: REST, **dict(enumerate(self.names))}
        at_peak = dict(book.by_module(0, self.names))
        rows = []
        for number, path in names.items():
            found, parts = (
                self._sums.get(number, _ModuleSum()),
                at_peak.pop(path, {}),
            )  # once: modules that are made anew share a name
            if found != _ModuleSum() or parts:
                parts["other"] = parts.get("other", 0) + parts.pop("earlier cells", 0)
                held = {kind.replace(" ", "_"): parts.get(kind, 0) for kind in OF_MODULES}
                taken = found.calls, found.seconds, found.backward_seconds, found.allocated, found.freed
                rows.append(ModuleRow(path, *taken, **held, at_peak=sum(held.values())))
        return ModuleReport(self._meter.device, tuple(rows), book.accounts[0].peak.allocated)

    # ---- Turns

    def entered(self, module: torch.nn.Module) -> None:
        """Count the call."""
        self._sums.setdefault(self.number(module), _ModuleSum()).calls += 1

    def _switch(self, number: int | None) -> None:
        now = self._add()
        self._now, self._was_backward = number, self.in_backward
        self.memory.module_runs(number, self.in_backward, self._at, now)
        self._meter.own_seconds += time.perf_counter() - self._at

    def _add(self) -> AllocatorStats | None:
        """Give what was taken since another module ran to the one that ran until now; return the memory."""
        before, seconds = self._before or AllocatorStats(0, 0, 0), self._seconds
        self._at = time.perf_counter()
        self._seconds = self._at - self._meter.own_seconds
        self._before = self._meter.memory()
        found = self._sums.setdefault(self._now, _ModuleSum())
        if self._was_backward:
            found.backward_seconds += self._seconds - seconds
        else:
            found.seconds += self._seconds - seconds
        now = self._before or before
        found.allocated += now.total - before.total
        found.freed += now.freed - before.freed
        return self._before

    # ---- Memory

    def _kept(self) -> Iterator[tuple[int, Owner]]:
        """Yield the addresses of parameters, buffers, gradients and optimizers' state, with their modules."""
        of_parameter: dict[int, int] = {}
        for module, number in self.numbered():
            for _, each in registered(module, "_parameters"):
                of_parameter[id(each)] = number
                yield from _address(each, (number, "parameters"))
                yield from _address(each.grad, (number, "gradients"))
            for _, buffer in registered(module, "_buffers"):
                yield from _address(buffer, (number, "buffers"))
        for value in list(self._namespace.values()):
            if issubclass(type(value), torch.optim.Optimizer):
                state = branches.attributes_of(value).get("state")
                for leaf, entries in list(dict.items(state)) if isinstance(state, dict) else []:
                    for each in dict.values(entries) if isinstance(entries, dict) else ():
                        yield from _address(each, (of_parameter.get(id(leaf)), "optimizer state"))


def _address(tensor: Any, owner: Owner) -> Iterator[tuple[int, Owner]]:
    tensor = local_of(tensor)
    if issubclass(type(tensor), torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError, ValueError):  # fake, lazy, or without memory of its own
            return
        if address:
            yield address, owner
