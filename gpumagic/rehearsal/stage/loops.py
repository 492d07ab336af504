"""Loops of the cell are run until a pass repeats the one before, not a thousand times.

The source is changed so that each `for` and `while` asks, before every pass, whether another one would tell anything
new: not if two passes in a row had the same peak and left the same behind, and every branch that does something was
taken. A loop that grows by the same amount each pass is carried on to its end by one block of the missing size.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpumagic.rehearsal.stage.ledger import Ledger

PASSES, AGAIN, ENTER, REACHED = "_rehearsed_passes", "_rehearsed_again", "_rehearsed_enter", "_rehearsed_reached"
MOST_PASSES = 128
WORTH_ALL = 1024
"""Passes that are all made where they do not settle."""


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
    whole: bool = False
    """Whether every pass is made: the passes are known to differ."""


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
    is_open: bool = False
    """Whether what a loop's further passes need is not known."""
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
        run.whole = _differ(iterable)
        try:
            for done, item in enumerate(iterable):
                if done and self._is_enough(run, total):
                    self.cut[self.sites[site].place()] = done
                    return
                run.highest[:] = self.ledger.exact_figures()
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
        run.highest[:] = self.ledger.exact_figures()
        return True

    def _begin(self, site: int) -> _Run:
        run = _Run(site, self.ledger.exact_figures())
        self.ledger.watchers.append(run.highest)
        return run

    def _finish(self, run: _Run) -> None:
        self.ledger.watchers[:] = [each for each in self.ledger.watchers if each is not run.highest]

    def _end_pass(self, run: _Run) -> None:
        run.history.append((tuple(run.highest), tuple(self.ledger.exact_figures())))

    def _is_enough(self, run: _Run, total: int | None) -> bool:
        """Return whether another pass would tell nothing new."""
        if run.last or run.whole:
            return run.last
        history = run.history
        settled = self._settled(run)
        if settled or (len(history) >= MOST_PASSES and (total is None or total > WORTH_ALL)):
            site = self.sites[run.site]
            self.missed.update(self.branches[each] for each in site.branches if each not in self.reached)
            grown = _growth(history)
            if grown is None:
                self._leave_open(run, "has other needs each pass")
            elif any(grown):
                return self._carry_on(run, grown, total)
            return True
        return False

    def _settled(self, run: _Run) -> bool:
        if any(each not in self.reached for each in self.sites[run.site].branches):
            return False
        grown = _growth(run.history)
        return grown is not None and (not any(grown) or len(run.history) >= 4)

    def _leave_open(self, run: _Run, why: str) -> None:
        self.is_open = True
        self.unknown(f"the loop in {self.sites[run.site].place()} {why}, and what its further passes need is not known")

    def _carry_on(self, run: _Run, grown: tuple[int, ...], total: int | None) -> bool:
        place = self.sites[run.site].place()
        if total is None:
            self._leave_open(run, "keeps more memory each pass")
            return True
        missing = total - len(run.history) - 1
        for device, nbytes in enumerate(grown):
            if nbytes > 0 and missing > 0:
                self.grow(device, nbytes * missing)
        self.assumed(f"the loop in {place} keeps on growing each pass as it did, for {total} passes")
        run.last = True
        return missing < 0


def _differ(iterable: object) -> bool:
    """Return whether a list's items are of different sizes, as those that passes are made of are."""
    if not isinstance(iterable, list | tuple) or len(iterable) > WORTH_ALL:
        return False
    return len({repr(getattr(each, "shape", each if isinstance(each, int) else type(each))) for each in iterable}) > 1


def _growth(history: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, ...] | None:
    """Return by how much each device's use grows a pass, or None while that changes.

    What was asked for tells it, the second half of the figures: blocks may grow by leaps.
    """
    if len(history) < 2:
        return None
    if history[-1] == history[-2]:
        return (0,) * (len(history[-1][0]) // 2)
    if len(history) < 4:
        return None
    devices = len(history[-1][0]) // 2
    grown = [0] * devices
    for at in (0, 1):  # the highest of a pass, and its end
        figures = [each[at] for each in history[-4:]]
        exact = _steps([each[devices:] for each in figures])
        if exact is None:
            return None
        rounded = _steps([each[:devices] for each in figures]) or exact
        grown = list(map(max, grown, exact, rounded))
    return tuple(grown)


def _steps(figures: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return by how much figures grow from one to the next, if always by the same."""
    steps = {tuple(b - a for a, b in zip(before, after, strict=True)) for before, after in itertools.pairwise(figures)}
    return steps.pop() if len(steps) == 1 else None


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
