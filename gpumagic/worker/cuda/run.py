"""One dry run on torch's own CUDA over the fake runtime: the cell simply runs, against the real allocator."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gpumagic import fakecuda
from gpumagic.dryrun import parts
from gpumagic.dryrun.wire import DeviceOutcome, Ended, Ending, Failure, Outcome, Request
from gpumagic.memory import segments
from gpumagic.memory.allocator import rounded
from gpumagic.memory.ledger import Allocation, Ledger, Place
from gpumagic.source import frames
from gpumagic.worker import exchange, ranks, sandbox
from gpumagic.worker.cuda.allocator import History, Layout, Trace
from gpumagic.worker.host import LEAST
from gpumagic.worker.known import Known
from gpumagic.worker.reading import CudaReading, address_of, memory_of
from gpumagic.worker.run import Figures, Run, Send

UNLIMITED = 1 << 40
"""Bytes that a device gives where it is asked how much a cell needs that does not fit; it says what it has all the
same, for cells that choose their sizes by that."""
Block = tuple[int, int, int]
"""Its device, its address, its bytes."""
MOST_ENTRIES = 200_000
"""Of the allocator's history, a device; of a longer run only its end is known line by line."""
_THREADS = "how the threads of DataParallel take turns, by which its peak differs from run to run"
_GARBAGE = "when Python's garbage collector frees what reference cycles hold, which differs from notebook to notebook"
_COUNTS = "how many different elements a kernel finds, as where a sparse tensor is coalesced, which only values tell"
_LIBRARIES = {
    "cudnn": "cuDNN",
    "cusolver": "cuSOLVER",
    "cusparse": "cuSPARSE",
    "cufft": "cuFFT",
}
"""How NVIDIA writes its libraries' names."""


