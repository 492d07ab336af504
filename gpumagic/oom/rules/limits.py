"""Limits that no smaller batch changes: one request too large, caps and fragmentation of the allocator, the host."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpumagic.oom.recognition import PINNED
from gpumagic.oom.report import Advice
from gpumagic.oom.rules import proposal
from gpumagic.oom.rules.batch import remake
from gpumagic.oom.rules.facts import Facts, TensorFact
from gpumagic.oom.rules.proposal import backend, propose
from gpumagic.report.units import count, shape, size
from gpumagic.source.text import CellText, called_name, keyword

LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"})


@dataclass(frozen=True, slots=True)
class Outer:
    """Two operands of n elements whose result has n squared."""

    column: ast.expr
    """The code of the operand of shape `(n, 1)`."""
    row: ast.expr
    length: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Of the result."""
        return self.length**2 * self.itemsize


def outer(facts: Facts) -> Outer | None:
    """Return the accidental outer product on the line that failed, if the request is of its size."""
    text = facts.failing
    statement = text.statement_at(text.line) if text is not None else None
    if text is None or statement is None or facts.requested is None:
        return None
    for node in ast.walk(statement):
        found = _in_operation(facts, text, node) or _in_loss(facts, node)
        if found is not None and facts.asked_for(found.nbytes):
            return found
    return None


def squeeze(facts: Facts) -> Iterator[Advice]:
    """Take the dimension of one away before the two meet."""
    found, text = outer(facts), facts.failing
    if found is None or text is None:
        return
    code, one = text.code(found.column), (found.length, 1)
    frees = found.nbytes - found.length * found.itemsize
    yield propose(
        facts, f"Give {code} the shape of {text.code(found.row)}", frees=frees, covers=True,
        text=text, changes=[text.replace(found.column, f"{_bracketed(found.column, code)}.squeeze(-1)")],
        evidence=f"{shape(one)} with {shape((found.length,))} makes {shape((found.length,) * 2)}, {size(found.nbytes)}",
        cost="none: the result was not what was meant",
    )  # fmt: skip


def _in_operation(facts: Facts, text: CellText, node: ast.AST) -> Outer | None:
    if not isinstance(node, ast.BinOp) or isinstance(node.op, ast.MatMult):
        return None
    left, right = facts.work.tensors.get(text.code(node.left)), facts.work.tensors.get(text.code(node.right))
    return _pair(node.left, left, node.right, right) or _pair(node.right, right, node.left, left)


def _in_loss(facts: Facts, node: ast.AST) -> Outer | None:
    if not isinstance(node, ast.Call) or len(node.args) != 2 or facts.work.function not in LOSSES:
        return None
    given, target = facts.work.operands.get("input"), facts.work.operands.get("target")
    if called_name(node) in ("backward", "item"):
        return None
    return _pair(node.args[0], given, node.args[1], target) or _pair(node.args[1], target, node.args[0], given)


def _pair(one: ast.expr, column: TensorFact | None, other: ast.expr, row: TensorFact | None) -> Outer | None:
    """Return the outer product of two operands; a call's result may have any shape that the request then proves."""
    if row is None or len(row.shape) != 1 or row.shape[0] < 2:
        return None
    if column is None and not isinstance(one, ast.Call):
        return None
    if column is not None and column.shape != (*row.shape, 1):
        return None
    return Outer(one, other, row.shape[0], row.itemsize)


def _bracketed(node: ast.expr, code: str) -> str:
    return code if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({code})"


def size_bug(facts: Facts) -> Iterator[Advice]:
    """Look at the sizes: a request above 1 EB is a negative or overflowed number."""
    if facts.kind == "size bug":
        yield propose(
            facts, "Print the sizes this line passes; one is negative or overflowed", covers=None, evidence=_line(facts)
        )  # fmt: skip


