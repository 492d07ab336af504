"""Memory kept without need: by names the failed cell does not use, by gradients, graphs and collected results."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from gpumagic.memory.workspaces import CLEAR_WORKSPACES
from gpumagic.oom.report import WORKSPACE, Action, Advice, OomReport
from gpumagic.oom.rules.facts import Collection, Facts, Growth, Ownership, TensorFact
from gpumagic.oom.rules.proposal import prepare, propose
from gpumagic.report.units import count, size
from gpumagic.source.text import CellText, Change, called_name, keyword, names_in

WORTH_NAMING = 1024**2
"""Bytes below which a leftover is not worth a word."""


def leftovers(facts: Facts) -> Iterator[Advice]:
    """Delete what earlier cells left behind and this one does not use."""
    large = [claim for claim in facts.leftovers if claim.nbytes >= WORTH_NAMING]
    frees = sum(claim.nbytes for claim in large)
    if not large:
        return
    names = sorted({name for claim in large for name in claim.names})
    yield propose(
        facts, f"Delete {count(len(names), 'name')} that earlier cells left", frees=frees, first=_deletion(large),
        evidence="; ".join(f"{', '.join(sorted(claim.names))} {size(claim.nbytes)}" for claim in large)
        + "; neither this cell nor what it calls uses them", cost="run their cells again when you need them",
    )  # fmt: skip


def stale(facts: Facts) -> Iterator[Advice]:
    """Delete a name before binding it anew: old and new are alive at once otherwise."""
    for name, frees in facts.stale.items():
        if frees >= WORTH_NAMING:
            yield propose(
                facts, f"Delete the old {name} before the cell makes the new one", frees=frees, first=f"del {name}",
                evidence=f"the {name} of an earlier run, {size(frees)}, stays alive until the new one is bound",
                cost="none: the cell replaces it",
            )  # fmt: skip


def last_turn(facts: Facts) -> Iterator[Advice]:
    """Delete what a turn of a loop has made before the next turn makes it again."""
    text, line = facts.failing, facts.failing.line if facts.failing is not None else None
    loop = _loop_around(text, line) if text is not None else None
    if text is None or loop is None:
        return
    names = [name for name in _remade(loop, text, line or 0) if _worth(facts, name)]
    frees = sum(facts.work.tensors[name].nbytes for name in names)
    if not names:
        return
    yield propose(
        facts, f"Delete {', '.join(names)} at the end of each turn", frees=frees, text=text,
        changes=text.insert_after(loop.body[-1], f"del {', '.join(names)}"),
        evidence=f"{', '.join(names)} of the turn before, {size(frees)}, was alive while the next was made",
        cost="the last turn's is gone after the loop too",
    )  # fmt: skip


def _worth(facts: Facts, name: str) -> bool:
    fact = facts.work.tensors.get(name)
    return fact is not None and fact.nbytes >= WORTH_NAMING and fact.device == facts.device and not fact.requires_grad


def _loop_around(text: CellText, line: int | None) -> ast.For | ast.While | None:
    loops = [node for node in text.nodes() if isinstance(node, ast.For | ast.While)]
    around = [loop for loop in loops if line is not None and loop.lineno < line <= (loop.end_lineno or 0)]
    return max(around, key=lambda loop: loop.lineno, default=None)


def _remade(loop: ast.For | ast.While, text: CellText, line: int) -> list[str]:
    """Return the names that a turn of a loop binds anew from a line on, unread till then, and not read outside it."""
    seen: set[str] = set()
    remade = []
    for statement in loop.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            is_ahead = (statement.end_lineno or 0) >= line  # else its old value is gone already
            if isinstance(target, ast.Name) and is_ahead and target.id not in seen | names_in(statement.value):
                remade.append(target.id)
        seen |= names_in(statement)
    inside = {id(node) for node in ast.walk(loop)}
    outside = {node.id for node in text.nodes() if isinstance(node, ast.Name) and id(node) not in inside}
    deleted = {name for node in ast.walk(loop) if isinstance(node, ast.Delete) for name in names_in(node)}
    return [name for name in remade if name not in outside | deleted]


def _deletion(claims: list[Ownership]) -> str:
    """Return the code that unbinds them.

    A displayed value is also in six places of IPython's, all of which `%xdel _N` clears. It comes last: it also
    unbinds the variables that are the very same object, which `del` would then miss.
    """
    names = sorted({name for claim in claims for name in claim.names})
    variables = [name for name in names if name.isidentifier()]
    displayed = [name.replace("Out[", "_").rstrip("]") for name in names if not name.isidentifier()]
    lines = [f"del {', '.join(variables)}"] if variables else []
    return "\n".join([*lines, *(f"%xdel {each}" for each in displayed)])


_REBINDS = re.compile(r"\s*[\w.]+\s*=[^=]")
"""A line that gives a name another value is a change of what the user works with, not a clearing up."""

WORTH_A_LINE = 1024**2
"""Bytes below which a line is not worth typing."""


def actions_of(report: OomReport, *, in_notebook: bool) -> tuple[Action, ...]:
    """Return lines that give memory back now, or make more of it usable, each once.

    Args:
        report: of the failure.
        in_notebook: whether magics can be typed.
    """
    found = [*_from_advice(report), *_held(report, in_notebook=in_notebook), *_workspaces(report)]
    return tuple(dict.fromkeys(found))


def _workspaces(report: OomReport) -> Iterator[Action]:
    """Offer the workspaces where they are as large as the request that failed; of a whole GPU they are little."""
    for holder in report.holders:
        if holder.kind == WORKSPACE and holder.nbytes >= max(WORTH_A_LINE, report.requested or 0):
            note = f"frees {size(holder.nbytes)} of workspaces, until the next matrix product"
            yield Action(CLEAR_WORKSPACES, note)


def _from_advice(report: OomReport) -> Iterator[Action]:
    for advice in report.advice:
        lines = [line for line in (advice.first or "").splitlines() if not _REBINDS.match(line)]
        worth = f"frees {size(advice.frees)}" if advice.frees is not None else ""
        for line in lines:
            yield Action(line, worth if len(lines) == 1 else "")


def _held(report: OomReport, *, in_notebook: bool) -> Iterator[Action]:
    """Let the session's own places go: outputs, the last error, what nothing names."""
    outputs = sum(holder.nbytes for holder in report.holders if holder.name.startswith("Out["))
    named = sum(holder.nbytes for holder in report.holders)
    nameless = (report.allocated_after or 0) - named - _told(report) if report.holders else 0
    if outputs >= WORTH_A_LINE and in_notebook:
        yield Action("%devices --release-held", f"outputs hold {size(outputs)}")
    elif nameless >= WORTH_A_LINE:
        line = "%devices --held" if in_notebook else "gpumagic.devices().held()"
        yield Action(line, f"says what keeps the {size(nameless)} that nothing names")


