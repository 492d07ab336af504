"""The CUDA allocator of a dry run: the notebook's blocks put back into it, and afterwards its history as a `Ledger`.

Runs in the worker's process. The blocks are as many and as large as in the notebook, with the same gaps between them.
Each segment is allocated whole and given back to the cache. Its blocks are then allocated in their order: the cache has
no other room, so they fall into place, gaps included. The gaps are given back at the end, when every storage of the
notebook has taken the block that it has there.

While the cell runs, labels of blocks are only noted, each with its time. At the end they are put between the history's
entries, and all of it is gone through in order: which block lived when, allocated on which line, and what it was.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpumagic.dryrun import parts
from gpumagic.memory.allocator import SMALL, rounded
from gpumagic.memory.ledger import BUCKETS, GATHERED, Account, Ledger, Life, Peak, Place
from gpumagic.memory.segments import Segment
from gpumagic.worker import known

_give_back = torch.cuda.caching_allocator_delete
OnStream = contextlib.AbstractContextManager[object]
"""In it, memory is allocated on a stream."""


class _Workspace(NamedTuple):
    """A block that cuBLAS has in the notebook and is to take again."""

    address: int
    """That of the notebook."""
    stream: int
    take: Callable[[], object]
    """Makes torch allocate it."""


class Layout:
    """The blocks of one device.

    Args:
        device: its index.
        segments: what the notebook's allocator has there.
    """

    def __init__(self, device: int, segments: Sequence[Segment]) -> None:
        self._device = device
        self._owned: dict[int, tuple[int, int]] = {}
        """By the address of a block in the notebook, its address here and its stream."""
        self._small_gaps: list[int] = []
        self._gaps: list[int] = []
        for segment in segments:
            self._lay_out(segment)

    def _lay_out(self, segment: Segment) -> None:
        stream = parts.make_stream(f"cuda:{self._device}", segment.stream, 0)
        whole = sum(block.size for block in segment.blocks)
        # What fills a segment of small blocks is allocated in the largest pieces that such a segment serves.
        pieces = [SMALL] * (whole // SMALL) if segment.is_small else [whole]
        for address in [self._allocate(size, stream) for size in pieces]:
            _give_back(address)
        for block in segment.blocks:
            sizes = _pieces(block.size) if segment.is_small else [block.size]
            addresses = [self._allocate(size, stream) for size in sizes]
            if not block.is_free:
                self._owned[block.address] = (addresses[0], segment.stream)
            elif segment.is_small:
                self._small_gaps += addresses
            else:
                self._gaps += addresses

    def claim(self, part: parts.StoragePart) -> OnStream:
        """Make room where a storage of the notebook lies; return the stream that it is made on."""
        if part.address not in self._owned:
            return contextlib.nullcontext()
        return self._let_go(part.address)

    def settle(self, workspaces: Sequence[tuple[int, int]] = ()) -> None:
        """Give back the gaps, and let cuBLAS take the blocks that it has in the notebook.

        Args:
            workspaces: the address of each in the notebook, and its bytes.
        """
        retaken = self._retaken(workspaces)
        with torch.cuda.device(self._device):
            for workspace in retaken[:1]:
                # It allocates nothing else, and no gap is open yet: it gets the same block again.
                with self._let_go(workspace.address):
                    workspace.take()
            for gap in self._small_gaps:
                _give_back(gap)
            for workspace in retaken[1:]:
                self._let_go(workspace.address)
            for workspace in retaken[1:]:
                with self._on(workspace.stream):
                    workspace.take()
        for gap in self._gaps:
            _give_back(gap)

    def _retaken(self, workspaces: Sequence[tuple[int, int]]) -> list[_Workspace]:
        """Return the workspaces that cuBLAS is to take again, by stream, of which each has its own.

        The others are of threads that are gone. They stay, but nothing uses them.
        """
        there = [workspace for workspace in workspaces if workspace[0] in self._owned]
        there.sort(key=operator.itemgetter(1), reverse=True)
        retaken = []
        numbers: Counter[tuple[int, bool]] = Counter()
        for address, size in there:
            _, largest = there[0]
            _, stream = self._owned[address]
            is_of_lt = size < largest
            takes = _TAKE_OF_LT if is_of_lt else _TAKE
            number = numbers[stream, is_of_lt]
            if number < len(takes):
                numbers[stream, is_of_lt] += 1
                retaken.append(_Workspace(address, stream, takes[number]))
        retaken.sort(key=operator.attrgetter("stream"))
        return retaken

    def _let_go(self, address: int) -> OnStream:
        """Give a block back; return the stream whose next request it serves."""
        here, stream = self._owned.pop(address)
        _give_back(here)
        return self._on(stream)

    def _on(self, stream: int) -> OnStream:
        if not stream:
            return contextlib.nullcontext()
        here = parts.make_stream(f"cuda:{self._device}", stream, 0)
        on: OnStream = torch.cuda.stream(here)
        return on

    def _allocate(self, size: int, stream: Any) -> int:
        return int(torch.cuda.caching_allocator_alloc(size, self._device, stream))


def _pieces(size: int) -> list[int]:
    """Return a block's size in pieces of which each is no larger than what a segment of small blocks serves."""
    pieces = []
    while size > SMALL:
        pieces.append(SMALL)
        size -= SMALL
    return [*pieces, size]


def _multiply_backward() -> None:
    """Let the thread that runs backward passes take its workspace."""
    one = torch.ones(1, 1, device="cuda", requires_grad=True)
    (one @ one).backward()


def _multiply_by_lt() -> None:
    """Let cuBLASLt take its workspace."""
    layer = torch.nn.Linear(2, 2, device="cuda")
    layer(torch.ones(2, 2, device="cuda"))


