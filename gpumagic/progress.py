"""A progress bar while something is measured: tqdm's where it is installed, one plain line where not."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

Step = TypeVar("Step")


def bar(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps, showing on stderr how many are done and what the next one is; nothing stays behind."""
    make = _tqdm()
    if make is None:
        yield from _line(steps)
        return
    shown = make(steps, leave=False, unit="measurement")
    for step in shown:
        shown.set_description(str(step))
        yield step


def _tqdm() -> Callable[..., Any] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in a notebook without ipywidgets it says so, and then works as text
            found: Callable[..., Any] = import_module("tqdm.auto").tqdm
    except ImportError:
        return None
    return found


def _line(steps: Sequence[Step]) -> Iterator[Step]:
    longest = 0
    try:
        for done, step in enumerate(steps):
            text = f"{done}/{len(steps)} {step}"
            longest = max(longest, len(text))
            print(f"\r{text:{longest}}", end="", file=sys.stderr, flush=True)  # noqa: T201
            yield step
    finally:
        print(f"\r{'':{longest}}\r", end="", file=sys.stderr, flush=True)  # noqa: T201
