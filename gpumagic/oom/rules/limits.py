"""Limits that no smaller batch changes: one request too large, caps and fragmentation of the allocator, the host."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpumagic.oom.recognition import PINNED
from gpumagic.oom.report import Advice
from gpumagic.oom.rules import collected
from gpumagic.oom.rules.batch import remake
from gpumagic.oom.rules.facts import Facts, TensorFact
from gpumagic.oom.rules.proposal import backend, bracketed, calls, failed, propose
from gpumagic.report.units import count, shape, size
from gpumagic.source.text import called_name, keyword

LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"})


@dataclass(frozen=True, slots=True)
class Outer:
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
                pair = [(each, facts.work.tensors.get(text.code(each))) for each in (node.left, node.right)]
            elif isinstance(node, ast.Call) and len(node.args) == 2 and facts.work.function in LOSSES:
                pair = [
                    (each, facts.work.operands.get(name))
                    for each, name in zip(node.args, ("input", "target"), strict=True)
                ]
            for one, other in (pair, pair[::-1]) if pair else ():
                found = _outer(*one, *other)
                if found is not None and facts.asked_for(found.nbytes):
                    return found
    return None


def _outer(one: ast.expr, column: TensorFact | None, other: ast.expr, row: TensorFact | None) -> Outer | None:
    """Return the outer product of two operands; a call's result may have any shape that the request then proves."""
    if row is None or len(row.shape) != 1 or row.shape[0] < 2:
        return None
    is_column = column.shape == (*row.shape, 1) if column is not None else isinstance(one, ast.Call)
    return Outer(one, other, row.shape[0], row.shape[0] ** 2 * row.itemsize) if is_column else None


def squeeze(facts: Facts) -> Iterator[Advice]:
    """Take the dimension of one away before the two meet."""
    found, text = outer(facts), facts.failing
    if found is not None and text is not None:
        n = found.length
        yield propose(
            f"Give {text.code(found.column)} the shape of {text.code(found.row)}", text=text,
            changes=[text.replace(found.column, f"{bracketed(text, found.column)}.squeeze(-1)")],
            evidence=f"{shape((n, 1))} with {shape((n,))} makes {shape((n, n))}, {size(found.nbytes)}",
            cost="none: the result was not what was meant",
        )  # fmt: skip


def size_bug(facts: Facts) -> Iterator[Advice]:
    """Look at the sizes: a request above 1 EB is a negative or overflowed number."""
    if facts.kind == "size bug":
        where = f"line {facts.scene.line}" if facts.scene.line is not None else "the failing line"
        yield propose("Print the sizes this line passes; one is negative or overflowed", evidence=where)


def fraction(facts: Facts) -> Iterator[Advice]:
    """Lift the cap that this process has set itself."""
    where = "" if facts.device in (None, "cuda:0") else f', "{facts.device}"'
    if facts.kind == "memory fraction":
        yield propose(
            "Lift the cap on this process's memory", cost="none, unless others share the device",
            first=f"torch.cuda.set_per_process_memory_fraction(1.0{where})",
            evidence="the allocator refused before it asked the driver",
        )  # fmt: skip


def benchmark(facts: Facts) -> Iterator[Advice]:
    """Do not let cuDNN try algorithms with large workspaces."""
    if facts.tries_algorithms and facts.scene.functions & {"_conv_forward", "conv2d", "conv3d"}:
        yield propose(
            "Do not let cuDNN try every algorithm", first="torch.backends.cudnn.benchmark = False",
            evidence="cudnn.benchmark is on and it failed in a convolution; trials take workspace",
            cost="convolutions may take longer",
        )  # fmt: skip


def large_blocks(facts: Facts) -> Iterator[Advice]:
    """Let an Intel GPU hand out more than 4 GB at once."""
    if facts.kind == "xpu block limit":
        yield propose(
            "Allow blocks of more than 4 GB", cost="a restart of the kernel",
            edit="UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1",
            evidence="the driver refuses single blocks beyond 4 GB unless the environment says so at the start",
        )  # fmt: skip


