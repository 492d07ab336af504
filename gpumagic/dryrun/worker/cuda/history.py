"""What the allocator's own history of a run says, told as a `Ledger`.

While the cell runs only marks are taken, each with its time. At the end they are put between the history's entries, and
all of it is gone through in order: which block lived when, asked for on which line, and what it was.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpumagic.dryrun.worker import shown
from gpumagic.memory.allocator import rounded
from gpumagic.memory.ledger import BASE, BUCKETS, GATHERED, Account, Ledger, Life, Peak, Place

_NO_OPERATOR = frozenset({"forward", "_call_impl", "_wrapped_call_impl", "<lambda>", "<module>", "wrapper", "_fn"})

_AT = operator.itemgetter("filename", "name", "line")
_SHOWN = (shown.__file__, "__call__")
_FOLLOWED = frozenset({"alloc", "free_requested", "oom"})

Trace = list[dict[str, Any]]
"""Of one device: an entry of `torch.cuda.memory_snapshot`'s for each block taken or given back."""


class History:
    """Takes marks while the cell runs; `Modules` writes to it as to a ledger.

    Args:
        where: tells where the cell stands.
    """

    def __init__(self, where: Callable[[], Place]) -> None:
        self._where = where
        self._marks: list[tuple[float, Callable[[_Replay], object]]] = []
        self._depth = 0
        self._module: int | None = None

    @property
    def in_backward(self) -> int:
        """How many backward passes have begun and not ended."""
        return self._depth

    @in_backward.setter
    def in_backward(self, depth: int) -> None:
        self._depth = depth
        place = self._where()
        self._note(lambda replay: replay.in_backward(depth, place))

    @property
    def module(self) -> int | None:
        """The number of the module that asks for memory now."""
        return self._module

    @module.setter
    def module(self, number: int | None) -> None:
        self._module = number
        self._note(lambda replay: setattr(replay.ledger, "module", number))

    def own(self, key: int, module: int) -> None:
        """Say whose the block at an address is."""
        self._note(lambda replay: replay.ledger.own(key, module))

    def mark(self, address: int, kind: str) -> None:
        """Say what the block at an address is."""
        self._note(lambda replay: replay.ledger.mark(address, kind))

    def mark_activations(self) -> None:
        """Say that a backward pass begins."""
        self._note(lambda replay: replay.ledger.mark_activations())

    def _note(self, mark: Callable[[_Replay], object]) -> None:
        self._marks.append((time.time() * 1e6, mark))

    def ledger(
        self, before: Iterable[tuple[int, int, int]], traces: list[Trace], place_of: Callable[[Trace], Place]
    ) -> Ledger:
        """Return the lives of all blocks.

        Args:
            before: device, address and size of each block that was in use when the cell began.
            traces: the history of each device.
            place_of: tells the cell's line from an entry's frames.
        """
        replay = _Replay(len(traces), place_of)
        for device, address, size in before:
            replay.begin(device, address, size, BASE, Place())
        replay.ledger.start()
        events: list[tuple[float, Callable[[_Replay], object] | None, int, Any]] = [
            (entry["time_us"], None, device, entry)
            for device, trace in enumerate(traces)
            for entry in trace
            if entry["action"] in _FOLLOWED
        ]
        events += [(at, mark, 0, None) for at, mark in self._marks]
        for _, mark, device, entry in sorted(events, key=operator.itemgetter(0)):
            if mark is not None:
                mark(replay)
            else:
                replay.follow(device, entry)
        return replay.ledger


class _Replay:
    def __init__(self, devices: int, place_of: Callable[[Trace], Place]) -> None:
        self.ledger = Ledger([Account() for _ in range(devices)])
        self.ledger.unpacking = True
        self._place_of = place_of
        self._origins: dict[tuple[Any, ...], tuple[Place, str, str | None]] = {}
        self._backward = Place()

    def begin(self, device: int, address: int, size: int, operator: str, place: Place) -> None:
        self.ledger.operator, self.ledger.place = operator, place
        self.ledger.begin(address, device, size)

    def follow(self, device: int, entry: Mapping[str, Any]) -> None:
        """Go through one entry."""
        action, address = entry["action"], entry.get("addr", 0)
        if action == "alloc":
            self.ledger.operators += 1
            place, operator, kind = self._origin(entry["frames"])
            if place.line is None and self.ledger.in_backward:
                place, operator = self._backward, "backward"  # it runs in a thread of torch's
            self.begin(device, address, rounded(entry["size"]), operator, place)
            if kind:
                self.ledger.mark(address, kind)
        elif action == "free_requested" and address in self.ledger.blocks:
            self.ledger.end(address)
        elif action == "oom":
            account = self.ledger.accounts[device]
            place, operator, _ = self._origin(entry["frames"])
            refused = Life(device, entry["size"], 0, operator, place, False)
            account.failure = account.failure or Peak(account.allocated, self.ledger.time, refused)

    def _origin(self, frames: Trace) -> tuple[Place, str, str | None]:
        """Return the line, the operator and, where it is certain, what the block is; once for the same frames."""
        key = tuple(map(_AT, frames))
        if key not in self._origins:
            at = next((at for at, each in enumerate(frames) if _AT(each)[:2] == _SHOWN), -1)
            called = frames[at + 1 :]  # a run that follows values has its own frames over the operator's caller
            self._origins[key] = self._place_of(called), operator_of(called), _among_ranks(called)
        return self._origins[key]

    def in_backward(self, depth: int, place: Place) -> None:
        self.ledger.in_backward, self._backward = depth, place


_AMONG_RANKS = {
    "init_all_gather_outputs": GATHERED, "alloc_all_gather_outputs": GATHERED, "foreach_all_gather": GATHERED,
    "_alloc_padded_unsharded_flat_param": GATHERED, "foreach_reduce": BUCKETS, "_get_reduce_scatter_tensors": BUCKETS,
    "_ddp_init_helper": BUCKETS, "_pre_forward": BUCKETS, "setup_buckets": BUCKETS,
    "_partition_param_sec": GATHERED, "_all_gather_dtype": GATHERED, "all_gather_coalesced": GATHERED,
}  # fmt: skip
"""What functions of FSDP, DDP and DeepSpeed ask for."""


def _among_ranks(frames: Trace) -> str | None:
    """Return what a block is that the code asked for by which ranks share parameters and gradients."""
    if not any("/distributed" in each["filename"] or "/deepspeed/" in each["filename"] for each in frames[:3]):
        return None
    return next((_AMONG_RANKS[each["name"]] for each in frames[:3] if each["name"] in _AMONG_RANKS), None)


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
