"""What training takes on top of the parameters: optimizer state, wide numbers, activations, the logits of the loss."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from gpumagic._compat import torch_frames
from gpumagic.advice.facts import Facts, Model, Optimizer, Stage
from gpumagic.advice.records import Advice
from gpumagic.advice.rules import loops
from gpumagic.advice.rules.proposal import (
    Edit,
    Remedy,
    argued,
    backend,
    calls,
    does,
    failed,
    find,
    in_a_pass,
    loop_around,
    prepare,
    propose,
    together,
)
from gpumagic.report.units import LARGE, size
from gpumagic.source.text import CellText, keyword

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
SHARED = ("lr", "weight_decay")
"""Arguments of Adam's that other optimizers have too."""


def one_by_one(facts: Facts) -> Iterator[Advice]:
    """Update one parameter at a time, or fused, where the batched form of Adam makes copies of all parameters."""
    fused = backend(facts) == "cuda"
    edit = _switched(facts, "fused" if fused else "foreach", "True" if fused else "False")
    if edit and (_fails_in_copies(facts) or (facts.frames.trains and in_a_pass(facts))):
        yield propose(
            "Let the optimizer update in place, fused"
            if fused
            else "Let the optimizer update one parameter at a time",
            evidence="its step makes copies of all parameters at once",
            cost="none" if fused else "a step of many small parameters takes longer",
            **edit,
        )


def _fails_in_copies(facts: Facts) -> bool:
    return any(name.startswith(torch_frames.IN_FOREACH_ADAM) for name in facts.frames.functions)


def _switched(facts: Facts, name: str, value: str) -> Edit:
    """Return the edit that gives Adam's constructor an argument, or sets it on the optimizer that is there."""
    found = next(
        (each for each in facts.notebook.optimizers if each.kind in ADAMS and not each.fused), None
    )
    for text, call in calls(facts.frames.texts, *([found.kind] if found is not None else ADAMS)):
        flag = keyword(call, name)
        if flag is not None and text.code(flag.value) == value:
            return {}
        other = (
            {"foreach": "False"} if name == "fused" and keyword(call, "foreach") is not None else {}
        )
        return {"text": text, "changes": argued(text, call, **{name: value}, **other)}
    if found is not None and not found.local:
        return {"first": f'for group in {found.name}.param_groups:\n    group["foreach"] = False'}
    return {"edit": f"{name}={value}"} if found is not None or _fails_in_copies(facts) else {}


def leaner(facts: Facts) -> Iterator[Advice]:
    """Use an optimizer with less state, where Adam's is what does not fit: the least intrusive first."""
    if facts.notebook.trainer is not None and facts.notebook.trainer.library == "transformers":
        edit = loops.argument(facts, "adafactor")
        title, cost = (
            "Replace AdamW by Adafactor",
            "another optimizer: tune the learning rate again",
        )
        yield from [propose(title, cost=cost, **edit)] if edit else []
        return
    found = next((each for each in facts.notebook.optimizers if each.kind in ADAMS), None)
    if (
        found is None
        or 2 * found.nbytes < LARGE
        or not (facts.frames.stage is Stage.STEP or in_a_pass(facts))
    ):
        return
    there = (
        f"{size(found.state_nbytes)} of it is there"
        if found.state_nbytes
        else "none is allocated yet"
    )
    for name, what in (
        ("Adafactor", "another optimizer"),
        ("SGD", "no state at all, and slower to converge"),
    ):
        edit = _constructed(facts, found, f"torch.optim.{name}")
        if edit:
            yield propose(
                f"Replace {found.kind} by {name}",
                cost=f"{what}: tune the learning rate again",
                **edit,
                evidence=f"{found.name}'s state takes {size(2 * found.nbytes)}, twice the parameters; {there}",
            )
    edit = _sparse(facts, found)
    if edit:
        yield propose(
            f"Replace {found.kind} by SGD, with sparse gradients of embeddings",
            **edit,
            cost="no state at all, and slower to converge: tune the learning rate again",
            evidence="a step changes only the rows that it looks up, and the gradient has all of the table's",
        )


def _constructed(facts: Facts, found: Optimizer, constructor: str) -> Edit:
    """Return the edit that makes another optimizer where the cell makes this one, else before it."""
    for text, call in calls(facts.frames.texts, found.kind):
        shared = [
            f"{each.arg}={text.code(each.value)}" for each in call.keywords if each.arg in SHARED
        ]
        given = ", ".join(filter(None, (*map(text.code, call.args), *shared)))
        changes = [text.replace(call, f"{constructor}({given})")]
        return {"text": text, "changes": changes} if len(call.args) == 1 else {}
    models = [
        each for each in facts.frames.models_alive if each.nbytes == found.nbytes and not each.local
    ]
    if len(models) != 1 or found.local:
        return {}
    return {"first": f"{found.name} = {constructor}({models[0].name}.parameters())"}


def _sparse(facts: Facts, found: Optimizer) -> Edit:
    """Return the edit by which large embeddings have sparse gradients, with an optimizer that takes them."""
    edit = _constructed(facts, found, "torch.optim.SGD")
    told = [
        prepare(facts, model.name, "\n".join(f"{each}.sparse = True" for each in model.embeddings))
        for model in facts.notebook.models
        if model.embeddings and model.name in found.models and not model.local
    ]
    cells = {each["text"].cell for each in (edit, *told) if "text" in each}
    return together(*told, edit) if edit and told and len(cells) < 2 else {}


def _autocast(facts: Facts) -> str:
    return f'with torch.autocast("{backend(facts)}", dtype=torch.bfloat16):'


