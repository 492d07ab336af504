"""What a guarded cell prints beside its report: its traceback as text, and a warning about the host's memory.

A front end that runs notebooks without a reader may take any output of the type `error` for a failed run, whatever
the kernel replies: papermill 2.7 does. What `--keep-going` goes on after is therefore printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpumagic.memory import host
from gpumagic.report.units import size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_SHOW = "_showtraceback"


def show_as_text(shell: InteractiveShell, goes_on_after: Callable[[BaseException], bool]) -> None:
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


def stop_showing_as_text(shell: InteractiveShell) -> None:
    """Undo `start`."""
    vars(shell).pop(_SHOW, None)


_WARNED = "gpumagic_host_warning"


def warn_of_host_memory(shell: InteractiveShell) -> None:
    """Print how little host memory is left, once until there is more again."""
    left = host.nearly_gone()
    if left is None:
        forget_host_warning(shell)
    elif _WARNED not in shell.meta:
        shell.meta[_WARNED] = True
        print(  # noqa: T201  # before the cell there is no report
            f"%%oomguard: only {size(left[0])} of {size(left[1])} of host memory is left; "
            "when it is gone, the kernel ends without an error."
        )


def forget_host_warning(shell: InteractiveShell) -> None:
    """Warn again when there is little."""
    shell.meta.pop(_WARNED, None)
