"""Tab after one of the magics: its options, their values, devices and variables."""

from __future__ import annotations

import re
import sys
from argparse import Action
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from gpumagic import _compat, options

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# `%ondevice `, `%%ondevice `, `r = %devices `; the name itself is completed by IPython.
_LINE = re.compile(rf"(?:\s*[^%#'\"]*=\s*|\s*)%%?({'|'.join(options.MAGICS)})\s")


Names = Callable[[], Collection[str]]


def install(shell: InteractiveShell, devices: Names) -> Callable[[], None]:
    """Complete the lines of our magics in a shell, with names of devices; return what undoes it."""
    return _compat.add_completer(
        shell, _LINE, lambda line: complete(line, shell.user_ns, lambda: _tensors(shell), devices)
    )


def complete(
    line: str, namespace: dict[str, object], tensors: Names = tuple, devices: Names = tuple
) -> tuple[str, list[str]]:
    """Return the last fragment of a magic's line up to the cursor, and its completions.

    Variables are those of the namespace; the callables return the names offered for tensors and for devices.
    """
    match = _LINE.match(line)
    assert match is not None
    parser = options.parser(match[1])
    words = line[match.end() :].split(" ")
    fragment, before = words[-1], [word for word in words[:-1] if word]
    actions = {string: action for action in parser._actions for string in action.option_strings}
    option, equals, value = fragment.partition("=")
    if equals and option in actions:
        return value, _starting(value, _values(actions[option], namespace, tensors, devices))
    if before and before[-1] in actions and actions[before[-1]].nargs != 0:
        names = _values(actions[before[-1]], namespace, tensors, devices)
        fragment = fragment.rpartition(",")[2]
    elif fragment.startswith("-"):
        names = [name for name in parser.option_strings() if name not in before]
    else:
        positional = [action for action in parser._actions if not action.option_strings]
        asked = [action for action in positional if not _is_of_no_cell(action, line)]
        names = [name for action in asked for name in _values(action, namespace, tensors, devices)]
    return fragment, _starting(fragment, names)


def _values(action: Action, namespace: dict[str, object], tensors: Names, devices: Names) -> Collection[str]:
    """Return what an option may be followed by, which its declaration says in its metavar."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    offered: dict[object, Names] = {
        "DEVICE": devices,
        "GPU": _gpus,
        "INT": lambda: sorted(name for name, value in namespace.items() if type(value) is int and name[0] != "_"),
        "NAME": lambda: tensors() if action.dest == "why" else _variables(namespace) if action.dest != "out" else (),
        "NAMES": lambda: _variables(namespace),
    }
    return offered[action.metavar]() if action.metavar in offered else ()


def _gpus() -> Collection[str]:
    from gpumagic.fakecuda.gpus import GPUS

    return [name.replace(" ", "-") for name in GPUS]


def _variables(namespace: dict[str, object]) -> Collection[str]:
    return sorted(name for name in namespace if not name.startswith("_"))


def _tensors(shell: InteractiveShell) -> Collection[str]:
    """Return the names of the tensors that the variables of a shell reach."""
    if "torch" not in sys.modules:
        return ()
    from gpumagic.heap import holders

    names = (name for several in holders.name_storages(shell.user_ns, shell).values() for name in several)
    return sorted(dict.fromkeys(names), key=len)


def _is_of_no_cell(action: Action, line: str) -> bool:
    """Return whether a word such as `on` makes no sense where the magic has a cell below it."""
    return action.choices is not None and line.lstrip().startswith("%%")


def _starting(fragment: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith(fragment)]
