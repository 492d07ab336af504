"""The report of `%%ondevice` as people see it: what to change first, then the lines, on one screen."""

from __future__ import annotations

import re
from typing import Any

from gpumagic.report.base import Holder, to_html, to_text
from gpumagic.transfers.report import Explanation, Suggestion, TransferReport, TransferRow


def row(
    line: int | None, nbytes: int, source: str = "cpu", target: str = "cuda:0", **more: Any
) -> TransferRow:
    given = {"count": 1, "seconds": 0.001, "code": None, "name": "x", "cause": ".to", **more}
    return TransferRow("host-to-device", source, target, nbytes=nbytes, line=line, **given)


LINES = (
    (1, "%%ondevice cuda:0 --move model"), (2, "for batch in loader:"), (3, "    batch = batch.to('cuda:0')"), (4, ""),
    (5, "    total += model(batch).sum().item()"),
)  # fmt: skip
REPORT = TransferReport(
    device="cuda:0",
    moves=(
        row(None, 2 * 2**30, name="model", cause="--move", count=4),
        row(3, 512 * 2**20, count=100, name="batch"),
        row(5, 400, "cuda:0", "cpu", count=100, name=None, cause=".item"),
    ),
    created={"cuda:0": (3, 1024)},
    syncs={5: 100},
    peak={"cuda:0": 3 * 2**30},
    elapsed=1.5,
    elsewhere=(Holder("labels", "cpu", 4000),),
    advice=(
        Suggestion(
            3,
            "512.0 MiB copied to cuda:0 100 times by line 3",
            "move batch before the loop",
            507 * 2**20,
        ),
        Suggestion(5, "100 syncs by .item() in a loop, line 5", "read once at the end"),
    ),
    lines=LINES,
    notes=("A note.",),
)


GOLDEN = """\
512.0 MiB copied to cuda:0 100 times by line 3: move batch before the loop
  (saves 507.0 MiB)
cuda:0, 1.5 s · cpu → cuda:0 2.5 GiB, cuda:0 → cpu 400 B · 100 syncs · 3 new
  tensors · peak 3.0 GiB on cuda:0
Line  Code                                       Size  Transfers           Syncs
────  ────────────────────────────────────  ─────────  ──────────────────  ─────
   1  %%ondevice cuda:0 --move model          2.0 GiB  4× model by --move
   2  for batch in loader:
   3      batch = batch.to('cuda:0')        512.0 MiB  100× batch.to
      → move batch before the loop (saves 507.0 MiB)
   5      total += model(batch).sum().ite…      400 B  100× .item            100
      → read once at the end
Used, but on another device: labels (cpu, 3.9 KiB).
Every transfer: 3 rows, 3 ms of host time
A note."""


def test_the_first_line_says_what_to_change_and_each_line_has_its_change_below_it() -> None:
    text = to_text(REPORT, width=80)
    assert text == GOLDEN


def test_it_fits_in_eighty_columns_and_in_ascii() -> None:
    text = to_text(REPORT, width=80, unicode=False)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80


def test_a_block_says_in_a_sentence_what_was_moved_first() -> None:
    report = TransferReport("cuda:0", REPORT.moves, lines=LINES[1:])
    assert "Copied first, as asked: model (2.0 GiB from cpu)." in to_text(report, width=80)


def test_what_code_outside_the_cell_moved_is_said() -> None:
    text = to_text(
        TransferReport("cuda:0", (row(None, 4096, name=None, cause="copy_"),), lines=LINES),
        width=80,
    )
    assert "Copied by code outside the cell: cpu → cuda:0 4.0 KiB by copy_." in text


