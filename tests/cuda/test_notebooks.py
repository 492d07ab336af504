"""The demo notebooks take torch's CUDA where it is; over the fake runtime they run to their end as on a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from gpumagic.__main__ import execute_notebook
from gpumagic.options import MAGICS
from tests.kernels import assert_only_cells_marked_so_failed

NOTEBOOKS = sorted((Path(__file__).parents[2] / "demo_notebooks").glob("*.ipynb"))
SUBJECTS = [path for path in NOTEBOOKS if path.stem not in {"tour", "many_engines"}]


def shown(notebook: nbformat.NotebookNode) -> str:
    """Return all text that the cells show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "\n".join(
        str(output.get("text", "")) + output.get("data", {}).get("text/plain", "")
        for output in outputs
    )


def test_the_tour_takes_cuda_and_shows_all_four_magics(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpumagic", "demo", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(re.search(rf"%{magic}\b.*\n {{8}}\S+ \S+", done.stdout) for magic in MAGICS)
    notebook = nbformat.read(tmp_path / "tour.ipynb", as_version=4)
    assert_only_cells_marked_so_failed(notebook)
    assert "cuda:0" in shown(notebook)
    assert "simgpu" not in shown(notebook)


@pytest.mark.parametrize("path", SUBJECTS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_cuda_and_only_cells_marked_so_fail(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert execute_notebook(notebook) is None
    assert_only_cells_marked_so_failed(notebook)
    assert "cuda:0" in shown(notebook)
    assert "simgpu" not in shown(notebook)
