"""The magics' pages say what is there: options, fields, links; and their Python runs. `test_pages` has the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpumagic
from gpumagic import options
from gpumagic.report.base import columns_of

pytestmark = pytest.mark.usefixtures("few_objects")

ROOT = Path(__file__).parent.parent.parent
PAGES = {magic: ROOT / "demo_notebooks" / f"{magic}.md" for magic in options.MAGICS}
FILES = {path.name: path for path in [ROOT / "README.md", *(ROOT / "demo_notebooks").glob("*.md")]}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
ROWS = {"gpuinfo": gpumagic.GPUReport, "ondevice": gpumagic.TransferReport}
ROWS |= {"devices": gpumagic.TensorReport, "oomguard": gpumagic.OomReport}


@pytest.mark.parametrize("magic", options.MAGICS)
def test_each_option_is_in_the_magics_heading_and_no_other(magic) -> None:
    page = TEXTS[f"{magic}.md"]
    heading = re.search(rf"^\*\*`%+{magic} ?(.*?)`\*\*", page, re.MULTILINE | re.DOTALL)
    assert heading is not None, f"the page of {magic} does not begin with how to write it"
    said = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", heading[1]))
    declared = [
        set(action.option_strings)
        for action in options.PARSERS[magic]._actions
        if action.option_strings
    ]
    known = set().union(*declared)
    assert said <= known, f"{magic} has no {said - known}"
    unsaid = [sorted(names) for names in declared if not names & said and "--help" not in names]
    assert not unsaid, f"the page does not say {unsaid}"
    unexplained = [names for names in declared if not any(f"`{name}" in page for name in names)]
    assert all(names & {"--help"} for names in unexplained), (
        f"the page does not explain {unexplained}"
    )


@pytest.mark.parametrize("magic", ROWS)
def test_each_column_is_in_the_magics_page_and_no_other(magic) -> None:
    fields = TEXTS[f"{magic}.md"].partition("## Fields")[2]
    columns = re.search(r"Columns of.*?: (.*?)\.(?:\s)", fields, re.DOTALL)
    assert columns is not None
    said = re.findall(r"`(\w+)`", columns[1])
    assert said == list(columns_of(ROWS[magic].row_type))


@pytest.mark.parametrize("name", TEXTS)
def test_what_it_links_to_is_there(name) -> None:
    for path, anchor in re.findall(
        r"(?:\]\(|src(?:set)?=\")(?!https?:)([^)\"#]*)#?([^)\"]*)", TEXTS[name]
    ):
        target = FILES[name].parent / path.strip() if path else FILES[name]
        assert target.exists(), f"{path} is not there"
        if anchor and target.suffix == ".ipynb":
            assert f"# {anchor.replace('-', ' ')}" in target.read_text(
                encoding="utf-8"
            )  # as Jupyter calls sections
        elif anchor:
            assert anchor in anchors(TEXTS[target.name]), f"{target.name} has no section {anchor}"


def anchors(text: str) -> set[str]:
    """Return what GitHub calls the sections of a page."""
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [f"{magic}.md" for magic in options.MAGICS])
def test_its_python_runs(name, bare_shell, two_devices, warm_worker) -> None:
    """With the simulated devices in the place of CUDA's, cells with magics among them."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXTS[name], re.MULTILINE | re.DOTALL)
    assert blocks
    bare_shell.run_cell("%load_ext gpumagic\nimport gpumagic, torch")
    for block in blocks:
        result = bare_shell.run_cell(block.replace("cuda:", "simgpu:"))
        assert result.success, f"{result.error_in_exec or result.error_before_exec!r} in\n{block}"
