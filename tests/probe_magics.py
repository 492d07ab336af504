"""An extension whose guards write down what happens to them: the cell machinery without torch.

`%%ondevice` sets a mode that belongs to its thread, as torch's do; `%%oomguard` can retry, replace and swallow.
"""

from __future__ import annotations

import threading

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from gpumagic import extension
from gpumagic.errors import GpuMagicError
from gpumagic.notebook.guards import BodyRuns

events = []
_local = threading.local()


def modes():
    """Return the modes entered in this thread and not left, the innermost last."""
    return _local.__dict__.setdefault("modes", [])


class Report:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return f"<{self.text}>"


class Cleaned(Exception):
    """What the cell fails with instead."""


class ProbeGuard:
    def __init__(self, name, options):
        self.name = name
        self.options = options
        self.key = " ".join([name, *options])
        self.retries = 0

    def open(self):
        if "broken" in self.options:
            raise GpuMagicError("no such device")
        events.append(f"open {self.key}")
        modes().append(self.key)

    def close(self, error):
        events.append(f"close {self.key} {type(error).__name__}")
        modes().remove(self.key)

    def restore(self):
        pass

    def retry(self, error):
        events.append(f"retry {type(error).__name__}")
        return True

    def finish(self, result):
        events.append(f"finish {self.key}")
        if result.error_in_exec is not None and "--swallow" in self.options:
            result.error_in_exec = None
        elif result.error_in_exec is not None and "--replace" in self.options:
            result.error_in_exec = Cleaned("in one line")
        return None if "--quiet" in self.options else Report(f"report of {self.key}")


class ProbeRuns(BodyRuns):
    """Runs a body again after an error, so many times at most."""

    def __init__(self, guard, retries):
        super().__init__(guard)
        self.probe, self.retries = guard, retries

    def begin(self, source):
        self.source = source
        return source

    def next(self, outcome):
        if not isinstance(outcome.error_in_exec, Exception) or self.retries == 0:
            return None
        self.retries -= 1
        self.probe.retry(outcome.error_in_exec)
        outcome.error_in_exec = outcome.result = None
        return self.source


@magics_class
class ProbeMagics(Magics):
    def __init__(self, shell, sessions):
        super().__init__(shell)
        self.sessions = sessions

    @line_cell_magic
    def ondevice(self, line, cell=None):
        """Run the cell on a device."""
        return self._run("ondevice", line, cell)

    @line_cell_magic
    def oomguard(self, line, cell=None):
        """Run the cell guarded."""
        return self._run("oomguard", line, cell)

    def _run(self, name, line, cell):
        options = line.split("#")[0].split()
        if "--help" in options:
            print(f"help of {name}")
            return None
        if "--bad" in options:
            raise UsageError("no option --bad")
        guard = ProbeGuard(name, options)
        try:
            if cell is None:
                return self.sessions.start(guard)
            retries = int(options[options.index("--retry") + 1]) if "--retry" in options else 0
            return self.sessions.ready_body(ProbeRuns(guard, retries), cell)()
        except GpuMagicError as error:
            raise UsageError(str(error)) from None


def load_ipython_extension(shell):
    extension.attach(shell, ProbeMagics, {"ondevice": (), "oomguard": ("--retry",)})
    shell.user_ns.update(events=events, modes=modes)


def unload_ipython_extension(shell):
    extension.unload(shell)
