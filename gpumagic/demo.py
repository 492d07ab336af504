"""`python -m gpumagic demo`: execute a demo notebook, show progress, and say where the result is.

The notebooks themselves take the machine's GPU if it has one and simulate two otherwise, so they run anywhere.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuMagicError
from gpumagic.options import MAGICS

if TYPE_CHECKING:
    from nbformat import NotebookNode

_NEEDED = ("nbclient", "nbconvert", "nbformat", "ipykernel")


def run(name: str, output: Path) -> int:
    """Execute a demo notebook and write it and its HTML to ``output``; return 0 if every cell did what it should.

    Raises:
        GpuMagicError: there is no such notebook; the packages of the ``demo`` extra are missing; or there is no GPU
            and none can be simulated.
    """
    source = _notebook(name)
    _require_packages()
    import nbformat

    notebook = nbformat.read(source, as_version=4)
    _prepare_a_device()
    print(f"Running {source.name}, {_count(notebook)} cells, in a fresh kernel:")
    error = execute(notebook)
    output.mkdir(parents=True, exist_ok=True)
    paths = _write(notebook, source.stem, output)
    if error is None:
        _say_what_was_shown(notebook)
    else:
        print(f"\nIt stopped at an error:\n{error}", file=sys.stderr)
    print(f"\nExecuted notebook  {paths[0]}\nAs a web page      {paths[1]}")
    return 0 if error is None else 1


def execute(notebook: NotebookNode) -> str | None:
    """Execute a notebook in place, a line of progress a cell; return the error that stopped it, if one did."""
    # A kernel named python3 elsewhere on the machine must not win over the one of this environment.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    progress = _Progress(notebook)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # a progress bar is then its last state, not each of them
        extra_arguments=["--log-level=ERROR"],  # the kernel's warnings are about its server, which is this process
        on_cell_start=progress.started,
        on_cell_executed=progress.ended,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return str(error)
    return None


class _Progress:
    """One line a code cell: its number, its first line, and how long it took."""

    def __init__(self, notebook: NotebookNode) -> None:
        self._total = _count(notebook)
        self._number = 0
        self._start = 0.0

    def started(self, cell: Any, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        self._number += 1
        self._start = time.perf_counter()
        title = next((line for line in cell.source.splitlines() if not line.startswith("#")), "")
        print(f"  {self._number:>2}/{self._total}  {title[:60]:<60}", end="", flush=True)

    def ended(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        print(f"  {time.perf_counter() - self._start:5.1f} s")


def _require_packages() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise GpuMagicError(
            f"the demo needs {', '.join(missing)}; install them with: {sys.executable} -m pip install 'gpumagic[demo]'"
        )


def _prepare_a_device() -> None:
    """Compile the simulated GPU now, where it says so, rather than in a cell that seems to hang."""
    from gpumagic.memory import allocator

    if not allocator.accelerators():
        from gpumagic.simgpu import _build

        _build.load()


def _notebook(name: str) -> Path:
    """Return a demo notebook inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).parent
    notebooks = [*(package / "demo_notebooks").glob("*.ipynb"), *(package.parent / "demo_notebooks").glob("*.ipynb")]
    for path in notebooks:
        if path.stem == name:
            return path
    there = ", ".join(sorted(path.stem for path in notebooks)) or f"none in {package / 'demo_notebooks'}"
    raise GpuMagicError(f"there is no demo {name!r}; there are {there}")


def _count(notebook: NotebookNode) -> int:
    return sum(cell.cell_type == "code" for cell in notebook.cells)


def _write(notebook: NotebookNode, name: str, output: Path) -> tuple[Path, Path]:
    import nbformat
    from nbconvert import HTMLExporter

    executed, page = (output / f"{name}.ipynb").resolve(), (output / f"{name}.html").resolve()
    nbformat.write(notebook, executed)
    body, _ = HTMLExporter().from_notebook_node(notebook)
    page.write_text(body, encoding="utf-8")
    return executed, page


def _say_what_was_shown(notebook: NotebookNode) -> None:
    print("\nWhat each magic showed:")
    for magic in MAGICS:
        shown = [_report(cell) for cell in notebook.cells if _uses(cell, magic)]
        if shown:
            print(f"  %{magic:<9} {next((text.splitlines()[0] for text in shown if text), 'nothing')}")


def _uses(cell: Any, magic: str) -> bool:
    return cell.cell_type == "code" and any(
        line.lstrip("%").startswith(magic) and line.startswith("%") for line in cell.source.splitlines()
    )


def _report(cell: Any) -> str:
    """Return the text form of the first report among a cell's outputs."""
    for output in cell.outputs:
        bundle = output.get("data", {})
        if "text/html" in bundle and "text/plain" in bundle:
            return str(bundle["text/plain"])
    return ""
