"""Everything known of one failure: a `Facts`, of four records, each built once by the function that it names.

    event      what ran out, and how much was asked for          oom.failure.read_event
    frames     where it failed, and what the code worked with    oom.stack.read_frames
    notebook   what lives after the release                      oom.evidence.read_notebook
    need       what the cell needs, by a dry run                 advice.trials.Trials.need

The first two are read while the frames of the exception are whole. No record holds a tensor, a frame or an exception.
A rule reads `Facts` and nothing else, so every rule can be tested with records written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gpumagic._compat import StrEnum, torch_frames
from gpumagic.memory.allocator import segment_size
from gpumagic.report.units import LARGE

if TYPE_CHECKING:
    import ast

    from gpumagic.advice.records import Need
    from gpumagic.memory.allocator import AllocatorStats
    from gpumagic.report.base import Holder
    from gpumagic.source.cell_code import BatchSize, CellCode
    from gpumagic.source.text import CellText

Certainty = Literal["certain", "probable", "not-oom"]
"""How sure it is that memory ran out: ``"probable"`` where other faults have the same text, ``"not-oom"`` where torch
raises its error of this type without a shortage."""


class Kind(StrEnum):
    """Which allocator or library gave up."""

    # torch's caching allocators
    SIZE_BUG = "size bug"
    """A request of more than 1 EB, which is a bug in a size."""
    MEMORY_FRACTION = "memory fraction"
    """The cap that the process has set itself."""
    CUDA_ASYNC_ALLOCATOR = "cuda async allocator"
    CUDA_ALLOCATOR = "cuda allocator"
    ROCM_ALLOCATOR = "rocm allocator"
    XPU_ALLOCATOR = "xpu allocator"
    MPS_ALLOCATOR = "mps allocator"
    XPU_BLOCK_LIMIT = "xpu block limit"
    XPU_DRIVER = "xpu driver"
    ACCELERATOR_ALLOCATOR = "accelerator allocator"
    """The allocator of any other backend."""
    EXPANDABLE_SEGMENTS = "expandable segments"

    # CUDA and its libraries, which ask the driver directly
    NCCL = "nccl"
    RMM = "rmm"
    CUDA_DRIVER = "cuda driver"
    CUDA_RUNTIME = "cuda runtime"
    CUBLAS = "cublas"
    CUDNN = "cudnn"
    CUSOLVER_OR_CUSPARSE = "cusolver or cusparse"

    # Other frameworks
    CUPY = "cupy"
    JAX = "jax"
    TENSORFLOW = "tensorflow"
    TENSORFLOW_HOST = "tensorflow (host)"

    # Memory of the host
    SHARED_MEMORY = "shared memory"
    DATALOADER_BUS_ERROR = "dataloader bus error"
    DATALOADER_KILLED = "dataloader killed"
    NUMPY = "numpy"
    HOST_ALLOCATOR = "host allocator"
    PYTHON = "python"
    OPERATING_SYSTEM = "operating system"
    PINNED_MEMORY = "pinned memory"
    """Memory of the host that the driver pins."""


class Memory(StrEnum):
    """What ran out."""

    DEVICE = "device"
    HOST = "host"
    SHARED = "shared"
    """``/dev/shm``, through which DataLoader workers pass batches."""


class Stage(StrEnum):
    """What was going on when it failed."""

    STEP = "step"
    """An optimizer's step."""
    BACKWARD = "backward"
    LOAD = "load"
    """`torch.load`."""
    MOVE = "move"
    """`Module.to` or its like."""
    FORWARD = "forward"
    OTHER = "other"


