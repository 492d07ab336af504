"""The report of `%%ondevice` as people see it: a picture of the flow, then the lines, on one screen."""

from __future__ import annotations

import re
from typing import Any

from gpumagic.report.base import Holder, to_html, to_text
from gpumagic.transfers.report import Explanation, TransferReport, TransferRow


def row(line: int | None, nbytes: int, source: str = "cpu", target: str = "cuda:0", **more: Any) -> TransferRow:
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
    advice=("line 5 made 100 syncs",),
    lines=LINES,
    notes=("A note.",),
)


def test_the_flow_comes_first_and_then_the_lines_with_their_bytes() -> None:
    text = to_text(REPORT, width=80)
    assert text.splitlines()[0] == "on cuda:0 for 1.5 s: 3 new tensors; 204 moves, 2.5 GiB"
    assert re.search(r"^cpu → cuda:0 +2.5 GiB ████████████ +104 +2 ms$", text, re.MULTILINE)
    assert re.search(r"^cuda:0 → cpu +400 B █░+ +100 +1 ms$", text, re.MULTILINE)
    assert re.search(r"^ +1 +%%ondevice cuda:0 .* 2.0 GiB +4× model by --move", text, re.MULTILINE)
    assert re.search(r"^ +3 +    batch = batch.to.* 512.0 MiB +100× batch by .to", text, re.MULTILINE)
    assert re.search(r"^ +5 +    total \+= model\(batch.* +400 B +100× .item +100$", text, re.MULTILINE)
    assert text.index("From → to") < text.index("Line  Code") < text.index("Created") < text.index("→ line 5")
    assert max(map(len, text.splitlines())) <= 80


def test_it_fits_in_eighty_columns_and_in_ascii() -> None:
    text = to_text(REPORT, width=80, unicode=False)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80


def test_a_block_says_in_a_sentence_what_was_moved_first() -> None:
    report = TransferReport("cuda:0", REPORT.moves, lines=LINES[1:])
    assert "Moved first, as asked: model (2.0 GiB from cpu)." in to_text(report, width=80)


def test_what_code_outside_the_cell_moved_is_said() -> None:
    text = to_text(TransferReport("cuda:0", (row(None, 4096, name=None, cause="copy_"),), lines=LINES), width=80)
    assert "Moved by code outside the cell: cpu → cuda:0 4.0 KiB by copy_." in text


def test_a_long_cell_takes_no_more_than_a_screen_and_the_rest_is_folded() -> None:
    lines = tuple((n, f"y{n} = x.to('cuda:0')") for n in range(1, 201))
    moves = tuple(row(n, 1000 + n, target=f"cuda:{n % 9}") for n in range(1, 201))
    names = tuple(Holder(f"y{n}", "cpu", 10) for n in range(200))
    advice = tuple(f"advice {n}" for n in range(50))
    report = TransferReport("cuda:0", moves, lines=lines, elsewhere=names, advice=advice)
    text, html = to_text(report, width=80), to_html(report)
    assert len(text.splitlines()) <= 40
    assert "188 more lines of the code, 188 of which moved something" in text
    assert "and 194 more names" in text
    assert html.count("<details>") >= 3
    assert "y1 = x.to" in html.partition("<details>")[2]


def test_the_lines_that_moved_most_are_shown_with_those_above_them() -> None:
    lines = tuple((n, f"line{n}") for n in range(1, 51))
    text = to_text(TransferReport("cuda:0", (row(30, 10), row(41, 20)), lines=lines), width=80)
    assert re.findall(r"line\d+", text) == ["line29", "line30", "line40", "line41"]


def test_indentation_is_kept_and_foreign_text_is_escaped_in_html() -> None:
    lines = ((1, "for i in x:"), (2, "    y = '<b>'.to()"))
    html = to_html(TransferReport("cuda:0", (row(2, 5, name="<i>"),), lines=lines))
    assert (
        '<code style="white-space:pre;font-family:Menlo,Consolas,monospace">    y = &#x27;&lt;b&gt;&#x27;.to()</code>'
        in html
    )
    assert "<i>" not in html
    assert "<b>" not in html


def test_why_it_failed_comes_before_the_figures() -> None:
    why = Explanation("x is on cpu, model on cuda:0.", 'x = x.to("cuda:0")', "Or --move x", 7, "model(x)")
    text = to_text(TransferReport("cuda:0", (), error="RuntimeError", explanation=why), width=80)
    assert text.splitlines()[2:5] == [
        "Line 7: x is on cpu, model on cuda:0.", '→ x = x.to("cuda:0")', "Or --move x",
    ]  # fmt: skip


def test_waiting_without_a_move_is_told_too() -> None:
    assert "The host waited for the device at line 3, 5 times." in to_text(TransferReport("cuda:0", (), syncs={3: 5}))
