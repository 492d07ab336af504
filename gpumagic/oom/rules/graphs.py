"""Autograd graphs that are kept without need: by earlier cells, in evaluation, after backward."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import called_models, calls, find, propose
from gpumagic.report.units import LARGE, size
from gpumagic.source.text import CellText, Change, called_name, keyword, names_in

INFERENCE = "with torch.inference_mode():"

_SWITCHES = ("no_grad", "inference_mode", "set_grad_enabled")
_DIFFERENTIATES = frozenset({"grad", "requires_grad_", "requires_grad", "jacobian", "hessian", "vjp", "jvp"})
"""What code mentions that wants a gradient without calling `backward`."""


_EVALUATION = re.compile(r"eval|valid|predict|infer|embed|encode|score|^test", re.IGNORECASE)
"""How functions are called that only look at what a model gives."""


def earlier_graph(facts: Facts) -> Iterator[Advice]:
    """Let go of the graphs that earlier cells' results keep."""
    if facts.graphs is None or facts.graphs.nbytes < LARGE:
        return
    found = facts.graphs
    *others, last = sorted(found.names)
    names, keep, graphs = f"{', '.join(others)} and {last}", "keep", "their autograd graphs"
    if not others:
        names, keep, graphs = last, "keeps", "its autograd graph"
    yield propose(
        f"Detach {names} from {graphs}", frees=found.nbytes, first=found.code,
        evidence=f"{names} {keep} {size(found.nbytes)} of activations for a backward; neither this cell nor what "
        "it calls uses them", cost="none, unless a later cell calls backward()",
    )  # fmt: skip


def evaluates(facts: Facts) -> Iterator[Advice]:
    """Evaluate without recording a graph."""
    if facts.cell is None or facts.trains or facts.cell.switches_grad_off or not facts.scene.graph_names:
        return
    wanted = [fact for fact in facts.work.tensors.values() if fact.requires_grad and not fact.graph]
    if facts.cell.attributes & _DIFFERENTIATES or wanted:  # the gradient of an input that is optimized or explained
        return
    off = {"no_grad", "inference_mode", "decorate_context", "backward"}
    said = [f"{model.name} is in eval mode" for model in facts.models if not model.training]
    said += [f"{name}() is by its name an evaluation" for name in _evaluations(facts)]
    if facts.scene.functions & off or not said:
        return
    yield propose(
        "Evaluate without an autograd graph",
        evidence=f"{said[0]} and nothing calls backward, yet {facts.scene.graph_names[0]} "
        "has a graph", cost="its results cannot be part of a backward pass", text=facts.text, changes=_ungraphed(facts),
    )  # fmt: skip


def _evaluations(facts: Facts) -> list[str]:
    """Return the functions of the user's that were running and by their names evaluate."""
    made = [node.name for text in facts.texts for node in text.nodes() if isinstance(node, ast.FunctionDef)]
    return [name for name in made if name in facts.scene.functions and _EVALUATION.search(name)]


def of_a_frozen_model(facts: Facts) -> Iterator[Advice]:
    """Run a model without a graph that no optimizer of the cell updates, on data that needs no gradient either."""
    region = find(facts)
    updated = frozenset[str]().union(*(each.models for each in facts.optimizers))
    if region is None or not updated or not facts.trains:
        return
    for statement in region.forward:
        for call in called_models(facts, statement):
            model = region.text.code(call.func)
            inputs = set[str]().union(*map(names_in, call.args))
            if model in updated or _is_without_graph(region.text, call) or any(_is_watching(facts, x) for x in inputs):
                continue
            changes = _without_graph(region.text, statement, call)
            if changes:
                yield propose(
                    f"Run {model} without an autograd graph", text=region.text, changes=changes,
                    evidence=f"no optimizer of the cell updates {model}, and what it is called with needs no gradient",
                    cost=f"none, as long as {model} is not trained here",
                )  # fmt: skip
                return


def _is_without_graph(text: CellText, call: ast.Call) -> bool:
    blocks = [node for node in text.nodes() if isinstance(node, ast.With)]
    around = [block for block in blocks if block.lineno < call.lineno <= (block.end_lineno or 0)]
    return any(called_name(item.context_expr) in _SWITCHES for block in around for item in block.items)


def _is_watching(facts: Facts, name: str) -> bool:
    fact = facts.work.tensors.get(name)
    return fact is None or fact.requires_grad or fact.graph


def _without_graph(text: CellText, statement: ast.stmt, call: ast.Call) -> Sequence[Change]:
    """Return the changes that put a call under `no_grad`: its statement, or one of its own before it."""
    if isinstance(statement, ast.Assign) and statement.value is call:
        return text.wrap([statement], "with torch.no_grad():")
    name = f"{called_name(call)}_out"
    before = text.insert(statement, f"with torch.no_grad():\n    {name} = {text.code(call)}")
    return (*before, text.replace(call, name)) if before else ()


def retained(facts: Facts) -> Iterator[Advice]:
    """Let backward free the graph, where one call of it is all there is."""
    for text in facts.texts:
        backwards = [call for _, call in calls([text], "backward")]
        flag = keyword(backwards[0], "retain_graph") if len(backwards) == 1 else None
        owner = text.code(backwards[0].func).removesuffix(".backward") if flag is not None else ""
        if flag is not None and text.code(flag.value) == "True" and owner in facts.scene.graph_names:
            yield propose(
                f"Let {owner}.backward free its graph", text=text, changes=[text.replace(flag.value, "False")],
                evidence=f"retain_graph=True kept the graph of {owner} while the next was made",
                cost="none: backward is called once",
            )  # fmt: skip


def _ungraphed(facts: Facts) -> Sequence[Change]:
    """Return the changes that put what made a graph, up to the failed statement, under `inference_mode`."""
    text, line = facts.text, facts.scene.line
    if text is None or line is None:
        return ()
    place = next((i for i, each in enumerate(text.tree.body) if each.lineno <= line <= (each.end_lineno or 0)), None)
    if place is None:
        return ()
    failed = text.tree.body[place]
    if isinstance(failed, ast.FunctionDef | ast.AsyncFunctionDef):
        return text.insert(failed, "@torch.inference_mode()")
    made = [i for i, each in enumerate(text.tree.body[:place]) if _makes(each, facts.scene.graph_names)]
    return text.wrap(text.tree.body[min([*made, place]) : place + 1], INFERENCE)


def _makes(statement: ast.stmt, names: Sequence[str]) -> bool:
    return isinstance(statement, ast.Assign) and any(names_in(each) & set(names) for each in statement.targets)
