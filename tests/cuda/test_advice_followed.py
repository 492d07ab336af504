"""Suggestions that are followed over the fake runtime: of trainers of libraries, and where gaps decide what fits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def followed(cell: str) -> tuple[str, str, int, str]:
    """Return the first suggestion, what is said of it, how many are said to fit, and what of all that was not so."""
    paths = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.cuda.oom_corpus_followed", cell], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    _, _, title, said, fit, wrong, _ = ran.stdout.splitlines()[-1].split("|")
    return title.strip(), said.strip(), int(fit.split("/")[0]), wrong.strip()


@pytest.mark.parametrize(
    ("cell", "library", "first"),
    [
        ("trainer_made_earlier", "transformers",
         "Lower per_device_train_batch_size from 32 to 16 and accumulate 2 passes a step"),
        ("lightning_made_earlier", "lightning",
         "Lower loader's batch_size from 2048 to 256 and accumulate 8 passes a step"),
    ],
)  # fmt: skip
def test_a_trainer_is_told_what_fits_and_the_cell_then_passes(
    cell: str, library: str, first: str
) -> None:
    pytest.importorskip(library)
    title, said, fit, wrong = followed(f"{cell}, a library's")
    assert (title, said, wrong) == (first, "fits", "")
    assert fit >= 1


def test_what_changes_no_result_stands_first_and_fits_beside_a_workspace() -> None:
    """The workspace of 128 KiB lies among the notebook's small blocks."""
    title, said, _, wrong = followed("nanogpt")
    assert title == "Recompute activations in backward instead of keeping them"
    assert (said, wrong) == ("fits", "")
