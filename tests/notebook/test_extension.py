"""Loading adds what it says, and unloading takes all of it back; in real shells."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types

import pytest

from gpumagic import extension
from gpumagic.errors import SimgpuUnavailable
from gpumagic.notebook.cells import PromoteCellMagics
from tests.kernels import environment

NAMES = {"gpuinfo", "devices", "ondevice", "oomguard"}


def state(shell):
    """Return all of a shell that an extension could leave something in."""
    completer = getattr(shell.Completer, "custom_matchers", [])
    dispatch = shell.strdispatchers["complete_command"]
    return {
        "magics": {kind: dict(table) for kind, table in shell.magics_manager.magics.items()},
        "registry": dict(shell.magics_manager.registry),
        "transformers": list(shell.input_transformers_cleanup),
        "others": list(shell.input_transformers_post) + list(shell.ast_transformers),
        "events": {event: list(calls) for event, calls in shell.events.callbacks.items()},
        "matchers": list(completer),
        "hooks": (set(dispatch.strs), set(dispatch.regexs)),
        "configurables": list(shell.configurables),
        "meta": dict(shell.meta),
        "names": set(shell.user_ns),
        "hidden": set(shell.user_ns_hidden),
    }


def test_unloading_is_the_exact_inverse_of_loading(bare_shell):
    """Nothing is left in any table, list or name space."""
    bare_shell.run_line_magic(
        "load_ext", "tests.probe_magics"
    )  # IPython 9 fills in its own lazy magics at their first use
    bare_shell.run_line_magic("unload_ext", "tests.probe_magics")
    before = state(bare_shell)
    bare_shell.run_line_magic("load_ext", "gpumagic")
    assert state(bare_shell) != before
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert state(bare_shell) == before


def test_loading_adds_the_four_magics(bare_shell):
    """Two of them for cells too, and no name in the user's name space."""
    names = set(bare_shell.user_ns)
    bare_shell.run_line_magic("load_ext", "gpumagic")
    assert set(bare_shell.magics_manager.magics["line"]) >= NAMES
    assert set(bare_shell.magics_manager.magics["cell"]) >= {"ondevice", "oomguard"}
    assert set(bare_shell.user_ns) == names


def test_loading_twice_is_loading_once(bare_shell):
    """Also where the hook is called by hand."""
    extension.load(bare_shell)
    once = state(bare_shell)
    extension.load(bare_shell)
    assert state(bare_shell) == once
    extension.unload(bare_shell)
    extension.unload(bare_shell)


def test_reloading_leaves_one_of_everything(bare_shell, shown):
    """A cell reports once afterwards."""
    bare_shell.run_line_magic("load_ext", "tests.probe_magics")
    counts = {event: len(calls) for event, calls in bare_shell.events.callbacks.items()}
    for _ in range(3):
        bare_shell.run_line_magic("reload_ext", "tests.probe_magics")
    assert {event: len(calls) for event, calls in bare_shell.events.callbacks.items()} == counts
    bare_shell.run_cell("%%ondevice cuda\n1")
    assert shown() == ["<report of ondevice cuda>"]


def test_a_magic_of_the_users_that_had_the_name_comes_back(bare_shell):
    """And one that took the name later stays."""

    def theirs(line):
        return "theirs"

    def later(line):
        return "later"

    bare_shell.register_magic_function(theirs, "line", "devices")
    bare_shell.run_line_magic("load_ext", "gpumagic")
    assert bare_shell.find_line_magic("devices") is not theirs
    bare_shell.register_magic_function(later, "line", "gpuinfo")
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert bare_shell.find_line_magic("devices") is theirs
    assert bare_shell.find_line_magic("gpuinfo") is later


def test_after_unloading_the_magics_are_gone(bare_shell, capsys):
    """IPython says so, as of any unknown magic."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert not bare_shell.run_cell("%%ondevice cpu\nran = True").success
    assert "`%%ondevice` not found" in capsys.readouterr().err
    assert "ran" not in bare_shell.user_ns


def test_two_shells_do_not_share_anything(bare_shell):
    """What one unloads the other keeps."""
    from IPython.core.interactiveshell import InteractiveShell

    other = InteractiveShell(config=bare_shell.config)
    extension.load(bare_shell)
    extension.load(other)
    extension.unload(bare_shell)
    assert other.find_line_magic("gpuinfo") is not None
    assert bare_shell.find_line_magic("gpuinfo") is None


def test_a_simulated_gpu_that_cannot_be_had_is_one_warning(bare_shell, monkeypatch, capsys):
    """Loading goes on."""

    def unavailable():
        raise SimgpuUnavailable("no compiler here; install one")

    fake = types.ModuleType("gpumagic.simgpu")
    fake.enable_from_environment = unavailable
    monkeypatch.setitem(sys.modules, "gpumagic.simgpu", fake)
    monkeypatch.setattr("gpumagic.simgpu", fake, raising=False)
    monkeypatch.setenv("GPUMAGIC_SIMGPU", "2x1GiB")
    extension.load(bare_shell)
    assert capsys.readouterr().err == "gpumagic: no compiler here; install one\n"
    assert bare_shell.find_line_magic("gpuinfo") is not None


def test_an_interrupt_while_the_simulated_gpu_is_compiled_leaves_nothing_loaded(
    bare_shell, monkeypatch
):
    """IPython takes the extension for not loaded, and so must we."""
    from gpumagic import simgpu

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("GPUMAGIC_SIMGPU", "1")
    monkeypatch.setattr(simgpu, "enable_from_environment", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bare_shell.extension_manager.load_extension("gpumagic")
    assert extension._KEY not in bare_shell.meta
    assert "gpuinfo" not in bare_shell.magics_manager.magics["line"]


def test_an_interrupted_magic_shows_no_line_of_ours(bare_shell, monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpumagic.tensors.scan.scan", interrupted)
    extension.load(bare_shell)
    bare_shell.run_cell("%devices")
    shown = capsys.readouterr()
    assert "KeyboardInterrupt" in shown.out + shown.err
    assert "magics.py" not in shown.out + shown.err


@pytest.mark.parametrize("used", ["", "get_ipython().run_cell('%%ondevice --help\\n1')"])
def test_loading_imports_nothing_heavy(start_kernel, used):
    """Neither torch nor pandas, nor the driver's library, in a process that had none of them."""
    kernel = start_kernel()
    heavy = "sorted({'torch', 'pandas', 'pynvml', 'numpy', 'matplotlib'} & set(sys.modules))"
    kernel.run("import sys\n%load_ext gpumagic\n" + used)
    assert kernel.value(heavy) == "[]"


