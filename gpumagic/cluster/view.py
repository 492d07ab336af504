"""The view of reports of many engines: what they show together, and a line for each that has nothing to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module

from gpumagic.cluster.report import ANSWERED, ClusterReport, EngineAnswer
from gpumagic.report.document import Block, Document, Heading, Paragraph, document_of
from gpumagic.report.units import count

_PARTS: Mapping[str, str] = {
    "gpuinfo": "gpumagic.cluster.gpus_view.gpus",
    "devices": "gpumagic.cluster.tensors_view.tensors",
    "ondevice": "gpumagic.cluster.cells_view.cells",
    "oomguard": "gpumagic.cluster.failures_view.failures",
}


@document_of.register(ClusterReport)
def view_engines(report: ClusterReport) -> Document:
    """Return the report of the engines that answered, then what is to be said of the others."""
    home, _, name = _PARTS[report.magic].rpartition(".")
    parts: Callable[[ClusterReport], tuple[str, list[Block]]] = getattr(import_module(home), name)
    heading, blocks = parts(report) if report.reports else (_without(report), [])
    blocks = [Heading(f"{heading} · {_engines(report)}"), *blocks]
    blocks += [Paragraph(text) for text in _silent(report)]
    notes = report.notes if report.magic == "oomguard" else (*report.notes, *_notes(report))  # has them in each report
    blocks += [Paragraph(note, muted=True) for note in notes]
    return Document(tuple(blocks))


def _engines(report: ClusterReport) -> str:
    told = sum(answer.report is not None for answer in report.engines)
    number = count(len(report.engines), "engine")
    if told < len(report.engines) and report.magic != "oomguard":
        number = f"{told} of {number}"
    hosts = {answer.origin.host for answer in report.engines} - {""}
    where = hosts.pop() if len(hosts) == 1 else count(len(hosts), "host")
    return f"{number} on {where}" if where != "0 hosts" else number


def _without(report: ClusterReport) -> str:
    """Return the heading where no engine has a report."""
    return f"%%{report.magic}" if report.magic in {"ondevice", "oomguard"} else "No answer"


def _silent(report: ClusterReport) -> Iterator[str]:
    """Tell of the engines that lack something, those of a host of which the same is to be said in one line."""
    several = len({answer.origin.host for answer in report.engines}) > 1
    alike: dict[tuple[str, str, str], list[EngineAnswer]] = {}
    for answer in report.engines:
        if answer.state not in (ANSWERED, "out of memory"):
            host = f" on {answer.origin.host}" if several and answer.origin.host else ""
            alike.setdefault((host, answer.state, answer.detail), []).append(answer)
    for (host, state, detail), answers in alike.items():
        yield f"{engines(answers)}{host}: {state}" + (f", {detail}" if detail else "")


def engines(answers: Sequence[EngineAnswer]) -> str:
    """Return ``"Engine 2"``, ``"Engines 0-3, 7"``."""
    return f"{'Engine' if len(answers) == 1 else 'Engines'} {numbers(answers)}"


def numbers(answers: Sequence[EngineAnswer]) -> str:
    """Return engines in few words: ``"0-3, 7"``; with ranks where these are other numbers and the engines are few."""
    if len(answers) <= 2 or not all(isinstance(answer.engine, int) for answer in answers):
        return ", ".join(answer.place for answer in answers)
    spans: list[list[int]] = []
    for number in sorted({int(answer.engine) for answer in answers}):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def _notes(report: ClusterReport) -> list[str]:
    """Return what the engines' own reports remark, once each, with the engines where it is not all of them."""
    said: dict[str, list[EngineAnswer]] = {}
    for answer in report.engines:
        for note in getattr(answer.report, "notes", ()):
            said.setdefault(note, []).append(answer)
    told = sum(answer.report is not None for answer in report.engines)
    return [note if len(who) == told else f"{engines(who)}: {note}" for note, who in said.items()]
