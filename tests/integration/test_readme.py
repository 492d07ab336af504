"""The README says what is there: its options are the magics' options, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpumagic import options

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("magic", options.MAGICS)
def test_each_option_is_in_the_magics_heading_and_no_other(magic) -> None:
    heading = re.search(rf"^\*\*`%+{magic} ?(.*?)`\*\*", README, re.MULTILINE | re.DOTALL)
    assert heading is not None, f"the README has no heading for {magic}"
    said = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", heading[1]))
    declared = [set(action.option_strings) for action in options.parser(magic)._actions if action.option_strings]
    known = set().union(*declared)
    assert said <= known, f"{magic} has no {said - known}"
    unsaid = [sorted(names) for names in declared if not names & said and "--help" not in names]
    assert not unsaid, f"the README does not say {unsaid}"


def test_its_python_runs(bare_shell, two_devices) -> None:
    """With the simulated devices in the place of CUDA's."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        result = bare_shell.run_cell(block.replace("cuda:", "simgpu:"))
        assert result.success, f"{result.error_in_exec!r} in\n{block}"
