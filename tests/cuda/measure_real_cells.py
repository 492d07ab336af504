"""Dry-runs every real cell by both engines, really runs it, and writes real_cells/RESULTS.md.

python -m gpumagic.fakecuda --devices 2 -- python -m tests.cuda.measure_real_cells [NAME ...]
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.cuda.cell_runs import DEVICES, MIB, Runs, Verdicts, cells

RESULTS = Path(__file__).parent / "real_cells" / "RESULTS.md"
HEADER = """\
| cell | need, MiB | peak | CUDA engine | reserved | just below, at, above | passes | s | fake tensors | just below | s | the cell itself, s |
| --- | ---: | ---: | --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: |
"""  # noqa: E501
WORDS = {True: "fits", False: "not", None: "open"}


class Row:
    """What is true of a cell, and what both engines tell of it."""

    def __init__(self, runs: Runs, name: str) -> None:
        cell = cells()[name]
        self.name, self.is_plain = name, len(cell.reads) == 1
        runs.dry_run(cell)  # what its process imports for the first time counts for no cell
        self.cuda = runs.dry_run(cell)
        self.real = runs.really_like(self.cuda, cell)
        self.fake = runs.dry_run(cell, "fake", workspaces=False)
        self.without = runs.really_like(self.fake, cell, workspaces=False, off=0.01)
        device, need = runs.need(cell, self.real)
        self.verdicts: Verdicts = runs.verdicts(cell, need=(device, need))
        self.fake_below = runs.dry_run(cell, "fake", capacities={device: need - 2 * MIB})

    @property
    def is_exact(self) -> bool:
        """Whether the CUDA engine has the allocator's peak to the byte, on each device."""
        return not _reason(self.cuda) and self.cuda["peak"] == self.real["peak"]

    @property
    def error(self) -> float | None:
        """How far fake tensors are off where cuBLAS has no workspace, as a share, on the device where they are most."""
        if _reason(self.fake):
            return None
        told, real = self.fake["peak"], self.without["peak"]
        return max(
            (told[each] / max(1, real[each]) - 1 for each in range(DEVICES) if real[each]), key=abs
        )

    @property
    def is_right(self) -> bool:
        """Whether the CUDA engine's verdicts are: open only where what the host reads decides."""
        told = self.verdicts.told
        if self.is_plain:
            return told == self.verdicts.real
        return told["below"] is not True and told["at"] is not False and told["above"] is not False

    @property
    def is_falsely_certain(self) -> bool:
        """Whether fake tensors are said to be certain and are not within a hundredth."""
        return bool(self.fake.get("certain")) and (self.error is None or abs(self.error) > 0.01)

    def line(self) -> str:
        """Return the row of the table."""
        cuda = (
            "equal"
            if self.is_exact
            else _reason(self.cuda) or f"{_share(self.cuda, self.real):+.2%}"
        )
        fake = _reason(self.fake) or f"{self.error:+.2%}"
        reserved = "equal" if self.cuda.get("reserved") == self.real["reserved"] else "differs"
        passes = sum(each[1] for each in self.cuda.get("passes") or ())
        values = "" if self.is_plain else " *"
        return (
            f"| {self.name}{values} | {self.verdicts.need // MIB} | {max(self.real['peak']) / MIB:.1f} | {cuda} | "
            f"{reserved} | {_three(self.verdicts)} | {passes} | {self.cuda.get('seconds', 0):.2f} | {fake} | "
            f"{WORDS[self.fake_below.get('fits')]} | {self.fake.get('seconds', 0):.2f} | {self.real['seconds']:.2f} |\n"
        )


def _reason(told: dict[str, Any]) -> str:
    """Return why a dry run told nothing, or nothing."""
    return (told.get("failed") or told["error"] or "").partition(". ")[0]


def _share(told: dict[str, Any], real: dict[str, Any]) -> float:
    device = max(range(DEVICES), key=lambda each: real["peak"][each])
    return float(told["peak"][device] / real["peak"][device] - 1)


def _three(verdicts: Verdicts) -> str:
    return ", ".join(WORDS[verdicts.told[where]] for where in ("below", "at", "above"))


def main(names: list[str]) -> None:
    """Measure some of the cells, or all and write the table."""
    rows = []
    with Runs() as runs:
        for name in names or cells():
            rows.append(Row(runs, name))
            print(rows[-1].line(), end="", flush=True)
            if not names:  # an interrupted run leaves what it has measured
                RESULTS.write_text(_text(rows), encoding="utf-8")


def _text(rows: list[Row]) -> str:
    close = [row for row in rows if row.error is not None and abs(row.error) <= 0.01]
    untrue = [row.name for row in rows if row.verdicts.told["below"] is True]
    fakes = [row.name for row in rows if row.fake_below.get("fits") is True]
    count = len(rows)
    return (
        f"# Real cells: what dry runs tell, and what torch's CUDA allocator has\n\n"
        f"Written by `measure_real_cells.py` with torch {version('torch')} over the fake CUDA runtime. Each cell "
        f"really ran in its own process; *need* is the least capacity, in steps of 2 MiB, that it ends with. *At* is "
        f"that capacity, *above* 20 MiB more, *below* 2 MiB less. A star: what the host reads from the device "
        f"decides, and the cell was really run with several values, of which the worst counts. The peak of "
        f"some cells differs from run to run, as torch's threads do: of eight runs the first counts that has what was "
        f"told, or else the last. Fake tensors are compared with a run in which cuBLAS has no workspaces; at such "
        f"capacities they leave open "
        f"whether it fits, for what they do not model. Seconds were taken on two busy cores.\n\n"
        f"Of {len(cells())} cells these are {count}.\n\n"
        f"- The CUDA engine's peak is equal to the byte in {sum(row.is_exact for row in rows)} of {count}.\n"
        f"- Its verdict is right just below, at and just above the need in {sum(row.is_right for row in rows)} of "
        f'{count}; it says "fits" of what fails in {len(untrue)}{_named(untrue)}.\n'
        f'- Fake tensors are within 1 % in {len(close)} of {count}; they say "fits" 2 MiB below the need in '
        f"{len(fakes)}{_named(fakes)}, and are certain and wrong in {sum(row.is_falsely_certain for row in rows)}"
        f"{_named([row.name for row in rows if row.is_falsely_certain])}.\n\n"
        f"{HEADER}{''.join(row.line() for row in rows)}"
    )  # fmt: skip


def _named(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


if __name__ == "__main__":
    main(sys.argv[1:])
