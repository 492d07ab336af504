"""The corpus of `%%ondevice`: one file a cell, with the moves its report must have, and how such a cell is run.

A file of `ondevice_cells/` starts with comments, then comes the cell:

    # What it shows.
    # move: cpu -> simgpu:0, 2, 8000, x, .to      source -> target, how often, bytes, variable, what did it
    # move on cuda: cpu -> simgpu:0, 1, 4, -, indexing    instead of all `move` lines, on CUDA, where torch differs
    # asks: x,batch                               what `--move` names
    # needs: cuda                                 not for simulated devices
    # gap: torch.load is not seen                 the report is wrong; the test fails once it is right

A variable or cause of `?` is not compared. Without a `move` line nothing moves.
"""

from __future__ import annotations

import contextlib
import linecache
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpumagic import simgpu
from gpumagic.transfers.report import TransferReport
from gpumagic.transfers.run import DeviceRun

FOLDER = Path(__file__).parent / "ondevice_cells"
HEADERS_OF = "2.13"
"""The torch whose copies the headers of the cells have."""
SETUP = """
import torch
x = torch.ones(100, 10)
g = torch.ones(8, 4, device="simgpu:0")
far = torch.ones(5, 5, device="simgpu:1")
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
batch = {"inputs": torch.ones(1, 4), "labels": [torch.zeros(1, dtype=torch.int64)]}
rows = [x[0], x[1]]
"""

Totals = Counter[tuple[str, str]]
"""Something summed by source and target."""


@dataclass(frozen=True)
class Move:
    """One line of a report, as a cell's header writes it."""

    source: str
    target: str
    count: int
    nbytes: int
    name: str
    cause: str


@dataclass(frozen=True)
class CorpusCell:
    """A cell of the corpus and what its header says."""

    name: str
    code: str
    moves: tuple[Move, ...]
    moves_on_cuda: tuple[Move, ...] = ()
    asks: str = ""
    needs: str | None = None
    gap: str | None = None


def cells() -> list[CorpusCell]:
    """Return every cell of the corpus by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.py"))]


def run(
    cell: str,
    device: str = "simgpu:0",
    *,
    asks: str = "",
    backend: str = "simgpu",
    around: contextlib.AbstractContextManager[Any] | None = None,
    trace: bool | Sequence[str] = False,
    names: Mapping[str, object] | None = None,
) -> tuple[TransferReport, list[Any], dict[str, Any]]:
    """Run a cell as the magic does, and return its report, the device's own record of copies, and its names.

    Args:
        cell: the code, which writes devices as `simgpu:0` whatever the backend.
        device: what it runs on.
        asks: the names for `--move`.
        backend: the backend to run it on instead of `simgpu`.
        around: entered for the time of the run, but not of what is set up for it.
        trace: with `--trace`.
        names: variables that the cell finds.
    """
    namespace: dict[str, Any] = {}
    setup = (
        SETUP
        if backend == "simgpu" or getattr(torch, backend).device_count() > 1
        else SETUP.replace(":1", ":0")
    )
    exec(setup.replace("simgpu", backend), namespace)
    namespace.update(names or {})
    source = textwrap.dedent(cell).strip().replace("simgpu", backend)
    code = compile(source, "<cell>", "exec")
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(keepends=True), "<cell>")
    asked = asks.split(",") if asks else ()
    guard = DeviceRun(
        device.replace("simgpu", backend), namespace=namespace, move=asked, trace=trace
    )
    simgpu.reset_copies()
    with around or contextlib.nullcontext():
        guard.open()
        try:
            exec(code, namespace)
        finally:
            guard.close(None)
    assert guard.report is not None
    return guard.report, simgpu.copies(), namespace


def run_on_cuda(
    cell: CorpusCell, around: contextlib.AbstractContextManager[Any], *, trace: bool = False
) -> TransferReport:
    """Run a cell on CUDA inside what records its copies, be it the profiler or the log of the fake runtime."""
    report, _, _ = run(cell.code, asks=cell.asks, backend="cuda", around=around, trace=trace)
    return report


def bytes_by_direction(moves: Any) -> Counter[str]:
    """Return the bytes of a report's rows by direction."""
    told: Counter[str] = Counter()
    for row in moves:
        told[row.direction] += row.nbytes
    return +told


def counted(copies: list[Any]) -> tuple[Totals, Totals]:
    """Return how often and how many bytes the devices copied, by source and target."""
    count, nbytes = Totals(), Totals()
    for _, source, target, size in copies:
        if source != target:
            count[source, target] += 1
            nbytes[source, target] += size
    return count, nbytes


def reported(moves: Any) -> tuple[Totals, Totals]:
    """Return the same of a report's rows or a header's moves."""
    count, nbytes = Totals(), Totals()
    for move in moves:
        count[move.source, move.target] += move.count
        nbytes[move.source, move.target] += move.nbytes
    return Totals({key: n for key, n in count.items() if n}), nbytes


def unseen(moves: tuple[Move, ...], report: TransferReport) -> list[Move]:
    """Return the expected moves that the report does not have, one row each."""
    rows = [
        (row.source, row.target, row.count, row.nbytes, row.name or "-", row.cause)
        for row in report
    ]
    missing = []
    for move in moves:
        wanted = (move.source, move.target, move.count, move.nbytes, move.name, move.cause)
        found = next(
            (
                row
                for row in rows
                if all(want in ("?", got) for want, got in zip(wanted, row, strict=True))
            ),
            None,
        )
        if found is None:
            missing.append(move)
        else:
            rows.remove(found)
    return missing


def _read(path: Path) -> CorpusCell:
    text = path.read_text(encoding="utf-8")
    head = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    fields = [
        (key, value.strip()) for key, sep, value in (line.partition(": ") for line in head) if sep
    ]
    said = dict(fields)
    moves = tuple(_move(value) for key, value in fields if key == "move")
    on_cuda = tuple(
        _move(value.replace("simgpu", "cuda")) for key, value in fields if key == "move on cuda"
    )
    return CorpusCell(
        path.stem, text, moves, on_cuda, said.get("asks", ""), said.get("needs"), said.get("gap")
    )


def _move(text: str) -> Move:
    way, count, nbytes, name, cause = text.split(", ")
    source, target = way.split(" -> ")
    return Move(source, target, int(count), int(nbytes), name, cause)
