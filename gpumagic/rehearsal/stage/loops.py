"""Loops of the cell are run until a pass repeats the one before, not a thousand times.

The source is changed so that each `for` and `while` asks, before every pass, whether another one would tell anything
new: not if two passes in a row had the same peak and left the same behind, and every branch that does something was
taken. A loop that grows by the same amount each pass is carried on to its end by one block of the missing size.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpumagic.rehearsal.stage.ledger import Ledger

PASSES, AGAIN, ENTER, REACHED = "_rehearsed_passes", "_rehearsed_again", "_rehearsed_enter", "_rehearsed_reached"
MOST_PASSES = 128


@dataclass
class _Site:
    line: int
    function: str
    branches: list[int] = field(default_factory=list)

    def place(self) -> str:
        """Return where it is, in words."""
        return f"line {self.line} of {self.function}" if self.function else f"line {self.line}"


@dataclass
class _Run:
    """One run of a loop: what its passes did."""

    site: int
    highest: list[int]
    history: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    last: bool = False


@dataclass
class Loops:
    """All loops of the cell and of the notebook's functions.

    Args:
        ledger: tells what a pass did.
        grow: called with a device and the bytes that the passes left out would have added.
        assumed: called with a sentence for what is assumed.
        unknown: called with a sentence for what cannot be known.
    """

    ledger: Ledger
    grow: Callable[[int, int], None]
    assumed: Callable[[str], None]
    unknown: Callable[[str], None]
    sites: list[_Site] = field(default_factory=list)
    branches: dict[int, str] = field(default_factory=dict)
    """Places of the branches that do something, by number."""
    reached: set[int] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    """Passes made, by the place of a loop that was cut short: ``"line 3"``, ``"line 3 of train"``."""
    missed: set[str] = field(default_factory=set)
    """Places of branches that no pass of a loop that was cut short took."""
    _while: dict[int, _Run] = field(default_factory=dict)

    def names(self) -> dict[str, Callable[..., Any]]:
        """Return what the changed source calls."""
        return {PASSES: self._passes, AGAIN: self._again, ENTER: self._enter, REACHED: self.reached.add}

    def transform(self, tree: ast.Module, is_cell: bool) -> ast.Module:
        """Return a module whose loops can be cut short; lines of another module than the cell are told by function."""
        changed: ast.Module = ast.fix_missing_locations(_Transformer(self, is_cell).visit(tree))
        return changed

    def _passes(self, iterable: Iterable[Any], site: int) -> Iterator[Any]:
        run = self._begin(site)
        total = _length(iterable)
        try:
            for done, item in enumerate(iterable):
                if done and self._is_enough(run, total):
                    self.cut[self.sites[site].place()] = done
                    return
                run.highest[:] = self.ledger.figures()
                yield item
                self._end_pass(run)
        finally:
            self._finish(run)

    def _enter(self, site: int) -> None:
        known = self._while.pop(site, None)
        if known is not None:
            self._finish(known)

    def _again(self, site: int) -> bool:
        run = self._while.get(site)
        if run is None:
            run = self._while[site] = self._begin(site)
        else:
            self._end_pass(run)
            if self._is_enough(run, None):
                self.cut[self.sites[site].place()] = len(run.history)
                self._enter(site)
                return False
        run.highest[:] = self.ledger.figures()
        return True

    def _begin(self, site: int) -> _Run:
        run = _Run(site, self.ledger.figures())
        self.ledger.watchers.append(run.highest)
        return run

    def _finish(self, run: _Run) -> None:
        self.ledger.watchers[:] = [each for each in self.ledger.watchers if each is not run.highest]

    def _end_pass(self, run: _Run) -> None:
        run.history.append((tuple(run.highest), tuple(self.ledger.figures())))

    def _is_enough(self, run: _Run, total: int | None) -> bool:
        """Return whether another pass would tell nothing new."""
        if run.last:
            return True
        history = run.history
        if len(history) >= MOST_PASSES or self._settled(run):
            site = self.sites[run.site]
            self.missed.update(self.branches[each] for each in site.branches if each not in self.reached)
            grown = _growth(history)
            if grown is None or not any(grown):
                return True
            return self._carry_on(run, grown, total)
        return False

    def _settled(self, run: _Run) -> bool:
        if any(each not in self.reached for each in self.sites[run.site].branches):
            return False
        grown = _growth(run.history)
        return grown is not None and (not any(grown) or len(run.history) >= 4)

    def _carry_on(self, run: _Run, grown: tuple[int, ...], total: int | None) -> bool:
        place = self.sites[run.site].place()
        if total is None:
            self.unknown(f"the loop in {place} keeps more memory each pass, and how many there will be is not known")
            return True
        missing = total - len(run.history) - 1
        for device, nbytes in enumerate(grown):
            if nbytes > 0 and missing > 0:
                self.grow(device, nbytes * missing)
        self.assumed(f"the loop in {place} keeps on growing each pass as it did, for {total} passes")
        run.last = True
        return missing < 0


def _growth(history: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, ...] | None:
    """Return by how much each device's use grows a pass, or None while that changes."""
    if len(history) < 2:
        return None
    if history[-1] == history[-2]:
        return (0,) * len(history[-1][0])
    if len(history) < 4:
        return None
    steps = [
        tuple(later - earlier for earlier, later in zip(before[at], after[at], strict=True))
        for before, after in zip(history[-4:-1], history[-3:], strict=True)
        for at in (0, 1)
    ]
    return steps[0] if len(set(steps)) == 1 else None


