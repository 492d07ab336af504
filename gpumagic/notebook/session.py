"""The IPython session that this process runs, if it runs one; asking imports nothing."""

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
    running: InteractiveShell | None = None if ipython is None else ipython.get_ipython()
    return running


def user_variables(running: InteractiveShell | None) -> Mapping[str, object]:
    """Return the user's variables: the shell's, or without one those of the main module."""
    names: Mapping[str, object] = vars(sys.modules["__main__"]) if running is None else running.user_ns
    return names


def names_of_users(namespace: Mapping[str, object]) -> list[str]:
    """Return the names of the user's own variables: not `In`, `Out`, `exit` and what else IPython puts beside them."""
    running = shell()
    hidden = {} if running is None else running.user_ns_hidden
    return [name for name in namespace if not name.startswith("_") and name not in hidden]


def unregister(running: InteractiveShell, event: str, callback: Callable[..., object]) -> None:
    """Stop calling something at an event of a shell, if it is called: Ctrl-C may have come before it was registered."""
    with contextlib.suppress(ValueError):
        running.events.unregister(event, callback)


def torch_modes() -> Mapping[str, int]:
    """Return the modes of this thread that blocks such as `torch.no_grad` switch, each by the call that sets it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    kinds = ("cpu", "cuda", "xpu", torch._C._get_privateuse1_backend_name())
    # How many blocks of autocast are open torch tells only by one more; in `map` Ctrl-C cannot come in between.
    both = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    return {
        "torch.set_grad_enabled({})": torch.is_grad_enabled(),
        **{f"torch.set_autocast_enabled({kind!r}, {{}})": torch.is_autocast_enabled(kind) for kind in kinds},
        "torch.autocast_decrement_nesting()": [*map(type(both[0]).__call__, both)][1],
    }


def tell_changed_modes(before: Mapping[str, int], error: BaseException | None) -> None:
    """Say in a line which calls restore the modes that a cell began with, where Ctrl-C has left others.

    Torch restores them in Python, and a Ctrl-C that comes in that code leaves gradients off, or autocast on, for the
    rest of the session. What the cell's own statements have set stays as well, so nothing is restored here.
    """
    if isinstance(error, KeyboardInterrupt):
        now = torch_modes()
        calls = [call.format(mode) for call, mode in before.items() if now[call] != mode]
        if calls:
            print(f"After Ctrl-C torch is not in the modes of before the cell; to restore them: {'; '.join(calls)}")  # noqa: T201
