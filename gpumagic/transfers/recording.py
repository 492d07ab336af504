"""How a cell gets its default device and its copies get seen: the choice between two ways, and why.

`with torch.device(...)` is a function mode: torch hands it every call, also those that have nothing to do with
devices. Measured beside each other on 2 cores, torch 2.13, as times of the bare small-operator training step and of
10,000 additions:

    an empty TorchDispatchMode                2.7x
    torch.device, or a mode with handlers     1.6x   1.6x   what `RecordingContext` does, exact by construction
    entry points exchanged for the cell       1.10x  1.12x  what `patches` does, the looks at memory included

Indexing has a C slot, so its stand-in costs more beside it than others: 0.25 us, 1.4x of `x[5]`, nothing elsewhere.
A dispatch mode around every `backward` would make the training step 1.7x; hooks on the graph's nodes of the moves that
the run has seen cost those alone (`returning`).

Not possible: `set_default_tensor_type` is one for all threads and knows no index; at the dispatcher a device that was
not given cannot be told from `cpu`; a C function's slot cannot be exchanged in place, since its hash is its address.

So a cell runs with exchanged entry points where nothing could tell the difference, and under the mode where something
could: `find_hindrance` looks before the cell, and a cell that compiles changes over at that moment. Imports
torch at its top, so it is itself imported only when a cell is run on a device.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode

from gpumagic import _compat
from gpumagic.source.text import parse_tree
from gpumagic.transfers import calls, log, patches
from gpumagic.transfers.device_mode import RecordingContext
from gpumagic.transfers.log import TransferLog
from gpumagic.transfers.recorder import Recorder

MOST_EXCHANGES = 400
"""Of 1000 changes of a class that CPython 3.13 counts, a run makes two."""


def find_hindrance(namespace: Mapping[str, object], source: str) -> str | None:
    """Return why a block cannot run with exchanged entry points, or None if it can.

    Args:
        namespace: the globals in which the block runs.
        source: the text of the block, as far as it is known.
    """
    return _of_process() or _of_source(source) or _of_holders(namespace)


def _of_process() -> str | None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "Python runs without its global lock"
    if _compat.CLASSES_COUNT_CHANGES and patches.exchanges >= MOST_EXCHANGES:
        return f"this process has had {MOST_EXCHANGES} such cells"
    if _len_torch_function_stack():
        return "a default device or another function mode is in force"
    if _has_compiled():
        return "torch.compile has been used"
    overriding = next(_overriding(torch.Tensor, TorchFunctionMode), None)
    return f"{overriding} overrides __torch_function__" if overriding else None


def _has_compiled() -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # there as soon as there is an optimizer
    backends = getattr(compiler, "cached_backends", {0: object()})
    return compiler is not None and any(backends.values())


def _overriding(*bases: type) -> Iterator[str]:
    """Yield the classes outside torch that see functions of torch's by identity, as `__torch_function__` does."""
    for base in bases:
        heirs: list[type] = base.__subclasses__()
        for heir in heirs:
            if "__torch_function__" in vars(heir) and heir.__module__.partition(".")[0] not in ("torch", "gpumagic"):
                yield heir.__name__
            yield from _overriding(heir)


@lru_cache(32)
def _of_source(source: str) -> str | None:
    if "__torch_function__" in source:
        return "the cell overrides __torch_function__"
    tree = parse_tree(source)
    if tree is None:  # a cell with magics in it
        return None
    names = {each.name for each in calls.functions() if each.owner is not torch.autograd}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and id(node) not in called:
            return f"the cell uses torch.{node.attr} as a value"
    return None


def _of_holders(namespace: Mapping[str, object]) -> str | None:
    census = patches.census(namespace)
    return None if census is None else census.stranger


class Recording:
    """The default device of a block, and the record of what its calls create and move.

    Args:
        device: where new tensors go.
        log: where calls are counted.
        namespace: the globals in which the block runs.
        source: the text of the block, as far as it is known.
        trace: whether to count copies where they happen, with a dispatch mode.
        strict: whether to refuse copies and tensors of other devices that no line asks for.
    """

    def __init__(
        self,
        device: str,
        log: TransferLog,
        namespace: Mapping[str, object],
        source: str = "",
        *,
        trace: bool = False,
        strict: bool = False,
    ) -> None:
        self.recorder = Recorder(torch.device(device), log, is_traced=trace or strict, refuses=strict)
        if self.recorder.is_traced:
            self.recorder.hooks = None
        self.hindrance: str | None = None
        """Why the block runs under the function mode, if it does."""
        self._namespace = namespace
        self._source = source
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        """Begin, in the calling thread."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        hindrance = find_hindrance(self._namespace, self._source)
        if self.recorder.is_traced:
            self.recorder.watches_threads = hindrance is None
            self.recorder.change_over = self._leave_threads
            self._enter_mode(hindrance or log.TRACE)
            return
        if hindrance is not None:
            self.recorder.watches_threads = False
            self._enter_mode(hindrance)
            return
        self.recorder.change_over = self._change_over
        self._stack.callback(patches.end, self.recorder)
        patches.begin(self.recorder)

    def close(self) -> None:
        """End, and leave everything as it was found."""
        try:
            self._stack.close()
        except BaseException:  # Ctrl-C: what is exchanged is put back all the same
            patches.end(self.recorder)
            raise
        finally:
            self.recorder.settle()

    def _change_over(self, hindrance: str) -> None:
        """Go on under the function mode."""
        self._stack.close()
        self.recorder.watches_threads = False
        self._enter_mode(hindrance)

    def _leave_threads(self, hindrance: str) -> None:
        """Go on without an eye on other threads."""
        self.hindrance = hindrance
        self.recorder.watches_threads = False
        patches.withdraw(self.recorder)

    def _enter_mode(self, hindrance: str) -> None:
        self.hindrance = hindrance
        self.recorder.inside = lambda: RecordingContext(self.recorder, look_only=True)
        self.recorder.has_mode = True
        self._stack.callback(patches.end, self.recorder)
        patches.begin(self.recorder)
        self._stack.enter_context(RecordingContext(self.recorder))
        if self.recorder.is_traced:
            from gpumagic.transfers.tracing import Tracer

            self._stack.enter_context(Tracer(self.recorder))
