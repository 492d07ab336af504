"""What the allocator's own history of a run says, told as a `Ledger`.

While the cell runs only marks are taken, each with its time. At the end they are put between the history's entries, and
all of it is gone through in order: which block lived when, asked for on which line, and what it was.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpumagic.dryrun.worker import known
from gpumagic.memory.allocator import rounded
from gpumagic.memory.ledger import BUCKETS, GATHERED, Account, Ledger, Life, Peak, Place

_NO_OPERATOR = frozenset({"forward", "_call_impl", "_wrapped_call_impl", "<lambda>", "<module>", "wrapper", "_fn"})

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
        self, before: Iterable[tuple[int, int, int]], traces: list[Trace], place_of: Callable[[Trace], Place]
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
        self, ledger: Ledger, device: int, entry: Mapping[str, Any], place_of: Callable[[Trace], Place]
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

    def _origin(self, frames: Trace, place_of: Callable[[Trace], Place]) -> tuple[Place, str, str | None]:
        """Return the line, the operator and, where it is certain, what the block is; once for the same frames."""
        key = tuple(map(_AT, frames))
        if key not in self._origins:
            at = next((at for at, each in enumerate(frames) if _AT(each)[:2] == _SHOWN), -1)
            called = frames[at + 1 :]  # a run that follows values has its own frames over the operator's caller
            ranks = any("/distributed" in each["filename"] or "/deepspeed/" in each["filename"] for each in called[:3])
            kinds = [_AMONG_RANKS[each["name"]] for each in called[:3] if ranks and each["name"] in _AMONG_RANKS]
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
