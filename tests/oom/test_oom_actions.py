"""What can be run at once after out-of-memory: each line once, and none for what another gives back."""

from __future__ import annotations

from gpumagic.oom.report import Advice, OomReport
from gpumagic.oom.rules import kept
from gpumagic.report.base import Holder

MIB = 2**20
DEVICE = "cuda:0"


def codes(*advice: Advice, holders: tuple[Holder, ...]) -> list[str]:
    report = OomReport(
        "cuda allocator", "certain", DEVICE, 64 * MIB, 0, 0, 40 * MIB, 40 * MIB, 1, "x", "full", holders, advice
    )
    return [action.code for action in kept.actions_of(report, in_notebook=True)]


NET = Holder("net", DEVICE, 4 * MIB, "module")
GRAPHS = Advice("Let go of graphs", 36 * MIB, True, first="losses[:] = [each.detach() for each in losses]")


def test_what_nothing_names_is_to_be_looked_for() -> None:
    assert codes(holders=(NET,)) == ["%devices --held"]


def test_what_the_advice_gives_back_is_not_to_be_looked_for() -> None:
    assert codes(GRAPHS, holders=(NET,)) == [GRAPHS.first]
    with_names = Advice("Let go of graphs", 36 * MIB, True, first=f"del opt\n{GRAPHS.first}")
    assert codes(with_names, holders=(NET,)) == ["del opt", GRAPHS.first]


def test_deleting_a_name_gives_back_nothing_of_what_nothing_names() -> None:
    delete = Advice("Delete net", 4 * MIB, False, first="del net")
    assert codes(delete, holders=(NET,)) == [
        "del net",
        "%devices --held",
    ]


def test_outputs_are_let_go_of_by_their_own_line() -> None:
    assert codes(holders=(Holder("Out[3]", DEVICE, 36 * MIB, "tensor"),)) == ["%devices --release-held"]
