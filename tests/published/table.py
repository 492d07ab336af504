"""The rows of `published.toml`, what our cells have for them over the fake CUDA runtime, and how far that is off."""

from __future__ import annotations

import ast
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomllib

from gpumagic import fakecuda
from gpumagic.fakecuda import GPU, GPUS
from tests.forks import Forks

HERE = Path(__file__).parent
MEASURED = HERE / "measured.csv"
MARK = "# put back: "
TODAY, TORCH, OLDER = "5", "2.13", ", torch "
"""The transformers and torch of the environment that CI makes. What was measured with others was measured by hand."""
AGREE = {"exact", "within"}
WITHIN, SLACK = 0.01, 0.0005
UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}

ALIKE: dict[str, GPU] = {
    **GPUS,
    "A10G": replace(GPUS["RTX 3090"], name="NVIDIA A10G", multiprocessors=80),
    "L40S": replace(GPUS["L4"], name="NVIDIA L40S", multiprocessors=142, capacity=45 << 30),
    "RTX 2060": replace(
        GPUS["T4"], name="NVIDIA GeForce RTX 2060", multiprocessors=30, capacity=8 << 30
    ),
    "RTX 3080 Ti Laptop": replace(
        GPUS["RTX 3090"],
        name="NVIDIA GeForce RTX 3080 Ti Laptop GPU",
        multiprocessors=58,
        capacity=16 << 30,
    ),
    "GB10": replace(
        GPUS["RTX 4090"],
        name="NVIDIA GB10",
        major=12,
        minor=1,
        multiprocessors=48,
        capacity=119 << 30,
    ),
    "MI250": replace(GPUS["A100"], name="stands for an AMD Instinct MI250"),
    "not said": GPUS["A100"],
}
"""What stands for the GPU of a row. Of each, what decides kernels: compute capability, multiprocessors, and room."""


Measured = dict[tuple[str, str], int]
"""Bytes by a row's name and the environment that it was measured in."""


@dataclass(frozen=True)
class Row:
    """A published figure and the cell that is to have it.

    Attributes:
        source: the address of the page that has the figure.
        checked: whether we read it there ourselves.
        gpu: of whom the figure is, as `ALIKE` has it.
        versions: what the source says that it ran with.
        figure: as published, with its digits.
        unit: of the figure, one of `UNITS`.
        kind: which of the cell's figures it is: `peak` and `allocated`, `reserved`, or one that the cell names.
        cell: the file of `cells/`.
        arguments: the names that the cell finds set.
        transformers: the version of transformers of the time, such as `4.44`; empty where it does not matter.
        cause: why we are off, as shown by torch's or another library's sources, or by putting it back.
        guess: why we may be off.
    """

    source: str
    checked: bool
    gpu: str
    versions: str
    figure: str
    unit: str
    kind: str
    cell: str
    arguments: tuple[tuple[str, Any], ...]
    transformers: str
    cause: str
    guess: str

    @property
    def run(self) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
        """What rows that one run of a cell answers have in common."""
        return self.gpu, self.cell, self.arguments

    @property
    def name(self) -> str:
        """The row in words; no two are named alike."""
        said = ", ".join(f"{key} {value}" for key, value in self.arguments)
        return f"{self.cell}({said}) {self.kind}, {self.gpu}"

    @cached_property
    def published(self) -> float:
        """The figure in bytes."""
        return float(self.figure) * UNITS[self.unit]

    def error(self, ours: int) -> float:
        """How far we are off, as a share of the figure."""
        return ours / self.published - 1

    def status(self, ours: int) -> str:
        """How a figure of ours compares: exact is to the byte, or to the last digit that was given."""
        digits = len(self.figure.partition(".")[2])
        if abs(ours - self.published) < UNITS[self.unit] * 10.0**-digits * (
            0.5 if self.unit == "B" else 1
        ):
            return "exact"
        if abs(self.error(ours)) <= WITHIN:
            return "within"
        return "explained" if self.cause else "open"

    def is_worse(self, ours: int, recorded: int) -> bool:
        """Whether a figure of ours is further off than what is recorded; threads of torch's move some a little."""
        if self.status(recorded) == "exact":
            return self.status(ours) != "exact"
        return abs(self.error(ours)) > abs(self.error(recorded)) + SLACK

    def with_older_torch(self, known: Measured) -> dict[str, int]:
        """Return what was measured with older versions of torch, by version."""
        return {
            key[1].partition(OLDER)[2]: ours
            for key, ours in known.items()
            if key[0] == self.name and OLDER in key[1]
        }

    def ours(self, known: Measured) -> int | None:
        """Return what counts for us: what was measured with the transformers of the time, or else with today's."""
        return known.get((self.name, self.transformers), known.get((self.name, TODAY)))

    @property
    def put_back(self) -> list[str]:
        """What the cell sets as it was in the published versions."""
        return [line.partition(MARK)[2] for line in text_of(self.cell).splitlines() if MARK in line]