def test_a_cell_may_load_and_use_it_at_once(start_kernel):
    """The line form, which IPython looks up when its line is reached."""
    cell = start_kernel().run("%load_ext gpumagic\n%ondevice --help\n1 + 1")
    assert cell.value == "2"
    assert "usage: %%ondevice" in cell.stdout


@pytest.mark.parametrize(
    "first", ["%%ondevice cpu\n40 + 2", "%ondevice cpu\n40 + 2", "%%oomguard\n40 + 2"]
)
def test_a_lazy_magic_loads_the_extension_when_it_is_first_used(bare_shell, first):
    """And its cell runs, although nothing has prepared it."""
    bare_shell.magics_manager.lazy_magics = dict.fromkeys(NAMES, "gpumagic")
    assert not NAMES & set(bare_shell.magics_manager.magics["line"])
    assert bare_shell.run_cell(first).result == 42
    assert bare_shell.run_cell("%%ondevice cpu\n41 + 2").result == 43
    assert set(bare_shell.magics_manager.magics["line"]) >= NAMES


def test_a_profile_can_load_it_always(tmp_path):
    profile = tmp_path / "profile_default"
    profile.mkdir()
    (profile / "ipython_config.py").write_text(
        'get_config().InteractiveShellApp.extensions = ["gpumagic"]\n'
    )
    code = "print(get_ipython().find_magic('devices'))"
    command = [sys.executable, "-m", "IPython", "--quiet", "-c", code]
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert "GPUMagic" in done.stdout, done.stderr


PARTS = (
    "extension.py",
    "cells.py",
    "completion.py",
    "notebook/__init__.py",
    "live.py",
    "_compat/__init__.py",
)


class Interrupt:
    """Raises KeyboardInterrupt at one line of what loads and unloads."""

    def __init__(self, line):
        self.left, self.where = line, ""

    def trace(self, frame, event, _):
        file = frame.f_code.co_filename
        if self.where or "gpumagic" not in file or not file.endswith(PARTS):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                self.where = f"{file}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace


@pytest.mark.parametrize(
    ("command", "run"),
    [
        ("load_ext", "run_line_magic"),
        ("unload_ext", "run_line_magic"),
        ("reload_ext", "run_line_magic"),
        pytest.param("reload_ext", "run_cell", marks=pytest.mark.deep),
    ],
)
def test_an_interrupted_load_or_unload_is_finished_by_the_next(
    bare_shell, two_devices, command, run
):
    """Ctrl-C at any line of it leaves nothing twice, and nothing for good."""
    for probe in ("load_ext", "unload_ext"):
        bare_shell.run_line_magic(probe, "tests.probe_magics")
    before = state(bare_shell)
    tried, was = 0, sys.gettrace()
    for line in itertools.count():
        if command != "load_ext":
            bare_shell.run_line_magic("load_ext", "gpumagic")
            bare_shell.run_cell("%gpuinfo --each-cell on")
            bare_shell.run_cell("%oomguard on")
        interrupt = Interrupt(line)
        sys.settrace(interrupt.trace)
        try:
            if run == "run_cell":
                bare_shell.run_cell(f"%{command} gpumagic")
            else:
                bare_shell.run_line_magic(command, "gpumagic")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(was)
        tried += bool(interrupt.where)
        extension.load(bare_shell)
        for calls in state(bare_shell)["events"].values():
            names = [each.__qualname__ for each in calls]
            assert len(set(names)) == len(names), interrupt.where
        assert (
            sum(
                isinstance(each, PromoteCellMagics)
                for each in bare_shell.input_transformers_cleanup
            )
            == 1
        )
        extension.unload(bare_shell)
        bare_shell.extension_manager.loaded.discard("gpumagic")
        assert state(bare_shell) == before, interrupt.where
        if not interrupt.where:
            break
    assert tried > 30
