"""How a cell gets its default device and its transfers are seen: by patches or a function mode, and why.

`with torch.device(...)` is a function mode: torch passes it every call, also those that have nothing to do with
devices. Measured side by side on 2 cores, torch 2.13, as times of the bare small-operator training step and of 10,000
additions:

    an empty TorchDispatchMode                2.7x
    torch.device, or a mode with handlers     1.6x   1.6x   what `RecordingContext` does, exact by construction
    functions patched for the cell            1.10x  1.12x  what `patches` does, sampling of memory included

Indexing has a C slot, so its wrapper costs relatively more: 0.25 us, 1.4x of `x[5]`, nothing elsewhere. A dispatch mode
around every `backward` would make the training step 1.7x; hooks on the graph nodes of the transfers that the run has
seen cost only those (`recorder`).

Not possible: `set_default_tensor_type` is one for all threads and knows no index; at the dispatcher an absent device
cannot be told from `cpu`; a C function's slot cannot be replaced in place, since its hash is its address.

So a cell runs with patches where nothing can tell the difference, and under the mode otherwise: `find_blocker` checks
before the cell, and a cell that compiles switches to the mode at that moment. Imports torch at its top, so it is
imported only when a cell runs on a device.
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
from gpumagic.transfers import calls, patches
from gpumagic.transfers.device_mode import RecordingContext
from gpumagic.transfers.log import TransferLog
from gpumagic.transfers.recorder import Recorder

MAX_PATCHED_CELLS = 400
"""Of 1000 changes of a class that CPython 3.13 counts, a run makes two."""
TRACE = "--trace"
"""Why a traced run has a function mode, where there is no other reason."""
_SCOPE = (
    "Counts what lines ask for, in threads that work for them and in backward through these moves too; what operators "
    "copy by themselves is seen with --trace."
)
_SCOPE_UNDER_MODE = (
    "Ran under a function mode, which is slower for small operators, because {}. Counts what lines of this thread ask "
    "for, in backward through these moves too; what operators copy by themselves is seen with --trace."
)
_SCOPE_TRACED = "Counts what this thread and its backward passes copy, and what lines ask for in other threads."
_SCOPE_TRACED_ALONE = (
    "Counts what this thread and its backward passes copy; what other threads move is not seen, because {}."
)


def find_blocker(namespace: Mapping[str, object], source: str) -> str | None:
    """Return why a block cannot run with patches, or None if it can; ``source`` is its text where that is known."""
    return _blocker_in_process() or _blocker_in_source(source) or _blocker_in_heap(namespace)


def _blocker_in_process() -> str | None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "Python runs without its global lock"
    if _compat.CLASSES_COUNT_CHANGES and patches.times_patched >= MAX_PATCHED_CELLS:
        return f"this process has had {MAX_PATCHED_CELLS} such cells"
    if _len_torch_function_stack():
        return "a default device or another function mode is in force"
    if _has_compiled():
        return "torch.compile has been used"
    overriding = next(_overriding_classes(torch.Tensor, TorchFunctionMode), None)
    return f"{overriding} overrides __torch_function__" if overriding else None


def _has_compiled() -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # imported as soon as there is an optimizer
    backends = getattr(compiler, "cached_backends", {0: object()})
    return compiler is not None and any(backends.values())


def _overriding_classes(*bases: type) -> Iterator[str]:
    """Yield the names of classes outside torch whose `__torch_function__` sees torch's functions by identity."""
    for base in bases:
        subclasses: list[type] = base.__subclasses__()
        for each in subclasses:
            if "__torch_function__" in vars(each) and each.__module__.partition(".")[0] not in ("torch", "gpumagic"):
                yield each.__name__
            yield from _overriding_classes(each)


@lru_cache(32)
def _blocker_in_source(source: str) -> str | None:
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


def _blocker_in_heap(namespace: Mapping[str, object]) -> str | None:
    holders = patches.find_holders(namespace)
    return None if holders is None else holders.unpatchable


class Recording:
    """The default device of a block, and the record of what its calls create and transfer.

    ``namespace`` has the globals in which the block runs; ``source`` is its text, where that is known.
    """

    def __init__(
        self,
        device: str,
        log: TransferLog,
        namespace: Mapping[str, object],
        source: str,
        *,
        trace: bool,
        strict: bool,
    ) -> None:
        self.recorder = Recorder(torch.device(device), log, is_traced=trace or strict, is_strict=strict)
        if self.recorder.is_traced:
            self.recorder.hooks = None
        self.blocker: str | None = None
        """Why the block runs under the function mode, if it does."""
        self._namespace = namespace
        self._source = source
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        """Start recording, in the calling thread."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        blocker = find_blocker(self._namespace, self._source)
        if self.recorder.is_traced:
            self.recorder.uses_patches = blocker is None
            self.recorder.switch_to_mode = self._stop_patching
            self._enter_mode(blocker or TRACE)
            return
        if blocker is not None:
            self.recorder.uses_patches = False
            self._enter_mode(blocker)
            return
        self.recorder.switch_to_mode = self._switch_to_mode
        self._stack.callback(patches.end, self.recorder)
        patches.begin(self.recorder)

    def close(self) -> None:
        """Stop recording, and restore everything."""
        try:
            self._stack.close()
        except BaseException:  # Ctrl-C: torch's functions are restored all the same
            patches.end(self.recorder)
            raise
        finally:
            self.recorder.finish()

    def scope(self) -> str:
        """Return what the report counts, and what it cannot see."""
        if self.recorder.is_traced:
            return _SCOPE_TRACED if self.blocker in (None, TRACE) else _SCOPE_TRACED_ALONE.format(self.blocker)
        return _SCOPE if self.blocker is None else _SCOPE_UNDER_MODE.format(self.blocker)

    def _switch_to_mode(self, blocker: str) -> None:
        """Continue under the function mode."""
        self._stack.close()
        self.recorder.uses_patches = False
        self._enter_mode(blocker)

    def _stop_patching(self, blocker: str) -> None:
        """Continue without recording other threads."""
        self.blocker = blocker
        self.recorder.uses_patches = False
        patches.release(self.recorder)

    def _enter_mode(self, blocker: str) -> None:
        self.blocker = blocker
        self.recorder.inner_mode = lambda: RecordingContext(self.recorder, look_only=True)
        self.recorder.has_mode = True
        self._stack.callback(patches.end, self.recorder)
        patches.begin(self.recorder)
        self._stack.enter_context(RecordingContext(self.recorder))
        if self.recorder.is_traced:
            from gpumagic.transfers.tracing import Tracer

            self._stack.enter_context(Tracer(self.recorder))
