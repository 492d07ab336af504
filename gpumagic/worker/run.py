"""One dry run, in a process of its own: what both engines do from unpacking the notebook to the outcome."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import inspect
import io
import math
import os
import pickle
import random
import re
import signal
import socket
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpumagic.dryrun import parts
from gpumagic.dryrun.effects import Effect
from gpumagic.dryrun.wire import (
    DeviceOutcome,
    Ended,
    Failure,
    Outcome,
    RankOutcome,
    Request,
)
from gpumagic.memory import ledger
from gpumagic.memory.ledger import Ledger
from gpumagic.source import frames
from gpumagic.worker import host, noted, sandbox
from gpumagic.worker.cell import Lines
from gpumagic.worker.guesses import UnknownValues
from gpumagic.worker.known import Known, Shown
from gpumagic.worker.modules import Modules
from gpumagic.worker.passes import File, Passes

Send = Callable[["Outcome | Ended"], None]
"""Sends what a run comes to, and ends the process."""


@dataclass(frozen=True)
class Figures:
    """What an engine knows of a run that has ended.

    Attributes:
        ledger: the blocks of the run; one without devices where nothing is known of single blocks.
        devices: what was taken of each device, without what the ledger tells.
        is_out_of_memory: whether the cell failed for want of the device's memory.
        has_unknown_parts, communicators, rank, versions: as of `Outcome`.
    """

    ledger: Ledger
    devices: list[DeviceOutcome]
    is_out_of_memory: bool = False
    has_unknown_parts: bool = False
    communicators: int = 0
    rank: RankOutcome | None = None
    versions: dict[str, str] | None = None


class Run:
    """The devices and all that watches them; an engine fills in what it does another way.

    Args:
        request: what is run.
        watcher: takes the listener of what the kernel refuses.
        send: sends the outcome and ends the process.
    """

    def __init__(self, request: Request, watcher: socket.socket, send: Send) -> None:
        self.request = request
        self.send = send
        self.assumed: dict[str, None] = {}
        self.unknown: dict[str, None] = {}
        """Sentences for the report, each once: what is assumed, and what is not known."""
        self.effects: dict[Effect, None] = {}
        """What the cell would do outside, each once."""
        self.lines = Lines(request.code.filename, request.code.sources)
        self.passes = Passes(request.code.filename, request.code.sources)
        self.guesses = UnknownValues(
            request.scenario, self.assumed.setdefault, self.lines.reading
        )
        self.shown = Shown()
        self.known: Known | None = None
        """What is known of the device's values, where they are followed."""
        self.is_brief = request.is_brief
        """Whether the figures alone are wanted, and not the history."""
        self.kept: list[torch.Tensor] = []
        """What the notebook holds besides what was sent."""
        self.namespace: dict[str, Any] = {}
        self._watcher = watcher
        self._shared = -1
        self._until = math.inf

    def close_in(self) -> None:
        """Let nothing that this process does have an effect outside, before modules of the user's are imported."""
        # A closed-in process cannot look at the notebook's, whose memory this is.
        self._shared = os.open(self.request.notebook.shared, os.O_RDONLY)
        self.box = sandbox.block(
            self.effects.setdefault, self.assumed.setdefault, self._watcher
        )

    def unpack(
        self, coming: Callable[[parts.StoragePart], AbstractContextManager[object]]
    ) -> None:
        """Put what the notebook sent into the scopes it is of, of which the first is the cell's.

        Args:
            coming: returns what a storage on a device is made in.
        """
        parts.unpack_with(coming, self.passes.find_code)
        main: Any = types.ModuleType("__main__")
        main.__builtins__ = builtins
        sys.modules["__main__"] = (
            main  # where pickle looks for what the notebook defines
        )
        notebook = self.request.notebook
        others = [{"__builtins__": builtins} for _ in range(1, notebook.scopes)]
        scopes: list[dict[str, Any]] = [vars(main), *others]
        buffers = (parts.mapped(self._shared, slot) for slot in notebook.slots)
        reading = _Unpickler(io.BytesIO(notebook.data), buffers, scopes)
        while True:
            try:
                scope, name, value = reading.load()
            except EOFError:
                break
            scopes[scope][name] = value
        self.namespace = scopes[0]

    def execute(
        self, note: Callable[..., None], key_of: Callable[[torch.Tensor], int]
    ) -> None:
        """Run the cell and send the outcome; the arguments are those of `Modules`."""
        is_usual = not self.request.scenario.overrides
        self.host = host.Host(self.guesses, self.shown, self.known, draws=is_usual)
        self.host.install()
        self.guesses.host = self.host
        noted.install(self.guesses)
        self.effects.clear()
        self._prepare()
        self.modules = Modules(note, key_of, self.lines.where)
        if not self.is_brief:
            self.modules.watch(self.namespace)
        self._until = time.monotonic() + self.request.time_limit
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.siginterrupt(
            signal.SIGALRM, False
        )  # C code that waits for something goes on
        signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
        self.begin()
        try:
            self._run_code()
        except SystemExit:
            pass
        except BaseException as error:
            self.send(self.failed(error))
        self.send(self.outcome(None, ()))

    def _run_code(self) -> None:
        code = self.request.code
        if code.source is None:
            function = self.namespace["__dry_run__"]
            # What it returns is kept, as a cell's last value is.
            self.namespace["__dry_run__"] = function()
            return
        compiled = self.passes.compiled(code.source, code.filename)
        if compiled.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(compiled, self.namespace))  # noqa: S307  # the user's own cell
        else:
            exec(compiled, self.namespace)  # noqa: S102  # the user's own cell

    def _prepare(self) -> None:
        """Let the cell find what it would in the notebook: variables, a shell, the random generators' state."""
        namespace, states = self.namespace, self.request.random
        shell = sandbox.Magics(namespace, self.effects.setdefault)
        namespace.update(self.request.notebook.values)
        namespace["__name__"] = "__main__"
        namespace.setdefault("display", lambda *_, **__: None)
        namespace["get_ipython"] = lambda: shell
        random.setstate(states.python)
        state = torch.frombuffer(bytearray(states.torch), dtype=torch.uint8)
        torch.random.default_generator.set_state(state)
        if states.numpy is not None and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(states.numpy)

    def failed(self, error: BaseException) -> Outcome:
        """Return the outcome of a cell that raised, with what was not done for it, of which that may come."""
        failure = self.failure(error)
        undone = [effect.text for effect in self.effects]
        if not self.box.has_files and "Permission denied" in failure.text:
            undone.append(
                "writes a file"
            )  # it was C code that was refused, which tells nobody
        running = lines_of(traceback.extract_tb(error.__traceback__))
        return self.outcome(replace(failure, undone=tuple(undone)), running)

    def _on_alarm(self, _: int, frame: types.FrameType | None) -> None:
        if time.monotonic() >= self._until:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.out_of_time(frame)
        else:
            self.passes.sample(*self.allocated())

    def out_of_time(self, frame: types.FrameType | None) -> None:
        """Send what is known so far."""
        running = lines_of(traceback.extract_stack(frame))
        seconds = self.request.time_limit
        self.unknown.setdefault(
            f"what the cell needs later: it was run for {seconds:g} s and not to its end"
        )
        peak, _ = self.allocated()
        flat = tuple(self.passes.flat(peak))
        self.send(replace(self.outcome(None, running), is_cut_short=True, flat=flat))

    def outcome(self, failure: Failure | None, running: Iterable[File]) -> Outcome:
        """Return what the run comes to.

        Args:
            failure: how the cell failed, if it did.
            running: the lines that run, or ran when it failed.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.host.draws_others:
            self.assumed.setdefault(host.OTHERS)
        if parts.gone_back:
            self.unknown.setdefault(
                "what a backward pass takes in graphs of earlier cells besides gradients"
            )
        figures = self.account(failure)
        book = figures.ledger
        return Outcome(
            devices=tuple(self._with_history(figures)),
            lines=tuple(book.lines.values()),
            timeline=tuple(ledger.timeline(book)),
            operators=book.operators,
            failure=None if figures.is_out_of_memory else failure,
            passes=tuple(self.passes.counts(running)),
            assumed=tuple(self.assumed),
            unknown=tuple(self.unknown),
            effects=(*self.effects, *self.box.written()),
            has_unknown_parts=figures.has_unknown_parts or bool(parts.gone_back),
            decisions=self.guesses.decisions(),
            most_turns=self.guesses.most_turns(),
            has_noted=self.guesses.has_noted,
            communicators=figures.communicators,
            rank=figures.rank,
            versions=figures.versions or {"torch": torch.__version__},
        )

    def _with_history(self, figures: Figures) -> list[DeviceOutcome]:
        """Return the figures of each device with what the ledger tells of its peak."""
        if not figures.ledger.accounts:
            return figures.devices
        outcomes = []
        for index, device in enumerate(figures.devices):
            account = figures.ledger.accounts[index]
            modules = figures.ledger.at_peak(index, self.modules.names)
            breakdown: Counter[str] = Counter()
            for bytes_by_part in modules.values():
                breakdown.update(bytes_by_part)
            outcomes.append(
                replace(
                    device,
                    peak_at=account.peak.allocation(),
                    refused=None
                    if account.failure is None
                    else account.failure.allocation(),
                    breakdown=dict(breakdown),
                    modules={} if self.is_brief else _largest_first(modules),
                )
            )
        return outcomes

    # ---- What an engine does

    def begin(self) -> None:
        """Begin with the cell."""

    def failure(self, error: BaseException) -> Failure:
        """Return how the cell failed."""
        return failure_of(error, self.request.code.filename)

    def allocated(self) -> tuple[int, int]:
        """Return the peak and the allocated bytes of all devices."""
        raise NotImplementedError

    def account(self, failure: Failure | None) -> Figures:
        """Return what is known of the run.

        Args:
            failure: how the cell failed, if it did.
        """
        raise NotImplementedError


def _largest_first(modules: Mapping[str, Counter[str]]) -> dict[str, dict[str, int]]:
    """Return the bytes of each module by part, as plain data, with the module first that has most."""
    ordered = sorted(modules, key=lambda name: -modules[name].total())
    return {name: dict(modules[name]) for name in ordered}


_TICK = 0.05
"""Seconds between two looks at the time and the allocated bytes."""


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: io.BytesIO, buffers: Iterable[Any], scopes: list[dict[str, Any]]
    ) -> None:
        super().__init__(data, buffers=buffers)
        self._scopes = scopes

    def persistent_load(self, pid: Any) -> Any:
        """Return the names of one of the notebook's scopes, by its number, or of a module."""
        return (
            self._scopes[pid]
            if isinstance(pid, int)
            else vars(importlib.import_module(pid))
        )


