"""The CUDA allocator of a dry run: the notebook's blocks put back into it, and afterwards its history as a `Ledger`.

The blocks are as many and as large as in the notebook, with the same gaps between them. Each segment is asked for whole
and given back to the cache. Its blocks are then asked for in their order: the cache has no other room, so they fall
into place, gaps included. The gaps are given back at the end, when every storage of the notebook has taken the block
that it has there.

While the cell runs only marks are taken, each with its time. At the end they are put between the history's entries, and
all of it is gone through in order: which block lived when, asked for on which line, and what it was.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gpumagic.dryrun import parts
from gpumagic.memory.allocator import SMALL, rounded
from gpumagic.memory.ledger import BUCKETS, GATHERED, Account, Ledger, Life, Peak, Place
from gpumagic.memory.segments import Segment
from gpumagic.worker import known

_give_back = torch.cuda.caching_allocator_delete


class Layout:
    """The blocks of one device.

    Args:
        device: its index.
        segments: what the notebook's allocator has there.
    """

    def __init__(self, device: int, segments: Sequence[Segment]) -> None:
        self._device = device
        self._owned: dict[
            int, tuple[int, int]
        ] = {}  # by the address that the notebook has: that here, and its stream
        self._small_gaps: list[int] = []
        self._gaps: list[int] = []
        for segment in segments:
            self._lay_out(segment)

    def _lay_out(self, segment: Segment) -> None:
        stream = parts.make_stream(f"cuda:{self._device}", segment.stream, 0)
        whole = sum(block.size for block in segment.blocks)
        pieces = [SMALL] * (whole // SMALL) if segment.is_small else [whole]
        for address in [self._take(size, stream) for size in pieces]:
            _give_back(address)
        for block in segment.blocks:
            # A free block of a small segment may be larger than what such a segment serves at once.
            sizes = [block.size]
            while segment.is_small and sizes[-1] > SMALL:
                sizes[-1:] = [SMALL, sizes[-1] - SMALL]
            addresses = [self._take(size, stream) for size in sizes]
            if block.is_free:
                (self._small_gaps if segment.is_small else self._gaps).extend(addresses)
            else:
                self._owned[block.address] = addresses[0], segment.stream

    def claim(self, part: parts.StoragePart) -> contextlib.AbstractContextManager[object]:
        """Make room where a storage of the notebook lies; return the stream that it is made on."""
        return (
            self._let_go(part.address) if part.address in self._owned else contextlib.nullcontext()
        )

    def settle(self, workspaces: Sequence[tuple[int, int]] = ()) -> None:
        """Give back the gaps, and let cuBLAS take the blocks that it has in the notebook.

        Args:
            workspaces: where those lie in the notebook, and their bytes.
        """
        there = sorted(
            (each for each in workspaces if each[0] in self._owned), key=lambda each: -each[1]
        )
        retaken: list[tuple[int, int, Callable[[], object]]] = []  # each stream has its own
        for address, size in there:
            stream, takes = self._owned[address][1], _TAKE if size == there[0][1] else _TAKE_OF_LT
            taken = sum(each[0] == stream and each[2] in takes for each in retaken)
            if taken < len(takes):  # else it is of a thread that is gone, and stays
                retaken.append((stream, address, takes[taken]))
        retaken.sort(key=operator.itemgetter(0))
        with torch.cuda.device(self._device):
            for _, address, take in retaken[:1]:
                with self._let_go(address):
                    take()  # asks for nothing else, and no gap is open yet: it takes the block again
            for gap in self._small_gaps:
                _give_back(gap)
            for _, address, _ in retaken[1:]:
                self._let_go(address)
            for stream, _, take in retaken[1:]:
                with self._on(stream):
                    take()
        for gap in self._gaps:
            _give_back(gap)

    def _let_go(self, address: int) -> contextlib.AbstractContextManager[object]:
        """Give a block back; return the stream whose next request it serves."""
        here, stream = self._owned.pop(address)
        _give_back(here)
        return self._on(stream)

    def _on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        if not stream:
            return contextlib.nullcontext()
        on: contextlib.AbstractContextManager[object] = torch.cuda.stream(
            parts.make_stream(f"cuda:{self._device}", stream, 0)
        )
        return on

    def _take(self, size: int, stream: Any) -> int:
        return int(torch.cuda.caching_allocator_alloc(size, self._device, stream))


def _multiply_backward() -> None:
    """Let the thread that runs backward passes take its workspace."""
    one = torch.ones(1, 1, device="cuda", requires_grad=True)
    (one @ one).backward()


_TAKE: tuple[Callable[[], object], ...] = (torch.cuda.current_blas_handle, _multiply_backward)
"""What makes torch take a workspace: one for the cell's thread, one for that of backward passes."""
_TAKE_OF_LT = (lambda: torch.nn.Linear(2, 2, device="cuda")(torch.ones(2, 2, device="cuda")),)
"""The same for cuBLASLt, which has smaller ones of its own in torch 2.10."""