def rows() -> list[Row]:
    """Return all rows, in the order of the file."""
    found = []
    for source in tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))["source"]:
        for row in source.pop("rows"):
            said = {
                "kind": "peak",
                "transformers": "",
                "cause": "",
                "guess": "",
                "checked": True,
                "with": {},
            }
            said |= source | {
                key: row.pop(key) for key in ("figure", "kind", "cause", "guess") if key in row
            }
            arguments = tuple((said.pop("with") | row).items())
            said["source"] = said.pop("address")
            found.append(Row(arguments=arguments, **said))
    return found


def environment() -> str:
    """Return which transformers this environment has, `TODAY` or such as `4.44`, and its torch if that is older."""
    major, minor = version("transformers").split(".")[:2]
    transformers = TODAY if major == TODAY else f"{major}.{minor}"
    torch = ".".join(version("torch").split(".")[:2])
    return transformers if torch == TORCH else transformers + OLDER + torch


def runs_here(row: Row) -> bool:
    """Whether the cell can run here: with today's transformers, or with those of the time."""
    transformers, older, _ = environment().partition(OLDER)
    return transformers in {TODAY, row.transformers} or bool(older and not row.transformers)


def measure(
    wanted: Sequence[Row], first: str = "", **environment: str
) -> Iterator[tuple[Row, int]]:
    """Run the cells of some rows, each in a process of its own; yield what they have, in bytes.

    Args:
        wanted: the rows.
        first: code to run in the process that the cells' processes are forked from, after what these cells import.
        environment: variables of that process.
    """
    gpus = {row.gpu: fakecuda.environment(ALIKE[row.gpu], devices=2) for row in wanted}
    imports = [
        line for cell in dict.fromkeys(row.cell for row in wanted) for line in imports_of(cell)
    ]
    forks = Forks(
        "\n".join([f"import sys; sys.path[:] = {sys.path}", *imports, NO_VALUES, first]),
        **{**next(iter(gpus.values())), **environment},
    )
    try:
        for run in dict.fromkeys(row.run for row in wanted):
            told = forks.run(code_of(run[1], dict(run[2])), **gpus[run[0]])
            yield from ((row, told[row.kind]) for row in wanted if row.run == run)
    finally:
        forks.close()


NO_VALUES = """
import torch
from gpumagic import fakecuda
def draw(tensor, *arguments, **settings):
    return tensor if tensor.numel() > 2**16 else tensor.fill_(0.5)  # a small one may decide whether a layer runs

drawn = torch.library.Library("aten", "IMPL")
for name in ("normal_", "uniform_"):
    drawn.impl(name, draw, "CPU")
fakecuda.leave_out(2**20)
"""
"""Weights are neither drawn on the host nor copied: nothing depends on them, and they would take most of the time."""


def imports_of(cell: str) -> list[str]:
    """Return what a cell imports, a statement a line."""
    return [
        ast.unparse(each)
        for each in ast.parse(text_of(cell)).body
        if isinstance(each, (ast.Import, ast.ImportFrom))
    ]


def code_of(cell: str, arguments: dict[str, Any]) -> str:
    """Return what a process runs for a cell; it leaves the figures in `answer`."""
    return "\n".join([
        "import warnings; warnings.simplefilter('ignore'); figures = {}",
        "from gpumagic import fakecuda",
        *(f"{name} = {value!r}" for name, value in arguments.items()),
        text_of(cell),
        "answer = {'peak': torch.cuda.max_memory_allocated(), 'allocated': torch.cuda.memory_allocated(),",
        "          'reserved': torch.cuda.max_memory_reserved(), **figures}",
    ])  # fmt: skip


def text_of(cell: str) -> str:
    """Return the code of a cell."""
    return (HERE / "cells" / f"{cell}.py").read_text(encoding="utf-8")


def measured() -> Measured:
    """Return what is recorded."""
    with MEASURED.open(encoding="utf-8", newline="") as file:
        return {(row["row"], row["environment"]): int(row["bytes"]) for row in csv.DictReader(file)}


def record(found: Measured) -> None:
    """Write what was measured."""
    with MEASURED.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("row", "environment", "bytes"))
        table.writerows((*key, nbytes) for key, nbytes in found.items())
