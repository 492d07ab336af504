"""Limits that no smaller batch changes: one request too large, caps, fragmentation, the host; other devices."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumagic.advice.facts import Facts, Kind, Memory, Optimizer, Stage, TensorFact
from gpumagic.advice.records import ON_THE_CPU, Advice, NoCost
from gpumagic.advice.rules import collected
from gpumagic.advice.rules.proposal import Edit, Remedy, backend, prepare, propose
from gpumagic.advice.rules.regions import bracketed, failed
from gpumagic.advice.rules.training import ADAMS
from gpumagic.backends import backend_named
from gpumagic.memory.presets import GPUS, USUAL
from gpumagic.report.base import Holder
from gpumagic.report.units import count, shape, size
from gpumagic.source.text import CellText, Change, called_name


class OuterProduct(NamedTuple):
    """Two operands of n elements whose result has n squared."""

    column: ast.expr
    """The code of the operand of shape `(n, 1)`."""
    row: ast.expr
    length: int
    nbytes: int
    """Of the result."""


def accidental_outer_product(facts: Facts) -> OuterProduct | None:
    """Return the accidental outer product on the line that failed, if the request is of its size."""
    for text, statement in failed(facts):
        for node in ast.walk(statement):
            operands = _two_operands(facts, text, node)
            for column, row in (operands, operands[::-1]) if operands else ():
                product = _as_outer_product(facts, column, row)
                if product is not None:
                    return product
    return None


class _Operand(NamedTuple):
    node: ast.expr
    fact: TensorFact | None


def _two_operands(facts: Facts, text: CellText, node: ast.AST) -> tuple[_Operand, ...]:
    """Return the operands of an elementwise operation or a loss; of another expression none."""
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
        tensors = facts.frames.tensors
        return (
            _Operand(node.left, tensors.get(text.code(node.left))),
            _Operand(node.right, tensors.get(text.code(node.right))),
        )
    if isinstance(node, ast.Call) and len(node.args) == 2:
        # It may be a loss; the request proves that it broadcasts
        operands = facts.frames.operands
        return (
            _Operand(node.args[0], operands.get("input")),
            _Operand(node.args[1], operands.get("target")),
        )
    return ()


def _as_outer_product(
    facts: Facts, column: _Operand, row: _Operand
) -> OuterProduct | None:
    """Return the outer product of a column and a row, if they are that and the request is of its size."""
    if row.fact is None or len(row.fact.shape) != 1:
        return None
    length = row.fact.shape[0]
    nbytes = length * row.fact.nbytes
    if not facts.event.asked_for(nbytes):
        return None
    if column.fact is not None:
        is_column = column.fact.shape == (length, 1)
    else:
        is_column = isinstance(
            column.node, ast.Call
        )  # of any shape: the request proves it
    return OuterProduct(column.node, row.node, length, nbytes) if is_column else None


def squeeze(facts: Facts) -> Iterator[Advice]:
    """Take the dimension of one away before the two meet."""
    found = accidental_outer_product(facts)
    text = facts.frames.failing_text
    if found is not None and text is not None:
        n = found.length
        yield propose(
            f"Give {text.code(found.column)} the shape of {text.code(found.row)}",
            text=text,
            changes=[
                text.replace(
                    found.column, f"{bracketed(text, found.column)}.squeeze(-1)"
                )
            ],
            evidence=f"{shape((n, 1))} with {shape((n,))} makes {shape((n, n))}, {size(found.nbytes)}",
            cost=NoCost(because="the result was not what was meant"),
        )


def _failing_line(facts: Facts) -> str:
    if facts.frames.line is None:
        return "the failing line"
    return f"line {facts.frames.line}"


def _lift_fraction(facts: Facts) -> str:
    device = facts.event.device
    which = "" if device in (None, "cuda:0") else f', "{device}"'
    return f"torch.cuda.set_per_process_memory_fraction(1.0{which})"


size_bug = Remedy(
    "Print the sizes this line passes; one is negative or overflowed",
    lambda facts: facts.event.kind is Kind.SIZE_BUG,
    _failing_line,
    cost="",
)
fraction = Remedy(
    "Lift the cap on this process's memory",
    lambda facts: facts.event.kind is Kind.MEMORY_FRACTION,
    "the allocator refused before it asked the driver",
    NoCost(unless="others share the device"),
    first=_lift_fraction,
)

GAPS_SHARE = 8
"""Every process has pieces too small for the next request; less than one part in so many is no fragmentation."""


def is_fragmented(facts: Facts) -> bool:
    """Return whether what was reserved and unallocated would have held the request, had it been in one piece.

    A cell that needs more than there is does not fit in one piece either, and what a leak grows by is no gap.
    """
    event = facts.event
    if not event.from_allocator or event.requested is None or event.unallocated is None:
        return False
    if facts.need is not None and (facts.need.missing or facts.need.fits is False):
        return not facts.need.missing
    if collected.growing(facts) and facts.transient > event.unallocated:
        return False
    return event.unallocated >= max(
        event.requested, (event.capacity or 0) // GAPS_SHARE
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
    after = facts.notebook.after
    if not is_fragmented(facts) or after is None:
        return
    if any(optimizer.state_nbytes for optimizer in facts.notebook.optimizers):
        return
    stuck = (
        after.reserved - after.allocated
    )  # by names: the cache has been emptied since
    moved = [
        known for known in facts.notebook.variables_on_device if known.kind in _MOVED
    ]
    lines = [_move(known, "cpu()") for known in moved]
    lines.append(f"torch.{backend(facts)}.empty_cache()")
    lines += [_move(known, f'to("{facts.event.device}")') for known in moved]
    yield propose(
        "Move what is there to the host and back, into whole segments",
        first="\n".join(lines),
        frees=stuck,
        evidence=f"{size(stuck)} lies between blocks of {_names(moved)}, "
        "where emptying the cache cannot reach it",
        cost=f"copies {size(sum(known.nbytes for known in moved))} twice; "
        "other views of these tensors stay behind",
    )


def _move(holder: Holder, method: str) -> str:
    """Return the code that moves a variable by a call of a method."""
    return _MOVED[holder.kind].format(name=holder.name, to=method)


def _names(holders: Sequence[Holder]) -> str:
    return ", ".join(holder.name for holder in holders)


_IN_WORKERS = (Kind.DATALOADER_KILLED, Kind.DATALOADER_BUS_ERROR, Kind.SHARED_MEMORY)
"""Kinds of failures that only DataLoaders with workers have."""


def workers(facts: Facts) -> Iterator[Advice]:
    """Load batches in the kernel's own process, where workers ran out."""
    is_loading = (
        facts.event.kind is Kind.PYTHON and "_process_data" in facts.frames.functions
    )
    if facts.event.kind not in _IN_WORKERS and not is_loading:
        return
    where = " in /dev/shm" if facts.event.memory is Memory.SHARED else ""
    for loader in facts.notebook.loaders:
        if loader.workers:
            yield propose(
                "Load the batches without worker processes",
                cost="batches are no longer loaded ahead",
                evidence=f"{count(loader.workers, 'worker')}, each with its own copy of what the dataset holds and "
                f"two batches ahead{where}",
                **prepare(facts, loader.name, f"{loader.name}.num_workers = 0"),
            )


