"""The demo command and every demo notebook run from beginning to end, in fresh kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import IPython
import nbformat
import pytest
import torch

from gpumagic.__main__ import execute_notebook, main
from gpumagic.options import MAGICS
from tests.kernels import assert_only_cells_marked_so_failed
from tests.pages import comparable

pytestmark = pytest.mark.usefixtures("few_objects")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "demo_notebooks").glob("*.ipynb"))
SUBJECTS = [path for path in NOTEBOOKS if path.stem != "tour"]


@pytest.fixture
def patience(tmp_path: Path, monkeypatch) -> None:
    """How busy this machine is does not decide what is advised."""
    profile = tmp_path / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_config.py").write_text(
        "get_config().GPUMagic.advice_seconds = 120.0\n", encoding="utf-8"
    )
    monkeypatch.setenv("IPYTHONDIR", str(profile.parent))


def test_the_demo_runs_the_tour_and_says_what_it_showed_and_where(tmp_path: Path, patience) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpumagic", "demo", "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    executed, page = tmp_path / "out" / "tour.ipynb", tmp_path / "out" / "tour.html"
    assert str(executed) in done.stdout
    assert str(page) in done.stdout
    assert all(re.search(rf"%{magic}\b.*\n {{8}}\S+ \S+", done.stdout) for magic in MAGICS)
    assert "<table" in page.read_text(encoding="utf-8")
    tour = nbformat.read(executed, as_version=4)
    assert_only_cells_marked_so_failed(tour)
    (check,) = (cell for cell in tour.cells if "check" in cell.metadata.get("tags", ()))
    assert check.outputs[0]["text"].startswith("Not yet: 8 copies"), (
        "the exercise is open as it stands"
    )
    assert_what_the_report_says_is_what_is_run_next(tour)
    assert_begins_as_committed(tour, NOTEBOOKS[0].with_name("tour.ipynb"))


def assert_what_the_report_says_is_what_is_run_next(tour: nbformat.NotebookNode) -> None:
    code = [cell for cell in tour.cells if cell.cell_type == "code"]
    failed = next(
        number for number, cell in enumerate(code) if cell.source.startswith("%%oomguard")
    )
    report = "\n".join(
        output["data"].get("text/plain", "") for output in code[failed].outputs if "data" in output
    )
    first, line = re.findall(r"^ *(?:first|\d+) \| (.*)$", report, re.MULTILINE)[:2]
    assert code[failed + 1].source == first
    assert line in code[failed + 2].source
    assert len(code[failed + 2].source.splitlines()) == len(code[failed].source.splitlines())


def assert_begins_as_committed(notebook: nbformat.NotebookNode, path: Path) -> None:
    """The first sentence of each report says what it says in the committed notebook: that is of today's code."""
    if torch.version.cuda is None:  # they were made with torch's CPU build
        assert first_sentences(notebook) == first_sentences(nbformat.read(path, as_version=4))


def first_sentences(notebook: nbformat.NotebookNode) -> list[tuple[str, list[str]]]:
    """Return what each cell that runs magics displays, as far as its first line goes, with what is wrapped of it.

    What engines print (`[stdout:2] ...`) is left out, for it comes in any order.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and "%" in cell.source]
    said = [
        [output["data"].get("text/plain", "") for output in cell.outputs if "data" in output]
        for cell in cells
    ]
    return [
        (
            cell.source,
            [
                comparable(re.split(r"\n(?! )", text)[0])
                for text in texts
                if text and text[0] != "["
            ],
        )
        for cell, texts in zip(cells, said, strict=True)
    ]


@pytest.mark.deep  # each a kernel that imports torch; the tour, which has all magics, runs in either stage
@pytest.mark.parametrize("path", SUBJECTS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_only_cells_marked_so_fail(path: Path, patience) -> None:
    if path.stem == "many_engines" and IPython.version_info < (8,):
        pytest.skip("starting a cluster takes half a minute, and it runs with the newest IPython")
    notebook = nbformat.read(path, as_version=4)
    committed = len(notebook.cells)
    checks = append_solution(notebook)
    assert execute_notebook(notebook) is None
    assert_begins_as_committed(nbformat.v4.new_notebook(cells=notebook.cells[:committed]), path)
    assert_only_cells_marked_so_failed(notebook)
    said = [check.outputs[0]["text"].split()[0].strip(".:") for check in checks]
    assert said == ["Not", "Done"][: len(checks)], (
        "the exercise is open as it stands, and done by its solution"
    )


def append_solution(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Append an exercise's solution and its check once more; return both checks."""
    tagged = {tag: cell for cell in notebook.cells for tag in cell.metadata.get("tags", ())}
    if "solution" not in tagged:
        return []
    code = tagged["solution"].source.partition("```python\n")[2].partition("\n```")[0]
    checks = [tagged["check"], nbformat.v4.new_code_cell(tagged["check"].source)]
    notebook.cells += [nbformat.v4.new_code_cell(code), checks[1]]
    return checks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    text = "".join(
        output["data"].get("text/html", "")
        for cell in code
        for output in cell.outputs
        if "data" in output
    )
    assert "simgpu" in text or "NVIDIA" in text  # says on what it ran


@pytest.mark.parametrize(
    "path", [path for path in SUBJECTS if path.stem != "many_engines"], ids=lambda path: path.stem
)
def test_a_lesson_ends_with_three_exercises(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    exercises = "\n".join(cell.source for cell in notebook.cells).partition("## Three exercises")[2]
    assert re.findall(r"^\*\*(\d)\.\*\* ", exercises, re.MULTILINE)[:3] == ["1", "2", "3"]


def test_each_topic_is_taught_in_the_section_that_the_list_names() -> None:
    text = {
        path.stem: "\n".join(cell.source for cell in nbformat.read(path, 4).cells)
        for path in NOTEBOOKS
    }
    listed = re.findall(r"^\| (.+?) \| (\[.+) \|$", text["basics"], re.MULTILINE)
    assert len(listed) > 15
    for topic, places in listed:
        found = re.findall(r"\[(\w+)\]\(\w+\.ipynb\): ([^;|]+)", places)
        assert found, topic
        sections = [
            text[name].partition(f"\n## {title.strip()}\n")[2].partition("\n## ")[0]
            for name, title in found
        ]
        assert all(sections), topic
        assert all(term in "".join(sections) for term in re.findall(r"`([^`]+)`", topic)), topic


def test_the_notebooks_outputs_name_no_path_of_the_machine_that_made_them() -> None:
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert not any(
            place in text for place in ("/home/", "/root/", "/Users/", "site-packages")
        ), path


def test_a_demo_that_is_not_there_is_one_line_with_those_that_are(capsys) -> None:
    assert main(["demo", "moveing"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no demo 'moveing'; did you mean moving?" in line
    assert all(path.stem in line for path in NOTEBOOKS)


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    code = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'nbclient' else real(name, package)\n"
        "from gpumagic.__main__ import main; raise SystemExit(main(['demo']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"gpumagic: the demo needs nbclient; install them with: {sys.executable} -m pip install 'gpumagic[demo]'"
    ]


def test_gpuinfo_runs_in_a_terminal_without_ipython() -> None:
    code = (
        "import sys; sys.modules['IPython'] = None\n"
        "from gpumagic.__main__ import main; raise SystemExit(main(['gpuinfo']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_wrong_device_on_the_command_line_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpumagic", "gpuinfo", "gpux"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is not a device" in done.stderr
