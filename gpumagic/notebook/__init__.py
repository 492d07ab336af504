"""How a cell runs under a guard, and when the guard's report is shown; the running IPython shell and its variables.

Start with `cells.CellSessions`. It knows nothing of devices and memory: those are the guards' business.

    guards.py      the protocol of a guard; the body of a cell magic as code, and what runs it under guards
    cells.py       `%%magic` -> `%magic`, so that IPython runs the cell as its own, and the guards of running cells
    interrupts.py  Ctrl-C while a report is made and shown
    completion.py  completion of the magics' options, devices and variables
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def shell() -> InteractiveShell | None:
    """Return the running shell; None in a script."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    running: InteractiveShell | None = ipython.get_ipython()
    return running


def user_variables(running: InteractiveShell | None) -> Mapping[str, object]:
    """Return the user's variables: the shell's, or without one those of the main module."""
    if running is None:
        return vars(sys.modules["__main__"])
    names: Mapping[str, object] = running.user_ns
    return names


def names_of_users(namespace: Mapping[str, object]) -> list[str]:
    """Return the names of the user's own variables: not `In`, `Out`, `exit` and what else IPython puts beside them."""
    running = shell()
    hidden: Mapping[str, object] = {}
    if running is not None:
        hidden = running.user_ns_hidden
    return [
        name for name in namespace if not name.startswith("_") and name not in hidden
    ]


def unregister(
    running: InteractiveShell, event: str, callback: Callable[..., object]
) -> None:
    """Stop calling something at an event of a shell, if it is called: Ctrl-C may have come before it was registered."""
    with contextlib.suppress(ValueError):
        running.events.unregister(event, callback)
