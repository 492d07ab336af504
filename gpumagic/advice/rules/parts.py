"""A part at a time: of what a loop goes through, and of the rows of an expression that computes each by itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gpumagic.advice.facts import Facts, Memory
from gpumagic.advice.records import Advice
from gpumagic.advice.rules.batch import MOST_DOUBLINGS, VMAP
from gpumagic.advice.rules.inlining import Inlined as Joined
from gpumagic.advice.rules.inlining import inlined as joined_in
from gpumagic.advice.rules.kept import WITHOUT_GRAPH
from gpumagic.advice.rules.patterns import FUNCTIONS, UNARY
from gpumagic.advice.rules.proposal import Choice, Edit, numbered, propose, replace_numbers
from gpumagic.advice.rules.regions import calls, does, failed
from gpumagic.report.units import count, size
from gpumagic.source.cell_code import ints_named
from gpumagic.source.text import INDENT, CellText, Change, called_name, keyword, names_in

_MODULES = ("torch.", "np.", "numpy.")
_COUNTS = ("chunk", "tensor_split", "array_split")
"""What is told how many parts there are to be, and not how large they are."""


def smaller(facts: Facts) -> Iterator[Choice]:
    """Make the parts smaller in which a loop goes through its data."""
    batches = {each.name for each in facts.notebook.batch_sizes}
    for text in facts.frames.texts if facts.event.memory is Memory.DEVICE else ():
        found = list(_parts_in(text, text.line or facts.frames.line))
        for call, number in found:
            now = _int(facts, text, number)
            if (
                now is not None
                and (now > 1 or called_name(call) in _COUNTS)
                and text.code(number) not in batches
            ):
                on_line = (
                    each for _, each in found if each.lineno == number.lineno
                )  # two tensors that go together
                alike = [each for each in on_line if text.code(each) == text.code(number)]
                yield _smaller_parts(facts, text, call, alike, now)
                return


def _int(facts: Facts, text: CellText, node: ast.expr) -> int | None:
    value = (
        node.value if isinstance(node, ast.Constant) else facts.frames.numbers.get(text.code(node))
    )
    return value if type(value) is int else None


def _smaller_parts(
    facts: Facts, text: CellText, call: ast.Call, alike: list[ast.expr], now: int
) -> Choice:
    number, is_count = alike[0], called_name(call) in _COUNTS
    name = number.id if isinstance(number, ast.Name) else ""
    places = [] if name else [*alike]
    places += [each for said, each in ints_named(text.tree) if said == name]
    if (
        called_name(call) == "range" and not name
    ):  # the number is written again in slices: ``x[i : i + 512]``
        ends = [
            node.upper
            for node in text.nodes()
            if isinstance(node, ast.Slice) and node.lower is not None
        ]
        added = [
            each.right
            for each in ends
            if isinstance(each, ast.BinOp) and each.lineno >= call.lineno
        ]
        places += [each for each in added if isinstance(each, ast.Constant) and each.value == now]
    put: Callable[[int], Edit] = (
        replace_numbers(text, places) if places else lambda value: {"first": f"{name} = {value}"}
    )
    line = f"line {number.lineno}{f' of {text.cell}' if text.cell else ''}"
    most = 1 << MOST_DOUBLINGS if is_count else now

    def told(value: int) -> int:
        return now * most // value if is_count else value

    def title(value: int) -> str:
        if not name:
            what = f"Make {told(value)} parts" if is_count else f"Take {value} at a time"
            return f"{what} in {line}, not {now}: {text.code(call)}"
        how = "makes so many parts" if is_count else "takes so many at a time"
        return (
            f"{'Raise' if is_count else 'Lower'} {name} from {now} to {told(value)}: {line} {how}"
        )

    return numbered(
        "parts" if is_count else name or "parts",
        most,
        title,
        lambda value: put(told(value)),
        is_rounded=not is_count,
        evidence=f"{text.code(number)} in {line} is {now} {'parts' if is_count else 'at a time'}",
        cost="a different gradient" if facts.frames.trains else "a little time",
        changes_result=facts.frames.trains,
        is_setting=bool(name) and not is_count,
    )


def _parts_in(text: CellText, line: int | None) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield what is told how large parts are, or how many, with the number: in loops around a line, then of loaders."""
    loops = [
        node for node in text.nodes() if isinstance(node, ast.For | ast.ListComp | ast.GeneratorExp)
    ]
    around = [
        each for each in loops if line is not None and each.lineno <= line <= (each.end_lineno or 0)
    ]
    for loop in sorted(around, key=lambda each: -each.lineno):  # the innermost first
        sources = (
            [loop.iter] if isinstance(loop, ast.For) else [each.iter for each in loop.generators]
        )
        for call in (
            each for one in sources for each in ast.walk(one) if isinstance(each, ast.Call)
        ):
            # Of a function it is the second argument, of a method the first
            name, is_function = called_name(call), text.code(call.func).startswith(_MODULES)
            place = {"range": 2, "batched": 1, "chunked": 1}.get(name, int(is_function))
            if (
                name in ("range", "split", "batched", "chunked", *_COUNTS)
                and len(call.args) > place
            ):
                yield call, call.args[place]
    yield from (
        (call, call.args[1]) for _, call in calls([text], "DataLoader") if len(call.args) > 1
    )


