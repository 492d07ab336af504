"""How long the device was idle under `--trace`, on a device whose events and streams keep to a clock of the test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ondevice_corpus as corpus
import pytest

from gpumagic.errors import OptionError
from gpumagic.memory import allocator
from gpumagic.transfers.trace.lines import LineSum
from gpumagic.transfers.trace.report import LineReport, LineRow
from gpumagic.transfers.trace.streams import StreamLog


class Device:
    """Stands for `torch.cuda`: work that is launched runs after what was launched on its stream before."""

    def __init__(self) -> None:
        self.now, self.own, self.stream, self.is_capturing = 0.0, 0.0, 0, False
        self.busy_until = {0: 0.0, 1: 0.0}
        self.recorded = 0
        self.log = StreamLog("cuda:0", lambda: self.own)

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def current_stream(self, _: str) -> Any:
        number = self.stream
        return SimpleNamespace(stream_id=number, query=lambda: self.busy_until[number] <= self.now)

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802  # torch's name
        assert enable_timing
        return Event(self)

    def launch(self, seconds: float, lines: list[LineSum] | None = None) -> None:
        """Run an operator, as the trace sees it."""
        self.log.still_idle(lines or [])
        self.launch_unseen(seconds)
        self.log.after_operator()

    def launch_unseen(self, seconds: float) -> None:
        self.busy_until[self.stream] = max(self.now, self.busy_until[self.stream]) + seconds


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: Any) -> None:
        self.at = max(self.device.now, self.device.busy_until[stream.stream_id])
        self.device.recorded += 1

    def query(self) -> bool:
        return self.at <= self.device.now

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made: list[Device] = []
    monkeypatch.setattr(allocator, "device_module", lambda _: made[0] if made else SimpleNamespace())
    made.append(Device())
    made[0].log = StreamLog("cuda:0", lambda: made[0].own)
    return made[0]


def test_the_device_is_idle_from_the_end_of_its_work_to_the_next(device: Device) -> None:
    first, second = LineSum(), LineSum()
    start = device.log.mark()
    device.launch(2.0)
    middle = device.log.mark()
    device.log.add_line(first, start, middle)
    device.now = 5.0  # the host loads for 5 seconds, of which the device works 2
    device.launch(1.0, [second])
    end = device.log.mark()
    device.log.add_line(second, middle, end)
    device.now = 6.0
    device.log.close()
    assert (first.device_seconds, first.idle_seconds) == (2.0, None)
    assert (second.device_seconds, second.idle_seconds) == (1.0, 3.0)
    assert device.log.idle == 3.0


def test_a_device_that_still_works_is_not_idle_whatever_launched_the_work(device: Device) -> None:
    device.launch(1.0)
    device.now = 0.5
    device.launch(1.0)
    device.now = 3.0
    device.launch_unseen(9.0)  # a CUDA graph, or a kernel of Triton's
    device.log.still_idle([])
    device.now = 20.0
    device.log.close()
    assert device.log.idle == 0.0


def test_a_stream_that_works_keeps_the_device_busy_beside_one_that_has_ended(device: Device) -> None:
    device.stream = 1
    device.launch(9.0)
    device.stream = 0
    device.launch(1.0)
    device.now = 5.0
    device.launch(1.0)
    device.now = 20.0
    device.log.close()
    assert device.log.idle == 0.0


def test_what_the_trace_itself_takes_is_no_idle_time(device: Device) -> None:
    device.launch(1.0)
    device.now, device.own = 4.0, 2.5
    device.launch(1.0)
    device.now = 9.0
    device.log.close()
    assert device.log.idle == 0.5


def test_no_event_becomes_part_of_a_graph(device: Device) -> None:
    device.launch(1.0)
    before, device.now, device.is_capturing = device.recorded, 5.0, True
    device.launch(1.0)
    assert device.log.mark() is None
    assert device.recorded == before


def report(idle: float | None, *, elapsed: float = 4.0) -> LineReport:
    rows = tuple(
        LineRow(None, line, code, 1, 1.0, None, waited, None, None, None, None, 0, 0, 0)
        for line, code, waited in ((1, "for x in loader:", idle), (2, "    step(x)", 0.1))
    )
    return LineReport("cuda:0", rows, elapsed, idle=idle, traced=elapsed)


def test_the_report_says_how_little_the_device_did_and_for_which_line_it_waited() -> None:
    said = "cuda:0 was busy for at most 22% of the traced cell: it waited 3.1 s for line 1."
    assert said in str(report(3.1)).replace("\n", " ")
    for quiet in (report(1.0), report(None), report(0.03, elapsed=0.04)):
        assert "busy" not in str(quiet)


@pytest.mark.usefixtures("two_devices")
def test_a_device_without_events_has_no_such_figure_but_the_reason() -> None:
    found, _, _ = corpus.run("import time\ny = g * 2\ntime.sleep(0.15)\ny += 1", trace=True)
    assert (found.by_line.idle, "no events" in found.by_line.idle_reason) == (None, True)
    assert all(row.device_seconds is None and row.idle_seconds is None for row in found.by_line)
    assert "busy" not in str(found)


@pytest.mark.usefixtures("two_devices")
def test_memory_viz_has_nothing_of_a_device_without_a_history(tmp_path: Path) -> None:
    found, _, _ = corpus.run("y = g * 2", trace=True)
    with pytest.raises(OptionError, match="history of torch's CUDA allocator; simgpu:0 has none"):
        found.save(tmp_path / "cell.pickle")
