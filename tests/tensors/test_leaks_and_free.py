"""`%devices --leaks` and `--free` in a real shell: exactly what the session keeps goes, to the byte."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import sysconfig
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpumagic
from tests.stages import examples

pytestmark = pytest.mark.usefixtures("few_objects")

DEVICE = "simgpu:0"


@pytest.fixture
def run(bare_shell, two_devices):
    """Return a function that runs a cell in a shell with the extension loaded, and returns its value."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch", store_history=True)
    gc.collect()

    def run_cell(source):
        return bare_shell.run_cell(source, store_history=True).result

    yield run_cell
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    bare_shell.run_line_magic("reset", "-f")
    bare_shell.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


def held_by(report, elements):
    """Return (holder, command) of the storages that a one-dimensional tensor of so many elements fills."""
    return [(row.holder, row.frees) for row in report if row.shape == (elements,)]


def freed(report):
    """Return the bytes that came back on the first simulated device."""
    return {row.device: row.freed for row in report}[DEVICE]


def test_a_displayed_and_deleted_tensor_is_released_to_the_byte(run, bare_shell) -> None:
    before = torch.simgpu.memory_allocated(0)
    number = bare_shell.execution_count
    run(f"x = torch.ones(1_000_000, device={DEVICE!r})\nx")
    run("del x")
    held = run("%devices --leaks")
    assert held_by(held, 1_000_000) == [(f"Out[{number}]", "%devices --free")]
    report = run("%devices --free")
    assert freed(report) == 4_000_256
    assert torch.simgpu.memory_allocated(0) == before
    assert f"Out[{number}]" in report.released


@pytest.mark.parametrize("later", [[], ["1 + 1"], ["%devices --why nothing"]])
def test_a_local_of_a_failed_cell_is_released_to_the_byte(run, later) -> None:
    """Also after a cell that worked, and after a usage error, which leaves only the formatter's traceback."""
    before = torch.simgpu.memory_allocated(0)
    run(
        f"def step():\n    hidden = torch.ones(1_000_000, device={DEVICE!r})\n    raise ValueError('no')"
    )
    run("step()")
    for source in later:
        run(source)
    assert held_by(run("%devices --leaks"), 1_000_000) == [("last traceback", "%devices --free")]
    assert freed(run("%devices --free")) == 4_000_256
    assert torch.simgpu.memory_allocated(0) == before


def test_a_graph_that_only_an_output_keeps_is_released_to_the_byte(run) -> None:
    """Also where the output itself looks into a storage that a variable names."""
    run(f"w = torch.ones(1001, device={DEVICE!r}, requires_grad=True)\nloss = w.exp().sum()\nloss")
    run("loss = loss.detach()")
    before = torch.simgpu.memory_allocated(0)
    assert held_by(run("%devices --leaks"), 1001)[0][1] == "%devices --free"
    assert freed(run("%devices --free")) == before - torch.simgpu.memory_allocated(0) == 4096


