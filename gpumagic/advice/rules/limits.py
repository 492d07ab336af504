"""Limits that no smaller batch changes: one request too large, caps, fragmentation, the host; other devices."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gpumagic.advice.facts import Facts, Kind, Memory, Stage, TensorFact
from gpumagic.advice.records import ON_THE_CPU, Advice
from gpumagic.advice.rules import collected
from gpumagic.advice.rules.proposal import Remedy, backend, bracketed, failed, prepare, propose
from gpumagic.advice.rules.training import ADAMS
from gpumagic.memory.presets import GPUS, USUAL
from gpumagic.report.base import Holder
from gpumagic.report.units import count, shape, size
from gpumagic.source.text import CellText, Change, called_name


class Outer(NamedTuple):
    """Two operands of n elements whose result has n squared."""

    column: ast.expr
    """The code of the operand of shape `(n, 1)`."""
    row: ast.expr
    length: int
    nbytes: int
    """Of the result."""


def outer(facts: Facts) -> Outer | None:
    """Return the accidental outer product on the line that failed, if the request is of its size."""
    for text, statement in failed(facts):
        for node in ast.walk(statement):
            pair: list[tuple[ast.expr, TensorFact | None]] = []
            if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
                pair = [
                    (each, facts.frames.tensors.get(text.code(each)))
                    for each in (node.left, node.right)
                ]
            elif (
                isinstance(node, ast.Call) and len(node.args) == 2
            ):  # a loss; the request proves that it broadcasts
                pair = [
                    (each, facts.frames.operands.get(name))
                    for each, name in zip(node.args, ("input", "target"), strict=True)
                ]
            for (one, column), (other, row) in (pair, pair[::-1]) if pair else ():
                if (
                    row is None
                    or len(row.shape) != 1
                    or not facts.event.asked_for(row.shape[0] * row.nbytes)
                ):
                    continue
                # A call's result may have any shape: the request proves it
                if (
                    column.shape == (*row.shape, 1)
                    if column is not None
                    else isinstance(one, ast.Call)
                ):
                    return Outer(one, other, row.shape[0], row.shape[0] * row.nbytes)
    return None


def squeeze(facts: Facts) -> Iterator[Advice]:
    """Take the dimension of one away before the two meet."""
    found, text = outer(facts), facts.frames.failing_text
    if found is not None and text is not None:
        n = found.length
        yield propose(
            f"Give {text.code(found.column)} the shape of {text.code(found.row)}",
            text=text,
            changes=[text.replace(found.column, f"{bracketed(text, found.column)}.squeeze(-1)")],
            evidence=f"{shape((n, 1))} with {shape((n,))} makes {shape((n, n))}, {size(found.nbytes)}",
            cost="none: the result was not what was meant",
        )


size_bug = Remedy(
    "Print the sizes this line passes; one is negative or overflowed",
    lambda facts: facts.event.kind is Kind.SIZE_BUG,
    lambda facts, *_: (
        f"line {facts.frames.line}" if facts.frames.line is not None else "the failing line"
    ),
    cost="",
)
fraction = Remedy(
    "Lift the cap on this process's memory",
    lambda facts: facts.event.kind is Kind.MEMORY_FRACTION,
    "the allocator refused before it asked the driver",
    "none, unless others share the device",
    first=lambda facts, *_: (
        "torch.cuda.set_per_process_memory_fraction(1.0"
        + ("" if facts.event.device in (None, "cuda:0") else f', "{facts.event.device}"')
        + ")"
    ),
)

A_FAIR_SHARE = 8
"""Every process has pieces too small for the next request; less than one part in so many is no fragmentation."""


def is_fragmented(facts: Facts) -> bool:
    """Return whether what was reserved and unallocated would have held the request, had it been in one piece.

    A cell that needs more than there is does not fit in one piece either, and what a leak grows by is no gap.
    """
    if (
        not facts.event.from_allocator
        or facts.event.requested is None
        or facts.event.unallocated is None
    ):
        return False
    if facts.need is not None and (facts.need.missing or facts.need.fits is False):
        return not facts.need.missing
    if collected.growing(facts) and facts.transient > facts.event.unallocated:
        return False
    return facts.event.unallocated >= max(
        facts.event.requested, (facts.event.capacity or 0) // A_FAIR_SHARE
    )


expandable_segments = Remedy(
    "Let the allocator's segments grow: set this before the kernel starts",
    lambda facts: facts.event.segments_can_expand and is_fragmented(facts),
    lambda facts, *_: (
        f"{size(facts.event.unallocated)} was reserved but unallocated, {size(facts.event.requested)} requested"
    ),
    "a restart of the kernel; not with CUDA IPC",
    edit="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
_MOVED = {
    "module": "{name}.{to}",
    "tensor": "{name} = {name}.{to}",
    "list": "{name} = [each.{to} for each in {name}]",
}
"""How variables are moved, by their kinds."""


def compact(facts: Facts) -> Iterator[Advice]:
    """Take what survives in half-empty segments to the host and back: it comes back side by side."""
    if (
        not is_fragmented(facts)
        or facts.notebook.after is None
        or any(optimizer.state_nbytes for optimizer in facts.notebook.optimizers)
    ):
        return
    stuck = (
        facts.notebook.after.reserved - facts.notebook.after.allocated
    )  # the cache has been emptied since: this is pinned by names
    named = [each for each in facts.notebook.variables_on_device if each.kind in _MOVED]
    out, back = (
        [_MOVED[each.kind].format(name=each.name, to=to) for each in named]
        for to in ("cpu()", f'to("{facts.event.device}")')
    )
    yield propose(
        "Move what is there to the host and back, into whole segments",
        first="\n".join([*out, f"torch.{backend(facts)}.empty_cache()", *back]),
        frees=stuck,
        evidence=f"{size(stuck)} lies between blocks of {', '.join(each.name for each in named)}, "
        "where emptying the cache cannot reach it",
        cost=f"copies {size(sum(each.nbytes for each in named))} twice; other views of these tensors stay behind",
    )


_IN_WORKERS = (Kind.DATALOADER_KILLED, Kind.DATALOADER_BUS_ERROR, Kind.SHARED_MEMORY)
"""Kinds of failures that only DataLoaders with workers have."""


def workers(facts: Facts) -> Iterator[Advice]:
    """Load batches in the kernel's own process, where workers ran out."""
    if facts.event.kind not in _IN_WORKERS and not (
        facts.event.kind is Kind.PYTHON and "_process_data" in facts.frames.functions
    ):
        return
    for loader in facts.notebook.loaders:
        if loader.workers:
            yield propose(
                "Load the batches without worker processes",
                cost="batches are no longer loaded ahead",
                evidence=f"{count(loader.workers, 'worker')}, each with its own copy of what the dataset holds and "
                "two batches ahead"
                + (" in /dev/shm" if facts.event.memory is Memory.SHARED else ""),
                **prepare(facts, loader.name, f"{loader.name}.num_workers = 0"),
            )


