"""Several statements that compute one expression, seen as that expression."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumagic.source import text as texts
from gpumagic.source.text import CellText, Change, apply_changes


@dataclass(frozen=True, slots=True)
class Joined:
    """An expression that several statements compute, as one."""

    text: CellText
    last: ast.expr
    """Its place in the cell: the value of the last of the statements."""
    before: tuple[ast.Assign, ...]
    """The others, whose values are in it."""

    def changes(self, text: CellText, change: Change) -> list[Change]:
        """Return the changes of the cell's text for one of the expression: the other statements become `pass`."""
        return self.replaced_by(text, apply_changes([change], self.text.source))

    def replaced_by(self, text: CellText, code: str) -> list[Change]:
        """Return the changes of the cell's text that put other code in the expression's place."""
        return [text.replace(self.last, code), *(text.replace(each, "pass") for each in self.before)]


MOST_STATEMENTS = 4


def joined_in(text: CellText, failed: ast.stmt | None = None) -> Iterator[Joined]:
    """Yield the expressions that a statement is part of, by itself or with those after and before it.

    Args:
        text: the text of the cell.
        failed: the statement; the one that failed without.
    """
    failed = failed or text.statement_at(text.line)
    if failed is None:
        return
    block = text.block_of(failed)
    place = next((i for i, each in enumerate(block) if each is failed), 0)
    for i, last in enumerate(block[place : place + MOST_STATEMENTS], place):
        value = last.value if isinstance(last, ast.Assign | ast.Return | ast.Expr) else None
        if value is None:
            continue
        code, used = _inlined(text, value, block[max(0, i - MOST_STATEMENTS) : i])
        whole = texts.parse(f"({code})" if "\n" in code else code)
        if whole is not None and (last is failed or any(each is failed for each in used)):
            yield Joined(whole, value, tuple(used))


def _inlined(text: CellText, value: ast.expr, before: Sequence[ast.stmt]) -> tuple[str, list[ast.Assign]]:
    """Return an expression's code with the values of variables in their place that are bound and read only once."""
    code, used = text.code(value), list[ast.Assign]()
    for each in reversed(before):
        target = each.targets[0] if isinstance(each, ast.Assign) and len(each.targets) == 1 else None
        if not isinstance(each, ast.Assign) or not isinstance(target, ast.Name) or not text.stands_alone(each):
            continue
        uses = [node for node in text.nodes() if isinstance(node, ast.Name) and node.id == target.id]
        reads = sum(isinstance(node.ctx, ast.Load) for node in uses)
        if 2 * reads == len(uses) and len(re.findall(rf"\b{target.id}\b", code)) == 1:
            code, used = _put(code, target.id, text.code(each.value)), [*used, each]
    return code, used


def _put(code: str, name: str, value: str) -> str:
    return re.sub(rf"\b{name}\b", lambda _: f"({value})", code)
