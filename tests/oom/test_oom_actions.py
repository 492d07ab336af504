"""What can be run at once after out-of-memory."""

from __future__ import annotations

from gpumagic.oom import actions
from gpumagic.oom.report import OomReport
from gpumagic.report.base import Holder

MIB = 2**20
DEVICE = "cuda:0"


def codes(*, holders: tuple[Holder, ...]) -> list[str]:
    report = OomReport("cuda allocator", "certain", DEVICE, 64 * MIB, 0, 0, 40 * MIB, 40 * MIB, 1, "x", "full", holders)
    return [action.code for action in actions.actions_of(report, in_notebook=True)]


NET = Holder("net", DEVICE, 4 * MIB, "module")


def test_what_nothing_names_is_to_be_looked_for() -> None:
    assert codes(holders=(NET,)) == ["%devices --leaks"]
