"""Figures by dotted path, such as those of modules, as a tree: a table of the largest branches, all folded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpumagic.report.document import Block, Column, Fold, Table
from gpumagic.report.units import count, size

SHOWN = 16
"""Branches of the table: the largest, in the order of the tree."""
OUTSIDE = "(no module)"
"""Stands for what belongs to no path."""


@dataclass
class Branch:
    """A path, its own bytes by kind, and the paths below it."""

    name: str
    depth: int = 0
    own: dict[str, int] = field(default_factory=dict)
    below: dict[str, Branch] = field(default_factory=dict)

    @property
    def total(self) -> dict[str, int]:
        """The bytes by kind, those below it included."""
        found = dict(self.own)
        for each in self.below.values():
            for kind, nbytes in each.total.items():
                found[kind] = found.get(kind, 0) + nbytes
        return found

    @property
    def nbytes(self) -> int:
        """All its bytes."""
        return sum(self.total.values())

    def walk(self) -> Iterator[Branch]:
        """Yield this branch and those below it, in order."""
        yield self
        for each in self.below.values():
            yield from each.walk()


def tree_of(found: Mapping[str, Mapping[str, int]]) -> list[Branch]:
    """Return the branches at the top; what has only one branch below it, and nothing itself, is one with that."""
    root = Branch("")
    for path, parts in sorted(found.items(), key=lambda item: _natural(item[0])):
        at = root
        for step in path.split(".") if path else [OUTSIDE]:
            at = at.below.setdefault(step, Branch(step))
        at.own = {kind: nbytes for kind, nbytes in parts.items() if nbytes}
    for each in root.below.values():
        _settle(each, 0)
    return list(root.below.values())


def _natural(path: str) -> list[tuple[int, str]]:
    """Return what sorts ``blocks.2`` before ``blocks.10``, and what has no path last."""
    return [(int(step), "") if step.isdecimal() else (-1, step) for step in (path or "~").split(".")]


def _settle(branch: Branch, depth: int) -> None:
    while len(branch.below) == 1 and not branch.own:
        (only,) = branch.below.values()
        branch.name, branch.own, branch.below = f"{branch.name}.{only.name}", only.own, only.below
    branch.depth = depth
    for each in branch.below.values():
        _settle(each, depth + 1)


def tree_blocks(found: Mapping[str, Mapping[str, int]], kinds: Sequence[str], caption: str) -> Iterator[Block]:
    """Yield a table of the largest branches with a column for each kind, and the whole tree behind a summary."""
    top = tree_of(found)
    everything = [each for branch in top for each in branch.walk()]
    largest = sorted(everything, key=lambda each: (-each.nbytes, each.depth))[:SHOWN]
    chosen = {id(each) for each in largest}
    whole = sum(each.nbytes for each in top) or 1
    yield _table([each for each in everything if id(each) in chosen], kinds, whole, caption)
    if len(everything) > len(chosen):
        every = f"All {count(len(everything), 'branch', 'branches')}"
        yield Fold(every, [_table(everything, kinds, whole, every)])


def _table(branches: Sequence[Branch], kinds: Sequence[str], whole: int, caption: str) -> Table:
    def of_kind(kind: str) -> Column[Branch]:
        return Column(kind.capitalize(), lambda each: size(n) if (n := each.total.get(kind)) else "", "right", 1)

    columns = (
        Column[Branch](
            "Module", lambda each: "  " * each.depth + each.name, shrinks=True, cut="middle", code=True
        ),
        Column[Branch](
            "Size", lambda each: size(each.nbytes), "right",
            bar=lambda each: {kind: n for kind in kinds if (n := each.total.get(kind))},
        ),
        *map(of_kind, kinds),
    )  # fmt: skip
    return Table.of(branches, columns, caption, whole=whole)
