"""One dry run on fake tensors: build the device, unpack the notebook, run the cell."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from gpumagic.dryrun import parts
from gpumagic.memory.ledger import Place
from gpumagic.memory.presets import GPUS
from gpumagic.worker import ranks, sandbox
from gpumagic.worker.fake import backend
from gpumagic.worker.fake.allocator import Allocator, FakeAccount, FakeLedger
from gpumagic.worker.fake.names import Names, generators
from gpumagic.worker.fake.operators import Operators
from gpumagic.worker.fake.storages import Form, Storages, key_of
from gpumagic.worker.reading import FakeReading
from gpumagic.worker.run import Outcome, Run, failure

IN_TREE = frozenset({"cuda", "xpu", "mps"})
_LATER = 0.001
"""Seconds."""


class FakeRun(Run):
    """A run on devices without bytes."""

    def __init__(self, request: dict[str, Any], send: Callable[[Outcome], None]) -> None:
        super().__init__(request, send)
        accounts = [
            FakeAccount(allocator=Allocator(each, request["cuts_to_size"]))
            for each in request["capacities"]
        ]
        for account, segments in zip(accounts, request["segments"], strict=True):
            for segment in segments or ():
                account.preexisting |= account.allocator.lay_out(segment)
        self.ledger = FakeLedger(accounts)
        known = request["backend"]
        backend.gpu = GPUS[request["gpu"] or "A100"]
        self._name = name = backend.OURS if known in IN_TREE else known
        module = backend.register(name, self.ledger)
        self._storages = Storages(self.ledger.take, self._gone)
        self.ledger.settle = self._storages.settle
        self._contents = FakeReading(name, self._storages, key_of, self.guesses)
        self.known = self._contents.known
        self.operators = Operators(
            module,
            self._storages,
            self.ledger,
            self._contents,
            self.assumed.setdefault,
            known == "cuda",
        )
        backend.Autocast(name)
        torch.Generator = generators(known)
        if known in IN_TREE:
            Names(known).install(module)
        sandbox.arrange(module, self.assumed.setdefault)
        self._before: list[int] = []

    def run(self) -> None:
        """Run the cell and send the outcome."""
        self.close_in()
        ranks.take_part(self.request, self.send, self.assumed.setdefault)
        self.ledger.unpacking = True

        def coming(part: parts.StoragePart) -> contextlib.AbstractContextManager[object]:
            self.ledger.address = part.address
            return contextlib.nullcontext()

        self.unpack(coming)
        self.guesses.fill_blanks(parts.blanks)
        for device, nbytes in enumerate(self.request["base"]):
            if nbytes > 0:
                self.kept.append(self._storages.make(Form((nbytes,), (1,), torch.uint8, device)))
            self.ledger.hold(device)
        self.ledger.start()
        self._before = self.ledger.figures()
        self.operators.give_up = lambda error: self.send(self.failed(error))
        self.execute(
            lambda mark, *args: mark(self.ledger, *args),
            lambda tensor: key_of(tensor) if tensor.device.type == self._name else 0,
        )

    def begin(self) -> None:
        """Let the cell's lines be found."""
        self.ledger.where = self.lines.where

    def out_of_time(self, frame: FrameType | None) -> None:
        """Tell how far it came; an operator that runs ends first."""
        if self.operators.is_running:
            signal.setitimer(signal.ITIMER_REAL, _LATER)
        else:
            super().out_of_time(frame)

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return how the cell failed."""
        line = self.ledger.place.line if self.ledger.in_backward else None
        return failure(error, self.request["filename"], line)

    def allocated(self) -> tuple[int, int]:
        """Return the peak and the allocated bytes of all devices."""
        accounts = self.ledger.accounts
        return sum(each.peak.allocated for each in accounts), sum(
            each.allocated for each in accounts
        )

    def account(
        self, error: dict[str, Any] | None
    ) -> tuple[FakeLedger, list[dict[str, Any]], Outcome]:
        """Return the ledger, each device's figures, and what the engine does not know."""
        self.ledger.settle()
        self.ledger.where = Place
        if not self.is_brief:
            self.names = self.modules.look_around(self.namespace)
        unknown = self.operators.unknown()
        if unknown:
            self.unknown.setdefault(
                f"what CUDA's kernels take for themselves in {', '.join(unknown)}"
            )
        devices = [
            {
                "peak": account.peak.allocated,
                "before": before,
                "after": account.allocated,
                "reserved": account.allocator.peak_reserved,
                "failed": account.allocator.failed,
                "traffic": account.traffic,
            }
            for account, before in zip(self.ledger.accounts, self._before, strict=True)
        ]
        return self.ledger, devices, {"lacks": bool(unknown)}

    def _gone(self, key: int) -> None:
        self._contents.known.forget(key)
        self.ledger.give_back(key)
