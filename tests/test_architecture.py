"""The layers hold, and loading is light: what DESIGN says must always be so."""

from __future__ import annotations

import ast
import builtins
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import gpumagic

PACKAGE = Path(gpumagic.__file__).parent
HEAVY = {"torch", "pandas", "pynvml", "numpy", "matplotlib"}

RANKS = (
    "errors", "_compat", "backends", "compiled", "report", "source", "memory", "options", "heap", "simgpu", "fakecuda",
    "notebook", "gpus", "tensors", "transfers", "dryrun", "worker", "advice", "oom", "cluster", "api", "magics",
    "extension", "__main__", "",
)  # fmt: skip
"""The layers, from what knows nothing of the others to what knows all: nothing imports from a later one."""
FEATURES = {
    "gpus": set(),
    "tensors": set(),
    "transfers": {"tensors"},
    "dryrun": {"tensors"},
    "advice": {"tensors", "transfers", "dryrun"},
    "oom": {"tensors", "transfers", "dryrun", "advice"},
}
"""Which features each feature may import from."""
MEASURING = {"torch", "IPython", "pynvml", "gc", "gpumagic.memory.allocator"}
"""What a view or a record of a report never imports."""

Edge = tuple[str, str]


def edges() -> set[Edge]:
    """Return every import between modules of the package, those inside functions and for types included."""
    modules = {name(path): path for path in PACKAGE.rglob("*.py")}
    found = set()
    for importer, path in modules.items():
        for imported in imports(path):
            if imported in modules and imported != importer:
                found.add((importer, imported))
    return found


def name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, and what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            taken = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {each for each in taken if is_module(each)}
            names |= taken
            if modules != taken:
                names.add(node.module)
    return names


def is_module(dotted: str) -> bool:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_every_module_has_its_layer() -> None:
    assert {layer(name(path)) for path in PACKAGE.rglob("*.py")} == set(RANKS)


def test_no_import_leads_to_a_later_layer() -> None:
    upward = {
        (importer, imported)
        for importer, imported in edges()
        if RANKS.index(layer(imported)) > RANKS.index(layer(importer))
    }
    assert upward == set()


def test_features_import_from_those_features_alone_that_are_declared() -> None:
    undeclared = {
        (importer, imported)
        for importer, imported in edges()
        if {layer(importer), layer(imported)} <= set(FEATURES)
        and layer(importer) != layer(imported)
        and layer(imported) not in FEATURES[layer(importer)]
    }
    assert undeclared == set()


SPOKEN = {"gpumagic.dryrun.parts", "gpumagic.dryrun.effects", "gpumagic.dryrun.wire"}
"""What the notebook's process and the worker say to each other."""


def test_the_worker_knows_of_the_features_only_what_is_said_to_it() -> None:
    known = {
        imported
        for importer, imported in edges()
        if layer(importer) == "worker" and layer(imported) in FEATURES
    }
    assert known <= SPOKEN


def test_nothing_imports_the_worker() -> None:
    importers = {
        importer for importer, imported in edges() if layer(imported) == "worker" != layer(importer)
    }
    assert importers == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(edges()) == set()


def test_no_c_files_of_the_fake_runtime_call_each_other_in_a_circle() -> None:
    native = (PACKAGE / "fakecuda" / "native").glob("*.c")
    sources = {
        path.name: re.sub(r"/\*.*?\*/|\"[^\"\n]*\"", "", path.read_text(), flags=re.DOTALL)
        for path in native
    }
    defined = {
        function: file
        for file, text in sources.items()
        for function in re.findall(
            r"^(?!static|typedef)[\w ]+[ *](\w+)\([^;]*\) \{", text, re.MULTILINE
        )
    }
    assert defined["capture_take"] == "capture.c"
    assert circles({
        (file, defined[word])
        for file, text in sources.items()
        for word in re.findall(r"\w+", text)
        if defined.get(word, file) != file
    }) == set()  # fmt: skip


def circles(found: set[Edge]) -> set[frozenset[str]]:
    """Return the groups of modules in which each reaches each other."""
    following: dict[str, list[str]] = {}
    for importer, imported in found:
        following.setdefault(importer, []).append(imported)
    reached = {module: reach(module, following) for module in following}
    groups = {
        frozenset(other for other in seen if module in reached.get(other, ()))
        for module, seen in reached.items()
    }
    return {group for group in groups if len(group) > 1}


