"""What training takes on top of the parameters: optimizer state, wide numbers, activations, the logits of the loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import proposal
from gpumagic.oom.rules.facts import Facts, Model, Optimizer, TensorFact
from gpumagic.oom.rules.proposal import backend, find, prepare, propose
from gpumagic.report.units import shape, size
from gpumagic.source.text import CellText, Change, called_name, keyword

FOREACH_EXTRA = 0.87
"""Parameters' worth of temporaries that AdamW's foreach form adds to its loop (measured: 5.00 against 4.13)."""

FUSED_EXTRA = 1.0
"""The same over the fused form (5.00 against 4.00)."""

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
SHARED = ("lr", "weight_decay")
"""Arguments of Adam's that Adafactor has too."""


def one_by_one(facts: Facts) -> Iterator[Advice]:
    """Update one parameter at a time, or fused, when the batched form of Adam ran out."""
    batched = sorted(name for name in facts.scene.functions if name.startswith("_multi_tensor_adam"))
    if not batched:
        return
    adams = [each for each in facts.optimizers if each.kind in ADAMS and not each.fused]
    parameters = sum(each.nbytes for each in adams) or sum(model.nbytes for model in facts.models)
    fused = backend(facts) == "cuda"
    frees = int((FUSED_EXTRA if fused else FOREACH_EXTRA) * parameters) if parameters else None
    missing = _missing_state(adams[0]) if adams else 0
    covers = facts.covers(max(0, frees - missing)) if frees is not None else None
    argument = "fused=True" if fused else "foreach=False"
    title = "Let the optimizer update in place, fused" if fused else "Let the optimizer update one parameter at a time"
    yield propose(
        facts, title, frees=frees, covers=covers, estimated=True,
        evidence=f"it failed in {batched[0]}, which makes copies of all parameters at once",
        cost="none" if fused else "a step of many small parameters takes longer",
        **_switched(facts, adams[0] if adams else None, argument),
    )  # fmt: skip


def leaner(facts: Facts) -> Iterator[Advice]:
    """Use an optimizer with hardly any state, where Adam's is what does not fit."""
    adams = [each for each in facts.optimizers if each.kind in ADAMS]
    if not adams or facts.stage not in ("step", "forward", "backward"):
        return
    found, missing = adams[0], _missing_state(adams[0])
    frees = found.state + (missing if facts.stage == "step" else 0)
    if frees < 1024**2:
        return
    made = _replaced(facts, found)
    if not made:
        return
    yield propose(
        facts, f"Replace {found.kind} by Adafactor", frees=frees, covers=_suffices(facts, found, frees), estimated=True,
        evidence=f"{found.name}'s state takes {size(2 * found.nbytes)}, twice the parameters; "
        + (f"{size(found.state)} of it is there" if found.state else "none of it is there yet"),
        cost="another optimizer: tune the learning rate again; an 8-bit Adam (bitsandbytes) takes a quarter",
        **made,
    )  # fmt: skip


def _missing_state(optimizer: Optimizer) -> int:
    """Return the bytes of state that the first step still has to make."""
    return max(0, 2 * optimizer.nbytes - optimizer.state)


def _suffices(facts: Facts, optimizer: Optimizer, frees: int) -> bool | None:
    if facts.stage != "step" or facts.at_failure is None or facts.usable is None:
        return facts.covers(frees)
    # Adafactor squares the gradient of the largest parameter, and no more.
    return facts.at_failure.allocated - optimizer.state + optimizer.nbytes // 2 <= facts.usable


def _switched(facts: Facts, found: Optimizer | None, argument: str) -> dict[str, Any]:
    """Return the edit that gives the optimizer's constructor an argument, or sets it on the one that is there."""
    if found is None:
        return {"edit": argument}
    name, _, value = argument.partition("=")
    for text, call in _constructors(facts, found):
        flag = keyword(call, name)
        change = text.replace(flag.value, value) if flag is not None else text.add_argument(call, argument)
        other = keyword(call, "foreach") if name == "fused" else None
        return {"text": text, "changes": [change, *([text.replace(other.value, "False")] if other else [])]}
    if found.local:
        return {"edit": argument}
    return {"first": f'for group in {found.name}.param_groups:\n    group["foreach"] = False'}


