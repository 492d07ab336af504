"""Memory that is kept without need: by names that the failed cell does not use, by old values, by autograd graphs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from gpumagic.advice.facts import Facts, Ownership, Stage
from gpumagic.advice.records import Advice, NoCost
from gpumagic.advice.rules.proposal import Remedy, prepare, propose
from gpumagic.advice.rules.regions import bound_in, failed, in_a_row, loop_around
from gpumagic.report.units import LARGE, count, size
from gpumagic.source.text import CellText, Change, called_name, names_in


def leftovers(facts: Facts) -> Iterator[Advice]:
    """Delete what earlier cells left and this one does not use; move models to the CPU instead."""
    large = [claim for claim in facts.notebook.leftovers if claim.nbytes >= LARGE]
    of_models = [claim for claim in large if claim.kind in ("module", "optimizer")]
    others = [claim for claim in large if claim not in of_models]
    if others:
        yield _delete(others)
    claimed = _names_of(of_models)
    modules = sorted(
        variable.name
        for variable in facts.notebook.variables_on_device
        if variable.kind == "module" and variable.name in claimed
    )
    # A cell that trains without a model of its own differentiates what an earlier cell computed, maybe with these
    if modules and (facts.notebook.models or not facts.frames.trains):
        yield propose(
            f"Move {', '.join(modules)} to the CPU",
            first="\n".join(f"{name}.cpu()" for name in modules),
            evidence=_unused(of_models, modules),
            cost="move it back before you use it",
        )


def _delete(claims: Sequence[Ownership]) -> Advice:
    names = sorted(_names_of(claims))
    word = "name" if any(map(str.isidentifier, names)) else "output"
    cells = "their cells" if len(names) > 1 else "its cell"
    return propose(
        f"Delete {count(len(names), word)} that earlier cells left",
        frees=sum(claim.nbytes for claim in claims),
        first=_deletion(names),
        evidence=_unused(claims, names),
        cost=f"run {cells} again when you need {_them(names)}",
    )


def _names_of(claims: Iterable[Ownership]) -> set[str]:
    names = set[str]()
    for claim in claims:
        names |= claim.names
    return names


def _unused(claims: Iterable[Ownership], names: Sequence[str]) -> str:
    listed = "; ".join(
        f"{', '.join(sorted(claim.names))} {size(claim.nbytes)}" for claim in claims
    )
    return f"{listed}; neither this cell nor what it calls uses {_them(names)}"


def _them(names: Sequence[str]) -> str:
    return "them" if len(names) > 1 else "it"


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _deletion(names: Sequence[str]) -> str:
    """Return the code that unbinds names.

    A displayed value is also in six places of IPython's, all of which `%xdel _N` clears. It comes last: it also
    unbinds the variables that are the very same object, which `del` would then miss.
    """
    lines = list[str]()
    variables = [name for name in names if name.isidentifier()]
    if variables:
        lines.append(f"del {', '.join(variables)}")
    for name in names:
        if name not in variables:
            displayed = name.replace("Out[", "_").rstrip("]")
            lines.append(f"%xdel {displayed}")
    return "\n".join(lines)


def rebound(facts: Facts) -> Iterator[Advice]:
    """Delete the old value of a name that the cell binds anew: otherwise old and new are alive at once."""
    for name, frees in facts.notebook.about_to_be_rebound.items():
        if frees >= LARGE:
            yield propose(
                f"Delete the old {name} before the cell makes the new one",
                frees=frees,
                first=f"del {name}",
                evidence=f"the {name} of an earlier run, {size(frees)}, stays alive until the new one is bound",
                cost=NoCost(because="the cell replaces it"),
            )


def previous_pass(facts: Facts) -> Iterator[Advice]:
    """Delete what a pass of a loop has made before the next pass makes it again."""
    text = facts.frames.failing_text
    loop = loop_around(text, text.line) if text is not None else None
    if text is None or loop is None:
        return
    large_tensors = facts.large_tensors
    names = list[str]()
    mentioned = set[str]()
    for statement in loop.body:
        if isinstance(statement, ast.Assign):
            made_anew = bound_in(statement) - mentioned - names_in(statement.value)
            names += sorted(made_anew & large_tensors)
        mentioned |= names_in(statement)
    if names:
        listed = ", ".join(names)
        yield propose(
            f"Delete {listed} at the end of each pass",
            text=text,
            changes=text.insert_after(loop.body[-1], f"del {listed}"),
            evidence=f"{listed} of the previous pass was alive while the next was made",
            cost="its last value is gone after the loop, too",
        )


def read_no_more(facts: Facts) -> Iterator[Advice]:
    """Delete what the cell has made and reads no more."""
    for text, statement in failed(facts):
        names = sorted(_names_read_no_more(facts) - names_in(statement))
        if text.cell or not names:
            continue  # in a function, the names are others
        listed = ", ".join(names)
        changes = text.insert(statement, f"del {listed}")
        if changes:
            yield propose(
                f"Delete {listed} before line {statement.lineno}",
                text=text,
                changes=changes,
                cost=f"{listed} {_are(names)} gone after the cell, too",
                evidence=f"nothing reads {_them(names)} after that",
            )


def _names_read_no_more(facts: Facts) -> set[str]:
    """Return what the cell made that is large and that nothing reads after the statement that failed."""
    frames = facts.frames
    text = frames.text
    statement = text.statement_at(frames.line) if text is not None else None
    if text is None or frames.cell is None or statement is None:
        return set()
    if not any(top_level is statement for top_level in in_a_row(text.tree.body)):
        return set()  # what is in a loop or a branch may run again
    names_before = set[str]()
    names_after = set[str]()
    for node in text.nodes():
        if isinstance(node, ast.Name):
            if node.lineno < statement.lineno:
                names_before.add(node.id)
            elif node.lineno > (statement.end_lineno or 0):
                names_after.add(node.id)
    collections = frames.collections
    large_collections = {
        name for name in collections if collections[name].nbytes >= LARGE
    }
    large = facts.large_tensors | large_collections
    return (names_before & frames.cell.bound_first & large) - names_after


QUERY_KEY_VALUE = 3


def _attends_with_a_model(
    facts: Facts, _: CellText, call: ast.Call, given: str
) -> bool:
    """Return whether a call gives a model of the notebook query, key and value, and no word on the weights."""
    if given or len(call.args) != QUERY_KEY_VALUE:
        return False
    models = {model.name for model in facts.notebook.models}
    return called_name(call) in models


attention_weights = Remedy(
    "Let attention return its result only",
    lambda facts: not facts.frames.trains and facts.frames.stage is Stage.FORWARD,
    "the weights of all pairs of tokens are made to be returned",
    "the weights are None",
    argument="need_weights=False",
    in_line=True,
    of=_attends_with_a_model,
)


WITHOUT_GRAPH = "with torch.no_grad():"  # what `inference_mode` makes, a later cell could not write to


def earlier_graphs(facts: Facts) -> Iterator[Advice]:
    """Let go of the graphs that earlier cells' results keep."""
    kept = facts.notebook.leftover_graphs
    if kept is None or kept.nbytes < LARGE:
        return
    names = " and ".join(sorted(kept.names))
    keep = "keeps"
    graphs = "its autograd graph"
    if len(kept.names) > 1:
        keep = "keep"
        graphs = "their autograd graphs"
    yield propose(
        f"Detach {names} from {graphs}",
        frees=kept.nbytes,
        first=kept.code,
        evidence=f"{names} {keep} {size(kept.nbytes)} of activations for a backward; neither this cell nor what it "
        "calls uses them",
        cost=NoCost(unless="a later cell calls backward()"),
    )


