"""The view of `%gpuinfo --bench`: matrix products, copies, and from which size a device is worth its copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpumagic.gpus.report import BenchReport, BenchRow
from gpumagic.report.base import grouped
from gpumagic.report.document import Block, Cell, Column, Document, Heading, Paragraph, Table, document_of
from gpumagic.report.units import NOT_AVAILABLE, count, rate

LEGEND = (
    'The best of several runs each: products of square matrices, copies of up to 256 MiB; "to next" is to the '
    "next device of the same kind."
)


@document_of.register(BenchReport)
def view_bench(report: BenchReport) -> Document:
    """Return both tables and the conclusions."""
    blocks: list[Block] = [Heading(_headline(report)), Paragraph(_conditions(report), muted=True)]
    for measure, title, show in (("matmul", "Products", flops), ("copy", "Copies", rate)):
        rows = [row for row in report.measurements if row.measure == measure]
        if any(row.rate is not None for row in rows):
            blocks.append(_table(rows, title, show))
    blocks += [Paragraph(sentence) for sentence in _speedups(report)]
    blocks.append(Paragraph(" ".join([LEGEND, *_notes(report)]), muted=True))
    return Document(tuple(blocks))


def flops(each_second: float | None) -> str:
    """Return floating-point operations a second as ``"12.3 TFLOP/s"``."""
    if each_second is None:
        return NOT_AVAILABLE
    for factor, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if each_second >= factor:
            number = each_second / factor
            return f"{number:.3g} {unit}" if number < 1e3 else f"{number:.0f} {unit}"
    return f"{each_second / 1e6:.3g} MFLOP/s"


def _headline(report: BenchReport) -> str:
    """Return the fastest device, and how it compares with the CPU."""
    rates = {row.device: row.rate for row in report.measurements if row.what == "float32" and not row.simulated}
    known = {device: each for device, each in rates.items() if each}
    if not known:
        simulated = bool(report.measurements) and all(row.simulated for row in report.measurements)
        return "Only simulated GPUs were measured" if simulated else "No product of float32 matrices was measured"
    cpu, fastest = known.get("cpu"), max(known, key=known.__getitem__)
    speed = f"{flops(known[fastest])} in float32"
    if fastest != "cpu":
        return f"{fastest} is fastest: {speed}" + (f", {known[fastest] / cpu:.3g} times the CPU's" if cpu else "")
    return f"The CPU is fastest: {speed}" if len(known) > 1 else f"The CPU does {speed}; no GPU was measured"


def _conditions(report: BenchReport) -> str:
    devices = len({row.device for row in report.measurements})
    threads = count(report.threads or 1, "CPU thread")
    return f"{count(devices, 'device')} measured · torch {report.torch_version} · {threads}"


def _table(rows: Sequence[BenchRow], title: str, show: Callable[[float | None], str]) -> Table:
    names = list(dict.fromkeys(row.what for row in rows if row.rate is not None))
    found = {(row.device, row.what): row for row in rows}
    grid = [
        [_device_label(device, rows), *(_cell(found.get((device, name)), show) for name in names)]
        for device in dict.fromkeys(row.device for row in rows)
    ]
    columns = [Column(title), *(Column(_short_direction(name), "right", _PRIORITIES.get(name, 0)) for name in names)]
    return Table(columns, grid, title)


_PRIORITIES = {"float16": 1, "host-to-device, pinned": 1, "device-to-device": 1, "device-to-host, pinned": 2,
               "float64": 2}  # fmt: skip


def _short_direction(name: str) -> str:
    return (
        name.replace("host-to-device", "to device")
        .replace("device-to-host", "to host")
        .replace("device-to-device", "to next")
    )


def _device_label(device: str, rows: Sequence[BenchRow]) -> str:
    return f"{device} (simulated)" if any(row.simulated for row in rows if row.device == device) else device


def _cell(row: BenchRow | None, show: Callable[[float | None], str]) -> Cell | str:
    if row is None or row.rate is None:
        return Cell("-" if row is None else NOT_AVAILABLE, muted=True, title="" if row is None else row.reason or "")
    return show(row.rate)


def _speedups(report: BenchReport) -> list[str]:
    """Return how each real device compares with the CPU, with and without copies."""
    cpu = report.rate("cpu", "float32")
    sentences = []
    for device in dict.fromkeys(row.device for row in report.measurements if not row.simulated and row.device != "cpu"):
        fast = report.rate(device, "float32")
        if cpu and fast:
            to, back = report.rate(device, "host-to-device"), report.rate(device, "device-to-host")
            copies = _break_even(cpu, fast, to, back)
            sentences.append(f"{device} multiplies float32 {fast / cpu:.3g} times as fast as the CPU.{copies}")
    return sentences


def _break_even(cpu: float, fast: float, to: float | None, back: float | None) -> str:
    """Return from which size a product is worth its copies: 2 n^3 operations, 8 n^2 bytes there and 4 n^2 back."""
    if not to or not back:
        return ""
    if fast <= cpu:
        return " Multiplying there is never faster, copies included."
    size = (8 / to + 4 / back) / (2 / cpu - 2 / fast)
    rows = max(1, math.ceil(size))
    return f" With copies to it and back it is faster from about {rows} rows on (estimated)."


def _notes(report: BenchReport) -> list[str]:
    notes = []
    if report.float32_precision not in (None, "highest"):
        notes.append(
            f"torch.set_float32_matmul_precision is {report.float32_precision!r}: float32 is not full float32."
        )
    if any(row.simulated for row in report.measurements):
        notes.append("Simulated devices compute on the CPU; their rates say nothing of a GPU.")
    reasons = grouped((row.reason, f"{row.device} {row.what}") for row in report.measurements if row.reason)
    notes += [f"{', '.join(where)}: {NOT_AVAILABLE} ({reason})." for reason, where in reasons.items()]
    return notes