class CudaRun(Run):
    """A run on torch's CUDA devices."""

    def __init__(self, request: Request, watcher: socket.socket, send: Send) -> None:
        super().__init__(request, watcher, send)
        self._history = History()
        if request.scenario.follows:
            self.known = Known("cuda", address_of, memory_of)
        self._before: list[int] = []
        """Bytes allocated on each device when the cell begins."""
        self._objects: exchange.Objects | None = None
        self._uncollected = 0
        self._is_out_of_memory = False

    def run(self) -> None:
        """Run the cell and send the outcome."""
        os.environ[fakecuda.VARIABLE] = self.request.devices.gpus
        torch.cuda.init()
        for device, capacity in enumerate(self.request.devices.capacities):
            if capacity is None:
                fakecuda.set_memory(device, limit=UNLIMITED)
        self.close_in()
        if not self.box.has_files:
            sandbox.refuse_compiler()
        sandbox.load_in_this_process(self.assumed.setdefault)
        self._objects = ranks.take_part(
            self.request, self.send, self.assumed.setdefault
        )
        try:
            self._lay_out()
        except torch.OutOfMemoryError:
            sentence = (
                "what the notebook holds already is more than the memory of the device"
            )
            self.send(Ended(reason=Ending.NO_ROOM, sentence=sentence))
        if torch.cuda.get_allocator_backend() != "native":
            self.is_brief = True
            self.unknown.setdefault(
                "which line needs most: cudaMallocAsync keeps no history"
            )
        self.guesses.fill_blanks(parts.blanks)
        CudaReading(self.guesses, self.known, self.assumed.setdefault).install()
        if self.known is not None:
            self.shown.to(self.known.follow)
        else:
            self.guesses.begin_again = self._begin_again
        fakecuda.leave_out(LEAST)
        fakecuda.reset()
        self.execute(
            self._history.note,
            lambda tensor: address_of(tensor) if tensor.is_cuda else 0,
        )

    def _begin_again(self) -> None:
        self.send(Ended(reason=Ending.NEEDS_VALUES, sentence="it follows no values"))

    def _lay_out(self) -> None:
        """Put what the notebook holds where it lies there."""
        devices = self.request.devices
        layouts: dict[int, Layout] = {}
        for device, its_segments in enumerate(devices.segments):
            if its_segments is not None:
                layouts[device] = Layout(device, its_segments)

        def coming(
            part: parts.StoragePart,
        ) -> contextlib.AbstractContextManager[object]:
            layout = layouts.get(torch.device(part.device).index or 0)
            return contextlib.nullcontext() if layout is None else layout.claim(part)

        self.unpack(coming)
        for device, nbytes in enumerate(devices.base):
            if nbytes > 0:
                unseen = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
                self.kept.append(unseen)
        for device, layout in layouts.items():
            layout.settle(devices.workspaces[device])

    def begin(self) -> None:
        """Let the allocator keep its history, and follow values where that is wanted."""
        if self.known is not None:
            self.shown.begin(self.known)
        parallel, apply = (
            torch.nn.parallel.data_parallel,
            torch.nn.parallel.parallel_apply,
        )

        def in_threads(modules: Any, *args: Any, **kwargs: Any) -> Any:
            if len(modules) > 1:
                self.unknown.setdefault(_THREADS)
            return apply(modules, *args, **kwargs)

        vars(sys.modules[parallel.__module__])["parallel_apply"] = in_threads
        gc.callbacks.append(self._collect)
        for device in range(len(self.request.devices.capacities)):
            torch.cuda.reset_peak_memory_stats(device)
            self._before.append(torch.cuda.memory_allocated(device))
        if not self.is_brief:
            torch.cuda.memory._record_memory_history(
                context="alloc", stacks="python", max_entries=MOST_ENTRIES
            )

    def allocated(self) -> tuple[int, int]:
        """Return the peak and the allocated bytes of all devices."""
        peak = now = 0
        for device in range(len(self._before)):
            stats = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"][
                "all"
            ]
            peak += stats["peak"]
            now += stats["current"]
        return peak, now

    def _collect(self, phase: str, _: dict[str, int]) -> None:
        """Note where Python's garbage collector frees memory, for which the notebook has other times."""
        peak, now = self.allocated()
        freed = self._uncollected - now
        if phase == "stop" and freed > peak >> 10:  # less changes no figure
            self.unknown.setdefault(_GARBAGE)
        self._uncollected = now

    def failed(self, error: BaseException) -> Outcome:
        """Return the outcome of a cell that raised."""
        # Libraries wrap what the allocator raises, torch.compile too.
        related = frames.related_exceptions(error)
        self._is_out_of_memory = any(
            isinstance(one, torch.OutOfMemoryError) for one in related
        )
        return super().failed(error)

    def failure(self, error: BaseException) -> Failure:
        """Return how the cell failed."""
        source = error.rank if isinstance(error, exchange.WaitsFor) else None
        return replace(super().failure(error), waits_for=source)

    def account(self, failure: Failure | None) -> Figures:
        """Return the allocator's history as a ledger, each device's figures, and what else CUDA tells."""
        gc.disable()  # many records are made now, and the process ends with them
        devices = [self._device(device) for device in range(len(self._before))]
        has_unknown_parts, communicators = self._note_unknown_sizes()
        if self.is_brief:
            if self._is_out_of_memory and failure is not None:
                failed = next(device for device in devices if device.failed)
                refused = Allocation(line=failure.line)
                devices[devices.index(failed)] = replace(failed, refused=refused)
            book = Ledger([])
        else:
            book = self._ledger(len(devices))
        return Figures(
            ledger=book,
            devices=devices,
            is_out_of_memory=self._is_out_of_memory,
            has_unknown_parts=has_unknown_parts,
            communicators=communicators,
            rank=None if self._objects is None else self._objects.outcome(),
            versions=_versions(),
        )

    def _note_unknown_sizes(self) -> tuple[bool, int]:
        """Note what takes memory that the fake runtime cannot tell.

        Return whether anything does, and how many communicators NCCL has made.
        """
        sizes = fakecuda.unknown_sizes()
        communicators = sizes.pop("NCCL communicator", 0)
        counts = sizes.pop("count", 0)
        libraries = set()
        for name in sizes:
            library = re.split("[^a-z]", name)[0]
            libraries.add(_LIBRARIES.get(library, name))
        for library in sorted(libraries):
            self.unknown.setdefault(
                f"what {library} takes for itself, which only a real GPU tells"
            )
        if counts:
            self.unknown.setdefault(_COUNTS)
        differs = not self.unknown.keys().isdisjoint((_THREADS, _GARBAGE, _COUNTS))
        return bool(sizes) or differs, communicators

    def _ledger(self, count: int) -> Ledger:
        """Return the lives of all blocks of so many devices."""
        self.modules.label_remaining_blocks(self.namespace)
        # A snapshot imports the compiler, to name lines of compiled code; that takes two seconds.
        getattr(torch, "_lazy_modules", set()).discard("_inductor")
        traces: list[Trace] = torch.cuda.memory._snapshot()["device_traces"][:count]
        before: list[Block] = []
        for device, trace in enumerate(traces):
            before += _in_use_before(device, trace)
        for address in _clear_workspaces():
            self._history.note(Ledger.mark, address, "library workspaces")

        def place_of(stack: Trace) -> Place:
            return self.lines.of(
                [(frame["filename"], frame["name"], frame["line"]) for frame in stack]
            )

        return self._history.ledger(before, traces, place_of)

    def _device(self, device: int) -> DeviceOutcome:
        stats = torch.cuda.memory_stats(device)
        return DeviceOutcome(
            before=self._before[device],
            peak=torch.cuda.max_memory_allocated(device),
            after=torch.cuda.memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
            traffic=stats.get("allocated_bytes.all.allocated", 0),
            failed=self._is_out_of_memory and stats["num_ooms"] > 0,
            retries=stats["num_alloc_retries"],
        )


def _clear_workspaces() -> set[int]:
    """Free what torch keeps for cuBLAS, for nothing runs after it, and return where that was."""
    before = segments.allocated_blocks("cuda")
    torch._C._cuda_clearCublasWorkspaces()
    after = segments.allocated_blocks("cuda")
    return {block.address for block in before} - {block.address for block in after}


def _in_use_before(device: int, trace: Trace) -> Iterator[Block]:
    """Yield what was in use on a device when its history begins: what that frees or leaves and did not make."""
    made = set()
    for entry in trace:
        if entry["action"] == "alloc":
            made.add(entry["addr"])
        elif entry["action"] == "free_requested" and entry["addr"] not in made:
            yield device, entry["addr"], rounded(entry["size"])
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["address"] not in made:
                yield device, block["address"], block["size"]


def _versions() -> dict[str, str]:
    """Return what figures differ by: torch, and the kernels that it chose for attention."""
    versions = {"torch": torch.__version__}
    kernels = " ".join(fakecuda.launches())
    chosen = [name for name, word in _ATTENTION.items() if word in kernels]
    if chosen:
        versions["attention"] = ", ".join(chosen)
    return versions


_ATTENTION = {"flash": "flash_fwd", "memory-efficient": "fmha_cutlassF"}
"""By what the names of their kernels have in them; torch's own mathematics has no kernel of its own."""
