"""What training takes on top of the parameters: optimizer state, wide numbers, activations, the logits of the loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gpumagic._compat import torch_frames
from gpumagic.advice.facts import Facts, Model, Optimizer, Stage
from gpumagic.advice.records import FREE, Advice, NoCost
from gpumagic.advice.rules import loops
from gpumagic.advice.rules.proposal import (
    Edit,
    Remedy,
    backend,
    merge_edits,
    prepare,
    propose,
    with_keywords,
)
from gpumagic.advice.rules.regions import (
    calls,
    does,
    failed,
    find,
    in_a_pass,
    loop_around,
)
from gpumagic.backends import backend_named
from gpumagic.report.units import LARGE, size
from gpumagic.source.text import CellText, keyword

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
SHARED = ("lr", "weight_decay")
"""Arguments of Adam's that other optimizers have too."""


def one_by_one(facts: Facts) -> Iterator[Advice]:
    """Update one parameter at a time, or fused, where the batched form of Adam makes copies of all parameters.

    Fused where the cell makes the optimizer on a GPU of CUDA's. One that has taken steps keeps the number of each in
    the host's memory, where the fused form does not take it, so it is told to update one parameter at a time.
    """
    if not _fails_in_copies(facts) and not (facts.frames.trains and in_a_pass(facts)):
        return
    optimizer = next(
        (
            known
            for known in facts.notebook.optimizers
            if known.kind in ADAMS and not known.fused
        ),
        None,
    )
    kinds = [optimizer.kind] if optimizer is not None else ADAMS
    text, call = next(calls(facts.frames.texts, *kinds), (None, None))
    if text is not None and call is not None:
        edit = _constructed_in_place(facts, text, call)
    elif optimizer is not None and not optimizer.local:
        groups = f"for group in {optimizer.name}.param_groups:"
        edit = {"first": f'{groups}\n    group["foreach"] = False'}
    elif optimizer is not None or _fails_in_copies(facts):
        edit = {
            "edit": "fused=True" if _has_fused_optimizers(facts) else "foreach=False"
        }
    else:
        return
    if not edit:
        return
    is_fused = _has_fused_optimizers(facts) and "first" not in edit
    if is_fused:
        title = "Let the optimizer update in place, fused"
        cost: str | NoCost = FREE
    else:
        title = "Let the optimizer update one parameter at a time"
        cost = "a step of many small parameters takes longer"
    evidence = "its step makes copies of all parameters at once"
    yield propose(title, evidence=evidence, cost=cost, **edit)


def _has_fused_optimizers(facts: Facts) -> bool:
    return backend_named(backend(facts)).has_fused_optimizers


def _fails_in_copies(facts: Facts) -> bool:
    return any(
        name.startswith(torch_frames.IN_FOREACH_ADAM) for name in facts.frames.functions
    )


def _constructed_in_place(facts: Facts, text: CellText, call: ast.Call) -> Edit:
    """Return the edit of Adam's construction, fused on CUDA; nothing where it says so already."""
    if _has_fused_optimizers(facts):
        arguments = {"fused": "True"}
        if keyword(call, "foreach") is not None:
            arguments["foreach"] = "False"
        name = "fused"
    else:
        arguments = {"foreach": "False"}
        name = "foreach"
    given = keyword(call, name)
    if given is not None and text.code(given.value) == arguments[name]:
        return {}
    return {"text": text, "changes": with_keywords(text, call, **arguments)}


def leaner(facts: Facts) -> Iterator[Advice]:
    """Use an optimizer with less state, where Adam's is what does not fit: the least intrusive first."""
    trainer = facts.notebook.trainer
    if trainer is not None and trainer.library == "transformers":
        edit = loops.argument(facts, "adafactor")
        if edit:
            cost = "another optimizer: tune the learning rate again"
            yield propose("Replace AdamW by Adafactor", cost=cost, **edit)
        return
    adam = next(
        (known for known in facts.notebook.optimizers if known.kind in ADAMS), None
    )
    if adam is None or 2 * adam.nbytes < LARGE:
        return
    if facts.frames.stage is not Stage.STEP and not in_a_pass(facts):
        return
    if adam.state_nbytes:
        there = f"{size(adam.state_nbytes)} of it is there"
    else:
        there = "none is allocated yet"
    replacements = {
        "Adafactor": "another optimizer",
        "SGD": "no state at all, and slower to converge",
    }
    for name, loss in replacements.items():
        edit = _replaced(facts, adam, f"torch.optim.{name}")
        if edit:
            yield propose(
                f"Replace {adam.kind} by {name}",
                cost=f"{loss}: tune the learning rate again",
                **edit,
                evidence=f"{adam.name}'s state takes {size(2 * adam.nbytes)}, twice the parameters; {there}",
            )
    edit = _with_sparse_embeddings(facts, adam)
    if edit:
        yield propose(
            f"Replace {adam.kind} by SGD, with sparse gradients of embeddings",
            **edit,
            cost="no state at all, and slower to converge: tune the learning rate again",
            evidence="a step changes only the rows that it looks up, and the gradient has all of the table's",
        )


