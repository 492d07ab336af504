"""What pictures of memory have in common, drawn by matplotlib."""

from __future__ import annotations

import functools
from io import BytesIO
from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuMagicError
from gpumagic.report.document import OTHER_COLOUR, PART_COLOURS
from gpumagic.report.units import printable, size, truncate_middle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1024**3
MIB = 1024**2
FAR_ABOVE = 3
"""How many times the highest a capacity may be and still be drawn."""


def label(text: str) -> str:
    """Return a name as matplotlib may have it, which takes `$` for mathematics and no lone surrogate."""
    return truncate_middle(printable(text), 60).replace("$", r"\$")


def part_colour(part: str) -> tuple[float, ...]:
    """Return the colour of a part of memory as matplotlib takes it."""
    return tuple(each / 255 for each in PART_COLOURS.get(part, OTHER_COLOUR))


def mark_point(axes: Any, x: float, y: float, text: str) -> None:
    """Mark a point and write a text above it, to the side that has room."""
    axes.plot([x], [y], "v", color="tab:orange")
    left, right = axes.get_xlim()
    side = "left" if x < left + (right - left) / 4 else "right" if x > right - (right - left) / 4 else "center"
    axes.annotate(text, (x, y), textcoords="offset points", xytext=(0, 6), ha=side, fontsize="small")


def finish_memory(axes: Any, unit: tuple[int, str], most: int, capacity: int | None = None) -> None:
    """Give a picture of memory its axis, its capacity and its legend, which stands beside it and hides nothing.

    A capacity far above all that is drawn would flatten the picture, so the axis ends below it and the legend says it.

    Args:
        axes: matplotlib's, with everything else drawn.
        unit: as `unit_for` returns it.
        most: the most bytes that are drawn.
        capacity: bytes of the device; None where that is not known.
    """
    scale, name = unit
    top = 1.15 * most / scale
    if capacity:
        text = f"capacity {size(capacity)}"
        axes.axhline(capacity / scale, ls="--", lw=1, color="tab:red", label=text)
        top = max(top, 1.05 * capacity / scale) if capacity <= FAR_ABOVE * most else top
    axes.set(ylabel=f"Allocated ({name})", ylim=(0, top or 1))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", reverse=True)


def unit_for(most: int) -> tuple[int, str]:
    """Return the unit in which to write bytes of which the most are these, and its name."""
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")


def new_figure(height: float) -> Figure:
    """Return a figure that belongs to no window and to no pyplot state, so that it shows once, where it is returned.

    Raises:
        GpuMagicError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Plain
    except ImportError:
        raise GpuMagicError('plotting needs matplotlib: pip install matplotlib, or "gpumagic[plot]"') from None

    class ShownFigure(Plain):  # type: ignore[misc, unused-ignore]
        """Shows itself: IPython knows how to show figures only once pyplot has been imported."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    return ShownFigure(figsize=(8, height), layout="constrained")


@functools.singledispatch
def figure_of(record: object) -> Figure:
    """Return a report or a timeline as a matplotlib figure; the views of each feature register theirs here.

    Raises:
        GpuMagicError: matplotlib is not installed, or there is nothing to draw.
    """
    raise TypeError(f"no plot is registered for {type(record).__name__}")
