"""Every block's life on some devices: how big, asked for by which operator on which line, from when to when.

Dry runs and traced cells fill a ledger: from the allocator's history, or by requests to an allocator that is only
computed. Time is counted in allocations. Nothing is decided while the cell runs: what a block was (a gradient, an
activation) is often known only later, so the account of the peak is made at the end, from the lives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Part(NamedTuple):
    """A part of a breakdown."""

    name: str
    """As reports sum it: ``"parameters"``. `report.document.PART_COLOURS` has its colour."""
    kind: str | None = None
    """What `%devices` calls one tensor of it, ``"parameter"``; None for what is told over time only."""


PARTS = (
    Part("parameters", "parameter"),
    Part("gathered parameters"),
    Part("buffers", "buffer"),
    Part("optimizer state", "optimizer state"),
    Part("gradients", "gradient"),
    Part("buckets"),
    Part("activations", "activation"),
    Part("temporaries"),
    Part("earlier cells"),
    Part("library workspaces"),
)
"""In the order in which they are shown."""
PART_OF_KIND = {part.kind: part.name for part in PARTS if part.kind}
"""The part by the kind of one tensor."""


BASE = "before the cell"
"""The operator of what was alive already."""
REST = ""
"""The name of the module of what belongs to none."""
_CERTAIN = frozenset({"parameters", "buffers", "library workspaces"})
"""What is found by name. A backward pass calls all that is there activations, and workspaces are found at the end."""
GATHERED, BUCKETS = "gathered parameters", "buckets"
"""What ranks collect of each other, by where it was asked for."""


class Place(NamedTuple):
    """Where the cell stands."""

    line: int | None = None
    code: str = ""
    function: str = ""
    """``"train_step, line 3"`` where the line is in a function of the notebook's."""


@dataclass(slots=True, eq=False)
class Life:
    """One block."""

    device: int
    nbytes: int
    born: int
    operator: str
    place: Place
    backward: bool
    died: int | None = None
    kind: str = ""
    module: int | None = None
    """Whose it is, by the number that the dry run gives modules."""

    def mark(self, kind: str) -> None:
        """Say what it is; the first word holds, except where a later one is certain: see `_CERTAIN`.

        What was there before the cell is no activation, also where a graph keeps it.
        """
        if self.kind == GATHERED:
            return
        if self.kind == BUCKETS:
            if kind == "gradients":
                self.kind = kind
            return
        is_input = kind == "activations" and self.operator == BASE
        is_first_word = not self.kind and not is_input
        if is_first_word or kind in _CERTAIN:
            self.kind = kind

    def is_in_use(self, time: int) -> bool:
        """Return whether it was there at a time."""
        if self.born > time:
            return False
        return self.died is None or self.died > time

    def part(self) -> str:
        """Return what it counts as, which is final only when the cell has ended."""
        if self.kind:
            return self.kind
        return "earlier cells" if self.operator == BASE else "temporaries"


class Allocation(NamedTuple):
    """A request for memory: where the cell asked for it, by which operator, and for how much."""

    line: int | None = None
    code: str = ""
    function: str = ""
    """As of `Place`."""
    operator: str = ""
    nbytes: int = 0


NO_ALLOCATION = Allocation()


class Peak(NamedTuple):
    """The highest point so far of one device, and the block that made it."""

    allocated: int = 0
    time: int = 0
    life: Life | None = None

    def allocation(self) -> Allocation:
        """Return the request by which it came."""
        if self.life is None:
            return NO_ALLOCATION
        operator, _, _ = self.life.operator.partition(".")
        return Allocation(*self.life.place, operator, self.life.nbytes)


NO_PEAK = Peak()
NOWHERE = Place()


@dataclass
class Account:
    """One device: what is in use."""

    allocated: int = 0
    peak: Peak = NO_PEAK
    failure: Peak | None = None
    """The request that was refused, or would have been."""


@dataclass
class LineUse:
    """What a line of the cell did to one device, in bytes."""

    line: int
    code: str
    device: int
    peak: int = 0
    """Allocated at most while it ran."""
    after: int = 0
    """Allocated when it ended, the last time."""


class BlockChange(NamedTuple):
    """A block taken, or given back."""

    life: Life
    nbytes: int
    """Negative where it is given back."""
    operator: int
    """How many operators had begun."""
    line: int | None
    allocated: int
    """On its device, after it."""


