"""Less at a time: a smaller batch, part of the data, a smaller number of something else."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumagic.advice.facts import Facts, Memory, Stage
from gpumagic.advice.rules import loops, loss
from gpumagic.advice.rules.proposal import (
    Choice,
    Edit,
    merge_edits,
    numbered,
    prepare,
    replace_numbers,
)
from gpumagic.advice.rules.regions import (
    Region,
    bound_in,
    called_models,
    calls,
    failed,
    find,
    loop_around,
    read_tensors,
)
from gpumagic.report.units import count, size
from gpumagic.source.cell_code import BatchSize, ints_named, is_batch_name
from gpumagic.source.text import CellText, Change, called_name, keyword, names_in

MOST_PARTS = 64
"""Nobody wants a batch that is a smaller part of the one that there was."""


def smaller(facts: Facts) -> Iterator[Choice]:
    """Lower the batch the cell works with."""
    trainer = facts.notebook.trainer
    if trainer is not None and trainer.library == "transformers":
        return  # `loops.batch` knows what else its arguments say
    if not facts.notebook.batch_sizes or not facts.may_take_less:
        return
    batch = facts.notebook.batch_sizes[0]
    is_in_pass = (
        facts.frames.stage in (Stage.FORWARD, Stage.BACKWARD) or facts.frames.trains
    )
    if not is_in_pass and not _goes_with(facts, batch):
        return

    def edit(value: int, steps: int) -> Edit:
        lower = _with_batch_size(facts, batch, value)
        if steps == 1:
            return merge_edits(lower)
        accumulate = loops.accumulating(facts, batch, steps)
        return merge_edits(lower, accumulate) if accumulate else {}

    yield loops.lowered(
        facts,
        batch.name,
        batch.value,
        f"{batch.name}'s batch_size" if batch.loader else batch.name,
        f"{_origin(batch)}{batch.value}",
        edit,
        is_setting=not batch.loader and not batch.cell,
        least=batch.value // MOST_PARTS,
    )


def _origin(batch: BatchSize) -> str:
    """Return where a batch size is set, up to the number."""
    if batch.loader:
        return f"{batch.name} is a DataLoader of batches of "
    if batch.line is None:
        return f"the cell uses {batch.name}, which is "
    cell = f" of {batch.cell}" if batch.cell else ""
    return f"line {batch.line}{cell} says {batch.name}="


def _goes_with(facts: Facts, batch: BatchSize) -> bool:
    """Return whether the line that failed, or its loop, names a batch size or something that is so long."""
    names: set[str] = set()
    for text, statement in failed(facts):
        names = names_in(
            statement.iter if isinstance(statement, ast.For) else statement
        )
        loop = loop_around(text, statement.lineno)
        if isinstance(loop, ast.For):
            names |= names_in(loop.iter)
    if batch.name.partition(".")[0] in names:
        return True
    lengths = {fact.shape[0] for fact in facts.frames.operands.values() if fact.shape}
    for name in names:
        fact = facts.frames.tensors.get(name)
        if fact is not None and fact.shape:
            lengths.add(fact.shape[0])
    return batch.value in lengths or 2 * batch.value in lengths  # two views of each


def _with_batch_size(facts: Facts, batch: BatchSize, value: int) -> Edit:
    """Return the edit that sets another batch size: where it stands in a text, else before the cell."""
    if batch.loader:
        return {"first": f"{batch.name}.batch_sampler.batch_size = {value}"}
    for text in facts.frames.texts:
        if text.cell != batch.cell:
            continue
        numbers = []
        for name, literal in ints_named(text.tree):
            if name == batch.name and literal.value == batch.value:
                numbers.append(literal)
        if numbers:
            return replace_numbers(text, numbers)(value)
    code = f"{batch.name} = {value}"
    owner, dot, _ = batch.name.partition(".")
    return prepare(facts, owner, code) if dot else {"first": code}


IMAGE = 3
"""How many dimensions one image has."""
CHANNELS = (1, 3, 4)
"""How long the first dimension of an image may be: no rows."""
_MADE_UP = ("randn", "rand", "ones", "zeros", "empty", "full")


def unnamed(facts: Facts) -> Iterator[Choice]:
    """Lower the number of rows where the cell has written it into each call that makes a tensor."""
    text = facts.frames.text
    if text is None or facts.notebook.batch_sizes or not facts.may_take_less:
        return
    if not facts.frames.trains and facts.frames.stage is not Stage.FORWARD:
        return
    rows = _rows_in_calls(text)
    at_work = _first_lengths(facts)
    times = Counter(row.number for row in rows if row.number in at_work)
    now = max(times, key=lambda number: (times[number], number), default=1)
    if now < 2:
        return
    rows = [row for row in rows if row.number == now]
    lines = sorted({row.literal.lineno for row in rows})
    if len(lines) > 1:
        where = f"lines {', '.join(map(str, lines))} make"
    else:
        where = f"line {lines[0]} makes"
    # Of data that the cell makes up nothing is lost by making less
    is_made_up = any(called_name(row.call) in _MADE_UP for row in rows)
    trains = facts.frames.trains
    yield numbered(
        "batch",
        now,
        "Lower the batch",
        replace_numbers(text, [row.literal for row in rows]),
        evidence=f"{where} tensors of {now} rows",
        cost="a different gradient" if trains else "fewer rows, or more passes by hand",
        changes_result=trains and not is_made_up,
        least=now // MOST_PARTS,
    )


class _RowsLiteral(NamedTuple):
    """The number of rows in a call that makes a tensor."""

    call: ast.Call
    number: int
    literal: ast.expr


def _rows_in_calls(text: CellText) -> list[_RowsLiteral]:
    """Return the number of rows in each call that makes a tensor: its first number, or the first of its shape."""
    rows: list[_RowsLiteral] = []
    for _, call in calls([text], *_MADE_UP, "randint"):
        shapes = [
            part.elts for part in call.args if isinstance(part, ast.Tuple | ast.List)
        ]
        if shapes:
            sizes = shapes[0]
        elif called_name(call) != "randint":
            sizes = call.args
        else:
            continue
        first = sizes[0].value if sizes and isinstance(sizes[0], ast.Constant) else None
        is_image = len(sizes) == IMAGE and first in CHANNELS
        if isinstance(first, int) and not is_image:
            rows.append(_RowsLiteral(call, first, sizes[0]))
    return rows


def _first_lengths(facts: Facts) -> set[int]:
    """Return the first dimensions of the tensors at work."""
    at_work = (*facts.frames.tensors.values(), *facts.frames.operands.values())
    return {fact.shape[0] for fact in at_work if fact.shape}


MOST_DOUBLINGS = 6
"""The data is divided into at most two to the power of so many parts."""


def accumulate(facts: Facts) -> Iterator[Choice]:
    """Train on parts of the data and let their gradients add up."""
    if facts.notebook.batch_sizes or not facts.frames.trains:
        return
    if facts.frames.stage not in (Stage.FORWARD, Stage.BACKWARD, Stage.OTHER):
        return
    region = find(facts)
    if region is None or region.backward is None:
        return
    names = _divisible(facts, region)
    computing, clearing = _separated(region)
    if not names or not _can_be_repeated(region, computing, names):
        return
    if not _in_parts(facts, region, names, 2, clearing):
        return
    made = set[str]().union(*map(bound_in, computing))
    rows = facts.frames.tensors[names[0]].shape[0]
    least = 2 if _has_batch_norm(facts) else 1  # which takes no single row
    most = 1 << min(MOST_DOUBLINGS, (rows // least).bit_length() - 1)

    def title(left: int) -> str:
        return f"Train on {2 * most >> left} parts of {', '.join(names)}, one after the other"

    def edit(left: int) -> Edit:
        changes = _in_parts(facts, region, names, 2 * most >> left, clearing)
        return {"text": region.text, "changes": changes}

    same = f"the same gradient{loops.uneven_layers_note(facts.notebook.models)}"
    yield numbered(
        "halvings to spare",
        most.bit_length(),
        title,
        edit,
        evidence=f"{names[0]} has {count(rows, 'row')}, all in one step",
        cost=f"{same}; {', '.join(sorted(made))} of the last part is left",
        guess=most.bit_length() - 1,
        is_rounded=False,
    )


def _separated(region: Region) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Return the statements of a region that compute, those in its blocks included, and those that clear gradients."""
    computing: list[ast.stmt] = []
    clearing: list[ast.stmt] = []
    for outer in region.through_backward:
        for statement in (
            outer.body if isinstance(outer, ast.With | ast.For) else [outer]
        ):
            call = statement.value if isinstance(statement, ast.Expr) else None
            if call is not None and called_name(call) == "zero_grad":
                clearing.append(statement)
            else:
                computing.append(statement)
    return computing, clearing


