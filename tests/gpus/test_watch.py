"""`%gpuinfo -w`: what a recorder keeps, how it ends, how the history looks, and that Ctrl-C leaves nothing of it."""

from __future__ import annotations

import io
import itertools
import pickle
import re
import sys
import threading
from itertools import count

import pytest
from interrupts import Interrupt

from gpumagic.gpus import live
from gpumagic.gpus.report import GPUReport, GpuRow, HistoryReport, SampleRow
from gpumagic.report.base import to_html, to_text

GIB = 1024**3


def snapshots(limit: int = 3):
    """Return a function that gives snapshots of growing use, and then waits no longer but fails."""
    numbers = itertools.count(1)

    def ask() -> GPUReport:
        number = next(numbers)
        if number > limit:
            raise OSError("the bus fell off")
        row = GpuRow("cuda:0", 0, memory_total=8 * GIB, memory_used=number * GIB, kernel_allocated=0, utilization=40.0)
        return GPUReport((row,), "2.13.0", "12.8")

    return ask


def recorded(limit: int = 3) -> tuple[live.GpuRecorder, list[HistoryReport]]:
    """Return a recorder that has ended by itself, and all it has shown."""
    shown: list[HistoryReport] = []
    over = threading.Event()

    def show(report: HistoryReport) -> None:
        shown.append(report)
        if report.ended:
            over.set()

    recorder = live.GpuRecorder(snapshots(limit), 0.01, show)
    recorder.start()
    assert over.wait(30)
    recorder.stop()
    return recorder, shown


def test_a_recorder_keeps_a_row_a_device_and_moment() -> None:
    recorder, shown = recorded()
    assert [row.memory_used for row in recorder.report] == [GIB, 2 * GIB, 3 * GIB]
    assert [len(report) for report in shown] == [1, 2, 3, 3]
    moments = [row.seconds for row in recorder.report]
    assert moments == sorted(moments)
    assert list(recorder.report.to_pandas().columns) == list(SampleRow.__dataclass_fields__)


def test_an_error_ends_the_recording_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread that died without a word would look like GPUs that do not change."""
    recorder, _ = recorded()
    assert recorder.ended == "stopped by OSError: the bus fell off"
    assert "the bus fell off" in to_text(recorder.report, 80)
    assert capsys.readouterr().err == ""


def test_what_is_wrong_with_the_first_snapshot_is_raised() -> None:
    recorder = live.GpuRecorder(snapshots(0), 1.0, lambda report: None)
    with pytest.raises(OSError, match="the bus"):
        recorder.start()
    assert "gpumagic recorder" not in [each.name for each in threading.enumerate()]


def test_the_history_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may stay open for weeks."""
    monkeypatch.setattr(live, "MAX_SNAPSHOTS", 2)
    recorder, _ = recorded()
    assert [row.memory_used for row in recorder.report] == [2 * GIB, 3 * GIB]


def test_lines_of_blocks_stand_under_the_table() -> None:
    recorder, shown = recorded()
    assert to_text(shown[2], 80).splitlines()[-5:] == [
        "History  Util  Memory  This kernel",
        "───────  ────  ──────  ───────────",
        "cuda:0   ▄▄▄   ▂▃▄     ▁▁▁",
        "Lines reach from 0 to 100%, the newest at the right.",
        "A snapshot every 0.01 s, until %gpuinfo -w off.",
    ]
    assert "▂▃▄" in to_html(recorder.report)
    assert to_text(shown[2], 80, unicode=False).isascii()


def test_a_figure_nobody_has_is_not_drawn_as_zero() -> None:
    report = HistoryReport((SampleRow(0.0, "mps:0", memory_total=8 * GIB), SampleRow(1.0, "mps:0")))
    assert "▁" not in to_text(report, 80)
    assert "n/a" in to_text(report, 80)


def test_a_history_can_be_sent_elsewhere() -> None:
    recorder, _ = recorded()
    assert pickle.loads(pickle.dumps(recorder.report)) == recorder.report
    assert recorder.report.to_dict()["latest"]["devices"][0]["device"] == "cuda:0"


