"""A cell under a guard is IPython's own cell; in a real shell in this process."""

from __future__ import annotations

import sys
import threading

import pytest

from tests import probe_magics

pytestmark = pytest.mark.usefixtures("few_objects")


def test_the_last_value_enters_out_and_underscore(shell):
    """As in the cell without the magic."""
    result = shell.run_cell("%%ondevice cuda\nx = 20\nx + 1", store_history=True)
    assert result.result == 21
    assert shell.user_ns["Out"][result.execution_count] == 21
    assert shell.run_cell("_").result == 21


def test_a_semicolon_hides_the_value(shell, capsys):
    """And keeps it out of Out."""
    result = shell.run_cell("%%ondevice cuda\n20 + 1;", store_history=True)
    assert result.execution_count not in shell.user_ns["Out"]
    assert "21" not in capsys.readouterr().out


def test_all_values_show_where_the_user_asked_for_all(shell, capsys):
    """`ast_node_interactivity` is IPython's business and stays so."""
    shell.ast_node_interactivity = "all"
    shell.run_cell("%%ondevice cuda\n'first'\n'second'")
    out = capsys.readouterr().out
    assert "first" in out
    assert "second" in out


def test_a_cell_is_one_entry_of_the_history_as_the_user_wrote_it(shell):
    """No generated code, no second entry."""
    cell = "%%ondevice cuda\nx = 1"
    before = shell.execution_count
    shell.run_cell(cell, store_history=True)
    assert shell.history_manager.input_hist_raw[1:] == [cell]
    assert len(shell.user_ns["In"]) == 2
    assert shell.execution_count == before + 1


def test_events_of_other_extensions_fire_once(shell):
    """Once before and once after, as for any cell."""
    fired = []
    callbacks = {
        "pre_execute": lambda: fired.append("pre_execute"),
        "pre_run_cell": lambda info: fired.append("pre_run_cell"),
        "post_execute": lambda: fired.append("post_execute"),
        "post_run_cell": lambda result: fired.append("post_run_cell"),
    }
    for event, callback in callbacks.items():
        shell.events.register(event, callback)
    shell.run_cell("%%ondevice cuda\n1")
    assert fired == ["pre_execute", "pre_run_cell", "post_execute", "post_run_cell"]


def test_the_guard_is_open_for_the_whole_body_and_not_after(shell, events, shown):
    """It opens before the first statement, closes after the last, then reports."""
    shell.run_cell("%%ondevice cuda\nfirst = modes()[:]\nlast = modes()[:]")
    assert shell.user_ns["first"] == shell.user_ns["last"] == ["ondevice cuda"]
    assert shell.run_cell("modes()").result == []
    assert events == ["open ondevice cuda", "close ondevice cuda NoneType", "finish ondevice cuda"]
    assert shown() == ["<report of ondevice cuda>"]


def test_the_line_form_acts_on_the_rest_of_its_cell(shell):
    """From its line on."""
    shell.run_cell("before = modes()[:]\n%ondevice cuda\nafter = modes()[:]")
    assert shell.user_ns["before"] == []
    assert shell.user_ns["after"] == ["ondevice cuda"]


