"""What the notebook's process and the worker say to each other: requests, and the reply to each.

Both processes import this module. A request is pickled, since it comes from the notebook's own process. A reply is
JSON: a cell has run in the process that sends it, and nothing that a cell may have written is unpickled in the
notebook. `decode` checks a reply field by field; what is no reply becomes an `Ended` that says so.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple, cast

from gpumagic.dryrun import typed_json
from gpumagic.dryrun.effects import Effect
from gpumagic.dryrun.parts import Slot
from gpumagic.memory.ledger import NO_ALLOCATION, Allocation, LineUse, Point
from gpumagic.memory.segments import Segment

# ---- Values that no dry run knows: which expressions decide by them, and which way they go in a run


class Key(NamedTuple):
    """An expression of the notebook that reads a value of the device, or decides by one."""

    line: int | None
    """The line of the cell that runs; None where none does, as in a thread."""
    code: str
    library: str = ""
    """Where a library reads or decides below that expression, as ``"file:line"``; empty if none does."""


HOST = Key(None, "")
"""Contents of the host that were not sent: which expression reads them is not known."""
EVERY = Key(None, "every")
"""Stands for all expressions that read a number and have no override of their own."""


class Kind(str, Enum):
    """What decides."""

    TRUTH = "truth"
    """A truth or a comparison."""
    ORDER = "order"
    """An order or a key by which C code sorts and finds, with more than two outcomes."""
    SELECTION = "selection"
    """How many elements a mask selects."""
    NUMBER = "number"
    """A number, or a tensor of some, that went where nothing is noted."""


class Number(IntEnum):
    """What a number that is read may be: see `worker.guesses.NUMBERS`."""

    USUAL = 0
    FALLING = 1
    LARGE = 2
    LARGER = 3
    """What needs more with a larger number has it for its size."""
    LAST = 4
    """-1, the index of the last of a list."""


class When(str, Enum):
    """At which turns of a loop an override holds."""

    ALWAYS = "always"
    BUT_ONCE = "but once"
    ONCE = "once"
    A_FEW = "a few"


class Override(NamedTuple):
    """What goes another way than usual in a run."""

    place: Key
    kind: Kind
    outcome: int
    """The outcome of a truth or an order, which `Number` a number is; a mask selects nothing."""


@dataclass(frozen=True)
class Scenario:
    """How the values that no dry run knows go in one run."""

    overrides: tuple[Override, ...] = ()
    when: When = When.ALWAYS
    notes: bool = True
    """Whether numbers that are read note what is decided by them, instead of being plain floats and ints."""
    follows: bool = False
    """Whether values that the host put on the device are followed there, so that they are known where they are read."""


USUAL = Scenario()


# ---- Requests


@dataclass(frozen=True)
class Code:
    """What is run."""

    source: str | None
    """The cell's code; None for a function, which is among the notebook's names as ``__dry_run__``."""
    filename: str
    sources: dict[str, str]
    """The text of the cell and of the notebook's other cells, by file name."""


@dataclass(frozen=True)
class Notebook:
    """The notebook's variables that the code uses, as `payload.pack` wrote them."""

    data: bytes
    shared: str
    """The path of the memory that has the large contents of the host."""
    slots: list[Slot]
    """Where these lie in it."""
    scopes: int
    """How many namespaces the functions have that were sent; the first is the notebook's."""
    values: dict[str, object]
    """Other values for some of the notebook's names."""


@dataclass(frozen=True)
class Devices:
    """The devices of the dry run; the lists have one entry a device."""

    engine: str
    backend: str
    gpu: str | None
    """A name of `memory.presets.GPUS`; None for the GPU that is here."""
    gpus: str
    """The devices as the fake CUDA runtime reads them."""
    capacities: list[int | None]
    base: list[int]
    """Bytes that the notebook has allocated besides what is sent, where it is not known how its segments are filled."""
    segments: list[list[Segment] | None]
    workspaces: list[list[tuple[int, int]]]
    """Address and bytes of each workspace that torch keeps for cuBLAS."""
    cuts_to_size: bool
    """As of `worker.fake.allocator.Allocator`."""

    def unlimited(self) -> Devices:
        """Return the same devices, which refuse no request."""
        return dataclasses.replace(self, capacities=[None] * len(self.capacities))


