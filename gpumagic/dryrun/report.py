"""What a cell will need on each device, told before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from gpumagic.dryrun.wire import Ending, Passes, Scenario
from gpumagic.report.base import Report, to_document
from gpumagic.report.document import Heading
from gpumagic.report.units import count, size, size_range

MOST_PLACES = 2
"""Lines that a sentence names."""


@dataclass(frozen=True)
class DryRunRow:
    """One line of the cell on one device."""

    device: str
    line: int
    code: str
    peak: int
    """Highest bytes allocated while it ran."""
    after: int
    """Bytes allocated when it last ended."""


@dataclass(frozen=True, slots=True)
class DryRunPoint:
    """One device after one of the cell's operators."""

    device: str
    operator: int
    """How many operators the cell had begun."""
    line: int | None
    """Which line of the cell ran; None before the first."""
    allocated: int
    parts: dict[str, int]
    """The same bytes by what they are, named as in `DryRunReport.breakdown`: what each block turned out to be by
    the end of the cell, so that memory that will be a gradient counts as one from its first byte."""


class DeviceNeed(NamedTuple):
    """What the cell takes of one device, in bytes."""

    device: str
    before: int
    """Allocated when the cell begins."""
    peak: int
    """Allocated at most."""
    after: int
    """Allocated when it ends."""
    reserved: int
    """What the caching allocator holds for it at most."""
    capacity: int | None
    """What this process can have there."""
    fits: bool | None
    retries: int = 0
    """How often the allocator had to give its cache back before it could serve a request, which is slow."""


class RankNeed(NamedTuple):
    """What one rank of many takes of its device, in bytes."""

    rank: int
    device: str
    peak: int
    reserved: int
    retries: int
    """As of `DeviceNeed`."""
    fits: bool | None
    breakdown: dict[str, int]
    """Bytes at the peak by what they are, as of `DryRunReport`; none where only figures were asked for."""


class Trial(NamedTuple):
    """One dry run of a search."""

    value: int
    peak: int
    """Bytes allocated at most, on the device that decides."""
    fits: bool | None
    reason: str
    """Why not, or why that is open."""


@dataclass(frozen=True)
class Search:
    """The search for the largest value of a setting with which the cell fits."""

    name: str
    now: int
    """The value in the cell or the notebook."""
    trials: tuple[Trial, ...]
    """By value."""
    reason: str = ""
    """Why it ended before it found the largest."""

    @property
    def smallest_failing(self) -> Trial | None:
        """The trial with the smallest value that was not shown to fit."""
        return next((each for each in self.trials if not each.fits), None)


