"""Private names of torch stand in one place, and no magic fails where torch lacks one of them."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpumagic
from gpumagic._compat import torch_frames, torch_private

PACKAGE = Path(gpumagic.__file__).parent
MAY_NAME_THEM = {"_compat", "worker"}
"""The worker's process is torch's alone: what fails there is a dry run that says so."""

PYTHONS = {
    "_getframe", "_current_frames", "_lru_cache_wrapper", "_max_workers", "_replace", "_asdict", "_fields", "_make",
    "_actions", "_format_action_invocation", "_format_args",
}  # fmt: skip
IPYTHONS = {"_showtraceback"}
LIBRARIES = {"_closed", "_engines", "_mux_stream", "_streamed_errors", "_shared_state", "_mgr"}
"""Of ipyparallel, accelerate and pandas."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


@functools.cache
def torchs_own() -> set[str]:
    """Return every private part of the names of torch that `_compat` has."""
    found: set[str] = set()
    for module in (torch_private, torch_frames):
        for text in texts(ast.parse(inspect.getsource(module))):
            if re.fullmatch(r"[\w.()]+", text):
                found.update(part for part in re.split(r"[.()]", text) if is_private(part))
    return found


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the string constants of a file that are neither prose nor types."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_type = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
        if is_type:
            prose.update(id(inner) for inner in ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


@functools.cache
def defined_here() -> set[str]:
    """Return the names that the package itself defines anywhere."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def private_names_of_torch(tree: ast.Module, torchs: set[str], ours: set[str]) -> Iterator[str]:
    """Yield what a file names of torch: a name of torch's, and any that nobody else is known to have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and not is_known(node, torchs, ours):
                yield ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            paths = [f"{module or ''}.{alias.name}".strip(".") for alias in node.names]
            parts = [path.split(".") for path in paths if path.startswith("torch")]
            if any(is_private(part) for path in parts for part in path):
                yield ast.unparse(node)
    for text in texts(tree):
        if text in torchs or re.search(r"\btorch(\.\w+)*\._\w", text):
            yield repr(text)


def is_known(attribute: ast.Attribute, torchs: set[str], ours: set[str]) -> bool:
    """Return whether a private attribute is an object's own, or of another package that is known to have it."""
    if isinstance(attribute.value, ast.Name) and attribute.value.id in {"self", "cls"}:
        return attribute.attr in ours | PYTHONS
    return attribute.attr in (ours | PYTHONS | IPYTHONS | LIBRARIES) - torchs


def test_no_file_but_those_of_compat_and_worker_names_a_private_attribute_of_torch() -> None:
    torchs, ours = torchs_own(), defined_here()
    assert {"_C", "_cdata", "_parameters", "_raw_saved_", "_device_constructors"} <= torchs
    named = {}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if place.parts[0] not in MAY_NAME_THEM:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if found := sorted(private_names_of_torch(tree, torchs, ours)):
                named[str(place)] = found
    assert named == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch._C.something",
        "tensor._version",
        "storage._cdata",
        "self._parameters",
        "node._raw_saved_self",
        "from torch._C import DispatchKey",
        "from torch.overrides import _push_mode",
        "import torch._dynamo as compiler",
        "getattr(tensor, '_version', 0)",
        "frame_is_in('torch._tensor_str')",
    ],
)
def test_such_a_name_is_seen(line: str) -> None:
    assert list(private_names_of_torch(ast.parse(line), torchs_own(), defined_here()))


def test_each_private_name_of_torch_is_given_once() -> None:
    paths = [name.path for name in torch_private.NAMES]
    assert len(paths) == len(set(paths))