def _told(report: OomReport) -> int:
    """Return the bytes that nothing names and of which the advice says already how to give them back."""
    return sum(each.frees or 0 for each in report.advice if _lets_go(each.first or ""))


def _lets_go(code: str) -> bool:
    """Return whether code does more than to delete names."""
    return any(not line.startswith("del ") for line in code.splitlines())


WORTH_FREEING = 1024**2


def drop_gradients(facts: Facts) -> Iterator[Advice]:
    """Let `zero_grad` drop the gradients instead of filling them with zeros."""
    if facts.stage != "forward":
        return
    frees = sum(model.gradients for model in facts.models)
    for text in facts.texts:
        kept = [node for node in text.nodes() if isinstance(node, ast.Call) and _keeps(node)]
        if kept and frees >= WORTH_FREEING:
            changes = [text.replace(_flag(node), "True") for node in kept]
            yield propose(
                facts, "Let zero_grad drop the gradients", frees=frees, text=text, changes=changes,
                first=_clear(facts), cost="none: code that reads .grad sees None for a moment",
                evidence=f"set_to_none=False keeps {size(frees)} of zeros through the forward pass",
            )  # fmt: skip
            return


def earlier_gradients(facts: Facts) -> Iterator[Advice]:
    """Clear the gradients before the forward pass, not between it and backward."""
    text = _text_with_late_zero_grad(facts)
    frees = sum(model.gradients for model in facts.models if model.training)
    if text is None or frees < WORTH_FREEING or facts.stage != "forward":
        return
    step = next(
        (node for node in text.nodes() if isinstance(node, ast.Expr) and called_name(node.value) == "step"), None
    )
    changes = text.insert_after(step, f"{_owner(text, step)}.zero_grad()") if step is not None else ()
    if changes:
        yield propose(
            facts, "Clear the gradients right after the step", frees=frees, text=text, changes=changes,
            first=_clear(facts), evidence=f"{size(frees)} of old gradients were kept through the forward pass",
            cost="none",
        )  # fmt: skip


def of_an_evaluated_model(facts: Facts) -> Iterator[Advice]:
    """Drop the gradients of a model that is only evaluated."""
    if facts.trains:
        return
    for model in facts.models:
        if not model.training and model.gradients >= WORTH_FREEING and not model.local:
            yield propose(
                facts, f"Drop the gradients that {model.name} keeps from training", frees=model.gradients,
                evidence=f"{model.name} is in eval mode and holds {size(model.gradients)} of gradients", cost="none",
                **prepare(facts, model.name, f"{model.name}.zero_grad(set_to_none=True)"),
            )  # fmt: skip


