"""Memory kept without need: by names that the failed cell does not use, by autograd graphs, by what nothing reads.

Of the last, tensors are deleted, or written over by what is computed of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.expressions import CASTS, UNARY
from gpumagic.oom.rules.facts import Facts, Ownership
from gpumagic.oom.rules.proposal import Remedy, bound_in, calls, failed, loop_around, prepare, propose, substituted
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
    # What trains without a model of its own differentiates what an earlier cell computed, maybe with these
    if modules and (facts.models or not facts.trains):
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
                f"Delete {', '.join(names)} before line {statement.lineno}", text=text, changes=changes,
                cost=f"{', '.join(names)} {'are' if names[1:] else 'is'} gone after the cell, too",
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


WITHOUT_GRAPH = "with torch.no_grad():"  # what `inference_mode` makes, a later cell could not write to


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
    if any(name.isidentifier() and each.requires_grad and not each.graph for name, each in facts.tensors.items()):
        return  # who asks for the gradient of a tensor computes it, if in a function that is not seen here
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
    for model in facts.models if facts.optimizers_there and facts.trains else ():
        if model.name not in updated and not model.local and not model.frozen:
            yield propose(
                f"Freeze {model.name}", **prepare(facts, model.name, f"{model.name}.requires_grad_(False)"),
                evidence=f"no optimizer updates {model.name}",
                cost=f"no gradients for {model.name}: unfreeze it to train it later",
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
    """Return the changes that put what made a graph, up to the failed statement, under `no_grad`."""
    text, line = facts.text, facts.line
    if text is None or line is None:
        return ()
    place = next((i for i, each in enumerate(text.tree.body) if each.lineno <= line <= (each.end_lineno or 0)), None)
    if place is None:
        return ()
    statement = text.tree.body[place]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return text.insert(statement, "@torch.no_grad()")
    names = set(facts.graph_names)
    made = [
        i for i, each in enumerate(text.tree.body[:place])
        if isinstance(each, ast.Assign) and any(names_in(target) & names for target in each.targets)
    ]  # fmt: skip
    return text.wrap(text.tree.body[min([*made, place]) : place + 1], WITHOUT_GRAPH)


def read_no_more(facts: Facts) -> set[str]:
    """Return the large tensors that the cell made and that nothing after the statement that failed reads."""
    text = facts.text
    failing = text.statement_at(facts.line) if text is not None else None
    if text is None or facts.cell is None or not any(each is failing for each in text.tree.body):
        return set()
    after = set[str]().union(*(names_in(each) for each in text.tree.body if each.lineno > (facts.line or 0)))
    made = {name for each in text.tree.body if each is not failing and each.lineno < (facts.line or 0)
            for name in names_in(each)} & facts.cell.bound_first  # fmt: skip
    return (made & facts.large) - after


_SIGNS = {ast.Add: "+=", ast.Sub: "-=", ast.Mult: "*=", ast.Div: "/="}
_NEW = UNARY | {"sum", "mean", "std", "var", "prod", "norm", "max", "min", "matmul", "mm", "cdist", "rsqrt", "solve"}
"""Functions and methods whose result is no view."""


def update_in_place(facts: Facts) -> Iterator[Advice]:
    """Write over tensors that nothing reads any more, in the statement that failed; then in all from there on."""
    text, failing = next(failed(facts), (None, None))
    if text is None or failing is None or text.cell:
        return
    # A function's argument may be somebody else's tensor.
    functions = [each for each in text.nodes() if isinstance(each, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef)]
    if any(each is failing for one in functions for each in ast.walk(one)):
        return
    found = list(_overwriting(facts, text, failing))
    own = [each for each in found if each.target == found[0].target and found[0].statement is failing]
    for chosen in [own, found] if len(own) < len(found) else [found]:
        targets = dict.fromkeys(each.target or f"line {each.statement.lineno}" for each in chosen)
        olds = ", ".join(dict.fromkeys(each.name for each in chosen))
        if chosen:
            yield propose(
                f"Compute {', '.join(targets)} in place", text=text, changes=[each.change for each in chosen],
                evidence=f"nothing else needs the old {olds}",
                cost=f"the old values of {olds} are gone"
                + (" if the cell fails" if all(each.name == each.target for each in chosen) else ""),
            )  # fmt: skip


class _Overwriting(NamedTuple):
    """A statement that computes in place."""

    statement: ast.stmt
    target: str
    name: str
    """What is written over."""
    change: Change


def _overwriting(facts: Facts, text: CellText, failing: ast.stmt) -> Iterator[_Overwriting]:
    """Yield the statement that failed and those that follow it which can write over what they read last."""
    block, fresh = text.block_of(failing), set[str]()
    is_top, rest = block is text.tree.body, block[block.index(failing) :]
    for place, each in enumerate(rest):
        value = each.value if isinstance(each, ast.Assign | ast.Expr) else None
        if value is None or not text.stands_alone(each) or (isinstance(each, ast.Assign) and len(each.targets) > 1):
            continue
        target = text.code(each.targets[0]) if isinstance(each, ast.Assign) else ""
        after = set[str]().union(*map(names_in, rest[place + 1 :])) if is_top else names_in(text.tree)
        dying = (fresh if each is not failing else set()) | read_no_more(facts)
        last = sorted((dying & names_in(value)) - after - {target})
        for name in [target, *last] if target in names_in(value) else [*last, *([target] if target else [])]:
            change = _in_place(facts, text, each, value, name) if _may_go(facts, name, fresh, rest[:place]) else None
            if change is not None:
                yield _Overwriting(each, target, name, change)
                fresh.add(target)
                break
        else:
            is_large = isinstance(value, ast.BinOp) or called_name(value) in UNARY
            is_float = any(each in fresh or _is_float(facts, each) for each in names_in(value))
            fresh = fresh | {target} if is_large and is_float else fresh - {target}


def _is_float(facts: Facts, name: str) -> bool:
    fact = facts.tensors.get(name)
    return fact is not None and "float" in fact.dtype and not (fact.requires_grad or fact.graph)


def _may_go(facts: Facts, name: str, fresh: set[str], between: Sequence[ast.stmt]) -> bool:
    """Return whether nothing else may look at a tensor's memory: no other name, and no view made since."""
    fact = facts.tensors.get(name)
    is_shared = any(name in (names := holder.name.split(", ")) and len(names) > 1 for holder in facts.holders)
    # What makes a tensor of its own does not look at another later, as a view or a second name does.
    is_seen = any(
        name in names_in(each) and not (isinstance(each.value, ast.BinOp) or called_name(each.value) in _NEW)
        for each in between if isinstance(each, ast.Assign)
    )  # fmt: skip
    return not (is_shared or is_seen or (fact is not None and (fact.requires_grad or fact.graph) and name not in fresh))


