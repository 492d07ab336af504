"""A real JupyterLab server and a real Chromium, driven by Playwright; skipped where either is missing.

With `GPUMAGIC_BROWSER=required` in the environment, as in CI, missing is a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 60_000  # milliseconds until a page that shows nothing is taken for hung
TOKEN = "browser-tests"
# Chromium's own background traffic is switched off: a test machine may have no network beyond the registries.
SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]


def _missing() -> str | None:
    try:
        import jupyterlab  # noqa: F401
        import notebook  # noqa: F401
        import playwright  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed (the extra `browser` has it)"
    if "PYTEST_XDIST_WORKER" in os.environ:
        return "playwright's event loop would go on in files that share the process: python -m pytest tests/browser"
    return None if _chromium() else "Chromium is not installed"


def _chromium() -> str | None:
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


@pytest.fixture(scope="session")
def browser():
    """Return a headless Chromium."""
    if reason := _missing():
        if os.environ.get("GPUMAGIC_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=_chromium(), args=SWITCHES)
        yield chromium
        chromium.close()


@dataclass
class Server:
    """A running Jupyter server, and the folders it serves and takes settings from."""

    url: str
    notebooks: Path
    settings: Path

    def set(self, plugin: str, **values: object) -> None:
        """Write a user's setting; the next page that is opened has it."""
        path = self.settings / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")

    def set_theme(self, theme: str) -> None:
        self.set("@jupyterlab/apputils-extension/themes", theme=theme)

    def put(self, cells: list[str]) -> str:
        """Lay a notebook of these cells into the served folder, and return its name; one of a name keeps its kernel."""
        name = f"notebook-{len(list(self.notebooks.iterdir()))}.ipynb"
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(book, self.notebooks / name)
        return name


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory) -> Iterator[Server]:
    """Return a JupyterLab server of its own, with two small simulated devices for its kernels."""
    home = tmp_path_factory.mktemp("jupyter")
    (home / "notebooks").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", home / "notebooks", home / "settings")
    # Cells out of sight stay in the page, and no dialog asks for news.
    server.set("@jupyterlab/notebook-extension/tracker", windowingMode="none")
    server.set(
        "@jupyterlab/apputils-extension/notification", fetchNews="false", checkForUpdates=False
    )
    environment = {
        **os.environ, "GPUMAGIC_SIMGPU": "2x64MiB", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "JUPYTERLAB_SETTINGS_DIR": str(server.settings), "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--port-retries=0",
        f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={server.notebooks}",
        "--ServerApp.jpserver_extensions=notebook=True",  # also in an environment that only borrows the package
        "--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _await(server.url, process, home / "log")
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)


def _await(url: str, process: subprocess.Popen, log: Path) -> None:
    """Return once the server answers; each attempt blocks in the connection, not in a sleep."""
    for _ in range(PATIENCE // 100):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{url}/api?token={TOKEN}", timeout=5).close()
        except OSError:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
        else:
            return
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


class Page:
    """A notebook open in a front end: JupyterLab, or Notebook 7 with the same parts."""

    def __init__(self, page, server: Server) -> None:
        self.page = page
        self._server = server

    def open(self, cells: list[str], *, app: str = "lab/tree") -> None:
        """Open a new notebook of these cells, alone, and wait for its kernel."""
        name = self._server.put(cells)
        self.page.goto(f"{self._server.url}/{app}/{name}?token={TOKEN}&reset")
        self.page.locator(".jp-Notebook .jp-Cell").nth(len(cells) - 1).wait_for(timeout=PATIENCE)
        self.page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for(
            state="attached", timeout=PATIENCE
        )

    def cell(self, index: int):
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def start(self, index: int) -> None:
        """Run a cell as a user does, without waiting for its end.

        A page forgets what is run in the moment before it has a connection to its kernel, so it is asked again.
        """
        from playwright.sync_api import TimeoutError as StillWaiting

        waiting = self.cell(index).locator(".jp-InputPrompt").filter(has_text="[ ]")
        for _ in range(5):
            self.cell(index).locator(".cm-content").click()
            self.page.keyboard.press("Control+Enter")
            with contextlib.suppress(StillWaiting):
                waiting.wait_for(state="detached", timeout=PATIENCE / 5)
                return
        pytest.fail(f"cell {index} was not taken by the kernel")

    def run(self, index: int):
        """Run a cell, wait until it has ended, and return its output area."""
        self.start(index)
        self.ended(index)
        return self.output(index)

    def ended(self, index: int) -> None:
        """Wait until the cell's prompt has a number."""
        self.cell(index).locator(".jp-InputPrompt").filter(has_text="[").filter(
            has_not_text="*"
        ).filter(has_not_text="[ ]").wait_for(timeout=PATIENCE)

    def command(self, name: str, **arguments: object) -> None:
        """Give the front end one of its commands, without waiting for what it does."""
        self.page.evaluate(
            "([name, arguments]) => { window.jupyterapp.commands.execute(name, arguments) }",
            [name, arguments],
        )

    def output(self, index: int):
        return self.cell(index).locator(".jp-Cell-outputArea")

    def picture(self, name: str) -> None:
        """Keep a screenshot where `GPUMAGIC_SCREENSHOTS` names a folder, for a person to look at."""
        if folder := os.environ.get("GPUMAGIC_SCREENSHOTS"):
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)

    def pictures(self, name: str, cells: Iterable[str]) -> None:
        """Keep a picture of each cell, by the names of the cells."""
        if folder := os.environ.get("GPUMAGIC_SCREENSHOTS"):
            for index, cell in enumerate(cells):
                self.cell(index).screenshot(path=f"{folder}/{cell.replace(' ', '-')}-{name}.png")


@pytest.fixture(scope="session")
def new_page(browser, server) -> Callable[[], AbstractContextManager[Page]]:
    """Return a function that opens an empty page of a browser that knows nothing."""

    @contextlib.contextmanager
    def opened() -> Iterator[Page]:
        context = browser.new_context(viewport={"width": 1280, "height": 1600})
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        yield Page(page, server)
        context.close()

    return opened


@pytest.fixture
def notebook_page(new_page):
    """Return an empty page, closed after the test."""
    with new_page() as page:
        yield page
