"""The values IPython keeps because it showed them: in `Out`, in `_12`, in `_` and its elders; and forgetting some.

One value lies in up to seven places, and only when all let go of it does it die: `del Out[12]` alone frees
nothing (ipython#10082, #14129).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LAST = ("_", "__", "___")
_NUMBERED = re.compile(r"_\d+")
_NOTHING = ""  # what IPython itself binds `_` to before anything was shown


def shown(shell: InteractiveShell) -> Iterator[tuple[str, object]]:
    """Yield each value that IPython keeps because it showed it, with the place: ``"Out[12]"``, ``"_"``...

    What the user has bound to one of these names is the user's, and is not among them.
    """
    for number, value in list(dict.items(_outputs(shell))):
        yield f"Out[{number}]", value
    for name, value in list(shell.user_ns_hidden.items()):
        if _is_ours(name):
            yield name, value
    for name in LAST:
        yield name, getattr(shell.displayhook, name, _NOTHING)
    yield "last result", getattr(shell.last_execution_result, "result", None)


def forget(shell: InteractiveShell, values: Collection[int]) -> None:
    """Make IPython forget the values with these ids, which the caller keeps alive meanwhile.

    No binding of the user's changes: `_` is only reset where it still is what IPython made it.
    """
    outputs = _outputs(shell)
    for number in [number for number, value in dict.items(outputs) if id(value) in values]:
        dict.pop(outputs, number)
    for namespace in (shell.user_ns, shell.user_ns_hidden):
        _forget_in(namespace, values, shell.user_ns_hidden)
    for name in LAST:
        if id(getattr(shell.displayhook, name, None)) in values:
            setattr(shell.displayhook, name, _NOTHING)
    result = shell.last_execution_result
    if result is not None and id(result.result) in values:
        result.result = None


def _forget_in(namespace: dict[str, Any], values: Collection[int], hidden: Mapping[str, object]) -> None:
    for name, value in list(namespace.items()):
        if id(value) not in values or not _is_ours(name) or hidden.get(name) is not value:
            continue
        if name in LAST:
            namespace[name] = _NOTHING
        else:
            del namespace[name]


def _is_ours(name: object) -> bool:
    return type(name) is str and (name in LAST or _NUMBERED.fullmatch(name) is not None)


def _outputs(shell: InteractiveShell) -> dict[int, object]:
    outputs = shell.user_ns.get("_oh")
    return outputs if isinstance(outputs, dict) else {}