def _replaced(facts: Facts, old: Optimizer, constructor: str) -> Edit:
    """Return the edit that makes another optimizer where the cell makes this one, else before it."""
    text, call = next(calls(facts.frames.texts, old.kind), (None, None))
    if text is not None and call is not None:
        if len(call.args) != 1:
            return {}
        shared = [argument for argument in call.keywords if argument.arg in SHARED]
        settings = [
            f"{argument.arg}={text.code(argument.value)}" for argument in shared
        ]
        new = f"{constructor}({', '.join([text.code(call.args[0]), *settings])})"
        return {"text": text, "changes": [text.replace(call, new)]}
    models = [
        model
        for model in facts.frames.models_alive
        if model.nbytes == old.nbytes and not model.local
    ]
    if len(models) != 1 or old.local:
        return {}
    return {"first": f"{old.name} = {constructor}({models[0].name}.parameters())"}


def _with_sparse_embeddings(facts: Facts, old: Optimizer) -> Edit:
    """Return the edit by which large embeddings have sparse gradients, with an optimizer that takes them."""
    optimizer = _replaced(facts, old, "torch.optim.SGD")
    if not optimizer:
        return {}
    edits: list[Edit] = []
    for model in facts.notebook.models:
        if model.embeddings and model.name in old.models and not model.local:
            settings = "\n".join(
                f"{embedding}.sparse = True" for embedding in model.embeddings
            )
            edits.append(prepare(facts, model.name, settings))
    if not edits:
        return {}
    edits.append(optimizer)
    texts = (edit.get("text") for edit in edits)
    cells = {text.cell for text in texts if text is not None}
    return merge_edits(*edits) if len(cells) < 2 else {}


def _autocast(facts: Facts) -> str:
    return f'with torch.autocast("{backend(facts)}", dtype=torch.bfloat16):'


def mixed(facts: Facts) -> Iterator[Advice]:
    """Run the forward pass in bfloat16 where the model is float32 and nothing else says so."""
    title = "Compute the forward pass in bfloat16"
    cost = "three digits of precision in the products"
    if facts.notebook.trainer is not None:
        edit = loops.argument(facts, "bfloat16")
        if edit:
            yield propose(title, cost=cost, **edit)
        return
    frames = facts.frames
    if frames.cell is None or frames.cell.autocasts or frames.mentions_autocast:
        return
    if frames.stage not in (Stage.FORWARD, Stage.BACKWARD, Stage.OTHER):
        return
    wide = [
        model
        for model in facts.notebook.models
        if 2 * model.float32_nbytes > model.nbytes
    ]
    if not wide:
        yield from _mixed_product(facts)
    elif in_a_pass(facts):
        edit = {"edit": _autocast(facts)}
        region = find(facts)
        if region is not None:
            changes = region.text.wrap(region.computed, _autocast(facts))
            if changes:
                edit = {"text": region.text, "changes": changes}
        parameters = (
            f"{wide[0].name} has {size(wide[0].float32_nbytes)} of float32 parameters"
        )
        yield propose(
            title,
            cost=cost,
            **edit,
            evidence=f"{parameters}, the cell uses no autocast; activations shrink, parameters do not",
        )


def _mixed_product(facts: Facts) -> Iterator[Advice]:
    """Compute the product that failed in bfloat16."""
    for text, statement in failed(facts):
        product = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(product, ast.BinOp) and isinstance(product.op, ast.MatMult):
            yield propose(
                f"Compute line {statement.lineno} in bfloat16",
                text=text,
                changes=text.wrap([statement], _autocast(facts)),
                cost="three digits of precision in its result",
                evidence=f"a product of float32 matrices, {size(facts.event.requested)}",
            )


_MOVES = ("to", "cuda", "tensor", "as_tensor")


def _says_no_dtype(text: CellText, call: ast.Call) -> bool:
    return not re.search("dtype|float|half", text.code(call))


smaller_parameters = Remedy(
    "Keep the model's parameters in bfloat16",
    lambda facts: facts.frames.stage is Stage.MOVE and facts.frames.moved_nbytes,
    lambda facts, *_: (
        f"the model being moved has {size(facts.frames.moved_nbytes)} of float32 parameters"
    ),
    "enough for inference; training in it loses precision; its inputs must be bfloat16 too",
    first=lambda facts, *_: "\n".join(
        f"{model.name}.cpu()" for model in facts.notebook.models if not model.local
    ),
    argument="dtype=torch.bfloat16",
    calls=_MOVES,
    in_line=True,
    of=lambda _, text, call, *__: _says_no_dtype(text, call),
)


def _float64_name(facts: Facts, call: ast.Call) -> str:
    """Return the name of what a call moves of float64 on the host, if anything."""
    for node in ast.walk(call):
        if isinstance(node, ast.Name):
            fact = facts.frames.tensors.get(node.id)
            if fact is not None and fact.dtype == "float64" and fact.device == "cpu":
                return node.id
    return ""


