"""What a loop collects on the device without need: autograd graphs, results, a tensor that `cat` makes longer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from gpumagic.advice.facts import Collection, Facts
from gpumagic.advice.records import FREE, Advice
from gpumagic.advice.rules.patterns import match_pattern
from gpumagic.advice.rules.proposal import propose
from gpumagic.advice.rules.regions import (
    bound_in,
    bracketed,
    called_models,
    does,
    failed,
    loop_around,
)
from gpumagic.report.units import LARGE, count, size
from gpumagic.source.text import CellText, Change, called_name, names_in


def growing(facts: Facts) -> str:
    """Return what grows with every pass of a loop, as a sentence; empty where nothing is known to."""
    leaks = (
        evidence for _, target, _ in _additions(facts) if (evidence := _with_graphs(facts, target))
    )
    return next((f"A leak: {evidence}." for evidence in leaks), "")


def _with_graphs(facts: Facts, target: str) -> str:
    """Return what is known of the graphs that a variable of a loop collects; empty where it collects none."""
    held, total = facts.frames.collections.get(target), facts.frames.tensors.get(target)
    if held is not None and held.graphs:
        return f"{held.place or target} holds {count(held.graphs, 'tensor')} with a graph, one more in every pass"
    return (
        f"{target} has a graph that grows in every pass of the loop"
        if total is not None and total.has_graph
        else ""
    )


def graphs(facts: Facts) -> Iterator[Advice]:
    """Add up numbers, not tensors that drag their graphs along."""
    for text, target, values in _additions(facts):
        evidence = _with_graphs(facts, target)
        if not evidence or _is_differentiated(facts, text, values):
            continue
        held, total = facts.frames.collections.get(target), facts.frames.tensors.get(target)
        is_number = (
            held.is_of_numbers
            if held is not None and held.graphs
            else total is not None and not total.shape
        )
        known = [(value, facts.frames.tensors.get(text.code(value))) for value in values]
        kept = [value for value, fact in known if not values[1:] or fact is None or fact.has_graph]
        if kept:
            yield propose(
                f"Collect {', '.join(map(text.code, kept))} without "
                f"{'their autograd graphs' if kept[1:] else 'its autograd graph'}",
                text=text,
                evidence=evidence,
                cost="a sync in each pass, for the number" if is_number else FREE,
                changes=[
                    text.replace(
                        value, f"{bracketed(text, value)}.{'item' if is_number else 'detach'}()"
                    )
                    for value in kept
                ],
            )


def _is_differentiated(facts: Facts, text: CellText, values: Sequence[ast.expr]) -> bool:
    """Return whether gradients may be computed of what is collected: below the loop, or by who calls the function."""
    functions = [each for each in text.nodes() if isinstance(each, ast.FunctionDef)]
    around = [each for each in functions if any(node is values[0] for node in ast.walk(each))]
    if facts.frames.trains and around and not any(does(each, "backward") for each in around):
        return True
    end = (loop_around(text, values[0].lineno) or values[0]).end_lineno or 0
    return any(
        called_name(each) in ("backward", "grad") and each.lineno > end
        for each in text.expressions()
    )


def results(facts: Facts) -> Iterator[Advice]:
    """Collect results in the host's memory."""
    added: dict[tuple[str, str], tuple[CellText, list[ast.expr]]] = {}
    for text, target, values in _additions(facts):
        added.setdefault((target, text.cell), (text, []))[1].extend(values)
    known = {target for target, _ in added}
    others = [
        each for each in facts.frames.collections if each not in known and _is_there(facts, each)
    ]
    added |= {(target, text.cell): (text, []) for target in others for text in facts.frames.texts}
    for (target, _), (text, values) in added.items():
        held, longer = facts.frames.collections.get(target), facts.frames.tensors.get(target)
        held = (
            Collection(1, longer.nbytes, longer.has_graph)
            if longer is not None and values[1:]
            else held
        )
        if (
            held is None
            or held.nbytes < LARGE
            or held.member == "optimizer"
            or (held.graphs and held.is_of_numbers)
        ):
            continue
        place, (inside, after) = (
            held.place or target,
            _joined(text, _root(target)) if longer is None else ([], []),
        )
        # What is made of it on the device may want the graphs
        for joined in [[*inside, *after], inside] if after else [inside]:
            if (not values and not inside) or (held.graphs and joined):
                continue
            to_host, without = (
                (".detach().cpu()", ", without graphs") if held.graphs else (".cpu()", "")
            )
            yield propose(
                f"{'Collect' if values else 'Keep'} {place} in the host's memory{without}"
                + (" until it is joined" if joined is not inside else ""),
                text=text,
                frees=None
                if values
                else held.nbytes,  # of what grows, no more than the beginning is there
                changes=[
                    *(
                        text.replace(value, f"{bracketed(text, value)}{to_host}")
                        for value in values
                    ),
                    *(text.append(call, f'.to("{facts.event.device}")') for call in joined),
                ],
                first=_moved(place, held)
                if _is_there(facts, target) and not (longer or held.graphs)
                else None,
                evidence=f"{place} holds {count(held.tensors, 'tensor')} with {size(held.nbytes)}"
                + (", more with every pass" if values and id(values[0]) in _blocks(text) else ""),
                cost="a copy in each pass"
                + ("" if joined else f"; what uses {place} finds it on the CPU"),
            )