@dataclass(frozen=True)
class Imports:
    """Where code is imported from, and what of it."""

    path: list[str]
    folder: str
    """The working directory."""
    preload: list[str]
    """Modules that the worker imports once for all dry runs."""
    installed: list[str]
    """Packages of the notebook's that are no code of the user's."""


@dataclass(frozen=True)
class RandomStates:
    """The states of the notebook's random generators on the host."""

    python: tuple[Any, ...]
    torch: bytes
    numpy: Any
    """None where the notebook has no numpy."""


@dataclass(frozen=True)
class Rank:
    """Which of many processes the dry run is."""

    number: int
    world: int
    per_node: int
    heard: dict[str, tuple[str, ...]]
    """What ranks that were run before have sent to others: pickled objects in base64, by what they were for."""


@dataclass(frozen=True)
class Request:
    """One dry run."""

    code: Code
    notebook: Notebook
    devices: Devices
    imports: Imports
    random: RandomStates
    time_limit: float
    rank: Rank | None = None
    """None where the cell is no rank of many."""
    scenario: Scenario = USUAL
    is_brief: bool = False
    """Whether figures alone are wanted, and no history by line."""


def pack(requests: Sequence[Request]) -> bytes:
    """Return requests as they are sent to the worker; what several of them have in common is sent once."""
    return pickle.dumps(requests, protocol=5)


def unpack(data: bytes) -> Sequence[Request]:
    """Return the requests that the notebook's process has packed; for the worker alone."""
    return cast("Sequence[Request]", pickle.loads(data))  # noqa: S301  # from our own parent


SAME_AGAIN = b""
"""What the worker answers where it has to start again without a module that cannot be forked: to be asked once more."""


# ---- Replies


class Ending(str, Enum):
    """Why a dry run did not come to the cell's end."""

    WORKER_DIED = "the worker died"
    NO_ANSWER = "the worker gave no answer"
    UNREADABLE = "the worker's answer cannot be read"
    NOT_SET_UP = "it could not be set up"
    CRASHED = "its process crashed"
    OUT_OF_TIME = "its time was up"
    EXCEEDS_HOST = "it takes too much of the host's memory"
    NO_ROOM = "the device is too small for what the notebook holds already"
    STARTS_RANKS = "the cell starts other processes"
    NEEDS_VALUES = (
        "something is decided by values that a run that follows them may know"
    )
    CELL_FAILS = "the cell fails"
    CELL_MAY_FAIL = "the cell may fail"
    STOPPED = "the cell does what no dry run can"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What comes of a request, whatever it is."""

    effects: tuple[Effect, ...] = ()
    """What the cell would do outside of its process."""
    seconds: float = 0.0
    """Seconds of a core that the run has taken; 0 where its process did not tell."""
    imported: tuple[str, ...] = ()
    """Modules of the notebook's packages that the run has imported besides those of the warm process."""


@dataclass(frozen=True, kw_only=True)
class Ended(Reply):
    """A run without figures."""

    reason: Ending
    sentence: str = ""
    ranks: int | None = None
    """How many processes the cell starts, where it is dry-run as one of those instead."""

    @property
    def exceeds_host(self) -> bool:
        """Whether it takes too much of the host's memory."""
        return self.reason is Ending.EXCEEDS_HOST


@dataclass(frozen=True)
class Failure:
    """How a cell failed for another reason than the device's memory."""

    kind: str
    """The exception's class."""
    text: str
    """The first line of its message."""
    line: int | None = None
    """The line of the cell, where it is known."""
    is_refused: bool = False
    """Whether the dry run gave up: the cell does something of which it cannot tell what it takes."""
    is_denied: bool = False
    """Whether the message is the one of a system call that is not allowed."""
    exceeds_host: bool = False
    """Whether the host's memory did not do."""
    is_beyond_list: bool = False
    """Whether an index was beyond the end of a list."""
    may_be_of_noted: bool = False
    """Whether it may come of a number that notes what it decides, which is no float: see `worker.noted`."""
    undone: tuple[str, ...] = ()
    """What the dry run has not done for the cell, of which the failure may come."""
    waits_for: int | None = None
    """The rank that has to be run first, since this one waits for what it sends."""


