"""Report -> document -> text or HTML. Pure functions: nothing here measures, and nothing imports torch or IPython."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpumagic.report import html, text

if TYPE_CHECKING:
    from gpumagic.report.base import Report
    from gpumagic.report.document import Document


def to_text(report: Report[Any], width: int | None = None, unicode: bool | None = None) -> str:
    """Return a report as plain text of at most ``width`` columns (default: the terminal's, 100 in notebooks)."""
    return text.render(to_document(report), width, unicode)


def to_html(report: Report[Any]) -> str:
    """Return a report as one HTML `<div>` that needs neither styles nor scripts of its own."""
    return html.render(to_document(report))


def to_document(report: Report[Any]) -> Document:
    """Return the neutral document of a report, from the view that knows its kind."""
    home, _, name = _VIEWS[type(report).__name__].rpartition(".")
    view: Callable[[Report[Any]], Document] = getattr(import_module(home), name)
    return view(report)


_VIEWS = {
    "GPUReport": "gpumagic.gpus.view.view_gpus",
    "BenchReport": "gpumagic.gpus.bench_view.view_bench",
    "ClusterReport": "gpumagic.render.cluster.view",
    "CellsReport": "gpumagic.gpus.cells_view.view_cells",
    "HistoryReport": "gpumagic.gpus.history_view.view_history",
    "TensorReport": "gpumagic.tensors.view.view_tensors",
    "DiffReport": "gpumagic.tensors.diff_view.view_diff",
    "HeldReport": "gpumagic.tensors.held_view.view_held",
    "ReleaseReport": "gpumagic.tensors.held_view.view_held",
    "WhyReport": "gpumagic.tensors.why_view.view_why",
    "TransferReport": "gpumagic.transfers.view.view_transfers",
    "OomReport": "gpumagic.oom.view.view_failure",
    "FitReport": "gpumagic.oom.tries_view.view_fit",
    "RehearsalReport": "gpumagic.dryrun.view.view_rehearsal",
}