@dataclass(frozen=True, repr=False)
class DryRunReport(Report[DryRunRow]):
    """The peak memory of a cell that has not run, where it is, what makes it up, and whether it fits.

    The rows are the lines of the cell, by device.
    """

    row_type: ClassVar[type[Any]] = DryRunRow

    device: str | None
    """The device that decides: the one that would run out, or has least left."""
    peak: dict[str, int]
    """Highest bytes allocated, as `torch.cuda.max_memory_allocated` would tell, by device."""
    reserved: dict[str, int]
    """Highest bytes that the caching allocator holds, by device."""
    line: int | None = None
    """Where the peak is."""
    code: str | None = None
    operator: str | None = None
    """Which operator of that line allocates at the peak."""
    breakdown: dict[str, int] = field(default_factory=dict)
    """Bytes at the peak by what they are: parameters, gradients, optimizer state, activations, temporaries, what else
    earlier cells hold, other."""
    fits: bool | None = None
    """None where it cannot be told."""
    capacity: int | None = None
    """Bytes that this process can have of the device that decides."""
    complete: bool = False
    """Whether the cell was run to its end, or until it was out of memory, with all values that were guessed."""
    certain: bool = False
    """Whether every pass of every loop was run, no value that is not known changes the verdict or the peak, and no
    operator ran of which it is known that its kernel takes memory by rules that the engine does not have."""
    passes: tuple[Passes, ...] = ()
    """How often each loop of the cell was run, and was to be."""
    largest: int | None = None
    """The largest value of the setting that was asked about with which the cell was run and fits."""
    fewest: int | None = None
    """The smallest number of GPUs that was asked for with which each rank was run and fits."""
    modules: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes at the peak by the path of the module they belong to, and by what they are."""
    timeline: tuple[DryRunPoint, ...] = ()
    """Each device's memory over the cell, by what it is, thinned to some hundred points a device."""
    assumed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    engine: str = "fake"
    """What it ran on: ``"cuda"``, torch's own CUDA over a fake runtime, or ``"fake"``, tensors without bytes."""
    gpu: str | None = None
    """The GPU that was asked for by name."""
    nccl: tuple[int, int] = (0, 0)
    """Least and most bytes of NCCL's own buffers, which the allocator does not see: an estimate."""
    overhead: tuple[int, int] = (0, 0)
    """Least and most bytes that the CUDA context and what the engine does not model take besides: an estimate."""
    function: str | None = None
    """The notebook's function below the line of the peak, as ``"step, line 3"``."""
    operator_bytes: int = 0
    """What the operator of the peak allocates."""
    failure_line: int | None = None
    """The line whose request is the first to be refused."""
    scenario: Scenario | None = None
    """The scenario in which it needs most, where all agree on the verdict; None where no value decides."""
    flat: tuple[tuple[str, int], ...] = ()
    """``(place, pass)`` of each loop that was not run to its end and of which no pass after that one took more."""
    runs: int = 1
    """How many times the cell was run, with other values where something is decided by them."""
    open_on: tuple[tuple[int | None, str], ...] = ()
    """``(line, code)`` of each place where a value that is not known changes the verdict or the peak, or may."""
    effects: tuple[str, ...] = ()
    """What the cell will do to files, programs and the network, in words; the dry run did none of it."""
    reaching: tuple[str, ...] = ()
    """Those of `effects` that other processes or machines may hear of."""
    error: str | None = None
    """How the cell would fail for another reason than memory, or why there are no figures."""
    ending: Ending | None = None
    """The reason that `error` says in words; None where there is none."""
    exceeds_host: bool = False
    """Whether the host's memory did not do: it was refused, or the dry run took more than half of what was free."""
    devices: tuple[DeviceNeed, ...] = ()
    lines: tuple[DryRunRow, ...] = ()
    world: int | None = None
    """How many ranks there are, where the cell was run as what each of many GPUs runs."""
    rank: int | None = None
    """The one that this report is of: the fullest."""
    ranks: tuple[RankNeed, ...] = ()
    """The ranks that were run."""
    search: Search | None = None
    """How the largest value was found."""
    operators: int = 0
    """How many operators the dry run answered."""
    seconds: float = 0.0
    """How long it took."""
    worked: float = 0.0
    """Seconds of a core that its runs took, whatever else the machine did meanwhile; 0 where that is not known."""
    sizes: tuple[str, ...] = ()
    """Variables that the code sets to a number and that by their names say how much it works on at once."""
    versions: dict[str, str] = field(default_factory=dict)
    """What figures differ by: ``"torch"``, and ``"attention"``, the kernels that were chosen, where that is known."""

    @property
    def rows(self) -> tuple[DryRunRow, ...]:
        return self.lines

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed and what is not known, under the name that other reports have for it."""
        return (*self.assumed, *self.unknown)

    @property
    def verdict(self) -> str:
        """The report's first line."""
        return next(
            block.text
            for block in to_document(self).blocks
            if isinstance(block, Heading)
        )


def peak_of(report: DryRunReport) -> int:
    """Return the peak of the device that decides."""
    return report.peak.get(report.device or "", 0)


def reserved_of(report: DryRunReport) -> int:
    """Return what its allocator holds at most."""
    return report.reserved.get(report.device or "", 0)


def shortcoming(report: DryRunReport, *, with_lines: bool = True) -> str:
    """Return why a dry run does not show that its cell fits, as the end of a sentence; nothing where it does.

    Args:
        report: of the dry run.
        with_lines: whether the numbers of the lines are told that the verdict depends on.
    """
    if report.fits:
        return ""
    if report.error is not None:
        return report.error
    if report.fits is False:
        return (
            f"line {report.failure_line} runs out of memory"
            if report.failure_line
            else "it runs out of memory"
        )
    if report.open_on:
        shown = []
        for line, code in report.open_on[:MOST_PLACES]:
            shown.append(f"line {line} (`{code}`)" if with_lines else f"`{code}`")
        rest = len(report.open_on) - len(shown)
        on = " and ".join([*shown, *([count(rest, "more line")] if rest else [])])
        return (
            f"it depends on {on}"
            if report.complete
            else f"with other values of {on} it did not run to the end"
        )
    if report.complete:
        return f"it needs {size(peak_of(report))}, and {overhead(report)}"
    return next(
        (passes_sentence(each) for each in report.passes if each.run != each.asked),
        "it did not run to the end",
    )


def overhead(report: DryRunReport) -> str:
    """Return what a device needs besides."""
    return f"CUDA itself takes {size_range(*report.overhead)} (an estimate)"


def passes_sentence(passes: Passes) -> str:
    """Return how far a loop was run."""
    of = "" if passes.asked is None else f" of {passes.asked:,}"
    were = "pass" if (passes.asked or passes.run) == 1 else "passes"
    return f"{passes.run:,}{of} {were} of {passes.place} were run"
