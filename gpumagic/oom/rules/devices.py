"""Another device, several of them, or a larger one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gpumagic.memory.devices import Device
from gpumagic.memory.presets import GPUS, USUAL
from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import backend, propose
from gpumagic.report.units import count, size
from gpumagic.source.text import CellText, Change, called_name

CONTEXT = 1 << 30
"""What CUDA and its libraries take of a GPU, generously."""
SMALL = 4 << 30
"""The memory below which a device is none of those in the list of GPUs."""


def other_device(facts: Facts) -> Iterator[Advice]:
    """Run the cell on the device of the same type that has most room."""
    if not facts.free_elsewhere or any(optimizer.state for optimizer in facts.optimizers):
        return  # an optimizer's state would have to move with its parameters, and has no method for it
    device = max(facts.free_elsewhere, key=lambda each: facts.free_elsewhere[each])
    if facts.free_elsewhere[device] < _least(facts):
        return
    moved = [each for each in facts.brought if each.kind in ("module", "tensor")]
    if len(moved) < len([each for each in facts.brought if each.kind != "optimizer"]):
        return
    names = ", ".join(each.name for each in moved)
    yield propose(
        f"Run the cell on {device}" + (f", with {names} moved there" if moved else ""),
        evidence=f"{device} has {size(facts.free_elsewhere[device])} free",
        cost=f"{names} {'are' if len(moved) > 1 else 'is'} on {device} then" if moved else "none",
        **_redirected(facts, device),
    )  # fmt: skip


def _least(facts: Facts) -> int:
    """Return what a device needs at least: what the cell needs, without what it has no use for."""
    if facts.need is not None and facts.after is not None:
        return facts.need.needed - facts.after.allocated + sum(each.nbytes for each in facts.brought)
    at_failure = facts.at_failure.allocated if facts.at_failure is not None else 0
    return at_failure - facts.leftover_nbytes + (facts.requested or 0)


def larger(facts: Facts) -> Iterator[Advice]:
    """Say how large a device the cell needs, with a GPU that is."""
    if facts.need is None or not facts.need.missing or facts.capacity is None:
        return
    needed = facts.need.needed
    room = {name: GPUS[name].capacity for name in USUAL if GPUS[name].capacity >= needed + CONTEXT}
    best = min(room, key=lambda name: room[name], default=None) if facts.capacity >= SMALL else None
    example = f", such as {'an' if best[0] in 'AHLR' else 'a'} {best} ({size(room[best])})" if best else ""
    yield propose(
        f"Use a larger GPU{example}", evidence=f"as it is, the cell needs {size(needed)}", cost="another machine"
    )


def divided(facts: Facts) -> Iterator[Advice]:
    """Divide the batch, or a model that is too large alone, among the devices of the machine."""
    devices, cost = count(1 + len(facts.free_elsewhere), "device"), "a script of its own, started by torchrun"
    if backend(facts) not in ("cuda", "xpu") or not facts.free_elsewhere or facts.memory != "device":
        return
    if facts.stage in ("move", "step"):
        title = f"Shard the model over {devices} (fully_shard of torch.distributed.fsdp)"
        yield propose(title, cost=cost, evidence="parameters, gradients and optimizer state are divided among them")
    elif facts.trains:
        title = f"Divide each batch among {devices} (DistributedDataParallel)"
        yield propose(title, cost=cost, evidence="each has the model and its share of the activations")


def offload(facts: Facts) -> Iterator[Advice]:
    """Name what makes a model usable that does not fit: fewer trained weights, or weights on the CPU."""
    name = facts.models_there[0].name if facts.models_there else "model"
    if facts.stage not in ("move", "step") or facts.memory != "device":
        return
    if facts.stage == "step" or facts.trains:
        yield propose(
            "Train adapters in place of all weights (LoRA)", cost="another package, peft; only low-rank updates",
            edit=f'{name} = peft.get_peft_model({name}, peft.LoraConfig(target_modules="all-linear"))',
            evidence="gradients and optimizer state are of the adapters only",
        )  # fmt: skip
    else:
        yield propose(
            "Leave a part of the weights on the CPU", evidence="each layer is copied when it runs",
            edit=f"{name} = accelerate.dispatch_model({name}, accelerate.infer_auto_device_map({name}))",
            cost="another package, accelerate; each pass waits for the copies",
        )  # fmt: skip


def _redirected(facts: Facts, device: str) -> dict[str, Any]:
    """Return the edit: the device's name in the cell, the variables that hold it, and what has to move."""
    first = [f'{name} = "{device}"' for name in facts.device_names]
    first += [_move(each.name, each.kind, device) for each in facts.brought if each.kind in ("module", "tensor")]
    text = facts.text
    changes = list(_renamed(facts, text, device)) if text is not None else []
    if not changes and not facts.device_names:
        magic = f"%%ondevice {device}"
        return {"first": "\n".join(first) or None, "changes": [Change(1, 0, "", f"{magic}\n")], "edit": magic}
    return {"first": "\n".join(first) or None, "text": text, "changes": changes}


def _move(name: str, kind: str, device: str) -> str:
    return f'{name}.to("{device}")' if kind == "module" else f'{name} = {name}.to("{device}")'


def _renamed(facts: Facts, text: CellText, device: str) -> Iterator[Change]:
    own = {facts.device, backend(facts) if (facts.device or "").endswith(":0") else facts.device}
    for node in text.nodes():
        if isinstance(node, ast.Constant) and node.value in own and isinstance(node.value, str):
            yield text.replace(node, f'"{device}"')
        elif isinstance(node, ast.Call) and called_name(node) == backend(facts) and not node.args:  # x.cuda()
            yield text.add_argument(node, str(Device.parse(device).index))