class Decision(NamedTuple):
    """Something that is decided by a value that is not known."""

    place: Key
    kind: Kind
    outcomes: tuple[bool, bool] | None
    """A truth's first outcome and its last."""


class Passes(NamedTuple):
    """How often a loop of the cell was run."""

    place: str
    """Such as ``"line 4"``."""
    run: int
    asked: int | None
    """None where only running it to its end tells, as for ``while``."""


class Flat(NamedTuple):
    """A loop that was not run to its end and whose memory stopped growing."""

    place: str
    number: int
    """The pass after which none took more."""


@dataclass(frozen=True)
class DeviceOutcome:
    """What a run took of one device, in bytes."""

    before: int
    """Allocated when the cell begins."""
    peak: int
    after: int
    reserved: int
    """Held by the allocator at most."""
    traffic: int
    """Allocated in all."""
    failed: bool = False
    """Whether a request was refused and the cell ended by it."""
    retries: int = 0
    """How often the allocator gave its cache back before it could serve a request."""
    peak_at: Allocation = NO_ALLOCATION
    refused: Allocation | None = None
    """The first request that was refused."""
    breakdown: dict[str, int] = dataclasses.field(default_factory=dict)
    """The bytes of the peak by what they are."""
    modules: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """The same by the module that they belong to, the largest first."""


@dataclass(frozen=True)
class RankOutcome:
    """What a run tells of the other ranks."""

    said: dict[str, tuple[str, ...]]
    """What it sends to them, as of `Rank.heard`."""
    stages: tuple[int, ...]
    """The ranks of its pipeline, one a stage."""


@dataclass(frozen=True, kw_only=True)
class Outcome(Reply):
    """A run with figures: to the cell's end, to its failure, or as far as the time allowed."""

    devices: tuple[DeviceOutcome, ...]
    lines: tuple[LineUse, ...] = ()
    timeline: tuple[Point, ...] = ()
    operators: int = 0
    """How many of them were run."""
    failure: Failure | None = None
    is_cut_short: bool = False
    """Whether the time was up before the cell's end."""
    passes: tuple[Passes, ...] = ()
    flat: tuple[Flat, ...] = ()
    assumed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    has_unknown_parts: bool = False
    """Whether something took memory of which it is not known how much, as some kernels do for themselves."""
    decisions: tuple[Decision, ...] = ()
    most_turns: int = 0
    """How often the same expression decided at most."""
    has_noted: bool = False
    """Whether numbers were handed out that note what they decide."""
    communicators: int = 0
    """How many NCCL has made."""
    rank: RankOutcome | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether a device refused what the cell needs."""
        return any(device.failed for device in self.devices)


LONGEST_REPLY = 1 << 30
"""Bytes; what claims to be longer is none."""
UNREADABLE = Ended(
    reason=Ending.UNREADABLE,
    sentence="the dry run's worker sent an answer that cannot be read",
)


def encode(reply: Outcome | Ended) -> bytes:
    """Return a reply as it is sent to the notebook's process."""
    return json.dumps({type(reply).__name__: reply}, default=vars).encode()


def decode(data: bytes, devices: int) -> Outcome | Ended:
    """Return the reply that some bytes are, or `UNREADABLE` where they are none.

    Args:
        data: what was received.
        devices: how many devices the request has.
    """
    try:
        content = typed_json.parse(data)
        ((name, fields),) = content.items()
        if name == Ended.__name__:
            return typed_json.read(Ended, fields)
        if name != Outcome.__name__:
            return UNREADABLE
        outcome = typed_json.read(Outcome, fields)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return UNREADABLE
    indices = {point.device for point in outcome.timeline}
    indices.update(use.device for use in outcome.lines)
    if len(outcome.devices) != devices or not indices <= set(range(devices)):
        return UNREADABLE
    return outcome