def graph_in_eval_mode(facts: Facts) -> Iterator[Advice]:
    """Evaluate without recording a graph, where a model is in eval mode."""
    evaluated = [model for model in facts.notebook.models if not model.training]
    if evaluated:
        yield from _evaluate_without_graph(
            facts, f"{evaluated[0].name} is in eval mode"
        )


def graph_without_training(facts: Facts) -> Iterator[Advice]:
    """Run models without recording a graph, where no cell is known to train them."""
    updated = _updated_models(facts)
    if all(
        model.training and model.name not in updated for model in facts.notebook.models
    ):
        yield from _evaluate_without_graph(facts, "nothing here updates a model")


def _evaluate_without_graph(facts: Facts, reason: str) -> Iterator[Advice]:
    frames = facts.frames
    if _may_be_differentiated(facts):
        return
    graphs = frames.graph_names
    for name, collection in frames.collections.items():
        if collection.graphs:
            graphs.append(name)
    if not graphs and frames.stage is not Stage.FORWARD:
        return
    evidence = f"{reason} and nothing calls backward"
    if graphs:
        evidence += f", yet {graphs[0]} has a graph"
    yield propose(
        "Evaluate without an autograd graph",
        text=frames.text,
        changes=_under_no_grad(facts),
        evidence=evidence,
        cost="its results cannot be part of a backward pass",
    )


