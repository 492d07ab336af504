"""Which lines a run is about: a cell's, those of a `with` block, or those of a decorated function.

What the code names is looked up when the run ends: in a cell among the notebook's variables, in a function's block
among the function's own, too.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from gpumagic.source import frames


@dataclass
class WatchedCode:
    """The code of one run.

    Attributes:
        namespace: its globals.
        filename: its file; None as long as it is not known.
        line: where its `with` statement or its function begins; None for a cell, of which the file is all.
    """

    namespace: Mapping[str, Any]
    filename: str | None = None
    line: int | None = None
    _variables: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> tuple[tuple[int, str], ...]:
        """Return the code's numbered lines, without their common indentation."""
        text = self._text()
        block = _read("".join(text), self.line)
        first, last = (1, len(text)) if self.line is None else (block.first, block.last)
        numbered = [(number, _as_written(text[number - 1].rstrip(), number)) for number in range(first, last + 1)]
        indent = min((len(code) - len(code.lstrip()) for _, code in numbered if code.strip()), default=0)
        return tuple((number, code[indent:]) for number, code in numbered)

    def names(self) -> tuple[str, ...]:
        """Return the variables that the code names, in order of appearance."""
        return _read("".join(self._text()), self.line).names

    def _text(self) -> list[str]:
        return linecache.getlines(self.filename or "")

    def look(self, frame: FrameType) -> None:
        """Note what the names are bound to in the frame of a `with` block that ends."""
        if frames.is_a_functions(frame) and frame.f_globals is self.namespace:
            self._variables = frames.variables(frame, set(self.names()))

    def variables(self) -> Mapping[str, Any]:
        """Return what the names may be bound to; what `look` noted is forgotten by it."""
        own, self._variables = self._variables, {}
        return {**{name: self.namespace[name] for name in self.names() if name in self.namespace}, **own}


def of_function(code: CodeType, namespace: Mapping[str, Any]) -> WatchedCode:
    """Return the code of a decorated function."""
    return WatchedCode(namespace, code.co_filename, code.co_firstlineno)


class _Block(NamedTuple):
    names: tuple[str, ...] = ()
    first: int = 1
    last: int = 0


@lru_cache(maxsize=32)
def _read(source: str, line: int | None) -> _Block:
    """Return what is to be known of a block; remembered, since a `with` in a loop comes here each turn."""
    try:
        tree: Any = ast.parse(source)
    except (SyntaxError, ValueError):
        return _Block()
    block = tree if line is None else _at(tree, line)
    if block is None:
        return _Block()
    names = (node.id for statement in block.body for node in ast.walk(statement) if isinstance(node, ast.Name))
    found = tuple(dict.fromkeys(names))
    return _Block(found) if line is None else _Block(found, _first_line(block), block.end_lineno)


def _at(tree: ast.AST, line: int) -> Any:
    """Return the innermost `with` whose head is on the line, or the function that begins there."""
    found: ast.AST | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            if node.lineno <= line <= max(item.context_expr.end_lineno or 0 for item in node.items):
                found = node
        elif isinstance(node, ast.FunctionDef) and _first_line(node) == line:
            found = node
    return found


def _first_line(node: Any) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([int(node.lineno), *(int(each.lineno) for each in decorators)])


def _as_written(code: str, number: int) -> str:
    """Return a line as the user wrote it, where it is a magic that IPython has made a call of."""
    match = re.fullmatch(r"get_ipython\(\)\.run_(line|cell)_magic\('(\w+)', '(.*?)'(?:, '.*')?\)", code)
    if match is None:
        return code
    return f"{'%%' if number == 1 or match[1] == 'cell' else '%'}{match[2]} {match[3]}".rstrip()