_STAGE_FUNCTIONS = {
    Stage.BACKWARD: frozenset({torch_frames.IN_BACKWARD}),
    Stage.LOAD: frozenset({torch_frames.IN_LOADING, "load_tensor", "persistent_load"}),
    Stage.MOVE: frozenset({torch_frames.IN_MODULE_MOVE}),
    Stage.FORWARD: frozenset({"forward", torch_frames.IN_MODULE_CALL}),
}
"""Functions that run in each of the other stages; the first that is found counts."""
_TRAINER_FUNCTIONS = frozenset({"_fit_impl", "_inner_training_loop"})
"""Functions in which the trainers of Lightning and transformers train."""


@dataclass(frozen=True, slots=True)
class Event:
    """What ran out, from the error's text and the allocator's figures; built by `oom.failure.read_event`."""

    kind: Kind
    certainty: Certainty = "certain"
    memory: Memory = Memory.DEVICE
    device: str | None = None
    """The device that the error names, else the fullest of its type in use."""
    names_device: bool = True
    """Whether the error names the device."""
    message: str = ""
    """``"Type: first line"`` of the exception that says so."""
    raised: str = ""
    """The same of the exception that ended the cell; differs where that one wrapped it."""
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    """Bytes of the device that nobody had taken when it failed, by the error's text or the driver."""
    unallocated: int | None = None
    """Bytes torch had reserved but not allocated then."""
    before: AllocatorStats | None = None
    """The allocator's figures of the device before the cell; after the release they are `Notebook.after`."""
    at_failure: AllocatorStats | None = None
    from_allocator: bool = False
    """Whether torch's caching allocator gave up, which empties its cache and tries again before it does."""
    segments_can_expand: bool = False
    """True where the allocator knows expandable segments and does not use them."""

    def asked_for(self, nbytes: int) -> bool:
        """Return whether the request may have been for so many bytes: allocators round up, texts round off."""
        if self.requested is None:
            return False
        return nbytes * 0.99 <= self.requested <= segment_size(nbytes) * 1.01


@dataclass(frozen=True, slots=True)
class TensorFact:
    """A tensor that a name stood for when it failed."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str
    requires_grad: bool = False
    has_graph: bool = False
    """Whether an autograd graph made it."""


Member = Literal[
    "tensor", "module", "optimizer", "list", "tuple", "named tuple", "dict"
]


@dataclass(frozen=True, slots=True)
class Collection:
    """A list, deque or dict of tensors on the device that failed, or of tuples, lists or dicts of them."""

    tensors: int
    """How many tensors are in it."""
    nbytes: int
    graphs: int = 0
    """How many of them carry an autograd graph."""
    is_of_numbers: bool = False
    """Whether each is a single number."""
    place: str = ""
    """Where an object has it, ``"memory.records"``; empty where the name is the collection's own."""
    is_dict: bool = False
    member: Member = "tensor"
    """What its members are; those of a list, tuple or dict are tensors and more."""

    @property
    def is_of_records(self) -> bool:
        """Whether each is a tuple or a dict with tensors."""
        return self.member in ("tuple", "named tuple", "dict")


