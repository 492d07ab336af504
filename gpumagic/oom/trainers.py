"""Which trainer of a library a cell calls, and the code that told it how to train."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gpumagic.advice.facts import Trainer
from gpumagic.advice.rules.regions import calls
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
        configured = _configured(namespace[name])
        if configured is None:
            continue
        earlier = _earlier_statements(name, namespace, configured.class_name, history)
        sources = [text for text in (cell, earlier) if text is not None]
        for text, call in calls(sources, configured.class_name):
            return Trainer(configured.library, text, call)
    return None


class _Configured(NamedTuple):
    """A library's trainer, and the class by whose call it is told how to train."""

    library: Literal["transformers", "lightning"]
    class_name: str


def _configured(value: object) -> _Configured | None:
    """Return what configures a trainer, given the trainer or its arguments; None for any other value."""
    classes = _qualified_classes(value)
    if any(
        name.startswith(_LIGHTNING) and name.endswith(".Trainer") for name in classes
    ):
        return _Configured("lightning", name_of_type(type(value)))
    if "transformers.trainer.Trainer" in classes:
        value = attributes_of(value).get("args")
        classes = _qualified_classes(value)
    if "transformers.training_args.TrainingArguments" in classes:
        return _Configured("transformers", name_of_type(type(value)))
    return None


def _qualified_classes(value: object) -> set[str]:
    """Return the qualified names of an object's class and its bases, without a word from a metaclass."""
    return {
        f"{dict_of(cls).get('__module__')}.{name_of_type(cls)}"
        for cls in mro_of(type(value))
    }


class _Statement(NamedTuple):
    """The statement of an earlier cell that bound a variable last."""

    cell: int
    code: str


def _earlier_statements(
    name: str, namespace: Mapping[str, object], class_name: str, history: Sequence[str]
) -> CellText | None:
    """Return the statements of earlier cells that made a trainer and its arguments, as one text."""
    assignments = _last_assignments(history)
    if name not in assignments:
        return None
    made = assignments[name]
    statements = []
    for used in sorted(names_in(ast.parse(made.code)) - {name}):
        is_arguments = name_of_type(type(namespace.get(used))) == class_name
        if used in assignments and is_arguments and assignments[used] not in statements:
            statements.append(assignments[used])
    if made not in statements:
        statements.append(made)
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
