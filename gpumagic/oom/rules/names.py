"""Names that hold memory the failed cell has no use for, and what can be done at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpumagic.oom.report import Action, Advice, OomReport
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import count, size
from gpumagic.source.text import Text, names_in

if TYPE_CHECKING:
    from gpumagic.oom.ownership import Claim


WORTH_NAMING = 1024**2
"""Bytes below which a leftover is not worth a word."""


def leftovers(facts: Facts) -> Iterator[Advice]:
    """Delete what earlier cells left behind and this one does not use."""
    large = [claim for claim in facts.leftovers if claim.nbytes >= WORTH_NAMING]
    frees = sum(claim.nbytes for claim in large)
    if not large:
        return
    names = sorted({name for claim in large for name in claim.names})
    yield propose(
        facts, f"Delete {count(len(names), 'name')} that earlier cells left", frees=frees, first=_deletion(large),
        evidence="; ".join(f"{', '.join(sorted(claim.names))} {size(claim.nbytes)}" for claim in large)
        + "; neither this cell nor what it calls uses them", cost="run their cells again when you need them",
    )  # fmt: skip


def stale(facts: Facts) -> Iterator[Advice]:
    """Delete a name before binding it anew: old and new are alive at once otherwise."""
    for name, frees in facts.stale.items():
        if frees >= WORTH_NAMING:
            yield propose(
                facts, f"Delete the old {name} before the cell makes the new one", frees=frees, first=f"del {name}",
                evidence=f"the {name} of an earlier run, {size(frees)}, stays alive until the new one is bound",
                cost="none: the cell replaces it",
            )  # fmt: skip


def last_turn(facts: Facts) -> Iterator[Advice]:
    """Delete what a turn of a loop has made before the next turn makes it again."""
    text, line = facts.failing, facts.failing.line if facts.failing is not None else None
    loop = _loop_around(text, line) if text is not None else None
    if text is None or loop is None:
        return
    names = [name for name in _remade(loop, text, line or 0) if _worth(facts, name)]
    frees = sum(facts.work.tensors[name].nbytes for name in names)
    if not names:
        return
    yield propose(
        facts, f"Delete {', '.join(names)} at the end of each turn", frees=frees, text=text,
        changes=text.insert_after(loop.body[-1], f"del {', '.join(names)}"),
        evidence=f"{', '.join(names)} of the turn before, {size(frees)}, was alive while the next was made",
        cost="the last turn's is gone after the loop too",
    )  # fmt: skip


def _worth(facts: Facts, name: str) -> bool:
    fact = facts.work.tensors.get(name)
    return fact is not None and fact.nbytes >= WORTH_NAMING and fact.device == facts.device and not fact.requires_grad


def _loop_around(text: Text, line: int | None) -> ast.For | ast.While | None:
    loops = [node for node in text.nodes() if isinstance(node, ast.For | ast.While)]
    around = [loop for loop in loops if line is not None and loop.lineno < line <= (loop.end_lineno or 0)]
    return max(around, key=lambda loop: loop.lineno, default=None)


def _remade(loop: ast.For | ast.While, text: Text, line: int) -> list[str]:
    """Return the names that a turn of a loop binds anew from a line on, unread till then, and not read outside it."""
    seen: set[str] = set()
    remade = []
    for statement in loop.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            is_ahead = (statement.end_lineno or 0) >= line  # else its old value is gone already
            if isinstance(target, ast.Name) and is_ahead and target.id not in seen | names_in(statement.value):
                remade.append(target.id)
        seen |= names_in(statement)
    inside = {id(node) for node in ast.walk(loop)}
    outside = {node.id for node in text.nodes() if isinstance(node, ast.Name) and id(node) not in inside}
    deleted = {name for node in ast.walk(loop) if isinstance(node, ast.Delete) for name in names_in(node)}
    return [name for name in remade if name not in outside | deleted]


def _deletion(claims: list[Claim]) -> str:
    """Return the code that unbinds them.

    A displayed value is also in six places of IPython's, all of which `%xdel _N` clears. It comes last: it also
    unbinds the variables that are the very same object, which `del` would then miss.
    """
    names = sorted({name for claim in claims for name in claim.names})
    variables = [name for name in names if name.isidentifier()]
    displayed = [name.replace("Out[", "_").rstrip("]") for name in names if not name.isidentifier()]
    lines = [f"del {', '.join(variables)}"] if variables else []
    return "\n".join([*lines, *(f"%xdel {each}" for each in displayed)])


_REBINDS = re.compile(r"\s*[\w.]+\s*=[^=]")
"""A line that gives a name another value is a change of what the user works with, not a clearing up."""

WORTH_A_LINE = 1024**2
"""Bytes below which a line is not worth typing."""


def actions_of(report: OomReport, *, in_notebook: bool) -> tuple[Action, ...]:
    """Return lines that give memory back now, or make more of it usable, each once.

    Args:
        report: of the failure.
        in_notebook: whether magics can be typed.
    """
    return tuple(dict.fromkeys([*_from_advice(report), *_held(report, in_notebook=in_notebook)]))


def _from_advice(report: OomReport) -> Iterator[Action]:
    for advice in report.advice:
        lines = [line for line in (advice.first or "").splitlines() if not _REBINDS.match(line)]
        worth = f"frees {size(advice.frees)}" if advice.frees is not None else ""
        for line in lines:
            yield Action(line, worth if len(lines) == 1 else "")


def _held(report: OomReport, *, in_notebook: bool) -> Iterator[Action]:
    """Let the session's own places go: outputs, the last error, what nothing names."""
    outputs = sum(holder.nbytes for holder in report.holders if holder.name.startswith("Out["))
    named = sum(holder.nbytes for holder in report.holders)
    nameless = (report.allocated_after or 0) - named - _told(report) if report.holders else 0
    if outputs >= WORTH_A_LINE and in_notebook:
        yield Action("%devices --release-held", f"outputs hold {size(outputs)}")
    elif nameless >= WORTH_A_LINE:
        line = "%devices --held" if in_notebook else "gpumagic.devices().held()"
        yield Action(line, f"says what keeps the {size(nameless)} that nothing names")


def _told(report: OomReport) -> int:
    """Return the bytes that nothing names and of which the advice says already how to give them back."""
    return sum(each.frees or 0 for each in report.advice if _lets_go(each.first or ""))


def _lets_go(code: str) -> bool:
    """Return whether code does more than to delete names."""
    return any(not line.startswith("del ") for line in code.splitlines())
