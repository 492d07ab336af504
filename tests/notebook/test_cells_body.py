"""The body of a cell magic that the magic runs itself: retries, exported scripts, calls by hand."""

from __future__ import annotations

import gc
import traceback
import weakref

import pytest
from IPython.core.error import UsageError

RETRY = "%%oomguard --retry 2\n"


def lines_of(error):
    """Return the line numbers of the frames of user code, the innermost last."""
    return [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name == "<module>"
    ]


def test_the_last_value_is_the_cells_value(shell, events):
    """And enters Out and _."""
    assert shell.run_cell(RETRY + "x = 20\nx + 1", store_history=True).result == 21
    assert shell.run_cell("_").result == 21
    assert events == [
        "open oomguard --retry 2",
        "close oomguard --retry 2 NoneType",
        "finish oomguard --retry 2",
    ]


def test_a_semicolon_hides_the_value(shell):
    """On IPython 7.34 too, which asks only whether the whole cell ends in one."""
    result = shell.run_cell(RETRY + "20 + 1;  # hidden", store_history=True)
    assert result.result is None
    assert result.execution_count not in shell.user_ns["Out"]


def test_the_report_comes_at_the_end_of_its_cell(shell, shown):
    """Not before the value, which IPython shows when the magic has returned."""
    at_the_end = []
    shell.events.register("post_execute", lambda: at_the_end.append(shown()))
    shell.run_cell(RETRY + "1")
    assert at_the_end == [[]]
    assert shown() == ["<report of oomguard --retry 2>"]


def test_the_error_is_the_users_error_on_the_users_line(shell, shown):
    """Though the magic's line is not part of the body."""
    error = shell.run_cell(RETRY.replace("2", "0") + "\n\nx = 1\n1 / 0").error_in_exec
    assert isinstance(error, ZeroDivisionError)
    assert lines_of(error)[-1] == 5
    assert shown() == ["<report of oomguard --retry 0>"]


@pytest.mark.parametrize("above", ["%%time\n", "%%ondevice cuda\n", "%%ondevice cuda\n\n%%time\n"])
def test_the_line_is_right_under_other_magics_too(shell, above):
    """Counted from the top of the cell."""
    cell = above + "%%oomguard --retry 0\nx = 1\nimport sys\nline = sys._getframe().f_lineno"
    shell.run_cell(cell)
    assert shell.user_ns["line"] == len(cell.splitlines())


def test_the_traceback_shows_the_users_source(shell, capsys):
    """Once."""
    shell.run_cell(RETRY.replace("2", "0") + "x = 1\nundefined_name")
    shown = capsys.readouterr().out
    assert shown.count("Traceback (most recent call last)") == 1
    assert "3 undefined_name" in shown


def test_a_syntax_error_runs_nothing(shell, events):
    """The guard is not opened, and the line is the cell's."""
    error = shell.run_cell(RETRY + "x = 1\ny = = 2").error_in_exec
    assert isinstance(error, SyntaxError)
    assert error.lineno == 3
    assert events == []


def test_a_failing_body_runs_again_until_it_succeeds(shell, events):
    """Opened and closed each time, and finished once."""
    result = shell.run_cell(
        RETRY + "tries = globals().get('tries', 0) + 1\nassert tries == 3\n'done'"
    )
    assert result.result == "done"
    assert [event.split()[0] for event in events] == [
        "open", "close", "retry", "open", "close", "retry", "open", "close", "finish",
    ]  # fmt: skip


def test_a_body_that_never_succeeds_fails_with_its_last_error(shell, events):
    """After the number of retries asked for."""
    result = shell.run_cell(
        RETRY + "tries = globals().get('tries', 0) + 1\nraise ValueError(tries)"
    )
    assert str(result.error_in_exec) == "3"
    assert [event for event in events if event.startswith("retry")] == ["retry ValueError"] * 2


def test_a_failed_try_keeps_nothing_alive_in_the_next(shell):
    """Else the memory that ran out would be short again."""
    refs = []
    shell.user_ns.update(refs=refs, weakref=weakref)
    shell.run_cell(
        "class Big: pass\ndef work():\n    big = Big()\n    refs.append(weakref.ref(big))\n    1 / 0"
    )
    gc.disable()
    try:
        shell.run_cell(RETRY + "alive = [ref() for ref in refs]\nwork() if not alive else None")
    finally:
        gc.enable()
    assert shell.user_ns["alive"] == [None]


