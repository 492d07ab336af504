"""Measures what is advised first of cells of other people's code (`other_cells/`), on devices too small for them.

    python -m tests.oom.first_advice simgpu
    python -m gpumagic.fakecuda --devices 2 -- python -m tests.oom.first_advice cuda

Each cell runs once with ample memory, which tells what it needs; then on a device that has 90, 60 and 30 % of what it
adds beside what earlier cells hold. The first suggestion is followed as a user would, with real runs, and a row of the
table says what came of it. Names of cells and ``at=60`` choose; ``seconds=8`` is what dry runs of advice may take.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import re
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ |= {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "128",
}  # read when torch comes

import torch

from gpumagic.advice import search
from gpumagic.advice.records import Advice
from gpumagic.advice.runs import EditedRuns
from gpumagic.advice.trials import Trials
from gpumagic.report import progress
from tests.oom import oom_corpus
from tests.oom.oom_corpus import Case

FOLDER = Path(__file__).parent / "other_cells"
AMPLE = 4 << 30
SHARES = (90, 60, 30)


class Row(NamedTuple):
    """What came of one failure."""

    cell: str
    share: int
    title: str
    said: str
    outcome: str
    more: str
    """What came of a number 3 % larger than the one that was advised; empty where there is none, or it adds up."""
    first: float | None
    """Seconds from the failure to the first suggestion that was shown to fit."""
    report: float
    runs: int

    @property
    def is_good(self) -> bool:
        return self.outcome in ("passes", "nothing fits")


SHOWN = "| {} | {} | {} | {} | {} | {} | {} | {:.1f} | {} |"
NUMBER = re.compile(
    r"^(?!.* accumulate )(?:Lower .* from \d+ to|Compute line \d+ with|Map over|Take) ([\d,]+)\b"
)
TOTAL = """
{} of {} pass with the first suggestion; the first that fits after {:.1f} s, the report after {:.1f} s in the median, \
{:.1f} at worst; {:.1f} dry runs of each"""


def cells(backend: str, wanted: list[str]) -> dict[str, Case]:
    """Return the cells that can run here, written for the backend."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8").replace("cuda", backend)
        head, *parts = re.split(r"^# %%.*\n", text, flags=re.MULTILINE)
        fields = dict(re.findall(r"^# (needs|device): (.+)$", head, re.MULTILINE))
        there = all(importlib.util.find_spec(each) for each in fields.get("needs", "").split())
        is_for_cuda = "device" in fields
        if there and (backend == "cuda" or not is_for_cuda) and (not wanted or path.stem in wanted):
            *setup, cell = [each.strip("\n") for each in parts]
            found[path.stem] = Case(path.stem, "", "", tuple(setup), cell)
    return found


@contextmanager
def notebook(backend: str, case: Case, room: int, seconds: float):
    """Yield a shell on two devices with so many bytes, in which the earlier cells have run, and their numbers."""
    if backend == "cuda":
        from tests.cuda import oom_corpus_followed

        with oom_corpus_followed.notebook(
            Case(case.name, "", "", case.setup, "", f"{room}B"), seconds
        ) as found:
            yield found
        return
    from gpumagic import simgpu

    simgpu.enable(devices=2, memory=room)
    with oom_corpus._notebook(seconds) as shell:
        yield (
            shell,
            [oom_corpus._ran(shell, text) for text in (oom_corpus.PRELUDE, *case.setup)][1:],
        )


def needs(backend: str, case: Case) -> tuple[int, int, int]:
    """Return the bytes that earlier cells hold, those that they need at their peak, and those at the cell's peak."""
    if backend == "cuda":
        torch.cuda.init()
    if hasattr(torch, backend):  # peaks are the process's
        getattr(torch, backend).empty_cache()
        getattr(torch, backend).reset_peak_memory_stats(0)
    with notebook(backend, case, AMPLE, 0.0) as (shell, _):
        module = getattr(torch, backend)
        used = module.max_memory_reserved if backend == "cuda" else module.max_memory_allocated
        before, least = module.memory_allocated(0), used(0)
        module.reset_peak_memory_stats(0)
        result = oom_corpus._run(shell, case.cell)
        assert result.success, result.error_in_exec or result.error_before_exec
        return before, least, used(0)


@contextmanager
def timed():
    """Yield when the dry runs of advice ended, and when the first suggestion was shown to fit."""
    ends, fits = list[float](), list[float]()
    run, known = EditedRuns.run, progress.known
    of, choose = Trials.of, search.choose_number

    def noted(self, *given):
        try:
            return run(self, *given)
        finally:
            ends.append(time.monotonic())

    def tried(self, *given):
        trial = of(self, *given)
        fits.extend([time.monotonic()] if trial.fits else [])
        return trial

    def chosen(*given, **more):
        found = choose(*given, **more)
        fits.extend([time.monotonic()] if found.trial.fits else [])
        return found

    def shown(text):
        fits.append(time.monotonic())
        known(text)

    with (
        mock.patch.object(EditedRuns, "run", noted),
        mock.patch.object(Trials, "of", tried),
        mock.patch.object(search, "choose_number", chosen),
        mock.patch.object(progress, "known", shown),
    ):
        yield ends, fits


