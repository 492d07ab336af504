"""Less at a time: a smaller batch, part of the data, a smaller number of something else."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import loops
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import (
    Choice,
    Region,
    bound_in,
    called_models,
    calls,
    failed,
    find,
    loop_around,
    prepare,
    propose,
    read_tensors,
)
from gpumagic.report.units import count, size
from gpumagic.source.cell_code import BatchSize, ints_named, is_batch_name
from gpumagic.source.text import CellText, Change, called_name, keyword, names_in

MOST_PARTS = 64
"""Nobody wants a batch that is a smaller part of the one that there was."""


def smaller(facts: Facts) -> Iterator[Choice]:
    """Lower the batch the cell works with."""
    if not facts.batches or not facts.may_take_less or (facts.trainer and facts.trainer.library == "transformers"):
        return  # of a trainer of transformers `loops.batch` knows what else its arguments say
    found = facts.batches[0]
    if facts.stage not in ("forward", "backward") and not _goes_with(facts, found):
        return

    def edit(value: int, steps: int) -> dict[str, Any]:
        size = _edit(facts, found, value)
        if steps == 1:
            return size
        passes = loops.accumulating(facts, found, steps)
        first = "\n".join(each["first"] for each in (size, passes) if "first" in each)
        text, changes = passes.get("text") or size.get("text"), (*size.get("changes", ()), *passes.get("changes", ()))
        return {"text": text, "changes": changes, "first": first or None} if passes else {}

    yield loops.lowered(
        facts, found.name, found.value, f"{found.name}'s batch_size" if found.loader else found.name, _evidence(found),
        edit, is_setting=not found.loader and not found.cell, least=found.value // MOST_PARTS,
    )  # fmt: skip


def _goes_with(facts: Facts, found: BatchSize) -> bool:
    """Return whether the line that failed, or its loop, names a batch size or something that is so long."""
    names: set[str] = set()
    for text, statement in failed(facts):
        loop = loop_around(text, statement.lineno)
        names = names_in(statement.iter if isinstance(statement, ast.For) else statement)
        names |= names_in(loop.iter) if isinstance(loop, ast.For) else set()
    at_work = [*(facts.tensors.get(name) for name in names), *facts.operands.values()]
    lengths = {fact.shape[0] for fact in at_work if fact is not None and fact.shape}
    return found.name.partition(".")[0] in names or bool(lengths & {found.value, 2 * found.value})  # two views of each


IMAGE, CHANNELS = 3, (1, 3, 4)
"""How many dimensions one image has, and how long its first may be: no rows."""
_MADE_UP = ("randn", "rand", "ones", "zeros", "empty", "full")
_MAKERS = (*_MADE_UP, "randint")


def unnamed(facts: Facts) -> Iterator[Choice]:
    """Lower the number of rows where the cell has written it into each call that makes a tensor."""
    text = facts.cell.text if facts.cell is not None else None
    if facts.batches or text is None or not facts.may_take_less:
        return
    if not facts.trains and facts.stage != "forward":
        return  # no model's batch
    at_work = {each.shape[0] for each in (*facts.tensors.values(), *facts.operands.values()) if each.shape}
    written = [(rows, literal) for node in text.nodes() for rows, literal in _rows(node) if rows in at_work]
    times = Counter(rows for rows, _ in written)
    now = max(times, key=lambda rows: (times[rows], rows), default=1)
    if now < 2:
        return
    literals = [literal for rows, literal in written if rows == now]
    makes_up = any(rows == now and called_name(node) in _MADE_UP for node in text.nodes() for rows, _ in _rows(node))
    lines = sorted({each.lineno for each in literals})
    where = f"lines {', '.join(map(str, lines))} make" if lines[1:] else f"line {lines[0]} makes"

    told = {
        "evidence": f"{where} tensors of {now} rows",
        "cost": "a different gradient" if facts.trains else "fewer rows, or more passes by hand",
    }
    make = functools.partial(_written, text, literals, f"Lower the batch from {now}", told)
    # Of data that the cell makes up nothing is lost by making less.
    is_other = facts.trains and not makes_up
    yield Choice("batch", now, make, now // 2, changes_result=is_other, least=now // MOST_PARTS)


def _written(text: CellText, literals: Sequence[ast.expr], title: str, told: dict[str, Any], value: int) -> Advice:
    """Return the suggestion to write another number in the place of some that are there."""
    changes = [text.replace(each, str(value)) for each in literals]
    return propose(f"{title} to {value}", text=text, changes=changes, **told)


def _rows(node: ast.AST) -> Iterator[tuple[int, ast.expr]]:
    """Yield the number of rows in a call that makes a tensor: its first number, or the first of its shape."""
    if isinstance(node, ast.Call) and called_name(node) in _MAKERS:
        shapes = [each.elts for each in node.args if isinstance(each, ast.Tuple | ast.List)]
        sizes = shapes[0] if shapes else node.args if called_name(node) != "randint" else []
        first = sizes[0].value if sizes and isinstance(sizes[0], ast.Constant) else None
        is_image = len(sizes) == IMAGE and first in CHANNELS
        if isinstance(first, int) and not is_image:
            yield first, sizes[0]


def _edit(facts: Facts, found: BatchSize, value: int) -> dict[str, Any]:
    if found.loader:
        return {"first": f"{found.name}.batch_sampler.batch_size = {value}"}
    for text in facts.texts:
        written = [
            number for name, number in ints_named(text.tree) if name == found.name and number.value == found.value
        ]
        changes = [text.replace(number, str(value)) for number in written] if text.cell == found.cell else []
        if changes:
            return {"text": text, "changes": changes}
    owner, dot, _ = found.name.partition(".")
    code = f"{found.name} = {value}"
    return prepare(facts, owner, code) if dot else {"first": code}


def _evidence(found: BatchSize) -> str:
    if found.loader:
        return f"{found.name} is a DataLoader of batches of {found.value}"
    if found.line is not None:
        where = f"line {found.line}" + (f" of {found.cell}" if found.cell else "")
        return f"{where} says {found.name}={found.value}"
    return f"the cell uses {found.name}, which is {found.value}"


MOST_DOUBLINGS = 6
"""The data is divided into at most two to the power of so many parts."""


def accumulate(facts: Facts) -> Iterator[Choice]:
    """Train on parts of the data and let their gradients add up."""
    if facts.batches or not facts.trains or facts.stage not in ("forward", "backward", "other"):
        return
    region = find(facts)
    if region is None or region.backward is None:
        return
    statements = [
        part
        for each in region.through_backward
        for part in (each.body if isinstance(each, ast.With | ast.For) else [each])
    ]
    cleared = [each for each in statements if isinstance(each, ast.Expr) and called_name(each.value) == "zero_grad"]
    rest = [each for each in statements if each not in cleared]
    if not all(isinstance(each, ast.Assign) or each is region.backward for each in rest):
        return  # a sum or a step in between would be made once for each part
    if any(_mixes_rows(node) for each in rest for node in ast.walk(each)):
        return
    names, made = _divisible(facts, region), set[str]().union(*map(bound_in, rest))
    if not names or made & {each.id for each in read_tensors(region)} - set(names):
        return  # a hidden state, from which the next part would go on
    if any(_counts_rows(node, names) for each in rest for node in ast.walk(each)) or not _loop(
        facts, region, names, 2, cleared
    ):
        return
    rows = facts.tensors[names[0]].shape[0]
    doublings = min(MOST_DOUBLINGS, rows.bit_length() - 1)

    def divided(left: int) -> Advice:
        parts = 1 << (doublings + 1 - left)
        return propose(
            f"Train on {parts} parts of {', '.join(names)}, one after the other", text=region.text,
            changes=_loop(facts, region, names, parts, cleared),
            evidence=f"{names[0]} has {count(rows, 'row')}, all in one step",
            cost=f"the same gradient{loops.but(facts.models)}; {', '.join(sorted(made))} of the last part is left",
        )  # fmt: skip

    yield Choice("halvings to spare", doublings + 1, divided, doublings, is_rounded=False)


def _mixes_rows(node: ast.AST) -> bool:
    """Return whether an operation may compare rows with one another, so that parts of the data have another loss."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if isinstance(node, ast.Attribute):
        return node.attr in ("T", "mT")
    return called_name(node) in ("t", "transpose", "matmul", "mm", "bmm", "einsum", "cdist", "zero_grad", "step")


