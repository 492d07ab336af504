"""Less at a time or elsewhere: a smaller batch, part of the data, a shallower model, another or a larger device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from gpumagic.dryrun.report import DryRunReport
from gpumagic.oom.report import Advice
from gpumagic.oom.rules import proposal
from gpumagic.oom.rules.facts import BatchSize, Facts, Loader
from gpumagic.oom.rules.proposal import Region, backend, called_models, find, propose, read_tensors
from gpumagic.report.units import count, size, size_pair
from gpumagic.source.cell_code import defaults
from gpumagic.source.text import CellText, Change, called_name, names_in


def smaller(facts: Facts) -> Iterator[Advice]:
    """Lower the batch the cell works with to what fits by dry runs, or else by a linear law."""
    found = at_work(facts)
    if found is None:
        return
    if facts.dry_run is not None and facts.dry_run.largest is not None:
        yield from _dry_run(facts, found, facts.dry_run)
        return
    needs = proposal.estimate(facts)
    if needs is not None and needs.share <= 0:
        return  # what does not depend on the batch is too much already
    share = min(needs.share, 0.95) if needs is not None else 0.5
    value = min(proposal.sensible(found.value * share), found.value - 1)
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


def _dry_run(facts: Facts, found: BatchSize, report: DryRunReport) -> Iterator[Advice]:
    """Lower it to what was dry-run and fits; say nothing where what there is now fits."""
    if report.largest is None or report.search is None or report.largest >= found.value:
        return
    value = facts.roundest or report.largest
    peaks = {trial.value: trial.peak for trial in report.search.trials}
    steps = -(-found.value // value)
    fits = size_pair(peaks[report.largest], report.capacity).replace(" / ", " of ")
    assumed = f"; assumed: {'; '.join(report.assumed)}" if report.assumed else ""
    yield propose(
        facts, f"Lower {_called(found)} from {found.value} to {value}", covers=True,
        frees=max(0, peaks[report.search.now] - peaks[report.largest]),
        evidence=f"by dry runs {found.name}={report.largest} fits: {fits}{assumed}",
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


def _running(text: CellText) -> Iterator[ast.AST]:
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


def _changes(text: CellText, found: BatchSize, value: int, steps: int) -> Iterator[Change]:
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


def accumulate(facts: Facts) -> Iterator[Advice]:
    """Train on parts of the data and let their gradients add up."""
    if facts.batches or not facts.trains or facts.stage not in ("forward", "backward", "other"):
        return
    needs, region = proposal.estimate(facts), find(facts)
    if needs is None or region is None or region.backward is None or not 0 < needs.share < 1:
        return
    if not all(isinstance(each, ast.Assign) or each is region.backward for each in region.through_backward):
        return  # a sum or a step in between would be made once for each part
    if any(_mixes_rows(node) for each in region.through_backward for node in ast.walk(each)):
        return
    names = _divisible(facts, region)
    if not names:
        return
    parts = proposal.parts_that_fit(needs.share)
    frees = int(needs.batch * (1 - 1 / parts))
    yield propose(
        facts, f"Train on {parts} parts of {', '.join(names)}, one after the other", frees=frees, estimated=True,
        covers=needs.covers(frees), text=region.text, changes=_loop(region, names, parts),
        evidence=f"{names[0]} has {count(facts.work.tensors[names[0]].shape[0], 'row')}, all in one step",
        cost="the gradients add up to the same, but for batch norm; the pass takes a little longer",
    )  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Advice]:
    """Run a model over parts of the data where nothing is trained."""
    text, needs = facts.failing, proposal.estimate(facts)
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
        rows = proposal.sensible(fact.shape[0] * needs.share * 0.75)  # the results of all parts are there at the end
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
    return called_name(node) in ("t", "transpose", "matmul", "mm", "bmm", "einsum", "cdist", "zero_grad", "step")


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


SIZES = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 256, 288)
"""Memory of the GPUs one can have, in GiB."""


def other_device(facts: Facts) -> Iterator[Advice]:
    """Run the cell where all that it uses, made and asked for has room."""
    needed = _needed(facts)
    if not facts.free_elsewhere or needed is None:
        return
    device = max(facts.free_elsewhere, key=lambda each: facts.free_elsewhere[each])
    if facts.free_elsewhere[device] < needed or any(optimizer.state for optimizer in facts.optimizers):
        return  # an optimizer's state would have to move with its parameters, and has no method for it
    moved = [each for each in facts.brought if each.kind in ("module", "tensor")]
    if len(moved) < len([each for each in facts.brought if each.kind != "optimizer"]):
        return
    names = ", ".join(each.name for each in moved)
    yield propose(
        facts, f"Run the cell on {device}" + (f", with {names} moved there" if moved else ""), covers=True,
        evidence=f"{device} has {size(facts.free_elsewhere[device])} free; the cell needed at least {size(needed)}",
        cost=f"{names} {'are' if len(moved) > 1 else 'is'} on {device} then" if moved else "none",
        **_redirected(facts, device),
    )  # fmt: skip


def larger(facts: Facts) -> Iterator[Advice]:
    """Name the size of a device on which the cell would have run."""
    needs = proposal.estimate(facts)
    if facts.capacity is None or facts.memory != "device" or needs is None or facts.cell is None:
        return
    needed = int((needs.fixed + needs.batch - facts.leftover_nbytes) / proposal.MARGIN)
    size_ = next((each for each in SIZES if each << 30 >= needed), None)
    if size_ is None or needed <= facts.capacity or facts.requested == facts.short:
        return
    yield propose(
        facts, f"Use a GPU with {size_} GiB or more", covers=True, estimated=True, edit=None,
        evidence=f"the cell needs about {size(needed)} as it is; {facts.device} has {size(facts.capacity)}",
        cost="another machine",
    )  # fmt: skip


def divided(facts: Facts) -> Iterator[Advice]:
    """Divide each batch among the devices of the machine."""
    needs = proposal.estimate(facts)
    if not facts.trains or needs is None or backend(facts) not in ("cuda", "xpu") or facts.stage == "step":
        return
    devices = 1 + sum(free >= needs.fixed + needs.batch // 2 for free in facts.free_elsewhere.values())
    if devices < 2:
        return
    frees = needs.batch * (devices - 1) // devices
    yield propose(
        facts, f"Divide each batch among {devices} devices (DistributedDataParallel)", frees=frees,
        covers=needs.covers(frees), estimated=True, cost="a script of its own, started by torchrun",
        evidence=f"each has room for the model and its share of the {size(needs.batch)} of activations",
    )  # fmt: skip


def _needed(facts: Facts) -> int | None:
    if facts.requested is None or facts.at_failure is None:
        return None
    seen = facts.at_failure.allocated - facts.leftover_nbytes + facts.requested
    needs = proposal.estimate(facts)
    return max(
        int(seen / proposal.MARGIN), needs.fixed + needs.batch - facts.leftover_nbytes if needs is not None else 0
    )


def _redirected(facts: Facts, device: str) -> dict[str, Any]:
    """Return the edit: the device's name in the cell, the variables that hold it, and what has to move."""
    first = [f'{name} = "{device}"' for name in facts.device_names]
    first += [_move(each.name, each.kind, device) for each in facts.brought if each.kind in ("module", "tensor")]
    text = facts.text
    changes = list(_renamed(facts, text, device)) if text is not None else []
    if not changes and not facts.device_names:
        magic = f"%%ondevice {device}"
        return {
            "first": "\n".join(first) or None,
            "changes": [Change(1, 0, "", f"{magic}\n")],
            "edit": magic,
        }
    return {"first": "\n".join(first) or None, "text": text, "changes": changes}


