"""Limits, switches and fragmentation of the allocator."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import proposal
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import backend, propose
from gpumagic.report.units import size


def fraction(facts: Facts) -> Iterator[Advice]:
    """Lift the cap that this process has set itself."""
    if facts.kind == "memory fraction":
        yield propose(
            facts, "Lift the cap on this process's memory", covers=None, cost="none, unless others share the device",
            first="torch.cuda.set_per_process_memory_fraction(1.0)",
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
