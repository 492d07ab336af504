"""Memory kept without need: by names that the failed cell does not use, by autograd graphs, by what nothing reads.

Of the last, tensors are deleted, or written over by what is computed of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gpumagic.advice.facts import Facts, Ownership, Stage
from gpumagic.advice.records import Advice
from gpumagic.advice.rules.expressions import CASTS, FUNCTIONS, UNARY
from gpumagic.advice.rules.proposal import (
    Remedy,
    bound_in,
    bracketed,
    failed,
    in_a_row,
    loop_around,
    prepare,
    propose,
    substituted,
)
from gpumagic.report.units import LARGE, count, size
from gpumagic.source.text import CellText, Change, called_name, names_in


def leftovers(facts: Facts) -> Iterator[Advice]:
    """Delete what earlier cells left behind and this one does not use; models it takes to the CPU."""
    large = [claim for claim in facts.notebook.leftovers if claim.nbytes >= LARGE]
    models = [claim for claim in large if claim.kind in ("module", "optimizer")]
    others = [claim for claim in large if claim not in models]
    if others:
        names = sorted({name for claim in others for name in claim.names})
        word = "name" if any(map(str.isidentifier, names)) else "output"
        cells, them = ("their cells", "them") if names[1:] else ("its cell", "it")
        yield propose(
            f"Delete {count(len(names), word)} that earlier cells left",
            frees=sum(claim.nbytes for claim in others),
            first=_deletion(names),
            evidence=_unused(others, names),
            cost=f"run {cells} again when you need {them}",
        )
    claimed = {name for claim in models for name in claim.names}
    modules = sorted(
        each.name
        for each in facts.notebook.variables_on_device
        if each.kind == "module" and each.name in claimed
    )
    # What trains without a model of its own differentiates what an earlier cell computed, maybe with these
    if modules and (facts.notebook.models or not facts.frames.trains):
        yield propose(
            f"Move {', '.join(modules)} to the CPU",
            first="\n".join(f"{name}.cpu()" for name in modules),
            evidence=_unused(models, modules),
            cost="move it back before you use it",
        )


def _unused(claims: list[Ownership], names: list[str]) -> str:
    listed = "; ".join(f"{', '.join(sorted(claim.names))} {size(claim.nbytes)}" for claim in claims)
    return f"{listed}; neither this cell nor what it calls uses {'them' if names[1:] else 'it'}"


def stale(facts: Facts) -> Iterator[Advice]:
    """Delete a name before binding it anew: old and new are alive at once otherwise."""
    for name, frees in facts.notebook.about_to_be_rebound.items():
        if frees >= LARGE:
            yield propose(
                f"Delete the old {name} before the cell makes the new one",
                frees=frees,
                first=f"del {name}",
                evidence=f"the {name} of an earlier run, {size(frees)}, stays alive until the new one is bound",
                cost="none: the cell replaces it",
            )


def last_turn(facts: Facts) -> Iterator[Advice]:
    """Delete what a turn of a loop has made before the next turn makes it again."""
    text = facts.frames.failing_text
    loop = loop_around(text, text.line) if text is not None else None
    if text is None or loop is None:
        return
    seen, names = set[str](), list[str]()
    for each in loop.body:
        if isinstance(each, ast.Assign):  # what it binds anew and has not read till then
            names += sorted((bound_in(each) & facts.large_tensors) - seen - names_in(each.value))
        seen |= names_in(each)
    if names:
        yield propose(
            f"Delete {', '.join(names)} at the end of each pass",
            text=text,
            changes=text.insert_after(loop.body[-1], f"del {', '.join(names)}"),
            evidence=f"{', '.join(names)} of the previous pass was alive while the next was made",
            cost="its last value is gone after the loop, too",
        )


def unread(facts: Facts) -> Iterator[Advice]:
    """Delete what the cell has made and reads no more."""
    for text, statement in failed(facts):
        names = sorted(read_no_more(facts) - names_in(statement)) if not text.cell else []
        changes = text.insert(statement, f"del {', '.join(names)}") if names else ()
        if changes:
            yield propose(
                f"Delete {', '.join(names)} before line {statement.lineno}",
                text=text,
                changes=changes,
                cost=f"{', '.join(names)} {'are' if names[1:] else 'is'} gone after the cell, too",
                evidence=f"nothing reads {'them' if names[1:] else 'it'} after that",
            )


QUERY_KEY_VALUE = 3
weights = Remedy(
    "Let attention return its result only",
    lambda facts: not facts.frames.trains and facts.frames.stage is Stage.FORWARD,
    "the weights of all pairs of tokens are made to be returned",
    "the weights are None",
    argument="need_weights=False",
    in_line=True,
    of=lambda facts, _, call, given: (
        not given
        and len(call.args) == QUERY_KEY_VALUE
        and called_name(call) in {model.name for model in facts.notebook.models}
    ),
)


def _deletion(names: list[str]) -> str:
    """Return the code that unbinds names.

    A displayed value is also in six places of IPython's, all of which `%xdel _N` clears. It comes last: it also
    unbinds the variables that are the very same object, which `del` would then miss.
    """
    variables = [name for name in names if name.isidentifier()]
    displayed = [name.replace("Out[", "_").rstrip("]") for name in names if not name.isidentifier()]
    deleted = [f"del {', '.join(variables)}"] if variables else []
    return "\n".join([*deleted, *(f"%xdel {each}" for each in displayed)])


WITHOUT_GRAPH = (
    "with torch.no_grad():"  # what `inference_mode` makes, a later cell could not write to
)


def earlier_graph(facts: Facts) -> Iterator[Advice]:
    """Let go of the graphs that earlier cells' results keep."""
    found = facts.notebook.leftover_graphs
    if found is not None and found.nbytes >= LARGE:
        names = " and ".join(sorted(found.names))
        keep, graphs = (
            ("keep", "their autograd graphs")
            if found.names - {names}
            else ("keeps", "its autograd graph")
        )
        yield propose(
            f"Detach {names} from {graphs}",
            frees=found.nbytes,
            first=found.code,
            evidence=f"{names} {keep} {size(found.nbytes)} of activations for a backward; neither this cell nor what "
            "it calls uses them",
            cost="none, unless a later cell calls backward()",
        )


