"""One dry run, in a process of its own: what both engines do from unpacking the notebook to the outcome."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import io
import math
import pickle
import random
import re
import signal
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from gpumagic.dryrun import parts
from gpumagic.dryrun.effects import CACHES
from gpumagic.memory import ledger
from gpumagic.memory.ledger import NO_PEAK, Ledger
from gpumagic.source import frames
from gpumagic.worker import host, noted, sandbox
from gpumagic.worker.cell import Lines
from gpumagic.worker.guesses import Guesses
from gpumagic.worker.known import Known, Shown
from gpumagic.worker.modules import Modules
from gpumagic.worker.passes import File, Passes

Outcome = dict[str, Any]


class Run:
    """The devices and all that watches them; an engine fills in what it does another way.

    Args:
        request: what `dryrun.run` sends: see there.
        send: sends the outcome and ends the process.
    """

    def __init__(self, request: dict[str, Any], send: Callable[[Outcome], None]) -> None:
        self.request = request
        self.send = send
        self.assumed: dict[str, None] = {}
        self.unknown: dict[str, None] = {}
        self.effects: dict[str, None] = {}
        """Sentences for the report, each once: what is assumed, what is not known, what the cell would do outside."""
        self.lines = Lines(request["filename"], request["sources"])
        self.passes = Passes(request["filename"], request["sources"])
        self.guesses = Guesses(request, self.assumed.setdefault, self.lines.reading)
        self.shown = Shown()
        self.known: Known | None = None
        """What is known of the device's values, where they are followed."""
        self.is_brief = request["is_brief"]  # only the figures are wanted, not the history
        self.kept: list[torch.Tensor] = []
        """What the notebook holds besides what was sent."""
        self._until = math.inf
        self.names: list[str] = []
        self.namespace: dict[str, Any] = {}

    def close_in(self) -> None:
        """Let nothing that this process does have an effect outside, before modules of the user's are imported."""
        self.box = sandbox.block(
            self.effects.setdefault, self.assumed.setdefault, self.request["watcher"]
        )

    def unpack(self, coming: Callable[[parts.StoragePart], AbstractContextManager[object]]) -> None:
        """Put what the notebook sent into the scopes it is of, of which the first is the cell's.

        Args:
            coming: returns what a storage on a device is made in.
        """
        parts.coming, parts.find_code = coming, self.passes.find_code
        main: Any = types.ModuleType("__main__")
        main.__builtins__ = builtins
        sys.modules["__main__"] = main  # where pickle looks for what the notebook defines
        scopes = [
            vars(main),
            *({"__builtins__": builtins} for _ in range(1, self.request["scopes"])),
        ]
        buffers = (parts.mapped(self.request["shared"], slot) for slot in self.request["slots"])
        reading = _Unpickler(io.BytesIO(self.request["data"]), buffers, scopes)
        while True:
            try:
                index, name, value = reading.load()
            except EOFError:
                break
            scopes[index][name] = value
        self.namespace = scopes[0]

    def execute(self, note: Callable[..., None], key_of: Callable[[torch.Tensor], int]) -> None:
        """Run the cell and send the outcome, as plain data; the arguments are those of `Modules`."""
        self.host = host.Host(self.guesses, self.shown, self.known, draws=not self.request["ways"])
        self.host.install()
        self.guesses.host = self.host
        noted.install(self.guesses)
        self.effects.clear()
        self._prepare()
        self.modules = Modules(note, key_of, self.lines.where)
        if not self.is_brief:
            self.modules.watch(self.namespace)
        source, filename = self.request["source"], self.request["filename"]
        self._until = time.monotonic() + self.request["time_limit"]
        signal.signal(signal.SIGALRM, self._ring)
        signal.siginterrupt(signal.SIGALRM, False)  # C code that waits for something goes on
        signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
        self.begin()
        try:
            code = None if source is None else self.passes.compiled(source, filename)
            if code is None:
                function = self.namespace["__dry_run__"]
                self.namespace["__dry_run__"] = (
                    function()
                )  # what it returns is kept, as a cell's last value is
            elif code.co_flags & 0x80:  # it awaits something
                asyncio.run(eval(code, self.namespace))  # noqa: S307  # the user's own cell
            else:
                exec(code, self.namespace)  # noqa: S102  # the user's own cell
        except SystemExit:
            pass
        except BaseException as error:
            self.send(self.failed(error))
        self.send(self.outcome(None, ()))

    def _prepare(self) -> None:
        """Let the cell find what it would in the notebook: variables, a shell, the random generators' state."""
        request, namespace = self.request, self.namespace
        shell = sandbox.Magics(namespace, self.effects.setdefault)
        namespace.update({**request["values"], "__name__": "__main__"})
        namespace.setdefault("display", lambda *_, **__: None)
        namespace["get_ipython"] = lambda: shell
        random.setstate(request["random"])
        state = torch.frombuffer(bytearray(request["torch_random"]), dtype=torch.uint8)
        torch.random.default_generator.set_state(state)
        if request["numpy_random"] is not None and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(request["numpy_random"])

    def failed(self, error: BaseException) -> Outcome:
        """Return the outcome of a cell that raised, with what was not done for it, of which that may come."""
        told, running = self.failure(error), lines_of(traceback.extract_tb(error.__traceback__))
        is_unheard = (
            not self.box.has_files and "Permission denied" in told["text"]
        )  # it was C code that was refused
        told["undone"] = [*self.effects, *(["writes a file"] if is_unheard else [])]
        return self.outcome(told, running)

    def _ring(self, _: int, frame: types.FrameType | None) -> None:
        if time.monotonic() >= self._until:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.out_of_time(frame)
        else:
            self.passes.sample(*self.allocated())

    def out_of_time(self, frame: types.FrameType | None) -> None:
        """Send what is known so far."""
        running = lines_of(traceback.extract_stack(frame))
        seconds = self.request["time_limit"]
        self.unknown.setdefault(
            f"what the cell needs later: it was run for {seconds:g} s and not to its end"
        )
        flat = self.passes.flat(self.allocated()[0])
        self.send({**self.outcome(None, running), "is_open": True, "flat": flat})

    def outcome(self, error: dict[str, Any] | None, running: Iterable[File]) -> Outcome:
        """Return all that is told.

        Args:
            error: how the cell failed.
            running: the lines that run, or ran when it failed.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.host.draws_others:
            self.assumed.setdefault(host.OTHERS)
        if parts.gone_back:
            self.unknown.setdefault(
                "what a backward pass takes in graphs of earlier cells besides gradients"
            )
        book, devices, others = self.account(error)
        for device, told in enumerate(devices):
            told |= {"at": NO_PEAK.told(), "breakdown": {}, "modules": []}
            if book.accounts:
                account = book.accounts[device]
                told["at"] = account.peak.told()
                told["failure"] = account.failure and account.failure.told()
                modules = book.at_peak(device, self.names)
                told["breakdown"] = dict(sum(modules.values(), Counter()))
                rows = [(name, dict(parts)) for name, parts in modules.items()]
                told["modules"] = (
                    [] if self.is_brief else sorted(rows, key=lambda row: -sum(row[1].values()))
                )
        written = [each for each in self.box.written() if not any(part in each for part in CACHES)]
        return {
            "devices": devices,
            "lines": [use for use in book.lines.values() if use["line"] is not None],
            "timeline": ledger.timeline(book),
            "error": error,
            "operators": book.operators,
            "assumed": list(self.assumed),
            "unknown": list(self.unknown),
            "effects": [*self.effects, *written],
            "passes": self.passes.counts(running),
            "is_open": False,
            **self.guesses.told(),
            "versions": {"torch": torch.__version__},
            **others,
            "lacks": others["lacks"] or bool(parts.gone_back),
        }

    # ---- What an engine does

    def begin(self) -> None:
        """Begin with the cell."""

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return how the cell failed."""
        return failure(error, self.request["filename"])

    def allocated(self) -> tuple[int, int]:
        """Return the peak and the allocated bytes of all devices."""
        raise NotImplementedError

    def account(self, error: dict[str, Any] | None) -> tuple[Ledger, list[dict[str, Any]], Outcome]:
        """Return the book of blocks, without devices where there is none, each device's figures, and what else is told.

        Args:
            error: how the cell failed.
        """
        raise NotImplementedError


