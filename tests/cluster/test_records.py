"""What an engine answers is read as records; a pickle that names anything else is refused, and nothing of it runs."""

from __future__ import annotations

import os
import pickle
import subprocess

import every_report
import pytest

from gpumagic.cluster import records
from gpumagic.notebook.cells import CellSessions


class Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(("name", "report"), list(every_report.cases("text")))
def test_every_report_arrives_as_it_was_sent(name, report) -> None:
    sent = ("origin", report, {"set": {1}, "frozen": frozenset({2})})
    assert records.load(pickle.dumps(sent, protocol=5)) == sent


HARM = {
    "os": Runs(os.mkdir, "made"),
    "eval": Runs(eval, "open('made', 'w')"),
    "subprocess": Runs(subprocess.call, ["touch", "made"]),
    "getattr": Runs(getattr, 1, "x"),
    "a class that is no record": CellSessions,
    "its call": Runs(CellSessions, None),
    "a function of ours": Runs(records.load, b""),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_anything_else_is_refused(harm, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="is no record of gpumagic's"):
        records.load(pickle.dumps((None, harm), protocol=5))
    assert not (tmp_path / "made").exists()