def _can_be_repeated(
    region: Region, computing: Sequence[ast.stmt], names: Sequence[str]
) -> bool:
    """Return whether statements of a region compute the same, run once for each part of the data of these names."""
    made: set[str] = set()
    for statement in computing:
        if not isinstance(statement, ast.Assign) and statement is not region.backward:
            return False  # a sum or a step would be made once for each part
        if any(_takes_some_rows(node, names) for node in ast.walk(statement)):
            return False
        made |= bound_in(statement)
    read = {use.id for use in read_tensors(region)}
    return not made & read - set(
        names
    )  # else a hidden state, from which the next part would go on


def _has_batch_norm(facts: Facts) -> bool:
    training = (model for model in facts.notebook.models if model.training)
    return any("batch norm" in model.uneven_layers for model in training)


def _takes_some_rows(node: ast.AST, names: Sequence[str]) -> bool:
    """Return whether code takes some of the rows of a tensor."""
    if (
        not isinstance(node, ast.Subscript)
        or getattr(node.value, "id", "") not in names
    ):
        return False
    first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
    return ast.unparse(first) not in (":", "...")


def _divisible(facts: Facts, region: Region) -> list[str]:
    """Return the tensors that the region reads and that have the data's length, the first one it reads first."""
    read = {}
    for use in read_tensors(region):
        if use.id in facts.frames.tensors:
            read[use.id] = facts.frames.tensors[use.id]
    length = next((fact.shape[0] for fact in read.values() if fact.shape), 0)
    if length < 2:
        return []
    calls_a_model = False
    for statement in region.forward:
        for call in called_models(facts, statement):
            calls_a_model = True
            for name in set[str]().union(*map(names_in, call.args)) & set(read):
                fact = read[name]
                if "int" in fact.dtype and fact.shape and fact.shape[0] != length:
                    return []  # the edges of a graph
    if not calls_a_model:
        return []
    data = [
        name for name, fact in read.items() if fact.shape and fact.shape[0] == length
    ]
    if any(read[name].requires_grad or read[name].has_graph for name in data):
        return []
    return data