@contextlib.contextmanager
def no_collection():
    """Have no collection take, some time between two reports, what the first one has told of."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def library(monkeypatch):
    """Return a module as if it was installed."""
    module = types.ModuleType("some_library")
    module.__file__ = f"{sysconfig.get_path('purelib')}/some_library.py"
    monkeypatch.setitem(sys.modules, "some_library", module)
    return module


@pytest.mark.parametrize("shown", ["[x]", "step(x)"])
def test_what_an_installed_module_keeps_too_is_not_promised(run, library, shown) -> None:
    """Whether an output, a list in one or the last error is the other holder."""
    run(f"def step(hidden):\n    raise ValueError('no')\nx = torch.ones(1014, device={DEVICE!r})")
    library.cache = {"k": [run("x")]}
    run(shown)
    run("del x")
    report = run("%devices --leaks")
    assert held_by(report, 1014) == [("module some_library", None)]
    (number,) = [row.numbers[0] for row in report if row.shape == (1014,)]
    assert "module some_library.cache['k'][0]" in [
        way.expression for way in run(f"%devices --why {number}")
    ]
    assert sum(row.freed for row in run("%devices --free")) == 0
    vars(library).clear()


def test_what_a_reset_of_the_outputs_leaves_is_released_too(run) -> None:
    """IPython 7 forgets the output, yet leaves a copy in its hidden namespace (ipython#10082)."""
    before = torch.simgpu.memory_allocated(0)
    run(f"torch.ones(1020, device={DEVICE!r})")
    run("%reset -f out")
    run("%devices --free")
    assert torch.simgpu.memory_allocated(0) == before


STEPS = {
    "make": "{x} = torch.ones({n}, device='simgpu:{d}')",
    "show": "{x} = torch.ones({n}, device='simgpu:{d}'); {x}",
    "show alone": "torch.ones({n}, device='simgpu:{d}')",
    "show in a list": "[torch.ones({n}, device='simgpu:{d}'), globals().get('{x}')]",
    "del": "globals().pop('{x}', None);",
    "alias": "{x} = globals().get('a')",
    "underscore": "_ = torch.ones({n}, device='simgpu:{d}')",
    "fail": "def step():\n    hidden = torch.ones({n}, device='simgpu:{d}')\n    1 / 0\nstep()",
    "fail with one of ours": "def step(given):\n    1 / 0\nstep(globals().get('{x}'))",
    "mistype": "%devices --why nothing",
}


@settings(examples(few=2, deep=8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from("abc"), st.integers(1, 4000), st.integers(0, 1)),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_whatever_a_session_did_what_is_promised_goes_and_nothing_else(
    run, bare_shell, steps
) -> None:
    """On two devices, to the byte; and no variable changes."""
    with no_collection():
        for step, name, elements, device in steps:
            run(STEPS[step].format(x=name, n=elements, d=device))
        promised = [row for row in run("%devices --leaks") if row.frees == "%devices --free"]
        others = {row.numbers for row in run("%devices") if not row.releasable}
        mine = {
            name: id(value)
            for name, value in bare_shell.user_ns.items()
            if not name.startswith("_")
        }
        report = run("freed = %devices --free\nfreed")
        left = run("%devices")
    assert {row.numbers[0] for row in promised}.isdisjoint(
        number for row in left for number in row.numbers
    )
    assert others <= {row.numbers for row in left}
    for device in ("simgpu:0", "simgpu:1"):
        freed = sum(row.freed for row in report if row.device == device)
        assert freed == sum(row.nbytes for row in promised if row.device == device)
    mine["freed"] = id(bare_shell.user_ns["freed"])
    assert {
        name: id(value) for name, value in bare_shell.user_ns.items() if not name.startswith("_")
    } == mine
    for name in ("a", "b", "c", "_"):
        bare_shell.user_ns.pop(name, None)


def test_an_argument_of_the_error_and_the_locals_of_its_cause_are_released(run) -> None:
    before = torch.simgpu.memory_allocated(0)
    run(
        f"def inner():\n    deep = torch.ones(1001, device={DEVICE!r})\n"
        f"    raise KeyError(torch.ones(1002, device={DEVICE!r}))"
    )
    run("try:\n    inner()\nexcept KeyError as error:\n    raise ValueError('no') from error")
    run("%devices --free")
    assert torch.simgpu.memory_allocated(0) == before


def test_a_local_that_holds_its_own_error_is_released(run) -> None:
    before = torch.simgpu.memory_allocated(0)
    run(
        f"def step():\n    hidden = torch.ones(1003, device={DEVICE!r})\n    try:\n        1/0\n"
        "    except ZeroDivisionError as error:\n        kept = error\n    raise ValueError(kept)"
    )
    run("step()")
    run("%devices --free")
    assert torch.simgpu.memory_allocated(0) == before


def test_nothing_of_the_user_s_changes(run, bare_shell) -> None:
    """Neither variables, an underscore of the user's own, nor outputs without such tensors."""
    number = bare_shell.execution_count
    run(f"torch.ones(1004, device={DEVICE!r})")
    run("'a text'")
    run(f"x = torch.ones(1005, device={DEVICE!r})\nx")
    run("_ = 'mine'")
    names = {
        name: value
        for name, value in bare_shell.user_ns.items()
        if name not in {"_", "__", "___", f"_{number}"}
    }
    assert run("%devices --free").released == (f"Out[{number}]",)
    assert bare_shell.user_ns["_"] == "mine"
    assert {number + 1, number + 2} <= set(bare_shell.user_ns["Out"])
    assert number not in bare_shell.user_ns["Out"]
    assert all(
        bare_shell.user_ns[name] is value
        for name, value in names.items()
        if not name.startswith("_i")
    )
    run("2 + 2")
    assert bare_shell.user_ns["_"] == "mine", "IPython has to go on respecting it"


def test_the_underscore_goes_on_working(run, bare_shell) -> None:
    run(f"torch.ones(1006, device={DEVICE!r})")
    run("%devices --free;")
    assert bare_shell.user_ns["_"] == ""
    run("40 + 2")
    assert run("_ + 1") == 43
    assert run("__") == 42


def test_an_output_that_only_leads_to_a_named_tensor_stays(run, bare_shell) -> None:
    run(f"x = torch.ones(1007, device={DEVICE!r})")
    number = bare_shell.execution_count
    run("{'k': x}")
    run("def step(hidden):\n    raise ValueError('no')")
    run("step(x)")
    report = run("%devices --free")
    assert report.released == ()
    assert "Nothing to free" in str(report)
    assert number in bare_shell.user_ns["Out"]
    assert sys.last_traceback is not None


def test_an_error_that_a_variable_leads_to_stays_whole(run, bare_shell) -> None:
    run(
        f"def step():\n    hidden = torch.ones(1008, device={DEVICE!r})\n    raise ValueError('no')"
    )
    run("step()")
    run("import sys; mine = [sys.last_value]")
    run("%devices --free")
    frame = bare_shell.user_ns["mine"][0].__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    assert frame.tb_frame.f_locals["hidden"].shape == (1008,)


def test_what_is_in_a_cycle_goes_too(run) -> None:
    before = torch.simgpu.memory_allocated(0)
    with no_collection():
        run(f"cycle = [torch.ones(1009, device={DEVICE!r})]\ncycle.append(cycle)\ndel cycle")
        assert held_by(run("%devices --leaks"), 1009) == [("cycle of list", "%devices --free")]
        report = run("%devices --free")
    assert report.released == ("cycle of list",)
    assert torch.simgpu.memory_allocated(0) == before


def test_a_cpu_tensor_counts_by_its_size_since_there_is_no_allocator_to_ask(run) -> None:
    run("torch.ones(1_000_003)")
    report = run("%devices --free")
    assert [(row.freed, row.allocated_before) for row in report if row.device == "cpu"] == [
        (4_000_012, None)
    ]


def test_the_functions_do_the_same_as_the_magics(run, bare_shell) -> None:
    number = bare_shell.execution_count
    run(f"torch.ones(1011, device={DEVICE!r})")
    run("import gpumagic")
    assert held_by(run("gpumagic.devices().leaks()"), 1011)[0][0] == f"Out[{number}]"
    assert run(f"gpumagic.why('Out[{number}]')").tensor.shape == (1011,)
    assert freed(run("gpumagic.free_leaks()")) == 4096


def test_a_script_has_only_python_s_own_last_error_to_forget() -> None:
    assert gpumagic.free_leaks().released in ((), ("last traceback",))


def test_the_report_is_plain_data_with_stable_columns(run) -> None:
    run(f"torch.ones(1012, device={DEVICE!r})")
    held = run("%devices --leaks").to_pandas()
    assert {"device", "nbytes", "shape", "holder", "frees", "numbers"} <= set(held)
    frame = run("%devices --free").to_pandas()
    assert list(frame) == ["device", "freed", "storages", "allocated_before", "allocated_after"]


def test_held_in_both_forms_says_what_frees_it(run) -> None:
    run(f"torch.ones(1013, device={DEVICE!r})")
    bundle = run("%devices --leaks")._repr_mimebundle_()
    assert "%devices --free frees" in bundle["text/plain"]
    assert "%devices --free frees" in bundle["text/html"]
    run("%devices --free")
    gc.collect()
    assert str(run(f"%devices {DEVICE} --leaks")).startswith("No leaks")


def test_what_an_earlier_failure_keeps_too_goes_with_it(run) -> None:
    """The frames and the error of a failed cell are garbage in a ring once another cell has failed."""
    before = torch.simgpu.memory_allocated(0)
    with no_collection():
        run(f"def step(given):\n    1 / 0\nx = torch.ones(1021, device={DEVICE!r})\nstep(x)")
        run("1 / 0")
        run("[x]")
        run("del x")
        ((holder, command),) = held_by(run("%devices --leaks"), 1021)
        assert (re.sub(r"\d+", "", holder), command) == ("Out[]", "%devices --free")
        assert freed(run("%devices --free")) == 4096
    assert torch.simgpu.memory_allocated(0) == before


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("name", ["salt and pepper.py", "a; b.py"])
def test_a_script_may_be_called_what_joins_holders_and_statements(
    run, tmp_path, name, shown
) -> None:
    """Neither " and " nor "; " in its path hides the line that frees what its variables keep, or cuts it in two."""
    script = tmp_path / name
    script.write_text(f"import torch\nkept = torch.ones(1022, device={DEVICE!r})\n")
    before = torch.simgpu.memory_allocated(0)
    run(f'%run "{script}"')
    if shown:
        run("kept")
    run("del kept")
    deletion = f"del get_ipython()._main_mod_cache[{str(script)!r}].kept"
    lines = [deletion, "%devices --free"] if shown else [deletion]
    report = run("%devices --leaks")
    assert [command for _, command in held_by(report, 1022)] == ["\n".join(lines)]
    sentence = f"{' and then '.join(lines)} frees 4.0 KiB"
    # A long path is broken where the line ends
    assert sentence.replace(" ", "") in "".join(str(report).split())
    for line in lines:
        run(line)
    assert torch.simgpu.memory_allocated(0) == before


def test_what_only_another_device_has_is_not_freed(run) -> None:
    run("x = torch.ones(5000)\nx")
    run(f"y = torch.ones(6000, device={DEVICE!r})\ny")
    run("del x, y")
    assert freed(run("%devices 0 --free")) == 24_064
    assert held_by(run("%devices --leaks"), 6000) == []
    assert [frees for _, frees in held_by(run("%devices --leaks"), 5000)] == ["%devices --free"]
