"""Runs on this machine's GPU what fakes cannot show, side by side where nothing is timed."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpumagic import fakecuda

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CUDA = ROOT / "tests" / "cuda"
RESULTS = HERE / "RESULTS.md"
BEGIN, END = "<!-- written by python -m tests.gpu -->", "<!-- as far as that -->"
LONGEST = 900
"""Seconds that one command may take."""
LANES = max(2, (os.cpu_count() or 2) - 2)
GIB = 1 << 30


@dataclass
class Job:
    """A command, and what its output says.

    Attributes:
        name: of the job, and of the file that keeps what it prints.
        arguments: Python's.
        read: makes lines of the report of its exit status and of what it prints.
        memory: bytes of the GPU that it may take.
        environment: more variables.
        given: what it reads.
    """

    name: str
    arguments: Sequence[str]
    read: Callable[[int, list[str]], list[str]]
    memory: int = GIB
    environment: dict[str, str] = field(default_factory=dict)
    given: str = ""


def main(arguments: list[str]) -> int:
    """Run the named parts, or all; return 1 if one failed. A word with a slash is a folder for what is printed."""
    if not torch.cuda.is_available():
        print("There is no GPU here: torch.cuda.is_available() is False.")
        return 2
    logs = next((Path(each) for each in arguments if "/" in each), Path(tempfile.mkdtemp()))
    chosen = [each for each in arguments if "/" not in each] or list(PARTS)
    report = Report(chosen)
    room = Room(torch.cuda.get_device_properties(0).total_memory - 4 * GIB)
    for names in (
        [each for each in chosen if each in ALONE],
        [each for each in chosen if each not in ALONE],
    ):
        jobs = [(name, job) for name in names for job in PARTS[name]()]
        with ThreadPoolExecutor(LANES if names and names[0] not in ALONE else 1) as pool:
            started = {pool.submit(_run, job, room, logs): (name, job) for name, job in jobs}
            for done in as_completed(started):
                name, job = started[done]
                report.add(name, job, *done.result())
    return int(report.failed)


class Room:
    """The GPU's memory, as far as the jobs that run have not been promised it."""

    def __init__(self, nbytes: int) -> None:
        self._all = self._free = nbytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait until so much is free, or all of it, and take it."""
        nbytes = min(nbytes, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()


class Report:
    """What came of the jobs, by part; the page is written again after each."""

    def __init__(self, parts: list[str]) -> None:
        self.failed = False
        self._lines: dict[str, list[str]] = {part: [] for part in parts}
        self._machine = _machine()

    def add(self, part: str, job: Job, status: int, said: list[str], seconds: float) -> None:
        """Put a job's lines into the page."""
        try:
            lines = job.read(status, said)
        except Exception as error:
            lines = [
                f"FAILED {job.name}: {type(error).__name__}: {error}; it said: {' '.join(said[-2:])[:300]}"
            ]
        self.failed |= any(each.startswith("FAILED") for each in lines)
        self._lines[part] = sorted([*self._lines[part], *lines])
        print(f"=== {part}: {job.name}, {seconds:.0f} s", *lines, sep="\n", flush=True)
        page = [self._machine]
        for name, found in self._lines.items():
            page += [f"### {name}", "", HEADERS.get(name, ""), *found, ""] if found else []
        _write("\n".join(page))


def _write(text: str) -> None:
    """Put the text in the place of the last run's, but not over the fake runtime."""
    if not fakecuda.is_enabled():
        page = RESULTS.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        RESULTS.write_text(
            f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8"
        )


def _machine() -> str:
    cards = [
        torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())
    ]
    found = ", ".join(f"{each.name} with {each.total_memory / 2**20:.0f} MiB" for each in cards)
    driver = "none" if fakecuda.is_enabled() else subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    today = dt.datetime.now(tz=dt.timezone.utc).date()
    versions = (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    )
    return f"{today}: {found}; driver {driver or 'not known'}; {versions}, {platform.system()}.\n"