def _length(iterable: Iterable[Any]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except Exception:
        hint: Any = getattr(iterable, "__length_hint__", None)
        try:
            return int(hint()) if hint is not None else None
        except Exception:
            return None


class _Transformer(ast.NodeTransformer):
    def __init__(self, loops: Loops, is_cell: bool) -> None:
        self._loops = loops
        self._is_cell = is_cell
        self._function_name = ""
        self._inside: list[int] = []

    def visit_For(self, node: ast.For) -> ast.AST:
        site = self._site(node)
        node.iter = _call(PASSES, node.iter, [node.iter, ast.Constant(site)])
        return self._body(node, site)

    def visit_While(self, node: ast.While) -> list[ast.AST]:
        site = self._site(node)
        again = _call(AGAIN, node.test, [ast.Constant(site)])
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [again, node.test]), node.test)
        enter = ast.copy_location(ast.Expr(_call(ENTER, node.test, [ast.Constant(site)])), node)
        return [enter, self._body(node, site)]

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._inside:
            node.body = self._marked(node.body)
            node.orelse = self._marked(node.orelse) if node.orelse else []
        return node

    def _function(self, node: ast.AST) -> ast.AST:
        outside = self._inside, self._function_name
        self._inside, self._function_name = [], getattr(node, "name", self._function_name)
        self.generic_visit(node)
        self._inside, self._function_name = outside
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function  # noqa: N815  # ast's names

    def _site(self, node: ast.stmt) -> int:
        self._loops.sites.append(_Site(node.lineno, "" if self._is_cell else self._function_name))
        return len(self._loops.sites) - 1

    def _body(self, node: ast.For | ast.While, site: int) -> ast.AST:
        self._inside.append(site)
        self.generic_visit(node)
        self._inside.pop()
        return node

    def _marked(self, body: list[ast.stmt]) -> list[ast.stmt]:
        if all(map(_is_harmless, body)):
            return body
        number = len(self._loops.branches)
        self._loops.branches[number] = _Site(body[0].lineno, "" if self._is_cell else self._function_name).place()
        for site in self._inside:
            self._loops.sites[site].branches.append(number)
        mark = ast.copy_location(ast.Expr(_call(REACHED, body[0], [ast.Constant(number)])), body[0])
        return [mark, *body]


def _call(name: str, at: ast.AST, arguments: list[ast.expr]) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), arguments, []), at)


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement surely takes no memory on a device."""
    if isinstance(statement, ast.Break | ast.Continue | ast.Pass | ast.Raise):
        return True
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return (
        all(isinstance(call.func, ast.Name) and call.func.id in {"print", "len", "round", "str"} for call in calls)
        and (isinstance(statement, ast.Expr | ast.Return) or not calls)
        and not any(
            isinstance(node, ast.BinOp | ast.MatMult)
            for node in ast.walk(statement)
            if not isinstance(statement, ast.Expr)
        )
    )
