"""The part of `%%oomguard --engines`: which engines ran out of memory, and the report of each."""

from __future__ import annotations

from gpumagic.cluster.report import ClusterReport, EngineAnswer
from gpumagic.cluster.view import numbers
from gpumagic.oom import view
from gpumagic.oom.report import OomReport
from gpumagic.report.document import Block, Fold, Heading
from gpumagic.report.units import count

IN_FULL = 2
"""Reports that are shown whole; of more the headline is, and in a notebook the rest folded."""


def failures(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks."""
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, OomReport)]
    out = [answer for answer, own in found if not own.recovered]
    blocks: list[Block] = []
    for place, (answer, own) in enumerate(found):
        blocks += _whole(answer, own) if place < IN_FULL else [_folded(answer, own)]
    if not out:
        return ("Passed after running out of memory" if found else "%%oomguard"), blocks
    passed = sum(answer.state == "answered" for answer in report.engines)
    others = f"; the cell passed on {count(passed, 'other')}" if passed else ""
    return f"Out of memory on engine {numbers(out)}{others}", blocks


def _whole(answer: EngineAnswer, report: OomReport) -> list[Block]:
    heading, *rest = view.view_failure(report).blocks
    assert isinstance(heading, Heading)
    return [Heading(f"Engine {answer.place}: {heading.text}", apart=True), *rest]


def _folded(answer: EngineAnswer, report: OomReport) -> Fold:
    heading, *rest = _whole(answer, report)
    assert isinstance(heading, Heading)
    return Fold(heading.text, rest)
