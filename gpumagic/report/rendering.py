"""Report -> document -> text or HTML. Pure functions: nothing here measures, and nothing imports torch or IPython."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gpumagic.report import html, text
from gpumagic.report.document import Document, document_of
from gpumagic.report.plot import figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def to_text(report: object, width: int | None = None, unicode: bool | None = None) -> str:
    """Return a report as plain text of at most ``width`` columns (default: the terminal's, 100 in notebooks)."""
    return text.render(to_document(report), width, unicode)


def to_html(report: object) -> str:
    """Return a report as one HTML `<div>` that needs neither styles nor scripts of its own."""
    return html.render(to_document(report))


def to_document(report: object) -> Document:
    """Return the neutral document of a report.

    How a report looks is registered with `document_of` by the module `view` of the folder it is defined in, or by the
    one that its class names as its ``view_module``.
    """
    _import_view(report)
    return document_of(report)


def to_figure(record: object) -> Figure:
    """Return a report or a timeline as a matplotlib figure.

    Raises:
        GpuMagicError: matplotlib is not installed, or there is nothing to draw.
    """
    _import_view(record)
    return figure_of(record)


def _import_view(record: object) -> None:
    folder = type(record).__module__.rpartition(".")[0]
    import_module(f"{folder}.{getattr(record, 'view_module', 'view')}")
