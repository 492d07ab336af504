"""What `get_ipython()` is in a rehearsal: some magics do nothing, some run their body, the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumagic.dryrun.parts import NotRehearsed

_QUIET = frozenset({"matplotlib", "config", "load_ext", "reload_ext", "autoreload", "pip", "conda", "precision",
                    "gpuinfo", "devices", "oomguard", "who", "whos", "env", "pwd", "cd"})  # fmt: skip
_BODY = frozenset({"time", "capture"})


class Magics:
    """The shell, as far as a rehearsed cell may use it.

    Args:
        namespace: where bodies run.
        note: called with a sentence for each thing that was not done.
    """

    def __init__(self, namespace: dict[str, Any], note: Callable[[str], None]) -> None:
        self.user_ns = namespace
        self._note = note

    def run_line_magic(self, name: str, line: str, *_: object, **__: object) -> None:
        """Do nothing for a magic that moves no tensor, run the statement of `%time`."""
        if name in _BODY:
            exec(compile(line, "<magic>", "exec"), self.user_ns)  # noqa: S102  # the user's own cell
        elif name not in _QUIET:
            raise NotRehearsed(f"it uses %{name}, which a rehearsal does not follow")

    def run_cell_magic(self, name: str, line: str, body: str) -> None:
        """Run the body of a magic that only watches it."""
        if name not in _BODY:
            raise NotRehearsed(f"it uses %%{name}, which a rehearsal does not follow")
        exec(compile(body, "<magic>", "exec"), self.user_ns)  # noqa: S102  # the user's own cell

    def system(self, command: str, *_: object) -> None:
        """Run no command."""
        self._note(f"runs the command {command!r}")

    def getoutput(self, command: str, *_: object, **__: object) -> list[str]:
        """Return no output."""
        self.system(command)
        return []
