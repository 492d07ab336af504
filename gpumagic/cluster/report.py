"""`ClusterReport`, the reports of many processes as one; `merge`; and the GPUs that several processes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic.errors import OptionError
from gpumagic.gpus.report import GPUReport, GpuRow
from gpumagic.oom.report import OomReport
from gpumagic.report.base import Origin, Report, columns_of, frame, grouped
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
        return tuple(
            PlacedRow(answer.origin.host, answer.engine, answer.origin.rank, answer.state, row)
            for answer in self.engines
            for row in (answer.report.rows if answer.report is not None else ()) or (None,)
        )

    @property
    def reports(self) -> dict[int | str, Any]:
        """Return the report of each engine that has one."""
        return {
            answer.engine: answer.report for answer in self.engines if answer.report is not None
        }

    def to_pandas(self) -> pd.DataFrame:
        """Return all rows of all engines; an engine without rows has one with its state, so that none is missing."""
        places = {name: kind for name, kind in columns_of(PlacedRow).items() if name != "row"}
        columns = columns_of(KINDS[self.magic].row_type)
        cells = [
            (
                *(getattr(placed, name) for name in places),
                *(getattr(placed.row, name, None) for name in columns),
            )
            for placed in self.rows
        ]
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
    for name, value in reports.items() if isinstance(reports, Mapping) else enumerate(reports):
        engine = name if isinstance(name, int) else str(name)
        if isinstance(value, ClusterReport):
            magics.add(value.magic)
            answers += value.engines
        elif isinstance(value, tuple(KINDS.values())):
            magics |= {magic for magic, kind in KINDS.items() if isinstance(value, kind)}
            answers.append(EngineAnswer(engine, getattr(value, "origin", Origin()), report=value))
        else:
            what = "no report" if value is None else f"{type(value).__name__}: {value}"
            answers.append(EngineAnswer(engine, state="failed", detail=what))
    if len(magics) != 1:
        found = (
            f"they are of {' and '.join(sorted(magics))}" if magics else "there is none among these"
        )
        raise OptionError(f"merge() takes reports of one kind; {found}")
    magic = magics.pop()
    if magic in {
        "gpuinfo",
        "devices",
    }:  # of a process as it is now: a worker of Ray runs many tasks
        answers = list(
            {
                (each.origin.host, each.origin.pid or place): each
                for place, each in enumerate(answers)
            }.values()
        )
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
    found: dict[tuple[str, object], dict[object, tuple[EngineAnswer, GpuRow]]] = {}
    for answer in report.engines:
        process = answer.origin.pid or answer.engine
        for row in answer.report.devices if isinstance(answer.report, GPUReport) else ():
            # A simulated GPU is its process's own.
            own = (
                (process, row.device) if row.simulated else row.uuid or row.device or row.nvml_index
            )
            found.setdefault((answer.origin.host, own), {})[process] = answer, row
    gpus = []
    for (host, _), seen in found.items():
        engines, rows = zip(*seen.values(), strict=True)
        row = replace(
            rows[-1],
            kernel_allocated=sum(each.kernel_allocated or 0 for each in rows),
            kernel_reserved=sum(each.kernel_reserved or 0 for each in rows),
        )
        users = tuple(answer for answer, each in seen.values() if each.kernel_reserved)
        gpus.append(SharedGpu(host, row, users or engines))
    return sorted(gpus, key=lambda gpu: gpu.host)


def engine_ranges(answers: Iterable[EngineAnswer]) -> str:
    """Return ``"0-3, 7"``, and after it the names of those that have no number."""
    engines = [each.engine for each in answers]
    numbers = sorted({each for each in engines if isinstance(each, int)})
    spans = grouped((number - place, number) for place, number in enumerate(numbers)).values()
    ranges = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return ", ".join([*ranges, *(each for each in engines if isinstance(each, str))])
