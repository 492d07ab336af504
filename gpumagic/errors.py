"""What can go wrong, by name.

Every error a user can cause is a `GpuMagicError` whose message is one line that ends in what to do.
The magics turn them into IPython's `UsageError` in one place (`magics.py`); the plain API raises them as they are.

    GpuMagicError
    |-- OptionError          an option, a size or a count that cannot be read
    |-- DeviceNotFound       a device that cannot be read or is not here
    |-- DryRunUnavailable a cell cannot be dry-run here
    |-- SimgpuUnavailable    the simulated accelerator cannot be built or changed
    `-- FakecudaUnavailable  torch's CUDA build, or a compiler for the fake runtime below it, is not here

`gpumagic.OutOfMemory` is not among them: it must be a subclass of torch's own, so it lives beside the
code that recognises out-of-memory, `gpumagic.oom.recognition`.
"""

from __future__ import annotations

from collections.abc import Iterable


class GpuMagicError(Exception):
    """Base of the errors that a user of gpumagic can cause and fix."""


class OptionError(GpuMagicError, ValueError):
    """An option or its value cannot be read; the message says what would be."""


class DeviceNotFound(GpuMagicError, ValueError):
    """The device named is not one of this machine's; the message lists those that are."""


class DryRunUnavailable(GpuMagicError, RuntimeError):
    """A cell cannot be dry-run on this system or with this torch; the message says what is missing."""


class SimgpuUnavailable(GpuMagicError, RuntimeError):
    """The simulated accelerator cannot be built here, or can no longer be changed."""


class FakecudaUnavailable(GpuMagicError, RuntimeError):
    """The fake CUDA runtime cannot be built here; the message says what is missing."""


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word that was most likely meant, or None if none is near; messages suggest it.

    That is the one with the fewest letters changed, left out, put in or exchanged with their neighbour, at most one in
    three; or the only one that begins with what was written.
    """
    words = sorted(set(valid))
    distances = {each: _distance(word.casefold(), each.casefold()) for each in words}
    letters = len(word.strip("-"))
    if letters < 2 or not words:
        return None
    begun = [each for each in words if each.startswith(word)]
    best = min(words, key=lambda each: (distances[each], each not in begun, abs(len(each) - len(word))))
    if distances[best] <= max(1, letters // 3):
        return best
    return begun[0] if len(begun) == 1 else None


def _distance(one: str, other: str) -> int:
    """Return the edit distance in which two neighbours that changed places are one edit."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, their in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != their))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == their:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
