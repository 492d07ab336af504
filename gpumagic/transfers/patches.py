"""How a cell gets its default device and its transfers are seen: by patches, or by a function mode, and why.

Torch's functions are replaced by wrappers while a run is open. Names that were imported earlier (`from torch import
zeros`) are rebound in every module and in the notebook; references to wrappers that a cell keeps are replaced when the
run ends. A cell runs with patches where nothing can tell the difference, and under the mode otherwise: `find_blocker`
checks before the cell, and a cell that compiles switches to the mode at that moment. Reference counts tell cheaply
whether a function has a new holder; only then is the heap searched.

Measured side by side on 2 cores, torch 2.13, as times of the bare small-operator training step and of 10,000 additions:

    an empty TorchDispatchMode                2.7x
    torch.device, or a mode with handlers     1.6x   1.6x   what `RecordingContext` does, exact by construction
    functions patched for the cell            1.10x  1.12x  what wrappers do, sampling of memory included

Indexing has a C slot, so its wrapper costs relatively more: 0.25 us, 1.4x of `x[5]`, nothing elsewhere. A dispatch mode
around every `backward` would make the training step 1.7x; hooks on the graph nodes of the transfers that the run has
seen cost only those (`recorder`). Not possible: `set_default_tensor_type` is one for all threads and knows no index; at
the dispatcher an absent device cannot be told from `cpu`; a C function's slot cannot be replaced in place, since its
hash is its address. Imports torch at its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import RLock
from typing import TYPE_CHECKING

import torch
import torch.overrides
import torch.utils._device as device_state
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gpumagic import _compat
from gpumagic.transfers import calls, function_holders, wrappers
from gpumagic.transfers import recorder as recorders
from gpumagic.transfers.calls import Watched
from gpumagic.transfers.device_mode import RecordingContext
from gpumagic.transfers.function_holders import Binding
from gpumagic.transfers.log import TransferLog
from gpumagic.transfers.recorder import Function, Recorder, device_context
from gpumagic.transfers.wrappers import CompilerWrapper, ConstructorWrapper, FunctionWrapper

if TYPE_CHECKING:
    from gpumagic.transfers.tracing import Tracer

times_patched = 0
"""How often tensors' methods have been patched in this process."""
_open: list[Recorder] = []
_counting: list[Recorder] = []
"""The open runs, for which copies of storages and waits are counted."""
_bindings: list[Binding] = []
_lock = RLock()
_BUILT_IN = type(torch.zeros)
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
        self._modes: list[RecordingContext | Tracer] = []

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
        begin(self.recorder)

    def close(self) -> None:
        """Stop recording, and restore everything; again after an interrupt anywhere."""
        try:
            self._leave()
        finally:
            self.recorder.finish()

    def _leave(self) -> None:
        try:
            while self._modes:
                if _is_in_force(self._modes[-1]):
                    self._modes[-1].__exit__(None, None, None)
                self._modes.pop()
        finally:
            end(self.recorder)

    def scope(self) -> str:
        """Return what the report counts, and what it cannot see."""
        if self.recorder.is_traced:
            return _SCOPE_TRACED if self.blocker in (None, TRACE) else _SCOPE_TRACED_ALONE.format(self.blocker)
        return _SCOPE if self.blocker is None else _SCOPE_UNDER_MODE.format(self.blocker)

    def _switch_to_mode(self, blocker: str) -> None:
        """Continue under the function mode."""
        self._leave()
        self.recorder.uses_patches = False
        self._enter_mode(blocker)

    def _stop_patching(self, blocker: str) -> None:
        """Continue without recording other threads."""
        self.blocker = blocker
        self.recorder.uses_patches = False
        release(self.recorder)

    def _enter_mode(self, blocker: str) -> None:
        self.blocker = blocker
        self.recorder.inner_mode = lambda: RecordingContext(self.recorder, look_only=True)
        self.recorder.has_mode = True
        begin(self.recorder)
        self._enter(RecordingContext(self.recorder))
        if self.recorder.is_traced:
            from gpumagic.transfers.tracing import Tracer

            self._enter(Tracer(self.recorder))

    def _enter(self, mode: RecordingContext | Tracer) -> None:
        self._modes.append(mode)  # first, so that an interrupt finds it
        mode.__enter__()


