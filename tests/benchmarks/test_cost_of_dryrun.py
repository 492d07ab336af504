"""What a dry run costs over fakecuda; `test_cost_of_dryrun_peers.py` has other tools beside it.

    python -m gpumagic.fakecuda --devices 2 -- python -m pytest -m benchmark -s tests/benchmarks/test_cost_of_dryrun.py

The truth is the same cell really run there, in a process of its own, against torch's CUDA allocator.

On 2026-11-23, 2 cores, torch 2.13: 11.8 us an operator on the CUDA engine, 49.5 us on fake tensors. Over the host
time of a cell 0.43 s in the median of eight. Since numbers note what they decide, a cell that prints what it reads is
run once: dcgan took 1.0 s beside 4.3 s before, in the same hour of a machine that was busy; transformers' Trainer that
logs five steps 12 s in 3 or 4 runs, beside 45 to 61 s in 15. `--fit` took 0.6 to 12 s for ten
cells, and each time what it found ran and 2 % more did not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs CUDA, of a GPU or over the fake runtime", allow_module_level=True)

from tests.cuda.cell_runs import Cell, Runs, cells
from tests.cuda.fitted_cells import FITTED, ROOM, fitted

pytestmark = pytest.mark.benchmark

LOOP = "x = torch.ones(64, device='cuda')\nfor _ in range({}):\n    y = (x + 1).relu()\n"
"""An iteration has two operators."""
BESIDE = (
    "wgan_gp",
    "gpt2_training",
    "timm_resnet",
    "vit_bf16_schedule",
    "packed_lstm",
    "dcgan",
    "swa",
    "streams",
)
HOST = {".cuda(non_blocking=True)": "", ".cuda()": "", '.to("cuda")': "", '"cuda"': '"cpu"'}
ON_CPU = ("gpt2_training", "timm_resnet", "vit_bf16_schedule", "wgan_gp", "dcgan", "moco_queue")


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as runs:
        yield runs


@pytest.mark.parametrize(("engine", "bar"), [("cuda", 20), ("fake", 100)])
def test_an_operator_costs_microseconds(engine: str, bar: float, runs: Runs) -> None:
    """Twice as many operators take that much longer; the least of some rounds."""
    few, many = (Cell("loop", "import torch", LOOP.format(count)) for count in (2_000, 12_000))
    runs.dry_run(few, engine)
    rounds = [(runs.dry_run(few, engine), runs.dry_run(many, engine)) for _ in range(4)]
    ours = min(more["seconds"] - less["seconds"] for less, more in rounds) / 20_000
    bare = (
        min(runs.really(many)["seconds"] - runs.really(few)["seconds"] for _ in range(4)) / 20_000
    )
    print(
        f"\n{engine}: {1e6 * ours:.1f} us an operator, {1e6 * bare:.1f} us in the cell itself on fakecuda"
    )
    assert 1e6 * ours < bar


def test_a_dry_run_on_cuda_takes_little_more_than_the_cells_own_host_time(runs: Runs) -> None:
    over = []
    for name in BESIDE:
        told, real = (
            _least(runs, name, "cuda"),
            min(runs.really(cells()[name])["seconds"] for _ in range(3)),
        )
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
        more = min(
            value for value, fits in told["trials"] if not fits
        )  # beyond, free pieces may fall better again
        assert more <= max(most + 1, math.ceil(most * 1.02))
        answers = [all(runs.really(fitted(name, each), {0: ROOM})["fits"]) for each in (most, more)]
        print(
            f"\n{name}: {most} in {count} runs and {told['seconds']:.1f} s; it, and {more}, {answers}",
            end="",
        )
        assert answers == [True, False]


def _least(runs: Runs, name: str, engine: str) -> float:
    runs.dry_run(cells()[name], engine)
    return min(runs.dry_run(cells()[name], engine)["seconds"] for _ in range(3))


def _on_host(code: str) -> str:
    for there, here in HOST.items():
        code = code.replace(there, here)
    return code
