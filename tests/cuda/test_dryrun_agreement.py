"""Both engines tell the same of a cell, and what the host holds changes nothing on the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of
from gpumagic.report.base import to_html, to_text

ADDED_UP = """
import torch
x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
h = x * 1
loss = sum(h * i for i in range(1, 9)).sum()
"""
HOSTS = {
    "a model on the host": "teacher = torch.nn.Linear(2048, 2048)",
    "random numbers on the host": "host = torch.empty(1 << 20).normal_()",
}
ROOTS = {"a root on the device": "loss.backward()", "a root on the host": "loss.cpu().backward()"}
STEP = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
x = torch.ones(1024, 256, device="cuda")
model(x).square().mean().backward()
optimizer.step()
"""
NORMALISED = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 512, bias=False)
        self.register_buffer("mask", torch.ones(2048, 2048))
net = Net().cuda()
net.linear(torch.ones(4, 512, device="cuda"))
"""
WORKSPACE = "library workspaces"
"""Of cuBLAS: the fake engine knows none."""


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    client.close()


@pytest.fixture(params=["cuda", "fake"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GPUMAGIC_DRYRUN_ENGINE", request.param)
    return request.param


def dry_run(cell: str) -> DryRunReport:
    report = run.dry_run(script_of(cell), {"__name__": "__main__"}, targets.choose("cuda:0", None))
    assert report.error is None
    return report


def peak_of(cell: str) -> int:
    """Run a cell, and return the device's peak."""
    names: dict[str, Any] = {}
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    exec(cell, names)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_a_large_tensor_on_the_host_leaves_the_devices_peak_as_it_is(host: str, root: str) -> None:
    """Autograd adds gradients in place, also while weights on the host are not drawn."""
    cell = ADDED_UP + root
    assert dry_run(f"import torch\n{host}\n{cell}").peak["cuda:0"] == peak_of(cell)


def test_both_engines_say_the_same_of_what_makes_up_the_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = STEP, NORMALISED
    told = {}
    for name in "cuda", "fake":
        monkeypatch.setenv("GPUMAGIC_DRYRUN_ENGINE", name)
        told[name] = [dry_run(cell).breakdown for cell in cells]
    for cuda, fake in zip(told["cuda"], told["fake"], strict=True):
        assert {part: nbytes for part, nbytes in cuda.items() if part != WORKSPACE} == fake


def test_each_workspace_of_cublas_is_one_also_where_a_backward_pass_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is the cell's thread's, the other that of backward passes."""
    monkeypatch.setenv("GPUMAGIC_DRYRUN_ENGINE", "cuda")
    forward = dry_run(STEP.partition("model(x)")[0] + "model(x)").breakdown[WORKSPACE]
    assert dry_run(STEP).breakdown[WORKSPACE] == 2 * forward


@pytest.mark.usefixtures("engine")
def test_a_buffer_is_called_a_buffer() -> None:
    breakdown = dry_run(NORMALISED).breakdown
    assert breakdown["buffers"] == 4 * 2048 * 2048
    assert breakdown["parameters"] == 4 * 512 * 512


SURE = {
    "a convolution": (
        "nn.Conv2d(3, 8, 3).cuda()(torch.ones(1, 3, 16, 16, device='cuda'))",
        "cuDNN",
    ),
    "an LSTM": ("nn.LSTM(8, 8).cuda()(torch.ones(1, 3, 8, device='cuda'))", "cuDNN"),
    "a linear layer": ("nn.Linear(8, 8).cuda()(torch.ones(1, 8, device='cuda'))", ""),
}


@pytest.mark.parametrize(("cell", "library"), SURE.values(), ids=SURE)
def test_what_a_library_takes_for_itself_is_not_certain(cell: str, library: str) -> None:
    report = dry_run(f"import torch\nfrom torch import nn\ny = {cell}")
    assert report.certain is not bool(library)
    assert any(library in each for each in report.unknown) is bool(library)


def test_the_report_names_torch_and_the_attention_kernels() -> None:
    attend = "torch.nn.functional.scaled_dot_product_attention(q, q, q)"
    made = (
        "import torch\nq = torch.ones(1, 4, 128, 64, device='cuda', dtype=torch.{})\ny = " + attend
    )
    assert dry_run(made.format("bfloat16")).versions == {
        "torch": torch.__version__,
        "attention": "flash",
    }
    report = dry_run(made.format("float32"))
    assert report.versions["attention"] == "memory-efficient"
    assert f"on torch {torch.__version__}" in to_html(report)
    assert "attention is memory-efficient." in to_html(report)


def test_a_cell_that_catches_a_shortage_fits_and_the_report_says_which_line_it_was() -> None:
    cell = """
import torch
try:
    big = torch.empty(1 << 40, device="cuda")
except torch.OutOfMemoryError:
    big = torch.empty(1 << 20, device="cuda")