def _replaced(facts: Facts, found: Optimizer) -> dict[str, Any]:
    for text, call in _constructors(facts, found):
        if len(call.args) != 1:
            return {}
        shared = [each for each in call.keywords if each.arg in SHARED]
        arguments = [text.code(call.args[0]), *(f"{each.arg}={text.code(each.value)}" for each in shared)]
        return {"text": text, "changes": [text.replace(call, f"torch.optim.Adafactor({', '.join(arguments)})")]}
    model = _model_of(facts, found)
    if model is None or found.local:
        return {}
    return {"first": f"{found.name} = torch.optim.Adafactor({model.name}.parameters())"}


def _model_of(facts: Facts, found: Optimizer) -> Model | None:
    same = [model for model in facts.work.models if model.nbytes == found.nbytes and not model.local]
    return same[0] if len(same) == 1 else None


def _constructors(facts: Facts, found: Optimizer) -> Iterator[tuple[CellText, ast.Call]]:
    for text in facts.texts:
        for node in text.nodes():
            if isinstance(node, ast.Call) and called_name(node) == found.kind:
                yield text, node


SAVED = 0.21
"""The share of the activations that autocast saves: measured for GPT-2, whose losses and norms stay in float32."""


def mixed(facts: Facts) -> Iterator[Advice]:
    """Run the forward pass in bfloat16 where the model is float32 and nothing else says so."""
    if facts.cell is None or facts.cell.autocasts or facts.device is None or facts.scene.autocast:
        return
    full = [model for model in facts.models if 2 * model.float32_nbytes > model.nbytes]
    if not full or facts.stage not in ("forward", "backward"):
        return
    header = f'with torch.autocast("{backend(facts)}", dtype=torch.bfloat16):'
    needs, region = proposal.estimate(facts), find(facts)
    copies = sum(model.float32_nbytes for model in full) // 2
    frees = int(needs.batch * SAVED) - copies if needs is not None else None
    if frees is not None and frees <= 0:
        return
    changes = region.text.wrap(region.forward, header) if region is not None else ()
    yield propose(
        facts, "Compute the forward pass in bfloat16", frees=frees, estimated=True,
        covers=needs.covers(frees) if needs is not None and frees is not None else None,
        text=region.text if region is not None else None, changes=changes,
        **({} if changes else {"edit": header}),
        evidence=f"{full[0].name} has {size(full[0].float32_nbytes)} of float32 parameters, the cell uses no autocast; "
        "activations shrink, parameters do not", cost="three digits of precision in the products",
    )  # fmt: skip


def smaller_parameters(facts: Facts) -> Iterator[Advice]:
    """Move a model to the device in half the bytes."""
    text = facts.failing
    if facts.stage != "move" or not facts.work.moving or text is None or facts.usable is None or facts.before is None:
        return
    for node in _moves(text):
        frees = facts.work.moving // 2
        covers = facts.before.allocated - facts.leftover_nbytes + frees <= facts.usable * proposal.MARGIN
        yield propose(
            facts, "Keep the model's parameters in bfloat16", frees=frees, covers=covers,
            text=text, changes=[_with_dtype(text, node, "torch.bfloat16")], first=_back(facts),
            evidence=f"the model being moved has {size(facts.work.moving)} of float32 parameters",
            cost="enough for inference; to train in it loses precision; its inputs must be bfloat16 too",
        )  # fmt: skip
        return


def single(facts: Facts) -> Iterator[Advice]:
    """Move numpy's float64 to the device as float32."""
    text = facts.failing
    for node in _moves(text) if text is not None else ():
        assert text is not None
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        wide = [name for name in names if _is_wide(facts, name)]
        if not wide:
            continue
        half = facts.work.tensors[wide[0]].nbytes // 2
        yield propose(
            facts, f"Keep {wide[0]} in float32 on the device", frees=half,
            covers=facts.room is not None and half <= facts.room,
            text=text, changes=[_with_dtype(text, node, "torch.float32")],
            evidence=f"{wide[0]} is float64, numpy's default, {size(2 * half)}",
            cost="seven digits instead of sixteen; models are float32 anyway",
        )  # fmt: skip
        return