def lines_of(stack: traceback.StackSummary) -> list[File]:
    """Return the file and line of each frame."""
    return [(frame.filename, frame.lineno or 0) for frame in stack]


# ---- How a cell failed

_DENIED = re.compile(
    "Operation not permitted|Permission denied|Connection refused|not supported"
)
"""How the system words what the kernel refuses; libraries written in C pass on the words alone."""
_WITHOUT_SHAPE = re.compile(r"(\S+): attempted to run this operator with Meta tensors")
"""torch's words for an operator that is not answered by shape."""
_SPARSE = re.compile(
    r"Could not run '\S+' with arguments from the 'Sparse(Csr)?dryrun' backend"
)
_BEYOND_LIST = "index out of range"
"""The end of what Python says of a list, a tuple or a text."""
_OF_NOTED = re.compile("Noted|INTERNAL ASSERT")
"""What stands in a message where C code met a number that is none."""
_NO_HOST_MEMORY = "DefaultCPUAllocator: "
"""How torch says that the host's memory does not do."""


def failure_of(error: BaseException, filename: str, line: int | None = None) -> Failure:
    """Return how the cell failed.

    Args:
        error: what it raised.
        filename: that of its code.
        line: the line where no frame of the cell is in the traceback, if it is known.
    """
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == filename:
            line = frame.lineno
    related = list(
        frames.related_exceptions(error)
    )  # libraries wrap what they are refused
    refusals = [other for other in related if isinstance(other, parts.CannotDryRun)]
    shown = refusals[0] if refusals else error
    lines = str(shown).strip().splitlines()
    message = lines[0] if lines else ""
    refusal = message if refusals else _refusal_of_torch(message)
    return Failure(
        kind=type(error).__name__,
        text=refusal or message,
        line=line,
        is_refused=refusal is not None,
        is_denied=any(_DENIED.search(str(other)) for other in related),
        exceeds_host=isinstance(error, MemoryError) or _NO_HOST_MEMORY in message,
        is_beyond_list=message.endswith(_BEYOND_LIST),
        may_be_of_noted=isinstance(error, TypeError)
        or _OF_NOTED.search(message) is not None,
    )


def _refusal_of_torch(message: str) -> str | None:
    """Return why an operator of torch cannot be dry-run, if that is what its message says."""
    without_shape = _WITHOUT_SHAPE.match(message)
    if without_shape is not None:
        return f"what {without_shape[1]} returns depends on values"
    if _SPARSE.match(message):
        return "it uses a sparse tensor on the device, and what its kernels take is not known"
    return None
