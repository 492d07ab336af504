"""What can go wrong, by name.

Every error a user can cause is a `GpuMagicError` whose message is one line that ends in what to do.
The magics turn them into IPython's `UsageError` in one place (`magics.py`); the plain API raises them as they are.
`gpumagic.OutOfMemory` is not among them: it must be a subclass of torch's own, so it lives beside the
code that recognises out-of-memory, `gpumagic.oom.recognition`.
"""

from __future__ import annotations

import difflib
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
    """Return the valid word that was most likely meant, or None if none is near; messages suggest it."""
    bare = word.strip("-")
    if len(bare) < 2:
        return None
    words = sorted(set(valid))
    completions = [candidate for candidate in words if candidate.startswith(word)]
    if len(completions) == 1:
        return completions[0]
    by_letters = {candidate.casefold().strip("-"): candidate for candidate in words}
    cutoff = 0.5 if len(word) < 3 else 0.65
    close = difflib.get_close_matches(bare.casefold(), by_letters, cutoff=cutoff)
    if not close:
        return None
    return by_letters[min(close, key=lambda letters: abs(len(letters) - len(bare)))]
