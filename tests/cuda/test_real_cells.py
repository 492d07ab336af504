"""Dry runs of real_cells/ and user_cells/ against torch's CUDA allocator, which really ran them in another process.

`measure_real_cells.py` does the same for every cell and both engines, and writes real_cells/RESULTS.md. The rest of
these tests runs with `-m deep`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cuda.cell_runs import Runs, cells

pytestmark = pytest.mark.filterwarnings("ignore")

SLOW = {
    "accelerate_accumulates", "compiled_mlp", "diffusers_sampling", "diffusers_unet", "gpt2_generate",
    "lightning_validation", "llama_sampling", "lora_with_checkpointing", "prefetching_thread",
    "trainer_accumulates_in_bf16",
}  # fmt: skip
"""They take seconds, mostly to import their libraries in each dry run."""
CLOSE = (
    "checkpointed_blocks",
    "collects_predictions",
    "keep_the_best",
    "lists_and_cat",
    "model_parallel",
    "wgan_gp",
)
"""Cells whose verdict is asked for just above and just below what they need; of the others with `-m deep`."""
FAKE = ("dqn_replay", "keep_the_best", "lists_and_cat", "streams", "swa")
"""Cells that the other engine dry-runs, too; the others with `-m deep`."""

RUNS = {
    "bert_trainer": 3, "boolean_masks": 3, "collects_predictions": 1, "dcgan": 1, "early_stopping": 4,
    "keep_the_best": 3, "lbfgs_closure": 6, "lightning_fit": 2, "llama_sampling": 4, "mixture_of_experts": 3,
    "packed_lstm": 4, "trainer_evaluates_and_saves": 4, "trainer_made_earlier": 3,
}  # fmt: skip
"""How many runs some of them may take that read values or copy them to the host."""
CUDA_DIFFERS = {
    "compiled_mlp": "where no kernels are cached it tries them out in more memory; equal or not when last seen",
    "per_sample_gradients": "what it really has differs by 71 KiB from run to run when last seen, more so when busy",
}
FAKE_DIFFERS = {
    "compiled_mlp": "torch.compile is refused",
    "data_parallel": "DataParallel is refused",
    "packed_lstm": "cuDNN's LSTM is refused",
}
VERDICT_DIFFERS = {"per_sample_gradients": CUDA_DIFFERS["per_sample_gradients"]}


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as runs:
        yield runs


def _marked(
    names: list[str] | tuple[str, ...], deep: set[str], differ: dict[str, str]
) -> list[Any]:
    """Return the names as parameters: what takes long for the deep stage, what differs expected to."""
    marks = {
        name: [pytest.mark.deep] * (name in deep)
        + [_expected(differ.get(name, ""))] * (name in differ)
        for name in names
    }
    return [pytest.param(name, marks=marks[name]) for name in names]


def _expected(why: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(reason=why, strict="when last seen" not in why)


@pytest.mark.parametrize("name", _marked(list(cells()), SLOW, CUDA_DIFFERS))
def test_on_torchs_own_cuda_the_peak_is_the_allocators_to_the_byte(name: str, runs: Runs) -> None:
    cell = cells()[name]
    told = runs.dry_run(cell)
    real = runs.really_like(told, cell)
    assert told["error"] is None
    assert told["engine"] == "cuda"
    assert (told["peak"], told["reserved"]) == (real["peak"], real["reserved"])
    assert told["runs"] <= RUNS.get(name, told["runs"])


@pytest.mark.parametrize("name", _marked(list(cells()), set(cells()) - set(CLOSE), VERDICT_DIFFERS))
def test_the_verdict_is_right_just_above_and_just_below_what_it_needs(
    name: str, runs: Runs
) -> None:
    cell = cells()[name]
    verdicts = runs.verdicts(cell)
    assert verdicts.real == {"at": True, "above": True, "below": False}
    assert verdicts.told["at"] is not False
    assert verdicts.told["above"] is not False
    assert verdicts.told["below"] is not True
    if verdicts.is_plain:  # else it may be open which line's value it depends on
        assert verdicts.told == verdicts.real


@pytest.mark.parametrize("name", _marked(list(cells()), set(cells()) - set(FAKE), FAKE_DIFFERS))
def test_fake_tensors_are_within_a_hundredth_where_cublas_has_no_workspace(
    name: str, runs: Runs
) -> None:
    cell = cells()[name]
    told = runs.dry_run(cell, "fake", workspaces=False)
    real = runs.really_like(told, cell, workspaces=False, off=0.01)
    assert told["error"] is None
    assert told["engine"] == "fake"
    assert told["peak"] == pytest.approx(real["peak"], rel=0.01)
