"""Everything an exception drags along: its causes, its contexts, the members of a group.

An out-of-memory error rarely arrives alone: a wrapper raised ``from`` it, an ``except`` block failed in turn,
a DataLoader told of a killed worker only in its cause. ``raise ... from None`` hides a context from the
traceback, not from memory.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator
from types import FrameType, TracebackType


def walk(error: BaseException, outside: Collection[int] = ()) -> Iterator[BaseException]:
    """Yield the error and every exception it reaches, each once, nearest first.

    Args:
        error: where to begin.
        outside: ids of exceptions that are not part of it, though Python chained it to them: see `being_handled`.
    """
    seen = set(outside)
    waiting = deque([error])
    while waiting:
        current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        members = getattr(current, "exceptions", ())
        linked = [current.__cause__, current.__context__, *(members if isinstance(members, tuple | list) else ())]
        waiting.extend(each for each in linked if isinstance(each, BaseException))


def being_handled() -> frozenset[int]:
    """Return the ids of the exceptions being handled here and now: what is raised next gets them as its context."""
    current = sys.exc_info()[1]
    return frozenset() if current is None else frozenset(id(each) for each in walk(current))


def frames(error: BaseException, outside: Collection[int] = ()) -> Iterator[tuple[FrameType, int]]:
    """Yield each frame the error's whole graph holds with the line it stood on, callers before callees."""
    seen: set[int] = set()
    for each in walk(error, outside):
        for step in traceback_steps(each.__traceback__):
            if id(step.tb_frame) not in seen:
                seen.add(id(step.tb_frame))
                yield step.tb_frame, step.tb_lineno


def traceback_steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the links of one traceback, outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def first_line(error: BaseException) -> str:
    """Return ``"Type: the first line of its text"``, as tracebacks end, even where `str` itself fails."""
    try:
        text = str(error).strip()
    except Exception:  # a foreign __str__ must not replace the user's error
        text = ""
    line = text.splitlines()[0].strip() if text else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
