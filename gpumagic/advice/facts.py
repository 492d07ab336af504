"""The facts that advice is derived from: one frozen record of a failure, filled before and after the release.

It holds no tensor, no frame and no exception. A rule reads it and nothing else, so every rule can be tested
with a record written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpumagic.memory.allocator import segment_size
from gpumagic.report.units import LARGE

if TYPE_CHECKING:
    import ast

    from gpumagic.advice.records import Need
    from gpumagic.memory.allocator import AllocatorStats
    from gpumagic.report.base import Holder
    from gpumagic.source.cell_code import BatchSize, CellCode
    from gpumagic.source.text import CellText

PINNED = "pinned memory"
"""The kind of a failure to take memory of the host that the driver pins."""

_STEPS = ("_multi_tensor_", "_single_tensor_", "_fused_adam", "_fused_sgd", "_init_group")
_STAGES = {
    "backward": frozenset({"_engine_run_backward"}),
    "load": frozenset({"_load", "load_tensor", "persistent_load"}),
    "move": frozenset({"_apply"}),
    "forward": frozenset({"forward", "_call_impl"}),
}
_TRAINERS = frozenset({"_fit_impl", "_inner_training_loop"})
"""Functions in which the trainers of Lightning and transformers train."""


@dataclass(frozen=True, slots=True)
class TensorFact:
    """A tensor that a name stood for when it failed."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str
    requires_grad: bool = False
    graph: bool = False
    """Whether an autograd graph made it."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A list, deque or dict of tensors on the device that failed, or of tuples, lists or dicts of them."""

    tensors: int
    nbytes: int
    graphs: int = 0
    """How many of them carry an autograd graph."""
    is_of_numbers: bool = False
    """Whether each is a single number."""
    place: str = ""
    """Where an object has it, ``"memory.records"``; empty where the name is the collection's own."""
    is_dict: bool = False
    member: str = "tensor"
    """What each is: a ``"tensor"``, ``"module"`` or ``"optimizer"``, or a ``"list"``, ``"tuple"``, ``"named tuple"`` or
    ``"dict"`` of tensors and more."""

    @property
    def is_of_records(self) -> bool:
        """Whether each is a tuple or a dict with tensors."""
        return self.member in ("tuple", "named tuple", "dict")


SAVING_METHODS = (
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
    "set_grad_checkpointing",
    "enable_slicing",
    "_move_list_states_to_cpu",
)
"""Methods that tell how a model may take less memory: of transformers, diffusers and timm, and of torchmetrics."""


@dataclass(frozen=True, slots=True)
class Model:
    """A module on the device that failed."""

    name: str
    nbytes: int
    float32_nbytes: int
    training: bool
    checkpoints: bool | None
    """Whether it recomputes activations; None where it has no switch for it."""
    frozen: bool = False
    """Whether none of its parameters requires a gradient."""
    sequential: bool = False
    """Whether it is an `nn.Sequential`."""
    in_place: bool = False
    """Whether a layer in it writes over what it is given."""
    blocks: str | None = None
    """Code for the longest list of like children, over which it loops: ``"net.layers"``."""
    gradients: int = 0
    """Bytes of its parameters' gradients."""
    embeddings: tuple[str, ...] = ()
    """Code for large embeddings in it whose gradients are not sparse."""
    local: bool = False
    """Whether only a function's variable names it, which another cell cannot reach."""
    methods: tuple[str, ...] = ()
    """Those of `SAVING_METHODS` that its class has."""
    uneven: tuple[str, ...] = ()
    """Kinds of layers that compute another result of a part of the data, or of the same data again."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer over parameters on the device that failed."""

    name: str
    kind: str
    """Its class's name."""
    nbytes: int
    """Of the parameters."""
    state: int = 0
    """Bytes of its state so far."""
    fused: bool | None = None
    local: bool = False
    models: frozenset[str] = frozenset()
    """Names of the modules of which it updates parameters."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Storages that the same set of names reaches."""

    names: frozenset[str]
    nbytes: int
    kind: str = "plain"
    code: str = ""
    """What releases them, where that is more than to unbind the names."""


