"""One dry run on torch's own CUDA over the fake runtime: the cell simply runs, against the real allocator."""

from __future__ import annotations

import base64
import builtins
import contextlib
import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch

from gpumagic import fakecuda
from gpumagic.dryrun import parts
from gpumagic.dryrun.worker import cell, deferred_fills, ranks, sandbox
from gpumagic.dryrun.worker.cuda.history import History, Trace
from gpumagic.dryrun.worker.cuda.layout import Layout
from gpumagic.dryrun.worker.cuda.reading import (
    Contents,
    Following,
    Reading,
    Recorded,
    Replayed,
    address_of,
    memory_of,
)
from gpumagic.dryrun.worker.deferred_fills import LEAST, DeferredFills
from gpumagic.dryrun.worker.guesses import Guesses
from gpumagic.dryrun.worker.kinds import Kinds, Lines
from gpumagic.dryrun.worker.known import Known
from gpumagic.dryrun.worker.models import Models
from gpumagic.dryrun.worker.modules import Modules
from gpumagic.dryrun.worker.noted import Numbers
from gpumagic.dryrun.worker.passes import File, Passes
from gpumagic.memory import ledger, workspaces
from gpumagic.memory.allocator import rounded
from gpumagic.memory.ledger import Ledger, Peak, Place
from gpumagic.source import frames

UNLIMITED = 1 << 40
"""Bytes that a device gives where it is asked how much a cell needs that does not fit; it says what it has all the
same, for cells that choose their sizes by that."""
Block = tuple[int, int, int]
"""Its device, its address, its bytes."""
MOST_ENTRIES = 200_000
"""Of the allocator's history, a device; of a longer run only its end is known line by line."""


