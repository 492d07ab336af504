"""Report -> document -> text or HTML. Pure functions: nothing here measures, and nothing imports torch or IPython."""

from __future__ import annotations

from importlib import import_module

from gpumagic.report import html, text
from gpumagic.report.document import Document, document_of


def to_text(report: object, width: int | None = None, unicode: bool | None = None) -> str:
    """Return a report as plain text of at most ``width`` columns (default: the terminal's, 100 in notebooks)."""
    return text.render(to_document(report), width, unicode)


def to_html(report: object) -> str:
    """Return a report as one HTML `<div>` that needs neither styles nor scripts of its own."""
    return html.render(to_document(report))


def to_document(report: object) -> Document:
    """Return the neutral document of a report.

    How a report looks is registered with `document_of` by the module `view` of the folder it is defined in.
    """
    import_module(f"{type(report).__module__.rpartition('.')[0]}.view")
    return document_of(report)
