"""What loops and functions add to variables with each pass or call: ``total += x``, ``found.append(x)``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumagic.advice.facts import Facts
from gpumagic.advice.rules.patterns import match_pattern
from gpumagic.advice.rules.regions import bound_in, calls_model
from gpumagic.source.text import CellText, called_name, names_in

NOT_ON_DEVICE = frozenset({
    "cpu", "item", "numpy", "tolist", "list", "int", "float", "str", "len", "range", "checkpoint",
})  # fmt: skip
"""Functions and methods whose result is no tensor on the device."""
_APPENDING = ("append", "appendleft")
_FIGURES = ("shape", "dtype", "device")
"""Attributes of a tensor that take no memory on the device."""


@dataclass(frozen=True, slots=True)
class Addition:
    """Code that adds values to a variable with each pass of a loop, or each call of a function."""

    text: CellText
    target: str
    """The variable, or where it is: ``history["loss"]``."""
    values: Sequence[ast.expr]


def additions(facts: Facts) -> Iterator[Addition]:
    """Yield what loops add to variables: ``total += x``, ``found.append(x)``, ``found[i] = x``, ``seen.push(x, y)``.

    A function that adds to what outlives its call does the same. Of a record, the values are its tensors on the device.
    """
    for text in facts.frames.texts:
        blocks = innermost_blocks(text)
        alone = {node.value for node in text.nodes() if isinstance(node, ast.Expr)}
        for node in text.nodes():
            if isinstance(node, ast.Call) and node not in alone:
                continue  # what returns something does not only keep
            added = _added(node)
            if added is None or not _is_repeated(node, added, blocks.get(node)):
                continue
            target = text.code(added.owner)
            values = _values_on_device(facts, text, target, node, added)
            is_known = (
                target in facts.frames.collections or target in facts.frames.tensors
            )
            if values and (is_known or isinstance(added.owner, ast.Name)):
                yield Addition(text, target, values)


def innermost_blocks(text: CellText) -> dict[ast.AST, ast.stmt]:
    """Return the innermost loop or function that each node of a text is in."""
    innermost = dict[ast.AST, ast.stmt]()
    for block in text.nodes():  # outer ones first
        if isinstance(block, ast.For | ast.While | ast.FunctionDef):
            innermost |= dict.fromkeys(ast.walk(block), block)
    return innermost


def root(place: str) -> str:
    """Return the variable: ``history`` of ``history["loss"]``."""
    return re.split(r"\W", place, maxsplit=1)[0]


@dataclass(frozen=True, slots=True)
class _Added:
    """What a statement adds, and to what."""

    owner: ast.expr
    values: Sequence[ast.expr]


def _added(node: ast.AST) -> _Added | None:
    """Return what a statement adds to something, or a call may; None where it is of another kind."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            return _Added(target, [value])
        case ast.Assign(targets=[ast.Subscript(value=owner), *_], value=value):
            return _Added(owner, [value])
        case ast.Assign(targets=[target, *_], value=ast.ListComp(elt=element)):
            return _Added(target, [element])
        case ast.Assign(targets=[target, *_], value=value):
            return _lengthened(target, value)
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Attribute(owner, "setdefault")))
        ):
            return _Added(owner, node.args)
        case ast.Call(func=ast.Attribute(value=owner)):
            return _Added(owner, node.args)
    return None


_SUM = "WHOLE + PART"


def _lengthened(target: ast.expr, value: ast.expr) -> _Added | None:
    """Return what an assignment adds to its own target: ``total = total + x``, ``feats = torch.cat([feats, x])``."""
    for pattern in (_SUM, "cat([WHOLE, PART])", "cat([WHOLE, PART], DIM)"):
        operands = match_pattern(pattern, value)
        if operands is None:
            continue
        whole = operands["WHOLE"]
        part = operands["PART"]
        if ast.unparse(whole) == ast.unparse(target):
            return _Added(target, [part] if pattern == _SUM else [whole, part])
    return None


def _is_repeated(node: ast.AST, added: _Added, block: ast.stmt | None) -> bool:
    """Return whether a statement adds more than once to the same: in a loop, or in a function to what outlives it."""
    if isinstance(block, ast.FunctionDef):
        variable = root(ast.unparse(added.owner))
        return variable not in bound_in(block)
    match node:
        case ast.Assign(value=ast.ListComp()) | ast.AugAssign(value=ast.ListComp()):
            return True
    return block is not None


def _values_on_device(
    facts: Facts, text: CellText, target: str, node: ast.AST, added: _Added
) -> Sequence[ast.expr]:
    """Return those of the values added that may be tensors on the device; of records, their tensors."""
    total = facts.frames.tensors.get(target)
    if total is not None and total.shape:
        match node:
            case ast.Assign(value=ast.BinOp()):
                return []  # what comes out of a layer, rather than a sum
    collection = facts.frames.collections.get(target)
    if collection is not None and (collection.place or collection.is_of_records):
        parts = list[ast.expr]()
        for value in added.values:
            parts += _parts_of_record(value)
        return [part for part in parts if _is_on_device(facts, text, part)]
    if isinstance(node, ast.Call) and called_name(node) not in _APPENDING:
        return []
    return added.values


def _parts_of_record(value: ast.expr) -> list[ast.expr]:
    """Return what a record is made of: ``(x, y)``, ``Record(x, y)``, ``{"x": x}``."""
    match value:
        case ast.Tuple(elts=parts) | ast.Dict(values=parts):
            return parts
        case ast.DictComp(value=part):
            return [part]
        case ast.Call(args=arguments, keywords=keywords):
            return [*arguments, *(keyword.value for keyword in keywords)]
    return [value]


def _is_on_device(facts: Facts, text: CellText, part: ast.expr) -> bool:
    """Return whether a part of a record is a tensor on the device, or made of one."""
    tensor = facts.frames.tensors.get(text.code(part))
    if tensor is not None:
        return tensor.device == facts.event.device
    match part:
        case ast.Attribute(attr=name) if name in _FIGURES:
            is_made = False
        case ast.Call() | ast.BinOp() | ast.Attribute():
            is_made = called_name(part) not in {*NOT_ON_DEVICE, "detach"}
        case _:
            is_made = False
    if not is_made:
        return False
    for node in text.nodes():
        if isinstance(node, ast.DictComp) and node.value is part:
            return True  # its own variable is not among those of the cell
    return _reads_device(facts, part) or calls_model(facts, part)


def _reads_device(facts: Facts, node: ast.expr) -> bool:
    """Return whether code reads a tensor on the device that failed."""
    tensors = facts.frames.tensors
    known = [tensors[name] for name in names_in(node) if name in tensors]
    return any(tensor.device == facts.event.device for tensor in known)