def _is_in_force(mode: RecordingContext | Tracer) -> bool:
    if not isinstance(mode, RecordingContext):
        return any(each is mode for each in _get_current_dispatch_mode_stack())
    context = device_context()
    while context is not None and context is not mode:
        context = getattr(context, "prev_mode", None)
    return context is not None


def find_blocker(namespace: Mapping[str, object], source: str) -> str | None:
    """Return why a block cannot run with patches, or None if it can; ``source`` is its text where that is known."""
    return _blocker_in_process() or _blocker_in_source(source) or _blocker_in_heap(namespace)


def _blocker_in_process() -> str | None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "Python runs without its global lock"
    if _compat.CLASSES_COUNT_CHANGES and times_patched >= MAX_PATCHED_CELLS:
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
    names = {each.name for each in calls.functions() if each.owner is not torch.autograd}
    return function_holders.find_in_source(source, names)


def _blocker_in_heap(namespace: Mapping[str, object]) -> str | None:
    holders = find_holders(namespace)
    return None if holders is None else holders.unpatchable


def begin(recorder: Recorder) -> None:
    """Handle this thread's calls for a run from now on, or leave them to its function mode."""
    recorders.begin(recorder)
    with _lock:
        if not _counting:
            _patch_storages()
        wrappers.patch_attributes(recorder.device.type)
        _counting.append(recorder)
        if not recorder.uses_patches:
            return
        _open.append(recorder)
        if not recorder.has_mode:
            recorder.previous_device = device_state.CURRENT_DEVICE
            device_state.CURRENT_DEVICE = recorder.device  # what torch.compile guards on
        if len(_open) == 1:
            _patch()


def end(recorder: Recorder) -> None:
    """Undo `begin`. Idempotent, so that it can be called after an interrupt anywhere."""
    recorders.end(recorder)
    release(recorder)
    with _lock:
        _counting[:] = [each for each in _counting if each is not recorder]
        if not _counting:
            _restore_storages()
            wrappers.restore_attributes()


def is_idle() -> bool:
    """Return whether torch is as it was found: no run is open."""
    return not _open and not _counting


def release(recorder: Recorder) -> None:
    """Restore torch's functions, unless another run needs the patches."""
    with _lock:
        if recorder in _open:
            if not recorder.has_mode:
                _leave_device(recorder)
            _open.remove(recorder)
        if not _open and _bindings:
            _restore()


def find_holders(namespace: Mapping[str, object]) -> Holders | None:
    """Return what holds torch's functions, or None while they are patched already."""
    global _holders  # noqa: PLW0603  what was found last; another cell's is as good while nothing has changed
    with _lock:
        if _open:
            return None
        if _holders is None or not _holders.are_current(_functions()):
            _restore()  # a patch that the user took back late may have left a wrapper
            _holders = None  # its bindings hold the functions too
            found = function_holders.search(_functions(), namespace)
            _holders = Holders(_counts(_functions()), *found)  # counted when the search holds none
        return _holders


_holders: Holders | None = None


@cache
def _wrappers() -> dict[Function, FunctionWrapper]:
    heeding = {each.function: _wrapper_type(each)(each.function, each.handler) for each in calls.functions()}
    modes = torch.overrides._get_current_function_mode_stack
    return {**heeding, modes: FunctionWrapper(modes, wrappers.mode_stack, heeds_modes=False),
            **{each: CompilerWrapper(each) for each in _compilers()}}  # fmt: skip


def _wrapper_type(watched: Watched) -> type[FunctionWrapper]:
    is_simple = watched.handler is calls.construct and type(watched.function) is _BUILT_IN
    return ConstructorWrapper if is_simple and "sparse" not in watched.name else FunctionWrapper


