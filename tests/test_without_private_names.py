"""A torch that lacks one private name: each cell runs, each report comes, and says what it lacks.

A look-up of that name finds nothing, as in such a torch; `test_private_names.py` sees to it that all look there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumagic._compat import torch_private
from gpumagic._compat.private_names import PrivateName
from tests.forks import Forks
from tests.stages import sample

ALL = ("made", "backward", "gpuinfo", "devices", "diff", "why", "leaks", "ondevice", "traced")
NOTED_IN = {"devices": "tensors", "ondevice": "moved", "oomguard": "failed"}
OF_DRY_RUNS = (
    torch_private.STORAGE_IDENTITY,
    torch_private.IS_FUNCTIONAL,
    torch_private.BACKENDS_IN_PYTHON,
)
NOT_NEEDED_SINCE = {
    torch_private.DEVICE_STATE: (2, 11),
    torch_private.PUSH_MODE: (2, 11),
    torch_private.POP_MODE: (2, 11),
    torch_private.KEYS_AFTER: (2, 9),
}
"""The first torch with which nothing is recorded by these."""
pytestmark = pytest.mark.versions
NAMES = [name for name in torch_private.NAMES if name.is_there()]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    process = Forks("import tests.every_magic")
    yield process
    process.close()


def told_without(forks: Forks, name: PrivateName | None) -> dict[str, Any]:
    cells = [*ALL, "oomguard"]
    if name in OF_DRY_RUNS and torch_private.BACKENDS_IN_PYTHON.is_there():
        cells.append("dryrun")
    path = "" if name is None else name.path
    told: dict[str, Any] = forks.run(
        f"from tests import every_magic; answer = every_magic.run({path!r}, {cells})"
    )
    return told


def check_that_all_is_told(told: dict[str, Any]) -> None:
    assert list(told["errors"]) == ["oomguard"]
    assert told["errors"]["oomguard"].startswith("OutOfMemory")
    assert told["ran_on"] == ["simgpu:1", "simgpu:1", 1000.0, [1.0]]
    for magic in ("gpus", "tensors", "changes", "why", "leaks", "moved", "traced", "failed"):
        assert told["texts"][magic]
    assert "could not be" not in "".join(told["notes"]["failed"])


def test_with_all_names_nothing_is_missing(forks: Forks) -> None:
    told = told_without(forks, None)
    check_that_all_is_told(told)
    assert told["unrecorded"] == ""
    assert told["moved_first"] == "simgpu:1"
    assert sorted(told["moves"]) == [".item", ".to", ".tolist", ".unique"]
    assert f"torch {torch.__version__} has no" not in str(told["notes"])


@pytest.mark.parametrize("name", sample(NAMES, every=8), ids=lambda name: name.path)
def test_without_one_name_each_cell_runs_and_each_report_comes(
    forks: Forks, name: PrivateName
) -> None:
    told = told_without(forks, name)
    if name is torch_private.BACKENDS_IN_PYTHON:
        assert name.missing() in told["errors"].pop("dryrun")
    check_that_all_is_told(told)
    for magic in name.reports:
        assert name.missing() in str(told["notes"][NOTED_IN[magic]])
    is_old = name in NOT_NEEDED_SINCE and torch.__version__ >= NOT_NEEDED_SINCE[name]
    is_recorded = is_old or name.without != torch_private.UNRECORDED
    assert bool(told["moves"]) is is_recorded
    assert told["unrecorded"] == ("" if is_recorded else name.missing())
    if not is_recorded:
        assert f"was not recorded: torch {torch.__version__}" in told["texts"]["moved"]


def test_the_names_are_those_of_this_torch() -> None:
    """A name that is gone from torch is not noticed by the tests of the magics, which do without it then."""
    later = {"2.7": (2, 7), "2.9": (2, 9), "2.10": (2, 10)}
    for name in torch_private.NAMES:
        is_cudas = "_cuda_" in name.path and not torch.backends.cuda.is_built()
        is_due = name.since is None or torch.__version__ >= later[name.since]
        if is_due and not is_cudas and name is not torch_private.SKIP_CODE:
            assert name.is_there(), name.path
