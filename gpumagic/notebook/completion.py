"""Tab after one of the magics: its options, their values, devices and variables."""

from __future__ import annotations

import functools
import re
from argparse import Action
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumagic import _compat, options
from gpumagic.notebook import session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# `%ondevice `, `%%ondevice `, `r = %devices `; the name itself is completed by IPython.
_LINE = re.compile(rf"(?:\s*[^%#'\"]*=\s*|\s*)%%?({'|'.join(options.MAGICS)})\s")


Names = Callable[[], Collection[str]]


def install(shell: InteractiveShell, devices: Names, undo: list[Callable[[], object]]) -> None:
    """Complete the lines of our magics in a shell, with names of devices; what undoes it is added to ``undo``."""

    def complete_line(line: str, below: str) -> tuple[str, list[str]]:
        variables = functools.partial(session.names_of_users, shell.user_ns)
        return complete(line, Offers(devices, variables, lambda: numbers(shell.user_ns, below)))

    _compat.add_completer(shell, _LINE, complete_line, undo)


@dataclass(frozen=True)
class Offers:
    """What there is to choose from, asked for when it is wanted."""

    devices: Names = tuple
    variables: Names = tuple
    numbers: Names = tuple
    """Names of ints, in the cell and among the variables."""


def complete(line: str, offers: Offers) -> tuple[str, list[str]]:
    """Return the last fragment of a magic's line up to the cursor, and its completions."""
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
        asked = [action for action in positional if not _is_of_no_cell(action, line)]
        names = [name for action in asked for name in _values(action, offers)]
    return fragment, _starting(fragment, names)


def _values(action: Action, offers: Offers) -> Collection[str]:
    """Return what an option may be followed by."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.metavar == "DEVICE":
        return offers.devices()
    offered: dict[str, Names] = {
        "gpu": _gpus,
        "fit": offers.numbers,
        "shrink": offers.numbers,
        "why": offers.variables,
        "move": offers.variables,
    }
    return offered[action.dest]() if action.dest in offered else ()


def _gpus() -> Collection[str]:
    from gpumagic.memory.presets import GPUS, typed

    return typed(GPUS)


def numbers(namespace: Mapping[str, object], cell: str) -> Collection[str]:
    """Return the names of the ints among some variables and in the text of a cell."""
    from gpumagic.source import cell_code

    variables = {name for name, value in namespace.items() if type(value) is int and not name.startswith("_")}
    return sorted(variables | cell_code.names_in_text(cell))


def _is_of_no_cell(action: Action, line: str) -> bool:
    """Return whether a word such as `on` makes no sense where the magic has a cell below it."""
    return action.choices is not None and line.lstrip().startswith("%%")


def _starting(fragment: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith(fragment)]