@cache
def _functions() -> tuple[Function, ...]:
    return tuple(_wrappers())


@cache
def _initial_counts() -> tuple[int, ...]:
    """Return the reference counts of the wrappers while nothing but this module holds them."""
    return _counts(_wrappers().values())


@cache
def _methods() -> tuple[tuple[Watched, bool, Function], ...]:
    """Return tensors' watched methods, whether the class itself has them, and their wrappers."""
    own = vars(torch.Tensor)
    found = tuple((each, each.name in own, wrappers.wrap_method(each)) for each in calls.methods())
    calls.handlers().update({method: wrappers.handler_of_wrapper(each) for each, _, method in found})
    return found


def _compilers() -> tuple[Function, ...]:
    return (torch.compile, torch.jit.script, torch.jit.trace, torch.jit.trace_module)


def _patch() -> None:
    global times_patched  # noqa: PLW0603  of this process
    times_patched += 1
    _initial_counts()
    assert _holders is not None
    _bindings[:] = _holders.bindings
    for binding in _bindings:
        binding.owner[binding.key] = _wrappers()[binding.function]
    for watched, _, method in _methods():
        setattr(torch.Tensor, watched.name, method)


def _restore() -> None:
    """Restore what was patched, unless the cell has put something of its own there."""
    global _holders  # noqa: PLW0603  as in `find_holders`
    for watched, is_own, method in _methods():
        if vars(torch.Tensor).get(watched.name) is not method:
            continue
        if is_own:
            setattr(torch.Tensor, watched.name, watched.function)
        else:
            delattr(torch.Tensor, watched.name)
    for binding in _bindings:
        if binding.owner.get(binding.key) is _wrappers()[binding.function]:
            binding.owner[binding.key] = binding.function
    kept = zip(_wrappers().items(), _counts(_wrappers().values()), _initial_counts(), strict=True)
    leaked = {id(wrapper): (wrapper, function) for (function, wrapper), now, before in kept if now > before}
    if leaked:
        function_holders.replace_everywhere(leaked, own=_wrappers())
    if _holders is not None and not _holders.are_in_modules:
        _holders = None  # it must not keep a namespace alive
    _bindings.clear()


def _leave_device(recorder: Recorder) -> None:
    """Restore torch's note of the default device, also where a later context restores it when it ends."""
    if device_state.CURRENT_DEVICE is recorder.device:
        device_state.CURRENT_DEVICE = recorder.previous_device
    for each in _open:  # in another thread: there is one note for all
        if each.previous_device is recorder.device:
            each.previous_device = recorder.previous_device
    mode = device_context()
    while mode is not None:
        if mode.old_device is recorder.device:
            mode.old_device = recorder.previous_device
        mode = getattr(mode, "prev_mode", None)


def _patch_storages() -> None:
    for name in wrappers.STORAGE_COPIES:
        if name not in vars(torch.UntypedStorage):  # torch's own are a base class's
            setattr(torch.UntypedStorage, name, wrappers.wrap_storage_method(name))


def _restore_storages() -> None:
    for name in wrappers.STORAGE_COPIES:
        if hasattr(vars(torch.UntypedStorage).get(name), "__wrapped__"):
            delattr(torch.UntypedStorage, name)


@dataclass(frozen=True)
class Holders:
    """What holds torch's functions."""

    counts: tuple[int, ...]
    bindings: tuple[Binding, ...]
    unpatchable: str | None
    """What holds one of them in a way that cannot be patched: ``"torch.zeros is kept in a list"``."""
    are_in_modules: bool = True
    """Whether all bindings are in modules, so that keeping this keeps nothing else alive."""

    def are_current(self, functions: Sequence[Function]) -> bool:
        """Return whether nothing has changed since."""
        return _counts(functions) == self.counts and all(
            each.owner.get(each.key) is each.function for each in self.bindings
        )


def _counts(objects: Iterable[object]) -> tuple[int, ...]:
    return tuple(sys.getrefcount(each) for each in objects)
