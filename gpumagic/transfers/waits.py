"""Calls by which a line waits for a device, a stream or an event, counted by line.

Their names are bound to wrappers while a run is open: torch has no other way to learn of them. Imports torch at its
top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.memory import allocator
from gpumagic.transfers import recorder as recorders

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Patch:
    """A function, and what is called in its place while a run is open."""

    owner: Any
    function: Function
    wrapper: Function


_NAME = "synchronize"
_open: list[object] = []
_patches: list[_Patch] = []


def watch(run: object, backend: str) -> None:
    """Count the waits for a backend's devices until `unwatch` is called with the same run."""
    _open.append(run)
    wrappers = [each.wrapper for each in _patches]
    for owner, function in _functions(backend):
        if function not in wrappers:
            patch = _Patch(owner, function, _wrap(function))
            _patches.append(patch)
            setattr(owner, _NAME, patch.wrapper)


def unwatch(run: object) -> None:
    """Undo `watch`, except where something else has been put there since. Idempotent."""
    _open[:] = [each for each in _open if each is not run]
    while _patches and not _open:
        patch = _patches[-1]
        if vars(patch.owner).get(_NAME) is patch.wrapper:
            setattr(patch.owner, _NAME, patch.function)
        _patches.pop()


def is_idle() -> bool:
    """Return whether torch is as it was found."""
    return not _patches


def _functions(backend: str) -> Iterator[tuple[Any, Function]]:
    modules = [each for each in (getattr(torch, "accelerator", None), allocator.device_module(backend)) if each]
    classes = [getattr(module, name, None) for module in modules for name in ("Stream", "Event")]
    for owner in (*modules, *classes):
        function = None if owner in (None, torch.Stream, torch.Event) else vars(owner).get(_NAME)
        if function is not None:  # those two are classes of C++, which cannot be patched
            yield owner, function


def _wrap(function: Function) -> Function:
    @functools.wraps(function)
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        result = function(*args, **kwargs)
        recorder = None if torch.compiler.is_compiling() else recorders.current_recorder()
        if recorder is not None:
            recorder.log.add_sync()
        return result

    return synchronize
