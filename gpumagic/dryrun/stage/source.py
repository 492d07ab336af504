"""What the cell's source is changed into, so that its loops can be cut short and what decides in them is seen.

A `for` goes over `PASSES(iterable, site)`, a `while` asks `AGAIN(site)` first. A number that a body adds to is given
by `COUNTED`, so that it is right after passes that were left out. A comparison, an index, a whole number that a call
gets and arithmetic that leaps are shown to `WEIGHED`, with their variables. A branch that does something begins with
`REACHED`. What comes out of an iterator by `next` comes by `DRAWN`, what is taken from a list or queue by `TAKEN`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from gpumagic.dryrun.stage.rules import Branch, Rule, Site, copied, is_harmless, matters
from gpumagic.dryrun.stage.rules import counters as counters_of
from gpumagic.dryrun.stage.turns import END, ITEM, NUMBER, TRUTH, Turn

PASSES, AGAIN, ENTER, REACHED = "_rehearsed_passes", "_rehearsed_again", "_rehearsed_enter", "_rehearsed_reached"
COUNTED, WEIGHED, DRAWN, TAKEN = "_rehearsed_counted", "_rehearsed_weighed", "_rehearsed_drawn", "_rehearsed_taken"
OURS = "_rehearsed"
"""An argument that tells functions made here from the user's."""

_LEAPS = (ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.Div, ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor)
_TAKES = frozenset({"pop", "popleft", "get", "get_nowait", "popitem"})
_HARMLESS = frozenset(
    {"print", "len", "round", "str", "isinstance", "repr", "format", "type", "id", "hasattr", "super"}
)


@dataclass
class Source:
    """What was found in the source; every number given to a hook is a place in one of these."""

    sites: list[Site] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def transform(self, tree: ast.Module, is_cell: bool) -> ast.Module:
        """Return a module whose loops can be cut short; lines of another module than the cell are told by function."""
        changed: ast.Module = ast.fix_missing_locations(_Transformer(self, is_cell).visit(tree))
        return changed


