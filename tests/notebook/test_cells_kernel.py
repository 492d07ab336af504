"""What only a real kernel and its front end show: replies, order, Run All, Ctrl-C, await."""

from __future__ import annotations

import pytest

# Many short sleeps: a signal that comes just before a long one begins is only heard when that ends, in either cell.
PRESS = "import time\nprint('ready', flush=True)\nfor _ in range(6000): time.sleep(0.01)"
PRESS_AWAITING = (
    "import asyncio\nprint('ready', flush=True)\nfor _ in range(600): await asyncio.sleep(0.1)"
)
REPORT = "<report of ondevice cuda>"


def test_the_value_comes_before_the_report(kernel):
    """As the output of the cell, with its number."""
    cell = kernel.run("%%ondevice cuda\nprint('printed')\nx = 20\nx + 1")
    assert cell.seen == [
        ("stdout", "printed\n"),
        ("execute_result", "21"),
        ("display_data", REPORT),
    ]
    assert kernel.value(f"Out[{cell.count}], _") == "(21, 21)"


def test_the_value_of_a_body_that_the_magic_runs_comes_before_the_report(kernel):
    """As if IPython had run it."""
    cell = kernel.run("%%oomguard --retry 1\n20 + 1")
    assert cell.seen == [
        ("execute_result", "21"),
        ("display_data", "<report of oomguard --retry 1>"),
    ]


def test_a_semicolon_hides_the_value(kernel):
    """Only the report is left."""
    assert kernel.run("%%ondevice cuda\n1;").seen == [("display_data", REPORT)]


def test_a_figure_comes_before_the_report(kernel):
    """matplotlib's inline figures are flushed by an event after the cell, ours comes later still."""
    kernel.run(
        "def flush():\n    display('figure')\nget_ipython().events.register('post_execute', flush)",
        silent=True,
    )
    cell = kernel.run("%%ondevice cuda\n1")
    kernel.run("get_ipython().events.unregister('post_execute', flush)", silent=True)
    assert cell.reports == ["'figure'", REPORT]


def test_await_works_in_the_notebooks_event_loop(kernel):
    """Before and after it, the mode is there."""
    cell = kernel.run(
        "%%ondevice cuda\nimport asyncio\na = modes()[:]\nawait asyncio.sleep(0)\na, modes()[:]"
    )
    assert cell.value == "(['ondevice cuda'], ['ondevice cuda'])"
    assert cell.reports == [REPORT]


def test_await_then_an_error(kernel):
    """The user's traceback, then the report."""
    cell = kernel.run("%%ondevice cuda\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0")
    assert (cell.status, cell.ename) == ("error", "ZeroDivisionError")
    assert [kind for kind, _ in cell.seen] == ["error", "display_data"]


def test_await_is_refused_where_the_magic_runs_the_body(kernel):
    """In one line; nothing has run."""
    cell = kernel.run("%%oomguard --retry 1\nran = True\nimport asyncio\nawait asyncio.sleep(0)")
    assert (cell.status, cell.ename) == ("error", "UsageError")
    assert cell.stderr.count("\n") == 1
    assert kernel.value("'ran' in globals()") == "False"


def test_the_traceback_is_shown_once_and_names_the_users_line(kernel):
    """And the file that a debugger knows the cell by."""
    cell = kernel.run("%%ondevice cuda\nx = 1\n\n1 / 0")
    (shown,) = cell.tracebacks
    assert "4 1 / 0" in shown.replace("1/", "1 /") or "4 1/0" in shown
    assert shown.count("ZeroDivisionError: division by zero") == 1
    assert "gpumagic" not in shown


@pytest.mark.parametrize("form", ["%%ondevice cuda", "%%oomguard --retry 1"])
def test_a_function_of_the_cell_has_the_file_a_debugger_knows(kernel, form):
    """Breakpoints work in it."""
    cell = f"{form}\ndef f():\n    pass"
    kernel.run(cell)
    kernel.run("import ipykernel.compiler as compiler")
    assert kernel.value(f"f.__code__.co_filename == compiler.get_file_name({cell!r})") == "True"


@pytest.mark.parametrize("form", ["%%ondevice cuda", "%%oomguard --retry 0"])
@pytest.mark.parametrize(
    "failure", ["1 / 0", "x = = 1", "raise KeyboardInterrupt", "import sys; sys.exit(3)"]
)
def test_run_all_stops_at_a_cell_that_fails(kernel, form, failure):
    """Whatever it fails with, and however its body is run."""
    first, second = kernel.run_all(f"{form}\n{failure}", "after = 1")
    assert first.status == "error"
    assert second.status == "aborted"


@pytest.mark.parametrize("body", [PRESS, PRESS_AWAITING])
def test_ctrl_c_stops_the_cell_and_run_all(kernel, body):
    """A real SIGINT, in a sleep and in an await."""
    first, second = kernel.interrupt("%%ondevice cuda\n" + body, "after = 1")
    assert first.status == "error"
    assert first.ename in {"KeyboardInterrupt", "CancelledError"}
    assert second.status == "aborted"
    assert first.reports == [REPORT]
    assert kernel.value("modes()") == "[]"


