"""Memory that is reserved in pieces too small to use."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import law
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import backend, propose
from gpumagic.report.units import size

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
    needs = law.estimate(facts)
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
