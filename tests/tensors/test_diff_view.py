"""The views of `%devices --diff`, `--leaks`, `--why` and `--free`: golden text in 80 columns, and HTML."""

from __future__ import annotations

import dataclasses

import pytest

from gpumagic.report.base import to_html, to_text
from gpumagic.tensors.leaks_view import promises
from gpumagic.tensors.report import (
    DeviceChange,
    DiffReport,
    DiffRow,
    FreedReport,
    FreedRow,
    LeakReport,
    TensorRow,
    WayRow,
    WhyReport,
)

KIB, MIB = 1024, 1024**2
RELEASE, COLLECT = "%devices --free", "import gc; gc.collect()"


def text(report, width=80):
    """Return a report's text without the ends of lines."""
    return "\n".join(line.rstrip() for line in to_text(report, width, unicode=True).splitlines())


def changed(change, nbytes, name, **more):
    """Return one changed storage."""
    return DiffRow(change, "cuda:0", nbytes, (256, 1024), "float32", "plain", name, **more)


DIFF = DiffReport(
    (
        changed("new", 512 * MIB, "batch"),
        changed("freed", -256 * MIB, "old_batch"),
        *(changed("new", MIB, f"losses[{number}]") for number in range(40)),
        changed("resized", 4 * KIB, "shard", size=8 * KIB),
        changed("unnamed", 0, "hidden", holder="Out[12]", size=64 * MIB),
        changed("new", None, "opaque"),
    ),
    (DeviceChange("cuda:0", 552 * MIB, 256 * MIB, 4 * KIB, 296 * MIB + 4 * KIB, 300 * MIB),),
    since="%devices in cell 7",
)


def test_what_changed_in_80_columns() -> None:
    assert text(DIFF) == GOLDEN_DIFF


GOLDEN_DIFF = """\
batch +512.0 MiB, old_batch -256.0 MiB, losses +40.0 MiB and 1 more
42 new, 1 freed, 1 resized, 1 unnamed since %devices in cell 7
Change   Name            Device        Size               Shape        Kind
───────  ──────────────  ──────  ───────────────────────  ───────────  ─────
new      batch           cuda:0  +512.0 MiB ████████████  [256, 1024]  plain
freed    old_batch       cuda:0  -256.0 MiB ▒▒▒▒▒▒░░░░░░  [256, 1024]  plain
new      losses[…] × 40  cuda:0   +40.0 MiB █░░░░░░░░░░░  [256, 1024]  plain
resized  shard           cuda:0    +4.0 KiB █░░░░░░░░░░░  [256, 1024]  plain
unnamed  hidden          cuda:0    64.0 MiB ██░░░░░░░░░░  [256, 1024]  plain
new      opaque          cuda:0         n/a ░░░░░░░░░░░░  [256, 1024]  plain
hidden: kept by Out[12] now
Device         New       Freed         Net   Allocator
──────  ──────────  ──────────  ──────────  ──────────
cuda:0  +552.0 MiB  -256.0 MiB  +296.0 MiB  +300.0 MiB"""


def held(number, nbytes, holder, command, **more):
    """Return one held storage."""
    return TensorRow(
        "cuda:0", nbytes, (32, 32), "float32", "plain", None, holder=holder, place=more.pop("place", holder),
        frees=command, numbers=(number,), **more,
    )  # fmt: skip


HELD = LeakReport((
    held(7, 64 * MIB, "Out[12]", RELEASE, place="Out[12]['k']"),
    held(8, 32 * MIB, "last traceback", RELEASE, place="last traceback.<step()>.hidden"),
    *(held(number, 4 * KIB, None, None) for number in range(9, 59)),
    held(60, MIB, "cycle", COLLECT),
))  # fmt: skip


def test_what_is_held_in_80_columns() -> None:
    assert text(HELD) == GOLDEN_HELD


GOLDEN_HELD = """\
%devices --free frees 96.0 MiB: Out[12], last traceback
No variable reaches 53 storages: 97.2 MiB on cuda:0
No.  Kept by                         Device       Size  Shape     Dtype    Kind
───  ──────────────────────────────  ──────  ─────────  ────────  ───────  ─────
  7  Out[12]['k']                    cuda:0   64.0 MiB  [32, 32]  float32  plain
  8  last traceback.<step()>.hidden  cuda:0   32.0 MiB  [32, 32]  float32  plain
 60  cycle                           cuda:0    1.0 MiB  [32, 32]  float32  plain
  9  unknown × 50                    cuda:0  200.0 KiB  [32, 32]  float32  plain
import gc; gc.collect() frees 1.0 MiB: cycle
No single line frees 200.0 KiB, kept by C++ or what was not followed"""


def test_the_graphs_of_a_list_are_one_line_and_one_command() -> None:
    line = "losses[:] = [each.detach() for each in losses]"
    rows = [held(n, MIB, f"graph of losses[{n}]", line, graph_of=f"losses[{n}]") for n in range(9)]
    one = held(9, MIB, "graph of loss", "loss = loss.detach()", graph_of="loss")
    lines = text(LeakReport((*rows, one)), 120).splitlines()
    assert "graph of losses[…] × 9" in lines[4]
    assert lines[0].startswith(f"{line} frees 9.0 MiB")
    assert lines[-1] == "loss = loss.detach() frees 1.0 MiB: graph of loss"


