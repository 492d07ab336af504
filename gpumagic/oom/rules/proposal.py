"""How a rule makes its suggestion: bytes and whether they suffice, and the code that makes the change."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.source.text import Change, Text


def propose(
    facts: Facts,
    title: str,
    *,
    frees: int | None = None,
    text: Text | None = None,
    changes: Sequence[Change] = (),
    first: str | None = None,
    **more: Any,
) -> Advice:
    """Return a suggestion; whether it suffices is judged by what it frees unless ``covers`` says so.

    Args:
        facts: of the failure.
        title: what to do, as a command.
        frees: bytes it would give back.
        text: the text that the changes are of.
        changes: what to change in it.
        first: code to run before the cell.
        more: other fields of `Advice`.
    """
    edit = text.after(changes) if text is not None and changes else first
    return Advice(
        title=title,
        frees=frees,
        changes=tuple(changes),
        first=first,
        **{"covers": facts.covers(frees), "edit": edit, **more},
    )


def prepare(facts: Facts, name: str, code: str) -> dict[str, Any]:
    """Return how to run code on a variable before it is used: in the cell where that makes it anew, else before it."""
    for text in facts.texts:
        made = [node for node in text.nodes() if isinstance(node, ast.Assign) and _binds(node, name)]
        if made:
            return {"text": text, "changes": text.insert_after(made[-1], code)}
    return {"first": code}


def backend(facts: Facts) -> str:
    """Return the backend's name: ``"cuda"`` for ``"cuda:1"``."""
    return (facts.device or "cuda").partition(":")[0]


def _binds(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
