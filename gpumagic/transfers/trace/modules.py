"""Time and memory by module: each has its own figures, without those of the modules in it.

So all of them and what ran outside add up to what the run took. Which module holds the memory at the peak is in the
ledger of blocks: a parameter, gradient or optimizer state is that of its module, a result of an operator that of the
module that ran. Imports torch at its top.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import torch

from gpumagic.heap import branches
from gpumagic.heap.branches import registered
from gpumagic.heap.running_module import RunningModule
from gpumagic.heap.storages import local_of
from gpumagic.memory.ledger import OF_MODULES, REST
from gpumagic.transfers.trace.memory import Owner, TracedMemory
from gpumagic.transfers.trace.report import ModuleReport, ModuleRow


class ModuleLog(RunningModule):
    """The modules of one run: their calls and times, and whose the memory of a device is."""

    def __init__(self, device: str, namespace: Mapping[str, Any]) -> None:
        super().__init__(self._switch)
        self.memory = TracedMemory(device, self._kept)
        self._namespace = namespace
        self._calls: Counter[int | None] = Counter()
        self._seconds = defaultdict[int | None, float](float), defaultdict[int | None, float](float)
        """In forward, or outside of modules, and in backward."""
        self._now: int | None = None
        self._was_backward = False
        self._since = perf_counter()

    def report(self) -> ModuleReport:
        """Return the rows of the modules that ran or hold memory."""
        book, taken, freed = self.memory.ledger()
        names: dict[int | None, str] = {None: REST, **dict(enumerate(self.names))}
        at_peak = dict(book.by_module(0, self.names))
        rows = []
        for number, path in names.items():
            figures = (
                self._calls[number], self._seconds[0][number], self._seconds[1][number], taken[number], freed[number],
            )  # fmt: skip
            parts = at_peak.pop(path, {})  # once: modules that are made anew share a name
            if any(figures) or parts:
                parts["other"] = parts.get("other", 0) + parts.pop("earlier cells", 0)
                held = {kind.replace(" ", "_"): parts.get(kind, 0) for kind in OF_MODULES}
                rows.append(ModuleRow(path, *figures, **held, at_peak=sum(held.values())))
        return ModuleReport(self.memory.device, tuple(rows), book.accounts[0].peak.allocated)

    def unwatch(self) -> None:
        """Remove every hook, and end the time of what runs; idempotent."""
        super().unwatch()
        self._end_turn(perf_counter())

    def entered(self, module: torch.nn.Module) -> None:
        """Count the call."""
        self._calls[self.number(module)] += 1

    def _switch(self, number: int | None) -> None:
        now = perf_counter()
        self._end_turn(now)
        self._now, self._was_backward = number, self.in_backward
        self.memory.module_runs(number, self.in_backward, now)

    def _end_turn(self, now: float) -> None:
        self._seconds[self._was_backward][self._now] += now - self._since
        self._since = now

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
