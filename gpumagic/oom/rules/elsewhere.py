"""Another device, a larger one, or a smaller model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import proposal
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import backend, propose
from gpumagic.report.units import size
from gpumagic.source.text import Change, Text, called

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


def _renamed(facts: Facts, text: Text, device: str) -> Iterator[Change]:
    own = {facts.device, backend(facts) if (facts.device or "").endswith(":0") else facts.device}
    for node in text.nodes():
        if isinstance(node, ast.Constant) and node.value in own and isinstance(node.value, str):
            yield text.replace(node, f'"{device}"')
        elif isinstance(node, ast.Call) and called(node) == backend(facts) and not node.args:  # x.cuda()
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


def _depths(text: Text) -> Iterator[tuple[str, ast.Constant]]:
    for node in text.nodes():
        name = node.arg if isinstance(node, ast.keyword) else None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        value = node.value if isinstance(node, ast.keyword | ast.Assign) else None
        if name is not None and _DEPTH.match(name) and isinstance(value, ast.Constant) and type(value.value) is int:
            yield name, value
