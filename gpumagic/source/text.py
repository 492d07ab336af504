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
    ordered = sorted((change for change in changes if change.cell == cell), key=_order)
    below: Change | None = None
    for change in reversed(ordered):  # so that the places of those above still hold
        at = starts[min(change.line, len(starts)) - 1] + change.column
        if not source.startswith(change.old, at):
            raise ValueError(
                f"line {change.line} does not read {change.old!r} any more"
            )
        new = change.new
        if below is not None and _is_around(change, below):
            new += INDENT
        source = source[:at] + new + source[at + len(change.old) :]
        below = change
    return source


def _is_around(change: Change, below: Change) -> bool:
    """Return whether a change is a header such as ``with x:`` that another header on the same line stands under."""
    is_same_line = below.line == change.line
    return is_same_line and below.new.endswith(_HEADER) and change.new.endswith(_HEADER)


def _order(change: Change) -> tuple[int, int, int]:
    """Order changes by their places: at one place whole lines come first, then what indents, then other code."""
    if not change.old and change.new.endswith("\n"):
        kind = 0
    elif change.new == INDENT:
        kind = 1
    else:
        kind = 2
    return change.line, change.column, kind


def _line_starts(source: str) -> list[int]:
    """Return the places in a text at which its lines begin, and that behind its last one."""
    lengths = (len(line) + 1 for line in source.split("\n"))
    return list(itertools.accumulate(lengths, initial=0))


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
    tree: ast.Module = field(
        default_factory=lambda: ast.Module([], []),
        compare=False,
        repr=False,
    )

    def nodes(self) -> Iterator[ast.AST]:
        """Yield every node of the tree."""
        return ast.walk(self.tree)

    def expressions(self) -> Iterator[ast.expr]:
        """Yield every expression of the tree."""
        return (node for node in self.nodes() if isinstance(node, ast.expr))

    def code(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return ast.get_source_segment(self.source, node) or ""

    def _insertion(self, line: int, column: int, new: str) -> Change:
        return Change(line, column, "", new, self.cell)

    def replace(self, node: ast.expr | ast.stmt, new: str) -> Change:
        """Return the change that puts other code in the place of an expression or a statement."""
        column = self._column(node.lineno, node.col_offset)
        return Change(node.lineno, column, self.code(node), new, self.cell)

    def append(self, node: ast.expr, new: str) -> Change:
        """Return the change that writes code right behind an expression."""
        return self._insertion(last_line(node), self._end_column(node), new)

    def add_argument(self, call: ast.Call, argument: str) -> Change:
        """Return the change that gives a call one more keyword argument, the last."""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if arguments:
            last = max(arguments, key=_end)
            behind = self.source[self._end_offset(last) : self._end_offset(call)]
            # Else a comment stands there, or a bracket around the argument.
            if re.fullmatch(r"[\s,]*\)", behind):
                return self.append(last, f", {argument}")
        has_comma = self.code(call).rstrip(") \t\n").endswith(",")
        if arguments and not has_comma:
            argument = f", {argument}"
        return self._insertion(last_line(call), self._end_column(call) - 1, argument)

    def insert(self, statement: ast.stmt, code: str) -> tuple[Change, ...]:
        """Return the change that puts lines before a statement, or none where it does not begin its line."""
        if not self.stands_alone(statement):
            return ()
        line = first_line(statement)
        indented = textwrap.indent(code, self._indent(line))
        return (self._insertion(line, 0, f"{indented}\n"),)

    def insert_after(self, statement: ast.stmt, code: str) -> tuple[Change, ...]:
        """Return the change that puts lines behind a statement, or none where it does not end its line."""
        if not self.stands_alone(statement):
            return ()
        line = last_line(statement)
        end_of_line = len(self._line(line))
        indented = textwrap.indent(code, self._indent(first_line(statement)))
        return (self._insertion(line, end_of_line, f"\n{indented}"),)

    def remove(self, statement: ast.stmt) -> Change:
        """Return the change that takes away the lines of a statement that stands alone, and is not all of a block."""
        first = first_line(statement)
        starts = _line_starts(self.source)
        begin = starts[first - 1]
        end = starts[last_line(statement)]
        return Change(first, 0, self.source[begin:end], "", self.cell)

    def wrap(
        self,
        statements: Sequence[ast.stmt],
        header: str,
        removed: Sequence[ast.stmt] = (),
    ) -> tuple[Change, ...]:
        """Return the changes that put whole statements of one block under a header such as ``with x:``.

        Those that other changes have `removed` are left as they are.
        """
        if not statements or not all(map(self.stands_alone, statements)):
            return ()
        first = first_line(statements[0])
        last = last_line(statements[-1])
        gone: set[int] = set()
        for statement in removed:
            gone.update(range(first_line(statement), last_line(statement) + 1))
        opening = self._insertion(first, 0, f"{self._indent(first)}{header}\n")
        lines = set(self._logical_lines()).intersection(range(first, last + 1)) - gone
        inner = [
            self._insertion(line, len(self._indent(line)), INDENT)
            for line in sorted(lines)
        ]
        return (opening, *inner)

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Return whether a statement shares its lines with no other code."""
        line = first_line(statement)
        last = last_line(statement)
        if line > 1 and self._line(line - 1).endswith("\\"):
            return False
        before = self._line(line)[: self._column(line, statement.col_offset)]
        # Before the code of a decorated one stands its own `@`.
        is_decorated = bool(getattr(statement, "decorator_list", None))
        if before.strip() and not is_decorated:
            return False
        after = self._line(last)[
            self._column(last, statement.end_col_offset or 0) :
        ].strip()
        return not after or after.startswith("#")

    def after(self, changes: Iterable[Change]) -> str:
        """Return the lines that the changes touch, as they read then."""
        own = [change for change in changes if change.cell == self.cell]
        new = apply_changes(own, self.source, self.cell).split("\n")
        old = self.source.split("\n")
        head = _first_difference(old, new) or 0
        changed = new[head:]
        old_reversed = old[head:][::-1]
        tail = _first_difference(old_reversed, changed[::-1])
        if tail is None:
            tail = min(len(old_reversed), len(changed))
        touched = changed[: len(changed) - tail]
        return textwrap.dedent("\n".join(touched))

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block that a statement stands in."""
        for block in blocks(self.tree):
            if any(member is statement for member in block):
                return block
        return []

    def statement_at(self, line: int | None) -> ast.stmt | None:
        """Return the innermost statement that a line belongs to."""
        if line is None:
            return None
        innermost: ast.stmt | None = None
        for statement in _statements_at(self.tree, line):
            if innermost is None or statement.lineno >= innermost.lineno:
                innermost = statement
        return innermost

    def offset(self, node: ast.expr) -> int:
        """Return the place of an expression's first character in the source."""
        start = _line_starts(self.source)[node.lineno - 1]
        return start + self._column(node.lineno, node.col_offset)

    def _end_offset(self, node: ast.expr) -> int:
        """Return the place in the source behind an expression's last character."""
        return _line_starts(self.source)[last_line(node) - 1] + self._end_column(node)

    def indent_of(self, node: ast.expr) -> str:
        """Return the blanks before the line on which an expression begins."""
        return self._indent(node.lineno)

    def _line(self, line: int) -> str:
        return self.source.split("\n")[line - 1]

    def _column(self, line: int, offset: int) -> int:
        """Return the character that a UTF-8 offset of the tree points at."""
        text = self._line(line)
        if text.isascii():
            return offset
        return len(text.encode()[:offset].decode(errors="replace"))

    def _end_column(self, node: ast.expr) -> int:
        return self._column(last_line(node), node.end_col_offset or 0)

    def _indent(self, line: int) -> str:
        text = self._line(line)
        return text[: len(text) - len(text.lstrip(" \t\f"))]

    def _logical_lines(self) -> list[int]:
        """Return the lines on which a statement or a comment begins, and none inside of a text or of brackets."""
        starts = []
        is_new = True
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            line, column = token.start
            if token.type == tokenize.NEWLINE:
                is_new = True
            elif token.type == tokenize.COMMENT and not token.line[:column].strip():
                starts.append(line)
            elif is_new and token.type not in _SKIPPED:
                starts.append(line)
                is_new = False
        return starts


def _first_difference(old: Sequence[str], new: Sequence[str]) -> int | None:
    """Return the place of the first line that differs; None if one of the texts is how the other begins."""
    for place, (before, after) in enumerate(zip(old, new, strict=False)):
        if before != after:
            return place
    return None


def _end(node: ast.expr) -> tuple[int, int]:
    return last_line(node), node.end_col_offset or 0


def parse(source: str, cell: str = "", line: int | None = None) -> CellText | None:
    """Return a cell's text with its tree, or None if it cannot be parsed or its lines be numbered."""
    if "\r" in source or "\f" in source:
        return None
    tree = parse_tree(source)
    if tree is None:
        return None
    return CellText(source, cell, line, tree)


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
    first = min(lines)
    code = [
        _MAGIC.sub(_as_python, lines.get(line, ""))
        for line in range(first, max(lines) + 1)
    ]
    tree = parse_tree("\n".join(code))
    if tree is not None:
        ast.increment_lineno(tree, first - 1)
    return tree


_MAGIC = re.compile(r"^(\s*)([\w.,\s]+=\s*)?(?:[%!].*|[%\w.*]+\?+)$")


def _as_python(match: re.Match[str]) -> str:
    """Return a statement in the place of a magic, a command or a question for help; none where a block needs none."""
    indent = match[1]
    target = match[2]
    if target:
        return f"{indent}{target}None"
    return f"{indent}pass" if indent else ""


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
    lines = [decorator.lineno for decorator in decorators]
    return min([statement.lineno, *lines])


def last_line(node: ast.expr | ast.stmt) -> int:
    """Return the line on which code ends."""
    return node.end_lineno or node.lineno


def _statements_at(tree: ast.AST, line: int) -> Iterator[ast.stmt]:
    """Yield the statements that a line belongs to, outer ones first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= last_line(node):
            yield node


def called_name(node: ast.AST) -> str:
    """Return the last name of what is called: ``"step"`` for ``opt.step()``; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    """Return a call's keyword argument of a name."""
    for argument in call.keywords:
        if argument.arg == name:
            return argument
    return None


def names_in(node: ast.AST) -> set[str]:
    """Return every variable that code mentions."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


Span = tuple[int, int, int, int]
"""First line, last line, first column, column after the last; columns in bytes of UTF-8, as `ast` counts them."""


def failing_node(
    step: TracebackType, lines: Sequence[str] = ()
) -> ast.expr | ast.stmt | None:
    """Return the expression that raised, where Python says which (3.11), else its statement.

    ``lines`` are those of code whose file cannot be read.
    """
    frame = step.tb_frame
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    tree = parse_tree(source) if source else parse_lines(dict(enumerate(lines, 1)))
    if tree is None:
        return None
    span = span_at(frame.f_code, step.tb_lasti)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt) and _span(node) == span:
            return node
    around = list(_statements_at(tree, step.tb_lineno))
    if not around:
        return None
    return _evaluated_itself(max(around, key=lambda statement: statement.lineno))


def _span(node: ast.expr | ast.stmt) -> Span:
    return node.lineno, last_line(node), node.col_offset, node.end_col_offset or 0


def _evaluated_itself(statement: ast.stmt) -> ast.expr | ast.stmt:
    """Return the head of an ``if`` or a loop, whose body are statements of their own; any other statement as it is."""
    if hasattr(statement, "body"):
        for name in ("test", "iter"):
            head = getattr(statement, name, None)
            if isinstance(head, ast.expr):
                return head
    return statement


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
    all_lines = linecache.getlines(code.co_filename) if source is None else source
    if span is None:
        return _only_call(code, instruction, all_lines, likely)
    first, last, start, end = span
    lines = [line.rstrip("\n").encode() for line in all_lines[first - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"\n".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None


def _only_call(
    code: CodeType,
    instruction: int,
    lines: Sequence[str],
    likely: Collection[str],
) -> ast.expr | None:
    line = _line_of(code, instruction)
    if line is None or line > len(lines):
        return None
    tree = parse_tree(lines[line - 1].strip())
    if tree is None:
        return None
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Subscript)
    ]
    likely_calls = [call for call in calls if called_name(call) in likely]
    candidates = likely_calls or calls
    return candidates[0] if len(candidates) == 1 else None


def _line_of(code: CodeType, instruction: int) -> int | None:
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return line
    return None


def span_at(code: CodeType, instruction: int) -> Span | None:
    """Return the code that an instruction was compiled from; None where Python does not say, as before 3.11."""
    if instruction < 0:
        return None
    positions = _compat.instruction_positions(code)
    position: Any = next(itertools.islice(positions, instruction // 2, None), None)
    if position is None or None in position:
        return None
    return position  # type: ignore[no-any-return]
