"""Which variables a cell binds before it reads them, whichever way it goes.

The old value of such a variable only takes up room until the cell replaces it, so advice may delete it first. Where
Python may pass the binding by, deleting would take away what the rest of the cell needs. So a binding counts only if it
runs in every run of the cell that ends without an error: not in a branch, a ``case``, an operand of ``or``, the body of
a function, behind a ``break``, and so on through Python's grammar.

Most bindings of a notebook stand in the body of a `for` loop, which makes no pass over an empty list, or of a `with`
statement, whose context manager may suppress what its body raises. These are kept apart, with the lines of the block:
they count as soon as a run has shown that the body runs.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpumagic.source.text import called_name, last_line, names_in


@dataclass(frozen=True, slots=True)
class FirstBindings:
    """The variables whose first use in a cell is that it binds them anew."""

    certain: frozenset[str] = frozenset()
    """Those that every run binds."""
    in_blocks: Mapping[str, range] = field(default_factory=dict)
    """Those that a `for` loop or a `with` statement binds if its body runs: ``{name: lines of the body}``."""


def first_bindings(tree: ast.AST) -> FirstBindings:
    """Return the variables that code binds before it reads them."""
    uses = _Uses()
    try:
        uses.visit(tree)
    except RecursionError:  # a sum of a thousand terms is nested as deep
        return FirstBindings()
    return FirstBindings(
        frozenset(
            name for name, use in uses.first.items() if use is _Use.CERTAIN_BINDING
        ),
        dict(uses.in_blocks),
    )


def words_for_ipython(call: ast.Call) -> set[str]:
    """Return the words of the code that a call hands to IPython as text: ``%time y = model(x)`` reads the model."""
    function = call.func
    if not (
        isinstance(function, ast.Attribute)
        and called_name(function.value) == "get_ipython"
    ):
        return set()
    words: set[str] = set()
    for argument in call.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            words.update(_WORD.findall(argument.value))
    return words


_With = ast.With | ast.AsyncWith
_Block = ast.For | ast.AsyncFor | _With

_WORD = re.compile(r"[^\W\d]\w*")


class _Use(enum.Enum):
    """What the first use of a variable is."""

    CERTAIN_BINDING = enum.auto()
    BINDING_IN_BLOCK = enum.auto()
    READ_OR_UNCERTAIN = enum.auto()


class _Uses(ast.NodeVisitor):
    """Visits code in the order in which Python runs it, and remembers how it uses each variable first.

    Attributes:
        first: what the first use of each variable is.
        in_blocks: the lines of the block that the first binding of a variable hangs on.
    """

    def __init__(self) -> None:
        self.first: dict[str, _Use] = {}
        self.in_blocks: dict[str, range] = {}
        self._binding = _Use.CERTAIN_BINDING
        """What a binding is where the visit stands."""
        self._block = range(0)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node.id, is_binding=isinstance(node.ctx, ast.Store))

    def _note(self, name: str, *, is_binding: bool) -> None:
        if name in self.first:
            return
        self.first[name] = self._binding if is_binding else _Use.READ_OR_UNCERTAIN
        if self.first[name] is _Use.BINDING_IN_BLOCK:
            self.in_blocks[name] = self._block

    @contextlib.contextmanager
    def _passed_by(self) -> Iterator[None]:
        """Visit what Python may pass by: what is bound in there is not certain."""
        outside = self._binding
        self._binding = _Use.READ_OR_UNCERTAIN
        yield
        self._binding = outside

    @contextlib.contextmanager
    def _in_block(self, node: _Block) -> Iterator[None]:
        """Visit the body of a block of which only a run can show that it is run to its end."""
        outside = self._binding, self._block
        if self._binding is _Use.CERTAIN_BINDING:
            self._binding = _Use.BINDING_IN_BLOCK
        self._block = _lines_of_body(node)
        yield
        self._binding, self._block = outside

    def _visit_statements(self, statements: Sequence[ast.stmt]) -> None:
        for place, statement in enumerate(statements):
            self.visit(statement)
            if _may_leave(statement):
                with self._passed_by():
                    self._visit_statements(statements[place + 1 :])
                return

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_Module(self, node: ast.Module) -> None:
        self._visit_statements(node.body)

    # Statements and expressions that bind: the value comes before the name, which the tree has first.

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        self._visit_all(node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self.visit(node.annotation)
        # ``x: Tensor`` alone binds nothing.
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:  # None stands for ``**value``
                self.visit(key)
            self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        for word in words_for_ipython(node):
            self._note(word, is_binding=False)

    # What has names of its own, and runs later if at all: whatever it mentions counts as read.

    def _visit_scope(self, node: ast.AST) -> None:
        for name in names_in(node):
            self._note(name, is_binding=False)

    visit_FunctionDef = _visit_scope  # noqa: N815
    visit_AsyncFunctionDef = _visit_scope  # noqa: N815
    visit_Lambda = _visit_scope  # noqa: N815
    visit_ClassDef = _visit_scope  # noqa: N815
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_scope  # noqa: N815
    visit_AugAssign = visit_TypeAlias = _visit_scope  # noqa: N815

    # Expressions with operands that are passed by.

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        with self._passed_by():
            self._visit_all(node.values[1:])

    def visit_Compare(self, node: ast.Compare) -> None:
        self.visit(node.left)
        self.visit(node.comparators[0])
        with self._passed_by():  # in ``a < b < c``, the third operand
            self._visit_all(node.comparators[1:])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        with self._passed_by():
            self.visit(node.body)
            self.visit(node.orelse)

    # Statements with bodies that are passed by.

    def visit_Assert(self, node: ast.Assert) -> None:
        with self._passed_by():  # the test too: ``python -O`` runs no assert
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        with self._passed_by():
            self._visit_statements(node.body)
            self._visit_statements(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        with self._passed_by():
            self._visit_statements(node.body)
            self._visit_statements(node.orelse)

    def _visit_for(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        with self._in_block(node):
            self.visit(node.target)
            self._visit_statements(node.body)
        with self._passed_by():
            self._visit_statements(node.orelse)

    visit_For = visit_AsyncFor = _visit_for  # noqa: N815

    def _visit_with(self, node: _With) -> None:
        self._visit_items(node.items, node)

    visit_With = visit_AsyncWith = _visit_with  # noqa: N815

    def _visit_items(self, items: Sequence[ast.withitem], node: _With) -> None:
        """Visit context managers, each of which may suppress what those behind it and the body raise."""
        if not items:
            self._visit_statements(node.body)
            return
        self.visit(items[0])
        if called_name(items[0].context_expr) in _NEVER_SUPPRESS:
            self._visit_items(items[1:], node)
        else:
            with self._in_block(node):
                self._visit_items(items[1:], node)

    def _visit_try(self, node: ast.Try) -> None:
        with self._passed_by():
            self._visit_statements(node.body)
            self._visit_all(node.handlers)
            self._visit_statements(node.orelse)
        self._visit_statements(node.finalbody)

    visit_Try = visit_TryStar = _visit_try  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        self._visit_statements(node.body)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        with self._passed_by():
            self._visit_all(node.cases)

    def visit_match_case(self, node: ast.match_case) -> None:
        self.visit(node.pattern)
        if node.guard is not None:
            self.visit(node.guard)
        self._visit_statements(node.body)


def _lines_of_body(node: _Block) -> range:
    """Return the lines of a block's body, without one that it shares with its head."""
    if isinstance(node, ast.For | ast.AsyncFor):
        head = node.iter
    else:
        item = node.items[-1]
        head = item.optional_vars or item.context_expr
    first = max(node.body[0].lineno, last_line(head) + 1)
    return range(first, last_line(node.body[-1]) + 1)


_NEVER_SUPPRESS = frozenset({
    "autocast", "device", "enable_grad", "inference_mode", "no_grad", "nullcontext", "open", "set_grad_enabled",
})  # fmt: skip
"""Context managers that let through whatever their body raises."""
_EXITS = frozenset({"exit", "quit", "_exit", "abort"})


def _may_leave(node: ast.AST, *, in_loop: bool = False) -> bool:
    """Return whether code may jump over what follows it: ``if done: break``.

    Any call may fail and end the cell with an error; what counts here are the statements that are written to leave.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    if isinstance(node, ast.Return | ast.Raise) or called_name(node) in _EXITS:
        return True
    if isinstance(node, ast.Break | ast.Continue):
        return not in_loop
    if isinstance(node, ast.For | ast.AsyncFor | ast.While):
        # A `break` in the body stays in the loop; one in its `else` leaves the loop around.
        if any(_may_leave(statement, in_loop=in_loop) for statement in node.orelse):
            return True
        in_loop = True
    return any(
        _may_leave(child, in_loop=in_loop) for child in ast.iter_child_nodes(node)
    )