class Screen(io.StringIO):
    """A terminal as far as it is used here: cursor up, erase to the end of the line and of the screen, scrolling."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.height, self.scrolled = height, 0
        self.lines, self.row = [""], 0

    def isatty(self) -> bool:
        """Return True: what is written is drawn."""
        return True

    def write(self, text: str) -> int:
        """Draw the text."""
        for part in re.findall(r"\x1b\[\d*[FKJ]|\n|[^\x1b\n]+", text):
            if part.endswith("F") and part.startswith("\x1b"):
                self.row = max(0, self.row - int(part[2:-1]))
            elif part == "\x1b[J":
                self.lines[self.row :] = [""]
            elif part == "\n":
                self.row += 1
                self.lines += [""] * (self.row == len(self.lines))
            elif part != "\x1b[K":
                self.lines[self.row] = part
        over = max(0, len(self.lines) - self.height)
        self.lines, self.row, self.scrolled = self.lines[over:], self.row - over, self.scrolled + over
        return len(text)


def drawn(
    height: int, monkeypatch: pytest.MonkeyPatch, *, ended: bool = False, terminal: str = "xterm"
) -> tuple[Screen, HistoryReport]:
    """Return a terminal of that height after three reports, each longer or shorter than the last."""
    screen = Screen(height)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("LINES", str(height))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", terminal)
    _, shown = recorded()
    show = live.terminal_display()
    screen.write("In [1]: %gpuinfo -w\n")
    for report in (shown[2], shown[0], shown[3] if ended else shown[1]):
        show(report)
    return screen, shown[3] if ended else shown[1]


def test_a_terminal_shows_the_last_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, last = drawn(40, monkeypatch)
    assert screen.lines == ["In [1]: %gpuinfo -w", *to_text(last, 80).splitlines(), ""]


def test_a_terminal_that_is_too_low_is_not_scrolled_and_says_what_it_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has scrolled off the top cannot be written over: every refresh would leave a copy of it."""
    screen, last = drawn(8, monkeypatch)
    lines = to_text(last, 80).splitlines()
    assert screen.scrolled == 1, "the prompt, once"
    assert screen.lines[:6] == lines[:6]
    assert screen.lines[6:] == [f"... {len(lines) - 6} more lines in a taller terminal; Ctrl-C ends it", ""]


def test_a_terminal_that_is_too_low_gets_the_whole_report_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, last = drawn(8, monkeypatch, ended=True)
    lines = to_text(last, 80).splitlines()
    assert screen.lines == [*lines[-7:], ""]
    assert screen.scrolled == 1 + len(lines) - 7


def test_a_terminal_that_knows_no_escape_sequences_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emacs' shell and logs that pose as a terminal show them as letters: reports stand below each other there."""
    screen, _ = drawn(100, monkeypatch, terminal="dumb")
    _, shown = recorded()
    reports = [line for each in (2, 0, 1) for line in to_text(shown[each], 80).splitlines()]
    assert screen.lines == ["In [1]: %gpuinfo -w", *reports, ""]


CELLS = {"starts": "arm()\n%gpuinfo -w 1000", "stops": "%gpuinfo -w 1000\narm()\n%gpuinfo -w off"}


@pytest.fixture
def shell(bare_shell, two_devices):
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.kernel = object()  # without one it waits for Ctrl-C
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    del bare_shell.kernel


def test_where_there_is_no_gpu_it_says_why_and_watches_nothing(bare_shell, monkeypatch) -> None:
    monkeypatch.setattr("gpumagic.magics._ask_gpus", lambda _: GPUReport((), "2.13.0", None, cause="no driver"))
    bare_shell.run_line_magic("load_ext", "gpumagic")
    assert bare_shell.run_cell("%gpuinfo -w").result.cause == "no driver"  # in a terminal it would wait for Ctrl-C
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def state(shell) -> tuple[object, ...]:
    threads = [each.name for each in threading.enumerate() if "gpumagic" in each.name]
    return [*shell.events.callbacks["post_run_cell"]], threads


@pytest.mark.parametrize("when", CELLS)
def test_whatever_line_ctrl_c_comes_at_off_ends_it_with_nothing_left(shell, when) -> None:
    shell.run_cell("%gpuinfo -w 1000\n%gpuinfo -w off")  # what is made once for a process
    before, places = state(shell), []
    for line in count():
        interrupt = Interrupt({live.__file__}, line)
        interrupt.run(shell, CELLS[when])
        if not interrupt.where:
            break
        places.append(interrupt.where)
        shell.run_cell("%gpuinfo -w off")
        assert state(shell) == before, interrupt.where
    shell.run_cell("%gpuinfo -w off")
    assert state(shell) == before
    assert len(places) > 5