Take = Callable[[], object]
_TAKE: tuple[Take, ...] = (torch.cuda.current_blas_handle, _multiply_backward)
"""What makes torch take a workspace: the first one for the cell's thread, the second for that of backward passes."""
_TAKE_OF_LT: tuple[Take, ...] = (_multiply_by_lt,)
"""The same for cuBLASLt, which has smaller ones of its own in torch 2.10."""


_NO_OPERATOR = frozenset(
    {
        "forward",
        "_call_impl",
        "_wrapped_call_impl",
        "<lambda>",
        "<module>",
        "wrapper",
        "_fn",
    }
)
"""Names of torch's functions that say nothing of what is computed."""
_POSITION = operator.itemgetter("filename", "name", "line")
"""Of a frame."""
_SHOWN = (known.__file__, "__call__")
"""The file and name of the function by which a run that follows values sees each operator."""

Trace = list[dict[str, Any]]
"""Of one device: an entry of `torch.cuda.memory_snapshot`'s for each block taken or given back."""
Event = tuple[float, Callable[..., None], tuple[Any, ...]]
"""A time in microseconds, and what is called then with the ledger and some arguments."""


class _Origin(NamedTuple):
    """What asked for a block."""

    place: Place
    operator: str
    kind: str | None
    """What the block is, where that is certain."""


class History:
    """Takes notes while the cell runs, and goes through all at the end."""

    def __init__(self) -> None:
        self._notes: list[Event] = []
        self._origins: dict[tuple[Any, ...], _Origin] = {}
        """By the positions of all frames of a stack."""

    def note(self, mark: Callable[..., None], *args: Any) -> None:
        """Keep a method of the ledger that is to be called where the history has come so far."""
        self._notes.append((time.time() * 1e6, mark, args))

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
            place_of: returns where in the cell an entry's frames are.
        """
        ledger = Ledger([Account() for _ in traces])
        for device, address, size in before:
            ledger.begin(address, device, size)
        ledger.start()
        events: list[Event] = []
        for device, trace in enumerate(traces):
            for entry in trace:
                args = (device, entry, place_of)
                events.append((entry["time_us"], self._follow, args))
        events += self._notes
        events.sort(key=operator.itemgetter(0))
        for _, mark, args in events:
            mark(ledger, *args)
        return ledger

    def _follow(
        self,
        ledger: Ledger,
        device: int,
        entry: Mapping[str, Any],
        place_of: Callable[[Trace], Place],
    ) -> None:
        """Take one entry of the history over into the ledger."""
        action = entry["action"]
        address = entry.get("addr", 0)
        if action == "free_requested" and address in ledger.blocks:
            ledger.end(address)
        if action not in {"alloc", "oom"}:
            return
        place, operator, kind = self._origin(entry["frames"], place_of)
        if action == "oom":
            account = ledger.accounts[device]
            refused = Life(device, entry["size"], 0, operator, place, False)
            account.failure = account.failure or Peak(
                account.allocated, ledger.time, refused
            )
            return
        if (
            place.line is None and ledger.in_backward
        ):  # which runs in a thread of torch's
            place = ledger.backward
            operator = "backward"
        ledger.operators += 1
        ledger.operator = operator
        ledger.place = place
        life = ledger.begin(address, device, rounded(entry["size"]))
        if kind:
            life.mark(kind)

    def _origin(self, frames: Trace, place_of: Callable[[Trace], Place]) -> _Origin:
        """Return what asked for a block, from its frames; it is found once for the same frames."""
        key = tuple(map(_POSITION, frames))
        origin = self._origins.get(key)
        if origin is None:
            calling = _without_frames_of_ours(frames)
            origin = _Origin(
                place=place_of(calling),
                operator=operator_of(calling),
                kind=_kind_among_ranks(calling),
            )
            self._origins[key] = origin
        return origin


def _without_frames_of_ours(frames: Trace) -> Trace:
    """Return the frames below those that a run that follows values has over the operator's caller."""
    for depth, frame in enumerate(frames):
        if _POSITION(frame)[:2] == _SHOWN:
            return frames[depth + 1 :]
    return frames


def _kind_among_ranks(frames: Trace) -> str | None:
    """Return what a block is that ranks share parameters or gradients by; None for others."""
    innermost = frames[:3]
    for frame in innermost:
        if "/distributed" in frame["filename"] or "/deepspeed/" in frame["filename"]:
            break
    else:
        return None
    for frame in innermost:
        if frame["name"] in _AMONG_RANKS:
            return _AMONG_RANKS[frame["name"]]
    return None


_AMONG_RANKS = {
    "init_all_gather_outputs": GATHERED, "alloc_all_gather_outputs": GATHERED, "foreach_all_gather": GATHERED,
    "_alloc_padded_unsharded_flat_param": GATHERED, "foreach_reduce": BUCKETS, "_get_reduce_scatter_tensors": BUCKETS,
    "_ddp_init_helper": BUCKETS, "_pre_forward": BUCKETS, "setup_buckets": BUCKETS,
    "_partition_param_sec": GATHERED, "_all_gather_dtype": GATHERED, "all_gather_coalesced": GATHERED,
}  # fmt: skip
"""What functions of FSDP, DDP and DeepSpeed allocate, by which ranks share parameters and gradients."""


def operator_of(frames: Trace) -> str:
    """Return what asked for the memory: torch's innermost function, or the module's file for a `forward`."""
    for frame in frames:
        name: str = frame["name"]
        filename: str = frame["filename"]
        if name == "_engine_run_backward":
            return "backward"
        if name == "forward" and "/torch/nn/modules/" in filename:
            return Path(filename).stem
        if "/torch/" not in filename:
            return ""
        if name not in _NO_OPERATOR:
            return name
    return ""
