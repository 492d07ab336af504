"""Autograd graphs that are kept without need."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts, Growth, TensorFact
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import count, size
from gpumagic.source.text import Change, Text, called, keyword, names_in

NO_GRAD = "with torch.no_grad():"
WORTH_FREEING = 1024**2

_DIFFERENTIATES = frozenset({"grad", "requires_grad_", "requires_grad", "jacobian", "hessian", "vjp", "jvp"})
"""What code mentions that wants a gradient without calling `backward`."""


def growth(facts: Facts) -> Iterator[Advice]:
    """Add up numbers, not tensors that drag their graphs along."""
    for found in facts.scene.growths:
        method = "item" if found.scalar else "detach"
        frees = facts.transient * (found.tensors - 1) // found.tensors if found.tensors > 1 else None
        yield propose(
            facts, f"Collect {found.added} without its autograd graph", frees=frees, estimated=True,
            text=facts.text, changes=_plainly(facts.text, found, method), evidence=_evidence(found),
            cost="a wait a turn for the number" if found.scalar else "none",
        )  # fmt: skip


def earlier(facts: Facts) -> Iterator[Advice]:
    """Let go of the graphs that earlier cells' results keep."""
    if facts.graphs is None or facts.graphs.nbytes < WORTH_FREEING:
        return
    found = facts.graphs
    *others, last = sorted(found.names)
    names, keep = (f"{', '.join(others)} and {last}", "keep") if others else (last, "keeps")
    yield propose(
        facts, f"Let go of the autograd graphs of {names}", frees=found.nbytes, first=found.code,
        evidence=f"{names} {keep} {size(found.nbytes)} of activations for a backward; neither this cell nor what "
        "it calls uses them", cost="none, unless a later cell differentiates them",
    )  # fmt: skip


def no_grad(facts: Facts) -> Iterator[Advice]:
    """Evaluate without recording a graph."""
    if facts.cell is None or facts.trains or facts.cell.switches_grad_off or not facts.scene.graph_names:
        return
    if facts.cell.attributes & _DIFFERENTIATES or any(_is_watched(fact) for fact in facts.work.tensors.values()):
        return
    off = {"no_grad", "inference_mode", "decorate_context", "backward"}
    evaluates = [model.name for model in facts.models if not model.training]
    if facts.scene.functions & off or not evaluates:
        return
    frees = max(0, facts.transient - 2 * (facts.requested or 0))
    yield propose(
        facts, "Evaluate without an autograd graph", frees=frees or None, estimated=True,
        evidence=f"{evaluates[0]} is in eval mode and nothing calls backward, yet {facts.scene.graph_names[0]} "
        "has a graph", cost="none", text=facts.text, changes=_ungraphed(facts),
    )  # fmt: skip


def retained(facts: Facts) -> Iterator[Advice]:
    """Let backward free the graph, where one call of it is all there is."""
    for text in facts.texts:
        backwards = [node for node in text.nodes() if isinstance(node, ast.Call) and called(node) == "backward"]
        flag = keyword(backwards[0], "retain_graph") if len(backwards) == 1 else None
        if flag is None or not isinstance(flag.value, ast.Constant) or flag.value.value is not True:
            continue
        function = backwards[0].func
        owner = text.code(function.value) if isinstance(function, ast.Attribute) else ""
        if not any(owner == name for name in facts.scene.graph_names):
            continue
        yield propose(
            facts, f"Let {owner}.backward free its graph", frees=facts.transient // 2 or None, estimated=True,
            text=text, changes=[text.replace(flag.value, "False")], cost="none: backward is called once",
            evidence=f"retain_graph=True kept the graph of {owner} while the next was made",
        )  # fmt: skip


def _is_watched(fact: TensorFact) -> bool:
    """Return whether somebody wants this tensor's own gradient: an input that is optimized or explained."""
    return fact.requires_grad and not fact.graph


def _plainly(text: Text | None, found: Growth, method: str) -> list[Change]:
    """Return the change that makes a number or a plain tensor of what is added."""
    for node in text.nodes() if text is not None else ():
        value = _added(node, found)
        if text is not None and value is not None and value.lineno == found.line:
            simple = isinstance(value, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            new = text.code(value) if simple else f"({text.code(value)})"
            return [text.replace(value, f"{new}.{method}()")]
    return []


def _added(node: ast.AST, found: Growth) -> ast.expr | None:
    if isinstance(node, ast.AugAssign) and not found.append:
        return node.value if isinstance(node.target, ast.Name) and node.target.id == found.target else None
    if isinstance(node, ast.Call) and found.append and called(node) == "append" and len(node.args) == 1:
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        return node.args[0] if isinstance(owner, ast.Name) and owner.id == found.target else None
    return None


def _ungraphed(facts: Facts) -> Sequence[Change]:
    """Return the changes that put the statements from the first with a graph to the failed one under `no_grad`."""
    text, line = facts.text, facts.scene.line
    if text is None or line is None:
        return ()
    place = next((i for i, each in enumerate(text.tree.body) if each.lineno <= line <= (each.end_lineno or 0)), None)
    if place is None:
        return ()
    failed = text.tree.body[place]
    if isinstance(failed, ast.FunctionDef | ast.AsyncFunctionDef):
        return text.insert(failed, "@torch.no_grad()")
    made = [i for i, each in enumerate(text.tree.body[:place]) if _makes(each, facts.scene.graph_names)]
    return text.wrap(text.tree.body[min([*made, place]) : place + 1], NO_GRAD)


def _makes(statement: ast.stmt, names: Sequence[str]) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return bool(set().union(*map(names_in, targets)) & set(names)) if targets else False


def _evidence(found: Growth) -> str:
    if found.append:
        return f"{found.target} holds {count(found.tensors, 'tensor')} with a graph, one more with every turn"
    return f"{found.target} has a graph that grows with every turn of the loop"
