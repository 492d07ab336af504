"""All of the data at once, where nothing says how large a batch is: the same in parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import law
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.oom.rules.region import Region, called_models, find, read_tensors
from gpumagic.report.units import count
from gpumagic.source.text import Change, called


def accumulate(facts: Facts) -> Iterator[Advice]:
    """Train on parts of the data and let their gradients add up."""
    if facts.batches or not facts.trains or facts.stage not in ("forward", "backward", "other"):
        return
    needs, region = law.estimate(facts), find(facts)
    if needs is None or region is None or region.backward is None or not 0 < needs.share < 1:
        return
    if not all(isinstance(each, ast.Assign) or each is region.backward for each in region.through_backward):
        return  # a sum or a step in between would be made once for each part
    if any(_mixes_rows(node) for each in region.through_backward for node in ast.walk(each)):
        return
    names = _divisible(facts, region)
    if not names:
        return
    parts = law.parts(needs.share)
    frees = int(needs.batch * (1 - 1 / parts))
    yield propose(
        facts, f"Train on {parts} parts of {', '.join(names)}, one after the other", frees=frees, estimated=True,
        covers=needs.covers(frees), text=region.text, changes=_loop(region, names, parts),
        evidence=f"{names[0]} has {count(facts.work.tensors[names[0]].shape[0], 'row')}, all in one step",
        cost="the gradients add up to the same, but for batch norm; the pass takes a little longer",
    )  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Advice]:
    """Run a model over parts of the data where nothing is trained."""
    text, needs = facts.failing, law.estimate(facts)
    statement = text.statement_at(text.line) if text is not None else None
    if text is None or statement is None or needs is None or facts.batches or facts.trains or not 0 < needs.share < 1:
        return
    sequential = {model.name for model in facts.models if model.sequential}
    for call in called_models(facts, statement):
        argument = call.args[0] if len(call.args) == 1 and not call.keywords else None
        fact = facts.work.tensors.get(argument.id) if isinstance(argument, ast.Name) else None
        if not isinstance(argument, ast.Name) or fact is None or not fact.shape:
            continue
        if text.code(call.func) not in sequential:
            continue  # what others return may be no tensor
        rows = law.sensible(fact.shape[0] * needs.share * 0.75)  # the results of all parts are there at the end
        if not 1 <= rows < fact.shape[0]:
            continue
        frees = int(needs.batch * (1 - rows / fact.shape[0]))
        model = text.code(call.func)
        yield propose(
            facts, f"Run {model} over {rows} rows at a time", frees=frees, covers=needs.covers(frees), estimated=True,
            text=text, cost="none but a little time",
            changes=[text.replace(call, f"torch.cat([{model}(part) for part in {argument.id}.split({rows})])")],
            evidence=f"{argument.id} has {count(fact.shape[0], 'row')}, all at once",
        )  # fmt: skip
        return


def _mixes_rows(node: ast.AST) -> bool:
    """Return whether an operation may compare rows with one another, so that parts of the data have another loss."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if isinstance(node, ast.Attribute):
        return node.attr in ("T", "mT")
    return called(node) in ("t", "transpose", "matmul", "mm", "bmm", "einsum", "cdist", "zero_grad", "step")


def _divisible(facts: Facts, region: Region) -> list[str]:
    """Return the tensors that the region reads and that have the data's length, the first one it reads first."""
    if not any(any(called_models(facts, each)) for each in region.forward):
        return []
    found = {node.id: facts.work.tensors[node.id] for node in read_tensors(region) if node.id in facts.work.tensors}
    length = next((fact.shape[0] for fact in found.values() if fact.shape), 0)
    data = {name: fact for name, fact in found.items() if fact.shape and fact.shape[0] == length}
    if length < 2 or any(fact.requires_grad or fact.graph for fact in data.values()):
        return []
    return list(data)


def _loop(region: Region, names: list[str], parts: int) -> list[Change]:
    """Return the changes that put the region into a loop over parts of these names."""
    text = region.text
    targets = ", ".join(f"{name}_part" for name in names)
    chunks = ", ".join(f"{name}.chunk({parts})" for name in names)
    source = f"zip({chunks})" if len(names) > 1 else chunks
    changes = list(text.wrap(region.through_backward, f"for {targets} in {source}:"))
    if not changes:
        return []
    changes += [text.append(node, "_part") for node in read_tensors(region) if node.id in names]
    return [*changes, *_divided(region, parts)]


def _divided(region: Region, parts: int) -> Iterator[Change]:
    """Yield the change that divides the loss by the number of parts; a sum needs none."""
    text = region.text
    if any("sum" in text.code(each) for each in region.through_backward) or region.backward is None:
        return
    for node in ast.walk(region.backward):
        if isinstance(node, ast.Call) and called_backward(node) and isinstance(node.func, ast.Attribute):
            loss = node.func.value
            if isinstance(loss, ast.Name):
                yield text.replace(loss, f"({loss.id} / {parts})")
            else:
                yield text.append(loss, f".div({parts})")


def called_backward(node: ast.Call) -> bool:
    """Return whether it is ``something.backward(...)``."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