def test_an_error_is_the_users_error(shell, events, shown):
    """It is handed to the guard, and the report still comes."""
    result = shell.run_cell("%%ondevice cuda\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert "close ondevice cuda ZeroDivisionError" in events
    assert shown() == ["<report of ondevice cuda>"]


def test_a_syntax_error_runs_nothing(shell, events, shown):
    """The guard is never opened."""
    result = shell.run_cell("%%ondevice cuda\nx = = 1")
    assert isinstance(result.error_before_exec, SyntaxError)
    assert result.error_before_exec.lineno == 2
    assert events == shown() == []


@pytest.mark.filterwarnings("ignore:To exit")
@pytest.mark.parametrize(
    "statement", ["raise SystemExit(3)", "raise KeyboardInterrupt", "raise BaseException('b')"]
)
def test_the_guard_is_closed_on_every_way_out(shell, events, statement):
    """Whatever is raised."""
    result = shell.run_cell(f"%%ondevice cuda\n{statement}")
    name = type(result.error_in_exec).__name__
    assert events == ["open ondevice cuda", f"close ondevice cuda {name}", "finish ondevice cuda"]


def test_ctrl_c_between_two_statements_is_how_the_cell_ended(shell, events, monkeypatch):
    """IPython compiles the second after the first has run, and takes what it raises then for an error before it ran."""
    flags, compiled = shell.compile.extra_flags, []

    def press_at_the_third(value):
        compiled.append(value)
        if len(compiled) == 3:
            raise KeyboardInterrupt
        return flags(value)

    monkeypatch.setattr(shell.compile, "extra_flags", press_at_the_third)
    assert not shell.run_cell("%%ondevice cuda\nx = 1\ny = 2").success
    assert "y" not in shell.user_ns
    assert events == [
        "open ondevice cuda",
        "close ondevice cuda KeyboardInterrupt",
        "finish ondevice cuda",
    ]


def test_await_works(shell):
    """In a shell that awaits by itself."""
    result = shell.run_cell("%%ondevice cuda\nimport asyncio\nawait asyncio.sleep(0)\nmodes()[:]")
    assert result.result == ["ondevice cuda"]


@pytest.fixture
def breaking_loop(shell):
    """Make Ctrl-C come in every await: a terminal's loop drops the cell's coroutine then."""
    dropped = []

    def runner(coroutine):
        coroutine.send(None)
        dropped.append(coroutine)
        raise KeyboardInterrupt

    shell.loop_runner_map["breaking"] = (runner, True)
    shell.loop_runner = "breaking"
    shell.run_cell("class Pause:\n    def __await__(self):\n        yield")
    yield
    for coroutine in dropped:
        coroutine.close()


@pytest.mark.usefixtures("breaking_loop")
def test_ctrl_c_that_breaks_the_event_loop_closes_the_guard(shell, events):
    """Though IPython makes up another result for the cell then."""
    shell.run_cell("%%ondevice cuda\nawait Pause()", store_history=True)
    assert events == [
        "open ondevice cuda",
        "close ondevice cuda KeyboardInterrupt",
        "finish ondevice cuda",
    ]


@pytest.mark.usefixtures("breaking_loop")
def test_ctrl_c_that_breaks_a_silent_cell_leaves_the_mode_no_longer_than_the_cell_around_it(
    shell, events, shown
):
    """No event tells of the silent one."""
    shell.run_cell("get_ipython().run_cell('%%ondevice cuda\\nawait Pause()', silent=True)")
    assert events == ["open ondevice cuda", "close ondevice cuda NoneType"]
    assert shown() == []


def test_the_guard_may_swallow_the_error(shell):
    """Then the cell counts as one that succeeded."""
    result = shell.run_cell("%%oomguard --swallow\n1 / 0")
    assert result.success
    assert shell.last_execution_succeeded


def test_the_guard_may_replace_the_error(shell):
    """Then the cell fails with the other one."""
    result = shell.run_cell("%%oomguard --replace\n1 / 0")
    assert type(result.error_in_exec).__name__ == "Cleaned"
    assert not shell.last_execution_succeeded


def test_a_guard_without_a_report_shows_nothing(shell, shown):
    """None is not displayed."""
    shell.run_cell("%%ondevice cuda --quiet\n1")
    assert shown() == []


def test_a_second_guard_of_a_name_replaces_the_first(shell, events, shown):
    """One mode at a time, one report."""
    result = shell.run_cell("%ondevice cuda:0\n%ondevice cuda:1\nmodes()[:]")
    assert result.result == ["ondevice cuda:1"]
    assert events[:3] == [
        "open ondevice cuda:0",
        "close ondevice cuda:0 NoneType",
        "open ondevice cuda:1",
    ]
    assert shown() == ["<report of ondevice cuda:1>"]


def test_guards_of_two_names_stand_inside_each_other(shell, events):
    """They close in reverse, so that the inner sees the state it was opened in."""
    result = shell.run_cell("%%ondevice cuda\n%%oomguard\nmodes()[:]")
    assert result.result == ["ondevice cuda", "oomguard"]
    assert [event for event in events if event.startswith("close")] == [
        "close oomguard NoneType",
        "close ondevice cuda NoneType",
    ]


def test_a_guard_that_cannot_open_fails_the_cell_before_its_body(shell, events, shown, capsys):
    """One line for the user, nothing left behind."""
    result = shell.run_cell("%%ondevice broken\nran = True")
    assert not result.success
    assert "ran" not in shell.user_ns
    assert "UsageError: no such device" in capsys.readouterr().err
    assert events == shown() == []


def test_one_guards_failure_to_close_does_not_keep_another_open(shell, events, monkeypatch):
    """IPython prints what the one raised; the other closes all the same."""
    from tests import probe_magics

    close = probe_magics.ProbeGuard.close

    def failing(self, error):
        close(self, error)
        if self.name == "oomguard":
            raise RuntimeError("cannot close")

    monkeypatch.setattr(probe_magics.ProbeGuard, "close", failing)
    shell.run_cell("%%ondevice cuda\n%%oomguard\n1")
    assert "close ondevice cuda NoneType" in events


def test_a_string_over_lines_and_tabs_are_untouched(shell):
    """No text is indented."""
    shell.run_cell("%%ondevice cuda\ns = '''a\nb\n\n\tc'''\nif True:\n\tt = 1")
    assert shell.user_ns["s"] == "a\nb\n\n\tc"
    assert shell.user_ns["t"] == 1


def test_future_imports_work_and_last(shell):
    """Though a line stands above them."""
    shell.run_cell("%%ondevice cuda\nfrom __future__ import annotations\ndef f(x: nonsense): pass")
    assert shell.user_ns["f"].__annotations__ == {"x": "nonsense"}
    shell.run_cell("def g(x: nonsense): pass")
    assert shell.user_ns["g"].__annotations__ == {"x": "nonsense"}


def test_the_source_of_a_function_can_be_had(shell):
    """inspect and debuggers find the user's lines."""
    shell.run_cell("%%ondevice cuda\ndef f():\n    return 1", store_history=True)
    source = shell.run_cell(
        "import inspect\ninspect.getsource(f), f.__code__.co_firstlineno"
    ).result
    assert source == ("def f():\n    return 1\n", 2)


@pytest.mark.parametrize("body", ["", "\n", "# nothing\n", "\n\n"])
def test_a_cell_without_statements_is_fine(shell, shown, body):
    """It reports on nothing."""
    assert shell.run_cell("%%ondevice cuda\n" + body).success
    assert shown() == ["<report of ondevice cuda>"]


@pytest.mark.parametrize("device", ["cuda:{index}", "cuda:$index"])
def test_variables_in_the_line_are_expanded(shell, shown, device):
    """By IPython itself."""
    shell.user_ns["index"] = 3
    shell.run_cell(f"%%ondevice {device}\n1")
    assert shown() == ["<report of ondevice cuda:3>"]


@pytest.mark.parametrize(
    "cell",
    [
        "%%ondevice cuda\n%%time\nmodes()[:]",
        "%%time\n%%ondevice cuda\nmodes()[:]",
        "%%ondevice cuda\n%time modes()[:]",
    ],
)
def test_time_nests_either_way(shell, shown, cell, capsys):
    """The value, the time and one report."""
    assert shell.run_cell(cell).result == ["ondevice cuda"]
    assert "Wall time" in capsys.readouterr().out
    assert shown() == ["<report of ondevice cuda>"]


def test_a_guard_over_capture_reports_outside_of_it(shell, shown):
    """What the body shows is captured, the report is shown."""
    shell.run_cell("%%ondevice cuda\n%%capture kept\ndisplay(modes()[:])\nprint('out')")
    kept = shell.user_ns["kept"]
    assert kept.stdout == "out\n"
    assert [output.data["text/plain"] for output in kept.outputs] == ["['ondevice cuda']"]
    assert shown() == ["<report of ondevice cuda>"]


def test_capture_over_a_guard_captures_the_report(shell, shown):
    """It is the inner cell's output."""
    shell.run_cell("%%capture kept\n%%ondevice cuda\nmodes()[:]")
    assert [output.data["text/plain"] for output in shell.user_ns["kept"].outputs][
        -1
    ] == "<report of ondevice cuda>"
    assert shown() == []


@pytest.mark.parametrize(
    "cell",
    [
        "%%ondevice cuda\n%%timeit -n 3 -r 2 -q\nrun()",
        "%%timeit -n 3 -r 2 -q\n%ondevice cuda\nrun()",
    ],
)
def test_timeit_nests_either_way(shell, shown, cell):
    """Every run has the mode, once, and there is one report."""
    seen = []
    shell.user_ns["run"] = lambda: seen.append(list(shell.user_ns["modes"]()))
    assert shell.run_cell(cell).success
    assert seen == [["ondevice cuda"]] * 6
    assert shown() == ["<report of ondevice cuda>"]


def test_a_nested_cell_does_not_end_the_outer_guard(shell, shown):
    """Nor an empty nested cell, after which IPython fires events of a cell that never began."""
    shell.run_cell(
        "%%ondevice cuda\n"
        "get_ipython().run_cell('inner = modes()[:]')\nget_ipython().run_cell('')\n"
        "get_ipython().run_cell('inner_silent = 1', silent=True)\nafter = modes()[:]"
    )
    assert shell.user_ns["inner"] == shell.user_ns["after"] == ["ondevice cuda"]
    assert shown() == ["<report of ondevice cuda>"]


def test_a_nested_cell_has_its_own_guard(shell, shown):
    """Which ends with the nested cell."""
    shell.run_cell(
        "%%ondevice outer\nget_ipython().run_cell('%%ondevice inner\\ninside = modes()[:]')\nafter = modes()[:]"
    )
    assert shell.user_ns["inside"] == ["ondevice outer", "ondevice inner"]
    assert shell.user_ns["after"] == ["ondevice outer"]
    assert shown() == ["<report of ondevice inner>", "<report of ondevice outer>"]


def test_the_line_form_after_a_nested_cell_belongs_to_the_outer_cell(shell, events):
    """IPython has forgotten by then which cell runs."""
    shell.run_cell("get_ipython().run_cell('1')\n%ondevice cuda\ninside = modes()[:]")
    assert shell.user_ns["inside"] == ["ondevice cuda"]
    assert events[-1] == "finish ondevice cuda"


def test_a_silent_cell_has_the_mode_and_no_report(shell, events, shown):
    """As in `%run notebook.ipynb`, where no event could show one; the guard is asked all the same."""
    shell.run_cell("%%ondevice cuda\ninside = modes()[:]", silent=True)
    assert shell.user_ns["inside"] == ["ondevice cuda"]
    assert events == ["open ondevice cuda", "close ondevice cuda NoneType", "finish ondevice cuda"]
    assert shown() == []


def test_a_silent_cell_that_fails_leaves_nothing_behind(shell, events):
    """The fixture checks the modes."""
    shell.run_cell("%%ondevice cuda\n1 / 0", silent=True)
    assert events[-2:] == ["close ondevice cuda ZeroDivisionError", "finish ondevice cuda"]


def test_loaded_in_the_very_cell_that_uses_it(bare_shell, shown):
    """The line form works at once."""
    bare_shell.run_cell("%load_ext tests.probe_magics\n%ondevice cuda\ninside = modes()[:]")
    assert bare_shell.user_ns["inside"] == ["ondevice cuda"]
    assert bare_shell.user_ns["modes"]() == []
    assert shown() == ["<report of ondevice cuda>"]


def test_unloaded_in_the_middle_of_a_cell(shell, events, shown):
    """What is open is closed at that moment."""
    shell.run_cell("%%ondevice cuda\n%unload_ext tests.probe_magics\nafter = modes()[:]")
    assert shell.user_ns["after"] == []
    assert events == ["open ondevice cuda", "close ondevice cuda NoneType"]
    assert shown() == []


def test_reloaded_in_the_middle_of_a_cell(shell, shown):
    """The next guard works, with one set of hooks."""
    shell.run_cell("%%ondevice a\n%reload_ext tests.probe_magics\n%ondevice b\ninside = modes()[:]")
    assert shell.user_ns["inside"] == ["ondevice b"]
    assert shell.user_ns["modes"]() == []
    assert shown() == ["<report of ondevice b>"]


def test_outside_of_a_cell_the_line_form_says_so(shell):
    """There is no rest of a cell to act on."""
    from IPython.core.error import UsageError

    with pytest.raises(
        UsageError, match=r"here is none; in a script write `with gpumagic\.ondevice"
    ):
        shell.run_line_magic("ondevice", "cuda")


def test_a_thread_of_the_cell_cannot_start_a_guard_of_it(shell, events):
    """A mode entered in a thread could not be left in the cell's."""
    shell.run_cell(
        "import threading\nsaid = []\n"
        "def work():\n    try:\n        get_ipython().run_line_magic('ondevice', 'cuda')\n"
        "    except Exception as error:\n        said.append(str(error))\n"
        "thread = threading.Thread(target=work)\nthread.start()\nthread.join()"
    )
    assert "here is none" in shell.user_ns["said"][0]
    assert events == []


def test_a_cell_in_another_thread_does_not_end_ours(shell, events):
    """Subshells run cells in threads of the same shell; whichever ends first."""
    inside, outer_done = threading.Event(), threading.Event()
    shell.user_ns.update(inside=inside, outer_done=outer_done)
    sub = "%%ondevice sub\ninside.set()\nouter_done.wait(30)\nsub_modes = modes()[:]"
    thread = threading.Thread(target=shell.run_cell, args=(sub,))
    shell.user_ns["thread"] = thread
    shell.run_cell("%%ondevice main\nthread.start()\ninside.wait(30)\nmain_modes = modes()[:]")
    assert "close ondevice main NoneType" in events
    assert "close ondevice sub NoneType" not in events
    outer_done.set()
    thread.join(30)
    assert shell.user_ns["main_modes"] == ["ondevice main"]
    assert shell.user_ns["sub_modes"] == ["ondevice sub"]
    assert events[-2:] == ["close ondevice sub NoneType", "finish ondevice sub"]


def test_a_cell_that_starts_in_another_thread_as_ours_ends_does_not_cost_our_report(shell, events):
    """What has ended in one thread is no business of another's."""

    def run_elsewhere() -> None:
        shell.events.unregister("post_execute", run_elsewhere)
        thread = threading.Thread(
            target=shell.run_cell, args=("1",), kwargs={"store_history": True}
        )
        thread.start()
        thread.join(30)

    shell.events.register("post_execute", run_elsewhere)
    shell.run_cell("%%ondevice main\n1")
    assert events == ["open ondevice main", "close ondevice main NoneType", "finish ondevice main"]


def test_nothing_keeps_the_error_alive(shell):
    """A guard that frees what a traceback pins must not find it pinned by us."""
    import gc
    import weakref

    shell.run_cell(
        "class Big: pass\ndef work():\n    big = Big()\n    refs.append(weakref.ref(big))\n    1 / 0"
    )
    refs = []
    shell.user_ns.update(refs=refs, weakref=weakref)
    result = shell.run_cell("%%ondevice cuda\nwork()")
    result.error_in_exec.__traceback__ = None
    result.error_in_exec = None
    for name in ("last_traceback", "last_value", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.InteractiveTB.tb = None
    gc.collect()
    assert refs[0]() is None


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    "cell", ["%%ondevice cuda\n1 / 0", "%ondevice a\n%ondevice b", "%%oomguard --retry 1\n1"]
)
def test_no_guard_outlives_its_cell(shell, cell, silent):
    """It may hold what the user wants freed."""
    import gc

    from tests import probe_magics

    shell.run_cell(cell, silent=silent)
    sys.last_traceback = sys.last_value = sys.last_exc = None  # of an earlier test
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, probe_magics.ProbeGuard)]


