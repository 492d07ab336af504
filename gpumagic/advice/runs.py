"""Dry runs of a failed cell with edits made, from where the release left the notebook, while there is time for them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumagic.advice.facts import Facts
from gpumagic.advice.records import Advice
from gpumagic.advice.rules.proposal import cleared
from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.report import DeviceNeed, DryRunPoint, DryRunReport
from gpumagic.dryrun.script import script_of
from gpumagic.errors import DryRunUnavailable
from gpumagic.notebook import interrupts
from gpumagic.options import Ranks
from gpumagic.source.text import Change, apply_changes

FIRST = 30.0
"""Seconds that the first dry run may take, which may have to start the worker."""

MOST_LOST = 3
"""How many times the seconds for advice may go by besides, while other processes have the cores."""

_XDEL = re.compile(r"(?m)^%xdel (\w+)$")
_UNBIND = r"""_value = \1
for _names in (Out, globals()):
    for _name in [each for each in _names if _names[each] is _value]:
        del _names[_name]"""
"""What `%xdel` does of which a dry run can tell: it unbinds every name of a value, those of the output cache too."""
_ONDEVICE = re.compile(r"\A%%ondevice (\w+)(:(\d+))?\n")


def start_worker(device: str) -> None:
    """Start the process that makes dry runs, which imports torch while a failure is looked into."""
    with contextlib.suppress(Exception):  # the first dry run says why not
        client.start(
            targets.with_engine(targets.choose(device, None, None, None)).engine
        )


class EditedRuns:
    """The dry runs of a failed cell with edits made; no code is run twice.

    Time is told by a clock that stands still while other processes have the cores.

    Args:
        facts: of the failure.
        namespace: the notebook's variables.
        seconds: how long all runs after the first may take.
        elsewhere: the device that the run was sent to that failed; empty where it ran as it is.

    Attributes:
        took: seconds of the latest run.
    """

    def __init__(
        self,
        facts: Facts,
        namespace: Mapping[str, object],
        seconds: float,
        elsewhere: str = "",
    ) -> None:
        self.took = 0.0
        self._facts = facts
        self._namespace = namespace
        self._seconds = seconds
        self._elsewhere = elsewhere
        self._deadline: float | None = None
        self._lost = 0.0  # seconds that other processes took
        self._slowness = 1.0  # how many times as long the latest run took for them
        self._reports: dict[object, DryRunReport] = {}

    def run(self, edits: Sequence[Advice], until: float | None = None) -> DryRunReport:
        """Return the dry run of the cell with edits made; it is given up when the time is up, or before that `until`.

        Raises:
            GpuMagicError: it cannot be dry-run, or there is no time left.
            ValueError: the edits are not of this text, or overlap.
        """
        if self.seconds_left() <= 0:
            raise DryRunUnavailable("there is no time")
        gpu = next((edit.gpu for edit in edits if edit.gpu), None)
        ranks = next((edit.ranks for edit in edits if edit.ranks), None)
        edited = self._edited_cell(edits)
        script = script_of("\n".join([*edited.setup, edited.cell]))
        key = (script.source, gpu, ranks)
        if key in self._reports:
            return self._reports[key]
        names = dict(self._namespace)
        if (
            ranks is not None
        ):  # other processes, which have nothing of what the failed cell left
            for name in self._facts.notebook.left_by_failed_run:
                names.pop(name, None)
        target = targets.choose(
            self._facts.event.device or "",
            None,
            gpu,
            None if ranks is None else Ranks(ranks, ranks),
        )
        began = self.now()
        seconds = self.seconds_left()
        if until is not None:
            seconds = min(seconds, until - began)
        with interrupts.ending():
            report = run.dry_run(
                script, names, target, time_limit=max(0.1, seconds * self._slowness)
            )
        self._reports[key] = _without_setup_lines(report, len(edited.setup))
        self._count_time(report)
        self.took = self.now() - began
        return self._reports[key]

    def now(self) -> float:
        """Return the time by a clock that stands still while other processes have the cores."""
        return time.monotonic() - self._lost

    def seconds_left(self) -> float:
        """Return how long the next runs may take."""
        return FIRST if self._deadline is None else self._deadline - self.now()

    def _count_time(self, report: DryRunReport) -> None:
        """Set the deadline after the first run, and count what other processes took of a further one."""
        if self._deadline is None:  # the worker's start does not count
            self._deadline = self.now() + self._seconds
        elif report.worked:
            slowness = max(1.0, report.seconds / report.worked)
            self._slowness = min(slowness, 1.0 + MOST_LOST)
            self._lost += max(0.0, report.seconds - report.worked)
            self._lost = min(self._lost, MOST_LOST * self._seconds)

    def _edited_cell(self, edits: Sequence[Advice]) -> _EditedCell:
        changes: list[Change] = []
        for edit in edits:
            changes += edit.changes
        changed_cells = {change.cell for change in changes}
        setup: list[str] = []
        for text in self._facts.frames.texts:
            if text.cell and text.cell in changed_cells:
                setup += apply_changes(changes, text.source, text.cell).splitlines()
        first = "\n".join(dict.fromkeys(edit.first for edit in edits if edit.first))
        if not any(edit.ranks for edit in edits):
            first = _XDEL.sub(_UNBIND, cleared(first, self._facts) or "")
        setup += first.splitlines()
        cell = apply_changes(changes, self._facts.frames.source or "")
        if self._elsewhere:
            cell = f"%%ondevice {self._elsewhere}{cell}"  # in the place of %%oomguard
        return _EditedCell(setup, _ONDEVICE.sub(_as_statements, cell))


class _EditedCell(NamedTuple):
    """The code that a user runs who follows some advice."""

    setup: list[str]
    """The lines that are run before the cell, changed cells included."""
    cell: str


def _as_statements(magic: re.Match[str]) -> str:
    """Return what `%%ondevice` comes to where nothing has to be watched."""
    backend = magic[1]
    device = f"{backend}{magic[2] or ''}"
    statements = ["import torch"]
    if backend == "cuda":
        statements.append(f"torch.cuda.set_device({magic[3] or 0})")
    statements.append(f"torch.set_default_device({device!r})")
    return "; ".join(statements) + "\n"


def _without_setup_lines(report: DryRunReport, lines: int) -> DryRunReport:
    """Return a dry run without what stood on a device only until the `lines` above the cell had released it.

    What these lines make themselves counts: whoever follows the advice needs that as well.
    """
    if not lines:
        return report
    devices = []
    breakdown = report.breakdown
    for device in report.devices:
        if device.peak == device.before:
            begins, points = _points_of_cell(report, device, lines)
            peaks = [begins, *(point.allocated for point in points)]
            peaks += (
                row.peak
                for row in report.lines
                if row.device == device.device and row.line > lines
            )
            device = device._replace(peak=max(peaks))  # noqa: PLW2901
            if device.device == report.device:
                at_peak = (
                    point.parts for point in points if point.allocated == device.peak
                )
                breakdown = next(at_peak, {})
        devices.append(device)
    return replace(
        report,
        devices=tuple(devices),
        peak={device.device: device.peak for device in devices},
        breakdown=breakdown,
    )


def _points_of_cell(
    report: DryRunReport, device: DeviceNeed, lines: int
) -> tuple[int, list[DryRunPoint]]:
    """Return the bytes with which the cell begins below so many lines, and the timeline from there on."""
    begins = device.before
    points = [point for point in report.timeline if point.device == device.device]
    for place, point in enumerate(points):
        if (point.line or 0) > lines:
            return begins, points[place:]
        begins = point.allocated
    return begins, []
