"""Which lines of a cell can have run between two moments of which the lines are known.

Lines run downwards, except that a loop comes back to its first line, a `with` to its own as it is left, and a statement
of several lines goes to and fro in them. So the answer is a span that is certain, and only sometimes a single line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_WITHS = (ast.With, ast.AsyncWith)
_HEADED = (ast.If, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TRIES = (ast.Try, *([ast.TryStar] if hasattr(ast, "TryStar") else []))


def between(code: Mapping[int, str], first: int | None, last: int | None) -> tuple[int, int] | None:
    """Return the first and the last line that can have run between two, these included.

    None where one of the two is not a line of the code, the code cannot be read, or the span is all of it, which
    says nothing.

    Args:
        code: the lines by number, magics as they are written; of a function, with its head.
        first: the line that ran at the earlier moment.
        last: the one that ran at the later.
    """
    if first not in code or last not in code:
        return None
    assert first is not None
    assert last is not None
    body = _body(code)
    if body is None:
        return None
    low, high = min(first, last), max(first, last)
    while (wider := _widened(body, first, last, low, high)) != (low, high):
        low, high = wider
    begins = min((each.lineno for each in body), default=low)
    if low < begins <= high:
        low = begins  # above it stand the magics and the head of the function
    ends = max((each.end_lineno or 0 for each in body), default=high)
    return None if low != high and low <= begins and high >= ends else (low, high)


def _body(code: Mapping[int, str]) -> list[ast.stmt] | None:
    """Return the statements of the code with its own line numbers, those of a function alone without its head."""
    start = min(code)
    lines = [code.get(line, "") for line in range(start, max(code) + 1)]
    try:
        tree = ast.parse("\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines))
    except (SyntaxError, ValueError):
        return None
    ast.increment_lineno(tree, start - 1)
    alone = tree.body[0] if len(tree.body) == 1 else None
    return alone.body if isinstance(alone, _FUNCTIONS) else tree.body


def _widened(body: list[ast.stmt], first: int, last: int, low: int, high: int) -> tuple[int, int]:
    """Return the span with the whole of every statement that may have gone back while the span ran."""
    for node in _statements(body):
        top, bottom = node.lineno, node.end_lineno or node.lineno
        if isinstance(node, _HEADED):
            bottom = (node.test if isinstance(node, ast.If) else node.subject).end_lineno
        elif isinstance(node, _TRIES):
            continue
        elif isinstance(node, _WITHS) and node.body[0].lineno <= last <= bottom:
            continue  # it has not been left
        if top <= low <= bottom or top <= high <= bottom or top <= first <= bottom:
            low, high = min(low, top), max(high, bottom)
    return low, high


def _statements(body: list[ast.stmt]) -> Iterator[Any]:
    """Yield the statements that run where they stand: not those of functions and classes, which run elsewhere."""
    for node in body:
        yield node
        if isinstance(node, (*_LOOPS, *_WITHS, *_HEADED, *_TRIES)):
            for each in _blocks(node):
                yield from _statements(each)


def _blocks(node: Any) -> Iterator[list[ast.stmt]]:
    for each in ("body", "orelse", "finalbody"):
        yield getattr(node, each, [])
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body
