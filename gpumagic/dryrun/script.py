"""What a dry run runs: a cell's code, or a callable."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.errors import OptionError
from gpumagic.source.frames import names_looked_up

CELL = "<dry run>"


@dataclass(frozen=True)
class Script:
    """What is dry-run.

    Attributes:
        source: Python code; None for a callable.
        function: what is called, without arguments, where there is no code.
    """

    source: str | None
    function: Callable[[], object] | None
    filename: str

    def names(self) -> list[str]:
        """Return the global names it may use."""
        if self.source is None:
            return []
        return list(names_looked_up(_compiled(self.source)))

    def needed(self) -> set[str] | None:
        """Return the names whose values it may look up, and not only bind anew; None where all may be."""
        return None if self.source is None else _looked_up(ast.parse(self.source).body, set())


def script_of(what: str | Callable[[], object], above: int = 0) -> Script:
    """Return what to run.

    Args:
        what: code as a notebook's cell has it, or a callable without arguments.
        above: how many lines stand above the code in its cell.

    Raises:
        OptionError: the code has a syntax error, or it is neither.
    """
    if callable(what):
        code = getattr(what, "__code__", None)
        return Script(None, what, getattr(code, "co_filename", CELL))
    if not isinstance(what, str):
        raise OptionError(f"a dry run takes code or a callable, not {type(what).__name__}")
    from IPython.core.inputtransformer2 import TransformerManager

    above += len(what[: len(what) - len(what.lstrip())].splitlines())  # which IPython takes away
    source = "\n" * above + TransformerManager().transform_cell(what)
    _compiled(source)
    return Script(source, None, CELL)


def _compiled(source: str) -> Any:
    try:
        return compile(source, CELL, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, RecursionError) as error:  # Python's own limits, as for an expression of thousands of terms
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line is not None else ""
        raise OptionError(f"the code cannot be dry-run: {getattr(error, 'msg', error)}{where}") from None


def _looked_up(body: Sequence[ast.stmt], bound: set[str]) -> set[str]:
    """Return the names that statements look up before they have bound them; add those that they bind for sure."""
    found: set[str] = set()
    for statement in body:
        blocks = [
            getattr(statement, name) for name in ("body", "orelse", "finalbody") if hasattr(statement, name)
        ] if isinstance(statement, _BLOCKS) else []  # fmt: skip
        inner = {id(each) for block in blocks for each in block}
        own = [each for each in ast.iter_child_nodes(statement) if id(each) not in inner]
        names = [each for node in own for each in ast.walk(node) if isinstance(each, ast.Name)]
        found |= {each.id for each in names if not isinstance(each.ctx, ast.Store)} - bound - _local_to(statement)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            found |= {statement.target.id} - bound
        stored = {each.id for each in names if isinstance(each.ctx, ast.Store)}
        for block in blocks:
            is_certain = isinstance(statement, ast.With | ast.AsyncWith)
            found |= _looked_up(block, bound if is_certain else {*bound, *stored})
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.With | ast.AsyncWith):
            bound |= stored if getattr(statement, "value", True) is not None else set()
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            bound |= {(each.asname or each.name).partition(".")[0] for each in statement.names}
    return found


def _local_to(statement: ast.stmt) -> set[str]:
    """Return the names that are a comprehension's own, or a function's."""
    is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
    nodes = list(ast.walk(statement))
    targets = nodes if is_function else [each.target for each in nodes if isinstance(each, ast.comprehension)]
    names = [each for node in targets for each in ast.walk(node) if isinstance(each, ast.Name)]
    stored = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return stored | {each.arg for each in nodes if isinstance(each, ast.arg)}


_BLOCKS = (ast.With, ast.AsyncWith, ast.For, ast.AsyncFor, ast.While, ast.If)