def reach(start: str, following: dict[str, list[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for each in following.get(waiting.pop(), ()):
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return seen


def test_no_view_and_no_record_measures() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.stem.endswith(("view", "report")) and path.stem != "api":
            found = {
                each
                for each in imports(path)
                for banned in MEASURING
                if f"{each}.".startswith(f"{banned}.")
            }
            assert not found, f"{path.relative_to(PACKAGE)} must not import {found}"


def test_no_probe_formats() -> None:
    renderers = {"gpumagic.report.text", "gpumagic.report.html"}
    for path in PACKAGE.rglob("*.py"):
        if layer(name(path)) in FEATURES and not path.stem.endswith("view"):
            assert not imports(path) & renderers, path.relative_to(PACKAGE)


def test_importing_every_report_and_view_needs_neither_torch_nor_ipython() -> None:
    views = ", ".join(f"gpumagic.{feature}.view" for feature in (*FEATURES, "cluster"))
    code = (
        f"import sys, gpumagic.report.base, gpumagic.options, gpumagic.memory.devices, {views}\n"
        f"print(sorted(({HEAVY!r} | {{'IPython'}}) & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_loading_the_extension_imports_neither_a_heavy_package_nor_a_report() -> None:
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "before = set(sys.modules)\n"
        "shell.run_line_magic('load_ext', 'gpumagic')\n"
        "new = set(sys.modules) - before\n"
        f"print(sorted({HEAVY!r} & new), sorted(name for name in new if name.startswith('gpumagic.report')))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[] []"


def test_every_public_name_is_there_and_described() -> None:
    for name in gpumagic.__all__:
        assert getattr(gpumagic, name).__doc__, name
    assert set(gpumagic.__all__) <= set(dir(gpumagic))


def test_type_checkers_know_every_public_name() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    exported = {
        f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }
    homes = {f"{home}.{name}" for name, home in gpumagic._HOMES.items()}
    assert exported == homes | {"gpumagic.cluster", "gpumagic.simgpu"}


def test_every_file_that_a_package_lists_is_there() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        listed = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for file in re.findall(r"(?m)(?:^ {4}|`)([\w/]+\.py)\b", listed):
            is_there = (path.parent / file).exists() or (PACKAGE / file).exists()
            assert is_there, f"{path.relative_to(PACKAGE)} names {file}"


def test_every_part_of_memory_has_its_colour() -> None:
    from gpumagic.memory.ledger import PARTS
    from gpumagic.report.document import PART_COLOURS

    assert {part.name for part in PARTS} == set(PART_COLOURS)


FOREIGN = {
    # of torch, transformers and IPython, which our code calls by no name
    "torch.cuda.jiterator", "torch.linalg.eig", "matrix_exp", "lobpcg", "torch.cuda.memory._dump_snapshot",
    "DataParallel", "setReduceConfig", "num_splits_heuristic", "is_gradient_checkpointing", "named_modules",
    "execution_count", "run_cell", "check_complete", "enable_grad", "set_default_tensor_type",
    "torch.get_default_device", "torch.from_numpy", "_parse_visible_devices",
    # of Python and CUDA
    "__hash__", "CUBLAS_WORKSPACE_CONFIG",
    # of Linux
    "F_SETOWN", "F_SETOWN_EX", "FIOSETOWN", "SIOCSPGRP", "FS_IOC_SETFLAGS", "FS_IOC_FSSETXATTR",
}  # fmt: skip
"""Names in backquotes that are no names of this package's code, each of something else that exists."""


def test_every_name_in_backquotes_exists() -> None:
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".cpp", ".c", ".h"}]
    known = {
        *dir(builtins),
        *(path.stem for path in sources),
        *(path.parent.name for path in sources),
    }
    prose: list[tuple[Path, str]] = []
    for path in sources:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            said = set(docstrings(text))
            prose += [(path, each) for each in said]
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
            prose += [(path, each.string) for each in tokens if each.type == tokenize.COMMENT]
            text = " ".join(each.string for each in tokens if is_code(each, said))
        known.update(re.findall(r"\w+", text))
    pattern = r"(?<!`)`([A-Za-z_][\w.]*\w)(?:\(\))?`(?!`)"
    named = {(path.name, name) for path, text in prose for name in re.findall(pattern, text)}
    gone = {
        (file, name)
        for file, name in named
        if name.rpartition(".")[2] not in known and name not in FOREIGN
    }
    assert gone == set()


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


def is_code(token: tokenize.TokenInfo, prose: set[str]) -> bool:
    if token.type == tokenize.STRING and token.string[-1] in "\"'" and token.string[0] in "\"'":
        return ast.literal_eval(token.string) not in prose
    return token.type != tokenize.COMMENT
