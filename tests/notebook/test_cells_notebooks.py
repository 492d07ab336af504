"""Whole notebooks and scripts: nbconvert, `%run`, exported scripts, `ipython script.py`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.kernels import environment, plain

pytestmark = pytest.mark.ipython

CELLS = [
    "%load_ext tests.probe_magics",
    "%%ondevice cuda\nx = [line\n     for line in '''a\nb'''.splitlines()]\nprint('ran', len(x))\nmodes()[:]",
    "print('left', modes())",
]


def write(path, cells):
    """Write a notebook of code cells."""
    sources = [
        {
            "cell_type": "code",
            "source": cell,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "id": f"c{place}",
        }
        for place, cell in enumerate(cells)
    ]
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {
            "name": "python",
            "file_extension": ".py",
            "nbconvert_exporter": "python",
        },
    }
    notebook = {"cells": sources, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))
    return path


@pytest.fixture
def python(tmp_path):
    """Return a function that runs a Python module in a child process, and returns its code and output."""

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, arguments)],
            cwd=tmp_path, env=environment(tmp_path / "home"), capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        return done.returncode, plain(done.stdout + done.stderr)

    return run


def test_nbconvert_executes_a_notebook(tmp_path, python):
    """Outputs are stored in order: what was printed, the value, the report."""
    write(tmp_path / "good.ipynb", CELLS)
    code, said = python(
        "nbconvert", "--execute", "--to", "notebook", "--output", "done", "good.ipynb"
    )
    assert code == 0, said
    outputs = json.loads((tmp_path / "done.ipynb").read_text())["cells"][1]["outputs"]
    assert [output["output_type"] for output in outputs] == [
        "stream",
        "execute_result",
        "display_data",
    ]


@pytest.mark.parametrize(
    "form", ["%%ondevice cuda", pytest.param("%%oomguard --retry 1", marks=pytest.mark.deep)]
)
def test_nbconvert_fails_where_a_cell_fails(tmp_path, python, form):
    """With the user's error, before the next cell."""
    write(tmp_path / "bad.ipynb", [CELLS[0], f"{form}\n1 / 0", "open('after', 'w').close()"])
    code, said = python(
        "nbconvert", "--execute", "--to", "notebook", "--output", "done", "bad.ipynb"
    )
    assert code != 0
    assert "ZeroDivisionError: division by zero" in said
    assert not (tmp_path / "after").exists()


def test_an_exported_script_runs_in_ipython(tmp_path, python):
    """nbconvert writes the cell magics as calls with their bodies."""
    write(tmp_path / "good.ipynb", CELLS)
    assert python("nbconvert", "--to", "script", "good.ipynb")[0] == 0
    assert "run_cell_magic('ondevice'" in (tmp_path / "good.py").read_text()
    code, said = python("IPython", "good.py")
    assert code == 0, said
    assert "ran 2" in said
    assert "<report of ondevice cuda>" in said
    assert "left []" in said


def test_an_exported_script_fails_where_a_cell_fails(tmp_path, python):
    """With the user's error; nothing after it runs."""
    script = tmp_path / "bad.py"
    script.write_text(
        "get_ipython().run_line_magic('load_ext', 'tests.probe_magics')\n"
        "get_ipython().run_cell_magic('ondevice', 'cuda', '1 / 0\\n')\nprint('af' 'ter')\n"
    )
    code, said = python("IPython", "bad.py")
    assert code != 0
    assert "ZeroDivisionError" in said
    assert "after" not in said


def test_a_notebook_run_by_a_cell_leaks_nothing(tmp_path, kernel):
    """Its cells have the mode, and show no reports, as IPython runs them silently."""
    inner = [
        "%%ondevice cuda\ninner = modes()[:]",
        "%ondevice meta\nlate = modes()[:]",
        "after = modes()[:]",
    ]
    path = write(tmp_path / "inner.ipynb", inner)
    cell = kernel.run(f"%run {path}\ninner, late, after, modes()")
    assert cell.value == "(['ondevice cuda'], ['ondevice meta'], [], [])"
    assert cell.reports == []


def test_a_notebook_run_under_a_guard_is_inside_of_it(tmp_path, kernel):
    """The outer guard lasts until the outer cell ends."""
    path = write(
        tmp_path / "inner.ipynb", ["%%ondevice cuda\ninner = modes()[:]", "between = modes()[:]"]
    )
    cell = kernel.run(f"%%ondevice cpu\n%run {path}\ninner, between, modes()")
    assert cell.value == "(['ondevice cpu', 'ondevice cuda'], ['ondevice cpu'], ['ondevice cpu'])"
    assert cell.reports == ["<report of ondevice cpu>"]


def test_a_notebook_that_fails_stops_the_cell_that_runs_it(tmp_path, kernel):
    """And leaves no mode; `kernel` checks that at the end."""
    path = write(tmp_path / "bad.ipynb", ["%%ondevice cuda\n1 / 0", "after_bad = 1"])
    assert kernel.run(f"%run {path}").ename == "ZeroDivisionError"
    assert kernel.value("'after_bad' in globals(), modes()") == "(False, [])"


def test_a_script_run_by_a_cell_shows_its_reports_where_they_belong(tmp_path, kernel):
    """Between its prints."""
    path = tmp_path / "script.ipy"
    path.write_text(
        "print('a')\nget_ipython().run_cell_magic('ondevice', 'cuda', 'x = 1\\n')\nprint('b')\n"
    )
    script = tmp_path / "script.py"
    script.write_text("from IPython import get_ipython\n" + path.read_text())
    kinds = [kind for kind, _ in kernel.run(f"%run {script}").seen]
    assert kinds == ["stdout", "display_data", "stdout"]
