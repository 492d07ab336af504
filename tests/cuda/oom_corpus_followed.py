"""Follows every suggestion of the failing cells (`tests/oom/failing_cells`) over the fake runtime, and prints a table.

    python -m gpumagic.fakecuda --devices 2 -- python -m tests.cuda.oom_corpus_followed > tests/oom/FOLLOWED.md

Cells of other people's libraries follow: those of `real_cells/` and `user_cells/` on which no value that the host reads
has an influence, each on a device with three quarters of what the allocator reserves for it beyond what earlier cells
keep.

Each suggestion with a verdict is followed in a notebook of its own, against torch's own CUDA allocator: what is said
to fit must pass, and what is said not to fit alone must fail. With names as arguments, only
those cells are run, else all that have a suggestion to follow. cuBLAS
gets a workspace of 128 KiB, where it would take half of what the cells have.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import contextmanager
from unittest import mock

os.environ |= {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "128",
}  # read when torch comes

import torch

from gpumagic.dryrun import client
from gpumagic.report.units import parse_size
from tests.cuda import cell_runs, oom_corpus_cuda
from tests.cuda.rooms import DEVICES, give
from tests.oom import oom_corpus
from tests.oom.oom_corpus import Case


@contextmanager
def notebook(case: Case, seconds: float):
    """Yield a shell in which the case's earlier cells have run, and their numbers."""
    others = parse_size(case.strangers) if case.strangers else 0
    for index in range(DEVICES):
        give(index, parse_size(case.memory), others=others if index == 0 else 0)
    with (
        mock.patch.object(client, "close"),
        oom_corpus_cuda._notebook() as shell,
    ):  # one worker serves all cells
        shell.run_line_magic("config", f"GPUMagic.advice_seconds = {seconds}")
        yield (
            shell,
            [oom_corpus._ran(shell, text) for text in (oom_corpus.PRELUDE, *case.setup)][1:],
        )


def row(case: Case) -> str:
    """Return the row of a case: what was advised, how many suggestions were told what, and what was not so."""
    with notebook(case, 600.0) as (shell, _):
        oom_corpus._run(shell, case.cell)
        report = shell.user_ns.get("report")
    if report is None:
        return f"| {case.name} | no report | | | |"
    told = {True: 0, False: 0}
    wrong = oom_corpus.contradictions(report)
    for each in report.advice:
        if each.covers is None:
            continue
        with notebook(case, 0.0) as (shell, numbers):
            oom_corpus._run(shell, case.cell)
            followed = oom_corpus._follow(shell, case, each, numbers)
        told[each.covers] += 1
        if followed["passes"] is not each.covers:
            wrong.append(f"{each.title}: {followed['why'] or 'it passes'}")
    first = report.advice[0] if report.advice else None
    said = (
        ""
        if first is None
        else {True: "fits", False: "does not fit alone", None: "not tried"}[first.covers]
    )
    title = "nothing" if first is None else first.title
    return f"| {case.name} | {title} | {said} | {told[True]} / {told[False]} | {'; '.join(wrong)} |"


def library_cases(wanted: list[str]) -> dict[str, Case]:
    """Return the cells of libraries that run alone on a device, each with too little memory; all if none is named."""
    plain = [each for each in cell_runs.cells().values() if each.reads == ({},)]
    plain = [each for each in plain if not wanted or f"{each.name}, a library's" in wanted]
    needs = {each.name: (each, _needs(each)) for each in plain}
    return {
        f"{name}, a library's": Case(
            f"{name}, a library's", "shortage", "", (each.setup,), _guarded(each), f"{room}B"
        )
        for name, (each, room) in needs.items()
        if room
    }


def _guarded(cell: cell_runs.Cell) -> str:
    return f"%%oomguard -o report\n{cell.code}"


def _needs(cell: cell_runs.Cell) -> int:
    """Return room for what is there and three quarters of what the cell adds; 0 where earlier cells need as much."""
    ample = Case(cell.name, "", "", (cell.setup,), cell.code, f"{cell_runs.AMPLE}B")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    try:
        with notebook(ample, 0.0) as (shell, _):
            before, room = torch.cuda.memory_allocated(0), torch.cuda.max_memory_reserved(0)
            torch.cuda.reset_peak_memory_stats(0)
            if not oom_corpus._run(shell, cell.code).success:
                return 0
            peak = torch.cuda.max_memory_reserved(0)
    except AssertionError:  # what runs before it fails
        return 0
    room = max(room + (1 << 20), before + int(0.75 * (peak - before)))
    return room if room < peak else 0


def main(wanted: list[str]) -> None:
    torch.cuda.init()
    print(
        f"# Suggestions of the failing cells, followed over the fake CUDA runtime (torch {torch.__version__})\n"
    )
    print(
        "`tests/cuda/oom_corpus_followed.py` makes this table. The last column is what was said and was not so.\n"
    )
    print("| cell | first suggestion | said of it | followed: fit / do not fit alone | not so |")
    print("| --- | --- | --- | --- | --- |")
    for name, case in (oom_corpus_cuda.cases() | library_cases(wanted)).items():
        if name not in wanted if wanted else case.alike == "silent":
            continue
        try:
            found = row(case)
        except Exception as error:  # one broken case must not hide the others
            found = f"| {name} | | | | {type(error).__name__}: {str(error).splitlines()[0][:100]} |"
        print(found, flush=True)
        gc.freeze()  # what is there by now stays; each collection would look at all of torch again


if __name__ == "__main__":
    main(sys.argv[1:])
