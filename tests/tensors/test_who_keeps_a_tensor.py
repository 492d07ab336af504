"""`%devices` in a real shell and a real kernel: who keeps a tensor, and what the line can ask for."""

from __future__ import annotations

import gc
import weakref

import pytest
from IPython.core.error import UsageError

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture
def run(bare_shell):
    """Return a function that runs a cell in a shell with the extension loaded, and returns its value."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch", store_history=True)

    def run_cell(source):
        outcome = bare_shell.run_cell(source, store_history=True)
        return outcome.result

    yield run_cell
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    bare_shell.run_line_magic("reset", "-f")


def held(report, elements):
    """Return (name, holder) of the storages that a one-dimensional tensor of so many elements fills."""
    return [(row.name, row.holder) for row in report if row.shape == (elements,)]


def test_a_variable_is_named_and_ipython_s_copies_of_it_are_not(run) -> None:
    run("x = torch.ones(1231)")
    run("x")
    assert held(run("%devices"), 1231) == [("x", None)]


def test_a_displayed_value_that_was_deleted_is_held_by_its_output(run, bare_shell) -> None:
    run("x = torch.ones(1232)")
    count = bare_shell.execution_count
    run("x")
    run("del x")
    assert held(run("%devices"), 1232) == [(None, f"Out[{count}]")]
    for _ in range(4):  # by now it is in none of _, __ and ___
        run("0")
    assert held(run("%devices"), 1232) == [(None, f"Out[{count}]")]
    run("%reset -f out")
    # IPython 7 forgets the output, yet leaves a copy in its hidden namespace (ipython#10082).
    left = {holder for _, holder in held(run("%devices"), 1232)}
    assert left <= {f"_{count}"}


def test_a_value_inside_an_output_is_held_by_it(run, bare_shell) -> None:
    count = bare_shell.execution_count
    run("{'k': [torch.ones(1233)]}")
    assert held(run("%devices"), 1233) == [(None, f"Out[{count}]")]


def test_a_local_of_a_failed_cell_is_held_by_the_last_traceback(run) -> None:
    run("def step():\n    hidden = torch.ones(1234)\n    raise ValueError('no')")
    run("step()")
    assert held(run("%devices"), 1234) == [(None, "last traceback")]
    run("1 + 1")
    assert held(run("%devices"), 1234) == [(None, "last traceback")]


def test_an_argument_of_the_error_and_the_locals_of_its_cause_are_found_too(run) -> None:
    run("def inner():\n    deep = torch.ones(1235)\n    raise KeyError(torch.ones(1236))")
    run("try:\n    inner()\nexcept KeyError as error:\n    raise ValueError('no') from error")
    report = run("%devices")
    assert held(report, 1235) == [(None, "last traceback")]
    assert held(report, 1236) == [(None, "last traceback")]


def test_a_name_wins_over_what_else_holds_the_tensor(run) -> None:
    run("kept = torch.ones(1237)")
    run("def step(hidden):\n    raise ValueError('no')")
    run("step(kept)")
    run("kept")
    assert held(run("%devices"), 1237) == [("kept", None)]


def test_looking_at_a_failure_adds_nothing_that_keeps_it(run, bare_shell) -> None:
    run(
        "def step():\n    hidden = torch.ones(1238)\n    globals()['hidden_too'] = hidden\n    raise ValueError('no')"
    )
    run("step()")
    watch = weakref.ref(bare_shell.user_ns.pop("hidden_too"))
    assert held(run("%devices"), 1238) == [(None, "last traceback")]
    run(
        "import sys\nfor name in ('last_traceback', 'last_value', 'last_exc'):\n    vars(sys).pop(name, None)"
    )
    run("get_ipython().InteractiveTB.tb = None")
    run("0")
    gc.collect()
    assert watch() is None


def test_an_underscore_of_the_user_is_a_name(run) -> None:
    run("_, index = torch.ones(1239), 0")
    assert held(run("report = %devices\nreport"), 1239) == [("_", None)]


def test_the_shell_is_no_way_to_a_tensor_though_a_variable_leads_to_it(run, bare_shell) -> None:
    run("ip = get_ipython()")
    count = bare_shell.execution_count
    run("torch.ones(1240)")
    assert held(run("%devices"), 1240) == [(None, f"Out[{count}]")]


def test_two_reports_in_a_row_are_equal_but_for_what_the_session_changed(run) -> None:
    run("model = torch.nn.Linear(8, 8)\nmodel(torch.ones(2, 8)).sum().backward()")
    run("first = %devices")
    run("second = %devices")
    assert run("first.to_dict() == second.to_dict()") is True


def test_rows_and_totals_are_as_asked(run) -> None:
    run("a, b = torch.ones(5000), torch.ones(10)")
    assert run("%devices -n 1").limit == 1
    assert str(run("%devices --by kind")).splitlines()[1].startswith("Kind")
    assert {row.device for row in run("%devices cpu")} == {"cpu"}
    assert {row.device for row in run("%devices meta")} <= {"meta"}


def test_a_device_that_is_not_there_is_a_usage_error(bare_shell, run) -> None:
    with pytest.raises(UsageError):
        bare_shell.run_line_magic("devices", "cuda:9")


def test_the_report_shows_itself_in_both_forms(run) -> None:
    run("weights = torch.ones(300, 300)")
    bundle = run("%devices")._repr_mimebundle_()
    assert "weights" in bundle["text/plain"]
    assert "<table" in bundle["text/html"]


def test_a_kernel_shows_the_table_as_the_cell_s_value(start_kernel) -> None:
    kernel = start_kernel()
    kernel.run("%load_ext gpumagic\nimport torch\nweights = torch.ones(300, 300)")
    cell = kernel.run("%devices")
    assert cell.tracebacks == []
    assert "weights" in cell.value
    kernel.run("def step():\n    hidden = torch.ones(400, 400)\n    raise ValueError('no')")
    kernel.run("step()")
    assert "(last traceback)" in kernel.run("%devices").value
