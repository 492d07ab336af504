"""A part at a time: of what a loop goes through, and of the rows of an expression that computes each by itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.batch import MOST_DOUBLINGS
from gpumagic.oom.rules.expressions import FUNCTIONS, UNARY, Joined, joined_in, match
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.kept import ungraphed
from gpumagic.oom.rules.proposal import Choice, calls, failed, propose
from gpumagic.report.units import count, size
from gpumagic.source.cell_code import ints_named
from gpumagic.source.text import CellText, apply_changes, called_name, keyword


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


REDUCING = frozenset({"topk", "argmax", "argmin", "max", "min", "amax", "amin", "sum", "mean", "logsumexp", "norm"})
"""Methods that make one or a few numbers of each row."""
ALONG = frozenset({"softmax", "log_softmax", "sort", "argsort", "cumsum"})
"""Methods that leave a row as long as it is."""
BY_ROWS = frozenset({"cdist", "stft", "interpolate", "flatten", "contiguous", "float", "half", "bfloat16"})
"""Functions and methods that compute each row of their first argument by itself."""


_VMAP = frozenset({"vmap_impl", "_flat_vmap"})
"""Functions of torch that map."""
LEAST_ROWS = 16
"""Fewer at a time take longer than anybody waits."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of an expression are made of."""

    name: str
    """The tensor whose rows they are."""
    uses: tuple[ast.Name, ...]
    """Where it stands for its rows; elsewhere it is all of it."""
    reduces: bool = False
    """Whether a row is smaller in the end than on the way."""
    of_model: bool = False
    """Whether a model runs on them."""


