"""`ClusterReport`, the reports of many processes as one; `merge`; and the GPUs that several processes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic.errors import OptionError
from gpumagic.gpus.report import GPUReport, GpuRow
from gpumagic.oom.report import OomReport
from gpumagic.report.base import Origin, Report, columns_of, frame
from gpumagic.tensors.report import TensorReport
from gpumagic.transfers.report import TransferReport

if TYPE_CHECKING:
    import pandas as pd


ANSWERED = "answered"
KINDS: Mapping[str, type[Report[Any]]] = {
    "gpuinfo": GPUReport,
    "devices": TensorReport,
    "ondevice": TransferReport,
    "oomguard": OomReport,
}
"""The report of each magic."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One engine and its answer."""

    engine: int | str
    """Its number in the cluster; or the name it was merged under."""
    origin: Origin = field(default_factory=Origin)
    state: str = ANSWERED
    """``"answered"``, ``"no gpumagic"``, ``"other version"``, ``"failed"``, ``"dead"``, ``"busy"`` (it is in a cell);
    after a cell also ``"out of memory"``, ``"raised"`` or ``"interrupted"``."""
    detail: str = ""
    """More about the state, with the remedy."""
    no_device: str = ""
    """What it answers where it has no such device, with those that it has."""
    report: Any = None
    """Its report, or the result of another request."""


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A row of one engine's report; an engine without rows has one whose ``row`` is None."""

    host: str
    engine: int | str
    rank: int | None
    state: str
    row: Any = None


@dataclass(frozen=True, repr=False)
class ClusterReport(Report[PlacedRow]):
    """The reports of many engines, with all their rows; `to_pandas` puts host, engine and rank before their columns."""

    magic: str
    """The magic of these reports: ``"gpuinfo"``, ``"devices"``, ``"ondevice"`` or ``"oomguard"``."""
    engines: tuple[EngineAnswer, ...] = ()

    @property
    def rows(self) -> tuple[PlacedRow, ...]:
        placed: list[PlacedRow] = []
        for answer in self.engines:
            origin = answer.origin
            place = PlacedRow(origin.host, answer.engine, origin.rank, answer.state)
            own = answer.report.rows if answer.report is not None else ()
            placed += [replace(place, row=row) for row in own] or [place]
        return tuple(placed)

    @property
    def reports(self) -> dict[int | str, Any]:
        """Return the report of each engine that has one."""
        return {
            answer.engine: answer.report
            for answer in self.engines
            if answer.report is not None
        }

    def to_pandas(self) -> pd.DataFrame:
        """Return all rows of all engines; an engine without rows has one with its state, so that none is missing."""
        places = {
            name: kind for name, kind in columns_of(PlacedRow).items() if name != "row"
        }
        columns = columns_of(KINDS[self.magic].row_type)
        cells: list[tuple[Any, ...]] = []
        for placed in self.rows:
            values = [getattr(placed, name) for name in places]
            values += [getattr(placed.row, name, None) for name in columns]
            cells.append(tuple(values))
        return frame({**places, **columns}, cells)


def merge(reports: Mapping[Any, object] | Sequence[object]) -> ClusterReport:
    """Return reports of several processes as one.

    Args:
        reports: of one kind, such as what `gpumagic.gpuinfo` returned in each process; by name where it is a mapping,
            as ``client.run(gpumagic.gpuinfo)`` of dask.distributed returns it. Merged reports may be among them, and an
            exception or None where a process has none. Of several reports of one process the last counts.

    Raises:
        OptionError: there is no report among them, or they are of several kinds.
    """
    magics: set[str] = set()
    answers: list[EngineAnswer] = []
    for name, value in (
        reports.items() if isinstance(reports, Mapping) else enumerate(reports)
    ):
        engine = name if isinstance(name, int) else str(name)
        if isinstance(value, ClusterReport):
            magics.add(value.magic)
            answers += value.engines
        elif isinstance(value, tuple(KINDS.values())):
            magics |= {
                magic for magic, kind in KINDS.items() if isinstance(value, kind)
            }
            answers.append(
                EngineAnswer(engine, getattr(value, "origin", Origin()), report=value)
            )
        else:
            what = "no report" if value is None else f"{type(value).__name__}: {value}"
            answers.append(EngineAnswer(engine, state="failed", detail=what))
    if len(magics) != 1:
        if magics:
            problem = f"they are of {' and '.join(sorted(magics))}"
        else:
            problem = "there is none among these"
        raise OptionError(f"merge() takes reports of one kind; {problem}")
    magic = magics.pop()
    if magic in {"gpuinfo", "devices"}:
        # Of a process as it is now: a worker of Ray runs many tasks
        last: dict[tuple[str, int], EngineAnswer] = {}
        for place, answer in enumerate(answers):
            last[answer.origin.host, answer.origin.pid or place] = answer
        answers = list(last.values())
    return ClusterReport(magic, tuple(answers))


class SharedGpu(NamedTuple):
    """A GPU that engines of a host see, by UUID."""

    host: str
    row: GpuRow
    """What the last of them read, milliseconds after the others; ``kernel_*`` are sums over all."""
    engines: tuple[EngineAnswer, ...]
    """Those that hold memory on it, or else all."""


def shared_gpus(report: ClusterReport) -> list[SharedGpu]:
    """Return the GPUs of a merged `%gpuinfo`, by host and then in the order in which their engines list them."""
    seen_by: dict[tuple[str, object], dict[object, tuple[EngineAnswer, GpuRow]]] = {}
    for answer in report.engines:
        if not isinstance(answer.report, GPUReport):
            continue
        process = answer.origin.pid or answer.engine
        for row in answer.report.devices:
            gpu: object = row.uuid or row.device or row.nvml_index
            if row.simulated:  # it is its process's own
                gpu = (process, row.device)
            seen_by.setdefault((answer.origin.host, gpu), {})[process] = (answer, row)
    gpus: list[SharedGpu] = []
    for (host, _), seen in seen_by.items():
        rows = [row for _, row in seen.values()]
        row = replace(
            rows[-1],
            kernel_allocated=sum(row.kernel_allocated or 0 for row in rows),
            kernel_reserved=sum(row.kernel_reserved or 0 for row in rows),
        )
        engines = [answer for answer, _ in seen.values()]
        users = [answer for answer, own in seen.values() if own.kernel_reserved]
        gpus.append(SharedGpu(host, row, tuple(users or engines)))
    return sorted(gpus, key=lambda gpu: gpu.host)


def engine_ranges(answers: Iterable[EngineAnswer]) -> str:
    """Return ``"0-3, 7"``, and after it the names of those that have no number."""
    numbers: set[int] = set()
    names: list[str] = []
    for answer in answers:
        if isinstance(answer.engine, int):
            numbers.add(answer.engine)
        else:
            names.append(answer.engine)
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join([*ranges, *names])
