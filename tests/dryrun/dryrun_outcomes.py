"""What came of a dry run, as its worker sent it, for tests that look closer than a report does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from gpumagic.dryrun import scenarios


@contextlib.contextmanager
def kept_outcomes() -> Iterator[list[dict[str, Any]]]:
    """Yield the list of what the worker answers in this block."""
    outcomes: list[dict[str, Any]] = []
    run = scenarios.run

    def keep(*args: Any) -> dict[str, Any]:
        outcomes.append(run(*args))
        return outcomes[-1]

    with mock.patch.object(scenarios, "run", keep):
        yield outcomes