"""
    report = run.dry_run(script_of(cell), {}, targets.choose("cuda:0", None))
    assert report.fits is True
    assert "Line 4 runs out of memory, and the cell goes on." in to_text(report)


def test_a_shortage_is_no_need_of_all_there_is() -> None:
    cell = (
        "import torch\nx = [torch.empty((1 << 30) - (4 << 20), dtype=torch.uint8, device='cuda')]\n"
    )
    report = run.dry_run(
        script_of(cell + "y = torch.empty(2 << 20, device='cuda')"),
        {},
        targets.choose(None, 1 << 30),
    )
    assert "1.0 of 1.0 GiB" not in report.verdict


DTYPES = {
    "a product": "a @ OTHER(a)",
    "a batch of products": "torch.bmm(b, OTHER(b))",
    "a sum of products": "torch.addbmm(a, b, OTHER(b))",
    "a linear layer": "nn.Linear(4, 4, device='cuda', dtype=other)(a)",
    "a convolution": "nn.Conv2d(3, 4, 3, device='cuda', dtype=other)(torch.ones(1, 3, 8, 8, device='cuda'))",
    "a bias of a convolution": "F.conv1d(b, b, OTHER(v))",
    "a norm of layers": "nn.LayerNorm(4, device='cuda', dtype=other)(a)",
    "a norm of groups": "nn.GroupNorm(2, 4, device='cuda', dtype=other)(a)",
    "a norm of batches": "nn.BatchNorm1d(4, device='cuda')(OTHER(a))",
    "weights of a norm of batches": "F.batch_norm(a, v, v, OTHER(v), v)",
    "statistics of a norm of batches": "F.batch_norm(a, OTHER(v), OTHER(v), v, v)",
    "a norm by roots of squares": "nn.RMSNorm(4, device='cuda')(OTHER(a))",
    "attention": "F.scaled_dot_product_attention(h, h, OTHER(h))",
    "what is put by an index": "v[i] = OTHER(v)",
    "what is added by an index": "v.index_add_(0, i, OTHER(v))",
    "what is copied by an index": "v.index_copy(0, i, OTHER(v))",
    "what is reduced by an index": "v.index_reduce(0, i, OTHER(v), 'amax')",
    "what is scattered": "v.scatter(0, i, OTHER(v))",
    "an index": "a[OTHER(i)]",
    "an index that selects": "a.index_select(0, OTHER(i))",
    "an index that fills": "a.index_fill(0, OTHER(i), 1)",
    "an index that gathers": "v.gather(0, OTHER(i))",
    "an index of a table": "F.embedding(OTHER(i), a)",
    "a mask": "a.masked_fill(OTHER(a), 0)",
    "a mask that selects": "a.masked_select(OTHER(a))",
    "a choice": "torch.where(a > 0, a, OTHER(a))",
    "bits": "a.bool() & OTHER(a)",
    "a difference": "a - OTHER(a)",
    "a remainder": "i % OTHER(i)",
    "the larger": "torch.maximum(a, OTHER(a))",
    "distances": "torch.cdist(a, OTHER(a))",
    "a cross product": "torch.linalg.cross(b[:, :3], OTHER(b[:, :3]), dim=1)",
    "a sum": "a + OTHER(a)",
    "a sum in place": "i.add_(OTHER(i))",
    "an interpolation": "torch.lerp(a, OTHER(a), 0.5)",
    "what is joined": "torch.cat([a, OTHER(a)])",
    "a table": "nn.Embedding(4, 4, device='cuda', dtype=other)(i)",
    "a grid": "F.grid_sample(h, OTHER(torch.zeros(1, 4, 4, 2, device='cuda')))",
    "classes": "F.cross_entropy(a, OTHER(i))",
    "chances of classes": "F.cross_entropy(OTHER(a), a)",
    "a loss of truths": "F.binary_cross_entropy_with_logits(a, OTHER(a))",
    "a loss of chances": "F.binary_cross_entropy(a, OTHER(a))",
    "a loss of squares": "F.mse_loss(a, OTHER(a))",
    "places": "torch.bucketize(OTHER(a), v)",
    "a softmax": "OTHER(a).softmax(0)",
}  # fmt: skip
OPERANDS = """
F = nn.functional
a, b, v, h = (torch.ones(shape, device="cuda") for shape in ((4, 4), (4, 4, 4), (4,), (1, 2, 4, 8)))
i = torch.zeros(4, dtype=torch.int64, device="cuda")
OTHER = lambda value: value.to(other, copy=True)
"""

REFUSING = """
refused = []
for label, each in tried.items():
    try:
        exec(each, {"torch": torch, "nn": torch.nn})
    except (RuntimeError, IndexError, TypeError):
        refused.append(label)
"""


def test_fake_tensors_refuse_the_types_that_cudas_own_kernels_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(targets.VARIABLE, "fake")
    others = "bfloat16", "float64", "float32", "int64", "int32", "bool", "complex64"
    names: dict[str, Any] = {"torch": torch}
    names["tried"] = {
        f"{label} of {other}": f"other = torch.{other}\n{OPERANDS}{cell}"
        for label, cell in DTYPES.items()
        for other in others
    }
    exec(REFUSING, names)
    assert 100 < len(names["refused"]) < len(names["tried"])
    cell = f"real = refused\n{REFUSING}\nassert refused == real, sorted(set(refused) ^ set(real))"
    assert run.dry_run(script_of(cell), names, targets.choose("cuda:0", None)).error is None


def test_where_threads_of_data_parallel_run_side_by_side_nothing_is_certain() -> None:
    names = {"torch": torch}
    cell = "net = torch.nn.DataParallel(torch.nn.Linear(8, 8).cuda())\ny = net(torch.ones(4, 8, device='cuda'))"
    report = run.dry_run(script_of(cell), names, targets.choose("cuda:0", None))
    assert (report.fits, report.certain) == (True, False)
    assert any("threads of DataParallel" in each for each in report.unknown)
