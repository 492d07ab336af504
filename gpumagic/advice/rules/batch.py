"""Less at a time: a smaller batch, part of the data, a smaller number of something else."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from gpumagic.advice.facts import Facts, Memory, Stage
from gpumagic.advice.rules import loops
from gpumagic.advice.rules.proposal import (
    Choice,
    Edit,
    Region,
    bound_in,
    called_models,
    calls,
    failed,
    find,
    loop_around,
    numbered,
    prepare,
    read_tensors,
    together,
    written,
)
from gpumagic.report.units import count, size
from gpumagic.source.cell_code import BatchSize, ints_named, is_batch_name
from gpumagic.source.text import CellText, Change, called_name, keyword, names_in

MOST_PARTS = 64
"""Nobody wants a batch that is a smaller part of the one that there was."""


def smaller(facts: Facts) -> Iterator[Choice]:
    """Lower the batch the cell works with."""
    if (
        not facts.notebook.batch_sizes
        or not facts.may_take_less
        or (facts.notebook.trainer and facts.notebook.trainer.library == "transformers")
    ):
        return  # of a trainer of transformers `loops.batch` knows what else its arguments say
    found = facts.notebook.batch_sizes[0]
    if (
        facts.frames.stage not in (Stage.FORWARD, Stage.BACKWARD)
        and not facts.frames.trains
        and not _goes_with(facts, found)
    ):
        return
    where = f"line {found.line}{f' of {found.cell}' if found.cell else ''}"
    said = (
        f"the cell uses {found.name}, which is "
        if found.line is None
        else f"{where} says {found.name}="
    )
    said = f"{found.name} is a DataLoader of batches of " if found.loader else said

    def edit(value: int, steps: int) -> Edit:
        lower, passes = (
            _edit(facts, found, value),
            loops.accumulating(facts, found, steps) if steps > 1 else {},
        )
        return together(lower, passes) if passes or steps == 1 else {}

    yield loops.lowered(
        facts,
        found.name,
        found.value,
        f"{found.name}'s batch_size" if found.loader else found.name,
        f"{said}{found.value}",
        edit,
        is_setting=not found.loader and not found.cell,
        least=found.value // MOST_PARTS,
    )


def _goes_with(facts: Facts, found: BatchSize) -> bool:
    """Return whether the line that failed, or its loop, names a batch size or something that is so long."""
    names: set[str] = set()
    for text, statement in failed(facts):
        loop = loop_around(text, statement.lineno)
        names = names_in(statement.iter if isinstance(statement, ast.For) else statement)
        names |= names_in(loop.iter) if isinstance(loop, ast.For) else set()
    at_work = [*(facts.frames.tensors.get(name) for name in names), *facts.frames.operands.values()]
    lengths = {fact.shape[0] for fact in at_work if fact is not None and fact.shape}
    return found.name.partition(".")[0] in names or bool(
        lengths & {found.value, 2 * found.value}
    )  # two views of each


def _edit(facts: Facts, found: BatchSize, value: int) -> Edit:
    if found.loader:
        return {"first": f"{found.name}.batch_sampler.batch_size = {value}"}
    for text in (each for each in facts.frames.texts if each.cell == found.cell):
        numbers = [
            each
            for name, each in ints_named(text.tree)
            if (name, each.value) == (found.name, found.value)
        ]
        if numbers:
            return written(text, numbers)(value)
    code = f"{found.name} = {value}"
    owner, dot, _ = found.name.partition(".")
    return prepare(facts, owner, code) if dot else {"first": code}


IMAGE, CHANNELS = 3, (1, 3, 4)
"""How many dimensions one image has, and how long its first may be: no rows."""
_MADE_UP = ("randn", "rand", "ones", "zeros", "empty", "full")


def unnamed(facts: Facts) -> Iterator[Choice]:
    """Lower the number of rows where the cell has written it into each call that makes a tensor."""
    text = facts.frames.text
    if (
        facts.notebook.batch_sizes
        or text is None
        or not facts.may_take_less
        or not (facts.frames.trains or facts.frames.stage is Stage.FORWARD)
    ):
        return
    at_work = {
        each.shape[0]
        for each in (*facts.frames.tensors.values(), *facts.frames.operands.values())
        if each.shape
    }
    found = [
        (call, *each) for _, call in calls([text], *_MADE_UP, "randint") for each in _rows(call)
    ]
    times = Counter(rows for _, rows, _ in found if rows in at_work)
    now = max(times, key=lambda rows: (times[rows], rows), default=1)
    if now < 2:
        return
    literals = [literal for _, rows, literal in found if rows == now]
    lines = sorted({each.lineno for each in literals})
    where = f"lines {', '.join(map(str, lines))} make" if lines[1:] else f"line {lines[0]} makes"
    makes_up = any(rows == now and called_name(call) in _MADE_UP for call, rows, _ in found)
    yield numbered(
        "batch",
        now,
        "Lower the batch",
        written(text, literals),
        evidence=f"{where} tensors of {now} rows",
        cost="a different gradient"
        if facts.frames.trains
        else "fewer rows, or more passes by hand",
        changes_result=facts.frames.trains
        and not makes_up,  # of data that the cell makes up nothing is lost by making less
        least=now // MOST_PARTS,
    )


def _rows(call: ast.Call) -> Iterator[tuple[int, ast.expr]]:
    """Yield the number of rows in a call that makes a tensor: its first number, or the first of its shape."""
    shapes = [each.elts for each in call.args if isinstance(each, ast.Tuple | ast.List)]
    sizes = shapes[0] if shapes else call.args if called_name(call) != "randint" else []
    first = sizes[0].value if sizes and isinstance(sizes[0], ast.Constant) else None
    is_image = len(sizes) == IMAGE and first in CHANNELS
    if isinstance(first, int) and not is_image:
        yield first, sizes[0]


MOST_DOUBLINGS = 6
"""The data is divided into at most two to the power of so many parts."""


def accumulate(facts: Facts) -> Iterator[Choice]:
    """Train on parts of the data and let their gradients add up."""
    if (
        facts.notebook.batch_sizes
        or not facts.frames.trains
        or facts.frames.stage not in (Stage.FORWARD, Stage.BACKWARD, Stage.OTHER)
    ):
        return
    region = find(facts)
    if region is None or region.backward is None:
        return
    statements = [
        part
        for each in region.through_backward
        for part in (each.body if isinstance(each, ast.With | ast.For) else [each])
    ]
    cleared = [
        each
        for each in statements
        if isinstance(each, ast.Expr) and called_name(each.value) == "zero_grad"
    ]
    rest = [each for each in statements if each not in cleared]
    if not all(isinstance(each, ast.Assign) or each is region.backward for each in rest):
        return  # a sum or a step in between would be made once for each part
    names, made = _divisible(facts, region), set[str]().union(*map(bound_in, rest))
    if not names or made & {each.id for each in read_tensors(region)} - set(names):
        return  # a hidden state, from which the next part would go on
    is_whole = not any(_is_of_some(node, names) for each in rest for node in ast.walk(each))
    if not is_whole or not _loop(facts, region, names, 2, cleared):
        return
    rows = facts.frames.tensors[names[0]].shape[0]
    # Batch norm takes no single row
    least = 1 + any(
        "batch norm" in each.uneven_layers for each in facts.notebook.models if each.training
    )
    most = 1 << min(MOST_DOUBLINGS, (rows // least).bit_length() - 1)
    yield numbered(
        "halvings to spare",
        most.bit_length(),
        lambda left: (
            f"Train on {2 * most >> left} parts of {', '.join(names)}, one after the other"
        ),
        lambda left: {
            "text": region.text,
            "changes": _loop(facts, region, names, 2 * most >> left, cleared),
        },
        evidence=f"{names[0]} has {count(rows, 'row')}, all in one step",
        cost=f"the same gradient{loops.but(facts.notebook.models)}; {', '.join(sorted(made))} of the last part is left",
        guess=most.bit_length() - 1,
        is_rounded=False,
    )


def _is_of_some(node: ast.AST, names: Sequence[str]) -> bool:
    """Return whether code takes some of the rows of a tensor."""
    if not isinstance(node, ast.Subscript) or getattr(node.value, "id", "") not in names:
        return False
    first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
    return ast.unparse(first) not in (":", "...")


def _divisible(facts: Facts, region: Region) -> list[str]:
    """Return the tensors that the region reads and that have the data's length, the first one it reads first."""
    called = [call for each in region.forward for call in called_models(facts, each)]
    found = {
        node.id: facts.frames.tensors[node.id]
        for node in read_tensors(region)
        if node.id in facts.frames.tensors
    }
    length = next((fact.shape[0] for fact in found.values() if fact.shape), 0)
    data = {name: fact for name, fact in found.items() if fact.shape and fact.shape[0] == length}
    given = [
        found[name]
        for call in called
        for each in call.args
        for name in names_in(each)
        if name in found
    ]
    has_edges = any(
        "int" in fact.dtype and fact.shape and fact.shape[0] != length for fact in given
    )  # of a graph
    if (
        not called
        or has_edges
        or length < 2
        or any(fact.requires_grad or fact.has_graph for fact in data.values())
    ):
        return []
    return list(data)


