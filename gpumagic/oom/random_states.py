"""Every source of random numbers that a cell can draw from, and what sets each back to where it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpumagic.memory import allocator

Restore = Callable[[], None]


def remember(namespace: Mapping[str, object]) -> list[Restore]:
    """Return what sets the generators of Python, numpy, torch and the variables back; may be called again and again.

    Only devices in use are asked: any other has drawn nothing yet, and asking would bring it to life.
    """
    return list(_all(namespace))


def _all(namespace: Mapping[str, object]) -> Iterator[Restore]:
    state = random.getstate()
    yield lambda: random.setstate(state)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        legacy = numpy.get_state()
        yield lambda: numpy.set_state(legacy)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield from _of_torch(torch)
    for value in list(namespace.values()):
        yield from _of_variable(value, numpy, torch)


def _of_torch(torch: Any) -> Iterator[Restore]:
    state = torch.get_rng_state()
    yield lambda: torch.set_rng_state(state)
    for device in allocator.all_figures():
        backend, _, index = device.partition(":")
        module: Any = allocator.device_module(backend)
        if hasattr(module, "get_rng_state"):
            yield _of_device(module, () if backend == "mps" else (int(index),))


def _of_device(module: Any, place: tuple[int, ...]) -> Restore:
    state = module.get_rng_state(*place)

    def restore() -> None:
        module.set_rng_state(state, *place)

    return restore


def _of_variable(value: Any, numpy: Any, torch: Any) -> Iterator[Restore]:
    """Yield the same for a generator that a variable is."""
    if type(value) is random.Random:
        state = value.getstate()
        yield lambda: value.setstate(state)
    elif numpy is not None and type(value) is numpy.Generator:
        bits = value.bit_generator
        inside = bits.state
        yield lambda: setattr(bits, "state", inside)
    elif torch is not None and type(value) is torch.Generator:
        saved = value.get_state()
        yield lambda: _set(value, saved)


def _set(generator: Any, state: Any) -> None:
    generator.set_state(state)