def test_an_interrupt_before_a_guard_opens_costs_the_next_cell_nothing(shell, events, monkeypatch):
    """What has never been open is neither closed nor restored."""
    from gpumagic.notebook import cells

    add = cells.CellSessions._add

    def torn(self, *args, **kwargs):
        add(self, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cells.CellSessions, "_add", torn)
        patch.setattr(probe_magics.ProbeGuard, "restore", lambda self: 1 / 0)
        assert isinstance(shell.run_cell("%%ondevice a\n1").error_in_exec, KeyboardInterrupt)
        patch.undo()
        patch.setattr(probe_magics.ProbeGuard, "restore", lambda self: 1 / 0)
        assert shell.run_cell("%%ondevice b\n1").success
    assert [each for each in events if "ondevice a" in each and not each.startswith("finish")] == []
    assert "close ondevice b NoneType" in events


def test_a_cell_whose_end_had_no_event_is_over_when_the_next_one_starts(shell, events, monkeypatch):
    """As where Ctrl-C comes between the cell and its events; a cell that runs another one is not over."""
    trigger = shell.events.trigger

    def torn(event, *args):
        if event in {"post_execute", "post_run_cell"}:
            raise KeyboardInterrupt
        trigger(event, *args)

    with monkeypatch.context() as patch:
        patch.setattr(shell.events, "trigger", torn)
        with pytest.raises(KeyboardInterrupt):
            shell.run_cell("%%ondevice a\n1", store_history=True)
        patch.undo()
        patch.setattr(probe_magics.ProbeGuard, "restore", lambda guard: guard.close(None))
        shell.run_cell("1", store_history=True)
    assert events == ["open ondevice a", "close ondevice a NoneType"]
    inner = "get_ipython().run_cell('2', store_history=True)"
    shell.run_cell(f"%%ondevice b\n{inner}\n3", store_history=True)
    assert events[2:] == ["open ondevice b", "close ondevice b NoneType", "finish ondevice b"]
