"""With `--trace` implicit copies are counted too; with `--strict` they and stray tensors are errors naming the line."""

from __future__ import annotations

import numpy as np
import ondevice_corpus as corpus
import pytest
import torch
from ondevice_corpus import CorpusCell

import gpumagic
from gpumagic.errors import StrayTensor

pytestmark = pytest.mark.usefixtures("two_devices")

CELLS = [cell for cell in corpus.cells() if cell.needs is None]
ASKED = [cell for cell in CELLS if cell.gap is None and not cell.name.startswith(("two_", "numpy_of"))]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_traced_report_is_what_the_copy_counters_say(cell: CorpusCell) -> None:
    report, copies, _ = corpus.run(cell.code, asks=cell.asks, trace=True)
    assert corpus.reported(report) == corpus.counted(copies)


def test_an_implicit_copy_is_told_with_its_line_and_what_made_it() -> None:
    report, _, _ = corpus.run("rows = torch.tensor([1], device='cpu')\nh = g[rows]", trace=True)
    (row,) = report
    assert (row.line, row.cause, row.name, row.nbytes) == (2, "indexing", "rows", 8)


def test_a_copy_in_backward_is_told_by_the_line_that_calls_it() -> None:
    report, _, _ = corpus.run(
        "w = torch.ones(4, device='cpu', requires_grad=True)\nloss = w.to('simgpu:0').sum()\nloss.backward()",
        trace=True,
    )
    assert [(row.line, row.cause, row.source) for row in report] == [
        (2, ".to", "cpu"), (3, "backward", "simgpu:0"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "line", "name"),
    [
        ("rows = torch.tensor([1], device='cpu')\nh = g[rows]", 2, "rows"),
        ("a = 1\nfar.sum()", 2, "far"),
        ("import numpy\nh = torch.from_numpy(numpy.ones(3))\nh * 2", 3, "h"),
        ("loss = x.mean()", 1, "x"),
        ("w = torch.ones(4, device='cpu', requires_grad=True)\nw.to('simgpu:0').sum().backward()", 2, None),
    ],
)
def test_strict_names_the_line_that_uses_or_copies_unasked(cell: str, line: int, name: str | None) -> None:
    with pytest.raises(StrayTensor, match=rf"^line {line}: {name or 'a tensor'} lives on"):
        corpus.run(cell, strict=True)


@pytest.mark.parametrize(
    "cell",
    [
        "y = x.to('simgpu:0') * 2",
        "h = g.cpu(); h += 1; t = h.sum().item()",
        "h = torch.zeros(3, device='cpu'); h = h + 1; h.to('simgpu:0')",
        "model.to('simgpu:0')(torch.ones(2, 4)).sum().backward()",
        "print(g); v = g.tolist(), float(g.sum()), g.cpu().numpy()",
        (
            "net = torch.nn.Linear(4, 2); opt = torch.optim.AdamW(net.parameters())\n"
            "for _ in range(2):\n    opt.zero_grad(); net(g).sum().backward(); opt.step()"
        ),
        "r = torch.rand(3, generator=torch.Generator('cpu')) + 1",
        "s = torch.eye(3, device='cpu').to_sparse(); t = s * 2",
    ],
)
def test_strict_lets_pass_what_a_line_asks_for(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.run(cell, strict=True)


def test_strict_takes_no_tensor_for_a_dead_one_that_was_asked_for() -> None:
    """The second mostly gets the address of the first, which alone would not tell them apart."""
    for _ in range(20):
        with pytest.raises(StrayTensor, match="stray lives on cpu"):
            use_a_stray_where_another_was(np.ones(3))


def use_a_stray_where_another_was(made: np.ndarray) -> None:
    with gpumagic.ondevice("simgpu:0", strict=True):
        asked = torch.zeros(3, device="cpu")
        del asked
        stray = torch.from_numpy(made)
        stray * 2


def test_the_api_has_both() -> None:
    host = torch.ones(3)
    with gpumagic.ondevice("simgpu:0", trace=True) as run:
        torch.ones(5)[torch.tensor([1], device="cpu")]
    assert [row.cause for row in run.report] == ["indexing"]
    with pytest.raises(StrayTensor, match="host lives on cpu"), gpumagic.ondevice("simgpu:0", strict=True):
        host.sum()