REDUCING = frozenset({
    "topk", "argmax", "argmin", "max", "min", "amax", "amin", "sum", "mean", "prod", "any", "all", "logsumexp", "norm",
})  # fmt: skip
"""Methods that make one or a few numbers of each row."""
ALONG = frozenset({"softmax", "log_softmax", "sort", "argsort", "cumsum", "normalize", "squeeze"})
"""Methods that leave a row as long as it is."""
BY_ROWS = frozenset(
    {
        "cdist",
        "stft",
        "interpolate",
        "flatten",
        "contiguous",
        "float",
        "half",
        "bfloat16",
        "one_hot",
    }
)
"""Functions and methods that compute each row of their first argument by itself."""
_RESHAPING = ("stft", "flatten")
OF_ELEMENTS = UNARY | {"max", "min", "maximum", "minimum", "where"}
"""Functions and methods that compute each element by itself, of one tensor or of several."""


LEAST_ROWS = 16
"""Fewer at a time take longer than anybody waits."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of an expression are made of."""

    uses: tuple[ast.expr, ...]
    """Where tensors stand for their rows, all of them equally many; elsewhere it is all of a tensor."""
    length: int
    dimensions: int = 0
    """Of the expression; 0 where they are not known."""
    reduces: bool = False
    """Whether a row is smaller in the end than on the way."""
    of_model: bool = False
    """Whether a model runs on them."""

    def with_dimensions(self, more: int, **fields: Any) -> Rows:
        """Return the rows with so many dimensions more, and other fields."""
        return replace(self, dimensions=self.dimensions and self.dimensions + more, **fields)


