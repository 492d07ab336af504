"""A failure about devices is explained from the failing line's own variables, and stays the user's failure."""

from __future__ import annotations

import gc
import linecache
import sys
import weakref
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic.source import frames, text
from gpumagic.transfers.report import Explanation
from gpumagic.transfers.run import DeviceRun
from tests.transfers import ondevice_corpus as corpus

pytestmark = pytest.mark.usefixtures("two_devices")

NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.mask = torch.ones(4, device="cpu")
    def forward(self, inputs):
        hidden = self.layer(inputs)
        return hidden * self.mask
"""
CELLS = {
    "y = x[:8, :4] + g": ("x is on cpu, g on simgpu:0", 'x = x.to("simgpu:0")'),
    "y = model(g)": ("model is on cpu, g on simgpu:0", 'model.to("simgpu:0")'),
    "y = (g + g)[:5] + far[:, :4]": ("g is on simgpu:0, far on simgpu:1", 'far = far.to("simgpu:0")'),
    "for i in range(2):\n    y = torch.cat([\n        g,\n        far[:, :4],\n    ])": (
        "g is on simgpu:0, far on simgpu:1", 'far = far.to("simgpu:0")',
    ),
    "batch = {'x': x}\ny = g * batch['x'][:8, :4]": ("g is on simgpu:0, batch['x'] on cpu", "batch['x'] = "),
    "rows = torch.tensor([0])\ny = x[rows]": ("x is on cpu, rows on simgpu:0", 'rows = rows.to("cpu")'),
    "parts = [g, g.cpu()]\ny = torch.cat(parts)": ("parts is on", "parts = [each.to"),
    NET + "y = Net().to('simgpu:0')(g)": ("hidden is on simgpu:0, self.mask on cpu", 'self.register_buffer("mask"'),
    "gen = torch.Generator()\ny = torch.rand(2, device='simgpu:0', generator=gen)": ("gen is on cpu", "gen = "),
    "y = g.numpy()": ("g is on simgpu:0, and numpy", "g.cpu()"),
    "w = g.clone().requires_grad_()\ny = w.sum(0).numpy()": ("w is on simgpu:0", "w.detach().cpu()"),
    "import numpy\ny = numpy.asarray(g)": ("g is on simgpu:0", "g.cpu()"),
    "y = x.to('simgpu:7')": ("does not exist; there are simgpu:0, simgpu:1.", None),
    "y = torch.nn.functional.cross_entropy(g, torch.zeros(8, dtype=torch.int64, device='cpu'))": (
        "g is on simgpu:0; what is made in the line or inside the call is on cpu", None,
    ),
}  # fmt: skip


def explained(
    cell: str, device: str = "simgpu:0"
) -> tuple[Explanation | None, BaseException, DeviceRun]:
    """Run a cell that fails, as the magic does."""
    namespace: dict[str, Any] = {}
    exec(corpus.SETUP, namespace)
    source = cell.strip()
    linecache.cache["<failing>"] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        "<failing>",
    )
    run = DeviceRun(device, namespace=namespace)
    run.open()
    try:
        exec(compile(source, "<failing>", "exec"), namespace)
    except Exception as error:
        run.close(error)
        assert run.report is not None
        return run.report.explanation, error, run
    run.close(None)
    pytest.fail("the cell did not fail")


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("positions", ["as Python tells", "none"])
def test_the_failing_line_is_explained_by_its_variables(
    cell: str, positions: str, monkeypatch
) -> None:
    """Also where Python does not say which part of the line failed, as before 3.11."""
    what, fix = CELLS[cell]
    if positions == "none":
        monkeypatch.setattr(text, "span_at", lambda code, instruction: None)
    found, error, _ = explained(cell)
    assert found is not None
    assert what in found.what
    assert (fix or "") in (found.fix or "")
    assert (
        found.line
        == [
            step.tb_lineno
            for step in steps(error)
            if step.tb_frame.f_code.co_filename == "<failing>"
        ][-1]
    )


def steps(error: BaseException) -> list[Any]:
    found, step = [], error.__traceback__
    while step is not None:
        found.append(step)
        step = step.tb_next
    return found


@pytest.mark.parametrize(
    "cell",
    ["1 / 0", "raise RuntimeError('same device')", "torch.ones(2) @ torch.ones(3)", "y = zz"],
)
def test_other_failures_are_not_explained(cell: str) -> None:
    assert explained(cell)[0] is None


def test_a_functions_line_is_told_with_the_function() -> None:
    found, _, _ = explained(NET + "y = Net().to('simgpu:0')(g)")
    assert found is not None
    assert found.function in {"Net.forward", "forward"}  # Python 3.10 knows the short name only
    assert found.place == f"line 8 of {found.function}(): "
    found, _, _ = explained("y = [row[:4] + each for row in far for each in g]")
    assert found is not None
    assert found.function is None
    assert found.fix == 'row.to("simgpu:0")'


USES = """
class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, inputs, *, scale=1):
        return self.layer(inputs) * scale
def call(network, inputs):
    return network(inputs).sum()
