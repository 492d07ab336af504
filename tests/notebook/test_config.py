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
    assert all(
        f"GPUMagic.{name}" in said for name in ("keep_going", "advice_seconds", "engine_timeout")
    )


def test_an_option_that_is_none_is_told_with_the_nearest(loaded) -> None:
    with pytest.warns(
        UserWarning, match="`keep_goin` not recognized by `GPUMagic`.  Did you mean `keep_going`"
    ):
        loaded.run_cell("%config GPUMagic.keep_goin = True")


def test_keep_going_lets_run_all_go_on(loaded) -> None:
    fails = "%%oomguard\nz = torch.empty(5 * 2**30, dtype=torch.uint8, device='simgpu:0')"
    assert not loaded.run_cell(fails).success
    run(loaded, "%config GPUMagic.keep_going = True")
    run(loaded, fails)
