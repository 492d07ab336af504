"""The rows of an expression, a part at a time, where its result is much smaller than what leads to it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumagic._compat import StrEnum
from gpumagic.advice.facts import Facts, TensorFact
from gpumagic.advice.records import Advice
from gpumagic.advice.rules.batch import VMAP
from gpumagic.advice.rules.inlining import Inlined, inlined
from gpumagic.advice.rules.kept import WITHOUT_GRAPH
from gpumagic.advice.rules.proposal import Choice, propose
from gpumagic.advice.rules.regions import does, failed
from gpumagic.advice.rules.row_reader import RowReader, Rows
from gpumagic.report.units import count, size
from gpumagic.source.text import INDENT, CellText, Change, called_name

LEAST_ROWS = 16
"""Fewer at a time take longer than anybody waits."""


class Total(StrEnum):
    """How one number is made of all rows."""

    SUM = "sum"
    MEAN = "mean"
    CROSS_ENTROPY = "cross_entropy"
    """A mean of its own."""


@dataclass(frozen=True, slots=True)
class RowWise:
    """An expression of a cell of which a part of the rows can be computed at a time."""

    cell: CellText
    whole: Inlined
    """The expression that it is, or is a part of."""
    node: ast.expr
    rows: Rows
    """Its rows; where it is a total, those that are added up."""
    total: Total | None

    @property
    def sources(self) -> dict[str, str]:
        """The code of what the rows are of, and its tensor: `series` of ``series.unfold(0, 96, 1)``."""
        return {
            self.whole.text.code(source.node): source.tensor
            for source in self.rows.sources
        }

    @property
    def line(self) -> int:
        """The line of the cell on which the whole begins."""
        return self.whole.place.lineno

    @property
    def statement(self) -> ast.stmt | None:
        """The statement of the cell that the whole is in."""
        return self.cell.statement_at(self.line)

    def tensors(self, facts: Facts) -> list[TensorFact]:
        """Return the tensors that the rows are of."""
        return [facts.frames.tensors[tensor] for tensor in self.sources.values()]


def by_rows(facts: Facts) -> Iterator[Choice]:
    """Compute a part of the rows at a time where the result is much smaller than what leads to it."""
    first = _first(facts)
    if first is None:
        return
    together = [first, *_after(facts, first)]
    rows = first.rows.length
    yield Choice(
        "rows",
        rows,
        make=functools.partial(_suggestion, facts, together),
        guess=max(1, rows // 16),
        least=min(LEAST_ROWS, rows // 8),
    )


def _first(facts: Facts) -> RowWise | None:
    """Return a total of what failed, else the most that the statements after it make of it."""
    places = _places(facts)
    for text, statement in places:
        for expression in _expressions(text, statement):
            candidate = _total(facts, text, expression)
            if candidate is not None:
                return candidate
    for text, statement in places:
        for expression in reversed(_expressions(text, statement)):
            candidate = _reduction(facts, text, expression)
            if candidate is not None:
                return candidate
    return None


def _places(facts: Facts) -> list[tuple[CellText, ast.stmt]]:
    """Return the statements that may have made what is large, the likeliest first."""
    text = facts.frames.text
    statement = text.statement_at(facts.frames.line) if text is not None else None
    places = list[tuple[CellText, ast.stmt]]()
    if not facts.frames.functions & VMAP:  # which takes no hooks of checkpoints
        places += failed(facts)
    if text is None or statement is None:
        return places
    if does(statement, "backward"):
        earlier = [
            other
            for other in text.block_of(statement)
            if other.lineno < statement.lineno
        ]
        if earlier:
            return [(text, other) for other in reversed(earlier)]
    places.append((text, statement))  # what failed may be in a model that it calls
    return places


def _expressions(text: CellText, statement: ast.stmt) -> list[Inlined]:
    """Return the expressions that a statement is part of, without calls of `backward`: a loss has a name."""
    expressions = list(inlined(text, statement))
    return [part for part in expressions if called_name(part.place) != "backward"]


def _after(facts: Facts, first: RowWise) -> Iterator[RowWise]:
    """Yield what the statements after an expression compute of as many rows of the same tensors."""
    last = first.statement
    if last is None:
        return
    for statement in first.cell.block_of(last):
        if statement.lineno <= last.lineno:
            continue
        for expression in _expressions(first.cell, statement):
            if expression.statements:
                continue
            for find in (_total, _reduction):
                candidate = find(facts, first.cell, expression)
                if candidate is not None and _is_of_the_same_rows(candidate, first):
                    yield candidate


def _is_of_the_same_rows(candidate: RowWise, first: RowWise) -> bool:
    common = candidate.sources.keys() & first.sources.keys()
    return bool(common) and candidate.rows.length == first.rows.length


def _total(facts: Facts, cell: CellText, whole: Inlined) -> RowWise | None:
    """Return the largest part of an expression that makes one number of all rows."""
    for node in whole.text.expressions():
        summed = _summed(node)
        if summed is not None:
            total, inner = summed
            rows = _rows(facts, whole, inner)
            if rows is not None:
                candidate = RowWise(cell, whole, node, rows, total)
                if _is_worth_parts(facts, candidate):
                    return candidate
    return None


def _summed(node: ast.expr) -> tuple[Total, ast.expr] | None:
    """Return how an expression makes one number of everything, and of what; None where it does not."""
    match node:
        case ast.Call(
            ast.Attribute(inner, "mean" | "sum" as name), args=[], keywords=[]
        ):
            return Total(name), inner
        case ast.Call(keywords=[]) if called_name(node) == "cross_entropy":
            return Total.CROSS_ENTROPY, node
    return None


def _reduction(facts: Facts, cell: CellText, whole: Inlined) -> RowWise | None:
    """Return the largest part of an expression that makes less of each row, or the result of several statements."""
    for node in whole.text.expressions():
        rows = _rows(facts, whole, node) if _summed(node) is None else None
        if rows is None:
            continue
        is_result = node is whole.root and bool(whole.statements)
        if rows.reduces or is_result:
            candidate = RowWise(cell, whole, node, rows, total=None)
            if _is_worth_parts(facts, candidate):
                return candidate
    return None


def _rows(facts: Facts, whole: Inlined, node: ast.expr) -> Rows | None:
    """Return the rows of an expression, where it computes something of each."""
    if isinstance(node, ast.Name):
        return None
    return RowReader(facts, whole.text).rows_of(node)


def _is_worth_parts(facts: Facts, candidate: RowWise) -> bool:
    """Return whether an expression needs much memory beside its tensors, and may be computed in parts."""
    if candidate.rows.length <= 1:
        return False
    tensors = candidate.tensors(facts)
    if candidate.rows.of_model and facts.frames.trains:
        # Only of the head of a model: what that is given has a graph
        has_graph = tensors[0].has_graph or tensors[0].requires_grad
        return has_graph and candidate.total is Total.CROSS_ENTROPY
    if candidate.rows.of_model:
        return True
    requested = facts.event.requested
    there = sum(tensor.nbytes for tensor in tensors)
    return requested is not None and 2 * requested >= there


def _suggestion(facts: Facts, together: Sequence[RowWise], number: int) -> Advice:
    """Return the suggestion to compute expressions with so many rows at a time."""
    edits = [InParts(facts, target, number) for target in together]
    changes = list[Change]()
    costs = dict[str, None]()
    sources = dict[str, str]()
    for edit in edits:
        changes += edit.changes()
        costs[edit.cost] = None
        sources |= edit.target.sources
    lines = [str(target.line) for target in together]
    line = "line" if len(lines) == 1 else "lines"
    some_rows = count(number, "row")
    all_rows = count(together[0].rows.length, "row")
    title = f"Compute {line} {', '.join(lines)} with {some_rows} of {', '.join(sources)} at a time"
    if any(edit.is_without_graph for edit in edits):
        title += ", without an autograd graph"
    return propose(
        title,
        text=together[0].cell,
        changes=changes,
        cost="; ".join(costs),
        evidence=f"the line makes {size(facts.event.requested)} at once for all {all_rows}",
    )


@dataclass(frozen=True, slots=True)
class InParts:
    """The edit that computes an expression with a number of rows at a time."""

    facts: Facts
    target: RowWise
    number: int

    def changes(self) -> list[Change]:
        """Return the changes of the cell's text."""
        target = self.target
        text = target.whole.text
        lines = ["", f"    {self._part()}", f"    {self._loop()}", ""]
        new = self._of_all_parts(self._margin.join(lines))
        changes = [text.replace(target.node, new), *self._counts_of_masks()]
        in_cell = target.whole.changes(target.cell, *changes)
        if self.is_without_graph and target.statement is not None:
            in_cell += target.cell.wrap([target.statement], WITHOUT_GRAPH)
        return in_cell

    @property
    def cost(self) -> str:
        """What it costs, as a sentence."""
        time = (
            "the line is computed again in backward"
            if self._is_recomputed
            else "a little time"
        )
        return str(self.target.whole.cost(time))

    @property
    def is_without_graph(self) -> bool:
        """Whether it switches off the autograd graph that a model would record for nothing."""
        frames = self.facts.frames
        if frames.cell is None or frames.trains or frames.cell.switches_grad_off:
            return False
        return self.target.rows.of_model

    @property
    def _is_recomputed(self) -> bool:
        """Whether parts are recomputed in backward, which would keep what each of them makes otherwise."""
        if self.is_without_graph:
            return False
        if self.target.total is Total.CROSS_ENTROPY and self.facts.frames.trains:
            return True
        tensors = self.target.tensors(self.facts)
        return any(tensor.requires_grad or tensor.has_graph for tensor in tensors)

    @property
    def _margin(self) -> str:
        """The end of a line and the blanks before the next."""
        indent = self.target.cell.indent_of(self.target.whole.place)
        return f"\n{indent}{INDENT if self.is_without_graph else ''}"

    @property
    def _names(self) -> dict[str, str]:
        """The variable for a part of the rows of each source, by the source's code."""
        sources = self.target.sources
        if len(sources) == 1:
            return dict.fromkeys(sources, "part")
        return {code: f"{tensor}_part" for code, tensor in sources.items()}

    def _loop(self) -> str:
        """Return the clause that goes through the parts of all sources."""
        names = self._names
        variables = ", ".join(names.values())
        splits = ", ".join(f"{source}.split({self.number})" for source in names)
        if len(names) > 1:
            splits = f"zip({splits})"
        return f"for {variables} in {splits}"

    def _part(self) -> str:
        """Return the code that computes the expression of a part of the rows."""
        code = self._expression_of_part()
        names = list(self._names.values())
        if self.target.total is Total.CROSS_ENTROPY:
            code = f'{code.removesuffix(")")}, reduction="sum")'
        if self.target.total is Total.MEAN:
            code = f"{code} * len({names[0]})"
        if not self._is_recomputed:
            return code
        variables = ", ".join(names)
        recomputed = f"{self._margin}        lambda {variables}: {code}, {variables}, use_reentrant=False"
        return f"torch.utils.checkpoint.checkpoint({recomputed})"

    def _expression_of_part(self) -> str:
        """Return the code of the expression, with the variables for parts in the places of the sources."""
        text = self.target.whole.text
        code = text.code(self.target.node)
        start = text.offset(self.target.node)
        names = self._names
        nodes = [source.node for source in self.target.rows.sources]
        for node in sorted(
            nodes, key=text.offset, reverse=True
        ):  # so that the other places still hold
            source = text.code(node)
            place = text.offset(node) - start
            end = place + len(source)
            code = code[:place] + names[source] + code[end:]
        return code

    def _of_all_parts(self, parts: str) -> str:
        """Return the code that makes the result of the results of all parts."""
        target = self.target
        match target.statement:
            case ast.Assign(targets=[ast.Tuple(), *_]):  # values and indices
                code = f"map(torch.cat, zip(*[{parts}]))"
            case _ if target.total is not None:
                code = f"sum({parts})"
            case _:
                code = f"torch.cat([{parts}])"
        if target.total is Total.MEAN:
            return f"({code} / {target.rows.length})"
        if target.total is Total.CROSS_ENTROPY:
            *_, labels = target.sources
            return f"({code} / ({labels} != -100).sum())"
        return code

    def _counts_of_masks(self) -> Iterator[Change]:
        """Yield the changes that count what is true of the rows a part at a time, beside the expression.

        Torch makes integers of all booleans that it adds up.
        """
        text = self.target.whole.text
        inside = set(ast.walk(self.target.node))
        for node in text.expressions():
            match node:
                case ast.Call(ast.Attribute(mask, "sum"), args=[], keywords=[]) if (
                    node not in inside
                ):
                    code = text.code(mask)
                    if self._is_mask(code):
                        parts = (
                            f"sum(part.sum() for part in {code}.split({self.number}))"
                        )
                        yield text.replace(node, parts)

    def _is_mask(self, code: str) -> bool:
        """Return whether a tensor has booleans for each of the rows."""
        tensor = self.facts.frames.tensors.get(code)
        if tensor is None or tensor.dtype != "bool":
            return False
        return tensor.shape[:1] == (self.target.rows.length,)