def _map_location_evidence(*known: object) -> str:
    given = known[-1]
    if given:
        return f"map_location={given} puts the tensors beside the model's own"
    return "torch.load was putting the tensors where they were saved"


on_the_host = Remedy(
    "Load the checkpoint into the host's memory",
    lambda facts: (
        facts.frames.stage is Stage.LOAD and facts.event.memory is Memory.DEVICE
    ),
    _map_location_evidence,
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
    free = facts.notebook.free_elsewhere
    device = max(free, key=lambda name: free[name], default="")
    if free.get(device, 0) <= (facts.event.free or 0):
        return
    if any(optimizer.state_nbytes for optimizer in facts.notebook.optimizers):
        return  # its state would have to move with its parameters, and has no method for it
    least = facts.event.requested if facts.need is None else facts.need.needed_alone
    if (least or 0) > free[device]:
        return
    inputs = facts.notebook.inputs_on_device
    if any(known.kind not in ("module", "tensor", "optimizer") for known in inputs):
        return
    moved = [known for known in inputs if known.kind in ("module", "tensor")]
    edit = _redirected(facts, device, moved)
    title = f"Run the cell on {device}"
    if not moved:
        cost = "its results are there"
    else:
        title += f", with {_names(moved)} moved there"
        cost = f"{_names(moved)} {'are' if len(moved) > 1 else 'is'} on {device} then"
    if "edit" in edit:
        cost += "; what it makes without a device is made there"
    yield propose(
        title, evidence=f"{device} has {size(free[device])} free", cost=cost, **edit
    )


def on_the_cpu(facts: Facts) -> Iterator[Advice]:
    """Run a cell that trains nothing on the CPU, where that takes little enough to be tried."""
    if facts.need is None or facts.need.needed > SMALL:
        return
    if facts.frames.trains or not facts.may_take_less or facts.frames.text is None:
        return
    moved = facts.notebook.inputs_on_device
    if any(known.kind not in _MOVED for known in moved):
        return
    edit = _redirected(facts, "cpu", moved)
    if edit["first"] or edit["changes"]:
        cost = "slower, and its results are on the CPU"
        if moved:
            cost += f", with {_names(moved)}"
        yield propose(
            ON_THE_CPU, **edit, evidence="its memory is the host's", cost=cost
        )


def larger(facts: Facts) -> Iterator[Advice]:
    """Say how large a device the cell needs, with the GPUs that are, the smallest first."""
    need = facts.need
    if need is None or not need.missing or facts.event.capacity is None:
        return
    static = max(need.static, sum(map(_trained_nbytes, facts.notebook.optimizers)))
    why = f"as it is, the cell needs {size(need.needed)}"
    if static > LEAST_ROOM * need.available:
        why += (
            f"; parameters, gradients and optimizer state alone are {size(static)} of "
            f"{size(need.available)}"
        )
    capacities: dict[str, int] = {}
    for name in USUAL:
        if GPUS[name].capacity >= need.needed + CONTEXT:
            capacities[name] = GPUS[name].capacity
    if not capacities or facts.event.capacity < SMALL:
        yield propose("Use a larger GPU", evidence=why, cost="another machine", gpu="")
        return
    for name in sorted(capacities, key=lambda name: capacities[name]):
        article = "an" if name[0] in "AHLR" else "a"
        title = f"Use a larger GPU, such as {article} {name} ({size(capacities[name])})"
        yield propose(title, evidence=why, cost="another machine", gpu=name)


def _trained_nbytes(optimizer: Optimizer) -> int:
    """Return the bytes of the parameters that an optimizer updates, their gradients and its state."""
    state = optimizer.state_nbytes
    if optimizer.kind in ADAMS:
        state = max(state, 2 * optimizer.nbytes)
    return 2 * optimizer.nbytes + state


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
    devices = 1 + len(facts.notebook.free_elsewhere)
    if not backend_named(backend(facts)).shards or devices == 1:
        return
    if facts.event.memory is not Memory.DEVICE:
        return
    is_too_large = facts.need is not None and facts.need.static > facts.need.available
    if facts.frames.stage in (Stage.MOVE, Stage.STEP) or is_too_large:
        yield propose(
            f"Shard the model over the {devices} devices here (fully_shard of torch.distributed.fsdp)",
            cost="a script of its own, started by torchrun",
            evidence="parameters, gradients and optimizer state are divided among them",
            **_sharded(facts, devices),
        )


def _sharded(facts: Facts, devices: int) -> Edit:
    """Return the edit that has each rank make its shards, where the cell moves the model to the device."""
    text = facts.frames.text
    if text is None or backend(facts) != "cuda":
        return {}
    blocks = {model.name: model.blocks for model in facts.frames.models_alive}
    for statement in text.tree.body:
        move = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        if not isinstance(move, ast.Call) or not isinstance(move.func, ast.Attribute):
            continue
        moved = move.func.value
        target = statement.targets[0] if isinstance(statement, ast.Assign) else moved
        model = text.code(target)
        fails = facts.frames.stage is Stage.MOVE and statement is text.statement_at(
            text.line
        )
        if move.func.attr not in ("cuda", "to") or not (fails or model in blocks):
            continue
        layers = blocks.get(model) or _LAYERS.format(model=model)
        start = Change(text.tree.body[0].lineno, 0, "", _AS_A_RANK, text.cell)
        stays = text.replace(move, text.code(moved))
        after = text.insert_after(
            statement, _SHARDED.format(layers=layers, model=model)
        )
        return {"text": text, "changes": (start, stays, *after), "ranks": devices}
    return {}


def _redirected(facts: Facts, device: str, moved: Sequence[Holder]) -> Edit:
    """Return the edit: the device's name in the cell, the variables that hold it, and what has to move."""
    names = facts.notebook.device_names
    lines = [f'{name} = "{device}"' for name in names]
    lines += [_move(holder, f'to("{device}")') for holder in moved]
    first = "\n".join(lines) or None
    text = facts.frames.text
    changes = list(_renamed(facts, text, device)) if text is not None else []
    if not changes and not names and device != "cpu":
        magic = f"%%ondevice {device}"
        return {
            "first": first,
            "changes": [Change(1, 0, "", f"{magic}\n")],
            "edit": magic,
        }
    return {"first": first, "text": text, "changes": changes}


def _renamed(facts: Facts, text: CellText, device: str) -> Iterator[Change]:
    """Yield the changes that name another device where the cell names the one that failed."""
    failed_device = facts.event.device or ""
    own = {failed_device}
    if failed_device.endswith(":0"):
        own.add(backend(facts))
    for node in text.nodes():
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in own
        ):
            yield text.replace(node, f'"{device}"')
        elif (
            isinstance(node, ast.Call)
            and called_name(node) == backend(facts)
            and not node.args
        ):
            owner = text.code(node.func).rpartition(".")[0]  # of x.cuda()
            yield text.replace(node, f'{owner}.to("{device}")')
