"""Tab after one of the magics: its options, their values, devices and variables."""

from __future__ import annotations

import functools
import re
from argparse import Action
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from gpumagic import _compat, notebook, options

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# `%ondevice `, `%%ondevice `, `r = %devices `; the name itself is completed by IPython.
_LINE = re.compile(rf"(?:\s*[^%#'\"]*=\s*|\s*)%%?({'|'.join(options.MAGICS)})\s")


Names = Callable[[], Collection[str]]


def install(shell: InteractiveShell, devices: Names, undo: list[Callable[[], object]]) -> None:
    """Complete the lines of our magics in a shell, with names of devices; what undoes it is added to ``undo``."""

    def complete_line(line: str, below: str) -> tuple[str, list[str]]:
        variables = functools.partial(notebook.names_of_users, shell.user_ns)
        ints = functools.partial(numbers, shell.user_ns, below)
        offers: dict[str, Names] = {
            "DEVICE": devices,
            "why": variables,
            "move": variables,
            "fit": ints,
            "shrink": ints,
        }
        return complete(line, offers)

    _compat.add_completer(shell, _LINE, complete_line, undo)


def complete(line: str, offers: Mapping[str, Names]) -> tuple[str, list[str]]:
    """Return the last fragment of a magic's line up to the cursor, and its completions.

    `offers` has what returns the names to choose from, by options and for ``"DEVICE"``.
    """
    match = _LINE.match(line)
    assert match is not None
    parser = options.PARSERS[match[1]]
    words = line[match.end() :].split(" ")
    fragment, before = words[-1], [word for word in words[:-1] if word]
    actions = {string: action for action in parser._actions for string in action.option_strings}
    option, equals, value = fragment.partition("=")
    if equals and option in actions:
        return value, _starting(value, _values(actions[option], offers))
    if before and before[-1] in actions and actions[before[-1]].nargs != 0:
        names = _values(actions[before[-1]], offers)
        fragment = fragment.rpartition(",")[2]
    elif fragment.startswith("-"):
        names = [name for name in parser.option_strings() if name not in before]
    else:
        positional = [action for action in parser._actions if not action.option_strings]
        if line.lstrip().startswith(
            "%%"
        ):  # a word such as `on` makes no sense where the magic has a cell below it
            positional = [action for action in positional if action.choices is None]
        names = [name for action in positional for name in _values(action, offers)]
    return fragment, _starting(fragment, names)


def _values(action: Action, offers: Mapping[str, Names]) -> Collection[str]:
    """Return what an option may be followed by."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest == "gpu":
        from gpumagic.memory.presets import GPUS, typed

        return typed(GPUS)
    return offers.get("DEVICE" if action.metavar == "DEVICE" else action.dest, tuple)()


def numbers(namespace: Mapping[str, object], cell: str) -> Collection[str]:
    """Return the names of the ints among some variables and in the text of a cell."""
    from gpumagic.source import cell_code, text

    variables = {
        name for name, value in namespace.items() if type(value) is int and not name.startswith("_")
    }
    tree = text.parse_tree(cell)  # None of code that is not Python yet
    return sorted(
        variables if tree is None else variables | {name for name, _ in cell_code.ints_named(tree)}
    )


def _starting(fragment: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith(fragment)]