class CudaRun:
    """The devices and all that watches them.

    Args:
        request: what `dryrun.run` sends: see there.
        send: sends the outcome and ends the process.
    """

    def __init__(self, request: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
        self.request = request
        self._send = send
        self.notes = cell.Notes()
        self._lines = Lines(request["filename"], request["sources"])
        self._history = History(self._lines.where)
        self._modules = Modules(self._history, _address_on_device)
        self._namespace: dict[str, Any] = {}
        self._passes = Passes(request["filename"], request["sources"])
        self._clock = cell.Clock(request["time_limit"], self._look, self._out_of_time)
        self._guesses = Guesses(request, self.notes.assume, self._lines.reading)
        self._names: list[str] = []
        self._known = Known("cuda", address_of, memory_of) if request["follows"] else None
        self._recorded: Recorded | None = None
        self._is_brief = request["is_brief"]  # only the figures are wanted, not the history
        self._snapshot: dict[str, Any] | None = None
        self._kept: list[torch.Tensor] = []
        self._before: list[Block] = []
        self._allocated: list[int] = []
        self._objects: ranks.Objects | None = None

    def run(self) -> None:
        """Run the cell and send the outcome, as plain data."""
        if fakecuda.was_asked():
            self._send({"ended": "the dry run could not be set up: what the notebook imported has started CUDA"})
        os.environ[fakecuda.VARIABLE] = self.request["gpus"]
        torch.cuda.init()
        for device, capacity in enumerate(self.request["capacities"]):
            if capacity is None:
                fakecuda.set_memory(device, limit=UNLIMITED)
        self._arrange()
        self._objects = ranks.take_part(self.request, self._send)
        try:
            namespace = self._namespace = self._unpack()
        except torch.OutOfMemoryError:
            self._send({"ended": "what the notebook holds already is more than the memory of the device"})
        if torch.cuda.get_allocator_backend() != "native":
            self._is_brief = True
            self.notes.not_known("which line needs most: cudaMallocAsync keeps no history")
        if not self._is_brief:
            Kinds(self._history, "cuda", _address).watch()
            self._modules.watch(namespace)
        self._guesses.fill_blanks(parts.blanks)
        contents = self._contents()
        Reading(self._guesses, contents, self._start_again, self.notes.assume).install()
        if contents is None:
            self._guesses.begin_again = self._start_again
        Numbers(self._guesses).install()
        self._fills = DeferredFills(self._guesses.fill, draws=not self.request["guess"])
        self._fills.install()
        self._guesses.leave = self._fills.leave
        fakecuda.leave_out(LEAST)
        fakecuda.reset()
        self.notes.effects.clear()
        cell.prepare(self.request, namespace, sandbox.Magics(namespace, self.notes.effect))
        self._models = Models(namespace)
        self._begin()
        self._send(self._execute(namespace))

    def _arrange(self) -> None:
        made = sandbox.block(self.notes, self.request["watcher"])  # before modules of the user's are imported
        if not made.has_files:
            sandbox.refuse_compiler()
        sandbox.load_in_this_process(self.notes.assume)

    def _unpack(self) -> dict[str, Any]:
        layouts = {
            device: Layout(device, segments)
            for device, segments in enumerate(self.request["segments"])
            if segments is not None
        }

        def coming(part: parts.StoragePart) -> contextlib.AbstractContextManager[object]:
            layout = layouts.get(torch.device(part.device).index or 0)
            return contextlib.nullcontext() if layout is None else layout.claim(part)

        parts.coming, parts.find_code = coming, self._passes.find_code
        scopes: list[dict[str, Any]] = [{"__builtins__": builtins} for _ in range(self.request["scopes"])]
        cell.unpack(self.request["data"], scopes)
        for device, nbytes in enumerate(self.request["base"]):
            if nbytes > 0:
                self._kept.append(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}"))
        for device, layout in layouts.items():
            layout.settle(self.request["workspaces"][device])
        return scopes[0]

    def _begin(self) -> None:
        """Let a clock keep the time, and the allocator its history."""
        self._clock.start()
        for device in range(len(self.request["capacities"])):
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated.append(torch.cuda.memory_allocated(device))
        if self._is_brief:
            return
        self._before = list(_blocks_in_use())
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_ENTRIES)

    def _contents(self) -> Contents | None:
        """Return what tells the host what is known of the device's values."""
        if self._known is not None:
            self._recorded = Recorded(self._known)
            return self._recorded
        answers = self.request["answers"]
        return None if answers is None else Replayed(answers, self._start_again)

    def _start_again(self) -> NoReturn:
        """End a run that needs to know what is known of the values, or that reads otherwise than the run that knew."""
        self._send({"starts_again": True})
        raise AssertionError("the process has ended")

    def _look(self) -> tuple[list[int], int, int]:
        devices = range(len(self._allocated))
        return (
            self._passes.runs(),
            sum(map(torch.cuda.max_memory_allocated, devices)),
            sum(map(torch.cuda.memory_allocated, devices)),
        )

    def _out_of_time(self, frame: FrameType | None) -> None:
        self.notes.out_of_time(self.request["time_limit"])
        running = [(each.filename, each.lineno or 0) for each in traceback.extract_stack(frame)]
        flat = self._passes.flat(self._clock.flat_from())
        self._send({**self._outcome(None, running), "is_open": True, "flat": flat})

    def _execute(self, namespace: dict[str, Any]) -> dict[str, Any]:
        """Run the cell; return the outcome."""
        source, filename = self.request["source"], self.request["filename"]
        try:
            with self._following():
                cell.execute(
                    None if source is None else cell.compiled(source, filename, self._passes.change), namespace
                )
        except SystemExit:
            pass
        except BaseException as error:
            failed: dict[str, Any] = cell.failure(error, filename)
            failed["waits_for"] = error.rank if isinstance(error, ranks.WaitsFor) else None
            failed["is_memory"] = any(
                isinstance(each, torch.OutOfMemoryError) for each in frames.related_exceptions(error)
            )  # libraries wrap it, torch.compile too
            running = [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]
            return self._outcome(failed, running)
        return self._outcome(None, ())

    def _following(self) -> contextlib.AbstractContextManager[object]:
        if self._known is None:
            return contextlib.nullcontext()
        following = Following(self._known)
        following.in_threads()
        return following

    def _outcome(self, error: dict[str, Any] | None, running: Iterable[File]) -> dict[str, Any]:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.disable()  # many records are made now, and the process ends with them
        if self._fills.draws_others:
            self.notes.assume(deferred_fills.OTHERS)
        devices = [self._device(device) for device in range(len(self._allocated))]
        failed = error is not None and error.pop("is_memory")
        libraries = sorted({_library_of(what) for what in fakecuda.unknown_sizes()})
        for library in libraries:
            self.notes.not_known(f"what {library} takes for itself, which only a real GPU tells")
        for device, told in enumerate(devices):
            told |= {"at": ledger.point(Peak()), "failure": None, "breakdown": {}, "modules": []}
            told["failed"] = failed and torch.cuda.memory_stats(device)["num_ooms"] > 0
        book = Ledger([]) if self._is_brief else self._book(len(devices))
        if failed and error is not None and self._is_brief:
            next(each for each in devices if each["failed"])["failure"] = {"line": error["line"]}
        for told, account in zip(devices, book.accounts, strict=False):
            told["at"] = ledger.point(account.peak)
            told["failure"] = None if account.failure is None else ledger.point(account.failure)
            told["breakdown"] = book.breakdown(book.accounts.index(account))
            told["modules"] = book.by_module(book.accounts.index(account), self._names)
        return {
            "devices": devices, "lines": ledger.line_rows(book), "timeline": ledger.timeline(book),
            "error": None if failed else error,
            "operators": book.operators,
            "assumed": list(self.notes.assumed), "unknown": list(self.notes.unknown),
            "effects": list(self.notes.effects), "passes": self._passes.counts(running), "is_open": False,
            **self._guesses.told(), "answers": self._recorded and self._recorded.answers,
            "models": self._models.as_data(), "lacks": bool(libraries), "versions": _versions(),
            "snapshot": self._packed_snapshot() if self.request["snapshot"] else None,
            "rank": None if self._objects is None else {"said": self._objects.said, "stages": ranks.stages()},
            "modules": max(devices, key=lambda each: each["peak"])["modules"] if devices else [],
        }  # fmt: skip

    def _book(self, devices: int) -> Ledger:
        """Return what the allocator's history says, and what its blocks are."""
        Kinds(self._history, "cuda", _address).look_around()
        self._names = self._modules.look_around(self._namespace)
        for workspace in workspaces.find_workspaces():
            self._history.mark(workspace.address, "library workspaces")
        self._snapshot = torch.cuda.memory._snapshot()
        traces: list[Trace] = self._snapshot["device_traces"][:devices]
        before = [block for device, trace in enumerate(traces) for block in self._in_use_before(device, trace)]
        return self._history.ledger(before, traces, self._place_of)

    def _packed_snapshot(self) -> str | None:
        """Return the allocator's snapshot with its history, as `torch.cuda.memory._dump_snapshot` would write it."""
        return None if self._snapshot is None else base64.b64encode(pickle.dumps(self._snapshot)).decode()

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
        stats = torch.cuda.memory_stats(device)
        return {
            "peak": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device),
            "before": self._allocated[device], "after": torch.cuda.memory_allocated(device),
            "retries": stats["num_alloc_retries"],
            "traffic": [stats.get(f"{each}.all.allocated", 0) for each in ("allocation", "allocated_bytes")],
        }  # fmt: skip

    def _place_of(self, stack: Trace) -> Place:
        return self._lines.of([(each["filename"], each["name"], each["line"]) for each in stack])


def _blocks_in_use() -> Iterator[Block]:
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield segment["device"], block["address"], block["size"]


def _versions() -> dict[str, str]:
    """Return what figures differ by: torch, and the kernels that it chose for attention."""
    kernels = " ".join(fakecuda.launches())
    chosen = [name for name, word in _ATTENTION.items() if word in kernels]
    return {"torch": torch.__version__, **({"attention": ", ".join(chosen)} if chosen else {})}


_ATTENTION = {"flash": "flash_fwd", "memory-efficient": "fmha_cutlassF"}
"""By what the names of their kernels have in them; torch's own mathematics has no kernel of its own."""


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
