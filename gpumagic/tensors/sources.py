"""The lines that allocated what no tensor accounts for, where torch records the history of allocations.

Where ``torch.cuda.memory._record_memory_history()`` is on, the allocator keeps the Python stack of every block it
hands out; the snapshot is read as its documentation describes it. Nothing is switched on here.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumagic import _compat
from gpumagic.report.base import grouped
from gpumagic.source.frames import is_library
from gpumagic.tensors.report import SourceRow

UNRECORDED_LINE = "a line that was not recorded"
_IN_USE = "active_allocated"
_OF_C = re.compile(r"(\?\?|.*\.(c|cc|cpp|cxx|cu|cuh|h|hpp|pyx|S))?")


def recorded_segments() -> Sequence[Mapping[str, Any]]:
    """Return the allocator's segments with the stacks of their blocks; none unless history is recorded."""
    torch = sys.modules.get("torch")
    is_recording = getattr(getattr(torch, "_C", None), "_cuda_isHistoryEnabled", None)
    if torch is None or is_recording is None or not torch.cuda.is_initialized():
        return ()
    try:
        if not is_recording():
            return ()
    except RuntimeError:  # cudaMallocAsync does not even say that it does not record
        return ()
    with _compat.names_of_stacks():
        found: Sequence[Mapping[str, Any]] = torch.cuda.memory._snapshot()["segments"]
    return found


def allocation_sources(
    recorded: Iterable[Mapping[str, Any]], known: Iterable[tuple[str, int]], backend: str = "cuda"
) -> tuple[SourceRow, ...]:
    """Return, most bytes first, the lines that allocated the blocks in which no known storage lies.

    Args:
        recorded: the segments of a snapshot.
        known: device and address of each storage that a tensor has.
        backend: whose allocator it is.
    """
    addresses = grouped(sorted(known))
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for segment in recorded:
        device = f"{backend}:{segment['device']}"
        for block in segment["blocks"]:
            if block["state"] == _IN_USE and not _holds_any(block, addresses.get(device, ())):
                key = (device, _users_line(block.get("frames", ())))
                nbytes, number = totals.get(key, (0, 0))
                totals[key] = (nbytes + block["size"], number + 1)
    rows = (SourceRow(device, line, nbytes, number) for (device, line), (nbytes, number) in totals.items())
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _holds_any(block: Mapping[str, Any], addresses: Sequence[int]) -> bool:
    last = bisect_right(addresses, block["address"] + block["size"] - 1)
    return last > 0 and addresses[last - 1] >= block["address"]


def _users_line(recorded: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line of the user's own code: ``"train.py:12 in step"``.

    By default the stack has the frames of C++ too, with what debug information says of their files: often ``"??"``.
    """
    python = [each for each in recorded if not _OF_C.fullmatch(each["filename"])]
    own = [each for each in python if not is_library("", each["filename"])] or python
    if not own:
        return UNRECORDED_LINE
    return f"{own[0]['filename']}:{own[0]['line']} in {own[0]['name']}"
