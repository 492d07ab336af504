"""A smaller batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gpumagic.dryrun.report import Fit
from gpumagic.oom.report import Advice
from gpumagic.oom.rules import law
from gpumagic.oom.rules.facts import BatchSize, Facts, Loader
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import count, size
from gpumagic.source.cell_code import defaults
from gpumagic.source.text import Change, Text, names_in


def smaller(facts: Facts) -> Iterator[Advice]:
    """Lower the batch the cell works with to what a rehearsal, or else the linear law, lets fit."""
    found = at_work(facts)
    if found is None:
        return
    if facts.rehearsed is not None and facts.rehearsed.largest is not None:
        yield from _rehearsed(facts, found, facts.rehearsed)
        return
    needs = law.estimate(facts)
    if needs is not None and needs.share <= 0:
        return  # what does not depend on the batch is too much already
    share = min(needs.share, 0.95) if needs is not None else 0.5
    value = min(law.sensible(found.value * share), found.value - 1)
    steps = -(-found.value // value)
    frees = int(needs.batch * (1 - value / found.value)) if needs is not None else None
    yield propose(
        facts, f"Lower {_called(found)} from {found.value} to {value}", frees=frees,
        covers=needs.covers(frees) if needs is not None and frees is not None else None,
        evidence=_evidence(found), estimated=True,
        cost=f"accumulate {count(steps, 'step')} for the same gradient" if facts.trains else "more turns of the loop",
        **_edit(facts, found, value, steps),
    )  # fmt: skip


def at_work(facts: Facts) -> BatchSize | None:
    """Return the batch size that what failed has to do with, or None."""
    if not facts.batches or facts.memory != "device" or facts.stage in ("step", "move", "load"):
        return None
    return facts.batches[0] if _is_at_work(facts, facts.batches[0]) else None


def _rehearsed(facts: Facts, found: BatchSize, fit: Fit) -> Iterator[Advice]:
    """Lower it to what has been rehearsed; say nothing where what there is now fits."""
    if fit.largest is None or fit.peak is None or fit.largest >= found.value:
        return
    value = facts.roundest or fit.largest
    needs = int(fit.base + fit.each * found.value)
    steps = -(-found.value // value)
    of = f" of {size(fit.capacity)}" if fit.capacity is not None else ""
    assumed = f"; assumed: {'; '.join(fit.assumed)}" if fit.assumed else ""
    yield propose(
        facts, f"Lower {_called(found)} from {found.value} to {value}", covers=True,
        frees=max(0, needs - int(fit.base + fit.each * value)),
        evidence=f"rehearsed: {found.name}={fit.largest} fits, {size(fit.peak)}{of}{assumed}",
        cost=f"accumulate {count(steps, 'step')} for the same gradient" if facts.trains else "more turns of the loop",
        **_edit(facts, found, value, steps),
    )  # fmt: skip


def _is_at_work(facts: Facts, found: BatchSize) -> bool:
    """Return whether what failed has to do with the batch: a model ran, a tensor has its length, the line names it."""
    if facts.stage in ("forward", "backward"):
        return True
    tensors = (*facts.work.tensors.values(), *facts.work.operands.values())
    if any(fact.shape[:1] == (found.value,) and fact.device == facts.device for fact in tensors):
        return True
    return any(found.name in names_in(node) for text in facts.texts for node in _running(text))


def _running(text: Text) -> Iterator[ast.AST]:
    """Yield the statement that failed, and what the loops around it go over."""
    statement = text.statement_at(text.line)
    if statement is None:
        return
    yield statement.iter if isinstance(statement, ast.For) else statement
    for node in text.nodes():
        if isinstance(node, ast.For) and node.lineno < statement.lineno <= (node.end_lineno or 0):
            yield node.iter


def _called(found: BatchSize) -> str:
    return f"{found.name}'s batch_size" if found.loader else found.name


def _edit(facts: Facts, found: BatchSize, value: int, steps: int) -> dict[str, Any]:
    if found.loader:
        loader = next((each for each in facts.loaders if each.name == found.name), Loader(found.name, found.value))
        return {"first": remake(loader, batch_size=value)}
    for text in facts.texts:
        changes = list(_changes(text, found, value, steps))
        if changes:
            return {"text": text, "changes": changes}
    return {"first": f"{found.name} = {value}"}


def _changes(text: Text, found: BatchSize, value: int, steps: int) -> Iterator[Change]:
    if text.cell != found.cell:
        return
    for node in text.nodes():
        for literal in _literals(node, found.name):
            if literal.value == found.value:
                yield text.replace(literal, str(value))
        for accumulated in _literals(node, "gradient_accumulation_steps") if "train" in found.name else ():
            if type(accumulated.value) is int:
                yield text.replace(accumulated, str(accumulated.value * steps))


def _literals(node: ast.AST, name: str) -> Iterator[ast.Constant]:
    """Yield the number that an argument, a default or an assignment of this name gives."""
    values: list[ast.expr] = []
    if isinstance(node, ast.keyword):
        values = [node.value] if node.arg == name else []
    elif isinstance(node, ast.Assign):
        values = [node.value] if any(isinstance(each, ast.Name) and each.id == name for each in node.targets) else []
    elif isinstance(node, ast.arguments):
        values = [default for argument, default in defaults(node) if argument == name]
    yield from (value for value in values if isinstance(value, ast.Constant))


def remake(loader: Loader, **changed: object) -> str:
    """Return the code that makes a DataLoader anew with other arguments."""
    name = loader.name
    arguments = {
        "batch_size": loader.batch_size,
        **({"shuffle": True} if loader.shuffles else {}),
        **({"num_workers": loader.workers} if loader.workers else {}),
        **({"pin_memory": True} if loader.pins else {}),
        **({"drop_last": True} if loader.drops_last else {}),
        **changed,
    }
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    listed += f", sampler={name}.sampler" if loader.samples else ""
    return f"{name} = torch.utils.data.DataLoader({name}.dataset, {listed}, collate_fn={name}.collate_fn)"


def _evidence(found: BatchSize) -> str:
    if found.loader:
        return f"{found.name} is a DataLoader of batches of {found.value}"
    if found.line is not None:
        where = f"line {found.line}" + (f" of {found.cell}" if found.cell else "")
        return f"{where} says {found.name}={found.value}"
    return f"the cell uses {found.name}, which is {found.value}"