def _may_be_differentiated(facts: Facts) -> bool:
    """Return whether something may need the graph that the cell records, or it records none already."""
    frames = facts.frames
    if frames.cell is None or frames.trains or frames.cell.switches_grad_off:
        return True
    failing = frames.failing_text
    if failing is not None and re.search("no_grad|inference_mode", failing.source):
        return True
    # Who asks for the gradient of a tensor computes it, if in a function that is not seen here
    return any(
        tensor.requires_grad and not tensor.has_graph and name.isidentifier()
        for name, tensor in frames.tensors.items()
    )


def _under_no_grad(facts: Facts) -> Sequence[Change]:
    """Return the changes that put what made a graph, up to the statement that failed, under `no_grad`."""
    text = facts.frames.text
    line = facts.frames.line
    if text is None or line is None:
        return ()
    block = [statement for statement in text.tree.body if statement.lineno <= line]
    if not block or (block[-1].end_lineno or 0) < line:
        return ()
    failing = block[-1]
    if isinstance(failing, ast.FunctionDef | ast.AsyncFunctionDef):
        return text.insert(failing, "@torch.no_grad()")
    graphs = set(facts.frames.graph_names)
    first = next(
        (statement for statement in block if _assigns(statement, graphs)), failing
    )
    return text.wrap(block[block.index(first) :], WITHOUT_GRAPH)


def _assigns(statement: ast.stmt, names: set[str]) -> bool:
    """Return whether a statement assigns to one of some variables, or to a part of it."""
    if not isinstance(statement, ast.Assign):
        return False
    return any(names_in(target) & names for target in statement.targets)


def frozen_model(facts: Facts) -> Iterator[Advice]:
    """Freeze a model that no optimizer updates."""
    if not facts.frames.optimizers_alive or not facts.frames.trains:
        return
    updated = _updated_models(facts)
    for model in facts.notebook.models:
        if model.name not in updated and not model.local and not model.frozen:
            yield propose(
                f"Freeze {model.name}",
                **prepare(facts, model.name, f"{model.name}.requires_grad_(False)"),
                evidence=f"no optimizer updates {model.name}",
                cost=f"no gradients for {model.name}: unfreeze it to train it later",
            )


def _updated_models(facts: Facts) -> set[str]:
    """Return the names of the models that an optimizer updates, by this cell or another."""
    names = set[str]()
    for optimizer in facts.frames.optimizers_alive:
        names |= optimizer.models
    return names


def _differentiated(text: CellText, call: ast.Call) -> str:
    """Return the code of what `backward` is called on."""
    return text.code(call.func).removesuffix(".backward")


def _keeps_a_graph_for_nothing(
    facts: Facts, text: CellText, call: ast.Call, given: str
) -> bool:
    """Return whether a call of `backward` retains a graph though no other call follows it."""
    is_only_call = text.source.count("backward(") == 1
    return (
        given == "True"
        and is_only_call
        and _differentiated(text, call) in facts.frames.graph_names
    )


retained_graph = Remedy(
    lambda _, text, call, *__: (
        f"Let {_differentiated(text, call)}.backward free its graph"
    ),
    lambda facts: facts.frames.graph_names,
    lambda _, text, call, *__: (
        f"retain_graph=True kept the graph of {_differentiated(text, call)} while the next was made"
    ),
    NoCost(because="backward is called once"),
    argument="retain_graph=False",
    calls=("backward",),
    by_default=True,
    of=_keeps_a_graph_for_nothing,
)
