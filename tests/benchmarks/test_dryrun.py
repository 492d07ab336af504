"""What a dry run costs, and how near it and others come, in one run each: `pytest -m benchmark -s`, over fakecuda.

    python -m gpumagic.fakecuda --devices 2 -- python -m pytest -m benchmark -s tests/benchmarks/test_dryrun.py

The truth is the same cell really run there, in a process of its own, against torch's CUDA allocator.

On 2026-11-23, 2 cores, torch 2.13: 11.8 us an operator on the CUDA engine, 49.5 us on fake tensors. Over the host
time of a cell 0.43 s in the median of eight. Since numbers note what they decide, a cell that prints what it reads is
run once: dcgan took 1.0 s beside 4.3 s before, in the same hour of a machine that was busy; transformers' Trainer that
logs five steps 12 s in 3 or 4 runs, beside 45 to 61 s in 15. `--fit` took 0.6 to 12 s for ten
cells, and each time what it found ran and 2 % more did not.
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from gpumagic import fakecuda

if not fakecuda.is_enabled():
    pytest.skip("needs torch's CUDA build over the fake runtime", allow_module_level=True)

from cell_runs import MIB, Cell, Runs, cells

pytestmark = pytest.mark.benchmark

LOOP = "x = torch.ones(64, device='cuda')\nfor _ in range({}):\n    y = (x + 1).relu()\n"
"""An iteration has two operators."""
BESIDE = ("wgan_gp", "gpt2_training", "timm_resnet", "vit_bf16_schedule", "packed_lstm", "dcgan", "swa", "streams")
HOST = {".cuda(non_blocking=True)": "", ".cuda()": "", '.to("cuda")': "", '"cuda"': '"cpu"'}
ON_CPU = ("gpt2_training", "timm_resnet", "vit_bf16_schedule", "wgan_gp", "dcgan", "moco_queue")
FITTED = {
    # the cell, what is its batch, how that is written with the variable, and its value
    "bert_varying_lengths": ("(16, length)", "(batch, length)", "randint(0, 2, (16,))", "randint(0, 2, (batch,))", 16),
    "gpt2_training": ("(4, 64)", "(batch, 64)", "", "", 4),
    "vit_bf16_schedule": ("randn(16,", "randn(batch,", "100, (16,)", "100, (batch,)", 16),
    "timm_model_ema": ("randn(8,", "randn(batch,", "10, (8,)", "10, (batch,)", 8),
    "checkpointed_blocks": ("randn(512,", "randn(batch,", "", "", 512),
    "wgan_gp": ("randn(256, 784", "randn(batch, 784", "(256, ", "(batch, ", 256),
    "curriculum": ("(16, length", "(batch, length", "", "", 16),
    "ema_by_deepcopy": ("randn(16,", "randn(batch,", "", "", 16),
    "growing_cat": ("randn(128,", "randn(batch,", "", "", 128),
    "distillation": ("randn(16,", "randn(batch,", "", "", 16),
}
ROOM = 300 * MIB


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as runs:
        yield runs


def fitted(name: str, batch: int | None = None) -> Cell:
    """Return a cell of which the batch is a number at its top."""
    cell, (old, new, other, another, usual) = cells()[name], FITTED[name]
    code = cell.code or cell.setup
    changed = code.replace(old, new)
    changed = changed.replace(other, another) if other else changed
    assert changed != code
    setup = cell.setup if cell.code else ""
    return cell._replace(setup=setup, code=f"batch = {batch or usual}\n{changed}")


@pytest.mark.parametrize(("engine", "bar"), [("cuda", 20), ("fake", 100)])
def test_an_operator_costs_microseconds(engine: str, bar: float, runs: Runs) -> None:
    """Twice as many operators take that much longer; the least of some rounds."""
    few, many = (Cell("loop", "import torch", LOOP.format(count)) for count in (2_000, 12_000))
    runs.dry_run(few, engine)
    rounds = [(runs.dry_run(few, engine), runs.dry_run(many, engine)) for _ in range(4)]
    ours = min(more["seconds"] - less["seconds"] for less, more in rounds) / 20_000
    bare = min(runs.really(many)["seconds"] - runs.really(few)["seconds"] for _ in range(4)) / 20_000
    print(f"\n{engine}: {1e6 * ours:.1f} us an operator, {1e6 * bare:.1f} us in the cell itself on fakecuda")
    assert 1e6 * ours < bar


def test_a_dry_run_on_cuda_takes_little_more_than_the_cells_own_host_time(runs: Runs) -> None:
    over = []
    for name in BESIDE:
        told, real = _least(runs, name, "cuda"), min(runs.really(cells()[name])["seconds"] for _ in range(3))
        over.append(told - real)
        print(f"\n{name}: {told:.2f} s, the cell itself {real:.2f} s", end="")
    print(f"\nmedian {statistics.median(over):.2f} s over it, at most {max(over):.2f} (bar 1 s)")
    assert max(over) < 1


def test_fake_tensors_beside_the_cell_on_the_cpu(runs: Runs) -> None:
    for name in ON_CPU:
        cell = cells()[name]
        host = cell._replace(setup=_on_host(cell.setup), code=_on_host(cell.code))
        told, real = _least(runs, name, "fake"), min(runs.really(host)["seconds"] for _ in range(2))
        print(f"\n{name}: {told:.2f} s, on the CPU {real:.2f} s ({told / real:.2f}x)", end="")


def test_the_largest_batch_is_found_in_few_runs_and_is_right(runs: Runs) -> None:
    for name in FITTED:
        told = runs.dry_run(fitted(name), options={"fit": "batch"}, capacities={0: ROOM})
        assert told.get("largest"), (name, told)
        most, count = told["largest"], len(told["trials"])
        more = min(value for value, fits in told["trials"] if not fits)  # beyond, free pieces may fall better again
        assert more <= max(most + 1, math.ceil(most * 1.02))
        answers = [all(runs.really(fitted(name, each), {0: ROOM})["fits"]) for each in (most, more)]
        print(f"\n{name}: {most} in {count} runs and {told['seconds']:.1f} s; it, and {more}, {answers}", end="")
        assert answers == [True, False]


PEERS = ("gpt2_training", "vit_bf16_schedule", "timm_model_ema", "ema_by_deepcopy", "bert_varying_lengths")
TRACKER = """
from torch.distributed._tools.mem_tracker import MemTracker
tracker = MemTracker()
tracker.track_external(model, optimizer)
with tracker:
{}
answer = tracker.get_tracker_snapshot("peak")[torch.device("cuda:0")]["Total"]
"""
ESTIMATE = """
from accelerate.utils import calculate_maximum_sizes
answer = calculate_maximum_sizes(model)[0] * 4
"""
"""As `accelerate estimate-memory` says of training with Adam; it takes models of the hub, by name."""


@pytest.mark.parametrize("name", PEERS)
def test_beside_other_estimates_of_the_peak(name: str, runs: Runs) -> None:
    cell = cells()[name]
    setup, code = (cell.setup, cell.code) if cell.setup else cell.code.split("\nmodel.train()\n")
    # It takes one iteration at a time: its own advice is to reset it in between.
    indented = re.sub(
        r"(?m)^( *)(for .*:)$", r"\1\2\n\1    tracker.reset_mod_stats()", textwrap.indent(code, "    "), count=1
    )
    real = runs.really(cell)
    peak = real["peak"][0]
    told = runs.dry_run(cell)
    fake = runs.dry_run(cell, "fake")
    tracked = runs.really(Cell(name, setup, TRACKER.format(indented)))
    estimated = runs.really(Cell(name, setup, ESTIMATE))
    figures = {
        "dry run, CUDA": (told["peak"][0], told["seconds"]),
        "dry run, fake tensors": (fake["peak"][0], fake["seconds"]),
        "MemTracker": (tracked.get("answer"), tracked.get("seconds")),
        "accelerate's estimate": (estimated.get("answer"), estimated.get("seconds")),
    }  # fmt: skip
    print(f"\n{name}: {peak / MIB:.1f} MiB in {real['seconds']:.2f} s")
    for tool, (figure, seconds) in figures.items():
        print(f"    {tool}: {_error(figure, peak)}" + (f" in {seconds:.2f} s" if seconds else ""))
    print("   ", tracked.get("failed", ""), estimated.get("failed", ""))
    assert told["peak"] == real["peak"]


FINDER = """
from accelerate.utils import find_executable_batch_size
calls = []
@find_executable_batch_size(starting_batch_size=4096)
def run(batch):
    calls.append(batch)
    names = dict(globals())
    import copy
    names["model"] = copy.deepcopy(model)
    exec(CODE, names)
