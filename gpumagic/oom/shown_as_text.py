"""The traceback of a failure that a cell goes on after, as text instead of as a failed cell's output.

A front end that runs notebooks without a reader may take any output of the type `error` for a failed run, whatever
the kernel replies: papermill 2.7 does. What `--keep-going` goes on after is therefore printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_SHOW = "_showtraceback"


def start(shell: InteractiveShell, goes_on_after: Callable[[BaseException], bool]) -> None:
    """Have a kernel's shell print some of the tracebacks that it would send, until `stop`; a terminal's prints all.

    Args:
        shell: whose next tracebacks they are.
        goes_on_after: tells of an error whether it is to be printed.
    """
    if getattr(shell, "kernel", None) is None:
        return
    send = shell._showtraceback

    def show(kind: object, error: BaseException, lines: Any) -> None:
        if goes_on_after(error):
            sys.stderr.write(shell.InteractiveTB.stb2text(lines) + "\n")
        else:
            send(kind, error, lines)

    vars(shell)[_SHOW] = show


def stop(shell: InteractiveShell) -> None:
    """Undo `start`."""
    vars(shell).pop(_SHOW, None)
