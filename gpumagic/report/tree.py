"""Figures by dotted path, such as those of modules, as a tree: a table of the largest branches, all folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumagic.report.document import Block, Column, Fold, Table
from gpumagic.report.units import count, size

SHOWN = 16
"""Branches of the table: the largest, in the order of the tree."""
OUTSIDE = "(no module)"
"""Stands for what belongs to no path."""


class Branch(NamedTuple):
    """A path below the one that it is part of, how deep it is, and its bytes by kind with those of all below it."""

    name: str
    depth: int
    parts: Counter[str]


def tree_of(found: Mapping[str, Mapping[str, int]]) -> list[Branch]:
    """Return the branches in order; what has only one branch below it, and nothing itself, is one with that."""
    totals: dict[str, Counter[str]] = {}
    for path, parts in sorted(found.items(), key=lambda item: _natural(item[0])):
        steps = path.split(".") if path else [OUTSIDE]
        for depth in range(1, len(steps) + 1):
            totals.setdefault(".".join(steps[:depth]), Counter()).update(parts)
    below = Counter(path.rpartition(".")[0] for path in totals)
    branches, above = [], [""]
    for path, parts in totals.items():
        if below[path] == 1 and not any(found.get(path, {}).values()):
            continue
        while above[-1] and not path.startswith(above[-1]):
            above.pop()
        branches.append(Branch(path.removeprefix(above[-1]), len(above) - 1, parts))
        above.append(f"{path}.")
    return branches


def _natural(path: str) -> list[tuple[int, str]]:
    """Return what sorts ``blocks.2`` before ``blocks.10``, and what has no path last."""
    return [(int(step), "") if step.isdecimal() else (-1, step) for step in (path or "~").split(".")]


def tree_blocks(found: Mapping[str, Mapping[str, int]], kinds: Sequence[str], caption: str) -> Iterator[Block]:
    """Yield a table of the largest branches with a column for each kind, and the whole tree behind a summary."""
    everything = tree_of(found)
    largest = sorted(everything, key=lambda each: (-each.parts.total(), each.depth))[:SHOWN]
    chosen = set(map(id, largest))
    whole = sum(each.parts.total() for each in everything if not each.depth) or 1
    yield _table([each for each in everything if id(each) in chosen], kinds, whole, caption)
    if len(everything) > len(chosen):
        every = f"All {count(len(everything), 'branch', 'branches')}"
        yield Fold(every, [_table(everything, kinds, whole, every)])


def _table(branches: Sequence[Branch], kinds: Sequence[str], whole: int, caption: str) -> Table:
    def of_kind(kind: str) -> Column[Branch]:
        return Column(kind.capitalize(), lambda each: size(n) if (n := each.parts[kind]) else "", "right", 1)

    columns = (
        Column[Branch](
            "Module", lambda each: "  " * each.depth + each.name, shrinks=True, cut="middle", code=True
        ),
        Column[Branch](
            "Size", lambda each: size(each.parts.total()), "right",
            bar=lambda each: {kind: n for kind in kinds if (n := each.parts[kind])},
        ),
        *map(of_kind, kinds),
    )  # fmt: skip
    return Table.of(branches, columns, caption, whole=whole)
