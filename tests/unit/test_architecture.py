"""The layers hold, and loading is light: what DESIGN says must always be so."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import gpumagic

PACKAGE = Path(gpumagic.__file__).parent
HEAVY = {"torch", "pandas", "pynvml", "numpy", "matplotlib"}

# Who may not import whom: a probe never formats, a renderer never measures, a report is only data.
FORBIDDEN = {
    "render": {"gpumagic.probes", "gpumagic.magics", "gpumagic.notebook.cells", "gpumagic.api", "torch", "IPython"},
    "reports": {"gpumagic.probes", "gpumagic.magics", "gpumagic.notebook.cells", "torch", "IPython"},
    "probes": {"gpumagic.render", "gpumagic.magics", "gpumagic.extension", "gpumagic.api"},
    # Its sentences carry sizes, so it may use `report.units` and nothing else of the renderers.
    "advice": {
        "gpumagic.probes",
        "gpumagic.report.document",
        "gpumagic.report.text",
        "gpumagic.report.html",
        "torch",
        "IPython",
    },
}


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Return the modules a file imports; type-checking imports do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for statement in tree.body for node in _reached(statement, top_level)]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _reached(statement: ast.stmt, top_level: bool) -> list[ast.AST]:
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return []
    return [statement] if top_level else list(ast.walk(statement))


def test_no_layer_reaches_into_one_it_must_not_know() -> None:
    for layer, forbidden in FORBIDDEN.items():
        root = PACKAGE / layer
        for path in [root] if root.suffix else root.rglob("*.py"):
            reached = {name for name in imports(path) for banned in forbidden if f"{name}.".startswith(f"{banned}.")}
            assert not reached, f"{path.relative_to(PACKAGE)} must not import {reached}"


def test_no_probe_formats_bytes() -> None:
    for path in (PACKAGE / "probes").rglob("*.py"):
        assert "GiB:" not in path.read_text(encoding="utf-8"), path


def test_importing_every_report_and_renderer_needs_neither_torch_nor_ipython() -> None:
    code = (
        "import sys, gpumagic, gpumagic.reports, gpumagic.render, gpumagic.options, gpumagic.gpus.device_names\n"
        f"print(sorted(({HEAVY!r} | {{'IPython'}}) & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_loading_the_extension_imports_none_of_the_heavy_packages() -> None:
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "before = set(sys.modules)\n"
        "shell.run_line_magic('load_ext', 'gpumagic')\n"
        f"print(sorted({HEAVY!r} & (set(sys.modules) - before)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_public_name_is_there_and_described() -> None:
    for name in gpumagic.__all__:
        assert getattr(gpumagic, name).__doc__, name
    assert set(gpumagic.__all__) <= set(dir(gpumagic))