def _in_place(facts: Facts, text: CellText, each: ast.stmt, value: ast.expr, name: str) -> Change | None:
    """Return the change of a statement that writes over a tensor in the largest part of its value that can."""
    target = text.code(each.targets[0]) if isinstance(each, ast.Assign) else ""
    read = (fact for each in names_in(value) if (fact := facts.tensors.get(each)) is not None and fact.shape)
    if len({fact.dtype for fact in read if "float" in fact.dtype}) > 1:
        return None  # the result has the wider type, and what is written over keeps its own
    reads = [node for node in ast.walk(value) if isinstance(node, ast.Name) and node.id == name]
    for part in (node for node in ast.walk(value) if isinstance(node, ast.BinOp | ast.Call | ast.UnaryOp)):
        terms: list[str] = []
        lines = _steps(facts, text, name, part, terms)
        is_all = part is value or all(any(node is one for node in ast.walk(part)) for one in reads)
        if not lines or not is_all or (part is not value and not reads) or (name != target and lines[0]):
            continue
        if part is not value:
            rest = substituted(text, value, part, name)
            lines += [f"{target} = {rest}" if target else rest]
        elif name != target:
            lines += [f"{target} = {name}"] if target else []
        if each is text.tree.body[-1] and target and lines[-1].startswith(f"{name}."):
            lines[-1] += ";"  # else the cell would display it
        new = f"\n{' ' * each.col_offset}".join([*terms, *filter(None, lines)])
        if new != text.code(each) and (lines[0] or _is_float(facts, name) or name not in facts.tensors):
            return text.replace(each, new)
    return None


