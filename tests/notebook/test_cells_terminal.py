"""A real terminal: IPython with its line editor, behind a pseudo-terminal."""

from __future__ import annotations

import re
import sys

import pytest

from tests.kernels import environment, plain

pytestmark = pytest.mark.ipython

pexpect = pytest.importorskip("pexpect", reason="pexpect drives the terminal")
ENTER, CTRL_C = "\r", "\x03"


class Terminal:
    """IPython's plain prompt, which ends a cell magic's cell on a second blank line."""

    def __init__(self, home):
        self.child = spawn(home, "--simple-prompt", TERM="dumb")
        self.child.expect(r"In \[1\]: ")

    def type(self, *lines):
        """Type a cell, and return what is shown until the next prompt."""
        for line in (*lines, "", "") if lines[0].startswith("%%") else lines:
            self.child.sendline(line)
        return self.read()

    def read(self):
        self.child.expect(r"In \[\d+\]: ")
        return plain(self.child.before.replace("\r\n", "\n"))


def spawn(home, *options, **extra):
    arguments = [
        "-m",
        "IPython",
        *options,
        "--no-banner",
        "--no-confirm-exit",
        "--ext=tests.probe_magics",
    ]
    child = pexpect.spawn(
        sys.executable, [*arguments, "--HistoryManager.enabled=False"], env=environment(home, **extra),
        encoding="utf-8", timeout=60, dimensions=(50, 200),
    )  # fmt: skip
    child.delaybeforesend = None
    return child


@pytest.fixture(scope="module")
def module_terminal(tmp_path_factory):
    terminal = Terminal(tmp_path_factory.mktemp("home"))
    yield terminal
    terminal.child.close(force=True)


@pytest.fixture
def terminal(module_terminal):
    """Return a terminal shared by the module; no test may leave a mode behind."""
    yield module_terminal
    assert "[]\n" in module_terminal.type("modes()")


def test_the_value_comes_before_the_report(terminal):
    """In a terminal too."""
    shown = terminal.type("%%ondevice cuda", "x = 20", "x + 1")
    assert re.search(r"Out\[\d+\]: 21\s+<report of ondevice cuda>", shown)


def test_an_error_is_shown_once_and_then_the_report(terminal):
    """On the user's line."""
    shown = terminal.type("%%ondevice cuda", "x = 1", "1 / 0")
    assert shown.count("ZeroDivisionError: division by zero") == 1
    assert "3 1 / 0" in shown
    assert shown.rindex("<report of") > shown.rindex("ZeroDivisionError")


def test_await_works(terminal):
    """In the native form and in the form whose body the magic runs."""
    shown = terminal.type("%%ondevice cuda", "import asyncio", "await asyncio.sleep(0, 'awaited')")
    assert "'awaited'" in shown
    shown = terminal.type(
        "%%oomguard --retry 1", "import asyncio", "await asyncio.sleep(0, 'awaited')"
    )
    assert "'awaited'" in shown


@pytest.mark.parametrize(
    "body",
    [
        "import time; print('rea' 'dy'); [time.sleep(0.01) for _ in range(6000)]",
        "import asyncio; print('rea' 'dy'); await asyncio.sleep(60)",
    ],
)
@pytest.mark.parametrize("form", ["%%ondevice cuda", "%%oomguard --retry 1"])
def test_ctrl_c_ends_the_cell_and_its_guard(terminal, form, body):
    """In a sleep, and in an await, where IPython drops the cell's coroutine."""
    for line in (form, body, "", ""):
        terminal.child.sendline(line)
    terminal.child.expect("ready\r\n")
    terminal.child.send(CTRL_C)
    assert "KeyboardInterrupt" in terminal.read()


def test_a_bad_option_is_one_line(terminal):
    """And the body does not run."""
    shown = terminal.type("%%ondevice --bad", "print('ra' 'n')")
    assert "UsageError: no option --bad" in shown
    assert "ran\n" not in shown


def test_in_the_line_editor_a_cell_ends_on_a_blank_line(tmp_path):
    """As any cell magic's; Enter after the magic's own line lets the user write the body."""
    child = spawn(tmp_path, TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1")
    try:
        child.expect("In ")
        for line in ("%%ondevice cuda", "x = 20", "print('sum', x + 1, modes())", "", ""):
            child.send(line + ENTER)
        child.expect(r"sum 21 \['ondevice cuda'\]")
        child.expect("<report of ondevice cuda>")
    finally:
        child.close(force=True)
