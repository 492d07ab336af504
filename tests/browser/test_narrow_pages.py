"""Every report on a phone and in a narrow pane: the page stays, wide tables scroll in their own boxes."""

from __future__ import annotations

import pytest

from gpumagic.report import html
from gpumagic.report.base import to_html
from gpumagic.report.document import Cell, Column, Document, Listing, Segment, Table
from tests import every_report

PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>body {{ margin: 8px; font: 13px sans-serif }} td, th {{ padding: .4em .5em }}
table {{ border-collapse: collapse; font-size: 12px }}</style>{}"""
WIDER_THAN_THE_PAGE = (
    "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"
)
SCROLLS = """() => [...document.querySelectorAll('table')]
  .map(table => table.parentElement.scrollWidth > table.parentElement.clientWidth)"""
OVERLAPS = """() => {
  const found = []
  for (const part of [...document.querySelectorAll('div, details')]) {
    const rects = [...part.children].filter(each => each.matches('p, div, details, table, ul, summary'))
      .map(each => each.getBoundingClientRect()).filter(each => each.width && each.height)
    rects.slice(1).forEach((rect, at) => {
      const above = rects[at]
      if (rect.top < above.bottom - 1 && rect.left < above.right - 1 && above.left < rect.right - 1)
        found.push(part.outerHTML.slice(0, 300))
    })
  }
  return found
}"""
UNFOLD = "() => document.querySelectorAll('details').forEach(fold => { fold.open = true })"


@pytest.fixture(scope="module")
def narrow(browser):
    """Return a function that shows some HTML in so many pixels."""
    page = browser.new_page()

    def show(html: str, width: int):
        page.set_viewport_size({"width": width, "height": 600})
        page.set_content(PAGE.format(html))
        page.evaluate(UNFOLD)
        return page

    yield show
    page.close()


@pytest.mark.parametrize("width", [360, 600, 1200])
def test_no_report_is_wider_than_its_page_and_nothing_lies_on_anything(narrow, width) -> None:
    for text in ("model.layers[3].weight", "y" * 400):
        for name, report in every_report.cases(text):
            page = narrow(to_html(report), width)
            assert not page.evaluate(WIDER_THAN_THE_PAGE), name
            assert page.evaluate(OVERLAPS) == [], name


def test_a_note_wraps_beside_code(narrow) -> None:
    note = "says what keeps 3.0 MiB without a name: autograd graphs, C++"
    page = narrow(html.render(Document([Listing([("run", "%devices --leaks", note)])])), 480)
    assert page.evaluate(SCROLLS) == [False]


def test_code_and_names_wrap_so_that_the_figures_beside_them_stay_in_sight_and_bars_give_way(
    narrow,
) -> None:
    name = "optimizer.state[model.encoder.layers[3].weight]['exp_avg']"
    columns = [Column("Name", shrinks=True), Column("Size", align="right")]
    table = Table(columns, [[name, Cell("104.0 MiB", bar=(Segment(1.0),))]])
    sizes = {}
    for width in (360, 1200):
        page = narrow(html.render(Document([table])), width)
        assert page.evaluate(SCROLLS) == [False], width
        sizes[width] = page.evaluate(
            "() => document.querySelector('td span').getBoundingClientRect().width"
        )
        assert page.evaluate("() => document.querySelectorAll('td')[0].innerText") == name
    assert sizes[360] == 0 < sizes[1200]
