"""Completion, a live report, an interrupt, hostile names and progress in JupyterLab, in a real browser."""

from __future__ import annotations

import pytest

SETUP = "%load_ext gpumagic\nimport torch\nx = torch.ones(1024, 1024, device='simgpu:0')"


@pytest.fixture
def expect(browser):
    """Return Playwright's assertion, which waits until it holds."""
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)
    return expect


def test_tab_completes_options_and_devices(notebook_page, expect) -> None:
    page = notebook_page
    page.open([SETUP, "%devices --le", "%%ondevice simgpu:"])
    page.run(0)
    for index, wanted in ((1, "--leaks"), (2, "simgpu:1")):
        page.cell(index).locator(".cm-content").click()
        page.page.keyboard.press("End")
        page.page.keyboard.press("Tab")
        expect(page.page.locator(".jp-Completer-item", has_text=wanted)).to_be_visible()
        page.page.keyboard.press("Escape")


def test_watch_moves_while_other_cells_run_until_off(notebook_page, expect) -> None:
    page = notebook_page
    threads = (
        "import threading\nprint([t.name for t in threading.enumerate() if 'gpumagic' in t.name])"
    )
    grow = "y = torch.ones(4 * 2**20, device='simgpu:1')"
    page.open(
        [
            SETUP,
            "%gpuinfo -w 0.2",
            grow,
            threads,
            "print('busy')\nwhile True: pass",
            f"%gpuinfo -w off\n{threads}",
        ]
    )
    page.run(0)
    table = page.run(1).get_by_role("row", name="simgpu:1")
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
    counts = (
        "with progress.counted(2, 'dry run') as tell:\n    tell('batch_size = 16')\nprint('after')"
    )
    page.open([SETUP, f"from gpumagic.report import progress\nprogress.DELAY = 0\n{counts}"])
    page.run(0)
    output = page.run(1)
    expect(output).to_contain_text("after")
    expect(output.locator(".jp-OutputArea-output")).to_have_count(1)
