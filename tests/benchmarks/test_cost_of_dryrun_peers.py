r"""Dry runs beside what else says how much memory a cell needs, or how large a batch fits; over fakecuda.

    python -m gpumagic.fakecuda --devices 2 -- \
        python -m pytest -m benchmark -s tests/benchmarks/test_cost_of_dryrun_peers.py

prints the rows of `PEERS.md`. The truth is the same cell really run there, in a process of its own, against torch's
CUDA allocator; so are the tools that run it. Everything has had its first run before.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpumagic import fakecuda

if not fakecuda.is_enabled():
    pytest.skip("needs torch's CUDA build over the fake runtime", allow_module_level=True)

from tests.cuda.cell_runs import MIB, Cell, Runs, cells
from tests.cuda.fitted_cells import ROOM, fitted

pytestmark = pytest.mark.benchmark

PEERS = (
    "gpt2_training",
    "vit_bf16_schedule",
    "timm_model_ema",
    "ema_by_deepcopy",
    "bert_varying_lengths",
)
TRACKER = """
from torch.distributed._tools.mem_tracker import MemTracker
tracker = MemTracker()
tracker.track_external(model, optimizer)
with tracker:
{}
answer = tracker.get_tracker_snapshot("peak")[torch.device("cuda:0")]["Total"]
"""
ESTIMATE = """
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
answer = max(estimate_training_usage(calculate_maximum_sizes(model)[0], "float32").values())
"""
"""What `accelerate estimate-memory` prints of training with Adam; the command takes models of the hub, by name."""


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as runs:
        yield runs


@pytest.mark.parametrize("name", PEERS)
def test_beside_other_estimates_of_the_peak(name: str, runs: Runs) -> None:
    cell = cells()[name]
    setup, code = (cell.setup, cell.code) if cell.setup else cell.code.split("\nmodel.train()\n")
    # MemTracker takes one iteration at a time: its own advice is to reset it in between.
    indented = re.sub(
        r"(?m)^( *)(for .*:)$",
        r"\1\2\n\1    tracker.reset_mod_stats()",
        textwrap.indent(code, "    "),
        count=1,
    )
    real, told = _second(runs.really, cell), _second(runs.dry_run, cell)
    # The others do not know cuBLAS's workspaces; the dry run on fake tensors says that it does not.
    without = runs.really(cell, workspaces=False)["peak"][0]
    fake = _second(runs.dry_run, cell, "fake", workspaces=False)
    tools = [
        _second(runs.really, Cell(name, setup, each))
        for each in (TRACKER.format(indented), ESTIMATE)
    ]
    found = [(told["peak"][0], real["peak"][0], told), (fake["peak"][0], without, fake)]
    found += [(each.get("answer"), without, each) for each in tools]
    figures = [
        "no figure" if figure is None else f"{figure / peak - 1:+.1%}, {each['seconds']:.2f} s"
        for figure, peak, each in found
    ]
    peaks = f"{real['peak'][0] / MIB:.1f} | {without / MIB:.1f} | {real['seconds']:.2f}"
    print(f"\n| {name} | {peaks} | {' | '.join(figures)} |")
    assert told["peak"] == real["peak"]


FINDER = """
from accelerate.utils import find_executable_batch_size
calls = []
@find_executable_batch_size(starting_batch_size={start})
def run(batch):
    calls.append(batch)
    names = {{**globals(), "batch": batch}}
    import copy
    names["model"] = copy.deepcopy(names.get("model"))
    exec({code!r}, names)
run()
answer = [calls[-1], len(calls)]
"""
STARTS = {
    "ema_by_deepcopy": 8192,
    "growing_cat": 8192,
    "curriculum": 1024,
    "checkpointed_blocks": 16384,
}
"""Where accelerate's search starts, which goes down by a tenth: more than fits, as who does not know would give."""


