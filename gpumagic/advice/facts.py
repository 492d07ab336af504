"""The facts that advice is derived from: one frozen record of a failure, filled by the probes.

It holds no tensor, no frame and no exception. A rule reads it and nothing else, so every rule can be tested
with a record written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumagic.advice.cell_code import CellCode
    from gpumagic.probes.allocator import AllocatorFigures
    from gpumagic.probes.claims import Claim
    from gpumagic.reports import Holder


@dataclass(frozen=True, slots=True)
class Growth:
    """An accumulation in a loop that live objects confirm: its target keeps autograd graphs alive."""

    target: str
    added: str
    line: int
    append: bool
    scalar: bool
    tensors: int
    """How many tensors with a graph it holds: 1 for a running sum, the length for a list."""


@dataclass(frozen=True, slots=True)
class Model:
    """A module of the notebook on the device that failed."""

    name: str
    nbytes: int
    float32_nbytes: int
    training: bool
    checkpoints: bool | None
    """Whether it recomputes activations; None where it has no switch for it."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A batch size that the cell uses: a literal in it, a variable of the notebook or a DataLoader's."""

    name: str
    value: int
    line: int | None = None
    """The cell's line with the literal; None for a variable or a loader made elsewhere."""
    loader: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """What the frames of a failure tell, read before they are emptied."""

    line: int | None = None
    code: str | None = None
    source: str | None = None
    """The cell's text; None where the code is a file, of which the guarded block is only a part."""
    functions: frozenset[str] = frozenset()
    """Names of the functions on the failing stack, the user's and the libraries'."""
    inside: str | None = None
    """The deepest line of the user's own, where that is in another cell or a function's file."""
    growths: tuple[Growth, ...] = ()
    calls_backward: bool = False
    """Whether a function of the user's on the failing stack calls `backward`."""
    autocast: bool = False
    """Whether one of them mentions `autocast`."""
    graph_names: tuple[str, ...] = ()
    """Variables of the failing frames that carry an autograd graph."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything known of one failure."""

    kind: str
    memory: str = "device"
    device: str | None = None
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    """Bytes of the device that nobody had taken when it failed, by the error's text or the driver."""
    unallocated: int | None = None
    """Bytes torch had reserved but not allocated then."""
    before: AllocatorFigures | None = None
    at_failure: AllocatorFigures | None = None
    after: AllocatorFigures | None = None
    from_allocator: bool = False
    segments_can_expand: bool = False
    """True where the allocator knows expandable segments and does not use them."""
    scene: Scene = field(default_factory=Scene)
    cell: CellCode | None = None
    looked_at: bool = False
    """Whether the notebook could be looked at: without it, no holders does not mean none."""
    holders: tuple[Holder, ...] = ()
    leftovers: tuple[Claim, ...] = ()
    """What is only reached by names bound before the cell that neither it nor anything it calls uses."""
    stale: Mapping[str, int] = field(default_factory=dict)
    """``{name: bytes}`` of old values that were alive while the cell made their successors."""
    models: tuple[Model, ...] = ()
    batches: tuple[BatchSize, ...] = ()
    free_elsewhere: Mapping[str, int] = field(default_factory=dict)
    """Free bytes of the other devices of the same type."""
    other_processes: int | None = None

    @property
    def short(self) -> int | None:
        """Bytes missing for the request that failed; None if it cannot be known."""
        if self.requested is None or self.free is None:
            return None
        return max(0, self.requested - self.free)

    def covers(self, frees: int | None) -> bool | None:
        """Return whether freeing so many bytes is enough for the request that failed; None if unknown."""
        return None if frees is None or self.short is None else frees >= self.short

    @property
    def leftover_nbytes(self) -> int:
        """Bytes that unbinding all leftovers releases."""
        return sum(claim.nbytes for claim in self.leftovers)

    @property
    def grown(self) -> int | None:
        """Bytes the cell had allocated when it failed, beyond what was there before."""
        if self.before is None or self.at_failure is None:
            return None
        return max(0, self.at_failure.allocated - self.before.allocated)
