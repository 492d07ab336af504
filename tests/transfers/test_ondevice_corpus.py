"""Every cell of the corpus: the report is what the devices' own copy counters say, line by line."""

from __future__ import annotations

import pytest
import torch

from gpumagic.source import text
from tests.transfers import ondevice_corpus as corpus
from tests.transfers.ondevice_corpus import CorpusCell

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("two_devices")]

CELLS = [cell for cell in corpus.cells() if cell.needs is None]
EXACT = [cell for cell in CELLS if cell.gap is None]
GAPS = [cell for cell in CELLS if cell.gap is not None]


def disagreement(cell: CorpusCell) -> str:
    """Return in what the report of a cell differs from the counters or from the cell's header; "" if in nothing.

    Other versions of torch may copy otherwise than the header says: in a step of an optimizer, to print a tensor.
    """
    report, copies, _ = corpus.run(cell.code, asks=cell.asks)
    counters, expected, told = (
        corpus.counted(copies),
        corpus.reported(cell.moves),
        corpus.reported(report),
    )
    if expected != counters and torch.__version__.startswith(corpus.HEADERS_OF):
        return f"the header says {expected}, the devices {counters}"
    if told != counters:
        return f"the report says {told}, the devices {counters}"
    missing = corpus.unseen(cell.moves, report) if expected == counters else []
    return f"no row for {missing} in {report.moves}" if missing else ""


@pytest.mark.parametrize("cell", EXACT, ids=lambda cell: cell.name)
def test_the_report_is_what_the_copy_counters_say(cell: CorpusCell) -> None:
    assert disagreement(cell) == ""


@pytest.mark.parametrize("cell", GAPS, ids=lambda cell: cell.name)
def test_a_known_gap_is_still_one(cell: CorpusCell) -> None:
    """Fails once the report is right: then the `gap` line goes, and its moves get their variable and cause."""
    assert disagreement(cell), f"the gap is closed ({cell.gap}): remove its line"


SIMPLE_NAMES = ("basic_cpu_then_numpy", "basic_item", "read_nonzero", "basic_tensor_of_a_list")
SIMPLE = [cell for cell in EXACT if cell.name in SIMPLE_NAMES]


@pytest.mark.parametrize("cell", SIMPLE, ids=lambda cell: cell.name)
def test_a_line_with_one_such_call_says_what_is_copied_where_python_does_not_tell_columns(
    cell: CorpusCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "span_at", lambda code, instruction: None)
    assert disagreement(cell) == ""


def test_the_corpus_is_large_enough() -> None:
    assert len(CELLS) >= 60
