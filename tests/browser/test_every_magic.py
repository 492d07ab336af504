"""Every magic's report in JupyterLab and Notebook 7, at two widths, light and dark, from one notebook.

Its last cells show what is hard to lay out: every kind of report with long names, and a machine of eight GPUs.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

THEMES = ("JupyterLab Light", "JupyterLab Dark")
WIDTHS = (1400, 700)
LONG_NAME = "transformer.encoder.layers[11].self_attn.in_proj_weight"
SETUP = """
%load_ext gpumagic
%config GPUMagic.advice_seconds = 60
import torch
from torch import nn
x = torch.ones(1024, 1024, device='simgpu:0')
"""
LIVE = """
encoder_of_the_left_image = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to('simgpu:0')
losses = [encoder_of_the_left_image(torch.ones(512, 64, device='simgpu:0')).mean() for _ in range(8)]
"""
MOVES = """%%ondevice 1
y = x.to('simgpu:1')
for _ in range(3):
    total = sum(each.item() for each in (y.mean(), y.square().mean().sqrt(), y.amax(), y.amin(), y.std(), y.sum()))
"""
NEEDS = """%%dryrun --fit batch_size
batch_size = 64
hidden = encoder_of_the_left_image(torch.ones(batch_size, 64, device='simgpu:0')).relu().repeat(1, 64)
hidden.mean().backward()
"""
FAILS = """%%oomguard
batch_size = 4096
optimizer_of_the_left_image = torch.optim.AdamW(encoder_of_the_left_image.parameters())
for batch in torch.ones(2**16, 64).split(batch_size):
    hidden = encoder_of_the_left_image(batch.to('simgpu:0')).repeat(1, 16).exp().square().exp()
    hidden.mean().backward()
    optimizer_of_the_left_image.step()
"""
EVERY_KIND = f"from tests import every_report\nfor _, each in every_report.cases('{LONG_NAME}'): display(each)"
LONG_WORDS = "for _, each in every_report.cases('y' * 400): display(each)"
EIGHT_GPUS = "display(every_report.eight_gpus())"
CELLS = {
    "setup": SETUP, "gpuinfo": "%gpuinfo", "all of gpuinfo": "%gpuinfo -p -a", "live": LIVE, "devices": "%devices",
    "leaks": "%devices --leaks", "by kind": "%devices --by kind", "why": "%devices --why losses[0]",
    "ondevice": MOVES, "dryrun": NEEDS, "every kind": EVERY_KIND, "long words": LONG_WORDS, "eight": EIGHT_GPUS,
    "oomguard": FAILS,
}  # fmt: skip
APPS = {"JupyterLab": "lab/tree", "Notebook 7": "notebooks"}

REPORTS = ".jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) > div"
WIDER = f"""root => [root, ...root.querySelectorAll('.jp-OutputArea-output, .jp-OutputArea-output {REPORTS}')]
  .filter(part => part.scrollWidth > part.clientWidth).map(part => part.innerText.slice(0, 200))"""
TEXTS = """
  const texts = part => {
    const found = [], walk = document.createTreeWalker(part, NodeFilter.SHOW_TEXT)
    for (let node; (node = walk.nextNode());) if (node.data.trim()) found.push(node)
    return found
  }
  const seen = node => {
    if (!node.parentElement.checkVisibility()) return []  // Chromium keeps the places of what is folded
    const range = document.createRange()
    range.selectNodeContents(node)
    return [...range.getClientRects()].filter(rect => rect.width && rect.height) }