run()
answer = [calls[-1], len(calls)]
"""
LIGHTNING = """
import torch
import lightning as L
from lightning.pytorch.tuner import Tuner

class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 2
        self.net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA), batch_size=self.batch_size)

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

DATA = torch.zeros(65536, 512)
trainer = L.Trainer(accelerator="gpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
"""
LIGHTNING_STEP = "model = Regressor()\nmodel.batch_size = batch\ntrainer.fit(model)\n"
LIGHTNING_FINDER = """
model = Regressor()
answer = Tuner(trainer).scale_batch_size(model, mode="binsearch", steps_per_trial=2, max_trials=40)
"""


def test_beside_accelerates_search_for_a_batch_size(runs: Runs) -> None:
    for name in ("ema_by_deepcopy", "growing_cat", "curriculum", "checkpointed_blocks"):
        cell = fitted(name)
        told = runs.dry_run(cell, options={"fit": "batch"}, capacities={0: ROOM})
        body = "\n".join(cell.code.splitlines()[1:])
        setup = cell.setup + "\nmodel = globals().get('model')\n"
        found = runs.really(
            Cell(
                name,
                setup,
                f"CODE = {body!r}\n"
                + FINDER.replace("names = dict(globals())", "names = {**globals(), 'batch': batch}"),
            ),
            {0: ROOM},
        )
        print(
            f"\n{name}: ours {told['largest']} in {told['seconds']:.1f} s; accelerate's {found.get('answer')} in "
            f"{found.get('seconds', 0):.1f} s {found.get('failed', '')}",
            end="",
        )


def test_beside_lightnings_search_for_a_batch_size(runs: Runs) -> None:
    def right(batch: int) -> bool:
        return all(runs.really(Cell("l", LIGHTNING, f"batch = {batch}\n{LIGHTNING_STEP}"), {0: ROOM})["fits"])

    told = runs.dry_run(
        Cell("l", LIGHTNING, "batch = 2\n" + LIGHTNING_STEP), options={"fit": "batch"}, capacities={0: ROOM}
    )
    found = runs.really(Cell("l", LIGHTNING, LIGHTNING_FINDER), {0: ROOM})
    print(
        f"\nours {told['largest']} in {told['seconds']:.1f} s; Lightning's {found.get('answer')} in "
        f"{found.get('seconds', 0):.1f} s {found.get('failed', '')}"
    )
    for tool, answer in {"ours": told["largest"], "Lightning's": found.get("answer")}.items():
        if answer:
            print(f"    {tool}: fits {right(answer)}, 2 % more {right(math.ceil(answer * 1.02))}")


def _least(runs: Runs, name: str, engine: str) -> float:
    runs.dry_run(cells()[name], engine)
    return min(runs.dry_run(cells()[name], engine)["seconds"] for _ in range(3))


def _on_host(code: str) -> str:
    for there, here in HOST.items():
        code = code.replace(there, here)
    return code


def _error(figure: Any, peak: int) -> str:
    return "no figure" if figure is None else f"{figure / MIB:.1f} MiB ({figure / peak - 1:+.1%})"
