"""One dry run on fake tensors: build the device, unpack the notebook, run the cell."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType
from typing import Any

import torch

from gpumagic.backends import IN_TREE
from gpumagic.dryrun import parts
from gpumagic.dryrun.wire import DeviceOutcome, Failure, Request
from gpumagic.memory.ledger import Place
from gpumagic.memory.presets import GPUS
from gpumagic.worker import ranks, sandbox
from gpumagic.worker.fake import backend
from gpumagic.worker.fake.allocator import Allocator, FakeAccount, FakeLedger
from gpumagic.worker.fake.names import Names, generators
from gpumagic.worker.fake.operators import Operators
from gpumagic.worker.fake.storages import Form, Storages, key_of
from gpumagic.worker.reading import FakeReading
from gpumagic.worker.run import Figures, Run, Send, failure_of

_LATER = 0.001
"""Seconds."""


class FakeRun(Run):
    """A run on devices without bytes."""

    def __init__(self, request: Request, watcher: socket.socket, send: Send) -> None:
        super().__init__(request, watcher, send)
        self.ledger = FakeLedger(_accounts(request))
        known = request.devices.backend
        backend.gpu = GPUS[request.devices.gpu or "A100"]
        self._name = name = backend.OURS if known in IN_TREE else known
        module = backend.register(name, self.ledger)
        self._storages = Storages(self.ledger.take, self._on_storage_freed)
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
        """Bytes allocated on each device when the cell begins."""

    def run(self) -> None:
        """Run the cell and send the outcome."""
        self.close_in()
        ranks.take_part(self.request, self.send, self.assumed.setdefault)
        self.ledger.unpacking = True

        def coming(
            part: parts.StoragePart,
        ) -> contextlib.AbstractContextManager[object]:
            self.ledger.address = part.address
            return contextlib.nullcontext()

        self.unpack(coming)
        self.guesses.fill_blanks(parts.blanks)
        for device, nbytes in enumerate(self.request.devices.base):
            if nbytes > 0:
                self.kept.append(
                    self._storages.make(Form((nbytes,), (1,), torch.uint8, device))
                )
            self.ledger.hold(device)
        self.ledger.start()
        self._before = self.ledger.figures()
        self.operators.give_up = lambda error: self.send(self.failed(error))

        def note(mark: Any, *args: Any) -> None:
            mark(self.ledger, *args)

        self.execute(
            note,
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

    def failure(self, error: BaseException) -> Failure:
        """Return how the cell failed."""
        line = self.ledger.place.line if self.ledger.in_backward else None
        return failure_of(error, self.request.code.filename, line)

    def allocated(self) -> tuple[int, int]:
        """Return the peak and the allocated bytes of all devices."""
        peak = now = 0
        for account in self.ledger.accounts:
            peak += account.peak.allocated
            now += account.allocated
        return peak, now

    def account(self, failure: Failure | None) -> Figures:
        """Return the ledger, each device's figures, and what the engine does not know."""
        self.ledger.settle()
        self.ledger.where = Place
        if not self.is_brief:
            self.modules.label_remaining_blocks(self.namespace)
        operators = self.operators.unknown()
        if operators:
            self.unknown.setdefault(
                f"what CUDA's kernels take for themselves in {', '.join(operators)}"
            )
        devices = []
        for account, before in zip(self.ledger.accounts, self._before, strict=True):
            devices.append(
                DeviceOutcome(
                    before=before,
                    peak=account.peak.allocated,
                    after=account.allocated,
                    reserved=account.allocator.peak_reserved,
                    traffic=account.traffic,
                    failed=account.allocator.failed,
                )
            )
        return Figures(
            ledger=self.ledger, devices=devices, has_unknown_parts=bool(operators)
        )

    def _on_storage_freed(self, key: int) -> None:
        self._contents.known.forget(key)
        self.ledger.give_back(key)


def _accounts(request: Request) -> list[FakeAccount]:
    """Return an account for each device, with what lies there in the notebook."""
    devices = request.devices
    accounts = []
    for capacity, segments in zip(devices.capacities, devices.segments, strict=True):
        account = FakeAccount(allocator=Allocator(capacity, devices.cuts_to_size))
        for segment in segments or ():
            account.preexisting |= account.allocator.lay_out(segment)
        accounts.append(account)
    return accounts
