"""A line before a guarded cell when the system is about to end the kernel: of that no exception would tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumagic.memory import host
from gpumagic.report.units import size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_KEY = "gpumagic_host_warning"


def say(shell: InteractiveShell) -> None:
    """Print how little host memory is left, once until there is more again."""
    left = host.nearly_gone()
    if left is None:
        off(shell)
    elif _KEY not in shell.meta:
        shell.meta[_KEY] = True
        print(  # noqa: T201  # before the cell there is no report
            f"%%oomguard: only {size(left[0])} of {size(left[1])} of host memory is left; "
            "when it is gone, the kernel ends without an error."
        )


def off(shell: InteractiveShell) -> None:
    """Forget that it was said."""
    shell.meta.pop(_KEY, None)