def listed(facts: Facts) -> Iterator[Advice]:
    """Collect in the host's memory what the failed line makes a list or a dict of."""
    for text, statement in failed(facts):
        lists = [
            each for each in ast.walk(statement) if isinstance(each, ast.ListComp | ast.DictComp)
        ]
        for node in lists[:1]:
            part, made = (
                (node.elt, "list") if isinstance(node, ast.ListComp) else (node.value, "dict")
            )
            if (
                isinstance(part, ast.Call)
                and called_name(part) not in _LEAVES
                and "nn" not in names_in(part.func)
            ):
                yield propose(
                    f"Collect what the {made} is made of in the host's memory",
                    text=text,
                    changes=[text.append(part, ".cpu()")],
                    evidence=f"the {made} keeps every part on the device",
                    cost=f"a copy in each pass; what uses the {made} finds it on the CPU",
                )


def stays(facts: Facts) -> Iterator[Advice]:
    """Leave data in the host's memory of which a loop takes a part in each pass, and copy the parts."""
    text, changes, names = facts.frames.text, list[Change](), list[str]()
    for node in text.nodes() if text is not None else ():
        if (
            text is None
            or not isinstance(node, ast.Assign)
            or called_name(node.value) not in ("to", "cuda")
        ):
            continue
        name, call = text.code(node.targets[0]), text.code(node.value)
        parts = [
            each
            for each in text.expressions()
            if isinstance(each, ast.Subscript) and text.code(each.value) == name
        ]
        taken = [each for each in parts if loop_around(text, each.lineno) is not None]
        is_large = name in facts.frames.tensors and facts.frames.tensors[name].nbytes >= LARGE
        if taken and is_large and call.startswith((f"{name}.to(", f"{name}.cuda(")):
            names.append(name)
            changes.append(text.replace(node.value, f"{name}.cpu()"))
            changes += [text.append(each, call[len(name) :]) for each in taken]
            indices = [each.slice for each in parts if isinstance(each.slice, ast.Name)]
            # What is on the device is no index of what is not.
            changes += [
                text.append(each, ".cpu()")
                for each in indices
                if each.id not in facts.frames.numbers
            ]
    if names:
        yield propose(
            f"Keep {', '.join(names)} in the host's memory and copy what each pass takes",
            text=text,
            changes=changes,
            evidence="a pass takes a part of it",
            cost="a copy in each pass",
        )


_LEAVES = frozenset(
    {"cpu", "item", "numpy", "tolist", "list", "int", "float", "str", "len", "range", "checkpoint"}
)
"""What gives no tensor on the device."""


def _is_there(facts: Facts, name: str) -> bool:
    """Return whether the cell begins with what a variable of the notebook holds already."""
    root = _root(name)
    return any(each.name == root for each in facts.notebook.variables_on_device) and root not in (
        facts.frames.cell.bound_first if facts.frames.cell else ()
    )


def _root(place: str) -> str:
    """Return the variable: ``history`` of ``history["loss"]``."""
    return re.split(r"\W", place, maxsplit=1)[0]


_HOST = "part.cpu() if torch.is_tensor(part) else part"
_ON_THE_HOST = {
    "tensor": "each.cpu()", "module": "each.cpu()",
    "list": f"[{_HOST} for part in each]", "tuple": f"tuple({_HOST} for part in each)",
    "named tuple": f"each._make({_HOST} for part in each)", "dict": f"{{name: {_HOST} for name, part in each.items()}}",
}  # fmt: skip
"""Code for a member of a collection with its tensors in the host's memory, by what the member is."""


def _moved(place: str, held: Collection) -> str:
    """Return the code that moves what a collection holds already to the host."""
    members = f"{place}.items()" if held.is_dict else f"enumerate({place})"
    return f"for key, each in {members}:\n    {place}[key] = {_ON_THE_HOST[held.member]}"


_JOINS = ("stack", "cat", "concat")


def _blocks(text: CellText) -> dict[int, ast.stmt]:
    """Return the innermost loop or function that each part of a text is in, by the part's `id`."""
    blocks = [
        node for node in text.nodes() if isinstance(node, ast.For | ast.While | ast.FunctionDef)
    ]
    return {id(node): block for block in blocks for node in ast.walk(block)}