class _Transformer(ast.NodeTransformer):
    def __init__(self, source: Source, is_cell: bool) -> None:
        self._source = source
        self._is_cell = is_cell
        self._function_name = ""
        self._inside: list[int] = []
        self._branch: int | None = None

    # ---- Loops

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        site = self._site(node)
        counters = counters_of(node)
        node.target = self.visit(node.target)
        node.iter = _call(PASSES, node.iter, [self.visit(node.iter), ast.Constant(site)])
        return self._body(node, site, counters)

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        site = self._site(node)
        counters = counters_of(node)
        again: ast.expr = _call(AGAIN, node.test, [ast.Constant(site)])
        names = [(number, target) for number, target in enumerate(counters) if isinstance(target, ast.Name)]
        caught_up: list[ast.expr] = [
            ast.NamedExpr(ast.Name(target.id, ast.Store()), _counted(site, number, target)) for number, target in names
        ]
        test, _, _ = self._truth(node.test, END)
        parts = [again, ast.Tuple(caught_up, ast.Load()), test] if caught_up else [again, test]
        node.test = _at(ast.BoolOp(ast.And(), parts), node.test)
        enter = _at(ast.Expr(_call(ENTER, node.test, [ast.Constant(site)])), node)
        changed = self._body(node, site, counters, of_test={number for number, _ in names})
        return [enter, changed[0], _copied_statement(enter), *changed[1:]]

    def _body(
        self, node: ast.For | ast.While, site: int, counters: list[ast.expr], of_test: set[int] | None = None
    ) -> list[ast.stmt]:
        self._inside.append(site)
        node.body = self._statements(node.body)
        node.orelse = self._statements(node.orelse)
        self._inside.pop()
        counting = [_counting(site, number, target) for number, target in enumerate(counters)]
        node.body[:0] = [_at(each, node) for number, each in enumerate(counting) if number not in (of_test or ())]
        return [node, *(_at(_counting(site, number, target), node) for number, target in enumerate(counters))]

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        changed: list[ast.stmt] = []
        for statement in body:
            made = self.visit(statement)
            changed += made if isinstance(made, list) else [made]
        return changed

    def _site(self, node: ast.stmt) -> int:
        self._source.sites.append(Site(node.lineno, self._where()))
        return len(self._source.sites) - 1

    def _where(self) -> str:
        return "" if self._is_cell else self._function_name

    # ---- Branches

    def visit_If(self, node: ast.If) -> ast.AST:
        if not any(matters(each) for each in (*node.body, *node.orelse)):
            return node
        node.test, turns, is_known = self._truth(node.test, TRUTH)
        node.body = self._arm(node.body, turns, is_known)
        node.orelse = self._arm(node.orelse, turns, is_known)
        return node

    def visit_Match(self, node: Any) -> ast.AST:
        node.subject = self._shown(node.subject)
        for case in node.cases:
            if case.guard is not None:
                case.guard, _, _ = self._truth(case.guard, TRUTH)
            case.body = self._arm(case.body, (), False)
        return node  # type: ignore[no-any-return]

    def _arm(self, body: list[ast.stmt], turns: tuple[int, ...], is_known: bool) -> list[ast.stmt]:
        if not self._inside or all(map(is_harmless, body)):
            return self._statements(body)
        branches, outer = self._source.branches, self._branch
        number = self._branch = len(branches)
        branches.append(Branch(Site(body[0].lineno, self._where()).place(), turns, is_known, outer))
        for site in self._inside:
            self._source.sites[site].branches.append(number)
        mark = _at(ast.Expr(_call(REACHED, body[0], [ast.Constant(number)])), body[0])
        changed = [mark, *self._statements(body)]
        self._branch = outer
        return changed

    def _truth(self, test: ast.expr, kind: str) -> tuple[ast.expr, tuple[int, ...], bool]:
        """Return a test with the parts of it shown that are true or false by themselves, those, and whether all are."""
        if isinstance(test, ast.BoolOp):
            inner = END if kind == END and isinstance(test.op, ast.And) else TRUTH
            parts = [self._truth(each, inner) for each in test.values]
            test.values = [each for each, _, _ in parts]
            return test, tuple(turn for _, turns, _ in parts for turn in turns), all(known for _, _, known in parts)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test.operand, turns, is_known = self._truth(test.operand, TRUTH)
            return test, turns, is_known
        if isinstance(test, ast.Constant):
            return test, (), True
        rule = Rule.of(test)
        shown = self._weighed(test, kind)
        if shown is None:
            return self.visit(test), (), False
        return shown, (len(self._source.turns) - 1,), rule is not None

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test, _, _ = self._truth(node.test, TRUTH)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        return self._truth(node, TRUTH)[0]

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        node.iter = self.visit(node.iter)
        node.ifs = [self._truth(each, TRUTH)[0] for each in node.ifs]
        return node

    # ---- Numbers

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if is_harmless(node) else self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return self._weighed(node, TRUTH) or self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.ctx, ast.Load) or isinstance(node.slice, ast.Constant):
            return self.generic_visit(node)
        return self._weighed(node, ITEM) or self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        shown = self._weighed(node, NUMBER) if isinstance(node.op, _LEAPS) else None
        return shown or self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "next" and node.args:
            node.args = [self.visit(each) for each in node.args]
            node.func = _at(ast.Name(DRAWN, ast.Load()), node.func)
            return node
        if isinstance(node.func, ast.Attribute) and node.func.attr in _TAKES:
            taken = [self.visit(node.func.value), ast.Constant(node.func.attr)]
            node.func = _call(TAKEN, node.func, taken)
            return node
        node.func = self.visit(node.func)
        shown = self.visit if name in _HARMLESS else self._shown
        node.args = [shown(each) for each in node.args]
        for keyword in node.keywords:
            keyword.value = shown(keyword.value)
        return node

    def _shown(self, argument: ast.expr) -> ast.expr:
        """Return a call's argument, or what a `match` is about, shown where it may be a whole number."""
        if isinstance(argument, ast.Tuple | ast.List):
            argument.elts = [self._shown(each) for each in argument.elts]
            return argument
        if isinstance(argument, ast.Name | ast.Attribute | ast.BinOp):
            return self._weighed(argument, NUMBER) or self.visit(argument)
        changed: ast.expr = self.visit(argument)
        return changed

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def _weighed(self, node: ast.expr, kind: str) -> ast.expr | None:
        """Return an expression that shows itself and its variables; None where nothing can be foretold of it."""
        rule = Rule.of(node)
        if rule is None or not rule.parts:
            return None
        found = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        constants = tuple(each for each in found if type(each) is int)
        turns = self._source.turns
        turns.append(Turn(kind, rule.compiled(), constants, Site(node.lineno, self._where()).place()))
        ours = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[ast.arg(OURS)], kw_defaults=[ast.Constant(None)],
                             defaults=[])  # fmt: skip
        parts = ast.Lambda(ours, ast.Tuple([copied(each) for each in rule.parts], ast.Load()))
        return _call(WEIGHED, node, [ast.Constant(len(turns) - 1), node, parts])

    # ---- What a name belongs to

    def _function(self, node: Any) -> ast.AST:
        outside = self._inside, self._function_name, self._branch
        self._inside, self._function_name, self._branch = [], getattr(node, "name", self._function_name), None
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
        else:
            node.body = self._statements(node.body)
        self._inside, self._function_name, self._branch = outside
        return node  # type: ignore[no-any-return]

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function  # noqa: N815  # ast's names

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Change the methods only: a class's own names are not seen from inside a lambda."""
        node.body = [
            self.visit(each) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else each
            for each in node.body
        ]
        return node


def _copied_statement(node: ast.stmt) -> ast.stmt:
    made = ast.parse(ast.unparse(node)).body[0]
    for each in ast.walk(made):
        ast.copy_location(each, node)
    return made


def _counted(site: int, number: int, target: ast.expr) -> ast.expr:
    return _call(COUNTED, target, [ast.Constant(site), ast.Constant(number), copied(target)])


def _counting(site: int, number: int, target: ast.expr) -> ast.stmt:
    into: Any = copied(target)
    into.ctx = ast.Store()
    return ast.Assign([into], _counted(site, number, target))


def _call(name: str, at: ast.AST, arguments: list[ast.expr]) -> ast.Call:
    made: ast.Call = _at(ast.Call(ast.Name(name, ast.Load()), arguments, []), at)
    return made


def _at(made: Any, node: ast.AST) -> Any:
    """Give what was made the place of what it stands for."""
    ast.copy_location(made, node)
    return made