METRIC_METHOD = "_move_list_states_to_cpu"
"""The method of torchmetrics's metrics that keeps their lists on the CPU."""
SAVING_METHODS = (
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
    "set_grad_checkpointing",
    "enable_slicing",
    METRIC_METHOD,
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
    writes_in_place: bool = False
    """Whether a layer in it writes over what it is given."""
    blocks: str | None = None
    """Code for the longest list of like children, over which it loops: ``"net.layers"``."""
    gradient_nbytes: int = 0
    """Bytes of its parameters' gradients."""
    embeddings: tuple[str, ...] = ()
    """Code for large embeddings in it whose gradients are not sparse."""
    local: bool = False
    """Whether only a function's variable names it, which another cell cannot reach."""
    saving_methods: tuple[str, ...] = ()
    """Those of `SAVING_METHODS` that its class has."""
    uneven_layers: tuple[str, ...] = ()
    """Kinds of layers that compute another result of a part of the data, or of the same data again."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer over parameters on the device that failed."""

    name: str
    kind: str
    """Its class's name."""
    nbytes: int
    """Of the parameters."""
    state_nbytes: int = 0
    """Bytes of its state so far."""
    fused: bool | None = None
    local: bool = False
    """Whether only a function's variable names it, which another cell cannot reach."""
    models: frozenset[str] = frozenset()
    """Names of the modules of which it updates parameters."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Where it failed, and what the code on the failing stack worked with; built by `oom.stack.read_frames`.

    The failing code is the deepest code of the user's own that ran: the cell's, or a function's of an earlier cell.
    """

    line: int | None = None
    """The line of the cell that failed."""
    code: str | None = None
    """The text of that line."""
    source: str | None = None
    """The cell's text; None where the code is a file, of which the guarded block is only a part."""
    cell: CellCode | None = None
    """The cell, parsed."""
    functions: frozenset[str] = frozenset()
    """Names of the functions on the failing stack, the user's and the libraries'."""
    deepest_line: str | None = None
    """The deepest line of the user's own in words, where that is in another cell or a function's file."""
    calls_backward: bool = False
    """Whether a function of the user's on the failing stack calls `backward`."""
    mentions_autocast: bool = False
    """Whether one of them mentions `autocast`."""
    failing_text: CellText | None = None
    """The text of the failing code, with the line that ran."""
    tensors: Mapping[str, TensorFact] = field(default_factory=dict)
    """By what the failing code calls them, attributes such as ``"self.weight"`` included."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Likewise."""
    collections: Mapping[str, Collection] = field(default_factory=dict)
    """Likewise."""
    operands: Mapping[str, TensorFact] = field(default_factory=dict)
    """The tensors that the function of `torch.nn.functional` got that ran, if one did, by its parameters."""
    summing_criteria: frozenset[str] = frozenset()
    """What the failing code calls the criteria that add up losses, and do not take their mean."""
    moved_nbytes: int = 0
    """Bytes of floating-point parameters in the module that was being moved."""
    models_alive: tuple[Model, ...] = ()
    """All on the device, largest first, those of variables of running functions included."""
    optimizers_alive: tuple[Optimizer, ...] = ()
    """Likewise."""

    @property
    def text(self) -> CellText | None:
        """The text of the cell that failed."""
        return self.cell.text if self.cell is not None else None

    @property
    def texts(self) -> tuple[CellText, ...]:
        """The texts that an edit may change: the cell's, then that of the function in another cell that failed."""
        text, failing = self.text, self.failing_text
        if text is None or failing is None:
            return tuple(filter(None, (text, failing)))
        # Of the same cell the text of the failing code has the line as well
        return (failing,) if text.cell == failing.cell else (text, failing)

    @property
    def stage(self) -> Stage:
        """What was going on, by the functions on the stack."""
        if any(
            name.startswith(torch_frames.IN_OPTIMIZER_STEP) for name in self.functions
        ):
            return Stage.STEP
        for stage, functions in _STAGE_FUNCTIONS.items():
            if self.functions & functions:
                return stage
        return Stage.OTHER

    @property
    def trains(self) -> bool:
        """Whether the cell, or a function of the user's on the failing stack, calls `backward`, or a trainer does."""
        if self.cell is not None and self.cell.trains:
            return True
        return self.calls_backward or bool(self.functions & _TRAINER_FUNCTIONS)

    @property
    def graph_names(self) -> list[str]:
        """The variables that carry an autograd graph."""
        return [
            name
            for name, fact in self.tensors.items()
            if fact.has_graph and name.isidentifier()
        ]


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

    library: Literal["transformers", "lightning"]
    text: CellText
    """The cell's, or the statements of earlier cells that made the trainer, whose cell it names."""
    call: ast.Call
    """Of `TrainingArguments` or of Lightning's `Trainer`."""


@dataclass(frozen=True, slots=True)
class Notebook:
    """What lives in the notebook after the release, and what of it the cell uses.

    Built by `oom.evidence.read_notebook`. A name is an earlier one if it was bound before the cell, and still is to the
    same value.
    """

    after: AllocatorStats | None = None
    """The allocator's figures of the device, after the release."""
    holders: tuple[Holder, ...] = ()
    """Who holds memory on the device, largest first: sets of names that share it, and the workspaces of cuBLAS."""
    variables_on_device: tuple[Holder, ...] = ()
    """Every variable with memory on the device, what they share counted for each."""
    inputs_on_device: tuple[Holder, ...] = ()
    """Those of the earlier ones that the cell uses."""
    leftovers: tuple[Ownership, ...] = ()
    """What is only reached by earlier names that neither the cell nor anything it calls uses."""
    leftover_graphs: Ownership | None = None
    """What only autograd graphs of such names keep."""
    about_to_be_rebound: Mapping[str, int] = field(default_factory=dict)
    """``{name: bytes}`` of old values that were alive while the cell made their successors."""
    left_by_failed_run: tuple[str, ...] = ()
    """Variables that the failed cell left and that it makes anew when it runs again."""
    reset_code: Mapping[str, str] = field(default_factory=dict)
    """``{name: code}`` that clears what the failed cell left in earlier values: state of optimizers that lacks parts,
    since the first step failed, and lists that hooks have filled."""
    models: tuple[Model, ...] = ()
    """Those of `Frames.models_alive` that the cell uses, or a function of it that was running."""
    optimizers: tuple[Optimizer, ...] = ()
    """Likewise of `Frames.optimizers_alive`."""
    loaders: tuple[Loader, ...] = ()
    """Those that the cell uses."""
    trainer: Trainer | None = None
    batch_sizes: tuple[BatchSize, ...] = ()
    """Those that the cell writes or uses, then those of the failing function in another cell."""
    device_names: tuple[str, ...] = ()
    """Variables that the cell uses and that name the device."""
    free_elsewhere: Mapping[str, int] = field(default_factory=dict)
    """Free bytes of the other devices of the same type."""
    other_processes: int | None = None
    """Bytes that other processes hold on the device."""
    has_fused_attention: bool = False
    """Whether torch has attention kernels for this backend that never make the matrix of all scores."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything known of one failure."""

    event: Event
    frames: Frames = field(default_factory=Frames)
    notebook: Notebook = field(default_factory=Notebook)
    need: Need | None = None
    """What the cell needs; None where no dry run tells. Built by `advice.trials.Trials.need`."""

    @property
    def may_take_less(self) -> bool:
        """Whether it failed where it matters how much data there is at a time."""
        if self.event.memory is not Memory.DEVICE:
            return False
        return self.frames.stage not in (Stage.STEP, Stage.MOVE, Stage.LOAD)

    @property
    def large_tensors(self) -> set[str]:
        """The names of large tensors on the device that the failing code worked with."""
        return {
            name
            for name, tensor in self.frames.tensors.items()
            if tensor.device == self.event.device and tensor.nbytes >= LARGE
        }

    @property
    def transient(self) -> int:
        """Bytes of the cell's that no name but those of its frames and graphs held."""
        at_failure, before = self.event.at_failure, self.event.before
        if at_failure is None or self.notebook.after is None:
            return 0
        named = sum(holder.nbytes for holder in self.notebook.holders)
        already_there = before.allocated if before is not None else 0
        return max(0, at_failure.allocated - max(named, already_there))

    @property
    def freed_since_start(self) -> int:
        """Bytes that were allocated before the cell and are not any more: an earlier failure had kept them."""
        before, after = self.event.before, self.notebook.after
        if before is None or after is None:
            return 0
        return max(0, before.allocated - after.allocated)

    @property
    def missing_bytes(self) -> int | None:
        """Bytes missing: for the whole cell by a dry run, else for the request that failed; None if unknown."""
        if self.need is not None:
            return self.need.missing
        if self.event.requested is None or self.event.free is None:
            return None
        return max(0, self.event.requested - self.event.free)
