"""`%%oomguard --rehearse` in a real shell: the report first, then the cell, if it fits."""

from __future__ import annotations

import re

import pytest

from gpumagic.dryrun.report import DryRunReport


@pytest.fixture
def run(bare_shell, two_devices, warm_worker):
    """Return a function that runs a cell under %%oomguard -o report, in a shell with a model on a device."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch\nmodel = torch.nn.Linear(100, 100).to('simgpu:0')\nran = 0")

    def run(options, cell):
        return bare_shell.run_cell(f"%%oomguard -o report {options}\n{cell}", store_history=True)

    yield run
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    bare_shell.reset(new_session=False)


CELL = "ran += 1\nx = torch.ones(1000, 100, device='simgpu:0')\ny = model(x)\nlen(y)"


def test_unloading_ends_the_worker(bare_shell, two_devices) -> None:
    from gpumagic.dryrun import client

    client.close()
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("%%oomguard --rehearse-only\n1")
    assert client.warm() is not None
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert client.warm() is None


def test_a_cell_that_fits_is_reported_and_run(run, bare_shell, shown) -> None:
    result = run("--rehearse", CELL)
    assert result.result == 1000
    assert bare_shell.user_ns["ran"] == 1
    (text,) = shown()
    assert text.startswith("Fits · ")
    assert "4 | y = model(x)" in text


def test_a_cell_that_does_not_fit_is_not_run_and_stops_run_all(run, bare_shell, shown, capsys) -> None:
    result = run("--rehearse --capacity 22MiB", CELL.replace("1000", "100000"))
    assert not result.success
    assert bare_shell.user_ns["ran"] == 0
    assert bare_shell.user_ns["report"].fits is False
    assert "UsageError: not run: the cell does not fit" in capsys.readouterr().err
    assert shown()[0].startswith("Does not fit")


def test_rehearse_only_never_runs_it(run, bare_shell) -> None:
    result = run("--rehearse-only", CELL)
    assert isinstance(result.result, DryRunReport)
    assert bare_shell.user_ns["ran"] == 0
    assert bare_shell.user_ns["report"] is result.result


def test_rehearse_only_finds_the_largest_that_fits(run, bare_shell) -> None:
    report = run("--rehearse-only --fit n --capacity 100MiB", "n = 1000\n" + CELL.replace("1000", "n", 1)).result
    assert report.largest.name == "n"
    assert 125_829 * 0.98 < report.largest.largest <= 125_829  # two segments of 48 MiB beside a small one
    assert f"n = {report.largest.largest} is the largest that fits" in str(report)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("%%oomguard --capacity 16GiB\n1", "add --rehearse"),
        ("%%oomguard --rehearse --capacity lots\n1", "is not a size"),
        ("%oomguard --rehearse\n1", "first line"),
        ("%%oomguard --rehearse\n1 +", "cannot be dry-run"),
        ("%%oomguard --rehearse-only --fit nothing\n1", "the cell has no int called nothing"),
    ],
)
def test_a_wrong_line_is_one_sentence(run, bare_shell, capsys, line, word) -> None:
    assert not bare_shell.run_cell(line).success
    assert word in capsys.readouterr().err


def test_after_out_of_memory_the_advice_says_what_was_rehearsed(run, bare_shell) -> None:
    one = "torch.empty(batch_size, 1 << 18, device='simgpu:0')"
    run("", f"batch_size = 3000\nx = {one}\ndel x\ny = {one}\nz = {one}")
    advice = next(each for each in bare_shell.user_ns["report"].advice if "batch_size" in each.title)
    assert advice.title == "Lower batch_size from 3000 to 1472"
    assert re.fullmatch(r"rehearsed: batch_size=14\d\d fits, .* GiB of 4.0 GiB", advice.evidence)
    assert advice.covers
    assert not advice.estimated
