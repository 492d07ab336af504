"""`%%dryrun` in a real shell: the report, and with --run then the cell, if it fits."""

from __future__ import annotations

import re

import pytest

from gpumagic.dryrun.report import DryRunReport
from gpumagic.memory.presets import GPUS
from gpumagic.notebook.completion import complete, numbers
from gpumagic.options import PARSERS


@pytest.fixture
def run(bare_shell, two_devices, warm_worker):
    """Return a function that runs a cell under %%dryrun -o report, in a shell with a model on a device."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch\nmodel = torch.nn.Linear(100, 100).to('simgpu:0')\nran = 0")

    def run(options, cell):
        return bare_shell.run_cell(f"%%dryrun -o report {options}\n{cell}", store_history=True)

    yield run
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    bare_shell.reset(new_session=False)


CELL = "ran += 1\nx = torch.ones(1000, 100, device='simgpu:0')\ny = model(x)\nlen(y)"


def test_unloading_ends_the_worker(bare_shell, two_devices) -> None:
    from gpumagic.dryrun import client

    client.close()
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("%%dryrun\n1")
    assert client._workers
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    assert not client._workers


def test_the_cell_does_not_run_and_its_report_is_the_value(run, bare_shell, capsys) -> None:
    result = run("", CELL)
    assert isinstance(result.result, DryRunReport)
    assert bare_shell.user_ns["ran"] == 0
    assert bare_shell.user_ns["report"] is result.result is bare_shell.user_ns["_"]
    assert capsys.readouterr().err == ""


def test_lines_are_numbered_as_in_the_cell(run, bare_shell) -> None:
    assert {row.line: row.code for row in run("", CELL).result}[4] == "y = model(x)"
    nested = bare_shell.run_cell(f"\n%%time\n%%dryrun -o report\n\n{CELL}")
    assert nested.success
    assert {row.line: row.code for row in bare_shell.user_ns["report"]}[7] == "y = model(x)"


def test_run_shows_the_report_and_runs_a_cell_that_fits(run, bare_shell, shown) -> None:
    result = run("--run", CELL)
    assert result.result == 1000
    assert bare_shell.user_ns["ran"] == 1
    (text,) = shown()
    assert text.startswith("Fits: ")


def test_run_stops_run_all_at_a_cell_that_does_not_fit(run, bare_shell, shown, capsys) -> None:
    result = run("--run --capacity 22MiB", CELL.replace("1000", "100000"))
    assert not result.success
    assert bare_shell.user_ns["ran"] == 0
    assert bare_shell.user_ns["report"].fits is False
    (text,) = shown()
    assert text.startswith("Does not fit: needs 76.3 MiB, 54.3 MiB more than simgpu:0 has")
    said = capsys.readouterr().err
    assert said.startswith("UsageError: not run: does not fit: needs 76.3 MiB")
    assert said.count("\n") == 1


def test_an_error_of_a_cell_that_is_run_is_its_own(run, bare_shell) -> None:
    bare_shell.run_cell("names = []")
    result = run(
        "--run",
        "x = torch.ones(9, device='simgpu:0')\nnames.append(1) or open('/proc/self/comm').read()[99]",
    )
    assert isinstance(result.error_in_exec, Exception)
    assert type(result.error_in_exec).__name__ in {"IndexError", "UsageError"}


def test_fit_finds_the_largest_that_fits(run, bare_shell) -> None:
    report = run("--fit n --capacity 100MiB", "n = 1000\n" + CELL.replace("1000", "n", 1)).result
    assert report.search.name == "n"
    assert 125_829 * 0.98 < report.largest <= 125_829  # two segments of 48 MiB beside a small one
    peak = report.peak["simgpu:0"] / 2**20
    assert str(report).startswith(
        f"n up to {report.largest:,} fits: {peak:.1f} of 100.0 MiB on simgpu:0"
    )
    assert f"{report.search.smallest_failing.value:,} does not: line 5 runs out of memory." in str(
        report
    )


def test_a_gpu_that_is_not_here_has_its_own_memory(run) -> None:
    report = run("--gpu RTX 3090", "x = torch.ones(2**30, device='cuda')").result
    assert (report.device, report.gpu, report.fits) == ("cuda:0", "RTX 3090", True)
    assert str(report).startswith("Fits: 4.0 of 23.6 GiB on cuda:0 (RTX 3090)")
    assert run("--gpu rtx3090", "x = torch.ones(2**33, device='cuda')").result.fits is False


def test_of_an_amd_gpu_the_size_counts_and_nothing_is_certain(run) -> None:
    report = run("--gpu mi300x", "x = torch.ones(2**35, device='cuda')").result
    assert (report.gpu, report.fits, report.certain) == ("MI300X", True, False)
    assert any("ROCm" in sentence for sentence in report.unknown)
    assert set(report.unknown) <= set(report.notes)
    assert run("--gpu H200", "x = torch.ones(2**35, device='cuda')").result.certain


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "%%dryrun --capacity lots\n1",
            "%%dryrun: argument --capacity: 'lots' is not a size; write bytes or a unit: ",
        ),
        (
            "%%dryrun\n",
            "a dry run needs the whole cell: write %%dryrun on its first line, and code below it",
        ),
        (
            "x = 1\n%dryrun\ny = 1",
            "a dry run needs the whole cell: write %%dryrun on its first line, and ",
        ),
        ("%%dryrun\n\n1 +", "the code cannot be dry-run: invalid syntax in line 3"),
        (
            "%%dryrun --fit nothing\nn = 1",
            "--fit nothing: the cell has no int called nothing; it has n",
        ),
        ("%%dryrun --fit model\nmodel(1)", "--fit model: model is a Linear, not an int"),
        ("%%dryrun --gpu T5\n1", "'T5' is not a GPU that is known here; did you mean T4?"),
        ("%%dryrun --gpu 24GB\n1", "'24GB' is not a GPU that is known here; there are T4, "),
        ("%%dryrun --gpu list\n1", "there are "),
        ("%%dryrun --fti n\n1", "%%dryrun has no option '--fti'; did you mean --fit?"),
        ("%%oomguard --fit n\n1", "%%oomguard has no option '--fit'; it has --shrink"),
        ("%%oomguard --capacity=1GiB\n1", "%%oomguard has no option '--capacity'; it has --shrink"),
    ],
)
def test_a_wrong_line_is_one_sentence_and_nothing_runs(run, bare_shell, capsys, line, said) -> None:
    assert not bare_shell.run_cell(line).success
    error = capsys.readouterr().err
    assert error.startswith(f"UsageError: {said}")
    assert error.count("\n") == 1


def test_without_any_accelerator_the_error_says_what_to_type(
    run, bare_shell, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("gpumagic.memory.allocator.accelerators", list)
    assert not run("", "1").success
    assert capsys.readouterr().err == (
        "UsageError: there is no GPU here; name one, --gpu T4, or give a size, --capacity 16GiB\n"
    )
    assert run("--capacity 4GiB", "x = torch.ones(9, device='cuda')").result.fits


def test_completion_offers_ints_and_gpus(run, bare_shell) -> None:
    names = {"batch_size": 3, "model": "m", "flag": True, "_hidden": 1}
    offers = dict.fromkeys(["fit", "shrink"], lambda: numbers(names, "epochs = 3\nlr = 0.1"))
    assert complete("%%dryrun --fit ", offers) == ("", ["batch_size", "epochs"])
    assert complete("%%oomguard --shrink b", offers) == ("b", ["batch_size"])
    assert complete("%%dryrun --gpu RTX-309", offers) == ("RTX-309", ["RTX-3090", "RTX-3090-Ti"])
    assert len(complete("%%dryrun --gpu ", offers)[1]) == len(GPUS)
    assert "RTX-4090 or another: --gpu list" in PARSERS["dryrun"].format_help()
    assert complete("%%dryrun --", offers)[1] == [
        "--help",
        "--fit",
        "--capacity",
        "--gpu",
        "--ranks",
        "--run",
        "--out",
    ]


def test_a_cell_that_is_run_is_ipythons_own(run, bare_shell) -> None:
    """It may await, and its value is its last line's."""
    result = run(
        "--run",
        "import asyncio\nawait asyncio.sleep(0)\nx = torch.ones(9, device='simgpu:0')\nlen(x)",
    )
    assert result.result == 9
    assert bare_shell.user_ns["report"].fits
    assert bare_shell.run_cell("%%time\n%%dryrun --run\nran += 1").success
    assert bare_shell.user_ns["ran"] == 1


