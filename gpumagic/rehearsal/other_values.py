"""What a cell would need with other values of one of its numbers, for the magics: in a limited time, and never fatal.

Where the cell cannot be rehearsed, that is an answer too; the magics then run it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from gpumagic.errors import GpuMagicError, RehearsalUnavailable
from gpumagic.knobs import Knob
from gpumagic.rehearsal import fitting, forecast, targets
from gpumagic.reports.rehearsal import Fit, RehearsalReport

SECONDS = 30.0
"""How long all rehearsals of one question may take."""

What = str | Callable[[], object]


class OtherValues:
    """Rehearses code with one number changed.

    Args:
        knob: the number.
        imagine: returns the code, or a callable, and the variables that a value comes with.
        namespace: the names that the code sees.
        seconds: how long all rehearsals together may take.
    """

    def __init__(
        self,
        knob: Knob,
        imagine: Callable[[int], tuple[What, Mapping[str, object]]],
        namespace: Mapping[str, Any],
        seconds: float = SECONDS,
    ) -> None:
        self.knob = knob
        self._imagine, self._namespace, self._seconds = imagine, namespace, seconds
        self._until = time.monotonic() + seconds

    def rehearse(self, value: int) -> RehearsalReport:
        """Return the rehearsal with a value, as the devices are now.

        Raises:
            GpuMagicError: it cannot be rehearsed, or there is no time left.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise RehearsalUnavailable(f"the rehearsals took more than {self._seconds:g} s")
        what, values = self._imagine(value)
        return forecast.rehearse(
            forecast.script(what), self._namespace, targets.choose(None, None), values=values, time_limit=left
        )

    def fits(self, value: int) -> bool | None:
        """Return whether the code fits with a value; None where that cannot be told."""
        try:
            return self.rehearse(value).fits
        except GpuMagicError:
            return None

    def largest(self) -> Fit:
        """Return the largest value that fits; where none is found, the reason."""
        try:
            return fitting.search(self.rehearse, self.knob.name, self.knob.value)
        except GpuMagicError as error:
            return Fit(self.knob.name, self.knob.value, None, None, None, 0, 0.0, reason=str(error))


def of_cell(source: str, knob: Knob, namespace: Mapping[str, Any], seconds: float = SECONDS) -> OtherValues:
    """Return the question for a cell's text."""

    def imagine(value: int) -> tuple[What, Mapping[str, object]]:
        text, values = knob.imagined(value)
        return source if text is None else text, values

    return OtherValues(knob, imagine, namespace, seconds)