@dataclass
class Ledger:
    """The lives of all blocks of all devices.

    Args:
        accounts: one a device.
        where: tells where the cell stands.
    """

    accounts: Sequence[Account]
    where: Callable[[], Place] = Place
    lives: list[Life] = field(default_factory=list)
    lines: dict[tuple[int, int], LineUse] = field(default_factory=dict)
    """What each line of the cell did to each device, by both."""
    timeline: list[BlockChange] = field(default_factory=list)
    """Every change since `start`."""
    at_start: list[Life] = field(default_factory=list)
    """What was in use when the cell began."""
    time: int = 0
    operators: int = 0
    operator: str = BASE
    place: Place = NOWHERE
    in_backward: int = 0
    """How many backward passes have begun and not ended."""
    backward: Place = NOWHERE
    """Where the last one began or ended."""
    module: int | None = None
    """Whose the blocks are that are asked for, by the number that the dry run gives modules."""
    unpacking: bool = False
    """Whether what is made now was there before the cell."""
    settle: Callable[[], None] = lambda: None
    """Tells of the storages that have ended since."""
    blocks: dict[int, Life] = field(default_factory=dict)
    """The blocks in use, by address, or by what else their storages are told apart."""

    def start(self) -> None:
        """Begin with the cell: what is in use was there before it."""
        self.settle()
        self.at_start = [life for life in self.lives if life.died is None]
        self.timeline.clear()
        self.unpacking = False

    def begin(self, key: int, device: int, nbytes: int) -> Life:
        """Account for a block that the allocator has given."""
        account = self.accounts[device]
        self.time += 1
        # Positional, as names take as long again, for each block of each pass.
        life = Life(
            device,
            nbytes,
            self.time,
            self.operator,
            self.place,
            self.in_backward > 0,
            module=self.module,
        )
        self.blocks[key] = life
        self.lives.append(life)
        account.allocated += nbytes
        if account.allocated > account.peak.allocated:
            account.peak = Peak(account.allocated, self.time, life)
        self._note(life, nbytes, account.allocated)
        return life

    def end(self, key: int) -> None:
        """Account for the end of a block."""
        life = self.blocks.pop(key)
        life.died = self.time + 1
        account = self.accounts[life.device]
        account.allocated -= life.nbytes
        self._note(life, -life.nbytes, account.allocated)

    def _note(self, life: Life, nbytes: int, allocated: int) -> None:
        """Note what the line that runs has taken or given back."""
        line = self.place.line
        if line is not None:
            key = (line, life.device)
            if key not in self.lines:
                self.lines[key] = LineUse(line, self.place.code, life.device)
            use = self.lines[key]
            use.after = allocated
            use.peak = max(use.peak, allocated)
        self.timeline.append(BlockChange(life, nbytes, self.operators, line, allocated))

    # ---- What is seen while the cell runs

    def mark(self, key: int, kind: str) -> None:
        """Say what a block in use is."""
        life = self.blocks.get(key)
        if life is not None:
            life.mark(kind)

    def set_module(self, key: int, module: int) -> None:
        """Say which module a block in use belongs to."""
        life = self.blocks.get(key)
        if life is not None:
            life.module = module

    def enter_module(self, module: int | None) -> None:
        """Say which module asks for memory from now on."""
        self.module = module

    def begin_backward(self, place: Place) -> None:
        """Say that a backward pass begins: what the cell has made and holds then is kept for it."""
        self.settle()
        for life in self.blocks.values():
            if not life.backward:
                life.mark("activations")
        self.in_backward += 1
        self.backward = place

    def end_backward(self, place: Place) -> None:
        """Say that a backward pass ends."""
        self.in_backward -= 1
        self.backward = place

    # ---- What is told of it

    def figures(self) -> list[int]:
        """Return what is in use on each device."""
        self.settle()
        return [account.allocated for account in self.accounts]

    def at_peak(self, device: int, names: Sequence[str]) -> dict[str, Counter[str]]:
        """Return the bytes in use at a device's peak, by the name of a module and by part."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        time = self.accounts[device].peak.time
        for life in self.lives:
            if life.device == device and life.is_in_use(time):
                module = REST if life.module is None else names[life.module]
                found[module][life.part()] += life.nbytes
        return found


MOST_POINTS = 200
"""Of a device; of more changes the highest of each stretch is told, and the last."""


class Point(NamedTuple):
    """A device's memory at one time."""

    device: int
    operator: int
    """How many operators had begun."""
    line: int | None
    """The line of the cell; None before the first change."""
    allocated: int
    parts: dict[str, int]
    """The same bytes by part."""


def timeline(ledger: Ledger) -> list[Point]:
    """Return every device's memory over the cell, thinned, one device after the other."""
    points: list[Point] = []
    for device in range(len(ledger.accounts)):
        points += _timeline_of(ledger, device)
    return points


def _timeline_of(ledger: Ledger, device: int) -> Iterator[Point]:
    """Yield one device's memory over the cell, thinned."""
    changes = [change for change in ledger.timeline if change.life.device == device]
    shown = _places_shown(changes)
    sums: Counter[str] = Counter()
    for life in ledger.at_start:
        if life.device == device:
            sums[life.part()] += life.nbytes
    yield Point(device, 0, None, sums.total(), dict(+sums))
    for place, change in enumerate(changes):
        sums[change.life.part()] += change.nbytes
        if place in shown:
            yield Point(
                device, change.operator, change.line, change.allocated, dict(+sums)
            )


def _places_shown(changes: list[BlockChange]) -> set[int]:
    """Return the places of at most `MOST_POINTS` changes, and one: the highest of each stretch, and the last."""
    if not changes:
        return set()
    stride = -(-len(changes) // MOST_POINTS)
    shown = {len(changes) - 1}
    for start in range(0, len(changes), stride):
        places = range(start, min(start + stride, len(changes)))
        shown.add(max(places, key=lambda place: changes[place].allocated))
    return shown