def evaluates(facts: Facts) -> Iterator[Advice]:
    """Evaluate without recording a graph, where a model is in eval mode."""
    evaluated = next((model.name for model in facts.notebook.models if not model.training), None)
    yield from _evaluated(facts, f"{evaluated} is in eval mode") if evaluated else ()


def only_looks(facts: Facts) -> Iterator[Advice]:
    """Run models without recording a graph, where nothing is known that would need it."""
    is_trained = any(
        each.training and each.name in _updated(facts) for each in facts.notebook.models
    )  # by another cell
    yield from (
        ()
        if is_trained or any(evaluates(facts))
        else _evaluated(facts, "nothing here updates a model")
    )


def _updated(facts: Facts) -> frozenset[str]:
    return frozenset[str]().union(*(each.models for each in facts.frames.optimizers_alive))


def _evaluated(facts: Facts, said: str) -> Iterator[Advice]:
    if facts.frames.cell is None or facts.frames.trains or facts.frames.cell.switches_grad_off:
        return
    if facts.frames.failing_text is not None and re.search(
        "no_grad|inference_mode", facts.frames.failing_text.source
    ):
        return  # the function that failed does so already
    if any(
        name.isidentifier() and each.requires_grad and not each.has_graph
        for name, each in facts.frames.tensors.items()
    ):
        return  # who asks for the gradient of a tensor computes it, if in a function that is not seen here
    graphs = [
        *facts.frames.graph_names,
        *(name for name, each in facts.frames.collections.items() if each.graphs),
    ]
    if graphs or facts.frames.stage is Stage.FORWARD:
        yield propose(
            "Evaluate without an autograd graph",
            text=facts.frames.text,
            changes=ungraphed(facts),
            evidence=f"{said} and nothing calls backward"
            + (f", yet {graphs[0]} has a graph" if graphs else ""),
            cost="its results cannot be part of a backward pass",
        )


def of_a_frozen_model(facts: Facts) -> Iterator[Advice]:
    """Freeze a model that no optimizer updates."""
    for model in (
        facts.notebook.models if facts.frames.optimizers_alive and facts.frames.trains else ()
    ):
        if model.name not in _updated(facts) and not model.local and not model.frozen:
            yield propose(
                f"Freeze {model.name}",
                **prepare(facts, model.name, f"{model.name}.requires_grad_(False)"),
                evidence=f"no optimizer updates {model.name}",
                cost=f"no gradients for {model.name}: unfreeze it to train it later",
            )


def _owner(text: CellText, call: ast.Call) -> str:
    return text.code(call.func).removesuffix(".backward")


retained = Remedy(
    lambda _, *call: f"Let {_owner(*call[:2])}.backward free its graph",
    lambda facts: facts.frames.graph_names,
    lambda _, *call: (
        f"retain_graph=True kept the graph of {_owner(*call[:2])} while the next was made"
    ),
    "none: backward is called once",
    argument="retain_graph=False",
    calls=("backward",),
    by_default=True,
    of=lambda facts, text, call, given: (
        given == "True"
        and _owner(text, call) in facts.frames.graph_names
        and text.source.count("backward(") == 1
    ),
)


