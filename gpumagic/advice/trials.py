"""What dry runs tell: what the cell needs as it is, and what comes of suggestions; and why none is made, or no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpumagic._compat import StrEnum
from gpumagic.advice.facts import Facts, Kind, Memory
from gpumagic.advice.records import Advice, EditTrial, Need
from gpumagic.advice.runs import EditedRuns
from gpumagic.dryrun.report import DeviceNeed, DryRunReport, shortcoming
from gpumagic.errors import GpuMagicError
from gpumagic.report.units import LARGE, duration
from gpumagic.source import frames

SLOW = 2.0
"""Seconds of a dry run from which on few are made."""

_FIXED = ("parameters", "gradients", "optimizer state")
"""Parts of a dry run's peak that no smaller batch makes smaller."""
_IN_PIECES = "what is free lies in pieces that are too small"


class Obstacle(StrEnum):
    """Why no dry runs are made, or no more."""

    TURNED_OFF = "turned off"
    NOT_A_CELL = "not a cell"
    NOT_OF_A_DEVICE = "not of a device"
    HAS_EFFECTS = "has effects"
    """The cell does something outside of its process."""
    UNTOLD = "untold"
    """A dry run of the cell as it is does not tell what it needs."""
    INTERRUPTED = "interrupted"
    OUT_OF_TIME = "out of time"
    SLOW = "slow"
    """Each takes long, and what was found will do."""
    FAULT = "fault"
    """Of our own."""


class Stop(NamedTuple):
    """Why no dry runs are made, or no more."""

    obstacle: Obstacle
    sentence: str