def _run(job: Job, room: Room, logs: Path) -> tuple[int, list[str], float]:
    """Return the exit status of a job, the lines that it prints, and its seconds."""
    shared = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(shared), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **job.environment,  # a process that forks must not have asked CUDA
    }  # fmt: skip
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / re.sub(r"\W+", "_", job.name)
    with room.taken(job.memory), log.open("w+", encoding="utf-8") as output:
        start = time.monotonic()
        try:
            status = subprocess.run(
                [sys.executable, *job.arguments], text=True, check=False, cwd=ROOT, timeout=LONGEST, env=environment,
                input=job.given, stdout=output, stderr=subprocess.STDOUT,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = 124
    return status, log.read_text(encoding="utf-8").splitlines(), time.monotonic() - start


# ---- Tests, benchmarks and notebooks


def _pytest(name: str, *arguments: str, **environment: str) -> Job:
    return Job(
        name,
        ("-m", "pytest", "-p", "no:cacheprovider", *arguments),
        _told_by_pytest,
        environment=environment,
    )


def _told_by_pytest(status: int, said: list[str]) -> list[str]:
    last = next(
        (line for line in reversed(said) if re.search(r"\d+ (passed|failed|skipped|error)", line)),
        "",
    )
    wrong = [
        line.split(" - ")[0].split(" ", 1)[1]
        for line in said
        if line.startswith(("FAILED", "ERROR"))
    ]
    return [
        f"{'FAILED' if status else 'ok'}: {last.strip('= ')}",
        *(f"FAILED {each}" for each in wrong),
    ]


def _tests() -> list[Job]:
    """What runs on any device; one test takes the whole GPU for a moment."""
    left_out = ("--ignore=tests/cuda", "--ignore=tests/gpu")
    return [_pytest("on every device", "-m", "device and not deep", *left_out, "tests")]


def _cupti() -> list[Job]:
    return [
        _pytest("tests of GPUs", "-n", "4", "--dist=load", "tests/gpu"),
        _pytest("owners of all bytes", "tests/cuda/test_owners_of_blocks.py", GPUMAGIC_ON_GPU="1"),
    ]


def _benchmarks() -> list[Job]:
    names = ("gpuinfo", "ondevice", "cells", "devices", "trace", "dryrun")
    return [
        Job(
            f"benchmark of {name}",
            (
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                "-m",
                "benchmark",
                "-s",
                f"tests/benchmarks/test_cost_of_{name}.py",
            ),
            _told_by_benchmarks,
        )
        for name in names
    ]


def _told_by_benchmarks(status: int, said: list[str]) -> list[str]:
    figures = [
        each
        for each in said
        if re.search(r"\d (us|ms|s)\b|\dx ", each) and not each.startswith(("E ", ">"))
    ]
    return [*_told_by_pytest(status, said), *(f"    {each.strip()}" for each in figures)]


def _notebooks() -> list[Job]:
    """Each notebook to its end, as `python -m gpumagic demo` runs it."""
    folder = tempfile.mkdtemp()
    return [
        Job(
            path.stem, ("-m", "gpumagic", "demo", path.stem, "--output", folder),
            lambda status, said, name=path.stem: [f"{'FAILED' if status else 'ok'}: {name}: {' '.join(said[-1:])}"],
        )
        for path in sorted((ROOT / "demo_notebooks").glob("*.ipynb"))
    ]  # fmt: skip


# ---- Dry runs against what cells take


def _cells() -> list[Job]:
    """Cells of third-party code, and those that read values: the peak, and verdicts at a cap on this process."""
    from tests.cuda.cell_runs import cells
    from tests.cuda.reading_cells import cells as reading

    code = "import sys; from tests.gpu.measured import cells; cells(sys.argv[1:])"
    plain = [name for name, cell in cells().items() if "cuda:1" not in cell.setup + cell.code]
    wanted = [*plain, *(f"reads: {name}" for name in reading())]
    return [
        Job(f"cells {start}", ("-c", code, *wanted[start::LANES]), _told_of_cells, memory=3 * GIB)
        for start in range(min(LANES, len(wanted)))
    ]


MARK = "told: "


def _told_of_cells(status: int, said: list[str]) -> list[str]:
    found = [json.loads(line.removeprefix(MARK)) for line in said if line.startswith(MARK)]
    return [
        *(each["row"] for each in found),
        *([f"FAILED: {' '.join(said[-1:])}"] if status else []),
    ]


# ---- Operators: this GPU, the fake runtime and fake tensors


def _operators() -> list[Job]:
    code = "import sys; from tests.gpu.measured import operators; operators(sys.stdin.read().splitlines())"
    expressions = (CUDA / "operators.txt").read_text(encoding="utf-8").splitlines()
    return [
        Job(
            f"operators {start}",
            ("-c", code),
            _told_of_cells,
            given="\n".join(expressions[start::6]),
        )
        for start in range(6)
    ]


# ---- Figures that others published


def _published() -> list[Job]:
    """The cells of published figures on this GPU, beside what the fake runtime says of the same GPU and torch."""
    from tests.published.table import rows, runs_here

    code = "import sys; from tests.gpu.measured import published; published(sys.argv[1])"
    runs = {json.dumps([row.cell, dict(row.arguments)]): row for row in rows() if runs_here(row)}
    alone = {"torchtitan", "sharded_optimizer"}  # trained by several processes
    return [
        Job(
            f"published {number}",
            ("-c", code, run),
            _told_of_cells,
            memory=int(1.3 * row.published) + GIB,
        )
        for number, (run, row) in enumerate(runs.items())
        if row.cell not in alone and row.published < 60 * GIB
    ]


# ---- Advice that is followed


def _advice() -> list[Job]:
    """The first suggestion after an out-of-memory, followed by real runs, at three shares of what each cell needs."""
    names = sorted(path.stem for path in (ROOT / "tests" / "oom" / "other_cells").glob("*.py"))
    return [
        Job(
            f"advice {start}",
            ("-m", "tests.oom.first_advice", "cuda", *names[start::LANES]),
            _told_of_advice,
            memory=3 * GIB,
        )
        for start in range(LANES)
    ]


def _told_of_advice(status: int, said: list[str]) -> list[str]:
    return [line for line in said if re.match(r"\| \w+ \| \d+ \|", line)] or [
        f"FAILED: {' '.join(said[-1:])}"
    ]


def _failures() -> list[Job]:
    """Every cell of the corpus that runs out, and ways to run out: the report's figures are the allocator's."""
    code = "import sys; from tests.gpu.measured import failures; failures(*map(int, sys.argv[1:]))"
    starts = [str(start) for start in range(4)]
    return [
        Job(f"failures {each}", ("-c", code, each, "4"), _told_of_cells, memory=2 * GIB)
        for each in starts
    ]


PARTS: dict[str, Callable[[], list[Job]]] = {
    "tests": _tests,
    "benchmarks": _benchmarks,
    "cupti": _cupti,
    "cells": _cells,
    "advice": _advice,
    "failures": _failures,
    "published": _published,
    "operators": _operators,
    "notebooks": _notebooks,
}
ALONE = {"tests", "benchmarks"}
"""What is timed, or takes the whole GPU."""
HEADERS = {
    "cells": """\
| cell | told, MiB | taken, MiB | | reserved | need, MiB | just below, at, above: told | really | s |
| --- | ---: | ---: | ---: | --- | ---: | --- | --- | ---: |""",
    "published": """\
| cell | figure | this GPU, B | fake runtime | published | versions |
| --- | --- | ---: | ---: | ---: | --- |""",
    "advice": """\
| cell | share | first suggestion | said of it | when followed | 3 % more | s to it | s | runs |
| --- | ---: | --- | --- | --- | --- | ---: | ---: | ---: |""",
}
