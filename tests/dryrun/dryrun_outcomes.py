"""What came of a dry run, as its worker sent it, for tests that look closer than a report does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from gpumagic.dryrun import explore
from gpumagic.dryrun.judge import Result
from gpumagic.dryrun.wire import Outcome


@contextlib.contextmanager
def kept_outcomes() -> Iterator[list[Outcome]]:
    """Yield the list of the outcomes that count in this block, one a dry run."""
    outcomes: list[Outcome] = []
    run = explore.run

    def keep(*args: object) -> Result:
        result = run(*args)
        assert isinstance(result.reply, Outcome)
        outcomes.append(result.reply)
        return result

    with mock.patch.object(explore, "run", keep):
        yield outcomes