@pytest.mark.parametrize("name", STARTS)
def test_beside_accelerates_search_for_a_batch_size(name: str, runs: Runs) -> None:
    cell = fitted(name)
    finder = FINDER.format(start=STARTS[name], code=cell.code.partition("\n")[2])
    _compare(runs, name, cell, Cell(name, cell.setup, finder), lambda batch: fitted(name, batch))


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
LIGHTNING_STEP = "batch = {}\nmodel = Regressor()\nmodel.batch_size = batch\ntrainer.fit(model)\n"
LIGHTNING_FINDER = """
sizes = set()
class Counted(Regressor):
    def training_step(self, *args):
        sizes.add(self.batch_size)
        return super().training_step(*args)
model = Counted()
answer = [Tuner(trainer).scale_batch_size(model, mode="{mode}", steps_per_trial=2, max_trials=40), len(sizes)]
"""


@pytest.mark.parametrize("mode", ["binsearch", "power"])
def test_beside_lightnings_search_for_a_batch_size(mode: str, runs: Runs) -> None:
    def step(batch: int) -> Cell:
        return Cell("lightning", LIGHTNING, LIGHTNING_STEP.format(batch))

    finder = Cell("lightning", LIGHTNING, LIGHTNING_FINDER.format(mode=mode))
    _compare(runs, f"lightning, {mode}", step(2), finder, step)


TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000, n_positions=64)
rows = [{"input_ids": torch.ones(64, dtype=torch.long), "labels": torch.ones(64, dtype=torch.long)}] * 4096
sizes = []
class Counted(Trainer):
    def _inner_training_loop(self, batch_size=None, **kwargs):
        sizes.append(batch_size)
        return super()._inner_training_loop(batch_size=batch_size, **kwargs)
"""
TRAINER_STEP = """
args = TrainingArguments("out", per_device_train_batch_size=batch, max_steps=3, report_to=[], save_strategy="no",
                         logging_strategy="no", auto_find_batch_size={finds}, disable_tqdm=True)
args._n_gpu = 1
trainer = Counted(GPT2LMHeadModel(config), args, train_dataset=rows)
trainer.train()
answer = [sizes[-1], len(sizes)]
"""


def test_beside_transformers_search_for_a_batch_size(runs: Runs) -> None:
    def step(batch: int, finds: bool = False) -> Cell:
        return Cell("trainer", TRAINER, f"batch = {batch}" + TRAINER_STEP.format(finds=finds))

    _compare(runs, "Trainer", step(8), step(1024, finds=True), step)


def _compare(
    runs: Runs, name: str, cell: Cell, finder: Cell, with_batch: Callable[[int], Cell]
) -> None:
    """Print what each finds, in so many tries and seconds, and whether it, and 2 % more, really fits."""
    capacities = {0: ROOM}
    rows = []
    # On fake tensors a stated capacity is what torch may have: else CUDA's context might take all of so little.
    for engine, more in (("cuda", {}), ("fake", {"capacity": ROOM})):
        told = _second(
            runs.dry_run, cell, engine, options={"fit": "batch", **more}, capacities=capacities
        )
        rows.append((told.get("largest"), len(told.get("trials", ())), told))
    found = _second(runs.really, finder, capacities)
    rows.append((*(found.get("answer") or (None, 0)), found))
    told = []
    for most, tries, each in rows:
        if most is None:
            told.append(
                f"no answer, {each.get('seconds', 0):.1f} s {each.get('failed') or each.get('error') or ''}"
            )
            continue
        fits, more = (
            all(runs.really(with_batch(batch), capacities)["fits"])
            for batch in (most, most + max(1, most // 50))
        )
        right = "" if fits and not more else ": 2 % more fits" if fits else ": does not fit"
        told.append(f"{most:,}{right}, {tries} tries, {each['seconds']:.1f} s")
    print(f"\n| {name} | {' | '.join(told)} |")


def _second(ask: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the second answer: what a process imports for the first time counts for nobody."""
    ask(*args, **kwargs)
    return ask(*args, **kwargs)
