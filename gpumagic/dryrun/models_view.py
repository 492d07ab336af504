"""The view of a table by dtype: how much of the device each type of weights leaves, then what makes it up."""

from __future__ import annotations

from gpumagic.dryrun.models import DtypeReport, DtypeRow
from gpumagic.report.document import Block, Cell, Column, Document, Heading, Paragraph, Segment, Table, document_of
from gpumagic.report.units import count, size

_PARTS = {"weights": "parameters", "buffers": "buffers", "gradients": "gradients", "optimizer": "optimizer state"}
_SHOWN = {"bfloat16": "bfloat16, float16"}
"""They take the same."""
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "momentum": "SGD with momentum", "sgd": "SGD"}


@document_of.register(DtypeReport)
def view_by_dtype(report: DtypeReport) -> Document:
    """Return the answer, the table and what is not in it."""
    notes = ". ".join(f"{each[:1].upper()}{each[1:]}" for each in report.notes)
    blocks: list[Block] = [Heading(_headline(report)), _table(report), Paragraph(f"{notes}.", muted=True)]
    return Document(tuple(blocks))


def _headline(report: DtypeReport) -> str:
    what = f"{' and '.join(report.models)}, {count(report.parameters, 'parameter')}"
    what += f", trained with {_OPTIMIZERS.get(report.optimizer, report.optimizer)}" if report.training else ""
    widest = next((row for row in report.rows if row.left is not None and row.left >= 0), None)
    if report.capacity is None:
        return what
    if widest is not None and widest.left is not None:
        return f"{what}: in {widest.dtype}, {size(widest.left)} of {size(report.capacity)} is left"
    least = min(row.total for row in report.rows if row.total is not None)
    return f"{what}: {size(report.capacity)} is too little, it takes {size(least)} at least"


def _table(report: DtypeReport) -> Table:
    parts = [part for part in _PARTS if any(getattr(row, part) for row in report.rows)]
    columns = [
        Column("Weights in"),
        *(Column(part.replace("optimizer", "state").capitalize(), "right") for part in parts),
    ]
    columns += [Column("Total", "right")] + ([Column("Left", "right")] if report.capacity is not None else [])
    return Table(columns, [_row(report, row, parts) for row in report.rows], caption="What each type of weights takes")


def _row(report: DtypeReport, row: DtypeRow, parts: list[str]) -> list[Cell | str]:
    most = max(each.total or 0 for each in report.rows) or 1
    bar = tuple(Segment((getattr(row, part) or 0) / most, part=_PARTS[part]) for part in parts)
    cells: list[Cell | str] = [_name(row), *(_size(getattr(row, part)) for part in parts)]
    cells.append(Cell(size(row.total), bar) if row.total is not None else Cell("-", muted=True, title="not trained"))
    if report.capacity is not None:
        cells.append(_left(row.left))
    return cells


def _size(nbytes: int | None) -> Cell | str:
    return Cell("-", muted=True) if nbytes is None else size(nbytes)


def _left(left: int | None) -> Cell | str:
    if left is None:
        return Cell("-", muted=True)
    return size(left) if left >= 0 else f"{size(-left)} short"


def _name(row: DtypeRow) -> str:
    return _SHOWN.get(row.dtype, row.dtype)
