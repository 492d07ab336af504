"""What grows from one report of the live tensors to the next: variables that hold more bytes each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumagic.tensors.report import Growth, TensorReport, root_of

TIMES = 3
"""Times in a row that a variable must have grown."""
WORTH_NAMING = 0.01
"""The share of the fastest growth below which another is not named."""
MAX_REPORTS = 12
"""Reports that are looked back at."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a variable held at one moment."""

    nbytes: int = 0
    storages: int = 0
    graphs: int = 0
    """Tensors whose autograd graph keeps memory that nothing else does."""
    graph_nbytes: int = 0

    @property
    def total(self) -> int:
        """Its bytes, those of graphs included."""
        return self.nbytes + self.graph_nbytes


def held_by_variable(report: TensorReport) -> dict[str, Held]:
    """Return what each variable holds; keeps no tensor alive."""
    sums: dict[str, list[int]] = {}
    for row in report:
        if row.name is not None:
            found = sums.setdefault(root_of(row.name), [0, 0, 0, 0])
            graph = row.graph_nbytes or 0
            for place, value in enumerate((row.nbytes or 0, 1, graph > 0, graph)):
                found[place] += value
    return {name: Held(*found) for name, found in sums.items()}


def growing(history: Sequence[Mapping[str, Held]]) -> tuple[Growth, ...]:
    """Return the variables that grew in each of the last `TIMES` steps of the history or more, the fastest first."""
    found = []
    for name, now in history[-1].items() if history else ():
        course = [each.get(name) for each in history]
        times = 0
        for earlier, later in zip(reversed(course[:-1]), reversed(course[1:]), strict=True):
            if earlier is None or later is None or later.total <= earlier.total:
                break
            times += 1
        before = course[-2] if times else None
        if times >= TIMES and before is not None:
            found.append(
                Growth(
                    name, times, now.total - before.total, now.graph_nbytes - before.graph_nbytes,
                    now.storages - before.storages, now.graphs - before.graphs,
                )
            )  # fmt: skip
    fastest = max((each.nbytes for each in found), default=0)
    found = [each for each in found if each.nbytes >= WORTH_NAMING * fastest]
    return tuple(sorted(found, key=lambda each: -each.nbytes))
