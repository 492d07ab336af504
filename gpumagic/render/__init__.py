"""Report -> document -> text or HTML. Pure functions: nothing here measures, and nothing imports torch or IPython."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpumagic.render import html, text

if TYPE_CHECKING:
    from gpumagic.render.document import Document
    from gpumagic.reports import Report


def to_text(report: Report[Any], width: int | None = None, unicode: bool | None = None) -> str:
    """Return a report as plain text of at most ``width`` columns (default: the terminal's, 100 in notebooks)."""
    return text.render(to_document(report), width, unicode)


def to_html(report: Report[Any]) -> str:
    """Return a report as one HTML `<div>` that needs neither styles nor scripts of its own."""
    return html.render(to_document(report))


def to_document(report: Report[Any]) -> Document:
    """Return the neutral document of a report, from the view that knows its kind."""
    return _view(report)(report)


def _view(report: Report[Any]) -> Callable[[Any], Document]:
    from gpumagic import reports
    from gpumagic.render import gpu, oom, tensors, transfers

    views: dict[type, Callable[[Any], Document]] = {
        reports.GPUReport: gpu.view,
        reports.TensorReport: tensors.view,
        reports.TransferReport: transfers.view,
        reports.OomReport: oom.view,
    }
    return views[type(report)]