net = Plain().to("simgpu:0")
host = Plain().to("cpu")
small = torch.ones(2, 4, device="cpu")
there = small.to("simgpu:0")
"""


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("net(small)", 'small = small.to("simgpu:0")'),
        ("host(there)", 'host.to("simgpu:0")'),
        ("call(net, small)", 'small = small.to("simgpu:0")'),
        ("net(there, scale=small[:, :1])", 'small = small.to("simgpu:0")'),
        ("net(**given)", 'given = {key: each.to("simgpu:0") for key, each in given.items()}'),
    ],
)
def test_what_a_function_was_given_is_mended_where_it_is_called(line: str, fix: str) -> None:
    cell = USES + 'given = {"inputs": small}\n' + line
    found, _, _ = explained(cell)
    assert found is not None
    assert (found.line, found.code, found.function, found.fix) == (
        len(cell.strip().split("\n")),
        line,
        None,
        fix,
    )


def test_the_exception_is_the_users_own_and_a_block_shows_the_explanation_under_it() -> None:
    x, g = torch.ones(3), torch.ones(3, device="simgpu:0")
    with (
        pytest.raises(RuntimeError, match="Expected all tensors") as caught,
        gpumagic.ondevice("simgpu:0") as run,
    ):
        x + g
    assert type(caught.value) is RuntimeError
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert run.report is not None
    assert run.report.explanation is not None
    assert run.report.explanation.fix == 'x = x.to("simgpu:0")'
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [str(run.report.explanation)]


def test_blocks_inside_one_another_say_it_once() -> None:
    x, g = torch.ones(3), torch.ones(3, device="simgpu:0")
    with (
        pytest.raises(RuntimeError) as caught,
        gpumagic.ondevice("simgpu:0"),
        gpumagic.ondevice("simgpu:0"),
    ):
        x + g
    assert len(getattr(caught.value, "__notes__", [0])) == 1


def test_a_decorated_function_is_explained_too() -> None:
    x, g = torch.ones(3), torch.ones(3, device="simgpu:0")

    @gpumagic.ondevice("simgpu:0")
    def work() -> torch.Tensor:
        return x + g

    with pytest.raises(RuntimeError) as caught:
        work()
    assert (
        "x is on cpu, g on simgpu:0"
        in getattr(caught.value, "__notes__", ["x is on cpu, g on simgpu:0"])[0]
    )


def test_nothing_of_the_failed_line_is_kept_alive() -> None:
    def fail() -> tuple[DeviceRun, Any]:
        found, error, run = explained(
            "def f(a):\n    return a + g\nf(torch.ones(8, 4, device='cpu'))"
        )
        assert found is not None
        lost = weakref.ref(error.__traceback__.tb_next.tb_next.tb_frame.f_locals["a"])  # type: ignore[union-attr]
        return run, lost

    run, lost = fail()
    gc.collect()
    assert lost() is None
    assert run.report is not None


def test_looking_at_a_running_functions_variables_does_not_keep_them() -> None:
    def work() -> weakref.ref[Any]:
        big = torch.ones(3)
        seen = frames.resolve_names(sys._getframe(), {"big", "torch", "nothing"})
        assert seen == {"big": big, "torch": torch}
        del seen
        gone = weakref.ref(big)
        del big
        return gone if gone() is None else pytest.fail("the frame still has it")

    work()


def test_the_users_own_locals_are_left_as_they_are() -> None:
    def work() -> dict[str, Any]:
        here = 5
        mine = locals()
        frames.resolve_names(sys._getframe(), {"here"})
        assert mine["here"] == here
        return mine

    assert work()["here"] == 5


def test_nobodys_code_is_run_by_looking() -> None:
    cell = (
        "class Lazy:\n"
        "    @property\n"
        "    def part(self): raise SystemExit\n"
        "    def __getattr__(self, name): raise SystemExit\n"
        "    def __add__(self, other): return g[:5] + far[:, :4]\n"
        "lazy = Lazy()\n"
        "lazy + (g, lambda: (lazy.part, lazy.other))"
    )
    found, error, _ = explained(cell)
    assert isinstance(error, RuntimeError)
    assert found is not None


def test_a_cell_shows_the_explanation_with_its_report(bare_shell, shown) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch; x = torch.ones(3); g = torch.ones(3, device='simgpu:0')")
    result = bare_shell.run_cell("%%ondevice simgpu:0 -o report\n# first\nx + g")
    assert type(result.error_in_exec) is RuntimeError
    assert not getattr(result.error_in_exec, "__notes__", None)
    assert bare_shell.user_ns["report"].explanation.line == 3
    (text,) = shown()
    assert "x is on cpu, g on simgpu:0" in text
    assert 'x = x.to("simgpu:0")' in text


def test_a_file_of_an_absent_device_is_explained_with_map_location(tmp_path) -> None:
    import io

    file = io.BytesIO()
    torch.save(torch.ones(3, device="simgpu:1"), file)
    path = tmp_path / "x.pt"
    path.write_bytes(file.getvalue().replace(b"simgpu:1", b"simgpu:7"))
    found, _, _ = explained(f"y = torch.load({str(path)!r})")
    assert found is not None
    assert found.fix == 'torch.load(..., map_location="simgpu:0")'
