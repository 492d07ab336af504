"""Documents as text and as HTML: aligned, within the width, readable without styles, and safe."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.report import html, text
from gpumagic.report.base import to_html, to_text
from gpumagic.report.document import (
    Cell,
    Column,
    Document,
    Fold,
    Heading,
    Listing,
    Paragraph,
    Segment,
    Table,
)
from tests import every_report

TABLE = Table(
    (
        Column("Device"),
        Column("Name", shrinks=True),
        Column("Used", align="right"),
        Column("Bus", priority=1),
    ),
    (
        (
            "cuda:0",
            "NVIDIA H200",
            Cell("35.2 GiB", bar=(Segment(0.25), Segment(0.25, "second"))),
            "00:1E.0",
        ),
        (
            "cuda:1",
            "A device with quite a long name",
            Cell("n/a", muted=True, title="lost"),
            "00:1F.0",
        ),
    ),
    caption="GPUs",
)


def test_a_table_is_aligned_under_its_titles() -> None:
    assert text.render(Document((TABLE,)), width=100, unicode=True).splitlines() == [
        "Device  Name                                 Used               Bus",
        "──────  ───────────────────────────────  ─────────────────────  ───────",
        "cuda:0  NVIDIA H200                      35.2 GiB ███▓▓▓░░░░░░  00:1E.0",
        "cuda:1  A device with quite a long name       n/a               00:1F.0",
    ]


def test_a_narrow_terminal_loses_the_least_column_and_then_cuts_names() -> None:
    shown = text.render(Document((TABLE,)), width=50, unicode=True)
    assert "Bus" not in shown
    assert "A device with quite …" not in shown
    assert max(map(len, shown.splitlines())) <= 50
    assert "A device" in shown
    assert "…" in shown


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_of_any_report_is_wider_than_the_terminal(width: int) -> None:
    for name in ("model.layers[3].weight", "y" * 400):
        for kind, report in every_report.cases(name):
            lines = to_text(report, width, unicode=True).splitlines()
            assert not [line for line in lines if len(line) > width], kind


def test_a_row_that_no_width_is_enough_for_is_a_sentence_and_loses_nothing() -> None:
    columns = [
        Column("Device"),
        *(Column(title, align="right") for title in ("Came", "Went", "Net", "Allocated")),
    ]
    table = Table(columns, [["simgpu:0", "100.0 MiB", "20.0 MiB", "80.0 MiB", "120.0 MiB"]])
    assert text.render(Document((table,)), width=40, unicode=True).splitlines() == [
        "simgpu:0: Came 100.0 MiB · Went 20.0 MiB",
        "  · Net 80.0 MiB · Allocated 120.0 MiB",
    ]


def test_a_terminal_without_unicode_gets_ascii() -> None:
    shown = text.render(Document((TABLE, Heading("2 × → …"))), width=50, unicode=False)
    assert shown.isascii()
    assert "###===......" in shown
    assert "2 x > ~" in shown


def test_something_is_never_drawn_as_nothing() -> None:
    row = (Cell("1 B", bar=(Segment(1e-9),)),)
    shown = text.render(Document((Table((Column("Used"),), (row,)),)), width=80, unicode=True)
    assert "1 B  █░░░░░░░░░░░" in shown


def test_paragraphs_wrap_and_listings_are_cut_to_the_width() -> None:
    document = Document(
        (Paragraph("word " * 40), Listing(((7, "x = y.to('cuda')" * 9, "512 MiB"),)))
    )
    lines = text.render(document, width=60, unicode=True).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[-1].startswith("7 | x = y.to(")


@given(
    cells=st.lists(st.tuples(st.text(max_size=40), st.text(max_size=40)), max_size=5),
    width=st.integers(40, 200),
    unicode=st.booleans(),
)
def test_any_text_in_a_table_stays_on_its_line_and_in_its_cell(
    cells: list[tuple[str, str]], width: int, unicode: bool
) -> None:
    table = Table((Column("A", shrinks=True), Column("B", shrinks=True)), cells)
    assert len(text.render(Document((table,)), width, unicode).split("\n")) == len(cells) + 2
    parsed = _Parsed()
    parsed.feed(html.render(Document((table,))))
    assert set(parsed.tags) <= {"div", "span", "table", "thead", "tbody", "tr", "th", "td"}
    assert parsed.tags.count("td") == 2 * len(cells)


def test_html_uses_nothing_that_a_front_end_drops() -> None:
    blocks = (
        Heading("h"),
        Paragraph("p", muted=True),
        TABLE,
        Listing(((1, "a", "b"),)),
        Fold("f", [TABLE]),
    )
    document = Document(blocks)
    shown = html.render(document)
    assert not any(
        word in shown
        for word in ("<style", "<script", "<svg", "var(", "class=", "color:", "currentColor")
    )
    parsed = _Parsed()
    parsed.feed(shown)
    assert not parsed.open


def test_a_bar_fills_from_the_left_also_in_a_column_of_numbers() -> None:
    bar = html.render(Document((TABLE,))).partition('aria-hidden="true"')[2].partition("</td>")[0]
    assert "text-align:left" in bar


THEMES = {
    "JupyterLab, light": ((33, 33, 33), (255, 255, 255)),
    "JupyterLab, dark": ((255, 255, 255), (17, 17, 17)),
    "VS Code, light": ((59, 59, 59), (255, 255, 255)),
    "VS Code, dark": ((204, 204, 204), (31, 31, 31)),
    "Colab, dark": ((213, 213, 213), (56, 56, 56)),
}


@pytest.mark.parametrize(("ink", "paper"), THEMES.values(), ids=THEMES)
def test_muted_text_is_readable_in_every_theme(ink, paper) -> None:
    """It has the contrast that WCAG asks of small text, 4.5 to 1, whatever grey the theme writes in."""
    share = float(html.MUTED.removeprefix("opacity:"))
    bright, dim = sorted(
        (
            _luminance(paper),
            _luminance([share * a + (1 - share) * b for a, b in zip(ink, paper, strict=True)]),
        ),
        reverse=True,
    )
    assert (bright + 0.05) / (dim + 0.05) >= 4.5


def _luminance(colour) -> float:
    """As WCAG 2.2 defines it."""
    parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def test_html_says_every_figure_as_text_and_hides_bars_from_screen_readers() -> None:
    shown = html.render(Document((TABLE,)))
    assert ">35.2 GiB<" in shown
    assert 'aria-hidden="true"' in shown
    assert 'title="lost"' in shown
    assert '<th scope="col"' in shown
    assert '<table aria-label="GPUs"' in shown


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>", '"><script>', "a\u202eb", "\x1b]0;x\x07"]
)
def test_hostile_names_are_only_text(name: str) -> None:
    table = Table((Column(name),), ((Cell(name, title=name),),), caption=name)
    shown = html.render(
        Document(
            (Heading(name), Paragraph(name), table, Fold(name, []), Listing(((1, name, name),)))
        )
    )
    parsed = _Parsed()
    parsed.feed(shown)
    assert not {"img", "script"} & set(parsed.tags)
    assert "\u202e" not in shown
    assert "\x1b" not in shown


class _Parsed(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_details_show_what_a_report_folds_in_text_and_in_html() -> None:
    """Each under its summary, in the order of the report; the report itself stays folded."""
    for name, report in every_report.cases("model.weight"):
        folded, whole = to_html(report), report.details()
        assert "<details>" not in whole._repr_html_(), name
        assert len(str(whole).splitlines()) >= len(str(report).splitlines()), name
        assert str(whole).splitlines()[0] == str(report).splitlines()[0], name
        if "<details>" in folded:
            assert len(str(whole)) > len(str(report)), name