def _loop(
    facts: Facts, region: Region, names: list[str], parts: int, cleared: Sequence[ast.stmt]
) -> list[Change]:
    """Return the changes that put the region into a loop over parts of these names, after what clears gradients."""
    text = region.text
    targets = ", ".join(f"{name}_part" for name in names)
    chunks = ", ".join(f"{name}.chunk({parts})" for name in names)
    source = f"zip({chunks})" if len(names) > 1 else chunks
    wrapped = text.wrap(region.through_backward, f"for {targets} in {source}:", removed=cleared)
    if not wrapped or not all(map(text.stands_alone, cleared)):
        return []
    before = [new for each in cleared for new in text.insert(region.forward[0], text.code(each))]
    used = [text.append(node, "_part") for node in read_tensors(region) if node.id in names]
    assert region.backward is not None
    scaled = loops.divided(facts, text, region.backward, region.through_backward, parts)
    if scaled is None:
        return []
    return [*before, *wrapped, *map(text.remove, cleared), *used, *scaled]


_DEPTH = re.compile(
    r"^((n|num|number)_?(of_)?((hidden|encoder|decoder)_)?(layers?|blocks)|depth)$", re.IGNORECASE
)
LEAST_LENGTH = 16
"""Smaller numbers are seldom how many there are of something."""


