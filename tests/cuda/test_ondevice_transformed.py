"""Code that torch traces, compiles, exports or maps under `%%ondevice cuda`: the runtime's log has its copies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

import gpumagic
from gpumagic import fakecuda
from tests.transfers import ondevice_corpus as corpus
from tests.transfers import transformed

COLLECTED_GENERATION = 1


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs_and_copies(
    code: str, around: contextlib.AbstractContextManager[Any]
) -> tuple[int, Any, Any]:
    """Return how many graphs were compiled, the copies in the log, and what `around` is entered as."""
    torch._dynamo.reset()  # it makes other graphs of what it has compiled before
    made: list[object] = []
    space: dict[str, Any] = {"count": lambda graph, _: made.append(graph) or graph.forward}
    exec((corpus.SETUP + transformed.SETUP).replace("simgpu", "cuda"), space)
    fakecuda.reset()
    with around as run:
        exec(code.replace("simgpu", "cuda"), space)
    return len(made), corpus.counted([each[:4] for each in fakecuda.copies()]), run


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("what", [*transformed.COMPILED, *transformed.TRACED])
def test_it_makes_the_same_graphs_and_copies_and_these_are_told(what: str, trace: bool) -> None:
    code = {**transformed.COMPILED, **transformed.TRACED}[what]
    graphs, copies, _ = graphs_and_copies(code, torch.device("cuda:1"))
    graphs_under, copies_under, run = graphs_and_copies(
        code, gpumagic.ondevice("cuda:1", trace=trace)
    )
    assert (graphs_under, copies_under) == (graphs, copies)
    assert tuple(+each for each in corpus.reported(run.report)) == copies
    json.dumps(run.report.to_dict())


def test_what_exec_and_eval_copy_is_told_by_the_line_that_calls_them() -> None:
    code = "a = 1\nexec('y = x.to(\"cuda:0\")')\nz = eval('x.to(\"cuda:1\")')"
    report, _, _ = corpus.run(code, backend="cuda")
    assert [(row.line, row.target, row.nbytes) for row in report] == [
        (2, "cuda:0", 4000),
        (3, "cuda:1", 4000),
    ]


def test_a_block_that_worked_elsewhere_says_so() -> None:
    x = torch.ones(3)
    with gpumagic.ondevice("cuda:0") as on_host:
        y = x * 2
    with gpumagic.ondevice("cuda:1") as elsewhere:
        z = torch.ones(9, device="cuda:0") * 2
    assert y.device != z.device
    assert "the cell worked on cpu (" in first_line(on_host.report)
    assert "the cell worked on cuda:0 (z)" in first_line(elsewhere.report)


def first_line(report: Any) -> str:
    """Return the answer of a report as text."""
    return next(line for line in str(report).splitlines() if line.strip())