on_the_host = Remedy(
    "Load the checkpoint into the host's memory",
    lambda facts: facts.frames.stage is Stage.LOAD and facts.event.memory is Memory.DEVICE,
    lambda *known: (
        f"map_location={known[-1]} puts the tensors beside the model's own"
        if known[-1]
        else "torch.load was putting the tensors where they were saved"
    ),
    "its tensors are on the CPU until they are copied or moved",
    argument='map_location="cpu"',
    of=lambda _, text, call, given: (
        text.code(call.func) in ("torch.load", "load") and "cpu" not in given
    ),
)
LEAST_ROOM = 0.95
"""Where more than this share of a device is taken by what no change lowers, nothing fits."""
CONTEXT = 1 << 30
"""What CUDA and its libraries take of a GPU, generously."""
SMALL = 4 << 30
"""The memory below which a device is none of those in the list of GPUs."""


def other_device(facts: Facts) -> Iterator[Advice]:
    """Run the cell on the device of the same type that has most room."""
    device = max(
        facts.notebook.free_elsewhere,
        key=lambda each: facts.notebook.free_elsewhere[each],
        default="",
    )
    if facts.notebook.free_elsewhere.get(device, 0) <= (facts.event.free or 0) or any(
        each.state_nbytes for each in facts.notebook.optimizers
    ):
        return  # an optimizer's state would have to move with its parameters, and has no method for it
    least = facts.event.requested if facts.need is None else facts.need.needed_alone
    if (least or 0) > facts.notebook.free_elsewhere[device]:
        return
    moved = [each for each in facts.notebook.inputs_on_device if each.kind in ("module", "tensor")]
    if any(
        each.kind not in ("module", "tensor", "optimizer")
        for each in facts.notebook.inputs_on_device
    ):
        return
    names, edit = ", ".join(each.name for each in moved), _redirected(facts, device, moved)
    where = (
        f"{names} {'are' if moved[1:] else 'is'} on {device} then"
        if moved
        else "its results are there"
    )
    yield propose(
        f"Run the cell on {device}" + (f", with {names} moved there" if moved else ""),
        evidence=f"{device} has {size(facts.notebook.free_elsewhere[device])} free",
        cost=where + ("; what it makes without a device is made there" if "edit" in edit else ""),
        **edit,
    )


def on_the_cpu(facts: Facts) -> Iterator[Advice]:
    """Run a cell that trains nothing on the CPU, where that takes little enough to be tried."""
    moved, is_small = (
        facts.notebook.inputs_on_device,
        facts.need is not None and facts.need.needed <= SMALL,
    )
    if (
        not is_small
        or facts.frames.trains
        or not facts.may_take_less
        or any(each.kind not in _MOVED for each in moved)
    ):
        return
    edit = _redirected(facts, "cpu", moved)
    if facts.frames.text is not None and (edit["first"] or edit["changes"]):
        yield propose(
            ON_THE_CPU,
            **edit,
            evidence="its memory is the host's",
            cost="slower, and its results are on the CPU"
            + (f", with {', '.join(each.name for each in moved)}" if moved else ""),
        )