def by_rows(facts: Facts) -> Iterator[Choice]:
    """Compute a part of the rows at a time where the result is much smaller than what leads to it."""
    places = list(failed(facts))
    statement = facts.text.statement_at(facts.line) if facts.text is not None else None
    if facts.text is not None and statement is not None:
        places.append((facts.text, statement))  # what failed may be in a model that it calls
    for text, joined in ((place, each) for place, one in places for each in reversed(list(joined_in(place, one)))):
        whole = joined.text.tree.body[0] if joined.text.tree.body else None
        expression = whole.value if isinstance(whole, ast.Expr) else None
        method = _summed(expression)
        inner = expression.func.value if method and isinstance(expression, ast.Call) else expression  # type: ignore[attr-defined]
        rows = _rows_of(facts, joined.text, inner) if inner is not None else None
        fact = facts.tensors.get(rows.name) if rows is not None else None
        if rows is None or fact is None or not (method or rows.reduces or joined.before):
            continue
        length, is_wide = fact.shape[0], facts.requested is not None and facts.requested >= 2 * fact.nbytes
        if length > 1 and (not facts.trains if rows.of_model else is_wide):
            make = functools.partial(_advice, facts, text, joined, rows, method)
            yield Choice("rows", length, make, max(1, length // 16), least=min(LEAST_ROWS, length // 8))
            return


def mapped(facts: Facts) -> Iterator[Choice]:
    """Have `vmap` map over some of the rows at a time."""
    for text, call in calls(facts.texts) if facts.functions & _VMAP else ():
        made = call.func
        if not isinstance(made, ast.Call) or called_name(made) != "vmap" or keyword(made, "chunk_size") is not None:
            continue
        in_dims = keyword(made, "in_dims")
        dims = in_dims.value.elts if in_dims is not None and isinstance(in_dims.value, ast.Tuple) else []
        told = [each for each, dim in zip(call.args, dims, strict=False) if text.code(dim) == "0"]
        names = [text.code(each) for each in (told if dims else call.args)]
        rows = next((facts.tensors[name].shape[0] for name in names if name in facts.tensors), 0)
        if rows > 1:
            yield Choice("chunk_size", rows, functools.partial(_in_chunks, text, made, rows), rows // 2)
            return


def _in_chunks(text: CellText, call: ast.Call, rows: int, number: int) -> Advice:
    return propose(
        f"Map over {count(number, 'row')} at a time", text=text, cost="a little time",
        changes=[text.add_argument(call, f"chunk_size={number}")],
        evidence=f"vmap has all {count(rows, 'row')} in memory at once",
    )  # fmt: skip


def _advice(facts: Facts, text: CellText, joined: Joined, rows: Rows, method: str, number: int) -> Advice:
    fact = facts.tensors[rows.name]
    changes = [joined.text.replace(each, "part") for each in rows.uses]
    part = apply_changes(changes, joined.text.source)
    part += " * len(part)" if method == "mean" else ""
    cost = "a little time"
    margin = "\n" + text.indent_of(joined.last)
    if fact.requires_grad or fact.graph:
        part = f"torch.utils.checkpoint.checkpoint({margin}        lambda part: {part}, part, use_reentrant=False)"
        cost = "the line is computed again in backward"
    parts = f"{part}{margin}    for part in {rows.name}.split({number}){margin}"
    code = f"sum({margin}    {parts})" if method else f"torch.cat([{margin}    {parts}])"
    code += f" / len({rows.name})" if method == "mean" else ""
    changes, how = joined.replaced_by(text, code), "at a time"
    if rows.of_model and facts.cell is not None and not facts.cell.switches_grad_off and text is facts.text:
        changes, how = [*changes, *ungraphed(facts)], f"{how}, without an autograd graph"
    return propose(
        f"Compute line {joined.last.lineno} with {count(number, 'row')} of {rows.name} {how}", text=text,
        changes=changes,
        evidence=f"the line makes {size(facts.requested)} at once for all {count(fact.shape[0], 'row')}",
        cost=cost,
    )  # fmt: skip


def _summed(node: ast.expr | None) -> str:
    """Return `mean` or `sum` where that is taken of everything, in the end."""
    is_whole = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not (node.args or node.keywords)
    return called_name(node) if node is not None and is_whole and called_name(node) in ("mean", "sum") else ""


def _rows_of(facts: Facts, text: CellText, node: ast.expr) -> Rows | None:
    """Return what the rows of an expression are made of, where each depends on one row only."""
    if isinstance(node, ast.Name):
        fact = facts.tensors.get(node.id)
        return Rows(node.id, (node,)) if fact is not None and fact.shape and fact.device == facts.device else None
    if isinstance(node, ast.Subscript):
        index = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
        return _rows_of(facts, text, node.value) if ast.unparse(index) == ":" else None
    if isinstance(node, ast.Attribute):
        return _rows_of(facts, text, node.value) if node.attr in ("indices", "values") else None
    if isinstance(node, ast.UnaryOp):
        return _rows_of(facts, text, node.operand)
    if isinstance(node, ast.BinOp):
        return _of_operands(facts, text, node)
    return _of_method(facts, text, node) if isinstance(node, ast.Call) else None


def _of_operands(facts: Facts, text: CellText, node: ast.BinOp) -> Rows | None:
    if isinstance(node.op, ast.MatMult):
        left = _rows_of(facts, text, node.left)
        is_matrix = left is not None and len(facts.tensors[left.name].shape) == 2
        return left if is_matrix else None
    for one, other in ((node.right, node.left), (node.left, node.right)):
        if isinstance(one, ast.Constant) or text.code(one) in facts.numbers:
            return _rows_of(facts, text, other)
    pair = match("column(A) - row(B)", ast.BinOp(node.left, ast.Sub(), node.right))
    if pair is not None:  # each row of the one with all of the other
        return _rows_of(facts, text, pair["A"])
    left, right = _rows_of(facts, text, node.left), _rows_of(facts, text, node.right)
    if left is None or right is None or left.name != right.name:
        return None
    return Rows(left.name, (*left.uses, *right.uses), left.reduces and right.reduces, left.of_model or right.of_model)


def _of_method(facts: Facts, text: CellText, call: ast.Call) -> Rows | None:
    name, arguments = called_name(call), list(call.args)
    if isinstance(call.func, ast.Attribute) and not text.code(call.func.value).endswith(FUNCTIONS):
        arguments.insert(0, call.func.value)
    rows = _rows_of(facts, text, arguments.pop(0)) if arguments else None
    if rows is not None and isinstance(call.func, ast.Name) and any(model.name == name for model in facts.models):
        return Rows(rows.name, rows.uses, reduces=True, of_model=True) if not arguments else None
    if rows is None or name in BY_ROWS or (name in UNARY and all(isinstance(each, ast.Constant) for each in arguments)):
        return rows
    dim, place = keyword(call, "dim"), 1 if name == "topk" else 0
    said = dim.value if dim is not None else arguments[place] if len(arguments) > place else None
    # On the last dimensions: it says so, or it is `topk`, which does unless told
    is_within_a_row = ast.unparse(said) in ("-1", "1", "2") if said is not None else name == "topk"
    if name not in REDUCING | ALONG or not is_within_a_row:
        return None
    return Rows(rows.name, rows.uses, rows.reduces or name in REDUCING, rows.of_model)