def test_a_long_cell_takes_no_more_than_a_screen_and_the_rest_is_folded() -> None:
    lines = tuple((n, f"y{n} = x.to('cuda:0')") for n in range(1, 201))
    moves = tuple(row(n, 1000 + n, target=f"cuda:{n % 9}") for n in range(1, 201))
    names = tuple(Holder(f"y{n}", "cpu", 10) for n in range(200))
    advice = tuple(Suggestion(n, f"problem {n}", f"change {n}") for n in range(1, 51))
    report = TransferReport("cuda:0", moves, lines=lines, elsewhere=names, advice=advice)
    text, html = to_text(report, width=80), to_html(report)
    assert len(text.splitlines()) <= 40
    assert "188 more lines with transfers" in text
    assert "and 194 more names" in text
    assert html.count("<details>") == 2
    assert "y1 = x.to" in html.partition("<details>")[2]


def test_only_lines_with_transfers_or_syncs_are_shown_each_with_the_one_above_it() -> None:
    lines = tuple((n, f"line{n}") for n in range(1, 51))
    text = to_text(
        TransferReport("cuda:0", (row(30, 10), row(41, 20)), syncs={7: 1}, lines=lines), width=80
    )
    assert re.findall(r"line\d+", text) == [
        "line6",
        "line7",
        "line29",
        "line30",
        "line40",
        "line41",
    ]


def test_indentation_is_kept_and_foreign_text_is_escaped_in_html() -> None:
    lines = ((1, "for i in x:"), (2, "    y = '<b>'.to()"))
    html = to_html(TransferReport("cuda:0", (row(2, 5, name="<i>"),), lines=lines))
    assert '<code style="white-space:inherit;font-family:Menlo' in html
    assert '">    y = &#x27;&lt;b&gt;&#x27;.to()</code>' in html
    assert "<i>" not in html
    assert "<b>" not in html


def test_why_it_failed_and_what_repairs_it_is_the_first_line() -> None:
    why = Explanation("x is on cpu, model on cuda:0.", 'x = x.to("cuda:0")', 7, "model(x)")
    text = to_text(TransferReport("cuda:0", (), error="RuntimeError", explanation=why), width=80)
    assert text.splitlines() == [
        'Line 7: x is on cpu, model on cuda:0. Fix: x = x.to("cuda:0")',
        "cuda:0, 0 us",
    ]


def test_a_sync_without_a_transfer_has_its_line() -> None:
    text = to_text(
        TransferReport("cuda:0", (), syncs={3: 5}, lines=((3, "torch.cuda.synchronize()"),))
    )
    assert re.search(r"^ +3  torch.cuda.synchronize\(\) +5$", text, re.MULTILINE)


def test_a_run_with_nothing_to_change_says_that_nothing_was_copied_again() -> None:
    assert to_text(TransferReport("cuda:0", ())).splitlines()[0] == "No transfers between devices"
    once = TransferReport("cuda:0", (row(1, 4096),), lines=((1, "y = x.to(0)"),), error="KeyError")
    assert to_text(once).splitlines()[0] == "1 transfer, 4.0 KiB; ended by KeyError"


def test_a_cell_that_worked_elsewhere_hears_it_in_the_first_line() -> None:
    on_host = TransferReport(
        "cuda:1", (), allocations={"cuda:1": 0}, elsewhere=(Holder("y", "cpu", 40),)
    )
    on_other = TransferReport(
        "cuda:1", (), created={"cuda:0": (1, 4)}, allocations={"cuda:0": 3, "cuda:1": 0},
        elsewhere=(Holder("y", "cuda:0", 40), Holder("x", "cpu", 40)),
    )  # fmt: skip
    there = TransferReport(
        "cuda:1", (), allocations={"cuda:1": 1}, elsewhere=(Holder("y", "cpu", 40),)
    )
    said = [to_text(each, width=200).splitlines()[0] for each in (on_host, on_other, there)]
    assert said == [
        "Nothing was allocated on cuda:1: the cell worked on cpu (y); --move NAMES copies tensors first",
        "Nothing was allocated on cuda:1: the cell worked on cuda:0 (y); --move NAMES copies tensors first",
        "No transfers between devices",
    ]
