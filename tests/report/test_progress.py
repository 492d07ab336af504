"""Progress is one line that is rewritten in place and gone at the end."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace

import nbclient
import nbformat
import pytest

from gpumagic.report import progress
from gpumagic.report.document import Document, Heading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return what was written over each other."""
        return [line.rstrip() for line in self.getvalue().split("\r") if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=shown, modules=sys.modules))
    monkeypatch.setattr(progress, "DELAY", 0.0)
    return shown


def test_a_terminals_last_line_is_written_over_and_removed(terminal: Terminal) -> None:
    with progress.counted(2, "dry run") as tell:
        tell("batch_size = 16")
        tell("batch_size = 8")
    assert terminal.lines() == ["dry run 1 of 2: batch_size = 16", "dry run 2 of 2: batch_size = 8"]
    assert terminal.getvalue().endswith(f"\r{'':31}\r")


def test_what_takes_less_than_a_second_shows_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 3600.0)
    with progress.counted(2, "dry run") as tell, progress.elapsed("dry run") as tick:
        tell("batch_size = 16")
        tick()
    assert terminal.getvalue() == ""


def test_a_clock_goes_on_in_the_line_of_the_count_that_it_is_within(terminal: Terminal) -> None:
    with progress.counted(12, "dry run") as tell:
        tell("batch_size = 16")
        with progress.elapsed("dry run") as tick:
            tick()
        tell("batch_size = 32")
    first, clock, second = terminal.lines()
    assert clock == f"{first}, 0 s"
    assert second == "dry run 2 of 12: batch_size = 32"


def test_a_file_has_only_what_one_waits_for_without_a_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.waiting("compiling ..."):
        pass
    with progress.counted(2, "dry run") as tell:
        tell("batch_size = 16")
    assert capsys.readouterr().err == "compiling ...\n"


def test_an_interrupt_removes_the_line_and_the_next_one_is_new(terminal: Terminal) -> None:
    def interrupted() -> None:
        with progress.counted(2, "dry run") as tell:
            tell("batch_size = 16")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.getvalue().endswith(" \r")
    with progress.elapsed("dry run") as tick:
        tick()
    assert terminal.lines()[-1] == "dry run, 0 s"


def test_threads_have_lines_of_their_own(terminal: Terminal) -> None:
    def elsewhere() -> None:
        with progress.elapsed("another dry run") as tick:
            tick()

    with progress.counted(2, "dry run") as tell:
        tell("batch_size = 16")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        tell("batch_size = 8")
        with progress.elapsed("dry run") as tick:
            tick()
    assert terminal.lines() == [
        "dry run 1 of 2: batch_size = 16",
        "another dry run, 0 s",
        "dry run 2 of 2: batch_size = 8",
        "dry run 2 of 2: batch_size = 8, 0 s",
    ]


CELL = """
from gpumagic.report import progress
progress.DELAY = 0.0
with progress.counted(2, "dry run") as tell:
    tell("batch_size = 16")
    tell("batch_size = 8")
"""


def heard(kernel, cell: str) -> list[tuple[str, object]]:  # type: ignore[no-untyped-def]
    """Return what a front end hears of a cell's outputs."""
    found: list[tuple[str, object]] = []
    listen = kernel._iopub

    def hear(deadline: float):  # type: ignore[no-untyped-def]
        message = listen(deadline)
        kind, content = message["msg_type"], message["content"]
        if "display" in kind or kind in ("stream", "execute_result"):
            found.append((kind, content.get("data", content.get("name"))))
        return message

    kernel._iopub = hear
    assert kernel.run(cell).status == "ok"
    kernel._iopub = listen
    return found


def test_a_notebook_has_one_display_of_progress_whose_place_the_report_takes(start_kernel) -> None:  # type: ignore[no-untyped-def]
    kernel = start_kernel()
    begin, update, gone, report = heard(
        kernel, f"{CELL}from gpumagic.gpus.report import GPUReport\nGPUReport(())"
    )
    assert begin == ("display_data", {"text/plain": "dry run 1 of 2: batch_size = 16"})
    assert update == ("update_display_data", {"text/plain": "dry run 2 of 2: batch_size = 8"})
    assert gone == ("update_display_data", {})
    assert report[0] == "update_display_data"
    assert "text/html" in report[1]
    assert [kind for kind, _ in heard(kernel, CELL)] == [
        "display_data",
        *2 * ["update_display_data"],
    ]
    assert [kind for kind, _ in heard(kernel, "GPUReport(())")] == ["execute_result"], (
        "of another cell"
    )
    assert heard(kernel, f"%%capture\n{CELL}") == []


def test_a_notebook_that_was_run_has_the_report_and_no_empty_output(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    code = f"{CELL}from gpumagic.gpus.report import GPUReport\nGPUReport(())"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert "text/html" in output.data


@pytest.mark.parametrize("kind", ["dumb", "xterm"])
def test_what_is_known_by_then_stands_above_the_line_until_the_report_comes(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TERM", kind)
    with progress.counted(3, "trying") as tell:
        tell("a smaller batch")
        progress.known(Document([Heading("Lower batch_size from 64 to 32: fits")]))
        tell("checkpointing")
        tell("bfloat16")
    assert terminal.getvalue().count("Lower batch_size from 64 to 32: fits\n") == 1
    assert "trying 3 of 3: bfloat16" in terminal.lines()
    assert terminal.getvalue().endswith("\x1b[2A\x1b[J") == (kind == "xterm"), (
        "two rows up, and all below is gone"
    )
