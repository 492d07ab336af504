"""What a loop collects on the device without need: autograd graphs, results, a tensor that `cat` makes longer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.patterns import match
from gpumagic.oom.rules.proposal import LEAST, bracketed, loop_around, propose
from gpumagic.report.units import count, size
from gpumagic.source.text import CellText, called_name


def graphs(facts: Facts) -> Iterator[Advice]:
    """Add up numbers, not tensors that drag their graphs along."""
    for text, target, value in _additions(facts):
        held, total = facts.work.collections.get(target), facts.work.tensors.get(target)
        if held is not None and held.graphs:
            is_number = held.is_of_numbers
            evidence = f"{target} holds {count(held.graphs, 'tensor')} with a graph, one more in every pass"
        elif total is not None and total.graph:
            is_number = not total.shape
            evidence = f"{target} has a graph that grows in every pass of the loop"
        else:
            continue
        yield propose(
            f"Collect {text.code(value)} without its autograd graph", text=text,
            changes=[text.replace(value, f"{bracketed(text, value)}.{'item' if is_number else 'detach'}()")],
            evidence=evidence, cost="a sync in each pass, for the number" if is_number else "none",
        )  # fmt: skip


def results(facts: Facts) -> Iterator[Advice]:
    """Collect results in the host's memory."""
    for text, target, value in _additions(facts):
        held = facts.work.collections.get(target)
        if held is not None and not held.graphs and held.nbytes >= LEAST:
            yield propose(
                f"Collect {target} in the host's memory", frees=held.nbytes, text=text,
                changes=[text.replace(value, f"{bracketed(text, value)}.cpu()")],
                evidence=f"{target} holds {count(held.tensors, 'tensor')} with {size(held.nbytes)}, one more with "
                "every pass", cost=f"a copy in each pass; what uses {target} finds it on the CPU",
            )  # fmt: skip
            return


def _additions(facts: Facts) -> Iterator[tuple[CellText, str, ast.expr]]:
    """Yield what a loop adds to a variable: ``total += x``, ``found.append(x)``, ``found[i] = x``."""
    for text in facts.texts:
        loops = [node for node in text.nodes() if isinstance(node, ast.For | ast.While)]
        for node in {id(node): node for loop in loops for node in ast.walk(loop)}.values():
            owner, value = _addition(node)
            if isinstance(owner, ast.Name) and value is not None:
                yield text, owner.id, value


def _addition(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.target, node.value
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return node.targets[0].value, node.value
    found = match("append(LIST, VALUE)", node) or {}
    return found.get("LIST"), found.get("VALUE")


_EMPTY = re.compile(r"torch\.(empty|zeros|ones|tensor)\(\s*[\[(]?\s*(0\b|\])")


def grown_by_cat(facts: Facts) -> Iterator[Advice]:
    """Allocate once what a loop makes longer with `cat`, which has the old and the new alive at once."""
    text = facts.failing
    statement = text.statement_at(text.line) if text is not None else None
    loop = loop_around(text, text.line) if text is not None else None
    if text is None or not isinstance(statement, ast.Assign) or not isinstance(loop, ast.For):
        return
    parts = match("cat([WHOLE, PART])", statement.value) or match("concat([WHOLE, PART])", statement.value)
    name, passes = text.code(statement.targets[0]), _passes(text, loop)
    if parts is None or text.code(parts["WHOLE"]) != name or not isinstance(parts["PART"], ast.Name) or passes is None:
        return
    made = [each.value for each in text.nodes() if isinstance(each, ast.Assign) and text.code(each.targets[0]) == name]
    if not any(_EMPTY.match(text.code(each)) for each in made) or not all(map(text.stands_alone, (statement, loop))):
        return
    code, indent = parts["PART"].id, " " * statement.col_offset
    lines = [
        f"if not {name}_filled:", f"    {name} = {code}.new_empty({passes} * len({code}), *{code}.shape[1:])",
        f"{name}[{name}_filled : {name}_filled + len({code})] = {code}", f"{name}_filled += len({code})",
    ]  # fmt: skip
    yield propose(
        f"Allocate {name} once and write each part into it", text=text,
        changes=[
            *text.insert(loop, f"{name}_filled = 0"), text.replace(statement, f"\n{indent}".join(lines)),
            *text.insert_after(loop, f"{name} = {name}[:{name}_filled]"),
        ],
        evidence=f"cat makes a longer {name} in every pass, beside the one that it copies",
        cost=f"the first part is taken to be the longest of the {passes} parts",
    )  # fmt: skip


def _passes(text: CellText, loop: ast.For) -> str | None:
    """Return code for how often a loop runs; None where it has to be run to tell."""
    source = loop.iter
    if called_name(source) == "enumerate" and isinstance(source, ast.Call) and source.args:
        source = source.args[0]
    is_sized = isinstance(source, ast.Name | ast.Attribute | ast.List | ast.Tuple) or called_name(source) == "range"
    return f"len({text.code(source)})" if is_sized else None
