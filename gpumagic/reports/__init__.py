"""What the probes hand to the outside: frozen records, and nothing else.

A report is plain data. It holds no tensor, no frame and no exception, so it can be kept, pickled and sent
to another process. It imports neither torch nor IPython; pandas and the renderers only when asked.

Units everywhere: bytes are ints, times float seconds, percent floats from 0 to 100, devices strings such as
``"cuda:1"``. A figure that could not be had is ``None``, and the reason is in the row's ``reasons`` under the
field's name, or in the report's ``notes``.
"""

from gpumagic.reports.at_failure import Action, Instant, Shape, Share
from gpumagic.reports.base import Report
from gpumagic.reports.cells import CellRow, CellsReport
from gpumagic.reports.changes import DeviceChange, DiffReport, DiffRow
from gpumagic.reports.cluster import ClusterReport, EngineAnswer, PlacedRow, merge
from gpumagic.reports.explanation import Explanation, Operand
from gpumagic.reports.gpu import BenchReport, BenchRow, GPUReport, GpuRow, HistoryReport, ProcessRow, SampleRow
from gpumagic.reports.held import FreedRow, HeldReport, HeldRow, ReleaseReport
from gpumagic.reports.names import Holder
from gpumagic.reports.oom import Advice, Change, OomReport
from gpumagic.reports.origin import Origin
from gpumagic.reports.rehearsal import DeviceForecast, Fit, RehearsalPoint, RehearsalReport, RehearsalRow
from gpumagic.reports.tensors import DeviceMemoryRow, GraphRow, SourceRow, TensorReport, TensorRow
from gpumagic.reports.timeline import MemoryCourse, MemoryPoint, MemoryTimeline
from gpumagic.reports.transfers import TransferReport, TransferRow
from gpumagic.reports.tries import FitReport, Try
from gpumagic.reports.why import WayRow, WhyReport

__all__ = [
    "Action",
    "Advice",
    "BenchReport",
    "BenchRow",
    "CellRow",
    "CellsReport",
    "Change",
    "ClusterReport",
    "DeviceChange",
    "DeviceForecast",
    "DeviceMemoryRow",
    "DiffReport",
    "DiffRow",
    "EngineAnswer",
    "Explanation",
    "Fit",
    "FitReport",
    "FreedRow",
    "GPUReport",
    "GpuRow",
    "GraphRow",
    "HeldReport",
    "HeldRow",
    "HistoryReport",
    "Holder",
    "Instant",
    "MemoryCourse",
    "MemoryPoint",
    "MemoryTimeline",
    "OomReport",
    "Operand",
    "Origin",
    "PlacedRow",
    "ProcessRow",
    "RehearsalPoint",
    "RehearsalReport",
    "RehearsalRow",
    "ReleaseReport",
    "Report",
    "SampleRow",
    "Shape",
    "Share",
    "SourceRow",
    "TensorReport",
    "TensorRow",
    "TransferReport",
    "TransferRow",
    "Try",
    "WayRow",
    "WhyReport",
    "merge",
]
