"""The IPython session that this process runs, if it runs one; asking imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def shell() -> InteractiveShell | None:
    """Return the running shell; None in a script."""
    ipython = sys.modules.get("IPython")
    running: InteractiveShell | None = None if ipython is None else ipython.get_ipython()
    return running


def user_variables(running: InteractiveShell | None) -> Mapping[str, object]:
    """Return the user's variables: the shell's, or without one those of the main module."""
    names: Mapping[str, object] = vars(sys.modules["__main__"]) if running is None else running.user_ns
    return names