_TICK = 0.05
"""Seconds between two looks."""


_DENIED = re.compile("Operation not permitted|Permission denied|Connection refused|not supported")
"""How the system words what the kernel refuses; libraries written in C pass on the words alone."""


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: io.BytesIO, buffers: Iterable[Any], scopes: list[dict[str, Any]]
    ) -> None:
        super().__init__(data, buffers=buffers)
        self._scopes = scopes

    def persistent_load(self, pid: Any) -> Any:
        """Return the names of one of the notebook's scopes, by its number, or of a module."""
        return self._scopes[pid] if isinstance(pid, int) else vars(importlib.import_module(pid))


def lines_of(stack: traceback.StackSummary) -> list[File]:
    """Return the file and line of each frame."""
    return [(each.filename, each.lineno or 0) for each in stack]


def failure(error: BaseException, filename: str, line: int | None = None) -> dict[str, Any]:
    """Return how the cell failed; ``line`` is what is known where no frame of the cell is in the traceback."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == filename:
            line = frame.lineno
    related = [*frames.related_exceptions(error)]  # libraries wrap what they are refused
    cause = next((each for each in related if isinstance(each, parts.CannotDryRun)), None)
    refused, text = cause is not None, next(iter(str(cause or error).strip().splitlines()), "")
    without_shape = re.match(r"(\S+): attempted to run this operator with Meta tensors", text)
    if without_shape is not None:  # torch's own words for an operator that is not answered by shape
        refused, text = True, f"what {without_shape[1]} returns depends on values"
    elif re.match(
        r"Could not run '\S+' with arguments from the 'Sparse(Csr)?dryrun' backend", text
    ):
        refused, text = (
            True,
            "it uses a sparse tensor on the device, and what its kernels take is not known",
        )
    is_denied = any(_DENIED.search(str(each)) for each in related)
    return {
        "kind": type(error).__name__,
        "text": text,
        "line": line,
        "refused": refused,
        "is_denied": is_denied,
    }
