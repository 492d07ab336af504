"""A dry run's memory over the cell by what it is, against the simulated device's counter and sums made by hand."""

from __future__ import annotations

import gc
import re

import pytest
import torch

import gpumagic
from gpumagic.memory.ledger import MOST_POINTS, timeline
from gpumagic.report.base import to_html, to_text

pytestmark = pytest.mark.usefixtures("two_devices")

MIB = 1024**2
SETUP = """
import torch
model = torch.nn.Linear(512, 512, bias=False, device="simgpu:0")
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
x = torch.randn(1024, 512, device="simgpu:0")
"""
LINES = [
    "hidden = model(x)",
    "loss = hidden.square().sum()",
    "loss.backward()",
    "optimizer.step()",
    "loss = hidden = torch.zeros(1, device='simgpu:0')",
    "extra = torch.empty(3 * 2**20, dtype=torch.uint8, device='simgpu:1')",
]
WEIGHT, HIDDEN = MIB, 2 * MIB


@pytest.fixture
def names():
    """Return a notebook with a model of 1 MiB, not yet trained, and a batch of 2 MiB."""
    namespace = {"__name__": "__main__"}
    exec(SETUP, namespace)
    yield namespace
    namespace.clear()
    gc.collect()


def test_after_each_line_the_parts_add_up_to_what_the_device_then_has(names) -> None:
    report = gpumagic.dry_run("\n".join(LINES), names)
    for number, line in enumerate(LINES, start=1):
        exec(line, names)
        for index in range(2):
            found = [
                point for point in report.timeline
                if point.device == f"simgpu:{index}" and (point.line is None or point.line <= number)
            ]  # fmt: skip
            assert found[-1].allocated == torch.simgpu.memory_allocated(index), line
    assert all(sum(point.parts.values()) == point.allocated for point in report.timeline)


def test_what_graphs_keep_is_activations_also_where_no_backward_pass_came(names) -> None:
    """Each pass keeps the hidden layer, which `square` saved; the batch that the layer saved came from before."""
    report = gpumagic.dry_run("losses = [model(x).square().sum() for _ in range(4)]", names)
    assert report.breakdown["activations"] == 4 * HIDDEN


def test_each_part_has_the_bytes_that_it_has_by_hand(names) -> None:
    """Weights of 1 MiB; a gradient and a momentum of as much each; two activations of 2 MiB that backward needs."""
    report = gpumagic.dry_run("\n".join(LINES), names)
    last = {point.line: point.parts for point in report.timeline if point.device == "simgpu:0"}

    def parts(line: str) -> list[int]:
        found = last[LINES.index(line) + 1]
        return [found.get(part, 0) for part in ("parameters", "gradients", "optimizer state")]

    assert parts("hidden = model(x)") == [WEIGHT, 0, 0]
    assert parts("loss.backward()") == [WEIGHT, WEIGHT, 0]
    assert parts("optimizer.step()") == [WEIGHT, WEIGHT, WEIGHT]
    assert last[1]["activations"] == HIDDEN
    freed = gpumagic.dry_run("\n".join([*LINES, "optimizer.zero_grad()"]), names).timeline
    assert "gradients" not in [point for point in freed if point.device == "simgpu:0"][-1].parts


def test_the_highest_point_is_the_peak_with_its_parts(names) -> None:
    report = gpumagic.dry_run("\n".join(LINES), names)
    highest = max(
        (each for each in report.timeline if each.device == report.device),
        key=lambda each: each.allocated,
    )
    assert highest.allocated == report.peak[report.device]
    assert highest.parts == report.breakdown
    assert highest.line == report.line


def test_the_course_begins_with_the_cell_and_not_with_what_was_there(names) -> None:
    before = torch.simgpu.memory_allocated(0)
    report = gpumagic.dry_run("y = x + 1", names)
    first = next(point for point in report.timeline if point.device == "simgpu:0")
    assert (first.operator, first.line, first.allocated) == (0, None, before)


def test_a_device_with_little_is_not_thinned_away_by_one_with_much() -> None:
    """Of thousands of changes some hundred points a device are told, the highest and the last among them."""
    from gpumagic.worker.fake.allocator import Allocator, FakeAccount, FakeLedger

    ledger = FakeLedger(
        [FakeAccount(allocator=Allocator(None, cuts_to_size=True)) for _ in range(2)]
    )
    ledger.start()
    for key in range(3000):
        ledger.take(key, 0, 512)
    for key in range(2999):
        ledger.give_back(key)
    ledger.take(3000, 1, 512)
    points = timeline(ledger)
    assert len(points) <= 2 * (MOST_POINTS + 2)
    assert max(held for device, _, _, held, _ in points if device == 0) == 3000 * 512
    assert [held for device, _, _, held, _ in points if device == 0][-1] == 512
    assert [held for device, _, _, held, _ in points if device == 1] == [0, 512]


def test_the_report_shows_each_part_that_changes_and_marks_the_peak_with_its_line(names) -> None:
    report = gpumagic.dry_run("\n".join(LINES), names)
    shown = to_text(report, 80)
    rows = [line.split("  ")[0] for line in shown.partition("operators")[2].splitlines()]
    assert {"activations", "gradients", "optimizer state"} <= set(rows)
    assert "parameters" not in rows, "a flat line says nothing"
    assert f"line {report.line}" in next(line for line in shown.splitlines() if "↑" in line)
    legend = "earlier cells, parameters, optimizer state, gradients, activations, temporaries."
    assert f"From the bottom: {legend}" in re.sub("<[^>]*>", "", to_html(report))
