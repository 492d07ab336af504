"""One dry run, in a process of its own: build the device, unpack the notebook, run the cell, send the outcome."""

from __future__ import annotations

import builtins
import contextlib
import signal
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from gpumagic.dryrun import parts
from gpumagic.dryrun.worker import cell, deferred_fills, ranks, sandbox
from gpumagic.dryrun.worker.deferred_fills import DeferredFills
from gpumagic.dryrun.worker.fake import backend
from gpumagic.dryrun.worker.fake.accounts import FakeAccount, FakeLedger
from gpumagic.dryrun.worker.fake.allocator import Allocator
from gpumagic.dryrun.worker.fake.autocast import Autocast
from gpumagic.dryrun.worker.fake.contents import Contents
from gpumagic.dryrun.worker.fake.names import Names
from gpumagic.dryrun.worker.fake.operators import Operators
from gpumagic.dryrun.worker.fake.scratch import without_rule
from gpumagic.dryrun.worker.guesses import Guesses
from gpumagic.dryrun.worker.kinds import Kinds, Lines
from gpumagic.dryrun.worker.models import Models
from gpumagic.dryrun.worker.modules import Modules
from gpumagic.dryrun.worker.noted import Numbers
from gpumagic.dryrun.worker.passes import File, Passes
from gpumagic.dryrun.worker.sandbox import Magics
from gpumagic.dryrun.worker.storages import Storages, key_of
from gpumagic.memory import ledger
from gpumagic.memory.ledger import Place

IN_TREE = frozenset({"cuda", "xpu", "mps"})


