"""One dry run, in a process of its own: build the device, unpack the notebook, run the cell, give account."""

from __future__ import annotations

import builtins
import signal
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from gpumagic.dryrun import parts
from gpumagic.dryrun.stage import backend, cell, ledger, surroundings, unwritten
from gpumagic.dryrun.stage.arena import Arena
from gpumagic.dryrun.stage.autocast import Autocast
from gpumagic.dryrun.stage.contents import Contents
from gpumagic.dryrun.stage.counted import File, Passes
from gpumagic.dryrun.stage.guesses import Guesses
from gpumagic.dryrun.stage.kinds import Kinds, Lines
from gpumagic.dryrun.stage.ledger import Account, Ledger, Place
from gpumagic.dryrun.stage.models import Models
from gpumagic.dryrun.stage.modules import Modules, by_module
from gpumagic.dryrun.stage.names import OURS, Names
from gpumagic.dryrun.stage.operators import Operators
from gpumagic.dryrun.stage.scratch import without_rule
from gpumagic.dryrun.stage.storages import Storages, key_of
from gpumagic.dryrun.stage.surroundings import Magics
from gpumagic.dryrun.stage.unwritten import Unwritten

IN_TREE = frozenset({"cuda", "xpu", "mps"})


class FakeRun:
    """The device and all that watches it.

    Args:
        order: what `dryrun.run` sends: see there.
        tell: sends the account and ends the process.
    """

    def __init__(self, order: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        self.order = order
        self._tell = tell
        self.notes = cell.Notes()
        self._lines = Lines(order["filename"], order["sources"])
        accounts = [Account(Arena(each, order["cuts_to_size"])) for each in order["capacities"]]
        for account, segments in zip(accounts, order["segments"], strict=True):
            account.lay_out(segments or ())
        self.ledger = Ledger(accounts, Place)
        known = order["backend"]
        name = OURS if known in IN_TREE else known
        module = backend.register(name, self.ledger)
        self._storages = Storages(self.ledger.take, self._gone)
        self.ledger.settle = self._storages.settle
        self._guesses = Guesses(order["guess"], order["others"], self.notes.assume, self._lines.reading)
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
        surroundings.arrange(module, self.notes.assume)
        self._passes = Passes(order["filename"], order["sources"])
        self._kept: list[Any] = []
        self._before: list[int] = []

    def run(self) -> None:
        """Run the cell and tell the account of it, as plain data."""
        surroundings.block(self.notes.effect)  # before modules of the user's are imported
        scopes = self._unpack()
        self._guesses.fill_blanks(parts.blanks)
        for device, nbytes in enumerate(self.order["base"]):
            if nbytes > 0:
                self._kept.append(self._storages.new((nbytes,), (1,), torch.uint8, device))
            self.ledger.hold(device)
        for account, pinned, segments in zip(
            self.ledger.accounts, self.order["pinned"], self.order["segments"], strict=True
        ):
            if segments is None:
                account.arena.shrink(pinned - account.arena.reserved)
        self.ledger.start()
        self._before = self.ledger.figures()
        self._operators.give_up = lambda error: self._tell(self._failed(error))
        self._kinds.watch()
        self._unwritten = Unwritten(self._guesses.fill, draws=not self.order["guess"])
        self._unwritten.install()
        self._guesses.leave = self._unwritten.leave
        self.notes.effects.clear()
        namespace = scopes[0]
        cell.prepare(self.order, namespace, Magics(namespace, self.notes.effect))
        self._models = Models(namespace)
        self._namespace = namespace
        if not self.order["is_brief"]:
            self._modules.watch(namespace)
        signal.signal(signal.SIGALRM, self._out_of_time)
        signal.setitimer(signal.ITIMER_REAL, self.order["time_limit"])
        self._tell(self._execute(namespace))

    def _out_of_time(self, _: int, frame: FrameType | None) -> None:
        """Tell how far it came; an operator that runs ends first."""
        running = [(each.filename, each.lineno or 0) for each in traceback.extract_stack(frame)]
        if self._operators.is_running:
            self._operators.give_up_after = lambda: self._stop(running)
        else:
            self._stop(running)

    def _stop(self, running: list[File]) -> None:
        self.notes.out_of_time(self.order["time_limit"])
        self._tell({**self._account(None, running), "is_open": True})

    def _gone(self, key: int) -> None:
        self._contents.known.forget(key)
        self.ledger.give_back(key)

    def _key_on_device(self, tensor: torch.Tensor) -> int:
        with torch._C.DisableTorchFunction():  # under `Names` the device would say another name
            is_there = tensor.device.type == self._name and tensor.layout is torch.strided
            return key_of(tensor) if is_there else 0

    def _coming(self, part: parts.StoragePart) -> None:
        self.ledger.address = part.address

    def _unpack(self) -> list[dict[str, Any]]:
        scopes: list[dict[str, Any]] = [{} for _ in range(self.order["scopes"])]
        parts.coming, parts.find_code = self._coming, self._passes.find_code
        for scope in scopes:
            scope["__builtins__"] = builtins
        self.ledger.unpacking = True
        cell.unpack(self.order["data"], scopes)
        return scopes

    def _execute(self, namespace: dict[str, Any]) -> dict[str, Any]:
        """Run the cell; return the account of it."""
        source, filename = self.order["source"], self.order["filename"]
        try:
            code = None if source is None else cell.compiled(source, filename, self._passes.change)
            self.ledger.where = self._lines.where
            cell.execute(code, namespace)
        except SystemExit:
            pass
        except BaseException as error:
            return self._failed(error)
        return self._account(None, ())

    def _failed(self, error: BaseException) -> dict[str, Any]:
        line = self.ledger.place.line if self.ledger.in_backward else None
        running = [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]
        return self._account(cell.failure(error, self.order["filename"], line), running)

    def _account(self, error: dict[str, Any] | None, running: Iterable[File]) -> dict[str, Any]:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._unwritten.draws_others:
            self.notes.assume(unwritten.OTHERS)
        self.ledger.settle()
        self.ledger.where = Place
        self._kinds.look_around()
        if not self.order["is_brief"]:
            self._names = self._modules.look_around(self._namespace)
        unknown = without_rule(self._operators.seen) if self.order["backend"] == "cuda" else []
        if unknown:
            self.notes.not_known(f"what CUDA's kernels take for themselves in {', '.join(unknown)}")
        devices = [self._device(index, account) for index, account in enumerate(self.ledger.accounts)]
        return {
            "devices": devices, "lines": ledger.told_lines(self.ledger),
            "timeline": ledger.told(self.ledger), "error": error,
            "operators": self.ledger.operators, "assumed": list(self.notes.assumed),
            "unknown": list(self.notes.unknown), "effects": list(self.notes.effects),
            "passes": self._passes.told(running), "is_open": False, "reads": list(self._guesses.reads),
            "models": self._models.told(), "lacks": bool(unknown),
            "modules": max(devices, key=lambda each: each["peak"])["modules"],
        }  # fmt: skip

    def _device(self, index: int, account: Account) -> dict[str, Any]:
        return {
            "peak": account.peak.allocated, "before": self._before[index], "after": account.allocated,
            "reserved": account.arena.peak_reserved, "failed": account.arena.failed,
            "at": ledger.point(account.peak),
            "failure": None if account.failure is None else ledger.point(account.failure),
            "breakdown": self.ledger.breakdown(index),
            "modules": [] if self.order["is_brief"] else by_module(self.ledger, index, self._names),
        }  # fmt: skip
