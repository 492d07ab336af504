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


def install(
    shell: InteractiveShell, devices: Names, undo: list[Callable[[], object]]
) -> None:
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
    *before, fragment = line[match.end() :].split(" ")
    before = list(filter(None, before))
    option, equals, value = fragment.partition("=")
    assigned = _action(parser, option)
    if equals and assigned is not None:
        return value, _starting(value, _values(assigned, offers))
    waiting = _action(parser, before[-1]) if before else None
    if waiting is not None and waiting.nargs != 0:
        _, _, fragment = fragment.rpartition(",")
        return fragment, _starting(fragment, _values(waiting, offers))
    if fragment.startswith("-"):
        unused = [name for name in parser.option_strings() if name not in before]
        return fragment, _starting(fragment, unused)
    has_cell = line.lstrip().startswith("%%")
    names: list[str] = []
    for action in parser._actions:
        # A word such as `on` makes no sense where the magic has a cell below it.
        is_refused = has_cell and action.choices is not None
        if not action.option_strings and not is_refused:
            names += _values(action, offers)
    return fragment, _starting(fragment, names)


def _action(parser: options.Parser, option: str) -> Action | None:
    """Return what the parser knows of an option as it is typed; None if it has no such option."""
    for action in parser._actions:
        if option in action.option_strings:
            return action
    return None


def _values(action: Action, offers: Mapping[str, Names]) -> Collection[str]:
    """Return what an option may be followed by."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest == "gpu":
        from gpumagic.memory.presets import GPUS, typed

        return typed(GPUS)
    names = offers.get("DEVICE" if action.metavar == "DEVICE" else action.dest)
    return () if names is None else names()


def numbers(namespace: Mapping[str, object], cell: str) -> Collection[str]:
    """Return the names of the ints among some variables and in the text of a cell."""
    from gpumagic.source import cell_code, text

    names = set()
    for name, value in namespace.items():
        if type(value) is int and not name.startswith("_"):
            names.add(name)
    tree = text.parse_tree(cell)
    if tree is not None:  # it may be no Python yet
        names.update(name for name, _ in cell_code.ints_named(tree))
    return sorted(names)


def _starting(fragment: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith(fragment)]
