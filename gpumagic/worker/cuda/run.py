"""One dry run on torch's own CUDA over the fake runtime: the cell simply runs, against the real allocator."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpumagic import fakecuda
from gpumagic.dryrun import parts
from gpumagic.memory import segments
from gpumagic.memory.allocator import rounded
from gpumagic.memory.ledger import Ledger, Place
from gpumagic.source import frames
from gpumagic.worker import ranks, sandbox
from gpumagic.worker.cuda.allocator import History, Layout, Trace
from gpumagic.worker.host import LEAST
from gpumagic.worker.known import Known
from gpumagic.worker.reading import CudaReading, address_of, memory_of
from gpumagic.worker.run import Outcome, Run, failure

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


class CudaRun(Run):
    """A run on torch's CUDA devices."""

    def __init__(self, request: dict[str, Any], send: Callable[[Outcome], None]) -> None:
        super().__init__(request, send)
        self._history = History()
        self.known = Known("cuda", address_of, memory_of) if request["follows"] else None
        self._allocated: list[int] = []
        self._objects: ranks.Objects | None = None
        self._uncollected = 0

    def run(self) -> None:
        """Run the cell and send the outcome."""
        os.environ[fakecuda.VARIABLE] = self.request["gpus"]
        torch.cuda.init()
        for device, capacity in enumerate(self.request["capacities"]):
            if capacity is None:
                fakecuda.set_memory(device, limit=UNLIMITED)
        self.close_in()
        if not self.box.has_files:
            sandbox.refuse_compiler()
        sandbox.load_in_this_process(self.assumed.setdefault)
        self._objects = ranks.take_part(self.request, self.send, self.assumed.setdefault)
        try:
            self._lay_out()
        except torch.OutOfMemoryError:
            self.send(
                {"ended": "what the notebook holds already is more than the memory of the device"}
            )
        if torch.cuda.get_allocator_backend() != "native":
            self.is_brief = True
            self.unknown.setdefault("which line needs most: cudaMallocAsync keeps no history")
        self.guesses.fill_blanks(parts.blanks)
        CudaReading(self.guesses, self.known, self.assumed.setdefault).install()
        if self.known is not None:
            self.shown.to(self.known.follow)
        else:
            self.guesses.begin_again = lambda: self.send({"starts_again": True})
        fakecuda.leave_out(LEAST)
        fakecuda.reset()
        self.execute(self._history.note, lambda tensor: address_of(tensor) if tensor.is_cuda else 0)

    def _lay_out(self) -> None:
        """Put what the notebook holds where it lies there."""
        layouts = {
            device: Layout(device, segments)
            for device, segments in enumerate(self.request["segments"])
            if segments is not None
        }

        def coming(part: parts.StoragePart) -> contextlib.AbstractContextManager[object]:
            layout = layouts.get(torch.device(part.device).index or 0)
            return contextlib.nullcontext() if layout is None else layout.claim(part)

        self.unpack(coming)
        for device, nbytes in enumerate(self.request["base"]):
            if nbytes > 0:
                self.kept.append(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}"))
        for device, layout in layouts.items():
            layout.settle(self.request["workspaces"][device])

    def begin(self) -> None:
        """Let the allocator keep its history, and follow values where that is wanted."""
        if self.known is not None:
            self.shown.begin(self.known)
        parallel, apply = torch.nn.parallel.data_parallel, torch.nn.parallel.parallel_apply

        def in_threads(modules: Any, *args: Any, **kwargs: Any) -> Any:
            if len(modules) > 1:
                self.unknown.setdefault(_THREADS)
            return apply(modules, *args, **kwargs)

        vars(sys.modules[parallel.__module__])["parallel_apply"] = in_threads
        gc.callbacks.append(self._collect)
        for device in range(len(self.request["capacities"])):
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated.append(torch.cuda.memory_allocated(device))
        if not self.is_brief:
            torch.cuda.memory._record_memory_history(
                context="alloc", stacks="python", max_entries=MOST_ENTRIES
            )

    def allocated(self) -> tuple[int, int]:
        """Return the peak and the allocated bytes of all devices."""
        stats = [
            torch.cuda.memory_stats_as_nested_dict(each) for each in range(len(self._allocated))
        ]
        figures = [each["allocated_bytes"]["all"] for each in stats]
        return sum(each["peak"] for each in figures), sum(each["current"] for each in figures)

    def _collect(self, phase: str, _: dict[str, int]) -> None:
        """Note where Python's garbage collector frees memory, for which the notebook has other times."""
        peak, now = self.allocated()
        if phase == "stop" and self._uncollected - now > peak >> 10:  # less changes no figure
            self.unknown.setdefault(_GARBAGE)
        self._uncollected = now

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return how the cell failed."""
        related = frames.related_exceptions(
            error
        )  # libraries wrap what the allocator raises, torch.compile too
        return {
            **failure(error, self.request["filename"]),
            "waits_for": error.rank if isinstance(error, ranks.WaitsFor) else None,
            "is_memory": any(isinstance(each, torch.OutOfMemoryError) for each in related),
        }

    def account(self, error: dict[str, Any] | None) -> tuple[Ledger, list[dict[str, Any]], Outcome]:
        """Return the allocator's history as a ledger, each device's figures, and what else is told."""
        gc.disable()  # many records are made now, and the process ends with them
        failed = error is not None and error["is_memory"]
        devices = [self._device(device, failed) for device in range(len(self._allocated))]
        unknown = fakecuda.unknown_sizes()
        communicators, counts = unknown.pop("NCCL communicator", 0), unknown.pop("count", 0)
        written = {
            "cudnn": "cuDNN",
            "cusolver": "cuSOLVER",
            "cusparse": "cuSPARSE",
            "cufft": "cuFFT",
        }
        for library in sorted({written.get(re.split("[^a-z]", name)[0], name) for name in unknown}):
            self.unknown.setdefault(f"what {library} takes for itself, which only a real GPU tells")
        if counts:
            self.unknown.setdefault(_COUNTS)
        others: Outcome = {
            "lacks": bool(unknown)
            or not self.unknown.keys().isdisjoint((_THREADS, _GARBAGE, _COUNTS)),
            "versions": _versions(),
            "communicators": communicators,
            "rank": None
            if self._objects is None
            else {"said": self._objects.said, "stages": ranks.stages()},
            **({"error": None} if failed else {}),
        }
        if self.is_brief:
            if failed and error is not None:
                next(each for each in devices if each["failed"])["failure"] = {
                    "line": error["line"]
                }
            return Ledger([]), devices, others
        self.names = self.modules.look_around(self.namespace)
        # A snapshot imports the compiler, to name lines of compiled code; that takes two seconds.
        getattr(torch, "_lazy_modules", set()).discard("_inductor")
        for workspace in segments.find_workspaces():
            self._history.note(Ledger.mark, workspace.address, "library workspaces")
        traces: list[Trace] = torch.cuda.memory._snapshot()["device_traces"][: len(devices)]
        before = [
            block for device, trace in enumerate(traces) for block in _in_use_before(device, trace)
        ]

        def place_of(stack: Trace) -> Place:
            return self.lines.of([(each["filename"], each["name"], each["line"]) for each in stack])

        return self._history.ledger(before, traces, place_of), devices, others

    def _device(self, device: int, failed: bool) -> dict[str, Any]:
        stats = torch.cuda.memory_stats(device)
        return {
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "before": self._allocated[device],
            "after": torch.cuda.memory_allocated(device),
            "retries": stats["num_alloc_retries"],
            "failed": failed and stats["num_ooms"] > 0,
            "failure": None,
            "traffic": stats.get("allocated_bytes.all.allocated", 0),
        }


def _in_use_before(device: int, trace: Trace) -> Iterator[Block]:
    """Yield what was in use on a device when its history begins: what that frees or leaves and did not make."""
    made = set()
    for entry in trace:
        if entry["action"] == "alloc":
            made.add(entry["addr"])
        elif entry["action"] == "free_requested" and entry["addr"] not in made:
            yield device, entry["addr"], rounded(entry["size"])
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] == "active_allocated" and block["address"] not in made:
                yield device, block["address"], block["size"]


def _versions() -> dict[str, str]:
    """Return what figures differ by: torch, and the kernels that it chose for attention."""
    kernels = " ".join(fakecuda.launches())
    chosen = [name for name, word in _ATTENTION.items() if word in kernels]
    return {"torch": torch.__version__, **({"attention": ", ".join(chosen)} if chosen else {})}


_ATTENTION = {"flash": "flash_fwd", "memory-efficient": "fmha_cutlassF"}
"""By what the names of their kernels have in them; torch's own mathematics has no kernel of its own."""