def watermark(facts: Facts) -> Iterator[Advice]:
    """Say what the cap of MPS is, and that lifting it can stall the machine."""
    if facts.kind == "mps allocator":
        yield propose(
            "Lift MPS's cap on its share of the machine's memory",
            edit="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", cost="a restart of the kernel; the machine may stall",
            evidence=f"the cap is {size(facts.capacity)}, a share of the memory that the CPU uses too",
        )  # fmt: skip


A_FAIR_SHARE = 8
"""Every process has pieces too small for the next request; less than one part in so many is no fragmentation."""


def is_fragmented(facts: Facts) -> bool:
    """Return whether what was reserved and unallocated would have held the request, had it been in one piece.

    A cell that needs more than there is does not fit in one piece either, and what a leak grows by is no gap.
    """
    if not facts.from_allocator or facts.requested is None or facts.unallocated is None:
        return False
    if facts.need is not None and (facts.need.missing or facts.need.fits is False):
        return not facts.need.missing
    if collected.growing(facts) and facts.transient > facts.unallocated:
        return False
    return facts.unallocated >= max(facts.requested, (facts.capacity or 0) // A_FAIR_SHARE)


def expandable_segments(facts: Facts) -> Iterator[Advice]:
    """Let the allocator grow its segments, where fragmentation alone is the cause."""
    if facts.segments_can_expand and is_fragmented(facts):
        yield propose(
            "Let the allocator's segments grow: set this before the kernel starts",
            edit="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            evidence=f"{size(facts.unallocated)} was reserved but unallocated, {size(facts.requested)} requested",
            cost="a restart of the kernel; not with CUDA IPC",
        )  # fmt: skip


_OUT = {
    "module": "{name}.cpu()", "tensor": "{name} = {name}.cpu()", "list": "{name} = [each.cpu() for each in {name}]",
}  # fmt: skip
_BACK = {
    "module": '{name}.to("{device}")', "tensor": '{name} = {name}.to("{device}")',
    "list": '{name} = [each.to("{device}") for each in {name}]',
}  # fmt: skip


def compact(facts: Facts) -> Iterator[Advice]:
    """Take what survives in half-empty segments to the host and back: it comes back side by side."""
    if not is_fragmented(facts) or facts.after is None or any(optimizer.state for optimizer in facts.optimizers):
        return
    stuck = facts.after.reserved - facts.after.allocated  # the cache has been emptied since: this is pinned by names
    named = [each for each in facts.kept if each.kind in _OUT]
    if stuck < (facts.requested or 0) or sum(each.nbytes for each in named) * 2 < facts.after.allocated:
        return
    out = [_OUT[each.kind].format(name=each.name) for each in named]
    back = [_BACK[each.kind].format(name=each.name, device=facts.device) for each in named]
    yield propose(
        "Move what is there to the host and back, into whole segments",
        first="\n".join([*out, f"torch.{backend(facts)}.empty_cache()", *back]), frees=stuck,
        evidence=f"{size(stuck)} lies between blocks of {', '.join(each.name for each in named)}, "
        "where emptying the cache cannot reach it",
        cost=f"copies {size(sum(each.nbytes for each in named))} twice; other views of these tensors stay behind",
    )  # fmt: skip


def private_pools(facts: Facts) -> Iterator[Advice]:
    """Let go of the pools that CUDA graphs keep."""
    if facts.requested is not None and facts.private_pools >= facts.requested:
        yield propose(
            "Forget the captured CUDA graphs", frees=facts.private_pools, first="torch._dynamo.reset()",
            evidence=f"{size(facts.private_pools)} is in pools of CUDA graphs, which nothing else may use",
            cost='compiled functions compile again; mode="reduce-overhead" makes such pools',
        )  # fmt: skip


_IN_WORKERS = ("dataloader killed", "dataloader bus error", "shared memory")
_WITHOUT = {"num_workers": "0", "persistent_workers": "False", "prefetch_factor": "None"}


def workers(facts: Facts) -> Iterator[Advice]:
    """Load batches in the kernel's own process, where workers ran out."""
    if facts.kind not in _IN_WORKERS and not (facts.kind == "python" and "_process_data" in facts.scene.functions):
        return
    edit: dict[str, Any] = {}
    number = 0
    for text, call in calls(facts.texts):
        flag = keyword(call, "num_workers")
        if flag is not None and text.code(flag.value).isdecimal():
            changes = [text.replace(each.value, _WITHOUT[each.arg]) for each in call.keywords if each.arg in _WITHOUT]
            edit, number = {"text": text, "changes": changes}, int(text.code(flag.value))
            break
    for loader in facts.loaders if not edit else ():
        if loader.workers:
            edit, number = {"first": remake(loader, num_workers=0)}, loader.workers
            break
    if number:
        yield propose(
            "Load the batches without worker processes", cost="batches are no longer loaded ahead", **edit,
            evidence=f"{count(number, 'worker')}, each with its own copy of what the dataset holds and "
            "two batches ahead" + (" in /dev/shm" if facts.memory == "shared" else ""),
        )  # fmt: skip


def unpinned(facts: Facts) -> Iterator[Advice]:
    """Do not pin the host's memory where pinning it is what failed."""
    by_loader = {"pin_memory", "_pin_memory_loop"} & facts.scene.functions
    for text, call in calls(facts.texts) if by_loader or facts.kind == PINNED else ():
        flag = keyword(call, "pin_memory")
        if flag is not None and text.code(flag.value) == "True":
            yield propose(
                f"Do not pin the {'batches' if by_loader else 'memory'}", text=text,
                changes=[text.replace(flag.value, "False")], cost="slower copies",
                evidence="it failed while pinning, and pinned memory cannot be swapped",
            )  # fmt: skip
            return


_WIDE_BY_DEFAULT = ("zeros", "ones", "empty", "full")
_MAKERS = (*_WIDE_BY_DEFAULT, "rand", "randn", "random", "standard_normal")


def half_as_wide(facts: Facts) -> Iterator[Advice]:
    """Make an array of float32 where numpy's float64 is what does not fit."""
    if facts.kind not in ("numpy", "host allocator"):
        return
    for text, statement in failed(facts):
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call) or called_name(node) not in _MAKERS:
                continue
            owner, flag = text.code(node.func).partition(".")[0], keyword(node, "dtype")
            is_default = owner in ("np", "numpy") and called_name(node) in _WIDE_BY_DEFAULT
            if "64" in text.code(flag.value) if flag else is_default:
                narrow = f"{owner}.float32"
                change = text.replace(flag.value, narrow) if flag else text.add_argument(node, f"dtype={narrow}")
                yield propose(
                    "Make the array float32", text=text, changes=[change],
                    evidence=f"float64 takes {size(facts.requested)}", cost="seven digits instead of sixteen",
                )  # fmt: skip
                return


