"""Which run a thread's calls belong to: one that the thread has opened, or, for other threads, one they work for.

Torch's default device is one thread's; so is a run. But what the cell's lines ask of other threads is asked by its
lines: those of a pool, and autograd's, which call the cell's hooks. Their calls are counted, each thread's apart, and
nothing else changes for them.
"""

from __future__ import annotations

import sys
from threading import get_ident

import torch

from gpumagic.source import frames
from gpumagic.source.call_sites import CallSites
from gpumagic.transfers.device_mode import RecordingContext, outermost
from gpumagic.transfers.recorder import Recorder

active: dict[int, Recorder] = {}
"""By thread, whose handlers take the calls of exchanged functions."""
_runs: dict[int, list[Recorder]] = {}
"""By thread, the runs that are open, the innermost last."""


def begin(recorder: Recorder) -> None:
    """Have this thread's calls belong to a run from now on."""
    _runs.setdefault(get_ident(), []).append(recorder)
    _activate()


def end(recorder: Recorder) -> None:
    """Undo `begin`; again does nothing, so that it can be called after an interrupt anywhere."""
    runs = _runs.get(get_ident(), [])
    place = next((place for place in reversed(range(len(runs))) if runs[place] is recorder), None)
    if place is not None:
        del runs[place:]
    _activate()
    for thread, other in list(active.items()):
        if other is recorder.others.get(thread):
            active.pop(thread, None)


def _activate() -> None:
    """Let the innermost run of this thread be the one whose calls are handled, unless its function mode sees them."""
    thread = get_ident()
    runs = _runs.get(thread)
    if runs and not runs[-1].has_mode:
        active[thread] = runs[-1]
    else:
        active.pop(thread, None)
    if not runs:
        _runs.pop(thread, None)


def of_this_thread() -> Recorder | None:
    """Return the innermost run of this thread, or what records for the run that it works for."""
    runs = _runs.get(get_ident())
    return runs[-1] if runs else joined()


def joined() -> Recorder | None:
    """Return what records for the run that this thread works for, if it has none of its own.

    It works for a run whose code is on its stack, or that began before the thread or called autograd. While only one
    thread has runs, what any other thread moves is told by the innermost, as moved by other code.
    """
    thread = get_ident()
    if not _runs or thread in _runs or isinstance(outermost(), RecordingContext):  # checkpoints take it with them
        return None
    open_runs = [run for runs in list(_runs.values()) for run in runs]
    files = _files()
    asking = next((run for run in reversed(open_runs) if run.log.sites.filename in files), None)
    if asking is None and len({run.thread for run in open_runs}) != 1:
        return None
    run = asking or open_runs[-1]
    if not run.watches_threads or (run.is_traced and torch._C._current_graph_task_id() != -1):
        return None  # a mode comes with autograd into its threads
    if thread in run.threads_before and torch._C._current_graph_task_id() == -1:
        return run.beside(thread, _sites(run)) if asking else run.beside(-thread, _sites(run), is_bystander=True)
    found = run.beside(thread, _sites(run))
    if not run.has_mode:
        active[thread] = found
    return found


def _sites(run: Recorder) -> CallSites:
    is_autograds = torch._C._current_graph_task_id() != -1
    return CallSites(run.log.sites.namespace, run.log.sites.filename, run.thread if is_autograds else None)


def _files() -> set[str]:
    return {frame.f_code.co_filename for frame in frames.stack(sys._getframe(2))}
