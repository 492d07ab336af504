"""The int that a cell's memory goes with, and the cell with another value of it.

It stands in the cell's own text, as ``batch_size = 256`` or ``DataLoader(data, batch_size=256)``, and is changed there;
or in a variable of the notebook; or it is a parameter of a decorated function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumagic.errors import OptionError, nearest
from gpumagic.source.cell_code import Int, ints_named, names_used
from gpumagic.source.text import CellText, apply_changes, names_in, parse_tree


@dataclass(frozen=True)
class Setting:
    """An int that can be changed: a variable, or numbers of one name in the cell's text, which change in proportion."""

    name: str
    value: int
    text: CellText | None = None
    numbers: Sequence[Int] = ()

    def with_value(self, value: int) -> tuple[str | None, dict[str, object]]:
        """Return the cell's code with another value, None where it stays as it is, and the variables to set."""
        if self.text is None:
            return None, {self.name: value}
        if value == self.value:
            return None, {}
        changes = [
            self.text.replace(number, str(self._scaled(number.value, value)))
            for number in self.numbers
        ]
        return apply_changes(changes, self.text.source), {}

    def place(self, value: int) -> str:
        """Return where it stands and how one writes it: ``"line 3: batch_size = 64"``."""
        if self.text is None:
            return f"{self.name} = {value}"
        places = []
        for number in self.numbers:
            scaled = self._scaled(number.value, value)
            places.append(f"line {number.lineno}: {self.name} = {scaled}")
        return "; ".join(places)

    def _scaled(self, number: int, value: int) -> int:
        return max(1, number * value // self.value)


def find_in_cell(
    source: str, name: str, namespace: Mapping[str, object], option: str
) -> Setting:
    """Return the int of a name in a cell's text, else the notebook's variable; ``option`` is named in the error.

    Raises:
        OptionError: there is no such int, or the cell does not use it.
    """
    tree = ast.parse(source)
    numbers = [number for written, number in ints_named(tree) if written == name]
    if numbers:
        largest = max(number.value for number in numbers)
        return Setting(name, largest, CellText(source, tree=tree), numbers)
    line = _line_that_binds(tree, name)
    if line is not None:
        raise OptionError(
            f"{option} {name}: line {line} computes {name}; write it as a number there: {name} = 64"
        )
    value = namespace.get(name)
    if type(value) is not int:
        raise OptionError(_no_such_int(option, name, tree, namespace))
    if name not in names_used(names_in(tree), namespace):
        raise OptionError(
            f"{option} {name}: the cell does not use {name}; it must read the variable, itself or in what it calls"
        )
    if value < 1:
        raise OptionError(f"{option} {name}: {name} is {value}; it must be at least 1")
    return Setting(name, value)


def _line_that_binds(tree: ast.AST, name: str) -> int | None:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and node.id == name
            and isinstance(node.ctx, ast.Store)
        ):
            return node.lineno
    return None


def _no_such_int(
    option: str, name: str, tree: ast.AST, namespace: Mapping[str, object]
) -> str:
    if name in namespace:
        kind = type(namespace[name]).__name__
        return f"{option} {name}: {name} is a {kind}, not an int; name the number that its size goes with"
    ints = {written for written, _ in ints_named(tree)}
    for used in names_used(names_in(tree), namespace):
        if type(namespace[used]) is int:
            ints.add(used)
    alike = nearest(name, ints)
    if alike:
        hint = f"did you mean {alike}?"
    elif ints:
        hint = f"it has {', '.join(sorted(ints))}"
    else:
        hint = "it has none"
    return f"{option} {name}: the cell has no int called {name}; {hint}"


def find_in_arguments(
    name: str, arguments: Mapping[str, object], option: str
) -> Setting:
    """Return the int that a function is called with under a parameter's name, or raise `OptionError`."""
    value = arguments.get(name)
    if type(value) is not int or value < 1:
        raise OptionError(
            f"{option.strip('-')}={name!r}: {name} must be an int of at least 1, not {value!r:.40}"
        )
    return Setting(name, value)


_SIZES = re.compile(r"batch|size|length|^(n|bs|seq|seq_len|tokens)$", re.IGNORECASE)


def sizes_in(source: str) -> tuple[str, ...]:
    """Return the variables that code sets to a number and that by their names say how much it works on at once."""
    tree = parse_tree(source)
    if tree is None:
        return ()
    sizes: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for name, _ in ints_named(node):
                if _SIZES.search(name):
                    sizes[name] = None
    return tuple(sizes)
