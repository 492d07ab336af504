"""The cell in the process of its dry run: the notebook unpacked, the code run as IPython would, how it failed."""

from __future__ import annotations

import ast
import io
import pickle
import random
import re
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpumagic.dryrun import parts


@dataclass
class Notes:
    """Sentences for the report, each once."""

    assumed: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)
    effects: dict[str, None] = field(default_factory=dict)

    def assume(self, text: str) -> None:
        """Note what is assumed."""
        self.assumed.setdefault(text)

    def effect(self, text: str) -> None:
        """Note what the cell would do to the world."""
        self.effects.setdefault(text)

    def not_known(self, text: str) -> None:
        """Note what is not known."""
        self.unknown.setdefault(text)

    def out_of_time(self, seconds: float) -> None:
        """Note that the cell was stopped."""
        self.not_known(f"what the cell needs later: it was run for {seconds:g} s and not to its end")


class Clock:
    """Ends a run when its time is up, and until then looks now and then at what it has allocated.

    Args:
        seconds: its time.
        look: returns how often each loop was run, and the peak and the allocated bytes of all devices.
        end: called with the running frame when the time is up.
    """

    def __init__(
        self,
        seconds: float,
        look: Callable[[], tuple[list[int], int, int]],
        end: Callable[[types.FrameType | None], None],
    ) -> None:
        self._until = time.monotonic() + seconds
        self._look = look
        self._end = end
        self._seen: list[tuple[list[int], int, int]] = []

    def start(self) -> None:
        """Begin to look."""
        signal.signal(signal.SIGALRM, self._ring)
        signal.siginterrupt(signal.SIGALRM, False)  # C code that waits for something goes on
        signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)

    def _ring(self, _: int, frame: types.FrameType | None) -> None:
        if time.monotonic() >= self._until:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._end(frame)
            return
        self._seen.append(self._look())

    def flat_from(self) -> list[int | None]:
        """Return for each loop the pass after which none took more memory; None where that was not seen.

        Neither the peak may have grown since, nor what was found allocated, which is beneath it, in the later half.
        """
        now, peak, _ = self._look()
        later = [(runs, allocated) for runs, highest, allocated in self._seen if highest == peak]
        half = len(later) // 2
        if not half or max(each[1] for each in later[half:]) > max(each[1] for each in later[:half]):
            return [None] * len(now)
        first = [*later[0][0], *[0] * (len(now) - len(later[0][0]))]
        return [begun + 1 if run >= _OFTEN * (begun + 1) else None for begun, run in zip(first, now, strict=True)]


_TICK = 0.05
"""Seconds between two looks."""
_OFTEN = 4
"""How many times as many passes must have been run as those that are said to have needed all."""


def unpack(data: bytes, scopes: list[dict[str, Any]]) -> None:
    """Put what the notebook sent into the scopes it is of."""
    reading = _Unpickler(io.BytesIO(data), scopes)
    try:
        while True:
            index, name, value = reading.load()
            scopes[index][name] = value
    except EOFError:
        pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, scopes: list[dict[str, Any]]) -> None:
        super().__init__(data)
        self._scopes = scopes

    def persistent_load(self, pid: Any) -> Any:
        return self._scopes[pid[1]]


def compiled(
    source: str, filename: str, change: Callable[[ast.Module], ast.Module] = lambda tree: tree
) -> types.CodeType:
    """Return the cell's code, its syntax tree changed first."""
    tree = change(ast.parse(source, filename))
    code = compile(tree, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(code, types.CodeType)
    return code


def execute(code: types.CodeType | None, namespace: dict[str, Any]) -> None:
    """Run the cell, or where there is no code, the callable that was sent."""
    if code is None:
        namespace["__dry_run__"]()
    elif code.co_flags & 0x80:
        import asyncio

        asyncio.run(eval(code, namespace))  # noqa: S307  # the user's own cell
    else:
        exec(code, namespace)  # noqa: S102  # the user's own cell


def failure(error: BaseException, filename: str, line: int | None = None) -> dict[str, Any]:
    """Return how the cell failed; ``line`` is what is known where no frame of the cell is in the traceback."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == filename:
            line = frame.lineno
    refused = isinstance(error, parts.CannotDryRun)
    text = next(iter(str(error).strip().splitlines()), "")
    without_shape = re.match(r"(\S+): attempted to run this operator with Meta tensors", text)
    if without_shape is not None:  # torch's own words for an operator that is not answered by shape
        refused, text = True, f"what {without_shape[1]} returns depends on values"
    return {"kind": type(error).__name__, "text": text, "line": line, "refused": refused}


def prepare(request: dict[str, Any], namespace: dict[str, Any], shell: object) -> None:
    """Let the cell find what it would in the notebook: its variables, a shell, the state of the random generators."""
    namespace.update({**request["values"], "__name__": "__main__"})
    namespace.setdefault("display", lambda *_, **__: None)
    namespace["get_ipython"] = lambda: shell
    _seed(request)


def _seed(request: dict[str, Any]) -> None:
    random.setstate(request["random"])
    torch.random.default_generator.set_state(torch.frombuffer(bytearray(request["torch_random"]), dtype=torch.uint8))
    if request["numpy_random"] is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(request["numpy_random"])


def runs_in(*prefixes: str) -> bool:
    """Return whether a module whose name begins like this is running, in this thread."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(prefixes):
            return True
        frame = frame.f_back
    return False


COMPILERS = ("torch._inductor.runtime.", "torch._inductor.select_algorithm", "triton.")
"""What measures kernels while torch.compile chooses among them, and copies what they would overwrite."""