class Trials:
    """What dry runs of one failed cell tell.

    Args:
        facts: of the failure.
        namespace: the notebook's variables.
        seconds: how long all dry runs after the first may take; 0 for none.
        elsewhere: the device that the run was sent to that failed; empty where it ran as it is.
        is_cell: whether it was a cell of a notebook, and no block of a script.
        outside: what the cell has done outside of its process, as a sentence; empty if nothing.

    Attributes:
        stop: why nothing more is tried; None while something can be.
        runs: makes the dry runs.
        as_is: the dry run of the cell as it is, once there is one.
        cell_need: what the cell needs by that, once it is known.
        exhausted: a sentence of each number of which not even 1 fits.
    """

    def __init__(
        self,
        facts: Facts,
        namespace: Mapping[str, object],
        seconds: float,
        elsewhere: str = "",
        *,
        is_cell: bool = True,
        outside: str = "",
    ) -> None:
        self.stop: Stop | None = None
        self.runs = EditedRuns(facts, namespace, seconds, elsewhere)
        self.as_is: DryRunReport | None = None
        self.cell_need: Need | None = None
        self.exhausted: list[str] = []
        self._facts = facts
        self._seconds = seconds
        self._device = facts.event.device or ""
        event = facts.event
        if facts.frames.source is None or not is_cell:
            self._stop(Obstacle.NOT_A_CELL, "only a cell of a notebook can be tried")
        elif (
            event.memory is not Memory.DEVICE
            or not event.device
            or event.kind is Kind.SIZE_BUG
        ):
            self._stop(
                Obstacle.NOT_OF_A_DEVICE, "a dry run knows only of the devices' memory"
            )
        elif seconds <= 0:
            self._stop(Obstacle.TURNED_OFF, "dry runs of advice are turned off")
        elif outside:
            self._stop(Obstacle.HAS_EFFECTS, outside)

    def need(self) -> Need | None:
        """Return what the cell needs as it is; None where a dry run does not tell, with `stop` set."""
        if self.stop is not None:
            return None
        try:
            report = self.runs.run(())
        except (Exception, KeyboardInterrupt) as error:
            # The report matters more than what a dry run could add
            why = self.why_not(error)
            if self.stop is None:
                self._stop(Obstacle.UNTOLD, why)
            return None
        self.as_is = report
        if (
            report.reaching
        ):  # by C code or a process of its own, which only the kernel sees
            effect = report.reaching[0]
            self._stop(
                Obstacle.HAS_EFFECTS, f"the cell {effect} and is not run again unasked"
            )
        device = self.failed_device(report)
        if report.error is not None or device is None or device.capacity is None:
            self._stop(
                Obstacle.UNTOLD, report.error or "the memory of the device is not known"
            )
            return None
        self.cell_need = self._read_need(report, device)
        rebound = self._facts.notebook.about_to_be_rebound
        if report.fits and any(nbytes >= LARGE for nbytes in rebound.values()):
            self._stop(
                Obstacle.UNTOLD,
                "a dry run leaves out the old values of names that the cell binds first",
            )
            return None
        return self.cell_need

    def of(self, *edits: Advice) -> EditTrial:
        """Return what came of the cell with these edits made."""
        if self.stop is not None:
            return self.untried()
        try:
            return self.trial_of(self.runs.run(edits))
        except (Exception, KeyboardInterrupt) as error:  # edits that overlap, too
            why = self.why_not(error)
            return EditTrial(reason=why) if self.stop is None else self.untried()

    def stop_if_slow(self) -> bool:
        """Return whether a dry run takes so long that none is made beyond the first that fits; none is made then."""
        if self.runs.took <= SLOW or self.stop is not None:
            return False
        took = duration(self.runs.took)
        self._stop(Obstacle.SLOW, f"a dry run takes {took}, and one that fits is known")
        return True

    def _stop(self, obstacle: Obstacle, sentence: str) -> None:
        self.stop = Stop(obstacle, sentence)

    def why_not(self, error: BaseException) -> str:
        """Return why there is no dry run; none follows Ctrl-C, a fault of our own, or the end of the time."""
        if isinstance(error, KeyboardInterrupt):
            self._stop(Obstacle.INTERRUPTED, "interrupted")
        elif not isinstance(error, (GpuMagicError, ValueError, SyntaxError)):
            # Those are of an edit
            self._stop(Obstacle.FAULT, frames.summary_line(error))
        elif self.runs.seconds_left() <= 0:
            sentence = (
                f"there was no time: dry runs of advice may take {self._seconds:g} s"
            )
            self._stop(Obstacle.OUT_OF_TIME, sentence)
        return str(error) if self.stop is None else self.stop.sentence

    def untried(self) -> EditTrial:
        """Return why a suggestion was not tried; where nothing is, the report says it once."""
        if self.stop is None or self.cell_need is None:
            return EditTrial()
        return EditTrial(reason=self.stop.sentence)

    def _read_need(self, report: DryRunReport, device: DeviceNeed) -> Need:
        """Return what the cell needs of the device that failed, by a dry run of it as it is."""
        assert device.capacity is not None
        before = self._facts.event.before
        held_before = before.allocated if before is not None else 0
        used = sum(holder.nbytes for holder in self._facts.notebook.inputs_on_device)
        unused = max(0, held_before - used)
        parts = report.breakdown if report.device == self._device else {}
        return Need(
            needed=device.peak,
            available=device.capacity,
            fits=report.fits,
            certain=report.certain,
            needed_alone=device.peak - min(device.before, unused),
            static=sum(parts.get(part, 0) for part in _FIXED),
            depends_on=" and ".join(f"line {line}" for line, _ in report.open_on),
            parts=parts,
        )

    def trial_of(self, report: DryRunReport) -> EditTrial:
        """Return what a dry run tells of an edit."""
        if report.error is not None:
            return EditTrial(reason=report.error, ending=report.ending)
        if report.fits is None and not report.complete and not report.open_on:
            return EditTrial(reason=shortcoming(report))
        needs = report.peak.get(report.device or self._device)
        reason = ""
        if report.fits is None:
            # The lines are those of the edited text, which nobody sees
            reason = shortcoming(report, with_lines=False)
        elif (
            report.fits is False
            and needs is not None
            and needs <= (report.capacity or 0)
        ):
            reason = _IN_PIECES
        elif not report.certain:
            reason = "; ".join(report.assumed)
        return EditTrial(
            fits=report.fits,
            certain=report.certain,
            needs=needs,
            available=report.capacity,
            saves=self._saved(report),
            reason=reason,
        )

    def _saved(self, report: DryRunReport) -> int | None:
        """Return how much lower the peak of the device that failed is than without the edit; None if unknown."""
        device = self.failed_device(report)
        if device is None or self.cell_need is None:
            return None
        deciding = report.device or self._device
        if not report.fits and deciding != device.device:
            return None  # it ended early, on another device
        return max(0, self.cell_need.needed - device.peak)

    def failed_device(self, report: DryRunReport) -> DeviceNeed | None:
        """Return what a dry run takes of the device that failed; of ranks, of the one that decides."""
        name = self._device if report.world is None else report.device
        return next(
            (device for device in report.devices if device.device == name), None
        )
