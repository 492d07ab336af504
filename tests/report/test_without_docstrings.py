"""`python -OO` takes docstrings away, and dataclasses then render their defaults to make one."""

from __future__ import annotations

import subprocess
import sys

_EVERY_REPORT = """
import importlib, pkgutil, sys
import gpumagic
reports = [each.name for each in pkgutil.walk_packages(gpumagic.__path__, "gpumagic.") if each.name.endswith("report")]
for name in reports:
    for known in [each for each in sys.modules if each.startswith("gpumagic")]:
        del sys.modules[known]
    importlib.import_module(name)
print(len(reports))
"""


def test_every_reports_module_can_be_the_first_to_be_imported_in_a_python_without_docstrings() -> (
    None
):
    ended = subprocess.run(
        [sys.executable, "-OO", "-c", _EVERY_REPORT], capture_output=True, text=True, check=False
    )
    assert ended.stderr == ""
    assert int(ended.stdout) >= 7