def _clear(facts: Facts) -> str | None:
    names = [model.name for model in facts.models if model.gradients and not model.local]
    return "\n".join(f"{name}.zero_grad()" for name in names) or None


def _keeps(call: ast.Call) -> bool:
    flag = keyword(call, "set_to_none") if called_name(call) == "zero_grad" else None
    return flag is not None and isinstance(flag.value, ast.Constant) and flag.value.value is False


def _flag(call: ast.Call) -> ast.expr:
    flag = keyword(call, "set_to_none")
    assert flag is not None
    return flag.value


def _owner(text: CellText, statement: ast.Expr) -> str:
    call = statement.value
    return text.code(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def _text_with_late_zero_grad(facts: Facts) -> CellText | None:
    """Return the text with a loop whose only `zero_grad` stands between the line that failed and `backward`."""
    for text in facts.texts:
        calls = [node for node in text.nodes() if isinstance(node, ast.Call)]
        lines = {name: [call.lineno for call in calls if called_name(call) == name]
                 for name in ("zero_grad", "backward", "step")}  # fmt: skip
        line = text.line or facts.scene.line
        if line is None or not all(len(found) == 1 for found in lines.values()):
            continue
        if line < lines["zero_grad"][0] < lines["backward"][0] < lines["step"][0]:
            return text
    return None


NO_GRAD = "with torch.no_grad():"
WORTH_CUTTING = 1024**2

_DIFFERENTIATES = frozenset({"grad", "requires_grad_", "requires_grad", "jacobian", "hessian", "vjp", "jvp"})
"""What code mentions that wants a gradient without calling `backward`."""


def graph_growth(facts: Facts) -> Iterator[Advice]:
    """Add up numbers, not tensors that drag their graphs along."""
    for found in facts.scene.growths:
        method = "item" if found.scalar else "detach"
        frees = facts.transient * (found.tensors - 1) // found.tensors if found.tensors > 1 else None
        yield propose(
            facts, f"Collect {found.added} without its autograd graph", frees=frees, estimated=True,
            text=facts.text, changes=_plainly(facts.text, found, method), evidence=_graph_evidence(found),
            cost="a wait a turn for the number" if found.scalar else "none",
        )  # fmt: skip


def earlier_graph(facts: Facts) -> Iterator[Advice]:
    """Let go of the graphs that earlier cells' results keep."""
    if facts.graphs is None or facts.graphs.nbytes < WORTH_CUTTING:
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
        backwards = [node for node in text.nodes() if isinstance(node, ast.Call) and called_name(node) == "backward"]
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


def _plainly(text: CellText | None, found: Growth, method: str) -> list[Change]:
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
    if isinstance(node, ast.Call) and found.append and called_name(node) == "append" and len(node.args) == 1:
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


def _graph_evidence(found: Growth) -> str:
    if found.append:
        return f"{found.target} holds {count(found.tensors, 'tensor')} with a graph, one more with every turn"
    return f"{found.target} has a graph that grows with every turn of the loop"


WORTH_MOVING = 1024**2


def results_to_the_host(facts: Facts) -> Iterator[Advice]:
    """Collect results in the host's memory."""
    for text in facts.texts:
        for target, value in _collected(text):
            held = facts.work.collections.get(target)
            if held is None or held.nbytes < WORTH_MOVING:
                continue
            if any(growth.target == target for growth in facts.scene.growths):
                continue  # its graph is the greater part, and said there
            plain = "detach().cpu()" if held.graphs else "cpu()"
            yield propose(
                facts, f"Collect {target} in the host's memory", frees=held.nbytes, text=text,
                changes=[text.append(value, f".{plain}")] if _is_simple(value)
                else [text.replace(value, f"({text.code(value)}).{plain}")],
                evidence=_evidence(target, held), cost=f"a copy a turn; what uses {target} finds it on the CPU",
            )  # fmt: skip
            return


def _collected(text: CellText) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a loop adds to a list or a dict: ``found.append(x)``, ``found[i] = x``."""
    loops = [node for node in text.nodes() if isinstance(node, ast.For | ast.While)]
    for node in (each for loop in loops for each in ast.walk(loop)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            if isinstance(node.func.value, ast.Name) and len(node.args) == 1:
                yield node.func.value.id, node.args[0]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            owner = node.targets[0].value
            if isinstance(owner, ast.Name):
                yield owner.id, node.value


def _is_simple(value: ast.expr) -> bool:
    return isinstance(value, ast.Name | ast.Attribute | ast.Call | ast.Subscript)


def _evidence(target: str, held: Collection) -> str:
    return f"{target} holds {count(held.tensors, 'tensor')} with {size(held.nbytes)}, one more with every turn"
