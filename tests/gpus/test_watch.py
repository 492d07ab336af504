"""`%gpuinfo -w`: how it ends, how a terminal shows it, and that Ctrl-C leaves nothing of it."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
from itertools import count

import pytest

from gpumagic.gpus import live
from gpumagic.gpus.report import GPUReport, GpuRow
from gpumagic.report.base import to_text
from tests.interrupts import Interrupt

GIB = 1024**3


def snapshots(limit: int = 3):
    """Return a function that gives snapshots of growing use, and then waits no longer but fails."""
    numbers = itertools.count(1)

    def ask() -> GPUReport:
        number = next(numbers)
        if number > limit:
            raise OSError("the bus fell off")
        row = GpuRow(
            "cuda:0",
            0,
            memory_total=8 * GIB,
            memory_used=number * GIB,
            kernel_allocated=0,
            utilization=40.0,
        )
        return GPUReport((row,), "2.13.0", "12.8")

    return ask


def watched(limit: int = 3) -> tuple[live.GpuWatch, list[tuple[GPUReport, bool]]]:
    """Return a watch that has ended by itself, and all it has shown."""
    shown: list[tuple[GPUReport, bool]] = []
    over = threading.Event()

    def show(report: GPUReport, is_last: bool) -> None:
        shown.append((report, is_last))
        if is_last:
            over.set()

    watch = live.GpuWatch(snapshots(limit), 0.01, show)
    watch.start()
    assert over.wait(30)
    watch.stop()
    return watch, shown


def test_each_snapshot_is_shown_with_what_ends_them_and_the_last_one_again() -> None:
    watch, shown = watched()
    assert [report.devices[0].memory_used for report, _ in shown] == [
        GIB,
        2 * GIB,
        3 * GIB,
        3 * GIB,
    ]
    assert [is_last for _, is_last in shown] == [False, False, False, True]
    assert (
        to_text(shown[2][0], 80).splitlines()[-1]
        == "A snapshot every 0.01 s, until %gpuinfo -w off."
    )
    assert watch.report == shown[3][0]


def test_an_error_ends_the_watch_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread that died without a word would look like GPUs that do not change."""
    watch, _ = watched()
    assert watch.ended == "stopped by OSError: the bus fell off"
    assert "the bus fell off" in to_text(watch.report, 80)
    assert capsys.readouterr().err == ""


def test_what_is_wrong_with_the_first_snapshot_is_raised() -> None:
    watch = live.GpuWatch(snapshots(0), 1.0, lambda report, is_last: None)
    with pytest.raises(OSError, match="the bus"):
        watch.start()
    assert "gpumagic watch" not in [each.name for each in threading.enumerate()]


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
        self.lines, self.row, self.scrolled = (
            self.lines[over:],
            self.row - over,
            self.scrolled + over,
        )
        return len(text)


def drawn(
    height: int, monkeypatch: pytest.MonkeyPatch, *, ended: bool = False, terminal: str = "xterm"
) -> tuple[Screen, GPUReport]:
    """Return a terminal of that height after three reports, the second shorter than the first."""
    screen = Screen(height)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("LINES", str(height))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", terminal)
    show = live.terminal_display()
    screen.write("In [1]: %gpuinfo -w\n")
    for place, report in enumerate(REPORTS):
        show(report, ended and place == 2)
    return screen, REPORTS[2]


REPORTS = [
    GPUReport(snapshots()().devices * 3, notes=notes) for notes in (("long",) * 4, (), ("last",))
]


def test_a_terminal_shows_the_last_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, last = drawn(40, monkeypatch)
    assert screen.lines == ["In [1]: %gpuinfo -w", *to_text(last, 80).splitlines(), ""]


def test_a_terminal_that_is_too_low_is_not_scrolled_and_says_what_it_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has scrolled off the top cannot be written over: every refresh would leave a copy of it."""
    screen, last = drawn(7, monkeypatch)
    lines = to_text(last, 80).splitlines()
    assert screen.scrolled == 1, "the prompt, once"
    assert screen.lines[:5] == lines[:5]
    assert screen.lines[5:] == [
        f"... {len(lines) - 5} more lines in a taller terminal; Ctrl-C ends it",
        "",
    ]


def test_a_terminal_that_is_too_low_gets_the_whole_report_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, last = drawn(7, monkeypatch, ended=True)
    lines = to_text(last, 80).splitlines()
    assert screen.lines == [*lines[-6:], ""]
    assert screen.scrolled == 1 + len(lines) - 6


def test_a_terminal_that_knows_no_escape_sequences_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emacs' shell and logs that pose as a terminal show them as letters: reports stand below each other there."""
    screen, _ = drawn(100, monkeypatch, terminal="dumb")
    reports = [line for each in REPORTS for line in to_text(each, 80).splitlines()]
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
    monkeypatch.setattr(
        "gpumagic.api.gpuinfo", lambda **_: GPUReport((), "2.13.0", None, cause="no driver")
    )
    bare_shell.run_line_magic("load_ext", "gpumagic")
    assert (
        bare_shell.run_cell("%gpuinfo -w").result.cause == "no driver"
    )  # in a terminal it would wait for Ctrl-C
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
