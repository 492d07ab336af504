"""The text of a cell with its syntax tree, and edits that keep every other character.

An edit is made of nodes, never of searched words, so it lands where Python saw them. What cannot be edited safely, a
statement that shares its line with another say, yields no edit.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import linecache
import re
import textwrap
import threading
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, TracebackType
from typing import Any

from gpumagic import _compat

INDENT = "    "
_HEADER = ":\n"
_ONE_PARSES = threading.RLock()
_SKIPPED = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.COMMENT,
}


@dataclass(frozen=True, slots=True)
class Change:
    """A piece of a cell's text and what is to stand in its place."""

    line: int
    """The cell's line on which it begins, from 1, the line of the magic included."""
    column: int
    """The character of that line, from 0."""
    old: str
    """What stands there; empty to insert."""
    new: str
    cell: str = ""
    """Which cell: ``"In [3]"``; empty for the one that failed."""


def apply_changes(changes: Iterable[Change], source: str, cell: str = "") -> str:
    """Return the text of a cell with those of the changes made that are for it.

    Raises:
        ValueError: the text is not the one that the changes were made for.
    """
    starts = _line_starts(source)
    # From the last to the first, so that the places of the others still hold.
    ordered = sorted(changes, key=_order)
    below: Change | None = None
    for change in [each for each in ordered if each.cell == cell][::-1]:
        at = starts[min(change.line, len(starts)) - 1] + change.column
        if not source.startswith(change.old, at):
            raise ValueError(f"line {change.line} does not read {change.old!r} any more")
        is_around = below is not None and below.line == change.line and below.new.endswith(_HEADER)
        inner = INDENT if is_around and change.new.endswith(_HEADER) else ""
        source, below = source[:at] + change.new + inner + source[at + len(change.old) :], change
    return source


def _order(change: Change) -> tuple[int, int, int]:
    """Order changes by their places: at one place whole lines come first, then what indents, then other code."""
    is_line = not change.old and change.new.endswith("\n")
    return change.line, change.column, 0 if is_line else 1 if change.new == INDENT else 2


def _line_starts(source: str) -> list[int]:
    return [0, *itertools.accumulate(len(line) + 1 for line in source.split("\n"))]