def test_help_needs_no_cell(run, bare_shell, capsys) -> None:
    assert bare_shell.run_cell("%%dryrun --help").success
    assert capsys.readouterr().out.startswith("usage: %%dryrun")
    assert not bare_shell.run_cell("%%dryrun").success
    assert "a dry run needs the whole cell" in capsys.readouterr().err


@pytest.mark.parametrize(
    "cell", ["%%time\ny = model(x)", "%%capture\n!true\n%time y = model(x)", "%time y = model(x)"]
)
def test_names_in_the_code_of_other_magics_are_those_of_the_notebook(run, bare_shell, cell) -> None:
    bare_shell.run_cell("x = torch.ones(1000, 100, device='simgpu:0')")
    report = run("", cell).result
    assert (report.error, report.fits) == (None, True)
    assert report.peak["simgpu:0"] >= 2 * 400_000


def test_ctrl_c_shows_no_line_from_inside_of_gpumagic(run, bare_shell, capsys, monkeypatch) -> None:
    from gpumagic.dryrun import client

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "ask", interrupted)
    assert isinstance(run("", CELL).error_in_exec, KeyboardInterrupt)
    shown = capsys.readouterr()
    assert "KeyboardInterrupt" in shown.out + shown.err
    assert set(re.findall(r"gpumagic/(\w+)", shown.out + shown.err)) <= {"magics"}
