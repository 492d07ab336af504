"""`ClusterReport`, the reports of many processes as one; `merge`; and the GPUs that several processes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
    seconds: float | None = None
    """How long the request took in the engine."""
    report: Any = None
    """Its report, or the result of another request."""

    @property
    def label(self) -> str:
        """Return its name in a table: ``"3"``, or ``"3 (rank 1)"`` where its rank is another number."""
        rank = self.origin.rank
        return str(self.engine) if rank in (None, self.engine) else f"{self.engine} (rank {rank})"


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

    row_type: ClassVar[type[Any]] = PlacedRow

    magic: str
    """The magic of these reports: ``"gpuinfo"``, ``"devices"``, ``"ondevice"`` or ``"oomguard"``."""
    engines: tuple[EngineAnswer, ...] = ()
    elapsed: float | None = None
    """Seconds until the last answer."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[PlacedRow, ...]:
        return tuple(
            PlacedRow(answer.origin.host, answer.engine, answer.origin.rank, answer.state, row)
            for answer in self.engines
            for row in (answer.report.rows if answer.report is not None else ()) or (None,)
        )

    @property
    def is_worth_showing(self) -> bool:
        """Return False for a guarded cell that ran out of memory nowhere: its errors are shown already."""
        return self.magic != "oomguard" or any(
            answer.report is not None or answer.state not in (ANSWERED, "raised") for answer in self.engines
        )

    @property
    def reports(self) -> dict[int | str, Any]:
        """Return the report of each engine that has one."""
        return {answer.engine: answer.report for answer in self.engines if answer.report is not None}

    def to_pandas(self) -> pd.DataFrame:
        """Return all rows of all engines; an engine without rows has one with its state, so that none is missing."""
        places = {name: kind for name, kind in columns_of(PlacedRow).items() if name != "row"}
        columns = columns_of(KINDS[self.magic].row_type)
        cells = [
            (*(getattr(placed, name) for name in places), *(getattr(placed.row, name, None) for name in columns))
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
        found = f"they are of {' and '.join(sorted(magics))}" if magics else "there is none among these"
        raise OptionError(f"merge() takes reports of one kind; {found}")
    magic = magics.pop()
    if magic in {"gpuinfo", "devices"}:  # of a process as it is now: a worker of Ray runs many tasks
        origins = enumerate(answer.origin for answer in answers)
        last = {(each.host, each.pid) if each.pid is not None else place: place for place, each in origins}
        answers = [answers[place] for place in sorted(last.values())]
    return ClusterReport(magic, tuple(answers))


class EngineGpu(NamedTuple):
    """A GPU as one engine sees it."""

    answer: EngineAnswer
    row: GpuRow


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """One GPU, and the engines that see it."""

    host: str
    engines: tuple[EngineGpu, ...]

    @property
    def row(self) -> GpuRow:
        """What the last of its engines read, milliseconds after the others; ``kernel_*`` are sums over all of them."""
        rows = [each.row for each in self.engines]
        return replace(
            rows[-1], kernel_allocated=sum(each.kernel_allocated or 0 for each in rows),
            kernel_reserved=sum(each.kernel_reserved or 0 for each in rows),
        )  # fmt: skip


def shared_gpus(report: ClusterReport) -> tuple[SharedGpu, ...]:
    """Return the GPUs of a merged `%gpuinfo`, by host and then in the order in which their engines list them."""
    found: dict[tuple[object, ...], dict[tuple[str, int | None, int | str], EngineGpu]] = {}
    for answer in report.engines:
        process = (answer.origin.host, answer.origin.pid, "" if answer.origin.pid else answer.engine)
        for row in answer.report.devices if isinstance(answer.report, GPUReport) else ():
            own = (*process, row.device) if row.simulated else ()  # a simulated GPU is its process's own
            gpu = (answer.origin.host, *(own or (row.uuid or row.device or row.nvml_index,)))
            found.setdefault(gpu, {})[process] = EngineGpu(answer, row)
    gpus = [SharedGpu(str(key[0]), tuple(engines.values())) for key, engines in found.items()]
    return tuple(sorted(gpus, key=lambda gpu: gpu.host))


def engines_label(answers: Sequence[EngineAnswer]) -> str:
    """Return ``"Engine 2"``, ``"Engines 0-3, 7"``."""
    return f"{'Engine' if len(answers) == 1 else 'Engines'} {engine_ranges(answers)}"


def engine_ranges(answers: Sequence[EngineAnswer]) -> str:
    """Return ``"0-3, 7"``; one or two engines with their ranks where these differ."""
    if len(answers) <= 2 or not all(isinstance(answer.engine, int) for answer in answers):
        return ", ".join(answer.label for answer in answers)
    spans: list[list[int]] = []
    for number in sorted({int(answer.engine) for answer in answers}):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
