"""What came of a change: a cell that ran out of memory, was edited, and ran out again."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumagic.oom.report import Advice, Need
from gpumagic.report.units import size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

KEY = "gpumagic_last_failure"
"""Under which a session's last failure is in `shell.meta`."""
ALIKE = 0.8
"""The share of words and signs that two texts have in common if one is an edit of the other."""


@dataclass(frozen=True, slots=True)
class LastFailure:
    """What a report leaves behind for the next one; it holds nothing of the notebook's."""

    source: str
    device: str
    need: Need
    advice: tuple[Advice, ...]


def compare(shell: InteractiveShell, now: LastFailure) -> str:
    """Return what `since` does of a session's last failure, and remember this one in its place."""
    last: LastFailure | None = shell.meta.get(KEY)
    shell.meta[KEY] = now
    return since(last, now)


def since(last: LastFailure | None, now: LastFailure) -> str:
    """Return what the change since the last failure of a cell gave; empty where this is another cell."""
    if last is None or last.device != now.device or not last.need.missing:
        return ""
    change = _change(last, now.source)
    return f"Since the last failure, {change} {_gave(last.need, now.need)}." if change else ""


def _change(last: LastFailure, source: str) -> str:
    """Return the change of a cell: advice that was followed, by its title, else the lines."""
    old, new = _body(last.source), _body(source)
    if old == new:
        return "with the cell unchanged, what ran in between"
    followed = next((each.title for each in last.advice if _result(each, last.source) == source), None)
    if followed is not None:
        return f'"{followed}"'
    if difflib.SequenceMatcher(None, _words(old), _words(new), autojunk=False).ratio() < ALIKE:
        return ""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    places = [(old[a:b], new[c:d], c) for what, a, b, c, d in matcher.get_opcodes() if what != "equal"]
    return f"the change of {_lines(places)}"


def _body(source: str) -> list[str]:
    """Return the lines, without that of a magic: its options are no part of what needs memory."""
    lines = source.rstrip().splitlines()
    return ["", *lines[1:]] if source.startswith("get_ipython().run_") else lines


def _words(lines: Sequence[str]) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", "\n".join(lines))


def _result(advice: Advice, source: str) -> str:
    try:
        return advice.apply(source)
    except ValueError:
        return ""


def _lines(places: Sequence[tuple[list[str], list[str], int]]) -> str:
    old, new, at = places[0]
    if len(places) == len(old) == len(new) == 1:
        return f"line {at + 1} (`{old[0].strip()}` to `{new[0].strip()}`)"
    numbers = [str(at + 1) if len(new) < 2 else f"{at + 1} to {at + len(new)}" for _, new, at in places]
    return f"line{'s' if len(numbers) > 1 or ' ' in numbers[0] else ''} {', '.join(numbers)}"


def _gave(before: Need, now: Need) -> str:
    """Return what was missing before and is now."""
    saved, left = before.missing - now.missing, f"{size(now.missing)} still missing"
    if not saved:
        return f"saved nothing: {left}"
    if saved < 0:
        return f"made it worse: {size(now.missing)} missing, {size(before.missing)} before"
    if not now.missing:
        return f"saved all of the {size(before.missing)} that were missing; what is left is in pieces too small"
    return f"saved {size(saved)} of the {size(before.missing)} missing; {left}"