"""
WRAPPED = f"""(root, captions) => {{ {TEXTS}
  const lines = part => new Set(texts(part).flatMap(seen).map(rect => Math.round(rect.bottom / 4))).size
  return [...root.querySelectorAll('{REPORTS}')].flatMap(each => [...each.querySelectorAll(captions)])
    .filter(part => lines(part) > 1).map(part => part.innerText.slice(0, 200))
}}"""
CONTRAST = f"""root => {{ {TEXTS}
  const parse = text => {{ const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n }}
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]))
  const light = c => {{ const l = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                        return .2126 * l[0] + .7152 * l[1] + .0722 * l[2] }}
  const ground = node => {{
    if (!node) return [255, 255, 255]
    const colour = parse(getComputedStyle(node).backgroundColor)
    return colour[3] === 1 ? colour.slice(0, 3) : over(colour, ground(node.parentElement)) }}
  const ratio = node => {{
    const ink = parse(getComputedStyle(node).color), paper = ground(node)
    for (let up = node; up !== root; up = up.parentElement) ink[3] *= Number(getComputedStyle(up).opacity)
    const [a, b] = [light(over(ink, paper)), light(paper)]
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05) }}
  const found = new Map(), shown = [...root.querySelectorAll('{REPORTS}')].flatMap(texts)
  for (const text of shown) if (seen(text).length) found.set(text.parentElement, text.data)
  return [...found].filter(([node]) => ratio(node) < 4.5).map(([node, text]) => `${{ratio(node).toFixed(2)}} ${{text}}`)
}}"""
"""The words whose contrast is less than 4.5 to 1, which WCAG asks of small text."""


@pytest.fixture(scope="module", params=APPS.values(), ids=APPS)
def book(new_page, request):
    """Return a page in which all cells have run."""
    with new_page() as page:
        page.open(list(CELLS.values()), app=request.param)
        page.run(0)
        page.command("notebook:run-all-cells")
        page.ended(len(CELLS) - 1)
        if request.param == "lab/tree":
            page.command(
                "application:toggle-left-area"
            )  # the files, which leave no room on half a screen
        yield page


def output(book: Any, name: str) -> Any:
    return book.output(list(CELLS).index(name))


def unfold(book: Any, is_open: bool) -> None:
    book.page.evaluate(
        "open => document.querySelectorAll('details').forEach(fold => { fold.open = open })",
        is_open,
    )


def test_each_magic_shows_its_report(book) -> None:
    from playwright.sync_api import expect

    def row(of: str, name: str) -> Any:
        return output(book, of).get_by_role("row", name=re.compile(name))

    expect(row("gpuinfo", "^simgpu:0")).to_contain_text("64.0 MiB")
    expect(row("devices", "^x ")).to_contain_text("4.0 MiB")
    expect(row("ondevice", "each.item")).to_contain_text("18")
    expect(output(book, "dryrun")).to_contain_text(re.compile(r"batch_size up to [\d,]+ fits"))
    expect(output(book, "leaks")).to_contain_text("No variable reaches")
    expect(output(book, "oomguard")).to_contain_text(
        "Out of memory on simgpu:0, line 5. Lower batch_size"
    )
    assert len(output(book, "every kind").locator(REPORTS).all()) > 15


def test_nothing_is_written_to_stderr(book) -> None:
    boxes = book.page.locator(
        ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']"
    )
    (only,) = boxes.all_inner_texts()
    assert "OutOfMemory" in only.split("\n")[1]  # the traceback, which is drawn in such a box too


def test_details_are_folded_and_open_with_a_click(book) -> None:
    unfold(book, is_open=False)
    for name in ("dryrun", "oomguard"):
        fold = output(book, name).locator("details").first
        inner = fold.locator("table, p, ul").first
        assert not inner.is_visible()
        fold.locator("summary").first.click()
        assert inner.is_visible()
    assert book.page.locator("details[open]").count() == 2


@pytest.mark.parametrize(("width", "theme"), [*itertools.product(WIDTHS, THEMES)])
def test_every_report_fits_the_page_and_is_readable(book, width, theme) -> None:
    """Nothing is wider than its output area, captions take one line each, and every word has enough contrast."""
    book.page.set_viewport_size({"width": width, "height": 1600})
    book.command("apputils:change-theme", theme=theme)
    book.page.locator(f"body[data-jp-theme-name='{theme}']").wait_for(state="attached")
    for is_open in (False, True):
        unfold(book, is_open)
        book.pictures(f"{theme[11:].lower()}-{width}-{'open' if is_open else 'folded'}", CELLS)
        for name in CELLS:
            area = output(book, name)
            if not area.count():
                continue
            assert area.evaluate(WIDER) == [], name
            assert area.evaluate(WRAPPED, "th, summary, [role=img] + div") == [], name
            assert area.evaluate(CONTRAST) == [], name


def test_every_table_has_an_accessible_name(book) -> None:
    """A screen reader says which table it is in, and which column a figure stands in."""
    unfold(book, is_open=True)
    for name in ("gpuinfo", "devices", "ondevice", "dryrun", "oomguard", "every kind"):
        tables = output(book, name).locator("table").all()
        for table in tables:
            tree = table.aria_snapshot()
            assert re.match(r"""- '?table "[^"]{3,}""", tree), (
                f"{name} has a table without a name: {tree[:80]}"
            )
        assert output(book, name).locator("th:not([scope])").count() == 0
