"""Where what a cell needs depends on values that no dry run knows, it is never said to fit."""

from __future__ import annotations

import pytest
import torch

import gpumagic

pytestmark = pytest.mark.usefixtures("two_devices")


def dry_run(before, cell, **options):
    namespace = {"torch": torch, "F": torch.nn.functional}
    exec(before, namespace)
    return gpumagic.dry_run(cell, namespace, **options)


@pytest.mark.parametrize(
    ("before", "cell"),
    [
        ("x = torch.full((5000,), 39999, device='simgpu:0')",
         "y = torch.zeros(x.max().item(), 512, device='simgpu:0')"),
        ("x = torch.full((5000,), 4e4, device='simgpu:0')", "y = torch.zeros(int(x.max()) // 9, device='simgpu:0')"),
        ("x = torch.full((2000,), 99, device='simgpu:0')",
         "y = [torch.zeros(n, 64, device='simgpu:0') for n in x.tolist()]"),
        ("x = torch.full((2000,), 99, device='simgpu:0')",
         "y = torch.zeros(int(x.cpu().numpy().max()), 64, 99, device='simgpu:0')"),
        ("x = torch.full((2000,), 99, device='simgpu:0')", "y = F.one_hot(x)"),
        ("x = torch.full((2000,), 99, device='simgpu:0')", "y = torch.bincount(x)"),
    ],
)  # fmt: skip
def test_a_size_that_the_device_decides_leaves_the_verdict_open(before, cell) -> None:
    report = dry_run(before, cell)
    assert report.fits is None, report
    stopped = "The dry run stopped on line 1: what aten::bincount returns depends on values"
    assert report.verdict.startswith(("May not fit: it depends on line ", stopped))


def test_a_loop_that_may_not_end_leaves_the_verdict_open_and_nothing_is_said_to_depend_on_it() -> (
    None
):
    before = "x = torch.ones(2000, device='simgpu:0'); kept = []"
    cell = "while x.norm() > 1e-3:\n    x = x * 0.9\n    kept.append(torch.zeros(1 << 16, device='simgpu:0'))"
    report = dry_run(before, cell)
    assert (report.fits, report.complete) == (None, False)
    line = "line 1 (`x.norm() > 1e-3`)"
    assert report.verdict.startswith(
        f"May not fit: with other values of {line} it did not run to the end; it needs "
    )
    assert any(
        f"may depend on values on the device, read in {line}" in each for each in report.unknown
    )


def test_of_a_loop_that_only_values_end_and_that_keeps_nothing_a_few_turns_count() -> None:
    before = "w = torch.zeros(1 << 20, device='simgpu:0')"
    cell = "torch.nn.init.trunc_normal_(w)"  # draws what is out of bounds again
    report = dry_run(before, cell)
    assert (report.fits, report.certain) == (True, False)
    namespace = {"torch": torch}
    exec(before, namespace)
    torch.simgpu.reset_peak_memory_stats()
    exec(cell, namespace)
    assert report.peak["simgpu:0"] == torch.simgpu.max_memory_allocated() >= 4 * (4 << 20)


@pytest.mark.parametrize("first", [True, False])
def test_of_two_branches_the_one_that_needs_more_counts(first) -> None:
    large, small = "y = torch.zeros(1 << 22, device='simgpu:0')", "y = None"
    one, other = (large, small) if first else (small, large)
    cell = f"if x.sum() > 5:\n    {one}\nelse:\n    {other}"
    before = "x = torch.randn(4000, device='simgpu:0')"
    report = dry_run(before, cell)
    assert report.fits
    assert report.devices[0].peak - report.devices[0].before >= 16 << 20
    assert dry_run(before, cell, capacity="10MiB").fits is None


def test_of_two_branches_that_a_number_decides_the_one_that_needs_more_counts() -> None:
    cell = "y = torch.zeros(100 if x.sum().item() > 0.5 else 1 << 20, device='simgpu:0')"
    report = dry_run("x = torch.zeros(4000, device='simgpu:0')", cell)
    assert report.fits
    assert report.devices[0].peak - report.devices[0].before == 4 << 20


def test_checks_that_a_library_makes_one_after_the_other_are_taken_to_hold() -> None:
    cell = """for _ in range(3):
    there = torch.distributions.Normal(x, x.exp())
    z = there.rsample()
    seen = torch.distributions.Bernoulli(logits=z)
    loss = -seen.log_prob(z.round()).sum() - there.log_prob(z).sum()
    print(loss.item())"""
    report = dry_run("x = torch.zeros(1 << 18, device='simgpu:0')", cell)
    assert (report.error, report.fits) == (None, True), report
    assert report.devices[0].peak - report.devices[0].before >= 5 << 20
    assert any(
        "torch.distributions.Normal(x, x.exp())` is taken to be True" in each
        for each in report.assumed
    )


def test_a_mask_is_taken_to_select_everything_which_is_the_most() -> None:
    report = dry_run("x = torch.zeros(1 << 18, 8, device='simgpu:0')", "y = x[x[:, 0] > 0]")
    assert report.fits
    assert report.devices[0].peak - report.devices[0].before >= 8 << 20


@pytest.mark.parametrize(
    "use", ["history.append(loss.item())", "print(f'{loss.item():.3f}')", "import math; history.append(math.exp(loss))",
            "best = min(best, loss.item())", "history.append((x > 0).sum().item() / len(x))"],
)  # fmt: skip
def test_what_is_only_noted_leaves_the_verdict_as_it_is(use) -> None:
    before = "layer = torch.nn.Linear(9, 9).to('simgpu:0'); history, best = [], 1e9"
    cell = f"x = torch.randn(50, 9, device='simgpu:0')\nloss = layer(x).square().mean()\nloss.backward()\n{use}"
    assert dry_run(before, cell).fits


def test_where_only_the_first_outcome_does_not_fit_both_are_told() -> None:
    """The first run takes every comparison to be false."""
    before = "x = torch.rand(9, device='simgpu:0')"
    cell = (
        "if x.norm() > 5:\n    y = None\nelse:\n"
        "    y = torch.empty(180 << 20, dtype=torch.uint8, device='simgpu:0')"
    )
    report = dry_run(before, cell, capacity=100 << 20)
    assert report.fits is None
    assert report.unknown[0].endswith(
        "read in line 1 (`x.norm() > 5`): with some it fits, with others not"
    )