def by_rows(facts: Facts) -> Iterator[Choice]:
    """Compute a part of the rows at a time where the result is much smaller than what leads to it."""
    places = (
        list(failed(facts)) if not facts.frames.functions & VMAP else []
    )  # which takes no hooks of checkpoints
    statement = (
        facts.frames.text.statement_at(facts.frames.line) if facts.frames.text is not None else None
    )
    if facts.frames.text is not None and statement is not None:
        places.append((facts.frames.text, statement))  # what failed may be in a model that it calls
        block = facts.frames.text.block_of(statement) if does(statement, "backward") else []
        places = [(facts.frames.text, each) for each in block if each.lineno < statement.lineno][
            ::-1
        ] or places
    # A sum of what failed, else what most statements make of it
    ways = [
        (is_sum, text, each)
        for is_sum in (True, False)
        for text, one in places
        for each in list(joined_in(text, one))[:: 1 if is_sum else -1]
    ]
    found = next(filter(None, (_part(facts, *each) for each in ways)), None)
    if found is None:
        return
    # What the statements after it compute of as many rows goes with it
    text = found.text
    last = text.statement_at(found.joined.place.lineno)
    later = (
        [each for each in text.block_of(last) if each.lineno > last.lineno]
        if last is not None
        else []
    )
    alike = (
        _part(facts, is_sum, text, one)
        for each in later
        for is_sum in (True, False)
        for one in joined_in(text, each)
        if not one.statements
    )
    rows, sources = found.rows.length, found.sources.keys()
    of_these = [each for each in alike if each is not None and each.rows.length == rows]
    all_found = [found, *(each for each in of_these if sources & each.sources.keys())]
    make = functools.partial(_advice, facts, all_found)
    yield Choice("rows", rows, make, max(1, rows // 16), least=min(LEAST_ROWS, rows // 8))


@dataclass(frozen=True, slots=True)
class _Part:
    """An expression of which a part of the rows can be computed at a time."""

    text: CellText
    joined: Joined
    node: ast.expr
    rows: Rows

    @property
    def sources(self) -> dict[str, str]:
        """The code of what the rows are of, and the name of the tensor in it: ``series.unfold(0, 96, 1)``."""
        return {
            self.joined.text.code(each): min(names_in(getattr(each, "func", each)))
            for each in self.rows.uses
        }


def _part(facts: Facts, is_sum: bool, text: CellText, joined: Joined) -> _Part | None:
    """Return the largest part of an expression whose result is much smaller than what leads to it."""
    if called_name(joined.place) == "backward":
        return None  # the loss has a name
    whole = joined.text.tree.body[0] if joined.text.tree.body else None
    for node in joined.text.expressions():
        method = _summed(node)
        inner = node.func.value if method in ("mean", "sum") else node  # type: ignore[attr-defined]
        rows = _Reader(facts, joined.text).rows_of(inner)
        is_all = isinstance(whole, ast.Expr) and whole.value is node and joined.statements
        is_so = is_sum if method else not is_sum and rows is not None and (rows.reduces or is_all)
        if rows is None or isinstance(inner, ast.Name) or not is_so:
            continue
        found = _Part(text, joined, node, rows)
        tensors = [facts.frames.tensors[name] for name in found.sources.values()]
        is_wide = facts.event.requested is not None and 2 * facts.event.requested >= sum(
            each.nbytes for each in tensors
        )
        is_head = method == "cross_entropy" and (
            tensors[0].has_graph or tensors[0].requires_grad
        )  # not all of a model
        if rows.length > 1 and (is_head or not facts.frames.trains if rows.of_model else is_wide):
            return found
    return None


def _advice(facts: Facts, found: Sequence[_Part], number: int) -> Advice:
    is_looked_at = (
        not facts.frames.trains
        and facts.frames.cell is not None
        and not facts.frames.cell.switches_grad_off
    )
    without = [is_looked_at and each.rows.of_model for each in found]
    edits = [_in_parts(facts, *each, number) for each in zip(found, without, strict=True)]
    lines = [str(each.joined.place.lineno) for each in found]
    sources = dict.fromkeys(source for each in found for source in each.sources)
    return propose(
        f"Compute line{'s' if lines[1:] else ''} {', '.join(lines)} with {count(number, 'row')} of "
        f"{', '.join(sources)} at a time{', without an autograd graph' if any(without) else ''}",
        text=found[0].text,
        changes=[change for changes, _ in edits for change in changes],
        cost="; ".join(dict.fromkeys(cost for _, cost in edits)),
        evidence=f"the line makes {size(facts.event.requested)} at once for all {count(found[0].rows.length, 'row')}",
    )


def _in_parts(
    facts: Facts, found: _Part, is_without_graph: bool, number: int
) -> tuple[list[Change], str]:
    """Return the changes that compute an expression part by part, and what they cost."""
    joined, node, text = found.joined, found.node, found.joined.text
    sources, method = found.sources, _summed(node)
    named = {each: f"{name}_part" if len(sources) > 1 else "part" for each, name in sources.items()}
    part, start = text.code(node), text.offset(node)
    for use in sorted(found.rows.uses, key=text.offset, reverse=True):
        code, at = text.code(use), text.offset(use) - start
        part = part[:at] + named[code] + part[at + len(code) :]
    if method == "cross_entropy":
        part = f'{part.removesuffix(")")}, reduction="sum")'
    one = ", ".join(named.values())
    part += f" * len({next(iter(named.values()))})" if method == "mean" else ""
    margin = "\n" + found.text.indent_of(joined.place) + (INDENT if is_without_graph else "")
    cost, tensors = "a little time", [facts.frames.tensors[name] for name in sources.values()]
    has_graph = (
        any(each.requires_grad or each.has_graph for each in tensors) and not is_without_graph
    )
    if has_graph or (method == "cross_entropy" and facts.frames.trains):
        part = f"torch.utils.checkpoint.checkpoint({margin}        lambda {one}: {part}, {one}, use_reentrant=False)"
        cost = "the line is computed again in backward"
    split = ", ".join(f"{each}.split({number})" for each in named)
    pairs = f"zip({split})" if len(named) > 1 else split
    parts = f"{part}{margin}    for {one} in {pairs}{margin}"
    code = f"sum({margin}    {parts})" if method else f"torch.cat([{margin}    {parts}])"
    statement = found.text.statement_at(joined.place.lineno)
    if isinstance(statement, ast.Assign) and isinstance(
        statement.targets[0], ast.Tuple
    ):  # values and indices
        code = f"map(torch.cat, zip(*[{margin}    {parts}]))"
    if method in ("mean", "cross_entropy"):
        total = found.rows.length if method == "mean" else f"({list(sources)[-1]} != -100).sum()"
        code = f"({code} / {total})"
    masks = {
        f"{name}.sum()": f"sum(part.sum() for part in {name}.split({number}))"
        for name, each in facts.frames.tensors.items()
        if each.dtype == "bool" and each.shape[:1] == (found.rows.length,)
    }
    inside = set(
        map(id, ast.walk(node))
    )  # outside of it torch makes integers of all booleans that it adds up
    others = [
        each for each in text.expressions() if text.code(each) in masks and id(each) not in inside
    ]
    counts = [text.replace(each, masks[text.code(each)]) for each in others]
    changes = joined.changes(found.text, text.replace(node, code), *counts)
    if is_without_graph and statement is not None:
        changes += found.text.wrap([statement], WITHOUT_GRAPH)
    return changes, joined.cost(cost)


def _summed(node: ast.expr) -> str:
    """Return `mean` or `sum` where that is taken of everything, in the end, or `cross_entropy`, a mean of its own."""
    name = called_name(node)
    is_of_all = (
        name in ("mean", "sum")
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
    )
    is_plain = (
        isinstance(node, ast.Call)
        and not node.keywords
        and (name == "cross_entropy" or not node.args)
    )
    return name if is_plain and (is_of_all or name == "cross_entropy") else ""


WITHIN = ("-1", "1", "2")
"""The dimensions of a row."""
_OF_RESULTS = ("indices", "values", "logits", "last_hidden_state")


class _Reader(NamedTuple):
    """Reads what the rows of expressions are made of."""

    facts: Facts
    text: CellText

    def rows_of(self, node: ast.expr) -> Rows | None:
        """Return what the rows of an expression are made of, where each depends on one row only."""
        if isinstance(node, ast.Name):
            fact = self.facts.frames.tensors.get(node.id)
            is_there = fact is not None and fact.shape and fact.device == self.facts.event.device
            return (
                Rows((node,), fact.shape[0], len(fact.shape))
                if fact is not None and is_there
                else None
            )
        if isinstance(node, ast.Subscript):
            index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            first, *others = map(ast.unparse, index)
            numbers = sum(":" not in each and each != "None" for each in others)
            rows = self.rows_of(node.value) if first in (":", "...") else None
            return rows and rows.with_dimensions(others.count("None") - numbers - (first == "..."))
        if isinstance(node, ast.UnaryOp) or (
            isinstance(node, ast.Attribute) and node.attr in _OF_RESULTS
        ):
            return self.rows_of(node.operand if isinstance(node, ast.UnaryOp) else node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            rows = self.rows_of(node.left)
            return rows if rows is not None and rows.dimensions == 2 else None
        if isinstance(node, ast.BinOp | ast.Compare):
            compared = node.comparators if isinstance(node, ast.Compare) else [node.right]
            return self._of_elements([node.left, *compared])
        return self._of_call(node) if isinstance(node, ast.Call) else None

    def _of_elements(self, operands: Sequence[ast.expr]) -> Rows | None:
        """Return the rows of what is computed element by element."""
        found = [(each, None if self._is_number(each) else self.rows_of(each)) for each in operands]
        rows = [each for _, each in found if each is not None]
        if not rows or (len(rows) > 1 and not all(each.dimensions for each in rows)):
            return None
        first = max(rows, key=lambda each: each.dimensions)
        aligned = [
            each
            for each in rows
            if (each.dimensions, each.length) == (first.dimensions, first.length)
        ]
        if not all(
            any(each is one for one in aligned) or self._is_beside(node, first)
            for node, each in found
        ):
            return None
        return replace(
            first,
            uses=tuple(use for each in aligned for use in each.uses),
            reduces=all(each.reduces for each in aligned),
            of_model=any(each.of_model for each in aligned),
        )

    def _is_number(self, node: ast.expr) -> bool:
        node = node.operand if isinstance(node, ast.UnaryOp) else node
        code = self.text.code(node)
        return (
            isinstance(node, ast.Constant)
            or code in self.facts.frames.numbers
            or code.startswith("len(")
        )

    def _is_beside(self, node: ast.expr, rows: Rows) -> bool:
        """Return whether all of an operand goes with each row: a number, a vector beside a matrix, ``other[None]``."""
        if isinstance(node, ast.BinOp):
            return self._is_beside(node.left, rows) and self._is_beside(node.right, rows)
        if isinstance(node, ast.Subscript):
            index = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            return ast.unparse(index) == "None"
        fact = self.facts.frames.tensors.get(self.text.code(node))
        return self._is_number(node) or (fact is not None and len(fact.shape) < rows.dimensions)

    def _of_call(self, call: ast.Call) -> Rows | None:
        name, given, dim = called_name(call), list(call.args), keyword(call, "dim")
        if isinstance(call.func, ast.Attribute) and not self.text.code(call.func.value).endswith(
            FUNCTIONS
        ):
            given.insert(0, call.func.value)
        if not given:
            return None
        of, *rest = given
        said = (
            dim.value
            if dim is not None
            else rest[name == "topk"]
            if len(rest) > (name == "topk")
            else None
        )
        # On the last dimensions: it says so, or it is `topk`, which does unless told
        is_within = ast.unparse(said) in WITHIN if said is not None else name == "topk"
        if name in ("cat", "concat") and isinstance(of, ast.List):
            return self._of_elements(of.elts) if is_within else None
        if (
            name in OF_ELEMENTS
            and rest
            and dim is None
            and not ast.unparse(rest[0]).lstrip("-").isdigit()
        ):
            return self._of_elements(given)
        rows = self.rows_of(of)
        model = next((each for each in self.facts.notebook.models if each.name == name), None)
        if rows is not None and model is not None and isinstance(call.func, ast.Name):
            # Statistics of a batch and lists that hooks fill are of all rows
            is_apart = not (
                rest
                or self.facts.notebook.reset_code
                or (model.training and "batch norm" in model.uneven_layers)
            )
            return replace(rows, reduces=True, of_model=True, dimensions=0) if is_apart else None
        return rows and self._of_function(rows, call, given, is_within)

    def _of_function(
        self, rows: Rows, call: ast.Call, given: Sequence[ast.expr], is_within: bool
    ) -> Rows | None:
        """Return the rows of a function or method of some rows; `is_within` tells whether it is along each."""
        name, (of, *rest) = called_name(call), given
        if (name, len(given)) in (("cross_entropy", 2), ("gather", 3)):  # the rows of two
            last = self.rows_of(given[-1])
            is_so = (
                last is not None
                and last.length == rows.length
                and (is_within or last.dimensions == 1)
            )
            return (
                replace(rows, uses=(*rows.uses, *last.uses)) if last is not None and is_so else None
            )
        if name == "unfold" and len(rest) == 3:
            width = _int(self.facts, self.text, rest[1])
            is_so = isinstance(of, ast.Name) and [ast.unparse(each) for each in rest[::2]] == [
                "0",
                "1",
            ]
            length = rows.length - (width or 0) + 1
            return (
                rows.with_dimensions(1, uses=(call,), length=length)
                if is_so and width is not None
                else None
            )
        if name in BY_ROWS or (
            name in UNARY and all(isinstance(each, ast.Constant) for each in rest)
        ):
            return (
                replace(rows, dimensions=0)
                if name in _RESHAPING
                else rows.with_dimensions(name == "one_hot")
            )
        if name not in REDUCING | ALONG or not is_within:
            return None
        is_gone = name in REDUCING and name != "topk" and keyword(call, "keepdim") is None
        return rows.with_dimensions(-is_gone, reduces=rows.reduces or name in REDUCING)
