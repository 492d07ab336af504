"""Reports as figures, where matplotlib is installed."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from gpumagic.errors import GpuMagicError
from gpumagic.reports import HistoryReport

GIB = 1024**3


def history(report: HistoryReport) -> Any:
    """Return a figure with utilisation above memory over time, a line a device.

    The figure belongs to no window and to no pyplot state, so that it shows once and only where it is returned.

    Raises:
        GpuMagicError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise GpuMagicError("plotting needs matplotlib: pip install matplotlib") from None

    class ShownFigure(Figure):  # type: ignore[misc, unused-ignore]
        """Shows itself: IPython knows how to show figures only once pyplot has been imported."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    figure = ShownFigure(figsize=(8, 5), layout="constrained")
    busy, memory = figure.subplots(2, 1, sharex=True)
    for device in dict.fromkeys(row.device for row in report.samples):
        rows = [row for row in report.samples if row.device == device]
        moments = [row.seconds for row in rows]
        busy.plot(moments, [_or_gap(row.utilization) for row in rows], label=device)
        (line,) = memory.plot(moments, [_or_gap(row.memory_used, GIB) for row in rows], label=f"{device}, all")
        own = [_or_gap(row.kernel_allocated, GIB) for row in rows]
        memory.plot(moments, own, "--", color=line.get_color(), label=f"{device}, this kernel")
    busy.set(ylabel="Utilisation, %", ylim=(0, 100))
    memory.set(ylabel="Memory, GiB", xlabel="Seconds", ylim=(0, None))
    for axes in (busy, memory):
        if axes.lines:
            axes.legend(loc="upper left", fontsize="small")
    return figure


def _or_gap(value: float | None, unit: float = 1.0) -> float:
    return float("nan") if value is None else value / unit
