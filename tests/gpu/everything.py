"""Runs on this machine's GPU what was never tried on one, and writes what came of it into RESULTS.md."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gpumagic import fakecuda

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "RESULTS.md"
BEGIN, END = "<!-- written by python -m tests.gpu -->", "<!-- as far as that -->"
LONGEST = 900
"""Seconds that one command may take."""


def main(names: list[str]) -> int:
    """Run the named parts, or all; return 1 if one failed."""
    if not torch.cuda.is_available():
        print("There is no GPU here: torch.cuda.is_available() is False.")
        return 2
    lines, failed = [], False
    for name in names or PARTS:
        print(f"=== {name}", flush=True)
        start = time.monotonic()
        told: list[tuple[str, str]] = []
        try:
            for outcome, said in PARTS[name]():
                print(f"{outcome}: {said}", flush=True)
                told.append((outcome, said))
        except Exception as error:
            told.append(("failed", f"{type(error).__name__}: {error}".splitlines()[0]))
        failed |= any(outcome == "failed" for outcome, _ in told)
        minutes = (time.monotonic() - start) / 60
        lines += [f"| {name} | {outcome} | {said} | {minutes:.1f} |" for outcome, said in told]
    _write("\n".join([*_machine(), "| part | outcome | | minutes |", "| --- | --- | --- | ---: |", *lines, ""]))
    return int(failed)


def _write(text: str) -> None:
    """Put the text in the place of the last run's; over the fake runtime it is printed instead."""
    if fakecuda.is_enabled():
        print(text)
        return
    page = RESULTS.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    RESULTS.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def _machine() -> list[str]:
    cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    found = ", ".join(f"{each.name} with {each.total_memory / 2**20:.0f} MiB" for each in cards)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True, text=True, check=False,
    ).stdout.strip() if not fakecuda.is_enabled() else "none"  # fmt: skip
    today = dt.datetime.now(tz=dt.timezone.utc).date()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return [f"{today}: {found}; driver {driver or 'not known'}; {versions}, {platform.system()}.", ""]


Told = Iterator[tuple[str, str]]


def _tests() -> Told:
    """What needs a GPU, then what runs on any device."""
    yield _pytest("tests/gpu")
    yield _pytest("-m", "device and not deep", "--ignore=tests/cuda", "--ignore=tests/gpu")


def _benchmarks() -> Told:
    yield _pytest("-m", "benchmark", "-s", "tests/benchmarks")


def _pytest(*arguments: str) -> tuple[str, str]:
    code, said = _run("-m", "pytest", "-p", "no:cacheprovider", *arguments)
    last = next((line for line in reversed(said) if re.search(r"\d+ (passed|failed|skipped|error)", line)), "")
    wrong = [line.split(" - ")[0] for line in said if line.startswith(("FAILED", "ERROR"))]
    return ("failed" if code else "ok"), "; ".join([last.strip("= "), *wrong])


def _notebooks() -> Told:
    """Run each notebook to its end, as `python -m gpumagic demo` does."""
    for path in sorted((ROOT / "demo_notebooks").glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            status, said = _run("-m", "gpumagic", "demo", path.stem, "--output", folder)
        yield ("failed" if status else "ok"), f"{path.stem}: {' '.join(said[-1:])}"


def _run(*arguments: str) -> tuple[int, list[str]]:
    """Return the exit status of Python with these arguments, and the lines that it prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=LONGEST,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, [f"ERROR it took longer than {LONGEST} s"]
    return done.returncode, (done.stdout + done.stderr).splitlines()


def _cells() -> Told:
    """Dry-run each cell of third-party code, run it, and compare the peaks."""
    code = "import sys; from gpu.everything import cell; cell(sys.argv[1])"
    from cell_runs import cells

    for name in cells():
        status, said = _run("-c", code, name)
        told = next((line.removeprefix(MARK) for line in said if line.startswith(MARK)), "")
        yield ("failed" if status or not told else "ok"), f"{name}: {told or ' '.join(said[-1:])}"


MARK = "dry run and peak: "


def cell(name: str) -> None:
    """Print what a dry run tells of a cell and what it then takes, in this process."""
    import types

    from cell_runs import cells

    import gpumagic

    found = cells()[name]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(found.setup, "<setup>", "exec"), vars(module))
    report = gpumagic.dry_run(found.code, vars(module), device="cuda:0")
    torch.cuda.reset_peak_memory_stats()
    exec(compile(found.code, "<cell>", "exec"), vars(module))
    told, real = report.peak.get("cuda:0", 0), torch.cuda.max_memory_allocated(0)
    print(f"{MARK}{told} B told, {real} B taken, {told / max(real, 1) - 1:+.3%}, by the engine {report.engine}")


def _published() -> Told:
    """Run the cells of published figures on this GPU, beside what was published and what the fake runtime has."""
    from published.table import TODAY, Row, code_of, measured, rows, runs_here

    recorded = measured()
    by_run: dict[object, list[Row]] = {}
    for row in filter(runs_here, rows()):
        by_run.setdefault(row.run[1:], []).append(row)
    for of_run in by_run.values():
        first = of_run[0]
        text = code_of(first.cell, dict(first.arguments)) + "\nimport json; print('figures: ' + json.dumps(answer))"
        status, said = _run("-c", text)
        figures = next((line for line in said if line.startswith("figures: ")), "")
        for row in of_run:
            if not figures:
                yield "failed", f"{row.name}: {status} {' '.join(said[-1:])}"
                continue
            here = int(re.search(rf'"{re.escape(row.kind)}": (\d+)', figures)[1])
            fake = recorded.get((row.name, TODAY), 0)
            yield (
                "ok",
                (
                    f"{row.name}: {here} B here, {row.figure} {row.unit} published ({row.error(here):+.3%}), "
                    f"{fake} B over the fake runtime ({fake / here - 1:+.3%})"
                ),
            )


PARTS: dict[str, Callable[[], Told]] = {
    "tests": _tests,
    "benchmarks": _benchmarks,
    "cells": _cells,
    "published": _published,
    "notebooks": _notebooks,
}
