"""What a cell will need on each device, told before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpumagic.dryrun import models
from gpumagic.dryrun.models import DtypeReport, Model
from gpumagic.report.base import Report, to_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """How many operators the cell had begun; of a loop that was cut short only those of the passes that were made."""
    line: int | None
    """Which line of the cell ran; None before the first."""
    allocated: int
    parts: dict[str, int]
    """The same bytes by what they are, named as in `DryRunReport.breakdown`: what each block turned out to be by
    the end of the cell, so that memory that will be a gradient counts as one from its first byte."""


@dataclass(frozen=True)
class DeviceNeed:
    """One device: what the cell takes of it."""

    device: str
    peak: int
    """Highest bytes allocated, as the allocator's own peak would tell."""
    reserved: int
    """Highest bytes that the allocator holds for it."""
    before: int
    after: int
    capacity: int | None
    """Bytes that this process can have there."""
    extra: tuple[int, int]
    """Least and most bytes that are not modelled: a context, workspaces of kernels. An estimate."""
    fits: bool | None
    line: int | None
    code: str | None
    function: str | None
    """The notebook's function below the line, as ``"step, line 3"``."""
    operator: str | None
    operator_bytes: int
    failure_line: int | None
    """The line whose request would be the first to be refused."""
    breakdown: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """The largest value of a variable with which the cell fits."""

    name: str
    value: int
    """What it is now."""
    largest: int | None
    """None if none was found; the reason is in `reason`."""
    peak: int | None
    """Bytes allocated at the peak with the largest."""
    capacity: int | None
    base: int
    """Bytes of the peak that do not depend on it."""
    each: float
    """Bytes of the peak for each 1 of it."""
    tried: tuple[tuple[int, int, bool | None], ...] = ()
    """(value, peak, whether it fits) of each dry run."""
    reason: str = ""
    assumed: tuple[str, ...] = ()
    """What the dry runs took for granted."""

    @property
    def ceiling(self) -> int | None:
        """The smallest value that was run and does not fit."""
        return min((value for value, _, fits in self.tried if fits is False), default=None)

    @property
    def expected(self) -> int | None:
        """The value to run with: the largest that fits, 1 where none does, the present one where none matters."""
        if self.largest is None and self.ceiling == 1:
            return 1
        matters = self.largest is not None or not self.tried or not all(fits for *_, fits in self.tried)
        return self.largest if matters else self.value


@dataclass(frozen=True, repr=False)
class DryRunReport(Report[DryRunRow]):
    """The peak memory of a cell that has not run, where it is, what makes it up, and whether it fits."""

    row_type: ClassVar[type[Any]] = DryRunRow

    device: str | None
    """The device that decides: the one that would run out, or has least left."""
    peak: dict[str, int]
    line: int | None
    code: str | None
    operator: str | None
    breakdown: dict[str, int]
    """Bytes at the peak by what they are: parameters, gradients, optimizer state, activations, temporaries, other."""
    fits: bool | None
    """None where it cannot be told; `verdict` says why."""
    capacity: int | None
    verdict: str
    largest: Fit | None = None
    points: tuple[DryRunPoint, ...] = ()
    """Each device's memory in the course of the cell, by what it is, thinned to some hundred points a device."""
    assumed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    """What the cell will do to files, programs and the network; the dry run did none of it."""
    error: str | None = None
    """How the cell would fail for another reason than memory."""
    devices: tuple[DeviceNeed, ...] = ()
    lines: tuple[DryRunRow, ...] = ()
    operators: int = 0
    """How many operators the dry run answered."""
    seconds: float = 0.0
    """How long it took."""
    models: tuple[Model, ...] = ()
    """The models that the cell leaves in variables, or that the callable returns."""
    engine: str = "fake"
    """What it ran on: `cuda`, torch's own CUDA over a fake runtime, or `fake`, tensors without bytes."""

    @property
    def rows(self) -> tuple[DryRunRow, ...]:
        return self.lines

    @property
    def timeline(self) -> tuple[tuple[str, int, int], ...]:
        """``(device, line, bytes allocated)`` of each of the points; line 0 is before the first."""
        return tuple((point.device, point.line or 0, point.allocated) for point in self.points)

    def by_dtype(self, training: bool = False, *, optimizer: str = "adamw") -> DtypeReport:
        """Return what the models that the cell builds take with weights of float32, bfloat16, int8 and int4.

        Args:
            training: with gradients and the optimizer's state, in place of weights and buffers alone.
            optimizer: ``"adamw"``, ``"adam"``, ``"momentum"`` (SGD with momentum) or ``"sgd"``.

        Raises:
            OptionError: the cell leaves no model, or it is another optimizer.
        """
        return models.table(self.models, self.capacity, training=training, optimizer=optimizer)

    def plot(self) -> Figure:
        """Return a matplotlib figure of the memory over the run, a line a device.

        Raises:
            GpuMagicError: matplotlib is not installed, or there is nothing to draw.
        """
        return to_figure(self)
