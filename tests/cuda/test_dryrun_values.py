"""Values that the host reads from the device: those that it put there are known, for the others all scenarios are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumagic import fakecuda
from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of

MIB = 1 << 20
SETUP = """
import torch
from collections import deque
from torch import nn
def mib(n):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device="cuda:0")
x = torch.rand(64, 1024, device="cuda:0")
w = nn.Parameter(torch.ones(64, 1024, device="cuda:0"))
layer = nn.Linear(1024, 1024, device="cuda:0")
"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    yield
    client.close()


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, names)
    return names


@pytest.fixture
def small_card() -> Iterator[None]:
    """Leave 40 MiB of the first device."""
    capacity = fakecuda.memory(0).capacity
    fakecuda.set_memory(0, capacity=torch.cuda.memory_reserved(0) + 40 * MIB)
    yield
    fakecuda.set_memory(0, capacity=capacity)


def dry_run(cell: str, names: dict[str, Any]) -> DryRunReport:
    return run.dry_run(script_of(cell), names, targets.choose("cuda:0", None))


def needed(report: DryRunReport) -> int:
    """Return what the cell adds at its peak, in MiB."""
    return (report.devices[0].peak - report.devices[0].before) // MIB


KNOWN = {
    "a length": ("n = torch.tensor([5, 9, 3]).to('cuda:0').max().item()\ny = mib(n)", 9),
    "lengths as a list": (
        "y = [mib(n) for n in torch.tensor([5, 9, 3], device='cuda:0').tolist()]",
        17,
    ),
    "numbers made on the device": ("y = mib(torch.arange(7, device='cuda:0').sum().cpu())", 22),
    "a mask of what the host put there": (
        "t = torch.arange(9, device='cuda:0')\ny = mib(len(t[t > 5]))",
        3,
    ),
    "positions": ("y = mib(len((torch.eye(5, device='cuda:0') == 0).nonzero()))", 20),
    "what is written by an index": (
        "t = torch.zeros(4, device='cuda:0')\nt[1] = 6\ny = mib(t[1])",
        6,
    ),
    "a view": ("t = torch.zeros(2, 3, device='cuda:0')\nv = t[1]\nv += 4\ny = mib(t.sum())", 12),
    "a length that ends what is unknown": (
        """
done = torch.zeros(2, dtype=torch.bool, device="cuda:0")
kept = []
for step in range(9):
    kept.append(mib(1))
    done = done | (x[:2, 0] > 5) & False | (step >= 6)
    if done.all(): break
""",
        7,
    ),
    "a scale": (
        "s = torch.amp.GradScaler('cuda', init_scale=8.0)\ns.scale(x.sum())\ny = mib(s.get_scale())",
        8,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_host_put_there_is_known(notebook, name) -> None:
    cell, expected = KNOWN[name]
    report = dry_run(cell, notebook)
    assert (report.error, report.fits, needed(report)) == (None, True, expected)


def test_what_a_kernel_of_unknown_operands_writes_is_forgotten(notebook) -> None:
    cell = "t = torch.full((1,), 3, device='cuda:0')\nt += (x.sum() > 5)\ny = mib(100 if t.item() > 3 else 50)"
    report = dry_run(cell, notebook)
    assert needed(report) == 100


WORST = {
    "keep the best": (
        """
best = 1e9
for _ in range(4):
    loss = (w * x).sum()
    if loss.item() < best:
        best = loss.item()
        kept = [mib(30), globals().get("kept")]
""",
        120,
    ),
    "a patience counter that makes the batch larger": (
        """
best, wait, size = 1e9, 0, 1
for _ in range(8):
    loss = (w * x).sum().item()
    if loss < best: best = loss
    else: wait += 1
    if wait > 3: size, wait = size * 64, 0
    work = mib(size)
""",
        128,
    ),
    "the best and then patience, decided on the device": (
        """
best, wait = torch.full((), 1e9, device="cuda:0"), 0
for _ in range(8):
    loss = (w * x).sum().detach()
    if loss < best: best, state = loss, mib(70)
    else: wait += 1
    if wait > 5: work = mib(40)
""",
        150,
    ),
    "a branch that is taken": ("if x.sum() > 5:\n    y = mib(50)\nelse:\n    y = None", 50),
    "a branch that is not taken": ("if x.sum() > 5:\n    y = None\nelse:\n    y = mib(50)", 50),
    "two branches that matter together": (
        "if x.sum() > 5:\n    y = mib(50)\nif x.sum() > 6:\n    y = None\nz = mib(50)", 100,
    ),
    "a threshold far away": ("if x.sum().item() > 5000: y = mib(50)", 50),
    "a mask": ("y = x.repeat(16, 1)\ny = y[y > 0]", 25),
    "experts by nonzero": ("y = [x[(x[:, 0] > e).nonzero().squeeze(1)].repeat(8, 1) for e in range(8)]", 16),
    "what either branch keeps, in a loop": (
        """
for _ in range(4):
    loss = (w * x).sum()
    if loss > 5:
        best = mib(50)
    else:
        last = mib(50)
""",
        150,
    ),
    "copied to the host": ("values = x.cpu()\nif values.mean() > 0.5: y = mib(50)", 50),
}  # fmt: skip


@pytest.mark.parametrize("name", WORST)
def test_of_all_scenarios_the_one_that_needs_most_counts(notebook, name) -> None:
    cell, expected = WORST[name]
    report = dry_run(cell, notebook)
    assert (report.error, report.fits, needed(report)) == (None, True, expected)
    assert sum(report.breakdown.values()) == report.peak["cuda:0"]


def test_what_graphs_keep_is_activations_also_where_no_backward_pass_came(notebook) -> None:
    """A quarter of a MiB, the squared layer's output, stays in each of 40 passes."""
    report = dry_run(
        "losses = []\nfor _ in range(40): losses.append(layer(x).square().sum())", notebook
    )
    assert report.breakdown["activations"] == 40 * MIB // 4


OPEN = {
    "a branch": ("if x.sum() > 5:\n    y = mib(50)", "line 1 (`x.sum() > 5`)"),
    "one of two reads": (
        "print(x.sum().item())\nif x.sum() > 5:\n    y = mib(50)",
        "line 2 (`x.sum() > 5`)",
    ),
    "a number that sizes": (
        "a = x.max() > 1\nn = int(x.max())\ny = mib(n)",
        "line 2 (`int(x.max())`)",
    ),
    "a mask": ("for _ in range(2): keep = x[x > 0].repeat(999)", "line 1 (`x[x > 0]`)"),
    "experts": (
        "y = [x[(x[:, 0] > e).nonzero().squeeze(1)].repeat(8, 1) for e in range(99)]",
        "line 1",
    ),
}


@pytest.mark.usefixtures("small_card")
@pytest.mark.parametrize("name", OPEN)
def test_where_scenarios_disagree_on_fitting_the_line_that_it_depends_on_is_told(
    notebook, name
) -> None:
    cell, line = OPEN[name]
    report = dry_run(cell, notebook)
    assert report.fits is None
    assert any(
        "depends on values on the device" in each and line in each for each in report.unknown
    ), report.unknown


@pytest.mark.parametrize(
    "cell",
    ["y = torch.zeros(x.max().long().item(), 512, device='cuda:0')",
     "y = [torch.zeros(n, 64, device='cuda:0') for n in x[0].long().tolist()]",
     "y = torch.nn.functional.one_hot(x[0].long())", "y = torch.bincount(x[0].long())",
     "y = x\nwhile y.norm() > 1e-3: y = y * 0.9"],
)  # fmt: skip
def test_a_size_that_the_device_decides_leaves_the_verdict_open(notebook, cell) -> None:
    report = run.dry_run(script_of(cell), notebook, targets.choose("cuda:0", None), time_limit=3)
    assert report.fits is None


@pytest.mark.parametrize(
    "use", ["history.append(loss.item())", "print(f'{loss.item():.3f} {loss}')", "history.append(math.exp(loss))",
            "best = min(best, loss.item())", "history.append((x > 0).sum().item() / len(x))",
            "history.append(math.log(loss.item()))", "preds = layer(x).argmax(1).cpu().tolist()",
            "names = [table[i] for i in layer(x).argmax(1).tolist()]", "assert loss.isfinite()", "1 / loss.item()"],
)  # fmt: skip
def test_what_is_only_noted_leaves_the_verdict_as_it_is(notebook, use) -> None:
    names = {**notebook, "history": [], "best": 1e9, "table": ["a"] * 2}
    cell = f"import math\nloss = layer(x).square().mean()\nloss.backward()\n{use}"
    report = dry_run(cell, names)
    assert (report.error, report.fits, report.unknown) == (None, True, ())


def test_every_guess_is_named_with_its_line(notebook) -> None:
    cell = "a = bool(x.sum().item())\nif x.sum() > 5: pass\nb = x[x > 0]\nc = x.cpu()\nd = c.numpy().tobytes()"
    assert dry_run(cell, notebook).assumed[:4] == (
        "line 1: `x.sum().item()` is taken to be 1",
        "line 2: `x.sum() > 5` is taken to be False",
        "line 3: `x[x > 0]` is taken to select everything",
        "line 4: `x.cpu()` is taken to be 1",
    )


def test_an_error_that_no_guess_causes_is_the_cells_own(notebook) -> None:
    report = dry_run("a = x.sum().item()\nb = x @ x", notebook)
    assert report.error is not None
    assert report.error.startswith("the cell fails on line 2: RuntimeError")


DECIDES_NOTHING = {
    "printed": "print(loss.item(), f'{loss.item():.3f}', '%d' % loss.item(), loss)",
    "numpy and statistics": (
        "import numpy as np, statistics\na = [loss.item()] * 3\nprint(np.mean(a), statistics.mean(a), np.sum(a))"
    ),
    "numpy's own arithmetic": (
        "import numpy as np\nprint(np.exp(loss.item()), np.float64(2) * loss.item(), np.maximum(loss.item(), 1), "
        "np.round(loss.item(), 2), np.abs(loss.item()))"
    ),
    "rounded by way of text": "print(float(f'{loss.item():.4f}') + int(loss))",
    "a list of numbers": "print(sum(x[0].tolist()) / 1024, max(x[0].tolist()))",
    "written as JSON": "import json\nprint(json.dumps({'loss': loss.item()}, indent=2))",
    "a factor on the device": "y = x * loss.item()",
    "a field of a dataclass": (
        "import dataclasses\nState = dataclasses.make_dataclass('State', ['loss'])\n"
        "print(dataclasses.asdict(State(loss.item())))"
    ),
    "a state on the host and back": (
        "kept = {name: each.detach().cpu().clone() for name, each in layer.state_dict().items()}\n"
        "twin = nn.Linear(1024, 1024).cuda()\ntwin.load_state_dict(kept)\n"
        "torch.optim.SGD(twin.parameters()).step()\nkept = {name: each.cpu() for name, each in kept.items()}\n"
        "twin.load_state_dict(kept)\ntwin.cpu()"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDES_NOTHING)
def test_a_number_that_decides_nothing_costs_no_further_run_and_is_no_assumption(
    notebook, name
) -> None:
    report = dry_run(f"loss = layer(x).square().mean()\n{DECIDES_NOTHING[name]}", notebook)
    assert (report.error, report.runs, report.certain, report.assumed) == (None, 1, True, ())


DECIDES = {
    "a comparison": "n = 40 if loss.item() < 1e-9 else 1",
    "a truth": "n = 1 if loss.item() else 40",
    "what arithmetic makes of it": "n = 40 if (2 * loss.item() + 1) ** 2 > 1e5 else 1",
    "math": "import math\nn = 40 if math.log(1 + loss.item()) > 3 else 1",
    "numpy": "import numpy as np\nn = 40 if np.mean([loss.item()]) > 1e3 else 1",
    "an array": "import numpy as np\nn = 40 if np.array([loss.item()]).max() > 1e3 else 1",
    "a tensor on the host": "n = 40 if torch.tensor([loss.item()]).mean() > 1e3 else 1",
    "a text that is read": "n = 40 if float(f'{loss.item():.2f}') > 1e3 else 1",
    "a key": "n = {1.0: 1}.get(loss.item(), 40)",
    "how many of thousands are different": "n = 40 if len(set(x.flatten()[:5000].tolist())) > 1e3 else 1",
    "a list of numbers": "n = 40 if max(x[0].tolist()) > 1e3 else 1",
    "a long list of numbers": "n = 40 if x.flatten().repeat(9).tolist()[3] > 1e3 else 1",
    "a long copy that was shown": "y = x.repeat(9, 1).cpu()\nprint(y)\nn = 40 if y.max() > 1e3 else 1",
    "a list of truths": "n = 40 if (x[0] > 5).to('cuda').tolist()[3] else 1",
    "a copy on the host": "copy = (x > 5).cpu()\nn = 40 if copy.any() else 1",
    "an array of a copy": "n = 40 if x.cpu().numpy().max() > 1e3 else 1",
    "a number of a copy": "n = 40 if x.cpu().max().item() > 1e3 else 1",
    "a whole number": "n = 40 if (x > 5).sum().item() > 1e3 else 1",
    "an index": "n = [40, 1][(x > 5).any().long().item()]",
    "a size": "n = min(40, len(range((x > 5).sum().item())))",
    "an isnan": "import math\nn = 40 if math.isnan(loss.item()) else 1",
    "numpy's isfinite": "import numpy as np\nn = 1 if np.isfinite(loss.item()) else 40",
    "numpy's larger of two": "import numpy as np\nn = 40 if np.maximum(loss.item(), 0) * 2.0 > 1e3 else 1",
    "numpy's smallest of some": "import numpy as np\nn = 40 if (np.ones(3) * loss.item()).max() > 1e3 else 1",
    "the smaller of two": "n = 40 if min(1e9, loss.item()) > 1e3 else 1",
    "an order": "n = 40 if sorted([loss.item(), 50.0])[0] == 50 else 1",
    "a branch in a branch that only some outcomes come to": "n = 1 if x.sum() > 5 or x.min() > 5 else 40",
    "a match": "match (x > 5).sum().item():\n    case 1: n = 1\n    case _: n = 40",
}


@pytest.mark.parametrize("name", DECIDES)
def test_a_number_that_decides_is_noted_however_it_does(notebook, name) -> None:
    report = dry_run(f"loss = layer(x).square().mean()\n{DECIDES[name]}\ny = mib(n)", notebook)
    assert (report.error, report.certain) == (None, False), report
    assert needed(report) // 40, (
        "the outcome that needs 40 MiB, besides cuBLAS's workspaces, is seen"
    )
    assert report.runs > 1


@pytest.mark.parametrize(
    "check", ["assert x.sum().item() > 3", "assert x.sum() > 3", "if x.max() < 5: raise ValueError"]
)
def test_a_check_of_values_is_taken_to_hold(notebook, check) -> None:
    report = dry_run(f"{check}\ny = mib(40)", notebook)
    assert (report.error, report.fits, needed(report)) == (None, True, 40)


def test_an_error_that_comes_of_every_assumed_value_but_not_alike_may_be(notebook) -> None:
    report = dry_run(
        "n = x.sum().item()\nif n > 3:\n    raise ValueError(n)\nraise KeyError(n)", notebook
    )
    assert report.error.startswith("the cell may fail on line ")
    assert "(it depends on line 2 (`n > 3`), whose values are assumed)" in report.error


def test_a_loop_whose_memory_is_flat_is_told_as_such(notebook) -> None:
    cell = "while True:\n    y = mib(3)"
    report = run.dry_run(script_of(cell), notebook, targets.choose("cuda:0", None), time_limit=2)
    ((place, number),) = report.flat
    assert (place, number < report.passes[0].run / 4) == ("line 1", True)
    assert "of line 1 none of" in report.verdict
    assert report.verdict.startswith("Fits as far as it was run")


@pytest.mark.parametrize("kept", ["mib(1 / 64)", "torch.ones(9, device='cuda:0')"])
def test_a_loop_whose_memory_grows_is_not_told_as_flat(notebook, kept) -> None:
    cell = f"y = mib(64)\ndel y\nkept = []\nwhile len(kept) < 10**9:\n    kept.append({kept})"
    report = run.dry_run(script_of(cell), notebook, targets.choose("cuda:0", None), time_limit=2)
    assert (report.flat, report.complete) == ((), False)


@pytest.mark.parametrize("refers", ["layer", "None"])
def test_memory_that_only_the_garbage_collector_frees_is_not_certain(notebook, refers) -> None:
    cell = f"for _ in range(2_000):\n    layer = torch.nn.Module()\n    layer.held, layer.itself = mib(1), [{refers}]"
    report = dry_run(cell, notebook)
    is_known = refers == "None"
    assert (report.fits, report.certain) == (True, is_known), report
    assert any("garbage collector" in each for each in report.unknown) is not is_known