def measure(
    backend: str, case: Case, share: int, needed: tuple[int, int, int], seconds: float
) -> tuple[Row, list[str]]:
    """Return what came of the cell with a share of what it needs, and the titles and verdicts of all that was said."""
    guarded = f"%%oomguard -o report\n{case.cell}"
    before, least, peak = needed
    room = max(before + (peak - before) * share // 100, least + (1 << 20))
    failing = Case(case.name, "", "", case.setup, guarded, f"{room}B")
    with notebook(backend, case, room, seconds) as (shell, numbers), timed() as (ends, fits):
        began = time.monotonic()
        oom_corpus._run(shell, guarded)
        took = time.monotonic() - began
        report = shell.user_ns.get("report")
        if report is None:
            return Row(case.name, share, "", "", "no failure", "", None, took, len(ends)), []
        runs, first_fit = len(ends), fits[0] - began if fits else None
        wrong = oom_corpus.contradictions(report)
        texts = [f"  {each.covers} {each.title} | {each.trial}" for each in report.advice]
        texts = [
            f"  {report.verdict} need={report.need} notes={report.notes} untried={report.untried}",
            *texts,
            *(f"  WRONG {w}" for w in wrong),
        ]
        if not report.advice:
            return Row(case.name, share, "", "", "nothing", "", first_fit, took, runs), texts
        first = report.advice[0]
        said = {True: "fits", False: "does not fit", None: "not tried"}[first.covers]
        if first.covers is None and first.trial is not None and first.trial.needs is not None:
            said = "open"
        if first.gpu or first.title.startswith("Use a larger GPU"):
            return Row(
                case.name, share, first.title, said, "a larger GPU", "", first_fit, took, runs
            ), texts
        shell.run_line_magic("config", "GPUMagic.advice_seconds = 0")
        followed = oom_corpus._follow(shell, failing, first, numbers)
        outcome = (
            "passes" if followed["passes"] else f"fails: {followed['why']}"[:120].replace("\n", " ")
        )
    larger, more = with_more(first) if followed["passes"] else None, ""
    if larger is not None:
        with notebook(backend, case, room, 0.0) as (shell, numbers):
            oom_corpus._run(shell, guarded)
            more = (
                "passes"
                if oom_corpus._follow(shell, failing, larger, numbers)["passes"]
                else "fails"
            )
    return Row(case.name, share, first.title, said, outcome, more, first_fit, took, runs), texts


def with_more(advice: Advice) -> Advice | None:
    """Return a suggestion with a number that is 3 % larger, and at least by one; None where it has no such number."""
    found = NUMBER.match(advice.title)
    if found is None:
        return None
    number = int(found[1].replace(",", ""))

    def put(code: str) -> str:
        return re.sub(rf"\b{number}\b", str(max(number + 1, math.ceil(1.03 * number))), code)

    changes = tuple(replace(each, new=put(each.new)) for each in advice.changes)
    return replace(advice, changes=changes, first=advice.first and put(advice.first))


def main(backend: str, *options: str) -> None:
    named = dict(each.split("=") for each in options if "=" in each)
    wanted = [each for each in options if "=" not in each]
    shares = [int(named["at"])] if "at" in named else SHARES
    rows = []
    for name, case in cells(backend, wanted).items():
        try:
            needed = needs(backend, case)
        except Exception as error:  # one broken case must not hide the others
            print(
                f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True
            )
            continue
        for share in shares:
            try:
                row, texts = measure(backend, case, share, needed, float(named.get("seconds", 8)))
            except Exception as error:
                print(
                    f"{name} at {share}: {type(error).__name__}: {str(error)[:300]}",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            rows.append(row)
            first = "" if row.first is None else f"{row.first:.1f}"
            print(SHOWN.format(*row[:6], first, *row[7:]), flush=True)
            print(f"{name} {share}", *texts, sep="\n", file=sys.stderr, flush=True)
        gc.collect()
        gc.freeze()  # what is there by now stays; each collection would look at all of torch again
    if not rows:
        return
    good, took = [row for row in rows if row.is_good], [row.report for row in rows]
    firsts = [row.first for row in rows if row.first is not None]
    runs = statistics.mean(row.runs for row in rows)
    print(
        TOTAL.format(
            len(good),
            len(rows),
            statistics.median(firsts or [0]),
            statistics.median(took),
            max(took),
            runs,
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
