"""`%devices --diff` and `--why` in a real shell: what they compare with, and what they say."""

from __future__ import annotations

import re
import weakref

import pytest
from IPython.core.error import UsageError

from gpumagic.report.base import to_text

pytestmark = pytest.mark.usefixtures("few_objects", "two_devices")
DEVICE = "simgpu:0"


@pytest.fixture
def run(bare_shell):
    """Return a function that runs a cell in a shell with the extension loaded, and returns its value."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch", store_history=True)

    def run_cell(source):
        return bare_shell.run_cell(source, store_history=True).result

    yield run_cell
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def changes(report):
    """Return (change, name) of each change of a named storage, largest first."""
    return [(row.change, row.name) for row in report if row.name]


def test_alone_in_its_cell_it_compares_with_the_last_look(run, bare_shell) -> None:
    run("old = torch.ones(100)")
    number = bare_shell.execution_count
    run("%devices ;")
    run("new = torch.ones(1000)")
    run("del old")
    report = run("%devices --diff")
    assert changes(report) == [("new", "new"), ("freed", "old")]
    assert report.since == f"%devices in cell {number}"


def test_a_cell_inside_the_cell_does_not_change_its_number(run, bare_shell) -> None:
    number = bare_shell.execution_count
    run("get_ipython().run_cell('1')\n%devices ;")
    assert run("%devices --diff").since == f"%devices in cell {number}"


@pytest.mark.parametrize(
    "look", ["%devices", "%devices --leaks", "%devices meta -n 1", "%devices --diff"]
)
def test_every_list_is_a_look_however_narrow(run, look) -> None:
    run(look)
    run("new = torch.ones(1000)")
    assert changes(run("%devices --diff")) == [("new", "new")]


def test_a_second_time_there_is_nothing_new(run) -> None:
    run("%devices ;\nnew = torch.ones(1000)")
    run("%devices --diff")
    report = run("%devices --diff")
    assert len(report) == 0
    assert str(report).startswith("No change since %devices in cell")


def test_asking_why_is_no_look(run) -> None:
    run("%devices ;")
    run("new = torch.ones(1000)")
    run("%devices --why new")
    assert changes(run("%devices --diff")) == [("new", "new")]


def test_a_first_diff_has_nothing_to_compare_with_and_is_where_the_next_begins(run) -> None:
    run("x = torch.ones(10)")
    first = run("%devices --diff")
    assert len(first) == 0
    assert "Nothing to compare with yet" in str(first)
    run("y = torch.ones(20)")
    assert changes(run("%devices --diff")) == [("new", "y")]


def test_a_look_keeps_nothing_alive(run, bare_shell) -> None:
    run("x = torch.ones(1241)")
    watch = weakref.ref(bare_shell.user_ns["x"])
    run("%devices ;")
    run("del x")
    assert watch() is None


def test_after_unloading_no_cell_is_looked_at(bare_shell) -> None:
    before = len(bare_shell.events.callbacks["pre_run_cell"])
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert len(bare_shell.events.callbacks["pre_run_cell"]) == before


def test_a_tensor_that_only_an_output_keeps_now_has_lost_its_name(run, bare_shell) -> None:
    number = bare_shell.execution_count
    run("x = torch.ones(1242)\nx")
    run("%devices ;")
    run("del x")
    (row,) = [row for row in run("%devices --diff") if row.shape == (1242,)]
    assert (row.change, row.name, row.holder) == ("unnamed", "x", f"Out[{number}]")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--diff --leaks", "not allowed with argument"),
        ("--why", "expected at least one argument"),
        ("--why nothing_like_it", "no live tensor is called 'nothing_like_it'"),
        ("--fre", "did you mean --free?"),
        ("--by size", "invalid choice"),
    ],
)
def test_a_line_that_cannot_be_followed_is_one_line(run, bare_shell, line, message) -> None:
    with pytest.raises(UsageError) as caught:
        bare_shell.run_line_magic("devices", line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_why_a_tensor_is_there_is_a_small_tree(run) -> None:
    run("cfg = {'k': [torch.ones(1243)]}\nalias = cfg['k']")
    lines = str(run("%devices --why cfg['k'][0]")).splitlines()
    assert lines[0] == "Kept by 2 holders. To free it: del alias[0]"
    assert lines[
        2:7
    ] == [  # in a process with many objects, a note that there may be more holders follows
        "alias   list",
        "└─ [0]  Tensor",
        "cfg        dict",
        "└─ ['k']   list",
        "   └─ [0]  Tensor",
    ]
    html = run("%devices --why cfg['k'][0]")._repr_html_()
    assert re.search(r"<li><code[^>]*>cfg</code>", html)
    assert "&#x27;k&#x27;" in html


def test_the_variable_that_grew_most_comes_first_with_its_graphs_and_what_helps(run) -> None:
    run("w = torch.ones(256, 256, requires_grad=True)\nlosses, other = [], torch.ones(10)")
    run("%devices ;")
    run("losses += [(w * w).exp().sum() for _ in range(3)]\nother = torch.ones(20)")
    report = run("%devices --diff")
    assert report.by_variable == {
        "losses": 3 * (256 * 256 * 4 + 4),
        "other": 40,
    }  # exp keeps its result; w has a name
    first, second, *_ = to_text(report, 100).splitlines()
    assert first == (
        "losses +768.0 KiB: 768.0 KiB of it in autograd graphs; collect loss.item() or .detach()"
    )
    assert " new, 1 freed since " in second
    run("del other")
    assert str(run("%devices --diff")).startswith("other -80 B")


# A name among devices and options


@pytest.mark.parametrize(
    "line",
    [
        "0 --why pair", "--why pair 0", "--why=pair simgpu:0", f"{DEVICE} --why pair -n 3", "-n 3 0 --why pair",
        '0 --why "pair[1]"', "simgpu --why pair[1]",
    ],
)  # fmt: skip
def test_a_device_beside_the_name_says_which_tensor_is_meant(run, line) -> None:
    run(f"pair = [torch.ones(1000), torch.ones(9, device={DEVICE!r})]")
    assert run(f"%devices {line}").tensor.names == ("pair[1]",)


def test_a_name_of_several_words_may_stand_beside_a_device(run) -> None:
    run(f"def fail():\n    hidden = torch.ones(999, device={DEVICE!r})\n    raise ValueError('no')")
    run("fail()")
    for line in ("--why last traceback", "0 --why last traceback", "--why last traceback 0"):
        assert run(f"%devices {line}").tensor.shape == (999,)


def test_a_tensor_that_is_elsewhere_is_said_to_be(run, capsys) -> None:
    run("there = torch.ones(9)")
    run("%devices 0 --why there")
    assert f"'there' is on cpu, not on {DEVICE}" in capsys.readouterr().err
