"""Why a cell failed, where the reason is where its tensors are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Operand:
    """Something the failing line names, and where it is."""

    code: str
    """How the line names it: ``"x"``, ``"self.mask"``, ``"batch['labels']"``."""
    devices: tuple[str, ...]
    """Where its tensors are, the most bytes first."""
    nbytes: int = 0
    kind: Literal["tensor", "module", "container", "optimizer", "generator", "device"] = "tensor"
    is_variable: bool = True
    """Whether it is a plain name, which an assignment can bind anew."""
    is_unregistered: bool = False
    """Whether it is a module's tensor that is neither a parameter nor a buffer, so that `.to` leaves it behind."""
    is_index: bool = False
    """Whether the line uses it to pick elements of another."""
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an exception of a device's means for the line that raised it."""

    what: str
    """One sentence or two: what is where."""
    fix: str | None = None
    """The line of code that mends it."""
    note: str = ""
    """What else helps."""
    line: int | None = None
    code: str | None = None
    operands: tuple[Operand, ...] = ()

    function: str | None = None
    """The function whose line it is; None for the cell's or the block's own."""

    @property
    def place(self) -> str:
        """Where it failed: ``"line 3: "``, ``"line 7 of Net.forward(): "``, ``""`` where that is not known."""
        if self.line is None:
            return ""
        return f"line {self.line} of {self.function}(): " if self.function else f"line {self.line}: "

    def __str__(self) -> str:
        fix = [f"fix: {self.fix}"] if self.fix else []
        return "\n".join([self.place + self.what, *fix, *([self.note] if self.note else [])])