def larger(facts: Facts) -> Iterator[Advice]:
    """Say how large a device the cell needs, with the GPUs that are, the smallest first."""
    need = facts.need
    if need is None or not need.missing or facts.event.capacity is None:
        return
    trained = (
        2 * each.nbytes + max(each.state_nbytes, 2 * each.nbytes * (each.kind in ADAMS))
        for each in facts.notebook.optimizers
    )
    fixed, why = max(need.static, sum(trained)), f"as it is, the cell needs {size(need.needed)}"
    if fixed > LEAST_ROOM * need.available:
        why += f"; parameters, gradients and optimizer state alone are {size(fixed)} of {size(need.available)}"
    room = {
        name: GPUS[name].capacity for name in USUAL if GPUS[name].capacity >= need.needed + CONTEXT
    }
    for name in (
        sorted(room, key=lambda name: room[name])
        if facts.event.capacity >= SMALL and room
        else [""]
    ):
        example = (
            f", such as {'an' if name[0] in 'AHLR' else 'a'} {name} ({size(room[name])})"
            if name
            else ""
        )
        yield propose(f"Use a larger GPU{example}", evidence=why, cost="another machine", gpu=name)


_AS_A_RANK = """import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
"""
_SHARDED = """for layer in {layers}:
    fully_shard(layer)
fully_shard({model})"""
_LAYERS = "[each for each in {model}.modules() if each._parameters]"


def divided(facts: Facts) -> Iterator[Advice]:
    """Shard a model that is too large alone among the devices of the machine."""
    number, is_fixed = (
        1 + len(facts.notebook.free_elsewhere),
        facts.need is not None and facts.need.static > facts.need.available,
    )
    if (
        backend(facts) not in ("cuda", "xpu")
        or number == 1
        or facts.event.memory is not Memory.DEVICE
    ):
        return
    if facts.frames.stage in (Stage.MOVE, Stage.STEP) or is_fixed:
        yield propose(
            f"Shard the model over the {number} devices here (fully_shard of torch.distributed.fsdp)",
            cost="a script of its own, started by torchrun",
            evidence="parameters, gradients and optimizer state are divided among them",
            **_sharded(facts, number),
        )


def _sharded(facts: Facts, number: int) -> dict[str, Any]:
    """Return the edit that has each rank make its shards, where the cell moves the model to the device."""
    text = facts.frames.text
    blocks = {each.name: each.blocks for each in facts.frames.models_alive}
    for statement in text.tree.body if text is not None and backend(facts) == "cuda" else ():
        move = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        if (
            text is None
            or not isinstance(move, ast.Call)
            or not isinstance(move.func, ast.Attribute)
        ):
            continue
        model = text.code(
            statement.targets[0] if isinstance(statement, ast.Assign) else move.func.value
        )
        fails = facts.frames.stage is Stage.MOVE and statement is text.statement_at(text.line)
        if move.func.attr not in ("cuda", "to") or not (fails or model in blocks):
            continue
        layers = blocks.get(model) or _LAYERS.format(model=model)
        start = Change(text.tree.body[0].lineno, 0, "", _AS_A_RANK, text.cell)
        after = text.insert_after(statement, _SHARDED.format(layers=layers, model=model))
        stays = text.replace(move, text.code(move.func.value))
        return {"text": text, "changes": (start, stays, *after), "ranks": number}
    return {}


def _redirected(facts: Facts, device: str, moved: Sequence[Holder]) -> dict[str, Any]:
    """Return the edit: the device's name in the cell, the variables that hold it, and what has to move."""
    first = [f'{name} = "{device}"' for name in facts.notebook.device_names]
    first += [_MOVED[each.kind].format(name=each.name, to=f'to("{device}")') for each in moved]
    text = facts.frames.text
    changes = list(_renamed(facts, text, device)) if text is not None else []
    if not changes and not facts.notebook.device_names and device != "cpu":
        magic = f"%%ondevice {device}"
        return {
            "first": "\n".join(first) or None,
            "changes": [Change(1, 0, "", f"{magic}\n")],
            "edit": magic,
        }
    return {"first": "\n".join(first) or None, "text": text, "changes": changes}


def _renamed(facts: Facts, text: CellText, device: str) -> Iterator[Change]:
    own = {
        facts.event.device,
        backend(facts) if (facts.event.device or "").endswith(":0") else facts.event.device,
    }
    for node in text.nodes():
        if isinstance(node, ast.Constant) and node.value in own and isinstance(node.value, str):
            yield text.replace(node, f'"{device}"')
        elif (
            isinstance(node, ast.Call) and called_name(node) == backend(facts) and not node.args
        ):  # x.cuda()
            yield text.replace(node, f'{text.code(node.func).rpartition(".")[0]}.to("{device}")')
