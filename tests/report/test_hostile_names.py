"""Text from outside, in every place of every report and in every form of it: only letters, and not too many."""

from __future__ import annotations

import unicodedata
from html.parser import HTMLParser

import pytest

from gpumagic.gpus.report import CellChange
from gpumagic.gpus.view import cell_line
from gpumagic.report.base import Report, to_html, to_text
from tests import every_report

pytestmark = pytest.mark.usefixtures("few_objects")

HOSTILE = {
    "markup": '<img src=x onerror="window.broken = 1">',
    "end of an attribute": "\"'><script>window.broken = 1</script>",
    "endless": "y" * 10_000,
    "endless words": "word " * 2_000,
    "bidi": "a\u202eb\u2066c\u200fd\u061c",
    "terminal": "\x1b]0;title\x07\x1b[2J\r\n\tz\x00\x9b31m\x7f",
    "surrogate": "a\ud800b",
    "separators": "a\u2028b\u2029c\x85d\x0be",
    "empty": "",
}
TAGS = {
    "div", "p", "strong", "table", "caption", "thead", "tbody", "tr", "th", "td", "span", "code", "details", "summary",
    "ul", "li",
}  # fmt: skip
ATTRIBUTES = {"style", "scope", "title", "role", "aria-label", "aria-hidden", "tabindex"}
LONGEST = 2_010
"""Characters of one text in a page, and what stands beside it."""


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_from_outside_steers_a_page_or_a_terminal(text: str) -> None:
    for name, report in every_report.cases(text):
        _check_html(name, to_html(report))
        for width in (40, 100):
            _check_text(name, to_text(report, width, unicode=True))
            assert to_text(report, width, unicode=False).isascii(), name


def _check_text(name: str, shown: str) -> None:
    shown.encode()
    assert not any(map(_steers, shown.replace("\n", ""))), name


def _check_html(name: str, shown: str) -> None:
    shown.encode()
    assert not any(map(_steers, shown)), name
    page = _Page()
    page.feed(shown)
    page.close()
    assert not page.open, name
    assert page.tags <= TAGS, name
    assert page.attributes <= ATTRIBUTES, name
    assert page.longest <= LONGEST, name


def _steers(ch: str) -> bool:
    return unicodedata.category(ch) in {"Cc", "Cf", "Cs", "Zl", "Zp"}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.longest = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.longest = max([self.longest, *(len(value or "") for _, value in attrs)])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "code" not in self.open:  # code that is to be typed is never cut
            self.longest = max(self.longest, len(data))


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_the_line_after_each_cell_is_a_line(text: str) -> None:
    shown = cell_line(1.0, [CellChange(text, 1, 2, 3)])
    assert "\n" not in shown
    assert not any(map(_steers, shown))
    assert len(shown) < LONGEST


def test_a_report_travels_as_json_whatever_its_names() -> None:
    import json

    for name, report in every_report.cases("".join(HOSTILE.values())[-100:]):
        assert isinstance(report, Report), name
        json.loads(json.dumps(report.to_dict()))
