"""Memory kept without need: by names that the failed cell does not use, gradients, copies, autograd graphs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts, Ownership
from gpumagic.oom.rules.proposal import (
    Remedy,
    bound_in,
    calls,
    failed,
    loop_around,
    prepare,
    propose,
    read_no_more,
)  # fmt: skip
from gpumagic.report.units import LARGE, count, size
from gpumagic.source.text import CellText, Change, called_name, names_in


def leftovers(facts: Facts) -> Iterator[Advice]:
    """Delete what earlier cells left behind and this one does not use; models it takes to the CPU."""
    large = [claim for claim in facts.leftovers if claim.nbytes >= LARGE]
    models = [claim for claim in large if claim.kind in ("module", "optimizer")]
    others = [claim for claim in large if claim not in models]
    if others:
        names = sorted({name for claim in others for name in claim.names})
        word = "name" if any(map(str.isidentifier, names)) else "output"
        cells, them = ("their cells", "them") if names[1:] else ("its cell", "it")
        yield propose(
            f"Delete {count(len(names), word)} that earlier cells left",
            frees=sum(claim.nbytes for claim in others), first=_deletion(names), evidence=_unused(others, names),
            cost=f"run {cells} again when you need {them}",
        )  # fmt: skip
    claimed = {name for claim in models for name in claim.names}
    modules = sorted(each.name for each in facts.kept if each.kind == "module" and each.name in claimed)
    if modules:
        yield propose(
            f"Move {', '.join(modules)} to the CPU", first="\n".join(f"{name}.cpu()" for name in modules),
            evidence=_unused(models, modules), cost="move it back before you use it",
        )  # fmt: skip


def _unused(claims: list[Ownership], names: list[str]) -> str:
    listed = "; ".join(f"{', '.join(sorted(claim.names))} {size(claim.nbytes)}" for claim in claims)
    return f"{listed}; neither this cell nor what it calls uses {'them' if names[1:] else 'it'}"


def stale(facts: Facts) -> Iterator[Advice]:
    """Delete a name before binding it anew: old and new are alive at once otherwise."""
    for name, frees in facts.stale.items():
        if frees >= LARGE:
            yield propose(
                f"Delete the old {name} before the cell makes the new one", frees=frees, first=f"del {name}",
                evidence=f"the {name} of an earlier run, {size(frees)}, stays alive until the new one is bound",
                cost="none: the cell replaces it",
            )  # fmt: skip


def last_turn(facts: Facts) -> Iterator[Advice]:
    """Delete what a turn of a loop has made before the next turn makes it again."""
    text = facts.failing
    loop = loop_around(text, text.line) if text is not None else None
    if text is None or loop is None:
        return
    seen, names = set[str](), list[str]()
    for each in loop.body:
        if isinstance(each, ast.Assign):  # what it binds anew and has not read till then
            names += sorted((bound_in(each) & facts.large) - seen - names_in(each.value))
        seen |= names_in(each)
    if names:
        yield propose(
            f"Delete {', '.join(names)} at the end of each pass", text=text,
            changes=text.insert_after(loop.body[-1], f"del {', '.join(names)}"),
            evidence=f"{', '.join(names)} of the previous pass was alive while the next was made",
            cost="its last value is gone after the loop, too",
        )  # fmt: skip


def unread(facts: Facts) -> Iterator[Advice]:
    """Delete what the cell has made and reads no more."""
    for text, statement in failed(facts):
        names = sorted(read_no_more(facts) - names_in(statement)) if text is facts.failing and not text.cell else []
        changes = text.insert(statement, f"del {', '.join(names)}") if names else ()
        if changes:
            yield propose(
                f"Delete {', '.join(names)} before line {statement.lineno}", text=text, changes=changes, cost="none",
                evidence=f"nothing reads {'them' if names[1:] else 'it'} after that",
            )  # fmt: skip


QUERY_KEY_VALUE = 3
weights = Remedy(
    "Let attention return its result only",
    lambda facts: not facts.trains and facts.stage == "forward",
    "the weights of all pairs of tokens are made to be returned", "the weights are None",
    argument="need_weights=False", in_line=True,
    of=lambda facts, _, call, given: not given and len(call.args) == QUERY_KEY_VALUE
    and called_name(call) in {model.name for model in facts.models},
)  # fmt: skip


def _deletion(names: list[str]) -> str:
    """Return the code that unbinds names.

    A displayed value is also in six places of IPython's, all of which `%xdel _N` clears. It comes last: it also
    unbinds the variables that are the very same object, which `del` would then miss.
    """
    variables = [name for name in names if name.isidentifier()]
    displayed = [name.replace("Out[", "_").rstrip("]") for name in names if not name.isidentifier()]
    return "\n".join(
        [*([f"del {', '.join(variables)}"] if variables else []), *(f"%xdel {each}" for each in displayed)]
    )


INFERENCE = "with torch.inference_mode():"


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
    """Evaluate without recording a graph, where a model is in eval mode."""
    evaluated = next((model.name for model in facts.models if not model.training), None)
    yield from _evaluated(facts, f"{evaluated} is in eval mode") if evaluated else ()


def only_looks(facts: Facts) -> Iterator[Advice]:
    """Run models without recording a graph, where nothing is known that would need it."""
    updated = frozenset[str]().union(*(each.models for each in facts.optimizers_there))
    is_trained = any(each.training and each.name in updated for each in facts.models)  # another cell calls backward
    yield from () if is_trained or any(evaluates(facts)) else _evaluated(facts, "nothing here updates a model")


def _evaluated(facts: Facts, said: str) -> Iterator[Advice]:
    if facts.cell is None or facts.trains or facts.cell.switches_grad_off:
        return
    graphs = [*facts.graph_names, *(name for name, each in facts.collections.items() if each.graphs)]
    if graphs or facts.stage == "forward":
        yield propose(
            "Evaluate without an autograd graph", text=facts.text, changes=ungraphed(facts),
            evidence=f"{said} and nothing calls backward" + (f", yet {graphs[0]} has a graph" if graphs else ""),
            cost="its results cannot be part of a backward pass",
        )  # fmt: skip


def of_a_frozen_model(facts: Facts) -> Iterator[Advice]:
    """Freeze a model that no optimizer updates."""
    updated = frozenset[str]().union(*(each.models for each in facts.optimizers_there))
    for model in facts.models if updated and facts.trains else ():
        if model.name not in updated and not model.local:
            yield propose(
                f"Freeze {model.name}", **prepare(facts, model.name, f"{model.name}.requires_grad_(False)"),
                evidence=f"no optimizer updates {model.name}",
                cost=f"none, as long as {model.name} is not trained later",
            )  # fmt: skip


def _owner(text: CellText, call: ast.Call) -> str:
    return text.code(call.func).removesuffix(".backward")


retained = Remedy(
    lambda _, *call: f"Let {_owner(*call[:2])}.backward free its graph", lambda facts: facts.graph_names,
    lambda _, *call: f"retain_graph=True kept the graph of {_owner(*call[:2])} while the next was made",
    "none: backward is called once", argument="retain_graph=False", calls=("backward",), by_default=True,
    of=lambda facts, text, call, given: given == "True" and _owner(text, call) in facts.graph_names
    and len(list(calls([text], "backward"))) == 1,
)  # fmt: skip


def ungraphed(facts: Facts) -> Sequence[Change]:
    """Return the changes that put what made a graph, up to the failed statement, under `inference_mode`."""
    text, line = facts.text, facts.line
    if text is None or line is None:
        return ()
    place = next((i for i, each in enumerate(text.tree.body) if each.lineno <= line <= (each.end_lineno or 0)), None)
    if place is None:
        return ()
    statement = text.tree.body[place]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return text.insert(statement, "@torch.inference_mode()")
    names = set(facts.graph_names)
    made = [
        i for i, each in enumerate(text.tree.body[:place])
        if isinstance(each, ast.Assign) and any(names_in(target) & names for target in each.targets)
    ]  # fmt: skip
    return text.wrap(text.tree.body[min([*made, place]) : place + 1], INFERENCE)