def ungraphed(facts: Facts) -> Sequence[Change]:
    """Return the changes that put what made a graph, up to the failed statement, under `no_grad`."""
    text, line = facts.frames.text, facts.frames.line or 0
    block = [each for each in text.tree.body if each.lineno <= line] if text is not None else []
    if text is None or not block or (block[-1].end_lineno or 0) < line:
        return ()
    if isinstance(block[-1], ast.FunctionDef | ast.AsyncFunctionDef):
        return text.insert(block[-1], "@torch.no_grad()")
    names = set(facts.frames.graph_names)
    made = [
        each
        for each in block
        if isinstance(each, ast.Assign) and names & set().union(*map(names_in, each.targets))
    ]
    return text.wrap(block[block.index([*made, block[-1]][0]) :], WITHOUT_GRAPH)


def read_no_more(facts: Facts) -> set[str]:
    """Return what the cell made that is large and that nothing after the statement that failed reads."""
    text = facts.frames.text
    row = in_a_row(text.tree.body) if text is not None else []
    failing = text.statement_at(facts.frames.line) if text is not None else None
    if (
        text is None
        or facts.frames.cell is None
        or failing is None
        or not any(each is failing for each in row)
    ):
        return set()
    names = [node for node in text.nodes() if isinstance(node, ast.Name)]
    after = {each.id for each in names if each.lineno > (failing.end_lineno or 0)}
    before = {
        each.id for each in names if each.lineno < failing.lineno
    } & facts.frames.cell.bound_first
    return (
        before
        & (
            facts.large_tensors
            | {name for name, each in facts.frames.collections.items() if each.nbytes >= LARGE}
        )
    ) - after


_SIGNS = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_", ast.Pow: "pow_"}
_NEW = UNARY | {
    "sum",
    "mean",
    "std",
    "var",
    "prod",
    "norm",
    "max",
    "min",
    "matmul",
    "mm",
    "cdist",
    "rsqrt",
    "solve",
}
"""Functions and methods whose result is no view."""


