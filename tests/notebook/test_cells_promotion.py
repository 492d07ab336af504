"""The input transformer: which cells it touches, and that no line of them moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from gpumagic.notebook.cells import PromoteCellMagics

pytestmark = pytest.mark.ipython

promote = PromoteCellMagics({"ondevice": (), "oomguard": ("--retry", "--shrink")})


def promoted(cell: str) -> str:
    return "".join(promote(cell.splitlines(keepends=True)))


def test_a_cell_magic_of_ours_becomes_the_line_magic():
    """Only one percent sign goes."""
    assert promoted("%%ondevice cuda:1\nx = 1\n") == "%ondevice cuda:1\nx = 1\n"


@pytest.mark.parametrize(
    "cell",
    [
        "", "\n", "x = 1\n", "%ondevice cuda:1\nx = 1\n", "%%time\nx = 1\n", "%%ondevices cuda\nx = 1\n", "%%\n",
        "# note\n%%ondevice cuda\n", "x = '''\n%%ondevice cuda\n'''\n", "%%ondevice?\n", "%%ondevice??\nx\n",
        "%%ondevice cuda \\\nx = 1\n", "%%ondevice cuda?\nx = 1\n", "%%ondevice ?\n",
    ],
)  # fmt: skip
def test_every_other_cell_is_left_as_it_is(cell):
    """Other magics, help, and our names anywhere but at the start of line 1 are none of its business."""
    lines = cell.splitlines(keepends=True)
    assert promote(lines) is lines


@pytest.mark.parametrize(
    "header",
    [
        "--retry 3",
        "--retry=3",
        "-o r --retry 3",
        "--shrink batch",
        "--help",
        "-h",
        "--keep --help # why",
    ],
)
def test_an_option_that_needs_the_body_keeps_the_cell_magic(header):
    """A body that is to run twice, or not at all, is handed to the magic."""
    assert promoted(f"%%oomguard {header}\nx = 1\n") == f"%%oomguard {header}\nx = 1\n"


def test_an_option_in_a_comment_does_not_count():
    """What stands behind a # is not an option."""
    assert promoted("%%oomguard # not --retry\nx\n").startswith("%oomguard")


def test_an_option_needs_the_body_only_with_its_own_magic():
    """--retry means nothing to %%ondevice, which says so itself."""
    assert promoted("%%ondevice cuda --retry 2\nx\n").startswith("%ondevice")


@pytest.mark.parametrize("header", ["%%ondevice cuda", "%%ondevice --help", "%%oomguard --retry 2"])
def test_a_cell_without_a_body_is_promoted(header):
    """IPython refuses a cell magic without a body, a line magic answers."""
    assert promoted(header + "\n") == header[1:] + "\n"


def test_both_magics_are_promoted_one_above_the_other():
    """Each takes its line."""
    assert promoted("%%ondevice cuda\n%%oomguard\nx\n") == "%ondevice cuda\n%oomguard\nx\n"


@pytest.mark.parametrize("between", ["", "\n", "\n  \n"])
def test_a_cell_magic_below_ours_is_still_a_cell_magic(between):
    """As in `%%time` over `%%capture`, whose body IPython transforms like a cell."""
    below = f"{between}get_ipython().run_cell_magic('time', '', 'x = 1\\n')\n"
    assert promoted(f"%%ondevice cuda\n{between}%%time\nx = 1\n") == "%ondevice cuda\n" + below


def test_an_indented_or_prompted_body_runs_as_it_would_alone():
    """IPython takes the indent and the prompts off a cell, so they come off a body."""
    assert promoted("%%ondevice cuda\n    x = 1\n    y = 2\n") == "%ondevice cuda\nx = 1\ny = 2\n"
    assert promoted("%%ondevice cuda\n>>> x = 1\n>>> y = 2\n") == "%ondevice cuda\nx = 1\ny = 2\n"


def test_strings_and_tabs_of_the_body_stay_as_they_are():
    """Nothing is indented, and no string gains a space."""
    body = "s = '''a\n  b\n\n\tc'''\nif s:\n\tx = 1\n"
    assert promoted("%%ondevice cuda\n" + body) == "%ondevice cuda\n" + body


@given(
    st.lists(
        st.text(
            st.characters(
                codec="utf-8", exclude_characters="%\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
            )
        )
    )
)
def test_no_line_moves_whatever_the_body(lines):
    """A traceback's line is the user's line."""
    cell = ["%%ondevice cuda\n", *(line + "\n" for line in lines)]
    assert len(promote(cell)) == len(cell)


@given(
    st.lists(st.text() | st.sampled_from(["%%ondevice", "%%oomguard --retry", "%%time", "\n", " "]))
)
def test_it_never_raises(lines):
    """A transformer that raises would break every cell of the session."""
    promote(lines)


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("%%ondevice cuda", "incomplete"),
        ("%%ondevice cuda\nx = 1", "incomplete"),
        ("%%ondevice cuda\nx = 1\n", "complete"),
    ],
)
def test_a_terminal_lets_the_user_write_the_body(cell, status):
    """As for any cell magic, Enter ends the cell only on a blank line."""
    manager = TransformerManager()
    manager.cleanup_transforms.append(promote)
    assert manager.check_complete(cell + "\n")[0] == status