def _float64_evidence(facts: Facts, _: CellText, call: ast.Call, __: str) -> str:
    name = _float64_name(facts, call)
    nbytes = facts.frames.tensors[name].nbytes
    return f"{name} is float64, numpy's default, {size(nbytes)}"


single = Remedy(
    lambda facts, _, call, *__: (
        f"Keep {_float64_name(facts, call)} in float32 on the device"
    ),
    lambda facts: facts.frames.tensors,
    _float64_evidence,
    "seven digits instead of sixteen; models are float32 anyway",
    argument="dtype=torch.float32",
    calls=_MOVES,
    of=lambda facts, text, call, _: (
        _float64_name(facts, call) and _says_no_dtype(text, call)
    ),
)


_WRAP = """\
from functools import partial
from torch.utils.checkpoint import checkpoint
for b in {blocks}:
    b.forward = partial(checkpoint, b.forward, use_reentrant=False)"""


def checkpoint(facts: Facts) -> Iterator[Advice]:
    """Recompute activations in backward, where a training cell spends its memory on them."""
    edit = loops.argument(facts, "recompute") or _recomputing(facts)
    if not edit:
        return
    cost = "a step takes about a fifth longer"
    for model in facts.notebook.models:
        if model.training and "batch norm" in model.uneven_layers:
            cost = (
                "a step takes about a fifth longer; batch norm counts each pass twice"
            )
    yield propose(
        "Recompute activations in backward instead of keeping them", cost=cost, **edit
    )


def _recomputing(facts: Facts) -> Edit:
    """Return the edit that has the first model recompute that can be told to."""
    if not facts.frames.trains or not in_a_pass(facts):
        return {}
    if "checkpoint" in facts.frames.functions:
        return {}
    for model in facts.notebook.models:
        edit = _switch(facts, model) if not model.checkpoints else {}
        if edit:
            held = f"{size(facts.transient)} of what was in use was held by graphs and frames only"
            return {"evidence": held, **edit}
    return {}


def on_the_host(facts: Facts) -> Iterator[Advice]:
    """Keep what backward needs in the host's memory."""
    region = find(facts) if facts.frames.trains and in_a_pass(facts) else None
    if region is not None and region.backward is not None:
        yield propose(
            "Keep activations in the host's memory until backward",
            text=region.text,
            changes=region.text.wrap(
                region.computed, "with torch.autograd.graph.save_on_cpu():"
            ),
            evidence=f"{size(facts.transient)} of what was in use was held by graphs and frames only",
            cost="each activation is copied to the host and back, which takes longer than to compute it",
        )


_SETTINGS = (
    ("enable_slicing", "Have {name} work on one image at a time", "{name}.enable_slicing()",
     "it works on all images at once", "a little time"),
    ("_move_list_states_to_cpu", "Have {name} keep what it has seen in the host's memory",
     "{name}.reset()\n{name}.compute_on_cpu = True", "it keeps all predictions until it computes",
     "a copy in each pass; it begins anew"),
)  # fmt: skip
"""What autoencoders of diffusers and metrics of torchmetrics are told, by a method that they have."""


def settings(facts: Facts) -> Iterator[Advice]:
    """Tell an object of a library to take less memory."""
    if facts.frames.trains:
        return
    for model in facts.notebook.models:
        for method, title, code, why, cost in _SETTINGS:
            if method in model.saving_methods:
                edit = prepare(facts, model.name, code.format(name=model.name))
                yield propose(
                    title.format(name=model.name), cost=cost, evidence=why, **edit
                )


def _switch(facts: Facts, model: Model) -> Edit:
    """Return the edit that has a model recompute its activations, or a large part of them."""
    methods = [method for method in model.saving_methods if "checkpointing" in method]
    if model.checkpoints is False and methods:
        return prepare(facts, model.name, f"{model.name}.{methods[0]}()")
    if model.blocks is not None:
        return prepare(facts, model.name, _WRAP.format(blocks=model.blocks))
    for text, call in calls(facts.frames.texts, model.name):
        loop = loop_around(text, call.lineno)
        inner = text.code(call)[len(text.code(call.func)) + 1 : -1]
        if model.sequential and len(call.args) == 1:
            run = f"checkpoint_sequential({model.name}, min(4, len({model.name})), {inner}"
        elif loop is not None and not any(does(part, "backward") for part in loop.body):
            run = f"checkpoint({model.name}, {inner}"  # of several one at a time
        else:
            continue
        changes = [
            text.replace(call, f"torch.utils.checkpoint.{run}, use_reentrant=False)")
        ]
        first = "import torch.utils.checkpoint"
        if model.writes_in_place:
            first = f"for each in {model.name}.modules():\n    each.inplace = False\n{first}"
        return {"text": text, "changes": changes, "first": first}
    return {}