def test_ctrl_c_stops_a_body_that_the_magic_runs(kernel):
    """And it is not tried again."""
    first, second = kernel.interrupt("%%oomguard --retry 2\n" + PRESS, "after = 1")
    assert (first.ename, second.status) == ("KeyboardInterrupt", "aborted")
    assert kernel.value("modes()") == "[]"


def test_a_replaced_error_is_what_the_cell_fails_with(kernel):
    """The user's traceback stays on the screen; the reply names the guard's error."""
    first, second = kernel.run_all("%%oomguard --replace\n1 / 0", "after = 1")
    assert (first.status, first.ename, first.evalue) == ("error", "Cleaned", "in one line")
    assert "ZeroDivisionError" in first.tracebacks[0]
    assert second.status == "aborted"


def test_a_swallowed_error_lets_run_all_go_on(kernel):
    """As `--keep-going` asks."""
    first, second = kernel.run_all("%%oomguard --swallow\n1 / 0", "'went on'")
    assert first.status == "ok"
    assert second.value == "'went on'"


def test_a_usage_error_is_one_line_and_stops_run_all(kernel):
    """Without a traceback, and without running the body."""
    first, second = kernel.run_all("%%ondevice --bad\nran_bad = True", "after = 1")
    assert (first.status, first.ename, second.status) == ("error", "UsageError", "aborted")
    assert first.stderr == "UsageError: no option --bad\n"
    assert first.tracebacks == []
    assert kernel.value("'ran_bad' in globals()") == "False"


def test_each_cell_is_one_execution(kernel):
    """The numbers of the cells follow each other."""
    first, second = kernel.run_all("%%ondevice cuda\n1", "%%oomguard --retry 1\n2")
    assert second.count == first.count + 1
    assert kernel.value("len(In) - 1") == str(second.count + 1)


def test_a_silent_request_leaves_no_mode_and_shows_nothing(kernel):
    """Front ends send such for their own purposes."""
    assert kernel.run("%%ondevice cuda\nsilently = modes()[:]", silent=True).seen == []
    assert kernel.value("silently, modes()") == "(['ondevice cuda'], [])"


def test_a_comm_message_during_an_await_does_not_end_the_guard(kernel):
    """Widgets fire the same events while a cell waits."""
    cell = kernel.run(
        "%%ondevice cuda\nimport asyncio\nip = get_ipython()\n"
        "def widget():\n    ip.events.trigger('pre_execute')\n    ip.events.trigger('post_execute')\n"
        "asyncio.get_running_loop().call_soon(widget)\nawait asyncio.sleep(0.05)\nmodes()[:]"
    )
    assert cell.value == "['ondevice cuda']"


@pytest.mark.parametrize("typed", ["%%ondevice?", "%ondevice?"])
def test_help_opens_the_pager(kernel, typed):
    """With the magic's documentation."""
    cell = kernel.run(typed)
    assert "Run the cell on a device." in cell.payload[0]["data"]["text/plain"]


@pytest.mark.parametrize(
    ("typed", "status"),
    [
        ("%%ondevice cuda", "incomplete"), ("%%ondevice cuda\nx = 1", "incomplete"),
        ("%%ondevice cuda\nx = 1\n\n", "complete"), ("%ondevice cuda", "complete"),
    ],
)  # fmt: skip
def test_a_console_waits_for_the_body(kernel, typed, status):
    """It asks the kernel whether a cell is complete."""
    assert kernel.ask("is_complete", typed)["status"] == status


@pytest.mark.parametrize("first", ["main", "sub"])
def test_subshells_do_not_mix(kernel, first):
    """A cell in a subshell runs in its own thread with its own guard, whichever of the two ends first."""
    subshell = kernel.open_subshell()
    if subshell is None:
        pytest.skip("this ipykernel has no subshells")
    kernel.run("import threading\nopened = threading.Event()")
    second = "sub" if first == "main" else "main"
    bodies = {
        first: "opened.wait(30)\n",
        second: f"import time\nwhile 'finish ondevice {first}' not in events: time.sleep(0.01)\n",
    }
    sent = [
        kernel.client.execute(
            f"%%ondevice main\nprint('ready', flush=True)\n{bodies['main']}modes()[:]"
        )
    ]
    code = f"%%ondevice sub\nopened.set()\n{bodies['sub']}modes()[:]"
    cells = kernel.collect(sent, on_ready=lambda: sent.append(kernel.send_to(subshell, code)))
    assert [cell.value for cell in cells] == ["['ondevice main']", "['ondevice sub']"]
    assert [cell.reports for cell in cells] == [
        ["<report of ondevice main>"],
        ["<report of ondevice sub>"],
    ]
