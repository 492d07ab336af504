"""Dry runs of real_cells/ against torch's CUDA allocator, which really ran them in a process of its own.

`measure_real_cells.py` does the same for every cell and both engines, and writes real_cells/RESULTS.md; those of
user_cells/ are in `test_user_cells.py` too. The rest of these tests runs with `-m deep`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cell_runs import Runs, cells

pytestmark = pytest.mark.filterwarnings("ignore")

SLOW = {
    "accelerate_accumulates", "compiled_mlp", "diffusers_sampling", "diffusers_unet", "gpt2_generate",
    "lightning_validation", "llama_sampling", "lora_with_checkpointing", "prefetching_thread",
    "trainer_accumulates_in_bf16",
}  # fmt: skip
"""They take seconds, mostly to import their libraries in each dry run."""
OURS = [name for name, cell in cells().items() if cell.is_ours]
CLOSE = ("checkpointed_blocks", "collects_predictions", "keep_the_best", "lists_and_cat", "model_parallel", "wgan_gp")
"""Cells whose verdict is asked for just above and just below what they need; of the others with `-m deep`."""
FAKE = ("dqn_replay", "keep_the_best", "lists_and_cat", "streams", "swa")
"""Cells that the other engine dry-runs, too; the others with `-m deep`."""

CUDA_DIFFERS = {
    "bert_varying_lengths": "2 MiB more reserved where values are followed",
    "compiled_mlp": "it compiles with no cache of kernels, and tries them out in more memory",
    "lora_with_checkpointing": "0.5 % short where values are followed",
    "packed_lstm": "2 MiB more reserved where values are followed",
    "per_sample_gradients": "vmap of grad compiles: equal or not when last seen",
}
FAKE_DIFFERS = {
    "bert_trainer": "2.6 % short on the second device of DataParallel",
    "bert_varying_lengths": "2.9 % too much",
    "compiled_mlp": "torch.compile is refused",
    "optimizers_compared": "40 % too much when last seen: Rprop",
    "packed_lstm": "cuDNN's LSTM is refused",
    "per_sample_gradients": "1.5 % short when last seen",
}
VERDICT_DIFFERS = {name: why for name, why in CUDA_DIFFERS.items() if name != "compiled_mlp"}


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as runs:
        yield runs


def _marked(names: list[str] | tuple[str, ...], deep: set[str], differ: dict[str, str]) -> list[Any]:
    """Return the names as parameters: what takes long for the deep stage, what differs expected to."""
    marks = {
        name: [pytest.mark.deep] * (name in deep) + [_expected(differ.get(name, ""))] * (name in differ)
        for name in names
    }
    return [pytest.param(name, marks=marks[name]) for name in names]


def _expected(why: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(reason=why, strict="when last seen" not in why)


@pytest.mark.parametrize("name", _marked(OURS, SLOW, CUDA_DIFFERS))
def test_on_torchs_own_cuda_the_peak_is_the_allocators_to_the_byte(name: str, runs: Runs) -> None:
    cell = cells()[name]
    told, real = runs.dry_run(cell), runs.really(cell)
    assert told["error"] is None
    assert told["engine"] == "cuda"
    assert (told["peak"], told["reserved"]) == (real["peak"], real["reserved"])


@pytest.mark.parametrize("name", _marked(list(cells()), set(cells()) - set(CLOSE), VERDICT_DIFFERS))
def test_the_verdict_is_right_just_above_and_just_below_what_it_needs(name: str, runs: Runs) -> None:
    cell = cells()[name]
    verdicts = runs.verdicts(cell)
    assert verdicts.real == {"at": True, "above": True, "below": False}
    assert verdicts.told["at"] is not False
    assert verdicts.told["above"] is not False
    assert verdicts.told["below"] is not True
    if verdicts.is_plain:  # else it may be open on which line's value it hangs
        assert verdicts.told == verdicts.real


@pytest.mark.parametrize("name", _marked(list(cells()), set(cells()) - set(FAKE), FAKE_DIFFERS))
def test_fake_tensors_are_within_a_hundredth_where_cublas_has_no_workspace(name: str, runs: Runs) -> None:
    cell = cells()[name]
    told, real = runs.dry_run(cell, "fake", workspaces=False), runs.really(cell, workspaces=False)
    assert told["error"] is None
    assert told["engine"] == "fake"
    assert told["peak"] == pytest.approx(real["peak"], rel=0.01)
