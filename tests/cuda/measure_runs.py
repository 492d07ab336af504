"""Measures how long dry runs take beside the cells themselves, in how many runs, and writes real_cells/RUNS.md.

python -m gpumagic.fakecuda --devices 2 -- python -m tests.cuda.measure_runs [NAME ...]
"""

from __future__ import annotations

import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tests.cuda import reading_cells
from tests.cuda.cell_runs import Cell, Runs, cells

RESULTS = Path(__file__).parent / "real_cells" / "RUNS.md"
TURNS = 3
WITHIN = 0.5
"""Seconds that a dry run may take beside twice the cell's own."""


class Row(NamedTuple):
    """One cell, warm: the least seconds of a few turns."""

    name: str
    runs: int
    dry: float
    cell: float

    @property
    def is_within(self) -> bool:
        return self.dry <= 2 * self.cell + WITHIN

    def line(self) -> str:
        """Return the row of the table."""
        return f"| {self.name} | {self.runs} | {self.dry:.2f} | {self.cell:.2f} | {'yes' if self.is_within else 'no'} |\n"  # noqa: E501


def measure(runs: Runs, cell: Cell) -> Row:
    """Dry-run the cell and really run it, in turns; the first dry run imports what it needs and does not count."""
    runs.dry_run(cell)
    turns = [(runs.dry_run(cell), runs.really(cell)) for _ in range(TURNS)]
    dry, real = [told["seconds"] for told, _ in turns], [told["seconds"] for _, told in turns]
    return Row(cell.name, turns[0][0]["runs"], min(dry), min(real))


def all_cells() -> dict[str, Cell]:
    """Return the cells of real_cells/ and user_cells/, and those of `reading_cells.py`, by name."""
    reading = {
        name: Cell(name, reading_cells.SETUP, code)
        for name, (_, code) in reading_cells.cells().items()
    }
    return {**cells(), **reading}


def text_of(rows: list[Row]) -> str:
    """Return the page."""
    more = sorted(row.dry - 2 * row.cell for row in rows)
    shown = [row for row in rows if row.runs > 1 or not row.is_within]
    real, count = len(cells()), len(rows)
    return f"""\
# Real cells: how many runs a dry run takes, and how long

Written by `measure_runs.py` with torch {version("torch")} over the fake CUDA runtime: the {real} cells of RESULTS.md \
and the {count - real} of `reading_cells.py`. Each was dry-run by a warm worker and really run in turns, {TURNS} \
times; seconds are the least of them.

- {sum(row.is_within for row in rows)} of {count} take at most twice the cell's own host time and half a second. \
Beyond twice the cell's own, {statistics.median(more):.2f} s in the median, {more[-1]:.2f} s at worst.
- {sum(row.runs == 1 for row in rows)} take one run, all together {sum(row.runs for row in rows)}. Those that take \
more, or longer:

| cell | runs | dry run, s | the cell itself, s | within |
| --- | ---: | ---: | ---: | --- |
{"".join(row.line() for row in shown)}"""


def main(names: list[str]) -> None:
    """Measure some of the cells, or all and write the table."""
    found, rows = all_cells(), []
    with Runs() as runs:
        for name in names or found:
            rows.append(measure(runs, found[name]))
            print(rows[-1].line(), end="", flush=True)
    if not names:
        RESULTS.write_text(text_of(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