@dataclass(frozen=True, slots=True)
class Loader:
    """A DataLoader that the cell uses."""

    name: str
    batch_size: int
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """A library's trainer, by the call that tells it how to train."""

    library: str
    """``"transformers"`` or ``"lightning"``."""
    text: CellText
    """The cell's, or the statements of earlier cells that made the trainer, whose cell it names."""
    call: ast.Call
    """Of `TrainingArguments` or of Lightning's `Trainer`."""


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
    before: AllocatorStats | None = None
    at_failure: AllocatorStats | None = None
    after: AllocatorStats | None = None
    from_allocator: bool = False
    segments_can_expand: bool = False
    """True where the allocator knows expandable segments and does not use them."""
    line: int | None = None
    code: str | None = None
    source: str | None = None
    """The cell's text; None where the code is a file, of which the guarded block is only a part."""
    functions: frozenset[str] = frozenset()
    """Names of the functions on the failing stack, the user's and the libraries'."""
    inside: str | None = None
    """The deepest line of the user's own, where that is in another cell or a function's file."""
    calls_backward: bool = False
    """Whether a function of the user's on the failing stack calls `backward`."""
    autocast: bool = False
    """Whether one of them mentions `autocast`."""
    failing: CellText | None = None
    """The text of the deepest code of the user's own, with the line that ran, the cell's or another's."""
    tensors: Mapping[str, TensorFact] = field(default_factory=dict)
    """By what that code calls them, attributes such as ``"self.weight"`` included."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    collections: Mapping[str, Collection] = field(default_factory=dict)
    operands: Mapping[str, TensorFact] = field(default_factory=dict)
    """The tensors that the function of `torch.nn.functional` got that ran, if one did."""
    sums: frozenset[str] = frozenset()
    """What that code calls the criteria that add up losses, and do not take their mean."""
    moving: int = 0
    """Bytes of floating-point parameters in the module that was being moved."""
    cell: CellCode | None = None
    holders: tuple[Holder, ...] = ()
    leftovers: tuple[Ownership, ...] = ()
    """What is only reached by names bound before the cell that neither it nor anything it calls uses."""
    graphs: Ownership | None = None
    """What only autograd graphs keep, of names bound before the cell that neither it nor anything it calls uses."""
    stale: Mapping[str, int] = field(default_factory=dict)
    """``{name: bytes}`` of old values that were alive while the cell made their successors."""
    models: tuple[Model, ...] = ()
    """Those that the cell uses, or a function of it that was running."""
    models_there: tuple[Model, ...] = ()
    """All on the device, largest first."""
    batches: tuple[BatchSize, ...] = ()
    free_elsewhere: Mapping[str, int] = field(default_factory=dict)
    """Free bytes of the other devices of the same type."""
    other_processes: int | None = None
    optimizers: tuple[Optimizer, ...] = ()
    """Those that the cell uses, or a function of it that was running."""
    optimizers_there: tuple[Optimizer, ...] = ()
    device_names: tuple[str, ...] = ()
    """Variables that the cell uses and that name the device."""
    brought: tuple[Holder, ...] = ()
    """What the cell uses of the notebook's variables that live on the device."""
    kept: tuple[Holder, ...] = ()
    """Every variable of the notebook with memory on the device."""
    residue: tuple[str, ...] = ()
    """Variables that the failed cell left and that it makes anew when it runs again."""
    emptied: tuple[str, ...] = ()
    """What has to be cleared besides: state of optimizers that lacks parts, since the first step failed, and lists that
    hooks have filled."""
    loaders: tuple[Loader, ...] = ()
    trainer: Trainer | None = None
    fused_attention: bool = False
    """Whether torch has attention kernels for this backend that never make the matrix of all scores."""
    need: Need | None = None
    """What the cell needs, by a dry run; None where there was none."""

    @property
    def text(self) -> CellText | None:
        """The text of the cell that failed."""
        return self.cell.text if self.cell is not None else None

    @property
    def texts(self) -> tuple[CellText, ...]:
        """The texts that an edit may change: the cell's, then that of the function in another cell that failed."""
        found = [each for each in (self.text, self.failing) if each is not None]
        return tuple(found[1:] if len(found) == 2 and found[0].cell == found[1].cell else found)

    @property
    def graph_names(self) -> list[str]:
        """The variables that carry an autograd graph."""
        return [name for name, fact in self.tensors.items() if fact.graph and name.isidentifier()]

    @property
    def stage(self) -> str:
        """What was going on: ``"step"``, ``"backward"``, ``"load"``, ``"move"``, ``"forward"`` or ``"other"``."""
        functions = self.functions
        if any(name.startswith(_STEPS) for name in functions):
            return "step"
        for stage, marks in _STAGES.items():
            if functions & marks:
                return stage
        return "other"

    @property
    def may_take_less(self) -> bool:
        """Whether it failed where it matters how much data there is at a time."""
        return self.memory == "device" and self.stage not in ("step", "move", "load")

    @property
    def trains(self) -> bool:
        """Whether the cell, or a function of the user's on the failing stack, calls `backward`, or a trainer does."""
        by_itself = (self.cell is not None and self.cell.trains) or self.calls_backward
        return by_itself or bool(self.functions & _TRAINERS)

    @property
    def transient(self) -> int:
        """Bytes of the cell's that no name but those of its frames and graphs held."""
        if self.at_failure is None or self.after is None:
            return 0
        named = sum(holder.nbytes for holder in self.holders)
        return max(
            0, self.at_failure.allocated - max(named, self.before.allocated if self.before else 0)
        )

    @property
    def came_back(self) -> int:
        """Bytes that were allocated before the cell and are not any more: an earlier failure had kept them."""
        if self.before is None or self.after is None:
            return 0
        return max(0, self.before.allocated - self.after.allocated)

    @property
    def short(self) -> int | None:
        """Bytes missing: for the whole cell by a dry run, else for the request that failed; None if unknown."""
        if self.need is not None:
            return self.need.missing
        if self.requested is None or self.free is None:
            return None
        return max(0, self.requested - self.free)

    def asked_for(self, nbytes: int) -> bool:
        """Return whether the request may have been for so many bytes: allocators round up, texts round off."""
        if self.requested is None:
            return False
        return nbytes * 0.99 <= self.requested <= segment_size(nbytes) * 1.01

    @property
    def large(self) -> set[str]:
        """The names of large tensors on the device that the code worked with."""
        return {
            name
            for name, fact in self.tensors.items()
            if fact.device == self.device and fact.nbytes >= LARGE
        }