def _back(facts: Facts) -> str | None:
    """Return the code that takes back what of a model had been moved when it failed."""
    return "\n".join(f"{model.name}.cpu()" for model in facts.models if not model.local) or None


def _is_wide(facts: Facts, name: str) -> bool:
    fact = facts.work.tensors.get(name)
    return fact is not None and fact.dtype == "float64" and fact.device == "cpu" and facts.asked_for(fact.nbytes)


def _moves(text: CellText) -> Iterator[ast.Call]:
    """Yield the calls in the failed statement that move something and say no dtype."""
    statement = text.statement_at(text.line)
    for node in ast.walk(statement) if statement is not None else ():
        is_move = isinstance(node, ast.Call) and called_name(node) in ("to", "cuda", "tensor", "as_tensor")
        if is_move and isinstance(node, ast.Call) and not re.search("dtype|float|half", text.code(node)):
            yield node


def _with_dtype(text: CellText, call: ast.Call, dtype: str) -> Change:
    return text.add_argument(call, f"dtype={dtype}")


_WRAP = """\
from functools import partial
from torch.utils.checkpoint import checkpoint
for b in {blocks}:
    b.forward = partial(checkpoint, b.forward, use_reentrant=False)"""


def checkpoint(facts: Facts) -> Iterator[Advice]:
    """Recompute activations in backward, where a training cell spends most of its memory on them."""
    if facts.at_failure is None or not facts.trains or facts.stage not in ("forward", "backward"):
        return
    models = [model for model in facts.models if model.training and not model.checkpoints]
    if not models or "checkpoint" in facts.scene.functions:
        return
    if 2 * facts.transient < facts.at_failure.allocated:
        return
    model, needs = models[0], proposal.estimate(facts)
    frees = _saved(model, needs.batch) if needs is not None else None
    yield propose(
        facts, "Recompute activations in backward instead of keeping them", frees=frees, estimated=True,
        covers=needs.covers(frees) if needs is not None and frees is not None else None,
        evidence=f"{size(facts.transient)} of the {size(facts.at_failure.allocated)} in use were activations",
        cost="a step takes about a fifth longer", **_switch(facts, model),
    )  # fmt: skip


def _saved(model: Model, activations: int) -> int | None:
    """Return what checkpointing every block saves: all but the blocks' inputs, and one block at a time.

    Half of it is promised: that is what came of it with GPT-2, where logits and loss are outside the blocks.
    """
    if model.depth < 2 or model.leaves_in_block < 1:
        return None
    kept = 1 / model.leaves_in_block + 1 / model.depth
    return int(activations * max(0.0, 1 - kept) / 2) or None


def _switch(facts: Facts, model: Model) -> dict[str, Any]:
    if model.checkpoints is False:
        return prepare(facts, model.name, f"{model.name}.gradient_checkpointing_enable()")
    if model.blocks is not None:
        return prepare(facts, model.name, _WRAP.format(blocks=model.blocks))
    return {"edit": "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"}


WIDE = 1000
"""Classes from which the logits are worth a word."""

PARTS = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """``cross_entropy(head(hidden), labels)``, with the logits inside or on the line before."""

    call: ast.Call
    made: ast.expr
    """The expression that makes the logits."""
    hidden: ast.Name
    labels: ast.Name
    line_before: ast.Assign | None = None


def in_parts(facts: Facts) -> Iterator[Advice]:
    """Make the logits of a part of the tokens at a time."""
    text = facts.failing
    found = next(filter(None, (_loss(text, node) for node in text.nodes())), None) if text is not None else None
    logits = _logits(facts, text, found)
    if text is None or logits is None or len(logits.shape) != 2 or logits.shape[1] < WIDE:
        return
    frees = 2 * logits.nbytes * (PARTS - 1) // PARTS
    yield propose(
        facts, f"Make the logits in {PARTS} parts" if found else "Make the logits a part of the tokens at a time",
        frees=frees, estimated=True, text=text, changes=_divided(facts, text, found) if found else (),
        evidence=f"{shape(logits.shape)} of logits are {size(logits.nbytes)}; the loss makes as much again, "
        "and backward once more", cost="the head runs twice; fused losses (Liger) avoid that",
    )  # fmt: skip