def _steps(facts: Facts, text: CellText, name: str, value: ast.expr, terms: list[str]) -> list[str]:
    """Return the statements in place for ``(name * 2 + other).relu()``, or none where it is not such a chain.

    It may begin with a copy, ``other.to("cuda").float()``, or with a sum. What has to be computed from the old values
    goes to `terms`, which come first.
    """
    if isinstance(value, ast.Name):
        return [""] if value.id == name else []
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        before = _steps(facts, text, name, value.operand, terms)
        return [*before, f"{name}.neg_()"] if before else []
    if isinstance(value, ast.Call) and called_name(value) in CASTS:
        made_of = [facts.tensors.get(each) for each in names_in(value)]
        is_copy = any(
            each is not None and (each.device != facts.device or "float" not in each.dtype) for each in made_of
        )
        return [f"{name} = {text.code(value)}"] if is_copy else []
    if isinstance(value, ast.BinOp):
        return _steps_of_sum(facts, text, name, value, terms)
    if not isinstance(value, ast.Call) or called_name(value) not in UNARY or not isinstance(value.func, ast.Attribute):
        return []
    owner, arguments = value.func.value, [text.code(each) for each in value.args]
    arguments += [f"{each.arg}={text.code(each.value)}" for each in value.keywords]
    if isinstance(owner, ast.Name) and owner.id == "torch" and value.args:
        owner, arguments = value.args[0], arguments[1:]
    is_read = any(re.search(rf"\b{name}\b", each) for each in arguments)  # when it has been written over
    before = [] if is_read else _steps(facts, text, name, owner, terms)
    return [*before, f"{name}.{called_name(value)}_({', '.join(arguments)})"] if before else []


def _steps_of_sum(facts: Facts, text: CellText, name: str, value: ast.BinOp, terms: list[str]) -> list[str]:
    left, right, is_read = value.left, value.right, name in names_in(value)
    if type(value.op) not in _SIGNS:
        return []
    if is_read and isinstance(value.op, ast.Add | ast.Mult) and name not in names_in(left):
        left, right = right, left
    before = _steps(facts, text, name, left, terms)
    if not before and not is_read and isinstance(left, ast.BinOp):
        before = [f"{name} = {text.code(left)}"]  # the first sum makes the tensor
    code = text.code(right)
    if before and name in names_in(right) and (any(before) or not isinstance(right, ast.Name)):
        if not isinstance(right, ast.BinOp | ast.UnaryOp) and called_name(right) not in _NEW:
            return []  # it may look at what is written over
        terms.append(f"{name}_term{len(terms) + 1} = {code}")
        code = f"{name}_term{len(terms)}"
    elif isinstance(value.op, ast.Add | ast.Sub) and before:
        product = right if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult) else None
        times, of = ("1", right) if product is None else (text.code(product.left), product.right)
        is_number = times in facts.numbers or re.fullmatch(r"[\d.e-]+", times) is not None
        sign = "add_" if isinstance(value.op, ast.Add) else "sub_"
        if called_name(of) == "eye" and is_number:  # nothing but the diagonal changes
            return [*before, f"{name}.diagonal().{sign}({times})"]
        if product is not None and is_number:
            return [*before, f"{name}.{sign}({text.code(of)}, alpha={times})"]
    return [*before, f"{name} {_SIGNS[type(value.op)]} {code}"] if before else []
