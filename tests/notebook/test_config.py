"""`%config GPUMagic` sets what a magic does where its line does not say."""

from __future__ import annotations

import pytest


@pytest.fixture
def loaded(bare_shell, two_devices):
    """Return a shell with the extension loaded and a tensor of 1,000,000 bytes."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch; x = torch.ones(250_000, device='simgpu:0')")
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def run(shell, cell):
    result = shell.run_cell(cell)
    assert result.success, result.error_in_exec
    return result.result


def test_it_is_listed_with_a_sentence_for_each(loaded, capsys) -> None:
    loaded.run_line_magic("config", "GPUMagic")
    said = capsys.readouterr().out
    assert all(f"GPUMagic.{name}" in said for name in ("device", "keep_going", "engine_timeout"))


def test_ondevice_without_a_device_takes_the_configured_one(loaded) -> None:
    run(loaded, "%config GPUMagic.device = 'simgpu:1'")
    run(loaded, "%%ondevice\ny = torch.ones(3)")
    assert str(loaded.user_ns["y"].device) == "simgpu:1"


def test_a_device_on_the_line_wins(loaded) -> None:
    run(loaded, "%config GPUMagic.device = 'simgpu:1'")
    run(loaded, "%%ondevice 0\ny = torch.ones(3)")
    assert str(loaded.user_ns["y"].device) == "simgpu:0"


def test_a_device_that_is_none_is_refused_with_what_was_meant(loaded, caplog) -> None:
    loaded.run_cell("%config GPUMagic.device = 'cuad:1'")
    assert "'cuad:1' is not a device; did you mean cuda?" in caplog.text
    assert not loaded.run_cell("%ondevice").success
    run(loaded, "%config GPUMagic.device = 'cuda:{rank}'")  # of an engine


def test_an_option_that_is_none_is_told_with_the_nearest(loaded) -> None:
    with pytest.warns(UserWarning, match="`devise` not recognized by `GPUMagic`.  Did you mean `device`"):
        loaded.run_cell("%config GPUMagic.devise = 'cpu'")


def test_keep_going_lets_run_all_go_on(loaded) -> None:
    fails = "%%oomguard\nz = torch.empty(5 * 2**30, dtype=torch.uint8, device='simgpu:0')"
    assert not loaded.run_cell(fails).success
    run(loaded, "%config GPUMagic.keep_going = True")
    run(loaded, fails)