def test_the_guard_may_replace_or_swallow_the_error(shell):
    """As it may for a cell that IPython runs."""
    replaced = shell.run_cell("%%oomguard --retry 0 --replace\n1 / 0").error_in_exec
    assert type(replaced).__name__ == "Cleaned"
    assert shell.run_cell("%%oomguard --retry 0 --swallow\n1 / 0").success


def test_future_imports_work(shell):
    """And last, as those of any cell do."""
    shell.run_cell(RETRY + "from __future__ import annotations\ndef f(x: nonsense): pass")
    assert shell.user_ns["f"].__annotations__ == {"x": "nonsense"}


def test_magics_strings_and_tabs_of_the_body_work(shell):
    """It is transformed as a cell is."""
    shell.run_cell(RETRY + "here = %pwd\ns = '''a\nb\n\n\tc'''\nif s:\n\tt = 1")
    assert shell.user_ns["here"]
    assert shell.user_ns["s"] == "a\nb\n\n\tc"
    assert shell.user_ns["t"] == 1


@pytest.mark.parametrize("body", ["# nothing\n", "\n\n"])
def test_a_body_without_statements_is_fine(shell, shown, body):
    """It has no value."""
    assert shell.run_cell(RETRY + body).success
    assert shown() == ["<report of oomguard --retry 2>"]


def test_the_source_of_a_function_can_be_had(shell):
    """The body is cached under a file name, as a cell is."""
    source = shell.run_cell(
        RETRY + "import inspect\ndef f():\n    return 1\ninspect.getsource(f)"
    ).result
    assert source == "def f():\n    return 1\n"


def test_await_works_where_no_event_loop_runs(shell):
    """As in a terminal and in a script."""
    body = "import asyncio\nawait asyncio.sleep(0)\nx = 20\nawait asyncio.sleep(0, x + 1)"
    assert shell.run_cell_magic("ondevice", "cuda", body) == 21


def test_await_inside_an_event_loop_is_refused_before_anything_runs(shell, events, capsys):
    """The loop is busy with this very cell."""
    shell.run_cell(
        "import asyncio\nasync def inside():\n"
        "    get_ipython().run_cell_magic('ondevice', 'cuda', 'ran = True\\nawait asyncio.sleep(0)')\n"
        "await inside()"
    )
    assert "UsageError: a body that the magic itself runs cannot await" in capsys.readouterr().err
    assert "ran" not in shell.user_ns
    assert events == []


def test_a_script_without_a_running_cell_sees_its_report_at_once(shell, shown):
    """There is no end of a cell to wait for."""
    assert shell.run_cell_magic("ondevice", "cuda", "x = 1\nmodes()[:]") == ["ondevice cuda"]
    assert shown() == ["<report of ondevice cuda>"]


def test_the_lines_of_a_call_count_from_the_magic(shell):
    """As if its line stood above the body, blank lines included."""
    assert shell.run_cell_magic("ondevice", "cuda", "\n\nimport sys\nsys._getframe().f_lineno") == 5


def test_each_of_several_calls_in_a_cell_shows_its_report_at_once(shell, shown):
    """As in a script run by `%run`, where the reports belong between its prints."""
    shell.run_cell(
        "for device in 'ab':\n    get_ipython().run_cell_magic('ondevice', device, '1')\nseen = 1"
    )
    assert shown() == ["<report of ondevice a>", "<report of ondevice b>"]


def test_timeit_over_a_body_that_is_run_shows_one_report(shell, shown):
    """That of the last run."""
    shell.run_cell("%%timeit -n 2 -r 2 -q\n%%oomguard --retry 1\n1")
    assert shown() == ["<report of oomguard --retry 1>"]


@pytest.mark.parametrize(
    "cell", [RETRY + "1", "x = get_ipython().run_cell_magic('ondevice', 'cuda', '1')"]
)
def test_a_silent_cell_shows_nothing(shell, shown, cell):
    """`%run notebook.ipynb` shows no reports."""
    shell.run_cell(cell, silent=True)
    assert shown() == []
    shell.run_cell("1")
    assert shown() == []


def test_help_does_not_run_the_body(shell, capsys, events):
    """It is printed instead."""
    assert shell.run_cell("%%ondevice --help\nran = True").success
    assert "help of ondevice" in capsys.readouterr().out
    assert "ran" not in shell.user_ns
    assert shell.run_cell("%%ondevice --help").success
    assert events == []


def test_a_bad_option_does_not_run_the_body(shell, events):
    """Whichever form it comes in."""
    for cell in ("%%oomguard --bad\nran = True", "%%oomguard --bad --retry 1\nran = True"):
        assert isinstance(shell.run_cell(cell).error_in_exec, UsageError)
    assert "ran" not in shell.user_ns
    assert events == []
