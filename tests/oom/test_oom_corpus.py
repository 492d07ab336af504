"""Advice is good if it works: each cell of `failing_cells/` gets its verdict, and passes once it does as told."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.kernels import environment
from tests.oom import oom_corpus
from tests.stages import IS_WHOLE, sample, sample_and_all, wanted

pytestmark = pytest.mark.usefixtures("few_objects")

CASES = {case.name: case for case in oom_corpus.cases()}
STEPS = {
    "a smaller batch": ("Lower", "batch_literal", "adam_state"),
    "a smaller model": ("Make the model smaller", "model_too_deep", "parameters_in_half"),
    "deletion and an empty cache": ("Delete", "leftovers", "alike_used_by_a_function"),
    "mixed precision": (
        "Compute the forward pass in bfloat16",
        "mixed_precision",
        "alike_autocast_on",
    ),
    "several GPUs": ("Run the cell on", "other_device", "teacher"),
    "checkpointing": ("Recompute activations", "checkpoint_blocks", "alike_checkpoint_on"),
    "a larger GPU": ("Use a larger GPU", "larger_gpu", "batch_literal"),
}
"""The steps of the usual guide: how advice of each begins, a cell where it is the best, and one where it is not."""
OF_STEPS = {name for _, best, other in STEPS.values() for name in (best, other)}
RUN = {
    case: each
    for number, (case, each) in enumerate(CASES.items())
    if IS_WHOLE or case in OF_STEPS or number % 8 == 0
}
"""Those, and an eighth of the cells where not all are asked for: each suggestion is followed, for seconds."""
SPREAD = 16
"""Every sixteenth of them is in the sample."""
VERDICTS = {"shortage", "leftovers", "fragmentation", "other process", "one request", "size bug", "host memory",
            "shared memory"}  # fmt: skip


BY_DEGREES = ("Lower ", "Compute line", "Make the model smaller", "Delete the old")
"""What can be done again: the number is another, or the old value is."""


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Return what came of every case asked for; one process runs them all, as `oom_corpus` says."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.oom.oom_corpus", *wanted(request, "name")],
        check=False, capture_output=True, text=True,
        env=environment(tmp_path_factory.mktemp("ipython")), timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", sample(RUN, SPREAD))
def test_a_failing_cell_gets_its_verdict_and_passes_with_the_first_advice(outcomes, name) -> None:
    case, outcome = CASES[name], outcomes[name]
    assert "error" not in outcome, outcome["error"]
    if case.alike == "silent":
        assert not [title for title in outcome["titles"] if title.startswith(case.advice)]
        return
    assert outcome["verdict"] == case.verdict, outcome["sentence"]
    assert outcome["titles"]
    assert outcome["titles"][0].startswith(case.advice), outcome["titles"]
    if case.alike == "told":
        return
    assert outcome["passes"], f"{outcome['why']}\n{outcome['edit']}"


@pytest.mark.deep
@pytest.mark.parametrize("names", [each[1:] for each in STEPS.values()], ids=list(STEPS))
def test_each_step_of_the_usual_guide_is_first_where_it_is_best_and_not_elsewhere(
    outcomes, names
) -> None:
    title = next(title for title, *cells in STEPS.values() if tuple(cells) == tuple(names))
    best, other = (outcomes[name]["titles"][0] for name in names)
    assert best.startswith(title)
    assert not other.startswith(title)


@pytest.mark.parametrize("names", sample_and_all(RUN, SPREAD))
def test_what_is_said_to_fit_passes_and_what_does_not_fit_alone_fails(outcomes, names) -> None:
    """Each suggestion with a verdict is followed in a notebook of its own."""
    assert {name: found for name in names if (found := outcomes[name].get("untrue"))} == {}


@pytest.mark.parametrize("names", sample_and_all(RUN, SPREAD))
def test_the_figures_of_a_report_add_up(outcomes, names) -> None:
    assert {name: found for name in names if (found := outcomes[name].get("contradictions"))} == {}


@pytest.mark.parametrize("name", sample([case.name for case in RUN.values() if case.tight], 8))
def test_the_batch_advised_is_nearly_the_largest(outcomes, name) -> None:
    """It passes, and a tenth more does not, from where the failed cell left the device."""
    assert outcomes[name]["passes with more"] is False


@pytest.mark.parametrize("names", sample_and_all(RUN, SPREAD))
def test_what_was_advised_is_not_advised_again(outcomes, names) -> None:
    """A cell that has the advised change and fails all the same, on a fuller device, is told other things."""
    chosen = {name: outcomes[name] for name in names}
    told_again = {
        name: outcome["again"]
        for name, outcome in chosen.items()
        if outcome["titles"]
        and without_numbers(outcome["titles"][0]) in map(without_numbers, outcome.get("again", ()))
    }
    assert {name for name in told_again if not CASES[name].advice.startswith(BY_DEGREES)} == set()
    assert sum(len(outcome.get("again", ())) > 0 for outcome in chosen.values()) >= len(chosen) // 5


def without_numbers(title):
    return re.sub(r"\d+", "#", title)


def test_there_is_a_cell_for_every_verdict_and_forty_in_all() -> None:
    failing = [case for case in CASES.values() if case.alike != "silent"]
    assert len(failing) >= 40
    assert {case.verdict for case in failing} == VERDICTS


@pytest.mark.parametrize("names", sample_and_all(RUN, SPREAD))
def test_every_report_fits_a_terminal(outcomes, names) -> None:
    for name in names:
        assert max(map(len, outcomes[name]["text"].splitlines())) <= 80, name
