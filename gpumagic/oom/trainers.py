"""Which trainer of a library a cell calls, and the code that told it how to train."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gpumagic.advice.facts import Trainer
from gpumagic.advice.rules.proposal import calls
from gpumagic.heap.branches import attributes_of, dict_of, mro_of, name_of_type
from gpumagic.source import text as texts
from gpumagic.source.text import CellText, names_in

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")


def find_trainer(
    names: Iterable[str],
    namespace: Mapping[str, object],
    cell: CellText | None,
    history: Sequence[str],
) -> Trainer | None:
    """Return the trainer among the names of a cell, where its text or an earlier cell's shows how it was made.

    `history` has the texts of the cells so far, by their numbers.
    """
    for name in sorted(names):
        told = _told(namespace[name])
        if told is None:
            continue
        earlier = _earlier(name, namespace, told.class_name, history)
        for text, call in calls(filter(None, (cell, earlier)), told.class_name):
            return Trainer(told.library, text, call)
    return None


class _Told(NamedTuple):
    """What tells a trainer how to train."""

    library: Literal["transformers", "lightning"]
    class_name: str
    """The class whose call has the arguments."""


def _told(value: object) -> _Told | None:
    """Return what tells a trainer how to train, of the trainer or of its arguments; None for any other value."""
    bases = _bases(value)
    if any(str(module).startswith(_LIGHTNING) and name == "Trainer" for module, name in bases):
        return _Told("lightning", name_of_type(type(value)))
    if ("transformers.trainer", "Trainer") in bases:
        value = attributes_of(value).get("args")
        bases = _bases(value)
    if ("transformers.training_args", "TrainingArguments") in bases:
        return _Told("transformers", name_of_type(type(value)))
    return None


def _bases(value: object) -> set[tuple[object, str]]:
    """Return the modules and the names of an object's classes, without a word from a metaclass."""
    return {(dict_of(cls).get("__module__"), name_of_type(cls)) for cls in mro_of(type(value))}


class _Statement(NamedTuple):
    """The statement of an earlier cell that bound a variable last."""

    cell: int
    code: str


def _earlier(
    name: str, namespace: Mapping[str, object], class_name: str, history: Sequence[str]
) -> CellText | None:
    """Return the statements of earlier cells that made a trainer and its arguments, as one text."""
    bound = _last_assignments(history)
    if name not in bound:
        return None
    used = sorted(names_in(ast.parse(bound[name].code)) - {name})
    arguments = [
        bound[other]
        for other in used
        if other in bound and name_of_type(type(namespace.get(other))) == class_name
    ]
    statements = list(dict.fromkeys((*arguments, bound[name])))
    source = "\n".join(statement.code for statement in statements)
    return texts.parse(source, f"In [{statements[0].cell}]")


def _last_assignments(history: Sequence[str]) -> dict[str, _Statement]:
    """Return the last statement outside of functions that bound each variable, over the cells so far."""
    bound = {}
    for number, source in enumerate(history):
        text = texts.parse(source)
        if text is None:
            continue
        for statement in text.tree.body:
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        bound[target.id] = _Statement(number, text.code(statement))
    return bound
