"""A part at a time: of what a loop goes through, and of the rows of an expression that computes each by itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.batch import MOST_DOUBLINGS, VMAP
from gpumagic.oom.rules.expressions import FUNCTIONS, UNARY, Joined, joined_in
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.kept import WITHOUT_GRAPH
from gpumagic.oom.rules.proposal import Choice, calls, does, failed, propose
from gpumagic.report.units import count, size
from gpumagic.source.cell_code import ints_named
from gpumagic.source.text import INDENT, CellText, Change, called_name, keyword, names_in


class Parts(NamedTuple):
    """The number that says how large the parts are, or how many."""

    number: ast.expr
    call: ast.Call
    """What is told it."""
    is_count: bool = False
    is_step: bool = False
    """Whether it is the step of a `range`."""


_MODULES = ("torch.", "np.", "numpy.")


def smaller(facts: Facts) -> Iterator[Choice]:
    """Make the parts smaller in which a loop goes through its data."""
    batches = {each.name for each in facts.batches}
    for text in facts.texts if facts.memory == "device" else ():
        for found in _parts_in(text, text.line or facts.line):
            name = found.number.id if isinstance(found.number, ast.Name) else ""
            value = found.number.value if isinstance(found.number, ast.Constant) else facts.numbers.get(name)
            if type(value) is int and value > (0 if found.is_count else 1) and name not in batches:
                yield _choice(facts, text, found, name, value)
                return


def _choice(facts: Facts, text: CellText, found: Parts, name: str, now: int) -> Choice:
    written = [found.number] if not name else [each for written, each in ints_named(text.tree) if written == name]
    written += _slices(text, found.call, now) if found.is_step and not name else []
    most = 1 << MOST_DOUBLINGS

    def made(value: int) -> Advice:
        number = now * most // value if found.is_count else value
        line = f"line {found.number.lineno}" + (f" of {text.cell}" if text.cell else "")
        if name:
            title = f"{'Raise' if found.is_count else 'Lower'} {name} from {now} to {number}"
            title += f": {line} makes so many parts" if found.is_count else f": {line} takes so many at a time"
        else:
            what = f"Make {number} parts" if found.is_count else f"Take {number} at a time"
            title = f"{what} in {line}, not {now}: {text.code(found.call)}"
        how = "parts" if found.is_count else "at a time"
        return propose(
            title, evidence=f"{text.code(found.number)} in {line} is {now} {how}",
            cost="a different gradient" if facts.trains else "a little time", text=text if written else None,
            changes=[text.replace(each, str(number)) for each in written],
            first=None if written else f"{name} = {number}",
        )  # fmt: skip

    if found.is_count:
        return Choice("parts", most, made, most // 2, is_rounded=False, changes_result=facts.trains)
    return Choice(name or "parts", now, made, now // 2, changes_result=facts.trains, is_setting=bool(name))


def _parts_in(text: CellText, line: int | None) -> Iterator[Parts]:
    """Yield the parts that the loops around a line go through, the innermost first; then those of loaders."""
    sources: list[tuple[int, ast.expr]] = []
    for node in text.nodes():
        if not isinstance(node, ast.For | ast.ListComp | ast.GeneratorExp) or line is None:
            continue
        if node.lineno <= line <= (node.end_lineno or 0):
            each = [node.iter] if isinstance(node, ast.For) else [one.iter for one in node.generators]
            sources += [(node.lineno, one) for one in each]
    for _, source in sorted(sources, key=lambda one: -one[0]):
        for inner in ast.walk(source):
            yield from _told(text, inner) if isinstance(inner, ast.Call) else ()
    yield from (Parts(call.args[1], call) for _, call in calls([text], "DataLoader") if len(call.args) > 1)


def _told(text: CellText, call: ast.Call) -> Iterator[Parts]:
    """Yield the number that a call is told; of a function it is the second argument, of a method the first."""
    name, place = called_name(call), 1 if text.code(call.func).startswith(_MODULES) else 0
    if name == "range" and len(call.args) == 3:
        yield Parts(call.args[2], call, is_step=True)
    elif name in ("split", "chunk", "tensor_split", "array_split") and len(call.args) > place:
        yield Parts(call.args[place], call, is_count=name != "split")
    elif name in ("batched", "chunked") and len(call.args) == 2:
        yield Parts(call.args[1], call)


def _slices(text: CellText, step_of: ast.Call, number: int) -> list[ast.expr]:
    """Return where the number of a loop is written again, in a slice: ``x[i : i + 512]``."""
    ends = [node.upper for node in text.nodes() if isinstance(node, ast.Slice) and isinstance(node.upper, ast.BinOp)]
    added = [each.right for each in ends if each.lineno >= step_of.lineno]
    return [each for each in added if isinstance(each, ast.Constant) and each.value == number]


REDUCING = frozenset({
    "topk", "argmax", "argmin", "max", "min", "amax", "amin", "sum", "mean", "prod", "any", "all", "logsumexp", "norm",
})  # fmt: skip
"""Methods that make one or a few numbers of each row."""
ALONG = frozenset({"softmax", "log_softmax", "sort", "argsort", "cumsum", "normalize", "squeeze"})
"""Methods that leave a row as long as it is."""
BY_ROWS = frozenset({"cdist", "stft", "interpolate", "flatten", "contiguous", "float", "half", "bfloat16", "one_hot"})
"""Functions and methods that compute each row of their first argument by itself."""
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


def by_rows(facts: Facts) -> Iterator[Choice]:
    """Compute a part of the rows at a time where the result is much smaller than what leads to it."""
    places = list(failed(facts)) if not facts.functions & VMAP else []  # which takes no hooks of checkpoints
    statement = facts.text.statement_at(facts.line) if facts.text is not None else None
    if facts.text is not None and statement is not None:
        places.append((facts.text, statement))  # what failed may be in a model that it calls
        block = facts.text.block_of(statement) if does(statement, "backward") else []
        places = [(facts.text, each) for each in block if each.lineno < statement.lineno][::-1] or places
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
    last = text.statement_at(found.joined.last.lineno)
    block = text.block_of(last) if last is not None else []
    later = [each for each in block if last is not None and each.lineno > last.lineno]
    alike = (_part(facts, is_sum, text, one) for each in later for is_sum in (True, False)
             for one in joined_in(text, each) if not one.before)  # fmt: skip
    rows, sources = found.rows.length, _sources(found.joined.text, found.rows).keys()
    of_these = [each for each in alike if each is not None and each.rows.length == rows]
    all_found = [found, *(each for each in of_these if sources & _sources(each.joined.text, each.rows).keys())]
    make = functools.partial(_advice, facts, all_found)
    yield Choice("rows", rows, make, max(1, rows // 16), least=min(LEAST_ROWS, rows // 8))


class _Part(NamedTuple):
    """An expression of which a part of the rows can be computed at a time."""

    text: CellText
    joined: Joined
    node: ast.expr
    inner: ast.expr
    """What is computed of the rows: of a mean or a sum what it is taken of."""
    rows: Rows


def _part(facts: Facts, is_sum: bool, text: CellText, joined: Joined) -> _Part | None:
    """Return the largest part of an expression whose result is much smaller than what leads to it."""
    if called_name(joined.last) == "backward":
        return None  # the loss has a name
    whole = joined.text.tree.body[0] if joined.text.tree.body else None
    for node in joined.text.expressions():
        method = _summed(node)
        inner = node.func.value if method in ("mean", "sum") else node  # type: ignore[attr-defined]
        rows = _rows_of(facts, joined.text, inner)
        is_all = isinstance(whole, ast.Expr) and whole.value is node and joined.before
        is_so = is_sum if method else not is_sum and rows is not None and (rows.reduces or is_all)
        if rows is None or isinstance(inner, ast.Name) or not is_so:
            continue
        tensors = [facts.tensors[name] for name in _sources(joined.text, rows).values()]
        is_wide = facts.requested is not None and 2 * facts.requested >= sum(each.nbytes for each in tensors)
        is_head = method == "cross_entropy" and (tensors[0].graph or tensors[0].requires_grad)  # not all of a model
        if rows.length > 1 and (is_head or not facts.trains if rows.of_model else is_wide):
            return _Part(text, joined, node, inner, rows)
    return None


def _sources(text: CellText, rows: Rows) -> dict[str, str]:
    """Return the code of what the rows are of, and the name of the tensor in it: ``series.unfold(0, 96, 1)``."""
    return {
        text.code(each): next(iter(names_in(each.func if isinstance(each, ast.Call) else each))) for each in rows.uses
    }


def _advice(facts: Facts, found: Sequence[_Part], number: int) -> Advice:
    changes, costs, sources, is_without_graph = list[Change](), dict[str, None](), dict[str, None](), False
    for each in found:
        is_looked_at = not facts.trains and facts.cell is not None and not facts.cell.switches_grad_off
        without = each.rows.of_model and is_looked_at
        new, cost = _in_parts(facts, each, number, is_without_graph=without)
        changes += new
        costs |= {cost: None}
        sources |= dict.fromkeys(_sources(each.joined.text, each.rows))
        is_without_graph |= without
    lines = [str(each.joined.last.lineno) for each in found]
    where = f"lines {', '.join(lines)}" if lines[1:] else f"line {lines[0]}"
    return propose(
        f"Compute {where} with {count(number, 'row')} of {', '.join(sources)} at a time"
        + (", without an autograd graph" if is_without_graph else ""),
        text=found[0].text, changes=changes, cost="; ".join(costs),
        evidence=f"the line makes {size(facts.requested)} at once for all {count(found[0].rows.length, 'row')}",
    )  # fmt: skip


def _in_parts(facts: Facts, found: _Part, number: int, *, is_without_graph: bool) -> tuple[list[Change], str]:
    """Return the changes that compute an expression part by part, and what they cost."""
    text, joined, node, inner, rows = found
    sources = _sources(joined.text, rows)
    named = {each: f"{name}_part" if len(sources) > 1 else "part" for each, name in sources.items()}
    part, start = joined.text.code(inner), joined.text.offset(inner)
    for each in sorted(rows.uses, key=joined.text.offset, reverse=True):
        code, at = joined.text.code(each), joined.text.offset(each) - start
        part = part[:at] + named[code] + part[at + len(code) :]
    method, one, first = _summed(node), ", ".join(named.values()), next(iter(named))
    if method == "cross_entropy":
        part = f'{part.removesuffix(")")}, reduction="sum")'
    part = f"({part}).{method}()" if method in ("mean", "sum") else part
    part += f" * len({named[first]})" if method == "mean" else ""
    cost = "a little time"
    margin = "\n" + text.indent_of(joined.last) + (INDENT if is_without_graph else "")
    tensors = [facts.tensors[name] for name in sources.values()]
    if any(each.requires_grad or each.graph for each in tensors) or (method == "cross_entropy" and facts.trains):
        part = f"torch.utils.checkpoint.checkpoint({margin}        lambda {one}: {part}, {one}, use_reentrant=False)"
        cost = "the line is computed again in backward"
    split = [f"{each}.split({number})" for each in named]
    pairs = f"zip({', '.join(split)})" if len(named) > 1 else split[0]
    parts = f"{part}{margin}    for {one} in {pairs}{margin}"
    code = f"sum({margin}    {parts})" if method else f"torch.cat([{margin}    {parts}])"
    code = f"({code} / {rows.length})" if method == "mean" else code
    code = f"({code} / ({list(sources)[-1]} != -100).sum())" if method == "cross_entropy" else code
    changes, statement = joined.changes(text, joined.text.replace(node, code)), text.statement_at(joined.last.lineno)
    if is_without_graph and statement is not None:
        changes += text.wrap([statement], WITHOUT_GRAPH)
    return changes, "; ".join([cost, *joined.lost])


def _summed(node: ast.expr) -> str:
    """Return `mean` or `sum` where that is taken of everything, in the end, or `cross_entropy`, a mean of its own."""
    if called_name(node) == "cross_entropy" and isinstance(node, ast.Call) and not node.keywords:
        return "cross_entropy"
    is_whole = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not (node.args or node.keywords)
    return called_name(node) if is_whole and called_name(node) in ("mean", "sum") else ""


def _rows_of(facts: Facts, text: CellText, node: ast.expr) -> Rows | None:
    """Return what the rows of an expression are made of, where each depends on one row only."""
    if isinstance(node, ast.Name):
        fact = facts.tensors.get(node.id)
        is_there = fact is not None and fact.shape and fact.device == facts.device
        return Rows((node,), fact.shape[0], len(fact.shape)) if fact is not None and is_there else None
    if isinstance(node, ast.Subscript):
        words = [ast.unparse(each) for each in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
        rows = _rows_of(facts, text, node.value) if words[0] in (":", "...") else None
        numbers = sum(":" not in each and each != "None" for each in words)
        return rows and replace(rows, dimensions=rows.dimensions and rows.dimensions + words.count("None") - numbers)
    if isinstance(node, ast.UnaryOp) or (isinstance(node, ast.Attribute) and node.attr in _OF_RESULTS):
        return _rows_of(facts, text, node.operand if isinstance(node, ast.UnaryOp) else node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        rows = _rows_of(facts, text, node.left)
        return rows if rows is not None and rows.dimensions == 2 else None
    if isinstance(node, ast.BinOp | ast.Compare):
        others = node.comparators if isinstance(node, ast.Compare) else [node.right]
        return _of_elements(facts, text, [node.left, *others])
    return _of_method(facts, text, node) if isinstance(node, ast.Call) else None


def _of_elements(facts: Facts, text: CellText, operands: Sequence[ast.expr]) -> Rows | None:
    """Return the rows of what is computed element by element."""
    found = [(each, None if _is_number(facts, text, each) else _rows_of(facts, text, each)) for each in operands]
    rows = [each for _, each in found if each is not None]
    if not rows or (len(rows) > 1 and not all(each.dimensions for each in rows)):
        return None
    first = max(rows, key=lambda each: each.dimensions)
    aligned = [each for each in rows if (each.dimensions, each.length) == (first.dimensions, first.length)]
    if not all(any(rows is each for each in aligned) or _is_beside(facts, text, one, first) for one, rows in found):
        return None
    uses = tuple(use for each in aligned for use in each.uses)
    of_model = any(each.of_model for each in aligned)
    return replace(first, uses=uses, reduces=all(each.reduces for each in aligned), of_model=of_model)


def _is_number(facts: Facts, text: CellText, node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) or text.code(node) in facts.numbers or text.code(node).startswith("len(")


def _is_beside(facts: Facts, text: CellText, node: ast.expr, rows: Rows) -> bool:
    """Return whether all of an operand goes with each row: a number, a vector beside a matrix, ``other[None]``."""
    if isinstance(node, ast.BinOp):
        return _is_beside(facts, text, node.left, rows) and _is_beside(facts, text, node.right, rows)
    if isinstance(node, ast.Subscript):
        index = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
        return ast.unparse(index) == "None"
    fact = facts.tensors.get(text.code(node))
    return _is_number(facts, text, node) or (fact is not None and len(fact.shape) < rows.dimensions)


def _of_method(facts: Facts, text: CellText, call: ast.Call) -> Rows | None:  # noqa: PLR0911
    name, arguments = called_name(call), list(call.args)
    if isinstance(call.func, ast.Attribute) and not text.code(call.func.value).endswith(FUNCTIONS):
        arguments.insert(0, call.func.value)
    dim = keyword(call, "dim")
    of = arguments[0] if arguments else None
    if name == "cross_entropy" and len(arguments) == 2:
        logits, labels = (_rows_of(facts, text, each) for each in arguments)
        is_fit = logits is not None and labels is not None and logits.length == labels.length and labels.dimensions == 1
        return replace(logits, uses=(*logits.uses, *labels.uses)) if is_fit and logits and labels else None
    if (
        name in ("cat", "concat")
        and isinstance(of, ast.List)
        and ast.unparse(dim.value if dim else call.args[-1]) in WITHIN
    ):
        return _of_elements(facts, text, of.elts)
    if name == "unfold" and isinstance(of, ast.Name) and [ast.unparse(each) for each in arguments[1::2]] == ["0", "1"]:
        rows, width = _rows_of(facts, text, of), facts.numbers.get(text.code(arguments[2]))
        return rows and replace(
            rows, uses=(call,), length=rows.length - int(width or 0) + 1, dimensions=rows.dimensions + 1
        )
    if name == "gather" and len(arguments) == 3 and ast.unparse(arguments[1]) in WITHIN:
        table, index = (_rows_of(facts, text, each) for each in (arguments[0], arguments[2]))
        is_fit = table is not None and index is not None and table.length == index.length
        return replace(table, uses=(*table.uses, *index.uses)) if is_fit and table and index else None
    if (
        name in OF_ELEMENTS
        and len(arguments) > 1
        and dim is None
        and not ast.unparse(arguments[1]).lstrip("-").isdigit()
    ):
        return _of_elements(facts, text, arguments)
    rows = _rows_of(facts, text, arguments.pop(0)) if arguments else None
    model = next((each for each in facts.models if each.name == name), None)
    if rows is not None and isinstance(call.func, ast.Name) and model is not None:
        # Statistics of a batch and lists that hooks fill are of all rows
        is_apart = not (arguments or facts.emptied or (model.training and "batch norm" in model.uneven))
        return replace(rows, reduces=True, of_model=True, dimensions=0) if is_apart else None
    if rows is None or name in BY_ROWS or (name in UNARY and all(isinstance(each, ast.Constant) for each in arguments)):
        more = {"one_hot": 1}.get(name, 0)
        return rows and replace(
            rows, dimensions=0 if name in _RESHAPING else rows.dimensions and rows.dimensions + more
        )
    place = 1 if name == "topk" else 0
    said = dim.value if dim is not None else arguments[place] if len(arguments) > place else None
    # On the last dimensions: it says so, or it is `topk`, which does unless told
    is_within_a_row = ast.unparse(said) in WITHIN if said is not None else name == "topk"
    if name not in REDUCING | ALONG or not is_within_a_row:
        return None
    gone = int(name in REDUCING and name != "topk" and keyword(call, "keepdim") is None)
    return replace(
        rows, reduces=rows.reduces or name in REDUCING, dimensions=rows.dimensions and rows.dimensions - gone
    )


WITHIN = ("-1", "1", "2")
"""The dimensions of a row."""
_RESHAPING = frozenset({"stft", "flatten"})
_OF_RESULTS = ("indices", "values", "logits", "last_hidden_state")