def _counts_rows(node: ast.AST, names: Sequence[str]) -> bool:
    """Return whether code takes some of the rows of a tensor, or asks how many there are."""
    if isinstance(node, ast.Subscript):
        first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
        return getattr(node.value, "id", "") in names and ast.unparse(first) not in (":", "...")
    if isinstance(node, ast.Attribute):
        return node.attr in ("shape", "size", "numel") and getattr(node.value, "id", "") in names
    return called_name(node) == "len" and bool(names_in(node) & set(names))


def _divisible(facts: Facts, region: Region) -> list[str]:
    """Return the tensors that the region reads and that have the data's length, the first one it reads first."""
    called = [call for each in region.forward for call in called_models(facts, each)]
    found = {node.id: facts.tensors[node.id] for node in read_tensors(region) if node.id in facts.tensors}
    length = next((fact.shape[0] for fact in found.values() if fact.shape), 0)
    data = {name: fact for name, fact in found.items() if fact.shape and fact.shape[0] == length}
    given = [found[name] for call in called for each in call.args for name in names_in(each) if name in found]
    has_edges = any("int" in fact.dtype and fact.shape and fact.shape[0] != length for fact in given)  # of a graph
    if not called or has_edges or length < 2 or any(fact.requires_grad or fact.graph for fact in data.values()):
        return []
    return list(data)


