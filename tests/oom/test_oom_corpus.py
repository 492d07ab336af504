"""Advice is good if it works: each cell of `failing_cells/` gets its verdict, and passes once it does as told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import oom_corpus
import pytest
from kernels import environment
from stages import sample, sample_and_all, wanted

CASES = {case.name: case for case in oom_corpus.cases()}
SPREAD = 5
"""Every fifth cell is in the sample."""
VERDICTS = {"shortage", "leftovers", "fragmentation", "other process", "one request", "size bug", "host memory",
            "shared memory"}  # fmt: skip


BY_DEGREES = ("Lower ", "Run net over", "Make the model smaller", "Delete the old")
"""What can be done again: the number is another, or the old value is."""


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Return what came of every case asked for; one process runs them all, as `oom_corpus` says."""
    program = Path(oom_corpus.__file__)
    result = subprocess.run(
        [sys.executable, str(program), *wanted(request, "name")], check=False, capture_output=True, text=True,
        env=environment(tmp_path_factory.mktemp("ipython")), timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", sample(CASES, SPREAD))
def test_a_failing_cell_gets_its_verdict_and_passes_with_the_first_advice(outcomes, name) -> None:
    case, outcome = CASES[name], outcomes[name]
    assert "error" not in outcome, outcome["error"]
    if case.alike == "silent":
        assert not [title for title in outcome["titles"] if title.startswith(case.advice)]
        return
    assert outcome["verdict"] == case.verdict, outcome["sentence"]
    assert outcome["titles"]
    assert outcome["titles"][0].startswith(case.advice), outcome["titles"]
    assert outcome["passes"], f"{outcome['why']}\n{outcome['edit']}"


@pytest.mark.parametrize("name", sample([case.name for case in CASES.values() if case.tight], 4))
def test_the_batch_advised_is_nearly_the_largest(outcomes, name) -> None:
    """It passes, and a tenth more does not, from where the failed cell left the device."""
    assert outcomes[name]["passes with more"] is False


@pytest.mark.parametrize("names", sample_and_all(CASES, SPREAD))
def test_what_was_advised_is_not_advised_again(outcomes, names) -> None:
    """A cell that has the advised change and fails all the same, on a fuller device, is told other things."""
    chosen = {name: outcomes[name] for name in names}
    told_again = {
        name: outcome["again"]
        for name, outcome in chosen.items()
        if without_numbers(outcome["titles"][0]) in map(without_numbers, outcome.get("again", ()))
    }
    assert {name for name in told_again if not CASES[name].advice.startswith(BY_DEGREES)} == set()
    assert sum(len(outcome.get("again", ())) > 0 for outcome in chosen.values()) >= len(chosen) // 5


def without_numbers(title):
    return re.sub(r"\d+", "#", title)


def test_there_is_a_cell_for_every_verdict_and_forty_in_all() -> None:
    failing = [case for case in CASES.values() if case.alike != "silent"]
    assert len(failing) >= 40
    assert {case.verdict for case in failing} == VERDICTS


@pytest.mark.parametrize("names", sample_and_all(CASES, SPREAD))
def test_every_report_fits_a_terminal(outcomes, names) -> None:
    for name in names:
        assert max(map(len, outcomes[name]["text"].splitlines())) <= 80, name