class FakeRun:
    """The device and all that watches it.

    Args:
        request: what `dryrun.run` sends: see there.
        send: sends the outcome and ends the process.
    """

    def __init__(self, request: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
        self.request = request
        self._send = send
        self.notes = cell.Notes()
        self._lines = Lines(request["filename"], request["sources"])
        accounts = [FakeAccount(allocator=Allocator(each, request["cuts_to_size"])) for each in request["capacities"]]
        for account, segments in zip(accounts, request["segments"], strict=True):
            account.lay_out(segments or ())
        self.ledger = FakeLedger(accounts)
        known = request["backend"]
        name = backend.OURS if known in IN_TREE else known
        module = backend.register(name, self.ledger)
        self._storages = Storages(self.ledger.take, self._gone)
        self.ledger.settle = self._storages.settle
        self._guesses = Guesses(request, self.notes.assume, self._lines.reading)
        self._contents = contents = Contents(name, self._storages, self._guesses)
        self._operators = Operators(module, self._storages, self.ledger, contents, self.notes.assume, known == "cuda")
        self._operators.register()
        Autocast(name).register()
        self._kinds = Kinds(self.ledger, name)
        self._name = name
        self._modules = Modules(self.ledger, self._key_on_device)
        self._names: list[str] = []
        if known in IN_TREE:
            Names(known).install(module)
        sandbox.arrange(module, self.notes.assume)
        self._passes = Passes(request["filename"], request["sources"])
        self._kept: list[Any] = []
        self._before: list[int] = []

    def run(self) -> None:
        """Run the cell and send the outcome, as plain data."""
        sandbox.block(self.notes, self.request["watcher"])  # before modules of the user's are imported
        ranks.take_part(self.request, self._send)
        scopes = self._unpack()
        self._guesses.fill_blanks(parts.blanks)
        for device, nbytes in enumerate(self.request["base"]):
            if nbytes > 0:
                self._kept.append(self._storages.new((nbytes,), (1,), torch.uint8, device))
            self.ledger.hold(device)
        for account, pinned, segments in zip(
            self.ledger.accounts, self.request["pinned"], self.request["segments"], strict=True
        ):
            if segments is None:
                account.allocator.shrink(pinned - account.allocator.reserved)
        self.ledger.start()
        self._before = self.ledger.figures()
        self._operators.give_up = lambda error: self._send(self._failed(error))
        if not self.request["is_brief"]:
            self._kinds.watch()
        self._fills = DeferredFills(self._guesses.fill, draws=not self.request["guess"])
        self._fills.install()
        self._guesses.leave = self._fills.leave
        Numbers(self._guesses).install()
        self.notes.effects.clear()
        namespace = scopes[0]
        cell.prepare(self.request, namespace, Magics(namespace, self.notes.effect))
        self._models = Models(namespace)
        self._namespace = namespace
        if not self.request["is_brief"]:
            self._modules.watch(namespace)
        self._clock = cell.Clock(self.request["time_limit"], self._look, self._out_of_time)
        self._clock.start()
        self._send(self._execute(namespace))

    def _look(self) -> tuple[list[int], int, int]:
        accounts = self.ledger.accounts
        return (
            self._passes.runs(),
            sum(each.peak.allocated for each in accounts),
            sum(each.allocated for each in accounts),
        )

    def _out_of_time(self, frame: FrameType | None) -> None:
        """Tell how far it came; an operator that runs ends first."""
        running = [(each.filename, each.lineno or 0) for each in traceback.extract_stack(frame)]
        if self._operators.is_running:
            self._operators.give_up_after = lambda: self._stop(running)
        else:
            self._stop(running)

    def _stop(self, running: list[File]) -> None:
        self.notes.out_of_time(self.request["time_limit"])
        flat = self._passes.flat(self._clock.flat_from())
        self._send({**self._outcome(None, running), "is_open": True, "flat": flat})

    def _gone(self, key: int) -> None:
        self._contents.known.forget(key)
        self.ledger.give_back(key)

    def _key_on_device(self, tensor: torch.Tensor) -> int:
        with torch._C.DisableTorchFunction():  # under `Names` the device would say another name
            is_there = tensor.device.type == self._name and tensor.layout is torch.strided
            return key_of(tensor) if is_there else 0

    def _coming(self, part: parts.StoragePart) -> contextlib.AbstractContextManager[object]:
        self.ledger.address = part.address
        return contextlib.nullcontext()

    def _unpack(self) -> list[dict[str, Any]]:
        scopes: list[dict[str, Any]] = [{} for _ in range(self.request["scopes"])]
        parts.coming, parts.find_code = self._coming, self._passes.find_code
        for scope in scopes:
            scope["__builtins__"] = builtins
        self.ledger.unpacking = True
        cell.unpack(self.request["data"], scopes)
        return scopes

    def _execute(self, namespace: dict[str, Any]) -> dict[str, Any]:
        """Run the cell; return the outcome."""
        source, filename = self.request["source"], self.request["filename"]
        try:
            code = None if source is None else cell.compiled(source, filename, self._passes.change)
            self.ledger.where = self._lines.where
            cell.execute(code, namespace)
        except SystemExit:
            pass
        except BaseException as error:
            return self._failed(error)
        return self._outcome(None, ())

    def _failed(self, error: BaseException) -> dict[str, Any]:
        line = self.ledger.place.line if self.ledger.in_backward else None
        running = [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]
        return self._outcome(cell.failure(error, self.request["filename"], line), running)

    def _outcome(self, error: dict[str, Any] | None, running: Iterable[File]) -> dict[str, Any]:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._fills.draws_others:
            self.notes.assume(deferred_fills.OTHERS)
        self.ledger.settle()
        self.ledger.where = Place
        if not self.request["is_brief"]:
            self._kinds.look_around()
            self._names = self._modules.look_around(self._namespace)
        unknown = without_rule(self._operators.seen) if self.request["backend"] == "cuda" else []
        if unknown:
            self.notes.not_known(f"what CUDA's kernels take for themselves in {', '.join(unknown)}")
        devices = [self._device(index, account) for index, account in enumerate(self.ledger.accounts)]
        return {
            "devices": devices, "lines": ledger.line_rows(self.ledger),
            "timeline": ledger.timeline(self.ledger), "error": error,
            "operators": self.ledger.operators, "assumed": list(self.notes.assumed),
            "unknown": list(self.notes.unknown), "effects": list(self.notes.effects),
            "passes": self._passes.counts(running), "is_open": False, **self._guesses.told(),
            "models": self._models.as_data(), "versions": {"torch": torch.__version__}, "lacks": bool(unknown),
            "modules": max(devices, key=lambda each: each["peak"])["modules"],
        }  # fmt: skip

    def _device(self, index: int, account: FakeAccount) -> dict[str, Any]:
        return {
            "peak": account.peak.allocated, "before": self._before[index], "after": account.allocated,
            "reserved": account.allocator.peak_reserved, "failed": account.allocator.failed,
            "traffic": [self.ledger.operators], "at": ledger.point(account.peak),
            "failure": None if account.failure is None else ledger.point(account.failure),
            "breakdown": self.ledger.breakdown(index),
            "modules": [] if self.request["is_brief"] else self.ledger.by_module(index, self._names),
        }  # fmt: skip
