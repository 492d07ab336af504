"""What a search for advice returns: what the cell needs, and changes with the dry runs that they were tried in."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpumagic.dryrun.wire import Ending
from gpumagic.source.text import Change, apply_changes, parse_tree

_DELETES_OUTPUT = re.compile(r"%xdel \w+")
"""IPython's magic that deletes a value and every name that IPython gave to it."""

ON_THE_CPU = "Run the cell on the CPU"
"""The title of what fits without the device."""


@dataclass(frozen=True, slots=True)
class Need:
    """What the cell needs on the device, by a dry run of it from where the release left the notebook.

    Every sentence of a report that compares what is needed with what is there is made of this.
    """

    needed: int
    """Bytes allocated at its peak, with as much memory as it wants."""
    available: int
    """Bytes that this process can have there."""
    fits: bool | None
    """Whether it ran with what is there; None where values that are not known decide."""
    certain: bool
    """As `DryRunReport.certain`."""
    needed_alone: int | None = None
    """What it would need on an empty device: without what the notebook holds there and the cell does not use."""
    static: int = 0
    """Parameters, gradients and optimizer state at the peak, which no smaller batch makes smaller."""
    depends_on: str = ""
    """The lines on whose values it depends; empty where it depends on none."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the peak by what they are for: parameters, activations..."""

    @property
    def missing(self) -> int:
        """Bytes by which the peak exceeds what is there; 0 where only the pieces are too small."""
        return max(0, self.needed - self.available)


@dataclass(frozen=True, slots=True)
class EditTrial:
    """A dry run of the cell with an edit made."""

    fits: bool | None = None
    """None where it could not be tried, or where it cannot be told."""
    certain: bool = False
    needs: int | None = None
    """Bytes allocated at the peak of the device that decides."""
    available: int | None = None
    """Bytes that this process can have there."""
    saves: int | None = None
    """How much lower the peak of the device that failed is than without the edit."""
    reason: str = ""
    """Why it could not be tried, or what is not certain."""
    ending: Ending | None = None
    """Why its dry run did not come to the cell's end, where it did not."""


@dataclass(frozen=True, slots=True)
class NoCost:
    """The cost of a change by which nothing is lost."""

    because: str = ""
    unless: str = ""
    """What would be lost by it, and when."""

    def __str__(self) -> str:
        because = f": {self.because}" if self.because else ""
        unless = f", unless {self.unless}" if self.unless else ""
        return f"none{because}{unless}"


FREE = NoCost()
"""Nothing is lost, and no word is to be said of it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change that would help, with what it is worth, what it costs and why we believe it."""

    title: str
    frees: int | None
    """Bytes that it saves: of the peak, by its dry run; where it was not tried, what it gives back; None if unknown."""
    covers: bool | None
    """Whether the cell fits with it, by a dry run; None where it was not tried or the dry run cannot tell."""
    edit: str | None = None
    """The code to type: the cell's new lines, or where it has none, what to run before it."""
    evidence: str = ""
    cost: str = ""
    """What is lost by it, or has to be done besides."""
    trial: EditTrial | None = None
    changes: tuple[Change, ...] = ()
    """`edit` as changes of the cell's text; empty where it is not one."""
    first: str | None = None
    """Code to run once before the cell runs again."""
    gpu: str = ""
    """The GPU by name that the dry run was of, where that is not the one that is here."""
    ranks: int | None = None
    """How many processes run the edited code, each on a GPU of its own."""
    is_free: bool = False
    """Whether nothing is lost by it; `cost` then says why, or on which condition."""

    @property
    def deletion(self) -> str:
        """The code to run before the cell, where that is all there is to do and only deletes variables; else empty."""
        code = self.first or self.edit or ""
        if self.changes or not all(map(_only_deletes, code.splitlines())):
            return ""
        return code

    def apply(self, source: str, cell: str = "") -> str:
        """Return a cell's text with the changes of this advice made.

        Args:
            source: the text of the cell, with the magic on its first line as it was run.
            cell: which cell that is, as in `Change.cell`.

        Raises:
            ValueError: the text is not the one that the advice was made for.
        """
        return apply_changes(self.changes, source, cell)


def _only_deletes(line: str) -> bool:
    if _DELETES_OUTPUT.fullmatch(line):
        return True
    tree = parse_tree(line)
    return tree is not None and all(
        isinstance(statement, ast.Delete) for statement in tree.body
    )
