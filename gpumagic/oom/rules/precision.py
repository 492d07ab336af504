"""Smaller numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import law
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import backend, propose
from gpumagic.oom.rules.region import find
from gpumagic.report.units import size
from gpumagic.source.text import Change, Text, called

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
    needs, region = law.estimate(facts), find(facts)
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
        covers = facts.before.allocated - facts.leftover_nbytes + frees <= facts.usable * law.MARGIN
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


def _moves(text: Text) -> Iterator[ast.Call]:
    """Yield the calls in the failed statement that move something and say no dtype."""
    statement = text.statement_at(text.line)
    for node in ast.walk(statement) if statement is not None else ():
        is_move = isinstance(node, ast.Call) and called(node) in ("to", "cuda", "tensor", "as_tensor")
        if is_move and isinstance(node, ast.Call) and not re.search("dtype|float|half", text.code(node)):
            yield node


def _with_dtype(text: Text, call: ast.Call, dtype: str) -> Change:
    return text.add_argument(call, f"dtype={dtype}")