def mixed(facts: Facts) -> Iterator[Advice]:
    """Run the forward pass in bfloat16 where the model is float32 and nothing else says so."""
    title, cost = (
        "Compute the forward pass in bfloat16",
        "three digits of precision in the products",
    )
    if facts.notebook.trainer is not None:
        edit = loops.argument(facts, "bfloat16")
        yield from [propose(title, cost=cost, **edit)] if edit else []
        return
    full = [model for model in facts.notebook.models if 2 * model.float32_nbytes > model.nbytes]
    is_on = (
        facts.frames.cell is None or facts.frames.cell.autocasts or facts.frames.mentions_autocast
    )
    if is_on or facts.frames.stage not in (Stage.FORWARD, Stage.BACKWARD, Stage.OTHER):
        return
    if full and in_a_pass(facts):
        region = find(facts)
        changes = region.text.wrap(region.computed, _autocast(facts)) if region is not None else ()
        yield propose(
            title,
            cost=cost,
            **(
                {"text": region.text, "changes": changes}
                if region and changes
                else {"edit": _autocast(facts)}
            ),
            evidence=f"{full[0].name} has {size(full[0].float32_nbytes)} of float32 parameters, the cell uses no "
            "autocast; activations shrink, parameters do not",
        )
    for text, statement in failed(facts) if not full else ():
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


def _wide(facts: Facts, call: ast.Call) -> str:
    """Return what a call moves of float64 on the host, if anything."""
    wide = {
        name
        for name, fact in facts.frames.tensors.items()
        if (fact.dtype, fact.device) == ("float64", "cpu")
    }
    return next(
        (each.id for each in ast.walk(call) if isinstance(each, ast.Name) and each.id in wide), ""
    )


single = Remedy(
    lambda facts, _, call, *__: f"Keep {_wide(facts, call)} in float32 on the device",
    lambda facts: facts.frames.tensors,
    lambda facts, _, call, *__: (
        f"{_wide(facts, call)} is float64, numpy's default, "
        f"{size(facts.frames.tensors[_wide(facts, call)].nbytes)}"
    ),
    "seven digits instead of sixteen; models are float32 anyway",
    argument="dtype=torch.float32",
    calls=_MOVES,
    of=lambda facts, text, call, _: _wide(facts, call) and _says_no_dtype(text, call),
)


_WRAP = """\
from functools import partial
from torch.utils.checkpoint import checkpoint
for b in {blocks}:
    b.forward = partial(checkpoint, b.forward, use_reentrant=False)"""


def checkpoint(facts: Facts) -> Iterator[Advice]:
    """Recompute activations in backward, where a training cell spends its memory on them."""
    edit = loops.argument(facts, "recompute")
    if (
        not edit
        and facts.frames.trains
        and in_a_pass(facts)
        and "checkpoint" not in facts.frames.functions
    ):
        models = [model for model in facts.notebook.models if not model.checkpoints]
        edit = next(filter(None, (_switch(facts, model) for model in models)), {})
        held = f"{size(facts.transient)} of what was in use was held by graphs and frames only"
        edit = {"evidence": held, **edit} if edit else {}
    if edit:
        is_counted = any(
            "batch norm" in model.uneven_layers for model in facts.notebook.models if model.training
        )
        cost = "a step takes about a fifth longer" + (
            "; batch norm counts each pass twice" if is_counted else ""
        )
        yield propose(
            "Recompute activations in backward instead of keeping them", cost=cost, **edit
        )


def on_the_host(facts: Facts) -> Iterator[Advice]:
    """Keep what backward needs in the host's memory."""
    region = find(facts) if facts.frames.trains and in_a_pass(facts) else None
    if region is not None and region.backward is not None:
        yield propose(
            "Keep activations in the host's memory until backward",
            text=region.text,
            changes=region.text.wrap(region.computed, "with torch.autograd.graph.save_on_cpu():"),
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
    for model, (method, title, code, why, cost) in itertools.product(
        facts.notebook.models, _SETTINGS
    ):
        if method in model.saving_methods and not facts.frames.trains:
            told = prepare(facts, model.name, code.format(name=model.name))
            yield propose(title.format(name=model.name), cost=cost, evidence=why, **told)


def _switch(facts: Facts, model: Model) -> Edit:
    """Return the edit that has a model recompute its activations, or a large part of them."""
    methods = [each for each in model.saving_methods if "checkpointing" in each]
    if model.checkpoints is False and methods:
        return prepare(facts, model.name, f"{model.name}.{methods[0]}()")
    if model.blocks is not None:
        return prepare(facts, model.name, _WRAP.format(blocks=model.blocks))
    for text, call in calls(facts.frames.texts, model.name):
        loop, inner = (
            loop_around(text, call.lineno),
            text.code(call)[len(text.code(call.func)) + 1 : -1],
        )
        if model.sequential and len(call.args) == 1:
            run = f"checkpoint_sequential({model.name}, min(4, len({model.name})), {inner}"
        elif loop is not None and not any(
            does(each, "backward") for each in loop.body
        ):  # of several one at a time
            run = f"checkpoint({model.name}, {inner}"
        else:
            continue
        changes = [text.replace(call, f"torch.utils.checkpoint.{run}, use_reentrant=False)")]
        first = (
            f"for each in {model.name}.modules():\n    each.inplace = False\n"
            if model.writes_in_place
            else ""
        )
        return {"text": text, "changes": changes, "first": f"{first}import torch.utils.checkpoint"}
    return {}