def _in_parts(
    facts: Facts,
    region: Region,
    names: list[str],
    parts: int,
    clearing: Sequence[ast.stmt],
) -> list[Change]:
    """Return the changes that put the region into a loop over parts of these names, after what clears gradients."""
    text = region.text
    targets = ", ".join(f"{name}_part" for name in names)
    chunks = ", ".join(f"{name}.chunk({parts})" for name in names)
    source = f"zip({chunks})" if len(names) > 1 else chunks
    wrapped = text.wrap(
        region.through_backward, f"for {targets} in {source}:", removed=clearing
    )
    if not wrapped or not all(map(text.stands_alone, clearing)):
        return []
    assert region.backward is not None
    scaled = loss.divided(facts, text, region.backward, region.through_backward, parts)
    if scaled is None:
        return []
    changes: list[Change] = []
    for statement in clearing:
        changes += text.insert(region.forward[0], text.code(statement))
    changes += wrapped
    changes += map(text.remove, clearing)
    for use in read_tensors(region):
        if use.id in names:
            changes.append(text.append(use, "_part"))
    return [*changes, *scaled]


_DEPTH = re.compile(
    r"^((n|num|number)_?(of_)?((hidden|encoder|decoder)_)?(layers?|blocks)|depth)$",
    re.IGNORECASE,
)
LEAST_LENGTH = 16
"""Smaller numbers are seldom how many there are of something."""


