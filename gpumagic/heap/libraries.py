"""What installed modules keep of that which the session was thought to keep alone: then forgetting it frees nothing.

Looking through a million objects of libraries takes most of a second, so the gc is asked first, in a few passes,
whether anything but the session refers to the tensors, or to the lists and dicts they are in.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpumagic import _compat
from gpumagic.heap import cycles, holders, last_error
from gpumagic.heap.holders import Held
from gpumagic.heap.paths import Names, Search
from gpumagic.heap.spelling import spell

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MAX_STEPS = 1_500_000
"""Children looked at: about a second for torch, pandas and what they import."""
FEW = 32
"""Objects of which the gc is asked who refers to them: it compares each reference there is with each of them."""
ROUNDS = 4
"""Passes of the gc, some 20 ms each."""


def kept(
    tensors: list[Any], namespace: Mapping[str, object], shell: InteractiveShell | None, ours: Iterable[object]
) -> tuple[dict[int, Held], bool]:
    """Return which of some tensors an installed module keeps, by their `id`, and whether it looked at all there is.

    Args:
        tensors: what the session's outputs or its last error keep.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        ours: lists of the caller's that have the tensors too.
    """
    if not tensors:
        return {}, True
    if _are_the_session_s_alone(tensors, {id(tensors), *map(id, ours), *map(id, _of_the_session(namespace, shell))}):
        return {}, True
    search = Search(holders.never_opened(namespace, shell), MAX_STEPS)
    try:
        ways_to = search.run(holders.module_roots(namespace, installed=True))
        names, found = Names(ways_to), dict[int, Held]()
        for tensor in {id(each) for each in tensors}.intersection(ways_to):
            first = min(ways_to[tensor], key=lambda way: way.depth)
            found[tensor] = Held(first.root(), spell(first, names.best), releasable=False)
        return found, not search.gave_up
    finally:
        search.release()


def _are_the_session_s_alone(tensors: list[Any], known: set[int]) -> bool:
    """Tell whether all that refers to some tensors, or to what has them, is known; False where it is not soon told."""
    waiting, lasting = list(tensors), cycles.lasting_ids()
    for _ in range(ROUNDS):
        if len(waiting) > FEW:
            break
        known.add(id(waiting))
        found = _compat.referrers(waiting)
        waiting = [each for each in found if id(each) not in known]
        if not waiting:
            return True
        if any(id(each) in lasting or cycles.lasts(each) for each in waiting):
            return False
        known.update(map(id, waiting), [id(found)])
    return False


def _of_the_session(namespace: Mapping[str, object], shell: InteractiveShell | None) -> Iterator[object]:
    """Yield what refers to outputs and to the variables of a failed call, and is forgotten with them."""
    yield from holders.never_opened(namespace, shell)
    for owner in (getattr(shell, "displayhook", None), getattr(shell, "last_execution_result", None)):
        yield owner
        yield getattr(owner, "__dict__", None)
    for frame in last_error.frames(shell):
        yield frame
        shared = {id(frame.f_globals), id(frame.f_builtins)}
        # A frame that was printed keeps a snapshot of its variables.
        yield from (each for each in gc.get_referents(frame) if type(each) is dict and id(each) not in shared)
