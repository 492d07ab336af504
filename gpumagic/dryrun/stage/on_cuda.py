"""One dry run on torch's own CUDA over the fake runtime: the cell simply runs, against the real allocator."""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch

from gpumagic import fakecuda
from gpumagic.dryrun import parts
from gpumagic.dryrun.stage import cell, ledger, surroundings, unwritten
from gpumagic.dryrun.stage.counted import File, Passes
from gpumagic.dryrun.stage.guesses import Guesses
from gpumagic.dryrun.stage.journal import Journal, Trace, rounded
from gpumagic.dryrun.stage.kinds import Kinds, Lines
from gpumagic.dryrun.stage.known import Known
from gpumagic.dryrun.stage.layout import Layout
from gpumagic.dryrun.stage.ledger import Ledger, Peak, Place
from gpumagic.dryrun.stage.models import Models
from gpumagic.dryrun.stage.modules import Modules, by_module
from gpumagic.dryrun.stage.reading import Following, Reading, address_of, memory_of
from gpumagic.dryrun.stage.unwritten import LEAST, Unwritten
from gpumagic.memory import workspaces

UNLIMITED = 1 << 40
"""Bytes of a device where it is asked how much a cell needs that does not fit."""
Block = tuple[int, int, int]
"""Its device, its address, its bytes."""
MOST_ENTRIES = 200_000
"""Of the allocator's history, a device; of a longer run only its end is known line by line."""


