"""The int that a cell's memory goes with, such as a batch size: where it stands, and how to give it another value.

It stands in the cell's own text, as ``batch_size = 256`` or ``DataLoader(data, batch_size=256)``, and is changed
there; or in a variable of the notebook; or it is a parameter of a decorated function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import FunctionType

from gpumagic.errors import OptionError, nearest
from gpumagic.source.cell_code import Int, ints_named
from gpumagic.source.frames import names_looked_up
from gpumagic.source.text import CellText, apply_changes, names_in


def names_used(reads: Iterable[str], namespace: Mapping[str, object]) -> set[str]:
    """Return the names that code reading these names uses, itself or through functions and classes of the notebook."""
    used: set[str] = set()
    waiting = list(reads)
    while waiting:
        name = waiting.pop()
        if name not in used and name in namespace:
            used.add(name)
            own = [each for each in _functions_of(namespace[name]) if each.__globals__ is namespace]
            waiting += [each for function in own for each in names_looked_up(function.__code__)]
    return used


def _functions_of(value: object) -> Iterator[FunctionType]:
    value = getattr(value, "__func__", value) if type(value).__name__ == "method" else value
    if isinstance(value, FunctionType):
        yield value
        return
    for base in (value if isinstance(value, type) else type(value)).__mro__:
        if base.__module__ == "__main__":
            yield from (each for each in vars(base).values() if isinstance(each, FunctionType))


class WrittenSetting:
    """An int in the cell's text that can be changed; several of one name change in proportion."""

    def __init__(self, text: CellText, name: str, found: list[Int]) -> None:
        self.name, self.value = name, max(node.value for node in found)  # before anything is tried
        self._text, self._found = text, found

    def apply(self, value: int) -> str:
        """Give it a value: return the text to run, with the number changed."""
        changes = [self._text.replace(node, str(self._scaled(node.value, value))) for node in self._found]
        return apply_changes(changes, self._text.source)

    def restore(self) -> None:
        """Do nothing: the cell's text was never touched, only what ran."""

    def place(self, value: int) -> str:
        """Return where it stands and how one writes it: ``"line 3: batch_size = 64"``."""
        return "; ".join(f"line {node.lineno}: {self.name} = {self._scaled(node.value, value)}" for node in self._found)

    def with_value(self, value: int) -> tuple[str | None, dict[str, object]]:
        """Return the code, where it is in it, and the variables that a value would come with; nothing is changed."""
        return self.apply(value), {}

    def _scaled(self, number: int, value: int) -> int:
        return max(1, number * value // self.value)


class VariableSetting:
    """An int of the notebook, or of a function's arguments."""

    def __init__(self, namespace: MutableMapping[str, object], name: str, value: int) -> None:
        self.name, self.value = name, value
        self._namespace = namespace

    def apply(self, value: int) -> None:
        """Bind the variable."""
        self._namespace[self.name] = value

    def restore(self) -> None:
        """Bind it as it was."""
        self._namespace[self.name] = self.value

    def place(self, value: int) -> str:
        """Return the assignment."""
        return f"{self.name} = {value}"

    def with_value(self, value: int) -> tuple[str | None, dict[str, object]]:
        """Return the variable with the value."""
        return None, {self.name: value}


Setting = WrittenSetting | VariableSetting
"""An int that can be changed."""


def find_in_cell(source: str, name: str, namespace: MutableMapping[str, object], option: str) -> Setting:
    """Return the int of a name in a cell's text, else the notebook's variable; ``option`` is named in the error.

    Raises:
        OptionError: there is no such int, or the cell does not use it.
    """
    tree = ast.parse(source)
    found = [node for written, node in ints_named(tree) if written == name]
    if found:
        return WrittenSetting(CellText(source, tree=tree), name, found)
    value = namespace.get(name)
    bound = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    line = next((node.lineno for node in bound if node.id == name), None)
    if line is not None:
        raise OptionError(f"{option} {name}: line {line} computes {name}; write it as a number there: {name} = 64")
    if type(value) is not int:
        raise OptionError(_no_such_int(option, name, tree, namespace))
    if name not in names_used(names_in(tree), namespace):
        raise OptionError(
            f"{option} {name}: the cell does not use {name}; it must read the variable, itself or in what it calls"
        )
    if value < 1:
        raise OptionError(f"{option} {name}: {name} is {value}; it must be at least 1")
    return VariableSetting(namespace, name, value)


def find_in_arguments(name: str, arguments: MutableMapping[str, object], option: str) -> Setting:
    """Return the int that a function is called with under a parameter's name, or raise `OptionError`."""
    value = arguments.get(name)
    if type(value) is not int or value < 1:
        raise OptionError(f"{option.strip('-')}={name!r}: {name} must be an int of at least 1, not {value!r:.40}")
    return VariableSetting(arguments, name, value)


def names_in_text(source: str) -> set[str]:
    """Return the names under which code writes ints that can be changed; none of code that is not Python yet."""
    try:
        return {name for name, _ in ints_named(ast.parse(source))}
    except (SyntaxError, ValueError, RecursionError):
        return set()


_SIZES = re.compile(r"batch|size|length|^(n|bs|seq|seq_len|tokens)$", re.IGNORECASE)


def sizes_in(source: str) -> tuple[str, ...]:
    """Return the variables that code sets to a number and that by their names say how much it works on at once."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    assignments = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    numbers = (name for node in assignments for name, _ in ints_named(node))
    return tuple(dict.fromkeys(name for name in numbers if _SIZES.search(name)))


def _no_such_int(option: str, name: str, tree: ast.AST, namespace: Mapping[str, object]) -> str:
    if name in namespace:
        kind = type(namespace[name]).__name__
        return f"{option} {name}: {name} is a {kind}, not an int; name the number that its size goes with"
    used = names_used(names_in(tree), namespace)
    there = {written for written, _ in ints_named(tree)} | {each for each in used if type(namespace[each]) is int}
    near = nearest(name, there)
    hint = f"did you mean {near}?" if near else f"it has {', '.join(sorted(there))}" if there else "it has none"
    return f"{option} {name}: the cell has no int called {name}; {hint}"