@dataclass(frozen=True, slots=True)
class CellText:
    """The text of a cell and its tree.

    Attributes:
        source: the text as Python got it; its lines are numbered as the tree's are.
        cell: which cell it is of, as `Change.cell`.
        line: the line that ran when the failure came; None if it is not known.
    """

    source: str
    cell: str = ""
    line: int | None = None
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []), compare=False, repr=False)

    def nodes(self) -> Iterator[ast.AST]:
        """Yield every node of the tree."""
        return ast.walk(self.tree)

    def expressions(self) -> Iterator[ast.expr]:
        """Yield every expression of the tree."""
        return (node for node in self.nodes() if isinstance(node, ast.expr))

    def code(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return ast.get_source_segment(self.source, node) or ""

    def replace(self, node: ast.expr | ast.stmt, new: str) -> Change:
        """Return the change that puts other code in the place of an expression or a statement."""
        return Change(
            node.lineno, self._column(node.lineno, node.col_offset), self.code(node), new, self.cell
        )

    def append(self, node: ast.expr, new: str) -> Change:
        """Return the change that writes code right behind an expression."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return Change(
            node.end_lineno, self._column(node.end_lineno, node.end_col_offset), "", new, self.cell
        )

    def add_argument(self, call: ast.Call, argument: str) -> Change:
        """Return the change that gives a call one more keyword argument, the last."""
        arguments: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
        if arguments:
            last = max(arguments, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0))
            behind = self.source[self._span(last)[1] : self._span(call)[1]]
            if re.fullmatch(
                r"[\s,]*\)", behind
            ):  # else a comment stands there, or a bracket around the argument
                return self.append(last, f", {argument}")
        assert call.end_lineno is not None
        assert call.end_col_offset is not None
        has_comma = self.code(call).rstrip(") \t\n").endswith(",")
        comma = ", " if arguments and not has_comma else ""
        column = self._column(call.end_lineno, call.end_col_offset) - 1
        return Change(call.end_lineno, column, "", comma + argument, self.cell)

    def insert(self, statement: ast.stmt, code: str) -> tuple[Change, ...]:
        """Return the change that puts lines before a statement, or none where it does not begin its line."""
        if not self.stands_alone(statement):
            return ()
        line, indent = first_line(statement), self._indent(first_line(statement))
        return (Change(line, 0, "", textwrap.indent(code, indent) + "\n", self.cell),)

    def insert_after(self, statement: ast.stmt, code: str) -> tuple[Change, ...]:
        """Return the change that puts lines behind a statement, or none where it does not end its line."""
        if not self.stands_alone(statement):
            return ()
        assert statement.end_lineno is not None
        line, lines = statement.end_lineno, self.source.split("\n")
        new = "\n" + textwrap.indent(code, self._indent(first_line(statement)))
        return (Change(line, len(lines[line - 1]), "", new, self.cell),)

    def remove(self, statement: ast.stmt) -> Change:
        """Return the change that takes away the lines of a statement that stands alone, and is not all of a block."""
        first, end = first_line(statement), statement.end_lineno or 0
        starts = [*_line_starts(self.source), len(self.source)]
        return Change(first, 0, self.source[starts[first - 1] : starts[end]], "", self.cell)

    def wrap(
        self, statements: Sequence[ast.stmt], header: str, removed: Sequence[ast.stmt] = ()
    ) -> tuple[Change, ...]:
        """Return the changes that put whole statements of one block under a header such as ``with x:``.

        Those that other changes have `removed` are left as they are.
        """
        if not statements or not all(map(self.stands_alone, statements)):
            return ()
        first, last = first_line(statements[0]), statements[-1].end_lineno or 0
        opening = Change(first, 0, "", f"{self._indent(first)}{header}\n", self.cell)
        gone = {
            line for each in removed for line in range(first_line(each), (each.end_lineno or 0) + 1)
        }
        starts = [
            line for line in self._logical_lines() if first <= line <= last and line not in gone
        ]
        inner = [Change(line, len(self._indent(line)), "", INDENT, self.cell) for line in starts]
        return (opening, *inner)

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Return whether a statement shares its lines with no other code."""
        line, end = first_line(statement), statement.end_lineno or 0
        lines = self.source.split("\n")
        is_decorated = bool(
            getattr(statement, "decorator_list", None)
        )  # then the `@` stands before its own code
        before = "" if is_decorated else lines[line - 1][: self._column(line, statement.col_offset)]
        after = lines[end - 1][self._column(end, statement.end_col_offset or 0) :].strip()
        continued = line > 1 and lines[line - 2].endswith("\\")
        return not before.strip() and (not after or after.startswith("#")) and not continued

    def after(self, changes: Iterable[Change]) -> str:
        """Return the lines that the changes touch, as they read then."""
        listed = [change for change in changes if change.cell == self.cell]
        new = apply_changes(listed, self.source, self.cell).split("\n")
        old = self.source.split("\n")
        same = next(
            (i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), 0
        )
        rest = list(zip(reversed(old[same:]), reversed(new[same:]), strict=False))
        tail = next((i for i, pair in enumerate(rest) if pair[0] != pair[1]), len(rest))
        return textwrap.dedent("\n".join(new[same : len(new) - tail]))

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block that a statement stands in."""
        return next(
            (block for block in blocks(self.tree) if any(each is statement for each in block)), []
        )

    def statement_at(self, line: int | None) -> ast.stmt | None:
        """Return the innermost statement that a line belongs to."""
        found = None
        for node in self.nodes():
            if (
                isinstance(node, ast.stmt)
                and line is not None
                and node.lineno <= line <= (node.end_lineno or 0)
            ):
                found = node if found is None or node.lineno >= found.lineno else found
        return found

    def offset(self, node: ast.expr) -> int:
        """Return the place of an expression's first character in the source."""
        return self._span(node)[0]

    def indent_of(self, node: ast.expr) -> str:
        """Return the blanks before the line on which an expression begins."""
        return self._indent(node.lineno)

    def _column(self, line: int, offset: int) -> int:
        """Return the character that a UTF-8 offset of the tree points at."""
        text = self.source.split("\n")[line - 1]
        return offset if text.isascii() else len(text.encode()[:offset].decode(errors="replace"))

    def _indent(self, line: int) -> str:
        text = self.source.split("\n")[line - 1]
        return text[: len(text) - len(text.lstrip(" \t\f"))]

    def _logical_lines(self) -> list[int]:
        starts, fresh = [], True
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type == tokenize.NEWLINE:
                fresh = True
            elif token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
                starts.append(token.start[0])
            elif fresh and token.type not in _SKIPPED:
                starts.append(token.start[0])
                fresh = False
        return starts

    def _span(self, node: ast.expr) -> tuple[int, int]:
        starts = _line_starts(self.source)
        ends = (node.end_lineno or 0, node.end_col_offset or 0)
        first: int = starts[node.lineno - 1] + self._column(node.lineno, node.col_offset)
        last: int = starts[ends[0] - 1] + self._column(*ends)
        return first, last


def parse(source: str, cell: str = "", line: int | None = None) -> CellText | None:
    """Return a cell's text with its tree, or None if it cannot be parsed or its lines be numbered."""
    if "\r" in source or "\f" in source:
        return None
    tree = parse_tree(source)
    return None if tree is None else CellText(source, cell, line, tree)


def parse_tree(source: str) -> ast.Module | None:
    """Return the syntax tree of some code, or None if it cannot be parsed.

    Before Python 3.11.8 and 3.12.2, parsing can fail with a `SystemError` while another thread parses (gh-106905).
    """
    with _ONE_PARSES:
        for _ in range(3):  # the other thread may be another library's
            with contextlib.suppress(SystemError):
                try:
                    return ast.parse(source)
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    return None
    return None


def parse_lines(lines: Mapping[int, str]) -> ast.Module | None:
    """Return the syntax tree of numbered lines, with their numbers and without magics; None if it cannot be parsed."""
    if not lines:
        return None
    numbers = range(min(lines), max(lines) + 1)
    code = [lines.get(number, "") for number in numbers]
    tree = parse_tree("\n".join(_MAGIC.sub(_as_python, line) for line in code))
    if tree is not None:
        ast.increment_lineno(tree, numbers[0] - 1)
    return tree


_MAGIC = re.compile(r"^(\s*)([\w.,\s]+=\s*)?(?:[%!].*|[%\w.*]+\?+)$")


def _as_python(match: re.Match[str]) -> str:
    """Return a statement in the place of a magic, a command or a question for help; none where a block needs none."""
    if match[2]:
        return f"{match[1]}{match[2]}None"
    return f"{match[1]}pass" if match[1] else ""


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements in a tree."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def first_line(statement: ast.stmt) -> int:
    """Return the line on which a statement begins, its decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([int(statement.lineno), *(int(each.lineno) for each in decorators)])


def called_name(node: ast.AST) -> str:
    """Return the last name of what is called: ``"step"`` for ``opt.step()``; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    """Return a call's keyword argument of a name."""
    return next((each for each in call.keywords if each.arg == name), None)


def names_in(node: ast.AST) -> set[str]:
    """Return every variable that code mentions."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


Span = tuple[int, int, int, int]
"""First line, last line, first column, column after the last; columns in bytes of UTF-8, as `ast` counts them."""


def failing_node(step: TracebackType, lines: Sequence[str] = ()) -> ast.expr | ast.stmt | None:
    """Return the expression that raised, where Python says which (3.11), else its statement.

    ``lines`` are those of code whose file cannot be read.
    """
    frame = step.tb_frame
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    tree = parse_tree(source) if source else parse_lines(dict(enumerate(lines, 1)))
    if tree is None:
        return None
    span = span_at(frame.f_code, step.tb_lasti)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
    if span is not None:
        for node in nodes:
            if (
                node.lineno,
                node.end_lineno or 0,
                node.col_offset,
                node.end_col_offset or 0,
            ) == span:
                return node
    statements = (node for node in nodes if isinstance(node, ast.stmt))
    around = [
        node
        for node in statements
        if node.lineno <= step.tb_lineno <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return None
    statement: Any = max(around, key=lambda node: node.lineno)
    # The body of a compound statement are statements of their own: what it evaluates itself is its head.
    heads = (
        [getattr(statement, name, None) for name in ("test", "iter")]
        if hasattr(statement, "body")
        else []
    )
    return next((head for head in heads if isinstance(head, ast.expr)), statement)


def expression_at(
    code: CodeType,
    instruction: int,
    source: Sequence[str] | None = None,
    likely: Collection[str] = (),
) -> ast.expr | None:
    """Return the expression that an instruction was compiled from, by its own lines alone; None where none is known.

    Before Python 3.11, which does not say, it is the only call or index of the line, or the only one that is ``likely``
    by its name. ``source`` has the lines of code whose file cannot be read.
    """
    span = span_at(code, instruction)
    read = linecache.getlines(code.co_filename) if source is None else source
    if span is None:
        return _only_call(code, instruction, read, likely)
    first, last, start, end = span
    lines = [line.rstrip("\n").encode() for line in read[first - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"\n".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None


def _only_call(
    code: CodeType, instruction: int, lines: Sequence[str], likely: Collection[str]
) -> ast.expr | None:
    line = next((line for start, end, line in code.co_lines() if start <= instruction < end), None)
    tree = parse_tree(lines[line - 1].strip()) if line is not None and line <= len(lines) else None
    found = (
        []
        if tree is None
        else [each for each in ast.walk(tree) if isinstance(each, ast.Call | ast.Subscript)]
    )
    found = [each for each in found if called_name(each) in likely] or found
    return found[0] if len(found) == 1 else None


def span_at(code: CodeType, instruction: int) -> Span | None:
    """Return the code that an instruction was compiled from; None where Python does not say, as before 3.11."""
    position: Any = next(
        itertools.islice(_compat.instruction_positions(code), max(instruction, 0) // 2, None), None
    )
    return None if instruction < 0 or position is None or None in position else position
