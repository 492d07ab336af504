"""What the host reads when a cell is really run over the fake runtime, where no kernel computes it.

A script of reads says what comes: `number=falling; masks=all`. It is put below torch, apart from what dry runs do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

NUMBERS: dict[str, Callable[[], Iterator[float]]] = {
    "constant": lambda: itertools.repeat(1.0),
    "constant big": lambda: itertools.repeat(1e3),
    "falling": lambda: (1.0 / n for n in itertools.count(1)),
    "rising": lambda: (float(n) for n in itertools.count(1)),
    "changing sign": lambda: itertools.cycle((1.0, -1.0)),
}
SHARES = {"none": 0.0, "half": 0.5, "all": 1.0}


def scripts_of(text: str) -> list[dict[str, str]]:
    """Return the scripts of a cell's line `# reads: ...`, one for each time it is really run; an empty one without."""
    line = next((each for each in text.splitlines() if each.startswith("# reads:")), "# reads:")
    told = [part.strip() for part in line.removeprefix("# reads:").split(";")]
    return [
        dict(setting.split("=") for setting in part.split(", ")) if part else {} for part in told
    ]


class Reads:
    """Answers what the host asks of a device's values.

    Args:
        number: one of `NUMBERS`, what fractions are.
        truth: `False`, `True`, `in turn`, or `then FTF`: false, true, false, and from then on true.
        masks: one of `SHARES`, how much a mask selects.
    """

    def __init__(self, number: str = "constant", truth: str = "False", masks: str = "none") -> None:
        self._numbers = NUMBERS[number]()
        self._truths = _truths(truth)
        self._share = SHARES[masks]
        self._library: Any = None

    def install(self) -> None:
        """Answer for the rest of the process."""
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("_local_scalar_dense", self._scalar, "CUDA", allow_override=True)
        self._library.impl("nonzero", self._nonzero, "CUDA", allow_override=True)
        torch.Tensor.cpu = self._copied(torch.Tensor.cpu)
        torch.amp.GradScaler._maybe_opt_step = lambda _, optimizer, __, *args, **kwargs: (
            optimizer.step(*args, **kwargs)
        )

    def _scalar(self, tensor: torch.Tensor) -> complex | bool:
        if tensor.dtype == torch.bool:
            return next(self._truths)
        number = next(self._numbers)
        if tensor.is_complex():
            return complex(number)
        return number if tensor.is_floating_point() else int(number)

    def _copied(self, copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a method whose integers are zeros, and so an index of anything."""

        def copied(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            made = copy(tensor, *args, **kwargs)
            return made.zero_() if tensor.is_cuda and not made.is_floating_point() else made

        return copied

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        # Torch lays the indices out by dimension, each a column of its own.
        return mask.new_empty((mask.dim(), int(mask.numel() * self._share)), dtype=torch.int64).t()


def _truths(told: str) -> Iterator[bool]:
    if told == "in turn":
        return itertools.cycle((False, True))
    if told.startswith("then "):
        return itertools.chain(
            (each == "T" for each in told.removeprefix("then ")), itertools.repeat(True)
        )
    return itertools.repeat(told == "True")
