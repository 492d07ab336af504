"""What installed modules keep of that which the session was thought to keep alone: then forgetting it frees nothing.

Looking through a million objects of libraries takes most of a second, so the gc is asked first, in one pass, whether
anything but the session refers to the tensors at all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpumagic.probes import holders, last_error
from gpumagic.probes.holders import Held
from gpumagic.probes.paths import Names, Search
from gpumagic.probes.spelling import spell

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MAX_STEPS = 1_500_000
"""Children looked at: about a second for torch, pandas and what they import."""
FEW = 32
"""Tensors of which the gc is asked who refers to them: it compares each reference there is with each of them."""


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
    known = {id(tensors), *map(id, ours), *map(id, _of_the_session(namespace, shell))}
    if len(tensors) <= FEW and known.issuperset(map(id, gc.get_referrers(*tensors))):
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