def _joined(text: CellText, name: str) -> tuple[list[ast.Call], list[ast.Call]]:
    """Return the calls that join what comes from a collection: those in loops and functions, and those after them."""
    inner = _blocks(text)
    derived = {name}
    assigned = (node for node in text.nodes() if isinstance(node, ast.Assign) and id(node) in inner)
    for made in sorted(assigned, key=lambda each: each.lineno):
        is_joined = any(called_name(each) in _JOINS for each in ast.walk(made.value))
        if not is_joined and names_in(made.value) & derived:
            derived |= set().union(*map(names_in, made.targets))
    calls = [
        node for node in text.nodes() if isinstance(node, ast.Call) and called_name(node) in _JOINS
    ]
    of_these = [each for each in calls if each.args and names_in(each.args[0]) & derived]
    return [each for each in of_these if id(each) in inner], [
        each for each in of_these if id(each) not in inner
    ]


def _additions(facts: Facts) -> Iterator[tuple[CellText, str, list[ast.expr]]]:
    """Yield what a loop adds to a variable: ``total += x``, ``found.append(x)``, ``found[i] = x``, ``seen.push(x, y)``.

    A function that adds to what outlives its call does the same. Of a record, the values are its tensors on the device.
    """
    for text in facts.frames.texts:
        places = _blocks(text)
        alone = {id(node.value) for node in text.nodes() if isinstance(node, ast.Expr)}
        for node in text.nodes():
            place = places.get(id(node))
            owner, values = _addition(node)
            is_listed = isinstance(getattr(node, "value", None), ast.ListComp)
            if (
                owner is None
                or not (place or is_listed)
                or (isinstance(node, ast.Call) and id(node) not in alone)
            ):
                continue  # what returns something does not only keep
            target = text.code(owner)
            if isinstance(place, ast.FunctionDef) and _root(target) in bound_in(place):
                continue
            held, total = facts.frames.collections.get(target), facts.frames.tensors.get(target)
            if held is not None and (held.place or held.is_of_records):
                values = [
                    part
                    for value in values
                    for part in _parts(value)
                    if _is_there_too(facts, text, part)
                ]
            elif isinstance(node, ast.Call) and called_name(node) not in _ADD:
                continue
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.BinOp)
                and total is not None
                and total.shape
            ):
                continue  # what comes out of a layer, rather than a sum
            if values and (isinstance(owner, ast.Name) or held is not None or total is not None):
                yield text, target, values


_ADD = ("append", "appendleft")


def _addition(node: ast.AST) -> tuple[ast.expr | None, list[ast.expr]]:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.target, [node.value]
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return node.targets[0].value, [node.value]
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.ListComp):
        return node.targets[0], [node.value.elt]
    if isinstance(node, ast.Assign):
        for pattern in ("WHOLE + PART", "cat([WHOLE, PART])", "cat([WHOLE, PART], DIM)"):
            parts = match_pattern(pattern, node.value)
            if parts and ast.unparse(parts["WHOLE"]) == ast.unparse(node.targets[0]):
                return node.targets[0], [parts["PART"]] if "+" in pattern else [
                    parts["WHOLE"],
                    parts["PART"],
                ]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        of = node.func.value
        is_of_a_dict = called_name(of) == "setdefault" and isinstance(of, ast.Call)
        return of.func.value if is_of_a_dict else of, node.args  # type: ignore[attr-defined]
    return None, []


def _is_there_too(facts: Facts, text: CellText, part: ast.expr) -> bool:
    """Return whether a part of a record is a tensor on the device, or made of one."""
    fact = facts.frames.tensors.get(text.code(part))
    if fact is not None:
        return fact.device == facts.event.device
    if not isinstance(part, ast.Call | ast.BinOp | ast.Attribute) or called_name(part) in {
        *_LEAVES,
        "detach",
    }:
        return False
    if any(isinstance(each, ast.DictComp) and each.value is part for each in text.nodes()):
        return True  # its own variable is not among those of the cell
    reads = [facts.frames.tensors.get(name) for name in names_in(part)]
    is_made = any(each is not None and each.device == facts.event.device for each in reads)
    is_figure = isinstance(part, ast.Attribute) and part.attr in ("shape", "dtype", "device")
    return not is_figure and (is_made or any(called_models(facts, part)))


def _parts(value: ast.expr) -> list[ast.expr]:
    """Return what a record is made of: ``(x, y)``, ``Record(x, y)``, ``{"x": x}``."""
    if isinstance(value, ast.Tuple):
        return value.elts
    if isinstance(value, ast.Dict):
        return value.values
    if isinstance(value, ast.DictComp):
        return [value.value]
    return (
        [*value.args, *(each.value for each in value.keywords)]
        if isinstance(value, ast.Call)
        else [value]
    )
