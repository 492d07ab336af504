"""A cell magic above or below `%%ondevice` costs no lines, names or advice; rows show what the user typed."""

from __future__ import annotations

from typing import Any

import IPython
import pytest

from gpumagic.source import frames
from gpumagic.transfers.report import TransferReport

pytestmark = pytest.mark.usefixtures("two_devices")
BODY = "for _ in range(5):\n    y = x.to('simgpu:0')\nz = y.sum().item()"


@pytest.fixture
def shell(bare_shell: Any) -> Any:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch\nx = torch.ones(1000)")
    return bare_shell


def report_of(shell: Any, cell: str) -> TransferReport:
    result = shell.run_cell(cell)
    assert result.success
    report = shell.user_ns["r"]
    assert isinstance(report, TransferReport)
    return report


MAGICS = ("%%time", "%%prun -q", "%%capture out", "%%time\n%%capture out")


@pytest.mark.parametrize(
    ("magic", "is_below"),
    [*((each, below) for each in MAGICS for below in (True, False)), ("%%timeit -n1 -r1", True)],
)
def test_lines_names_and_advice_are_those_of_the_cell_whichever_magic_is_above(
    shell: Any, magic: str, is_below: bool
) -> None:
    ours = "%%ondevice simgpu:0 -q -o r"
    report = report_of(shell, "\n".join([ours, magic, BODY] if is_below else [magic, ours, BODY]))
    first = magic.count("\n") + 3
    assert [(row.line, row.name, row.count) for row in report] == [
        (first + 1, "x", 5),
        (first + 2, None, 1),
    ]
    assert report[0].code == "y = x.to('simgpu:0')"
    assert report.advice[0].change == "move x before the loop"
    assert report.syncs == {first + 1: 5, first + 2: 1}


def test_a_traced_cell_under_time_has_its_own_lines(shell: Any) -> None:
    report = report_of(shell, f"%%ondevice simgpu:0 -q -o r --trace\n%%time\n{BODY}")
    assert [(row.line, row.hits) for row in report.by_line][-3:] == [(3, 6), (4, 5), (5, 1)]


@pytest.mark.skipif(IPython.version_info < (8,), reason="its %%time shows an error and raises none")
@pytest.mark.parametrize(
    "cell", ["%%ondevice simgpu:0 -q -o r\n%%time", "%%time\n%%ondevice simgpu:0 -q -o r"]
)
def test_an_error_about_devices_in_a_timed_cell_has_the_line_of_the_cell(
    shell: Any, cell: str
) -> None:
    result = shell.run_cell(
        f"{cell}\n\n!echo a\ng = torch.ones(1000, device='simgpu:0')\ny = x + g"
    )
    assert isinstance(result.error_in_exec, RuntimeError)
    found = shell.user_ns["r"].explanation
    assert (found.line, found.code, found.fix) == (6, "y = x + g", 'x = x.to("simgpu:0")')


def test_a_block_in_a_timed_cell_has_the_lines_of_the_cell(shell: Any) -> None:
    shell.run_cell(
        "%%time\nimport gpumagic\n\nwith gpumagic.ondevice('simgpu:0') as on:\n    y = x.to('simgpu:0')\nr = on.report"
    )
    report = shell.user_ns["r"]
    assert [(row.line, row.code) for row in report] == [(5, "y = x.to('simgpu:0')")]
    assert report.lines[0] == (4, "with gpumagic.ondevice('simgpu:0') as on:")


def test_a_function_of_an_earlier_timed_cell_is_told_by_the_line_that_calls_it(shell: Any) -> None:
    shell.run_cell("%%time\ndef move():\n    return x.to('simgpu:0')")
    report = report_of(shell, "%%ondevice simgpu:0 -q -o r\n%%time\na = 1\nb = move()")
    assert [(row.line, row.code) for row in report] == [(4, "b = move()")]


def test_commands_and_magics_are_shown_as_typed(shell: Any) -> None:
    typed = "%%ondevice simgpu:0 -q -o r\nfound = !echo a\nif True:\n    !echo b\n    %time y = x.to('simgpu:0')"
    report = report_of(shell, typed)
    assert "\n".join(text for _, text in report.lines) == typed


def test_what_cannot_be_read_back_stays_as_it_is() -> None:
    code = "get_ipython().system(command)\nget_ipython().run_cell_magic('time', '', 'x')\nget_ipython().other('a')"
    assert frames.as_typed(code) == (
        "get_ipython().system(command)",
        "%%time",
        "get_ipython().other('a')",
    )


def test_a_copy_by_a_class_of_the_users_is_told_by_the_line_that_uses_it(shell: Any) -> None:
    shell.run_cell(
        "class Own(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, f, types, args=(), kwargs=None):\n"
        "        return super().__torch_function__(f, types, args, kwargs or {})"
    )
    report = report_of(
        shell,
        "%%ondevice simgpu:0 -q -o r\nown = torch.ones(9, device='cpu').as_subclass(Own)\ny = own.to('simgpu:0')",
    )
    assert [(row.line, row.nbytes) for row in report] == [(3, 36)]


def test_a_part_that_is_copied_again_is_a_repeat_and_no_stream(shell: Any) -> None:
    report = report_of(
        shell, "%%ondevice simgpu:0 -q -o r\nfor _ in range(5):\n    y = x[:500].to('simgpu:0')"
    )
    assert [(row.count, row.repeats) for row in report] == [(5, 4)]
    shell.run_cell(
        "%%ondevice simgpu:0 -q -o r\nfor _ in range(5):\n    x += 1\n    y = x[:500].to('simgpu:0')"
    )
    assert [row.repeats for row in shell.user_ns["r"]] == [0]