def larger_than_the_device(facts: Facts) -> Iterator[Advice]:
    """Make the one request smaller: in parts, or of a smaller dtype."""
    if facts.requested is None or facts.capacity is None or facts.requested <= facts.capacity:
        return
    if outer(facts) is not None:
        return
    parts = -(-2 * facts.requested // facts.capacity)  # each at most half the device, so that a result fits beside it
    yield propose(
        facts, f"Make the result in {parts} parts or more, or of a smaller dtype", covers=None,
        evidence=f"{_line(facts)} asks for {size(facts.requested)} at once; {facts.device} has {size(facts.capacity)}",
    )  # fmt: skip


def _line(facts: Facts) -> str:
    return f"line {facts.scene.line}" if facts.scene.line is not None else "the failing line"


def fraction(facts: Facts) -> Iterator[Advice]:
    """Lift the cap that this process has set itself."""
    where = "" if facts.device in (None, "cuda:0") else f', "{facts.device}"'
    if facts.kind == "memory fraction":
        yield propose(
            facts, "Lift the cap on this process's memory", covers=None, cost="none, unless others share the device",
            first=f"torch.cuda.set_per_process_memory_fraction(1.0{where})",
            evidence="the allocator refused before it asked the driver",
        )  # fmt: skip


def benchmark(facts: Facts) -> Iterator[Advice]:
    """Do not let cuDNN try algorithms with large workspaces."""
    if facts.settings.get("cudnn.benchmark") and facts.scene.functions & {"_conv_forward", "conv2d", "conv3d"}:
        yield propose(
            facts, "Do not let cuDNN try every algorithm", covers=None,
            first="torch.backends.cudnn.benchmark = False",
            evidence="cudnn.benchmark is on and it failed in a convolution; trials take workspace",
            cost="convolutions may take longer",
        )  # fmt: skip


def large_blocks(facts: Facts) -> Iterator[Advice]:
    """Let an Intel GPU hand out more than 4 GB at once."""
    if facts.kind == "xpu block limit":
        yield propose(
            facts, "Allow blocks of more than 4 GB", covers=None, cost="a restart of the kernel",
            edit="UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1",
            evidence="the driver refuses single blocks beyond 4 GB unless the environment says so at the start",
        )  # fmt: skip


def watermark(facts: Facts) -> Iterator[Advice]:
    """Say what the cap of MPS is, and that lifting it can stall the machine."""
    if facts.kind == "mps allocator":
        yield propose(
            facts, "Lift MPS's cap on what it takes of the machine's memory", covers=None,
            edit="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", cost="a restart of the kernel; the machine may stall",
            evidence=f"the cap is {size(facts.capacity)}, a share of the memory that the CPU uses too",
        )  # fmt: skip


A_FAIR_SHARE = 8
"""Every process has pieces too small for the next request; less than one part in so many is no fragmentation."""


def is_fragmented(facts: Facts) -> bool:
    """Return whether what was reserved and unallocated would have held the request, had it been in one piece."""
    if not facts.from_allocator or facts.requested is None or facts.unallocated is None:
        return False
    return facts.unallocated >= max(facts.requested, (facts.capacity or 0) // A_FAIR_SHARE)


def expandable_segments(facts: Facts) -> Iterator[Advice]:
    """Let the allocator grow its segments, where fragmentation alone is the cause."""
    if facts.segments_can_expand and is_fragmented(facts):
        yield propose(
            facts, "Let the allocator's segments grow", frees=facts.unallocated,
            first='torch.cuda.memory._set_allocator_settings("expandable_segments:True")',
            evidence=f"{size(facts.unallocated)} was reserved but unallocated, for a request of "
            f"{size(facts.requested)}; at most that much comes back",
            cost="none known; it acts on new segments at once, not with CUDA IPC",
        )  # fmt: skip


def compact(facts: Facts) -> Iterator[Advice]:
    """Take what survives in half-empty segments to the host and back: it comes back side by side."""
    if not is_fragmented(facts) or facts.after is None or facts.requested is None:
        return
    stuck = facts.after.reserved - facts.after.allocated  # the cache has been emptied since: this is pinned by names
    if stuck < facts.requested or any(optimizer.state for optimizer in facts.optimizers):
        return
    named = [each for each in facts.kept if each.kind in _OUT]
    if sum(each.nbytes for each in named) * 2 < facts.after.allocated:
        return
    out = [_OUT[each.kind].format(name=each.name) for each in named]
    back = [_BACK[each.kind].format(name=each.name, device=facts.device) for each in named]
    needs = proposal.estimate(facts)
    first = "\n".join([*out, f"torch.{backend(facts)}.empty_cache()", *back])
    yield propose(
        facts, "Move what is there to the host and back, into whole segments", frees=stuck, first=first,
        covers=needs.missing == 0 if needs is not None else None, estimated=True,
        evidence=f"{size(stuck)} lies between blocks of {', '.join(each.name for each in named)}, "
        "where emptying the cache cannot reach it",
        cost=f"copies {size(sum(each.nbytes for each in named))} twice; other views of these tensors stay behind",
    )  # fmt: skip


def private_pools(facts: Facts) -> Iterator[Advice]:
    """Let go of the pools that CUDA graphs keep."""
    if facts.requested is not None and facts.private_pools >= facts.requested:
        yield propose(
            facts, "Forget the captured CUDA graphs", frees=facts.private_pools, first="torch._dynamo.reset()",
            evidence=f"{size(facts.private_pools)} is in pools of CUDA graphs, which nothing else may use",
            cost='compiled functions compile again; mode="reduce-overhead" makes such pools',
        )  # fmt: skip


_OUT = {
    "module": "{name}.cpu()",
    "tensor": "{name} = {name}.cpu()",
    "list": "{name} = [each.cpu() for each in {name}]",
}
_BACK = {
    "module": '{name}.to("{device}")',
    "tensor": '{name} = {name}.to("{device}")',
    "list": '{name} = [each.to("{device}") for each in {name}]',
}

_MAKERS = frozenset({"zeros", "ones", "empty", "full", "rand", "randn", "random", "standard_normal"})


def workers(facts: Facts) -> Iterator[Advice]:
    """Load batches in the kernel's own process, where workers ran out."""
    if facts.memory not in ("host", "shared") or not _in_worker(facts):
        return
    found, edit = _workers(facts)
    if not found:
        return
    yield propose(
        facts, "Load the batches without worker processes", covers=None, cost="loading is not done ahead any more",
        evidence=f"{count(found, 'worker')}, each with its own copy of what the dataset holds and "
        "two batches ahead" + (" in /dev/shm" if facts.memory == "shared" else ""),
        **edit,
    )  # fmt: skip


def unpinned(facts: Facts) -> Iterator[Advice]:
    """Do not pin the host's memory where pinning it is what failed."""
    by_loader = {"pin_memory", "_pin_memory_loop"} & facts.scene.functions
    if not by_loader and facts.kind != PINNED:
        return
    what = "batches" if by_loader else "memory"
    for text in facts.texts:
        flags = [keyword(node, "pin_memory") for node in text.nodes() if isinstance(node, ast.Call)]
        on = [flag for flag in flags if flag is not None and ast.unparse(flag.value) == "True"]
        if on:
            yield propose(
                facts, f"Do not pin the {what}", text=text, changes=[text.replace(flag.value, "False") for flag in on],
                evidence="it failed while pinning, and pinned memory cannot be swapped", cost="slower copies",
            )  # fmt: skip
            return


def half_as_wide(facts: Facts) -> Iterator[Advice]:
    """Make an array of float32 where numpy's float64 is what does not fit."""
    text = facts.failing
    if text is None or facts.requested is None or facts.kind not in ("numpy", "host allocator"):
        return
    statement = text.statement_at(text.line)
    for node in ast.walk(statement) if statement is not None else ():
        if not isinstance(node, ast.Call) or called_name(node) not in _MAKERS or not node.args:
            continue
        flag = keyword(node, "dtype")
        owner = ast.unparse(node.func).partition(".")[0]
        if owner not in ("np", "numpy") and flag is None:
            continue
        if flag is not None and "64" not in ast.unparse(flag.value):
            continue
        if called_name(node) in ("rand", "randn", "random", "standard_normal") and flag is None:
            continue
        narrow = f"{owner}.float32"
        changes = [text.replace(flag.value, narrow) if flag else text.add_argument(node, f"dtype={narrow}")]
        yield propose(
            facts, "Make the array of float32", frees=facts.requested // 2, covers=_half_fits(facts),
            text=text, changes=changes,
            evidence=f"float64 takes {size(facts.requested)}", cost="seven digits instead of sixteen",
        )  # fmt: skip
        return


def mapped(facts: Facts) -> Iterator[Advice]:
    """Read a checkpoint from its file as it is needed."""
    if facts.stage != "load" or facts.memory != "host":
        return
    for text in facts.texts:
        for node in text.nodes():
            if isinstance(node, ast.Call) and text.code(node.func) == "torch.load" and keyword(node, "mmap") is None:
                yield propose(
                    facts, "Map the checkpoint's file instead of reading it", frees=facts.requested, estimated=True,
                    text=text, changes=[text.add_argument(node, "mmap=True")], cost="the file must stay where it is",
                    evidence="mmap=True reads each tensor when it is used",
                )  # fmt: skip
                return


def _in_worker(facts: Facts) -> bool:
    return facts.kind in ("dataloader killed", "dataloader bus error", "shared memory") or (
        facts.kind == "python" and "_process_data" in facts.scene.functions
    )


def _workers(facts: Facts) -> tuple[int, dict[str, Any]]:
    """Return how many workers a loader of the cell's has, and the edit that does without them."""
    for text in facts.texts:
        flag = next(filter(None, map(_literal, text.nodes())), None)
        if flag is not None:
            changes = [text.replace(flag, "0"), *_without(text, "persistent_workers", "False")]
            changes += _without(text, "prefetch_factor", "None")
            return int(flag.value), {"text": text, "changes": changes}  # type: ignore[arg-type]
    loader = next((each for each in facts.loaders if each.workers), None)
    if loader is None:
        return 0, {}
    return loader.workers, {"first": remake(loader, num_workers=0)}


def _literal(node: ast.AST) -> ast.Constant | None:
    value = node.value if isinstance(node, ast.keyword) and node.arg == "num_workers" else None
    is_number = isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0
    return value if is_number and isinstance(value, ast.Constant) else None


def _without(text: CellText, name: str, value: str) -> list[Any]:
    calls = [node for node in text.nodes() if isinstance(node, ast.Call) and keyword(node, "num_workers")]
    flags = [keyword(node, name) for node in calls]
    return [text.replace(flag.value, value) for flag in flags if flag is not None]


def _half_fits(facts: Facts) -> bool | None:
    if facts.free is None or facts.requested is None:
        return None
    return facts.requested // 2 <= facts.free


def on_the_host(facts: Facts) -> Iterator[Advice]:
    """Load a checkpoint into the host's memory, from where it is copied into the model piece by piece."""
    if facts.stage != "load" or facts.memory != "device":
        return
    for text in facts.texts:
        for node in text.nodes():
            if not isinstance(node, ast.Call) or text.code(node.func) not in ("torch.load", "load"):
                continue
            where = keyword(node, "map_location")
            if where is not None and ast.unparse(where.value) in ("'cpu'", "torch.device('cpu')"):
                continue
            change = text.replace(where.value, '"cpu"') if where else text.add_argument(node, 'map_location="cpu"')
            yield propose(
                facts, "Load the checkpoint into the host's memory", frees=facts.grown or None, covers=True, text=text,
                changes=[change], estimated=True, cost="its tensors are on the CPU until they are copied or moved",
                evidence=f"torch.load was {_far(facts)}putting the tensors where they were saved"
                if where is None else f"map_location={text.code(where.value)} puts the tensors beside the model's own",
            )  # fmt: skip
            return


def _far(facts: Facts) -> str:
    return f"{size(facts.grown)} into " if facts.grown else ""