_NO_OPERATOR = frozenset(
    {"forward", "_call_impl", "_wrapped_call_impl", "<lambda>", "<module>", "wrapper", "_fn"}
)

_AT = operator.itemgetter("filename", "name", "line")
_SHOWN = (known.__file__, "__call__")

Trace = list[dict[str, Any]]
"""Of one device: an entry of `torch.cuda.memory_snapshot`'s for each block taken or given back."""


class History:
    """Takes marks while the cell runs, and goes through all at the end."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self._origins: dict[tuple[Any, ...], tuple[Place, str, str | None]] = {}

    def note(self, mark: Callable[..., None], *args: Any) -> None:
        """Keep a method of the ledger's that is to be called where the history has come so far."""
        self._marks.append((time.time() * 1e6, mark, args))

    def ledger(
        self,
        before: Iterable[tuple[int, int, int]],
        traces: list[Trace],
        place_of: Callable[[Trace], Place],
    ) -> Ledger:
        """Return the lives of all blocks.

        Args:
            before: device, address and size of each block that was in use when the cell began.
            traces: the history of each device.
            place_of: tells the cell's line from an entry's frames.
        """
        ledger = Ledger([Account() for _ in traces])
        for device, address, size in before:
            ledger.begin(address, device, size)
        ledger.start()
        events: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = [
            (entry["time_us"], self._follow, (device, entry, place_of))
            for device, trace in enumerate(traces)
            for entry in trace
        ]
        for _, mark, args in sorted(events + self._marks, key=operator.itemgetter(0)):
            mark(ledger, *args)
        return ledger

    def _follow(
        self,
        ledger: Ledger,
        device: int,
        entry: Mapping[str, Any],
        place_of: Callable[[Trace], Place],
    ) -> None:
        """Go through one entry."""
        action, address = entry["action"], entry.get("addr", 0)
        if action == "free_requested" and address in ledger.blocks:
            ledger.end(address)
        if action not in {"alloc", "oom"}:
            return
        place, operator, kind = self._origin(entry["frames"], place_of)
        if action == "oom":
            account = ledger.accounts[device]
            refused = Life(device, entry["size"], 0, operator, place, False)
            account.failure = account.failure or Peak(account.allocated, ledger.time, refused)
            return
        if place.line is None and ledger.in_backward:
            place, operator = ledger.backward, "backward"  # it runs in a thread of torch's
        ledger.operators += 1
        ledger.operator, ledger.place = operator, place
        life = ledger.begin(address, device, rounded(entry["size"]))
        if kind:
            life.mark(kind)

    def _origin(
        self, frames: Trace, place_of: Callable[[Trace], Place]
    ) -> tuple[Place, str, str | None]:
        """Return the line, the operator and, where it is certain, what the block is; once for the same frames."""
        key = tuple(map(_AT, frames))
        if key not in self._origins:
            at = next((at for at, each in enumerate(frames) if _AT(each)[:2] == _SHOWN), -1)
            called = frames[
                at + 1 :
            ]  # a run that follows values has its own frames over the operator's caller
            ranks = any(
                "/distributed" in each["filename"] or "/deepspeed/" in each["filename"]
                for each in called[:3]
            )
            kinds = [
                _AMONG_RANKS[each["name"]]
                for each in called[:3]
                if ranks and each["name"] in _AMONG_RANKS
            ]
            self._origins[key] = place_of(called), operator_of(called), next(iter(kinds), None)
        return self._origins[key]


_AMONG_RANKS = {
    "init_all_gather_outputs": GATHERED, "alloc_all_gather_outputs": GATHERED, "foreach_all_gather": GATHERED,
    "_alloc_padded_unsharded_flat_param": GATHERED, "foreach_reduce": BUCKETS, "_get_reduce_scatter_tensors": BUCKETS,
    "_ddp_init_helper": BUCKETS, "_pre_forward": BUCKETS, "setup_buckets": BUCKETS,
    "_partition_param_sec": GATHERED, "_all_gather_dtype": GATHERED, "all_gather_coalesced": GATHERED,
}  # fmt: skip
"""What functions of FSDP, DDP and DeepSpeed ask for, by which ranks share parameters and gradients."""


def operator_of(frames: Trace) -> str:
    """Return what asked for the memory: torch's innermost function, or the module's file for a `forward`."""
    for frame in frames:
        if frame["name"] == "_engine_run_backward":
            return "backward"
        if frame["name"] == "forward" and "/torch/nn/modules/" in frame["filename"]:
            return str(frame["filename"].rpartition("/")[2].removesuffix(".py"))
        if "/torch/" not in frame["filename"]:
            return ""
        if frame["name"] not in _NO_OPERATOR:
            return str(frame["name"])
    return ""