def update_in_place(facts: Facts) -> Iterator[Advice]:
    """Write over what nothing reads any more, in the statement that failed and in those after it."""
    for text, failing in failed(facts):
        functions = [
            each
            for each in text.nodes()
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        is_in_function = any(each is failing for one in functions for each in ast.walk(one))
        # A function's argument may be somebody else's tensor
        found = (
            list(_overwriting(facts, text, failing)) if not (text.cell or is_in_function) else []
        )
        olds = ", ".join(dict.fromkeys(old for _, old, _ in found if old))
        is_kept = any(old not in ("", target) for target, old, _ in found)
        if found:
            yield propose(
                f"Compute {', '.join(dict.fromkeys(target for target, _, _ in found))} in place",
                text=text,
                changes=[change for _, _, change in found],
                evidence=f"nothing else needs the old {olds}"
                if olds
                else "each step makes a tensor of its own",
                cost=f"the old values of {olds} are gone{'' if is_kept else ' if the cell fails'}"
                if olds
                else "none",
            )


def _overwriting(
    facts: Facts, text: CellText, failing: ast.stmt
) -> Iterator[tuple[str, str, Change]]:
    """Yield what is computed in place, the tensor that is written over, if it has a name, and the change."""
    row, fresh = in_a_row(text.tree.body), set[str]()
    is_once = any(each is failing for each in row)
    block = row if is_once else text.block_of(failing)
    rest = block[block.index(failing) :]
    for place, each in enumerate(rest):
        value = each.value if isinstance(each, ast.Assign | ast.Expr) else None
        if (
            value is None
            or not text.stands_alone(each)
            or (isinstance(each, ast.Assign) and each.targets[1:])
        ):
            continue
        target = text.code(each.targets[0]) if isinstance(each, ast.Assign) else ""
        read, later = names_in(value), rest[place + 1 :] if is_once else [text.tree]
        last = (fresh | read_no_more(facts)) - set().union(*map(names_in, later)) | {target}
        names = [name for name in sorted(last & read) if _may_go(facts, name, fresh, rest[:place])]
        for name in [*sorted(names, key=target.__ne__), *([""] if each is failing else [])]:
            first = list[str]()
            new = _in_place(facts, text, name, value, first)
            if new:
                lines = [
                    *first,
                    *([f"{target} = {new}" if target else new] if new != target else []),
                ]
                change = text.replace(each, f"\n{' ' * each.col_offset}".join(lines))
                yield target or f"line {each.lineno}", name, change
                fresh.add(target)
                break
        else:
            is_large = isinstance(value, ast.BinOp) or called_name(value) in {
                *UNARY,
                "cat",
                "stack",
            }
            is_float = any(
                name in fresh or _is_float(facts, name) or name in facts.frames.collections
                for name in read
            )
            fresh = fresh | {target} if is_large and is_float else fresh - {target}


def _is_float(facts: Facts, name: str) -> bool:
    fact = facts.frames.tensors.get(name)
    return fact is not None and "float" in fact.dtype and not (fact.requires_grad or fact.has_graph)


def _is_new(value: ast.AST) -> bool:
    return isinstance(value, ast.BinOp | ast.UnaryOp) or called_name(value) in _NEW


def _may_go(facts: Facts, name: str, fresh: set[str], between: Sequence[ast.stmt]) -> bool:
    """Return whether nothing else may look at a tensor's memory: no other name, no graph, and no view made since."""
    is_shared = any(
        holder.shared_with and name in holder.names for holder in facts.notebook.holders
    )
    # What makes a tensor of its own does not look at another later, as a view or a second name does
    is_seen = any(
        name in names_in(each) and not _is_new(getattr(each, "value", each)) for each in between
    )
    return (name in fresh or _is_float(facts, name)) and not is_shared and not is_seen


def _in_place(facts: Facts, text: CellText, name: str, value: ast.expr, first: list[str]) -> str:
    """Return a value's code with the largest part that can be computed in place, of the tensor `name`, or nothing.

    Without a name the part itself makes the tensor. What has to be done before goes to `first`.
    """
    read = (
        fact
        for each in names_in(value)
        if (fact := facts.frames.tensors.get(each)) is not None and fact.shape
    )
    if len({fact.dtype for fact in read if "float" in fact.dtype}) > 1:
        return ""  # the result has the wider type, and what is written over keeps its own
    for part in (
        node for node in ast.walk(value) if isinstance(node, ast.BinOp | ast.Call | ast.UnaryOp)
    ):
        first.clear()
        code = _steps(facts, text, name, part, first)
        is_all = not name or not re.search(rf"\b{name}\b", substituted(text, value, part, ""))
        if is_all and code not in ("", bracketed(text, part)):
            return substituted(text, value, part, code)
    return ""


def _steps(facts: Facts, text: CellText, name: str, value: ast.expr, first: list[str]) -> str:
    """Return ``name.mul_(2).relu_()`` for ``(name * 2).relu()``, or nothing where it is no such chain.

    To `first` goes what is computed of the old values, then what changes the diagonal only.
    """
    if isinstance(value, ast.Name):
        return value.id if value.id == name else ""
    of, method, given = _last_step(text, name, value)
    before = _steps(facts, text, name, of, first) if of is not None else ""
    if not before:
        made_of = [
            fact for each in names_in(value) if (fact := facts.frames.tensors.get(each)) is not None
        ]
        is_copy = any(
            each.device != facts.event.device or "float" not in each.dtype for each in made_of
        )
        is_made = (isinstance(value, ast.BinOp) and made_of) or (
            called_name(value) in CASTS and is_copy
        )
        return bracketed(text, value) if is_made and not name else ""
    code = ", ".join(map(text.code, given))
    if any(name in names_in(each) for each in given):
        if not _is_new(given[0]):
            return ""  # it may look at what is written over
        if before != name or first:
            first.insert(0, f"{name}_term{len(first) + 1} = {code}")
            code = first[0].partition(" ")[0]
    elif method == "add_" and before == name:
        is_product = isinstance(getattr(given[0], "op", None), ast.Mult)
        *times, of = (given[0].left, given[0].right) if is_product else given
        if called_name(of) == "eye":
            first.append(f"{name}.diagonal()[:] += {text.code(times[0]) if times else 1}")
            return name
    return f"{before}.{method}({code})"


def _last_step(text: CellText, name: str, value: ast.expr) -> tuple[Any, str, list[Any]]:
    """Return what the last step of an expression is of, the method that does it in place, and what that is given."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        return value.operand, "neg_", []
    if isinstance(value, ast.BinOp) and type(value.op) in _SIGNS:
        is_turned = isinstance(value.op, ast.Add | ast.Mult) and name in names_in(
            value.right
        ) - names_in(value.left)
        of, other = (value.right, value.left) if is_turned else (value.left, value.right)
        return of, _SIGNS[type(value.op)], [other]
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and called_name(value) in UNARY
    ):
        given: list[Any] = [*value.args, *value.keywords]
        is_function = value.args and text.code(value.func.value).endswith(FUNCTIONS)
        of, *given = given if is_function else [value.func.value, *given]
        return of, f"{called_name(value)}_", given
    return None, "", []