def _logits(facts: Facts, text: CellText | None, loss: Loss | None) -> TensorFact | None:
    """Return the logits of the loss that failed, or whose backward asked for their gradients."""
    if facts.work.function in ("cross_entropy", "log_softmax", "nll_loss"):
        return facts.work.operands.get("input")
    if text is None or loss is None or facts.stage != "backward":
        return None
    named = (facts.work.tensors.get(text.code(each)) for each in (_without_upcast(loss.call.args[0]), loss.made))
    return next((fact for fact in named if fact is not None and facts.asked_for(fact.nbytes)), None)


def _loss(text: CellText, node: ast.AST) -> Loss | None:
    if not isinstance(node, ast.Call) or called_name(node) != "cross_entropy" or len(node.args) != 2 or node.keywords:
        return None
    labels, logits = node.args[1], _without_upcast(node.args[0])
    if not isinstance(labels, ast.Name):
        return None
    if isinstance(logits, ast.Name):
        return _from_line_before(text, node, logits, labels)
    hidden = _hidden(logits)
    return Loss(node, logits, hidden, labels) if hidden is not None else None


def _from_line_before(text: CellText, call: ast.Call, logits: ast.Name, labels: ast.Name) -> Loss | None:
    """Return the loss whose logits a line of their own makes, if nothing else reads them."""
    uses = [node for node in text.nodes() if isinstance(node, ast.Name) and node.id == logits.id]
    if len(uses) != 2:
        return None
    for node in text.nodes():
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and node.targets[0] in uses:
            made = _without_upcast(node.value)
            hidden = _hidden(made)
            if hidden is not None and text.stands_alone(node):
                return Loss(call, made, hidden, labels, node)
    return None


def _without_upcast(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Call) and called_name(node) == "float" and isinstance(node.func, ast.Attribute):
        return node.func.value
    return node


def _hidden(node: ast.expr) -> ast.Name | None:
    """Return the states in ``head(states)`` or ``states @ table``."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return node.args[0] if isinstance(node.args[0], ast.Name) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left if isinstance(node.left, ast.Name) else None
    return None


def _divided(facts: Facts, text: CellText, loss: Loss) -> Sequence[Change]:
    states, labels = loss.hidden.id, loss.labels.id
    fact: TensorFact | None = facts.work.tensors.get(states)
    if fact is None or len(fact.shape) != 2:
        return ()
    step = f'{text.code(loss.call.func)}({_renamed(text, loss)}, y_part, reduction="sum")'
    lines = [f"    {step}"]
    if facts.trains:
        lines = ["    torch.utils.checkpoint.checkpoint(", f"        lambda h_part, y_part: {step},",
                 "        h_part, y_part, use_reentrant=False)"]  # fmt: skip
    lines = ["(sum(", *lines, f"    for h_part, y_part in zip({states}.chunk({PARTS}), {labels}.chunk({PARTS})))"]
    margin = "\n" + text.indent_of(loss.call)
    changes = [text.replace(loss.call, f"{margin.join(lines)} / ({labels} != -100).sum())")]
    if loss.line_before is not None:
        changes.append(_removed(text, loss.line_before))
    return changes


def _renamed(text: CellText, loss: Loss) -> str:
    """Return the code of the logits with the states' part in the states' place."""
    code = text.code(loss.made)
    if isinstance(loss.made, ast.BinOp):
        return f"h_part{code[len(text.code(loss.hidden)) :]}"
    assert isinstance(loss.made, ast.Call)
    return f"{text.code(loss.made.func)}(h_part)"


def _removed(text: CellText, line: ast.Assign) -> Change:
    """Return the change that leaves `pass` of a statement, which keeps the number of every other line."""
    start = text.replace(line.targets[0], "pass")
    return Change(start.line, start.column, text.code(line), "pass", text.cell)
