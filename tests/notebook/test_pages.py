"""The README and the pages show what gpumagic shows; `python -m tests.pages` brings them up to date."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from tests.pages import PAGES, ROOT, Example, comparable, examples

pytestmark = pytest.mark.usefixtures("few_objects")

QUESTIONS = (ROOT / "demo_notebooks" / "questions.md").read_text(encoding="utf-8")
SITUATIONS = 12


@pytest.mark.skipif(torch.version.cuda is not None, reason="they were made with torch's CPU build")
@pytest.mark.parametrize(
    "page", [PAGES[0], *(pytest.param(page, marks=pytest.mark.deep) for page in PAGES[1:3])]
)
def test_what_a_page_shows_is_what_its_cells_show(page: str) -> None:
    """The page about engines is left out: its example is one of the questions, and a cluster is dear."""
    pytest.importorskip("ipyparallel")
    environment_of_its_own = [sys.executable, "-m", "tests.pages", "--check", page]
    done = subprocess.run(
        environment_of_its_own, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, (
        f"python -m tests.pages {page} brings it up to date:\n{done.stdout}{done.stderr}"
    )


def test_the_readme_says_of_the_published_figures_what_their_table_says() -> None:
    table = (ROOT / "tests" / "published" / "RESULTS.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"^(\d+) rows;", table, re.MULTILINE)
    statuses = re.findall(r"^\| (?:exact|within|explained|open) \| (\d+) \|", table, re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    checked = readme.partition("**What was checked.**")[2].partition("\n\n")[0]
    said = re.findall(r"\b\d+\b", checked.replace("1 %", "one per cent"))
    assert said == [rows, *statuses]
    assert sum(map(int, statuses)) == int(rows)


def test_each_question_of_the_table_is_a_section_with_its_answer() -> None:
    asked = QUESTIONS.partition("## ")[0].count("](#")
    sections = QUESTIONS.split("\n## ")[1:]
    assert asked == len(sections) == SITUATIONS
    assert all("```text\n" in section for section in sections)


COMING_FROM = (ROOT / "demo_notebooks" / "coming_from.md").read_text(encoding="utf-8")
FEATURES = [
    line
    for line in COMING_FROM.splitlines()
    if line.startswith("| ") and not line.startswith(("| there", "| ---"))
]


@pytest.mark.parametrize("row", FEATURES)
def test_each_feature_of_other_tools_has_a_test_here_or_is_said_to_be_missing(row: str) -> None:
    _, here, shown = re.fullmatch(
        r"\| (.*) \| (.*) \| ?(.*) \|", row.replace(" | |", " |  |")
    ).groups()
    links = re.findall(r'\[test\]\(\.\./(tests/[\w/]+\.py) "(test_\w+)"\)', shown)
    assert shown.count("[test]") == len(links)
    assert bool(links) is not (here == "no" or here.startswith("no:"))
    for file, name in links:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("done in 1.5 s", "done in 320 ms", True),
        (
            "No GPU · torch 2.13.0+cpu (CPU-only build)",
            "No GPU · torch 2.9.1 (CPU-only build)",
            True,
        ),
        ("4.0 MiB ████░░░░", "4.0 MiB ███░", True),
        (
            "cell, 538 ms · 20 syncs · peak\n  2.0 MiB",
            "cell, 1 s · 20 syncs · peak 2.0\n  MiB",
            True,
        ),
        ("4.0 MiB", "5.0 MiB", False),
        ("20 transfers", "21 transfers", False),
        ("→ move x", "", False),
    ],
)
def test_only_what_differs_from_run_to_run_is_left_out_of_the_comparison(
    one: str, other: str, alike: bool
) -> None:
    assert (comparable(one) == comparable(other)) is alike


def test_an_output_is_shown_as_far_as_the_page_shows_it() -> None:
    shown, alone, ended = (
        "```text\nold\n...\n```\n\n",
        "```python\n{}\n```\n\n",
        "```text\n...\nold\n```\n",
    )
    page = f"## One\n\n{alone.format('x')}{shown}{alone.format('y')}## Two\n\n{alone.format('z')}{ended}"
    first, unseen, last = examples(page)
    assert (first.begins_section, unseen.begins_section, last.begins_section) == (True, False, True)
    assert unseen == Example("y\n", "python", None, None, unseen.place, begins_section=False)
    assert first.shortened("1\n2\n3") == "1\n...\n"
    assert last.shortened("1\n2\n3") == "...\n3\n"