def numbers(facts: Facts) -> Iterator[Choice]:
    """Lower a number written under a name: of layers where a model does not fit, else of what tensors are long."""
    fewer_layers = _fewer_layers(facts)
    if fewer_layers is not None:
        yield fewer_layers
        return
    text = facts.frames.text
    if (
        facts.event.memory is not Memory.DEVICE
        or facts.notebook.trainer
        or text is None
    ):
        return
    lengths = _lengths(facts)
    named = dict(ints_named(text.tree))
    for name, literal in named.items():
        now = literal.value
        if now < LEAST_LENGTH or now not in lengths or is_batch_name(name):
            continue
        # The same number without a name is most likely a bound of what is looked up there
        bounds = [
            node for node in _same_number(text, now) if node not in named.values()
        ]
        yield numbered(
            name,
            now,
            f"Lower {name}",
            replace_numbers(text, [literal, *bounds]),
            cost="another result",
            evidence=f"tensors at work are {now} long",
            changes_result=True,
            is_setting=not bounds,
            least=now // 8,
        )


def _fewer_layers(facts: Facts) -> Choice | None:
    """Return the choice of a model of fewer layers, where moving it failed."""
    nbytes = facts.frames.moved_nbytes
    if facts.frames.stage is not Stage.MOVE or not nbytes:
        return None
    for text in facts.frames.texts:
        for name, literal in ints_named(text.tree):
            if _DEPTH.match(name) and literal.value > 1:
                return numbered(
                    name,
                    literal.value,
                    f"Make the model smaller: {name}",
                    replace_numbers(text, [literal]),
                    evidence=f"its parameters take {size(nbytes)}",
                    is_rounded=False,
                    cost="a smaller model; training it takes its size again for gradients, and twice for Adam",
                )
    return None


def _lengths(facts: Facts) -> set[int]:
    """Return the lengths of the tensors at work, and the numbers of what was about to be made."""
    lengths = {
        number for number in facts.frames.numbers.values() if type(number) is int
    }
    for fact in (*facts.frames.tensors.values(), *facts.frames.operands.values()):
        lengths.update(fact.shape)
    return lengths


def _same_number(text: CellText, number: int) -> Iterator[ast.Constant]:
    for node in text.nodes():
        if (
            isinstance(node, ast.Constant)
            and type(node.value) is int
            and node.value == number
        ):
            yield node


VMAP = frozenset({"vmap_impl", "_flat_vmap"})
"""Functions of torch that map."""


def mapped(facts: Facts) -> Iterator[Choice]:
    """Have `vmap` map over some of the rows at a time."""
    if not facts.frames.functions & VMAP:
        return
    for text, call in calls(facts.frames.texts):
        made = call.func
        if not isinstance(made, ast.Call) or called_name(made) != "vmap":
            continue
        if keyword(made, "chunk_size") is not None:
            continue
        rows = _mapped_rows(facts, text, call, made)
        if rows > 1:
            yield _in_chunks(facts, text, made, rows)
            return


def _mapped_rows(facts: Facts, text: CellText, call: ast.Call, vmap: ast.Call) -> int:
    """Return over how many rows a call of what `vmap` returned maps; 0 where that is not known."""
    arguments = list(call.args)
    in_dims = keyword(vmap, "in_dims")
    if (
        in_dims is not None
        and isinstance(in_dims.value, ast.Tuple)
        and in_dims.value.elts
    ):
        pairs = zip(call.args, in_dims.value.elts, strict=False)
        arguments = [argument for argument, dim in pairs if text.code(dim) == "0"]
    for argument in arguments:
        fact = facts.frames.tensors.get(text.code(argument))
        if fact is not None:
            return fact.shape[0]
    return 0


def _in_chunks(facts: Facts, text: CellText, vmap: ast.Call, rows: int) -> Choice:
    statement = text.statement_at(vmap.lineno)
    without_graph: Sequence[Change] = ()
    if statement is not None and not facts.frames.trains:
        # What vmap differentiates has graphs of its own
        without_graph = text.wrap([statement], "with torch.no_grad():")

    def edit(number: int) -> Edit:
        argument = text.add_argument(vmap, f"chunk_size={number}")
        return {"text": text, "changes": [argument, *without_graph]}

    return numbered(
        "chunk_size",
        rows,
        lambda number: f"Map over {count(number, 'row')} at a time",
        edit,
        evidence=f"vmap has all {count(rows, 'row')} in memory at once",
        cost="a little time"
        + ("; its results have no autograd graph" if without_graph else ""),
    )
