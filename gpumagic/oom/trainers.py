"""The trainers of libraries that a cell uses, and the statements of the notebook that made them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpumagic.heap.branches import attributes_of, dict_of, mro_of, name_of_type
from gpumagic.oom.rules.facts import Trainer
from gpumagic.source import text as texts
from gpumagic.source.text import CellText, called_name, names_in

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")


def find_trainer(
    names: Iterable[str], namespace: Mapping[str, object], cell: CellText | None, history: Sequence[str]
) -> Trainer | None:
    """Return the trainer that a cell uses, where the cell or an earlier one shows how it was made.

    Args:
        names: the variables that the cell uses or binds.
        namespace: the notebook's variables.
        cell: the text of the cell.
        history: the texts of the cells so far, by their numbers.
    """
    for name in sorted(names):
        library, kind = _kind_of(namespace[name])
        found = _made(cell, kind) if cell is not None and kind else None
        if found is None and kind:
            found = _made(_earlier(name, namespace, kind, history), kind)
        if found is not None:
            return Trainer(library, *found)
    return None


def _kind_of(value: object) -> tuple[str, str]:
    """Return the library of a trainer or of its arguments, and the class that is told how to train; else nothing."""
    bases = _bases(value)
    if any(str(module).startswith(_LIGHTNING) and name == "Trainer" for module, name in bases):
        return "lightning", name_of_type(type(value))
    if ("transformers.trainer", "Trainer") in bases:
        value = attributes_of(value).get("args")
        bases = _bases(value)
    is_told = ("transformers.training_args", "TrainingArguments") in bases
    return ("transformers", name_of_type(type(value))) if is_told else ("", "")


def _bases(value: object) -> set[tuple[object, str]]:
    """Return the modules and the names of an object's classes, without a word from a metaclass."""
    return {(dict_of(each).get("__module__"), name_of_type(each)) for each in mro_of(type(value))}


def _made(text: CellText | None, kind: str) -> tuple[CellText, ast.Call] | None:
    nodes = text.nodes() if text is not None else ()
    call = next((each for each in nodes if isinstance(each, ast.Call) and called_name(each) == kind), None)
    return (text, call) if text is not None and call is not None else None


def _earlier(name: str, namespace: Mapping[str, object], kind: str, history: Sequence[str]) -> CellText | None:
    """Return the statements of earlier cells that made a trainer and its arguments, as one text."""
    made = _last_made(name, history)
    if made is None:
        return None
    used = sorted(names_in(ast.parse(made[1])) - {name})
    told = [_last_made(each, history) for each in used if name_of_type(type(namespace.get(each))) == kind]
    both = dict.fromkeys(each for each in (*told, made) if each is not None)
    return texts.parse("\n".join(statement for _, statement in both), f"In [{next(iter(both))[0]}]")


def _last_made(name: str, history: Sequence[str]) -> tuple[int, str] | None:
    """Return the last statement outside of functions that bound a variable, and the number of its cell."""
    for number in range(len(history) - 1, 0, -1):
        for text, statement in _statements(history[number]):
            if any(isinstance(each, ast.Name) and each.id == name for each in statement.targets):
                return number, text.code(statement)
    return None


def _statements(source: str) -> Iterator[tuple[CellText, ast.Assign]]:
    """Yield the assignments of a cell, the last one first; also of one that a magic of its first line ran."""
    text = texts.parse(source)
    for node in reversed(text.tree.body) if text is not None else ():
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Call) and called_name(value) == "run_cell_magic":
            inner = value.args[-1]
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                yield from _statements(inner.value)
        elif isinstance(node, ast.Assign) and text is not None:
            yield text, node