def _loop(facts: Facts, region: Region, names: list[str], parts: int, cleared: Sequence[ast.stmt]) -> list[Change]:
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


_DEPTH = re.compile(r"^((n|num|number)_?(of_)?((hidden|encoder|decoder)_)?(layers?|blocks)|depth)$", re.IGNORECASE)
LEAST_LENGTH = 16
"""Smaller numbers are seldom how many there are of something."""


def numbers(facts: Facts) -> Iterator[Choice]:
    """Lower a number written under a name: of layers where a model does not fit, else of what tensors are long."""
    told = {"evidence": f"its parameters take {size(facts.moving)}",
            "cost": "a smaller model; training it takes its size again for gradients, and twice for Adam"}  # fmt: skip
    moving = facts.texts if facts.stage == "move" and facts.moving else ()
    for text, name, literal in ((each, *named) for each in moving for named in ints_named(each.tree)):
        if _DEPTH.match(name) and literal.value > 1:
            title = f"Make the model smaller: {name} from {literal.value}"
            make = functools.partial(_written, text, [literal], title, told)
            yield Choice(name, literal.value, make, literal.value // 2, is_rounded=False)
            return
    if facts.memory != "device" or facts.trainer is not None or facts.text is None:
        return
    lengths = {length for each in (*facts.tensors.values(), *facts.operands.values()) for length in each.shape}
    lengths |= {each for each in facts.numbers.values() if type(each) is int}  # of what was about to be made
    for name, literal in dict(ints_named(facts.text.tree)).items():
        now = literal.value
        if now >= LEAST_LENGTH and now in lengths and not is_batch_name(name):
            told = {"evidence": f"tensors at work are {now} long", "cost": "another result"}
            make = functools.partial(_written, facts.text, [literal], f"Lower {name} from {now}", told)
            yield Choice(name, now, make, now // 2, changes_result=True, is_setting=True, least=now // 8)


VMAP = frozenset({"vmap_impl", "_flat_vmap"})
"""Functions of torch that map."""


def mapped(facts: Facts) -> Iterator[Choice]:
    """Have `vmap` map over some of the rows at a time."""
    for text, call in calls(facts.texts) if facts.functions & VMAP else ():
        made = call.func
        if not isinstance(made, ast.Call) or called_name(made) != "vmap" or keyword(made, "chunk_size") is not None:
            continue
        in_dims = keyword(made, "in_dims")
        dims = in_dims.value.elts if in_dims is not None and isinstance(in_dims.value, ast.Tuple) else []
        told = [each for each, dim in zip(call.args, dims, strict=False) if text.code(dim) == "0"]
        names = [text.code(each) for each in (told if dims else call.args)]
        rows = next((facts.tensors[name].shape[0] for name in names if name in facts.tensors), 0)
        if rows > 1:
            yield Choice("chunk_size", rows, functools.partial(_in_chunks, facts, text, made, rows), rows // 2)
            return


def _in_chunks(facts: Facts, text: CellText, call: ast.Call, rows: int, number: int) -> Advice:
    changes = [text.add_argument(call, f"chunk_size={number}")]
    statement = text.statement_at(call.lineno)
    if statement is not None and not facts.trains:
        changes += text.wrap([statement], "with torch.no_grad():")  # what vmap differentiates has graphs of its own
    return propose(
        f"Map over {count(number, 'row')} at a time", text=text, changes=changes,
        cost="a little time" + ("; its results have no autograd graph" if changes[1:] else ""),
        evidence=f"vmap has all {count(rows, 'row')} in memory at once",
    )  # fmt: skip
