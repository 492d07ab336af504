"""What each device's memory was made of over the cell: told at its end, when every block's part is known."""

from __future__ import annotations

from gpumagic.dryrun.stage.ledger import Change, Ledger, Life

MOST_POINTS = 200
"""Of a device; of more changes the highest of each stretch is told, and the last."""

Point = tuple[int, int, int | None, int, dict[str, int]]
"""``(device, operators so far, line, bytes allocated, the same by part)``; no line before the first change."""


def told(ledger: Ledger) -> list[Point]:
    """Return the course of every device, thinned, one device after the other."""
    return [point for device in range(len(ledger.accounts)) for point in _course(ledger, device)]


def _course(ledger: Ledger, device: int) -> list[Point]:
    changes = [each for each in ledger.timeline if each.life.device == device]
    shown = _shown(changes)
    use = _Use()
    for life in ledger.at_start:
        if life.device == device:
            use.change(life)
    points: list[Point] = [(device, 0, None, use.allocated, use.parts())]
    for place, change in enumerate(changes):
        use.change(change.life)
        if place in shown:
            points.append((device, change.operator, change.line, change.allocated, use.parts()))
    return points


class _Use:
    """What is in use at a moment, by part."""

    def __init__(self) -> None:
        self._alive: set[Life] = set()
        self._sums: dict[str, int] = {}

    @property
    def allocated(self) -> int:
        return sum(self._sums.values())

    def change(self, life: Life) -> None:
        """Add a life that begins, or take one away that was there."""
        grows = life not in self._alive
        (self._alive.add if grows else self._alive.remove)(life)
        self._sums[life.part()] = self._sums.get(life.part(), 0) + (life.nbytes if grows else -life.nbytes)

    def parts(self) -> dict[str, int]:
        return {part: nbytes for part, nbytes in self._sums.items() if nbytes}


def _shown(changes: list[Change]) -> set[int]:
    """Return the places of at most `MOST_POINTS` changes, and one."""
    stride = max(1, -(-len(changes) // MOST_POINTS))
    starts = range(0, len(changes), stride)
    highest = {max(range(at, min(at + stride, len(changes))), key=lambda i: changes[i].allocated) for at in starts}
    return highest | ({len(changes) - 1} if changes else set())