def mapped(facts: Facts) -> Iterator[Advice]:
    """Read a checkpoint from its file as it is needed."""
    for text, call in calls(facts.texts, "load") if facts.stage == "load" and facts.memory == "host" else ():
        if text.code(call.func) == "torch.load" and keyword(call, "mmap") is None:
            yield propose(
                "Map the checkpoint's file instead of reading it", cost="the file must stay where it is", text=text,
                changes=[text.add_argument(call, "mmap=True")], evidence="mmap=True reads each tensor when it is used",
            )  # fmt: skip
            return


def on_the_host(facts: Facts) -> Iterator[Advice]:
    """Load a checkpoint into the host's memory, from where it is copied into the model piece by piece."""
    for text, call in calls(facts.texts, "load") if facts.stage == "load" and facts.memory == "device" else ():
        where = keyword(call, "map_location")
        if text.code(call.func) not in ("torch.load", "load") or (where and "cpu" in text.code(where.value)):
            continue
        change = text.replace(where.value, '"cpu"') if where else text.add_argument(call, 'map_location="cpu"')
        yield propose(
            "Load the checkpoint into the host's memory", text=text, changes=[change],
            cost="its tensors are on the CPU until they are copied or moved",
            evidence=f"map_location={text.code(where.value)} puts the tensors beside the model's own" if where
            else "torch.load was putting the tensors where they were saved",
        )  # fmt: skip
        return
