"""What a user sees of the four magics in JupyterLab and Notebook 7, in a real browser."""

from __future__ import annotations

import re

import pytest

SETUP = "%load_ext gpumagic\nimport torch\nx = torch.ones(1024, 1024, device='simgpu:0')"
FAILS = "%%oomguard\nbig = torch.empty(100 * 2**20, dtype=torch.uint8, device='simgpu:0')"
MOVES = "%%ondevice 1\ny = x.to('simgpu:1')\nfor _ in range(3):\n    y.sum().item()"
APPS = {"JupyterLab": "lab/tree", "Notebook 7": "notebooks"}


@pytest.fixture
def expect(browser):
    """Return Playwright's assertion, which waits until it holds."""
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)
    return expect


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_each_magic_shows_its_report(notebook_page, expect, app) -> None:
    page = notebook_page
    page.open([SETUP, "%gpuinfo", "%devices", MOVES, FAILS], app=app)
    page.run(0)
    gpus, tensors, moves, failure = (page.run(index) for index in range(1, 5))

    expect(gpus.get_by_role("row", name="simgpu:0")).to_contain_text("64.0 MiB")
    expect(tensors.get_by_role("row", name=re.compile("^x "))).to_contain_text("4.0 MiB")
    expect(moves.get_by_role("row", name="item")).to_contain_text("3")
    expect(failure).to_contain_text("OutOfMemory")
    expect(failure).to_contain_text("100.0 MiB")
    page.picture(f"magics-{app.partition('/')[0]}")


def test_every_table_has_an_accessible_name(notebook_page) -> None:
    """A screen reader says which table it is in, and which column a figure stands in."""
    page = notebook_page
    page.open([SETUP, "%gpuinfo", "%devices", MOVES, FAILS])
    page.run(0)
    for index in range(1, 5):
        output = page.run(index)
        output.evaluate("root => root.querySelectorAll('details').forEach(fold => { fold.open = true })")
        tables = output.locator("table")
        for position in range(tables.count()):
            tree = tables.nth(position).aria_snapshot()
            assert re.match(r'- table "[^"]{3,}', tree), f"cell {index} has a table without a name: {tree[:80]}"
        assert output.locator("th:not([scope])").count() == 0


def test_tab_completes_options_and_devices(notebook_page, expect) -> None:
    page = notebook_page
    page.open([SETUP, "%devices --so", "%%ondevice simgpu:"])
    page.run(0)
    for index, wanted in ((1, "--sort"), (2, "simgpu:1")):
        page.cell(index).locator(".cm-content").click()
        page.page.keyboard.press("End")
        page.page.keyboard.press("Tab")
        expect(page.page.locator(".jp-Completer-item", has_text=wanted)).to_be_visible()
        page.page.keyboard.press("Escape")


def test_watch_moves_while_other_cells_run_and_an_interrupt_stops_it(notebook_page, expect) -> None:
    page = notebook_page
    threads = "import threading\nprint([t.name for t in threading.enumerate() if 'gpumagic' in t.name])"
    grow = "y = torch.ones(4 * 2**20, device='simgpu:1')"
    page.open([SETUP, "%gpuinfo -w 0.2", grow, threads, "print('busy')\nwhile True: pass", threads])
    page.run(0)
    table = page.run(1).get_by_role("row", name="simgpu:1").first  # the second is its history
    expect(table).to_contain_text("0.0 / 64.0 MiB")
    page.run(2)
    expect(table).to_contain_text("16.0 / 64.0 MiB")  # the first cell's output has moved
    expect(page.run(3)).to_contain_text("gpumagic")

    page.start(4)
    expect(page.output(4)).to_contain_text("busy")
    page.page.keyboard.press("Escape")
    page.page.keyboard.press("i")
    page.page.keyboard.press("i")
    page.ended(4)
    expect(page.run(5)).to_contain_text("[]")


CONTRAST = """root => {
  const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n }
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]))
  const light = c => { const l = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                       return .2126 * l[0] + .7152 * l[1] + .0722 * l[2] }
  const ground = node => { for (; node; node = node.parentElement) {
      const c = parse(getComputedStyle(node).backgroundColor); if (c[3] === 1) return c }
    return [255, 255, 255, 1] }
  let worst = 99
  for (const node of root.querySelectorAll('td, th, p, caption, summary')) {
    if (!node.innerText.trim()) continue
    const ink = parse(getComputedStyle(node).color), paper = ground(node)
    for (let up = node; up !== root; up = up.parentElement) ink[3] *= Number(getComputedStyle(up).opacity)
    const [a, b] = [light(over(ink, paper)), light(paper.slice(0, 3))]
    worst = Math.min(worst, (Math.max(a, b) + .05) / (Math.min(a, b) + .05))
  }
  return worst
}"""


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_text_is_readable_in_light_and_dark(notebook_page, server, theme) -> None:
    """Every word of a report has the contrast that WCAG asks of small text, 4.5 to 1, muted ones included."""
    page = notebook_page
    server.set_theme(theme)
    page.open([SETUP, "%gpuinfo", "%devices", MOVES, FAILS])
    page.run(0)
    for index in range(1, 5):
        output = page.run(index)
        for report in output.locator(".jp-RenderedHTMLCommon").all():
            assert report.evaluate(CONTRAST) >= 4.5, f"cell {index} is hard to read in {theme}"
    page.picture(theme.replace(" ", "-").lower())
    server.set_theme("JupyterLab Light")


HOSTILE = """
evil = '<img src=x onerror="window.broken = 1">'
class Box(dict): pass
box = {evil: torch.ones(1000), evil + chr(0x202e) + chr(27) + '[31m' + 'y' * 10_000: torch.ones(2000)}
Odd = type(evil, (torch.nn.Linear,), {})
model = Odd(64, 64)
del x
%devices
"""


def test_hostile_names_are_text_and_never_markup(notebook_page, expect) -> None:
    """A name from outside reaches the page as the letters it has, in bounded length, and runs nothing."""
    page = notebook_page
    page.open([SETUP, HOSTILE, "%%ondevice 0\nz = box[evil].to('simgpu:0')\n"])
    page.run(0)
    tensors, moves = page.run(1), page.run(2)
    expect(tensors).to_contain_text("<img src=x")
    expect(moves).to_contain_text("3.9 KiB")
    for output in (tensors, moves):
        assert output.locator("img").count() == 0
        assert chr(0x202E) not in output.inner_text()
        assert max(map(len, output.inner_text().split("\n"))) < 2_000
    assert page.page.evaluate("window.broken") is None


def test_progress_leaves_neither_a_line_nor_a_box_behind(notebook_page, expect) -> None:
    page = notebook_page
    counts = "with progress.counted(2, 'dry run') as tell:\n    tell('batch_size = 16')\nprint('after')"
    page.open([SETUP, f"from gpumagic.report import progress\nprogress.DELAY = 0\n{counts}"])
    page.run(0)
    output = page.run(1)
    expect(output).to_contain_text("after")
    expect(output.locator(".jp-OutputArea-output")).to_have_count(1)
