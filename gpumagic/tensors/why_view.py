"""`%devices --why` as a document: the tensor, a small tree for each holder, and what frees it."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.report.document import Block, Document, Heading, Paragraph, Tree, document_of
from gpumagic.report.units import count, size
from gpumagic.tensors.folding import holder_text
from gpumagic.tensors.report import TensorRow
from gpumagic.tensors.table_cells import dims
from gpumagic.tensors.why_report import WhyReport

SHOWN = 8


@document_of.register(WhyReport)
def view_why(report: WhyReport) -> Document:
    """Return the document of one tensor's holders."""
    blocks: list[Block] = [Heading(_heading(report.tensor))]
    if report.ways:
        blocks.append(Paragraph(f"kept by {count(len(report.ways), 'holder')}:"))
    blocks += [Tree(way.steps) for way in report.ways[:SHOWN]]
    if len(report.ways) > SHOWN:
        blocks.append(Paragraph(f"and {count(len(report.ways) - SHOWN, 'more holder')}", muted=True))
    blocks += _remedies(report)
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _heading(row: TensorRow) -> str:
    name = row.name or holder_text(row.place or row.holder)
    return f"{name}: {size(row.nbytes)} on {row.device}, {dims(row.shape)} {row.dtype}, {row.kind}"


def _remedies(report: WhyReport) -> Iterator[Block]:
    commands = dict.fromkeys(way.command for way in report.ways if way.command is not None)
    if commands:
        yield Paragraph(f"To free it: {'; '.join(commands)}")
    if others := dict.fromkeys(way.root for way in report.ways if way.command is None):
        yield Paragraph(f"{'It also' if commands else 'It'} has to go from {', '.join(others)}")
