"""`%devices --why` as a document: the tensor, a small tree for each holder, and what frees it."""

from __future__ import annotations

from gpumagic.render.cells import dims
from gpumagic.render.document import Block, Document, Heading, Paragraph, Tree
from gpumagic.render.lines import holder_text
from gpumagic.render.units import count, size
from gpumagic.reports import TensorRow, WhyReport

SHOWN = 8


def view(report: WhyReport) -> Document:
    """Return the document of one tensor's holders."""
    blocks: list[Block] = [Heading(_heading(report.tensor))]
    if report.ways:
        blocks.append(Paragraph(f"kept by {count(len(report.ways), 'holder')}:"))
    blocks += [Tree(way.steps) for way in report.ways[:SHOWN]]
    if len(report.ways) > SHOWN:
        blocks.append(Paragraph(f"and {count(len(report.ways) - SHOWN, 'more holder')}", muted=True))
    if report.ways:
        blocks.append(Paragraph(_remedy(report)))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _heading(row: TensorRow) -> str:
    name = row.name or holder_text(row.place or row.holder)
    return f"{name}: {size(row.nbytes)} on {row.device}, {dims(row.shape)} {row.dtype}, {row.kind}"


def _remedy(report: WhyReport) -> str:
    commands = list(dict.fromkeys(way.command for way in report.ways if way.command is not None))
    nameless = [way.root for way in report.ways if way.command is None]
    after = f", once {', '.join(nameless)} lets go of it" if nameless else ""
    if not commands:
        return f"It is freed{after}"
    return f"To free it: {'; '.join(commands)}{after}"
