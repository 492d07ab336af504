"""Time and memory by module: the difference of the running sums from when one module runs to when the next does.

Each module has its own figures, without those of the modules in it, so that all of them and what ran outside add up to
what the run took. Which module holds the memory at the peak is read from the allocator's blocks: a parameter, gradient
or optimizer state is that of its module, a result of an operator that of the module that ran.

The allocator is asked for its blocks whenever the memory has grown by `GROWTH` since it was last asked, so that this is
at most so far below the highest reading. Imports torch at its top.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.heap import branches
from gpumagic.heap.modules import registered
from gpumagic.heap.running_module import RunningModule
from gpumagic.memory import segments
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.transfers.trace.meter import Meter
from gpumagic.transfers.trace.report import MAX_SPANS, ModuleReport, ModuleRow, Span

GROWTH = 1.02
OUTSIDE = ""
"""The path of what belongs to no module."""
KINDS = ("parameters", "buffers", "optimizer state", "gradients", "activations", "temporaries", "other")
MODULES = 1
"""The thread of the modules' spans: their runs lie side by side, whichever thread takes them."""
_Owner = tuple[int | None, str]
"""The module, and what the memory is for."""


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
        self._meter = meter
        self._namespace = namespace
        self._now: int | None = None
        self._was_backward = False
        self._sums: dict[int | None, _ModuleSum] = {None: _ModuleSum()}
        self._memory = meter.memory()
        self._at = time.perf_counter()
        self._seconds = self._at - meter.own_seconds
        self._spans: list[tuple[int, bool, float, float]] = []
        self._results: dict[int, _Owner] = {}
        """By address: whose the operator's result is that was last put there."""
        self._asked_at = 0
        self._at_peak: dict[int | None, Counter[str]] = {}

    def made(self, addresses: Iterable[int], now: AllocatorStats | None) -> None:
        """Note the results of an operator that has just run, and the memory after it."""
        part = "temporaries" if self.in_backward else "activations"
        self._results.update((each, (self._now, part)) for each in addresses)
        if now is not None and now.allocated > GROWTH * self._asked_at:
            self._asked_at = now.allocated
            self._at_peak = self._by_owner()

    def report(self, started: float) -> ModuleReport:
        """Return the rows of the modules that ran or hold memory; spans begin at a time of `time.perf_counter`."""
        self._add()
        names: dict[int | None, str] = {None: OUTSIDE, **dict(enumerate(self.names))}
        rows = []
        for number, path in names.items():
            found, parts = self._sums.get(number, _ModuleSum()), self._at_peak.get(number, Counter())
            if found != _ModuleSum() or parts:
                held = {kind.replace(" ", "_"): parts[kind] for kind in KINDS}
                taken = found.calls, found.seconds, found.backward_seconds, found.allocated, found.freed
                rows.append(ModuleRow(path, *taken, **held, at_peak=sum(parts.values())))
        spans = tuple(
            Span(f"{self.names[number]}{' (backward)' if back else ''}", MODULES, start - started, end - start)
            for number, back, start, end in self._spans
        )
        return ModuleReport(self._meter.device, tuple(rows), self._asked_at, spans)

    # ---- Turns

    def entered(self, module: torch.nn.Module) -> None:
        """Count the call."""
        self._sums.setdefault(self.number(module), _ModuleSum()).calls += 1

    def _switch(self, number: int | None) -> None:
        self._add()
        self._now, self._was_backward = number, self.in_backward

    def _add(self) -> None:
        """Give what was taken since another module ran to the one that ran until now."""
        before, seconds, at = self._memory or AllocatorStats(0, 0, 0), self._seconds, self._at
        self._at = time.perf_counter()
        self._seconds = self._at - self._meter.own_seconds
        self._memory = self._meter.memory()
        found = self._sums.setdefault(self._now, _ModuleSum())
        if self._now is not None and len(self._spans) < MAX_SPANS:
            self._spans.append((self._now, self._was_backward, at, self._at))
        if self._was_backward:
            found.backward_seconds += self._seconds - seconds
        else:
            found.seconds += self._seconds - seconds
        now = self._memory or before
        found.allocated += now.total - before.total
        found.freed += now.freed - before.freed
        self._meter.own_seconds += time.perf_counter() - self._at

    # ---- Memory

    def _by_owner(self) -> dict[int | None, Counter[str]]:
        """Return the bytes of every allocated block by module and by what they are for."""
        owners = {**self._results, **dict(self._kept())}
        found: dict[int | None, Counter[str]] = {}
        backend = Device.parse(self._meter.device).backend
        for block in segments.allocated_blocks(backend):
            if block.device == self._meter.device:
                number, part = owners.get(block.address, (None, "other"))
                found.setdefault(number, Counter())[part] += block.size
        return found

    def _kept(self) -> Iterator[tuple[int, _Owner]]:
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


def _address(tensor: Any, owner: _Owner) -> Iterator[tuple[int, _Owner]]:
    if issubclass(type(tensor), torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError, ValueError):  # fake, lazy, or without memory of its own
            return
        if address:
            yield address, owner
