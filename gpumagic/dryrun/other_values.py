"""What a cell would need with other values of one of its numbers, for the magics: in a limited time, and never fatal.

Where the cell cannot be rehearsed, that is an answer too; the magics then run it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpumagic.dryrun import fitting, forecast, targets
from gpumagic.dryrun.replay import Recordings
from gpumagic.dryrun.report import Fit, RehearsalReport
from gpumagic.errors import GpuMagicError, RehearsalUnavailable
from gpumagic.report import progress
from gpumagic.source.settings import Setting

SECONDS = 30.0
"""How long all rehearsals of one question may take."""

What = str | Callable[[], object]


class OtherValues:
    """Rehearses code with one number changed.

    Args:
        knob: the number.
        imagine: returns the code, or a callable, and the variables that a value comes with.
        namespace: the names that the code sees.
        seconds: how long the first rehearsal may take, and how long all others together.
    """

    def __init__(
        self,
        knob: Setting,
        imagine: Callable[[int], tuple[What, Mapping[str, object]]],
        namespace: Mapping[str, Any],
        seconds: float = SECONDS,
    ) -> None:
        self.knob = knob
        self._imagine, self._namespace, self._seconds = imagine, namespace, seconds
        self._until: float | None = None
        self._recordings = Recordings()

    def rehearse(self, value: int) -> RehearsalReport:
        """Return the rehearsal with a value, as the devices are now.

        Raises:
            GpuMagicError: it cannot be rehearsed, or there is no time left.
        """
        left = self._seconds if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise RehearsalUnavailable(f"the rehearsals took more than {self._seconds:g} s")
        what, values = self._imagine(value)
        target = targets.choose(None, None)
        report = forecast.rehearse(
            forecast.script(what), self._namespace, target, values=values, time_limit=left,
            note=self._recordings.note(value, target),
        )  # fmt: skip
        if self._until is None:  # the worker's start does not count
            self._until = time.monotonic() + self._seconds
        return report

    def fits(self, value: int) -> bool | None:
        """Return whether the code fits with a value; None where that cannot be told."""
        try:
            return self.rehearse(value).fits
        except GpuMagicError:
            return None

    def largest(self) -> Fit:
        """Return the largest value that fits; where none is found, the reason."""
        try:
            with progress.tally(fitting.MOST_REHEARSALS, "rehearsal") as tell:
                rehearse = functools.partial(self._told, tell)
                return fitting.search(rehearse, self.knob.name, self.knob.value, self._recordings.largest)
        except GpuMagicError as error:
            return Fit(self.knob.name, self.knob.value, None, None, None, 0, 0.0, reason=str(error))

    def _told(self, tell: Callable[[str], None], value: int) -> RehearsalReport:
        tell(f"{self.knob.name} = {value}")
        return self.rehearse(value)


def of_cell(
    source: str, knob: Setting, namespace: Mapping[str, Any], seconds: float = SECONDS, unbound: Sequence[str] = ()
) -> OtherValues:
    """Return the question for a cell's text.

    Args:
        source: the text.
        knob: the number in it, or in the notebook.
        namespace: the notebook's.
        seconds: as for `OtherValues`.
        unbound: names that are deleted before the cell.
    """
    before = f"del {', '.join(unbound)}\n" if unbound else ""

    def imagine(value: int) -> tuple[What, Mapping[str, object]]:
        text, values = knob.imagined(value)
        return before + (source if text is None else text), values

    return OtherValues(knob, imagine, namespace, seconds)