class CudaRun:
    """The devices and all that watches them.

    Args:
        order: what `dryrun.run` sends: see there.
        tell: sends the account and ends the process.
    """

    def __init__(self, order: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        self.order = order
        self._tell = tell
        self.notes = cell.Notes()
        self._lines = Lines(order["filename"], order["sources"])
        self._journal = Journal(self._lines.where)
        self._modules = Modules(self._journal, _address_on_device)
        self._namespace: dict[str, Any] = {}
        self._passes = Passes(order["filename"], order["sources"])
        self._guesses = Guesses(order["guess"], order["others"], self.notes.assume, self._lines.reading)
        self._names: list[str] = []
        self._known = Known("cuda", address_of, memory_of) if order["follows"] else None
        self._is_brief = order["is_brief"]  # only the figures are wanted, not the history
        self._kept: list[torch.Tensor] = []
        self._before: list[Block] = []
        self._allocated: list[int] = []

    def run(self) -> None:
        """Run the cell and tell the account of it, as plain data."""
        os.environ[fakecuda.VARIABLE] = self.order["gpus"]  # nothing here has asked the runtime for its devices yet
        torch.cuda.init()
        for device, capacity in enumerate(self.order["capacities"]):
            if capacity is None:
                fakecuda.set_memory(device, capacity=UNLIMITED, others=0)
        self._arrange()
        namespace = self._namespace = self._unpack()
        if torch.cuda.get_allocator_backend() != "native":
            self._is_brief = True
            self.notes.not_known("which line needs most: cudaMallocAsync keeps no history")
        if not self._is_brief:
            Kinds(self._journal, "cuda", _address).watch()
            self._modules.watch(namespace)
        self._guesses.fill_blanks(parts.blanks)
        Reading(self._guesses, self._known, self._start_again, self.notes.assume).install()
        self._unwritten = Unwritten(self._guesses.fill, draws=not self.order["guess"])
        self._unwritten.install()
        self._guesses.leave = self._unwritten.leave
        fakecuda.leave_out(LEAST)
        fakecuda.reset()
        self.notes.effects.clear()
        cell.prepare(self.order, namespace, surroundings.Magics(namespace, self.notes.effect))
        self._models = Models(namespace)
        self._begin()
        self._tell(self._execute(namespace))

    def _arrange(self) -> None:
        if not surroundings.block(self.notes.effect):  # before modules of the user's are imported
            surroundings.refuse_compiler()
        surroundings.load_in_this_process(self.notes.assume)

    def _unpack(self) -> dict[str, Any]:
        layouts = {
            device: Layout(device, segments)
            for device, segments in enumerate(self.order["segments"])
            if segments is not None
        }

        def coming(part: parts.StoragePart) -> None:
            layout = layouts.get(torch.device(part.device).index or 0)
            if layout is not None:
                layout.claim(part)

        parts.coming, parts.find_code = coming, self._passes.find_code
        scopes: list[dict[str, Any]] = [{"__builtins__": builtins} for _ in range(self.order["scopes"])]
        cell.unpack(self.order["data"], scopes)
        for device, nbytes in enumerate(self.order["base"]):
            if nbytes > 0:
                self._kept.append(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}"))
        for device, layout in layouts.items():
            layout.settle(self.order["workspaces"][device])
        return scopes[0]

    def _begin(self) -> None:
        """Let a clock keep the time, and the allocator its history."""
        signal.signal(signal.SIGALRM, self._out_of_time)
        signal.setitimer(signal.ITIMER_REAL, self.order["time_limit"])
        for device in range(len(self.order["capacities"])):
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated.append(torch.cuda.memory_allocated(device))
        if self._is_brief:
            return
        self._before = list(_blocks_in_use())
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_ENTRIES)

    def _start_again(self) -> NoReturn:
        """End a run that needs to know what is known of the device's values."""
        self._tell({"starts_again": True})
        raise AssertionError("the process has ended")

    def _out_of_time(self, _: int, frame: FrameType | None) -> None:
        self.notes.out_of_time(self.order["time_limit"])
        running = [(each.filename, each.lineno or 0) for each in traceback.extract_stack(frame)]
        self._tell({**self._account(None, running), "is_open": True})

    def _execute(self, namespace: dict[str, Any]) -> dict[str, Any]:
        """Run the cell; return the account of it."""
        source, filename = self.order["source"], self.order["filename"]
        following = contextlib.nullcontext() if self._known is None else Following(self._known, self._guesses)
        try:
            with following:
                cell.execute(
                    None if source is None else cell.compiled(source, filename, self._passes.change), namespace
                )
        except SystemExit:
            pass
        except BaseException as error:
            failed: dict[str, Any] = cell.failure(error, filename)
            failed["is_memory"] = isinstance(error, torch.OutOfMemoryError)
            running = [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]
            return self._account(failed, running)
        return self._account(None, ())

    def _account(self, error: dict[str, Any] | None, running: Iterable[File]) -> dict[str, Any]:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._unwritten.draws_others:
            self.notes.assume(unwritten.OTHERS)
        devices = [self._device(device) for device in range(len(self._allocated))]
        failed = error is not None and error.pop("is_memory")
        for library in sorted({_library_of(what) for what in fakecuda.unknown_sizes()}):
            self.notes.not_known(f"what {library} takes for itself, which only a real GPU tells")
        for device, told in enumerate(devices):
            told |= {"at": ledger.point(Peak()), "failure": None, "breakdown": {}, "modules": []}
            told["failed"] = failed and torch.cuda.memory_stats(device)["num_ooms"] > 0
        book = Ledger([], Place) if self._is_brief else self._book(len(devices))
        for told, account in zip(devices, book.accounts, strict=False):
            told["at"] = ledger.point(account.peak)
            told["failure"] = None if account.failure is None else ledger.point(account.failure)
            told["breakdown"] = book.breakdown(book.accounts.index(account))
            told["modules"] = by_module(book, book.accounts.index(account), self._names)
        return {
            "devices": devices, "lines": ledger.told_lines(book), "timeline": ledger.told(book),
            "error": None if failed else error,
            "operators": book.operators,
            "assumed": list(self.notes.assumed), "unknown": list(self.notes.unknown),
            "effects": list(self.notes.effects), "passes": self._passes.told(running), "is_open": False,
            "reads": list(self._guesses.reads), "models": self._models.told(),
            "modules": max(devices, key=lambda each: each["peak"])["modules"] if devices else [],
        }  # fmt: skip

    def _book(self, devices: int) -> Ledger:
        """Return what the allocator's history says, and what its blocks are."""
        Kinds(self._journal, "cuda", _address).look_around()
        self._names = self._modules.look_around(self._namespace)
        for workspace in workspaces.find_workspaces():
            self._journal.mark(workspace.address, "library workspaces")
        traces: list[Trace] = torch.cuda.memory._snapshot()["device_traces"][:devices]
        before = [block for device, trace in enumerate(traces) for block in self._in_use_before(device, trace)]
        return self._journal.ledger(before, traces, self._place_of)

    def _in_use_before(self, device: int, trace: Trace) -> Iterator[Block]:
        """Yield the blocks that were in use when a device's history begins, which may have lost its beginning."""
        if len(trace) < MOST_ENTRIES:
            yield from (block for block in self._before if block[0] == device)
            return
        allocated = set()
        for entry in trace:
            if entry["action"] == "alloc":
                allocated.add(entry["addr"])
            elif entry["action"] == "free_requested" and entry["addr"] not in allocated:
                yield device, entry["addr"], rounded(entry["size"])
        yield from (block for block in _blocks_in_use() if block[0] == device and block[1] not in allocated)

    def _device(self, device: int) -> dict[str, Any]:
        return {
            "peak": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device),
            "before": self._allocated[device], "after": torch.cuda.memory_allocated(device),
        }  # fmt: skip

    def _place_of(self, frames: Trace) -> Place:
        return self._lines.of([(each["filename"], each["name"], each["line"]) for each in frames])


def _blocks_in_use() -> Iterator[Block]:
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield segment["device"], block["address"], block["size"]


def _library_of(function: str) -> str:
    """Return how a library is written of which a function's name tells."""
    known = {"cudnn": "cuDNN", "cusolver": "cuSOLVER", "cusparse": "cuSPARSE", "cufft": "cuFFT"}
    return next((name for prefix, name in known.items() if function.startswith(prefix)), function)


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _address_on_device(tensor: torch.Tensor) -> int:
    is_there = tensor.device.type == "cuda" and tensor.layout is torch.strided
    return address_of(tensor) if is_there else 0