def numbers(facts: Facts) -> Iterator[Choice]:
    """Lower a number written under a name: of layers where a model does not fit, else of what tensors are long."""
    moving = (
        facts.frames.texts if facts.frames.stage is Stage.MOVE and facts.frames.moved_nbytes else ()
    )
    for text, name, literal in (
        (each, *named) for each in moving for named in ints_named(each.tree)
    ):
        if _DEPTH.match(name) and literal.value > 1:
            yield numbered(
                name,
                literal.value,
                f"Make the model smaller: {name}",
                written(text, [literal]),
                evidence=f"its parameters take {size(facts.frames.moved_nbytes)}",
                is_rounded=False,
                cost="a smaller model; training it takes its size again for gradients, and twice for Adam",
            )
            return
    if (
        facts.event.memory is not Memory.DEVICE
        or facts.notebook.trainer is not None
        or facts.frames.text is None
    ):
        return
    lengths = {
        length
        for each in (*facts.frames.tensors.values(), *facts.frames.operands.values())
        for length in each.shape
    }
    lengths |= {
        each for each in facts.frames.numbers.values() if type(each) is int
    }  # of what was about to be made
    named = dict(ints_named(facts.frames.text.tree))
    for name, literal in named.items():
        now = literal.value
        if now >= LEAST_LENGTH and now in lengths and not is_batch_name(name):
            # The same number without a name is most likely a bound of what is looked up there
            unnamed = [
                each
                for each in facts.frames.text.nodes()
                if isinstance(each, ast.Constant)
                and each.value == now
                and type(each.value) is int
                and each not in named.values()
            ]
            yield numbered(
                name,
                now,
                f"Lower {name}",
                written(facts.frames.text, [literal, *unnamed]),
                cost="another result",
                evidence=f"tensors at work are {now} long",
                changes_result=True,
                is_setting=not unnamed,
                least=now // 8,
            )


VMAP = frozenset({"vmap_impl", "_flat_vmap"})
"""Functions of torch that map."""


def mapped(facts: Facts) -> Iterator[Choice]:
    """Have `vmap` map over some of the rows at a time."""
    for text, call in calls(facts.frames.texts) if facts.frames.functions & VMAP else ():
        made = call.func
        if (
            not isinstance(made, ast.Call)
            or called_name(made) != "vmap"
            or keyword(made, "chunk_size") is not None
        ):
            continue
        in_dims = keyword(made, "in_dims")
        dims = (
            in_dims.value.elts
            if in_dims is not None and isinstance(in_dims.value, ast.Tuple)
            else []
        )
        told = [each for each, dim in zip(call.args, dims, strict=False) if text.code(dim) == "0"]
        names = [text.code(each) for each in (told if dims else call.args)]
        rows = next(
            (facts.frames.tensors[name].shape[0] for name in names if name in facts.frames.tensors),
            0,
        )
        if rows > 1:
            yield _in_chunks(facts, text, made, rows)
            return


def _in_chunks(facts: Facts, text: CellText, call: ast.Call, rows: int) -> Choice:
    statement = text.statement_at(call.lineno)
    # What vmap differentiates has graphs of its own
    without = (
        text.wrap([statement], "with torch.no_grad():")
        if statement is not None and not facts.frames.trains
        else ()
    )
    return numbered(
        "chunk_size",
        rows,
        lambda number: f"Map over {count(number, 'row')} at a time",
        lambda number: {
            "text": text,
            "changes": [text.add_argument(call, f"chunk_size={number}"), *without],
        },
        evidence=f"vmap has all {count(rows, 'row')} in memory at once",
        cost=f"a little time{'; its results have no autograd graph' if without else ''}",
    )