def test_a_line_is_taken_apart_where_its_statements_end_and_nowhere_else() -> None:
    """A key of a dict may have what stands between statements; such a line is one with others of its statements."""
    both = "made['a; b'] = made['a; b'].detach(); loss = loss.detach()"
    rows = (
        held(1, MIB, "graph of made['a; b']", both, graph_of="made['a; b']"),
        held(2, MIB, "graph of loss", "loss = loss.detach()", graph_of="loss"),
        held(3, MIB, "Out[3] and graph of loss", f"loss = loss.detach()\n{RELEASE}"),
    )
    joined, releasing = promises(rows)
    assert joined.code == ["made['a; b'] = made['a; b'].detach()", "loss = loss.detach()"]
    assert [row.numbers[0] for row in joined.rows] == [1, 2]
    assert releasing.lines() == ["loss = loss.detach()", RELEASE]
    assert [row.numbers[0] for row in releasing.rows] == [3]


def test_calls_that_keep_the_same_are_named_as_they_are() -> None:
    alike = [held(number, MIB, "running step()", None) for number in (1, 2)]
    assert "  1  running step() × 2" in text(LeakReport(tuple(alike)))


def test_what_a_graph_and_an_output_keep_is_the_graph_s_variable_s() -> None:
    row = changed("new", MIB, None, holder="graph of loss and Out[4]", graph_of="loss")
    assert DiffReport((row,)).by_variable == {"loss": MIB}


def test_nothing_held_is_one_line() -> None:
    assert text(LeakReport(())) == "No leaks: a variable reaches every live tensor"


FREED = FreedReport(
    (FreedRow("cuda:0", 96 * MIB, 2, 196 * MIB, 100 * MIB), FreedRow("cpu", 512, 1, None, None)),
    ("Out[12]", "last traceback"),
    LeakReport((held(60, MIB, "cycle", COLLECT),)),
)


def test_what_was_released_in_80_columns() -> None:
    assert text(FREED) == GOLDEN_FREED


GOLDEN_FREED = """\
Freed 96.0 MiB on cuda:0, 512 B on cpu
Cleared: Out[12], last traceback
Device     Freed  Storages  Allocated        Now
──────  ────────  ────────  ─────────  ─────────
cuda:0  96.0 MiB         2  196.0 MiB  100.0 MiB
cpu        512 B         1        n/a        n/a
Still held: 1.0 MiB on cuda:0
import gc; gc.collect() frees 1.0 MiB: cycle"""

TENSOR = TensorRow(
    "cuda:0", 4 * MIB, (1024, 1024), "float32", "parameter", "model.fc.weight", ("model.fc.weight",)
)
WHY = WhyReport(
    TENSOR,
    (
        WayRow("model", "model.fc.weight", (("model", "Net"), (".fc", "Linear"), (".weight", "Parameter")),
               "del model.fc.weight"),
        WayRow("Out[12]", "Out[12][0]", (("Out[12]", "list"), ("[0]", "Parameter")), RELEASE),
        WayRow("running work()", "running work().w", (("running work()", ""), (".w", "Parameter")), None),
    ),
)  # fmt: skip


def test_why_a_tensor_is_there_in_80_columns() -> None:
    assert text(WHY) == GOLDEN_WHY


GOLDEN_WHY = """\
Kept by 3 holders. To free it: del model.fc.weight, then %devices --free
model.fc.weight: 4.0 MiB on cuda:0, [1024, 1024] float32, parameter
model          Net
└─ .fc         Linear
   └─ .weight  Parameter
Out[12]  list
└─ [0]   Parameter
running work()
└─ .w           Parameter
It also has to go from running work()"""


@pytest.mark.parametrize(
    "report", [DIFF, HELD, FREED, WHY], ids=lambda report: type(report).__name__
)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_asked(report, width) -> None:
    assert max(len(line) for line in text(report, width).splitlines()) <= width


@pytest.mark.parametrize(
    "report", [DIFF, HELD, FREED, WHY], ids=lambda report: type(report).__name__
)
def test_html_says_what_the_text_says_and_escapes_it(report) -> None:
    evil = "<script>alert(1)</script>"
    page = to_html(dataclasses.replace(report, notes=(evil,)))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    for word in ("cuda:0", "MiB"):
        assert word in page


@pytest.mark.parametrize(
    "report", [DIFF, HELD, FREED, WHY], ids=lambda report: type(report).__name__
)
def test_columns_are_the_same_whatever_was_found(report) -> None:
    frame = report.to_pandas()
    assert list(frame) == list(report.row_type.__annotations__)
    empty = dataclasses.replace(
        report, **{dataclasses.fields(report)[1 if report is WHY else 0].name: ()}
    )
    assert list(empty.to_pandas()) == list(frame)


def test_a_long_way_is_cut_in_its_middle_not_at_its_end() -> None:
    long = "['" + "k" * 200 + "']"
    report = dataclasses.replace(
        WHY, ways=(WayRow("cfg", long, (("cfg", "dict"), (long, "Tensor")), None),)
    )
    assert "Tensor" in text(report, 60)
