"""Limits and switches of one backend."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
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