def _move(name: str, kind: str, device: str) -> str:
    return f'{name}.to("{device}")' if kind == "module" else f'{name} = {name}.to("{device}")'


def _renamed(facts: Facts, text: CellText, device: str) -> Iterator[Change]:
    own = {facts.device, backend(facts) if (facts.device or "").endswith(":0") else facts.device}
    for node in text.nodes():
        if isinstance(node, ast.Constant) and node.value in own and isinstance(node.value, str):
            yield text.replace(node, f'"{device}"')
        elif isinstance(node, ast.Call) and called_name(node) == backend(facts) and not node.args:  # x.cuda()
            yield text.add_argument(node, device.partition(":")[2])


_DEPTH = re.compile(r"^((n|num|number)_?(of_)?((hidden|encoder|decoder)_)?(layers?|blocks)|depth)$", re.IGNORECASE)


def shallower(facts: Facts) -> Iterator[Advice]:
    """Make fewer layers: parameters grow with them in proportion."""
    if facts.stage != "move" or not facts.work.moving or facts.usable is None or facts.before is None:
        return
    room = int(facts.usable * proposal.MARGIN) - facts.before.allocated + facts.leftover_nbytes
    for text in facts.texts:
        for name, literal in _depths(text):
            layers = int(literal.value)  # type: ignore[arg-type]
            fewer = int(layers * room / facts.work.moving)
            if not 1 <= fewer < layers:
                continue
            yield propose(
                facts, f"Make the model smaller: {name} from {layers} to {fewer}",
                frees=facts.work.moving * (layers - fewer) // layers, covers=True, estimated=True,
                text=text, changes=[text.replace(literal, str(fewer))],
                evidence=f"its parameters take {size(facts.work.moving)}; there is room for {size(room)}",
                cost="a smaller model; training it takes its size again for gradients, and twice for Adam",
            )  # fmt: skip
            return


def _depths(text: CellText) -> Iterator[tuple[str, ast.Constant]]:
    for node in text.nodes():
        name = node.arg if isinstance(node, ast.keyword) else None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        value = node.value if isinstance(node, ast.keyword | ast.Assign) else None
        if name is not None and _DEPTH.match(name) and isinstance(value, ast.Constant) and type(value.value) is int:
            yield name, value
