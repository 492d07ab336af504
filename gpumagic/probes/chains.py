"""Why one tensor is still here: the chain of holders from each root that reaches it, as plain strings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpumagic.probes import holders
from gpumagic.probes.paths import Names, Path, Search, spell
from gpumagic.probes.storages import Ledger, uncollected, undisturbed

_GRADIENT = ".grad"


class Chain(NamedTuple):
    """One way from a root to a tensor."""

    root: str
    """A variable, ``"Out[3]"``, ``"last traceback"``, ``"running train()"``..."""
    steps: tuple[str, ...]
    """From the root to the tensor: ``("model (Net)", "model.fc (Linear)", "model.fc.weight (Parameter)")``."""
    releasable: bool
    """Whether ``--release-held`` cuts it: an output, the display hook, the last error."""


def to(name: str, namespace: Mapping[str, object], shell: object | None = None) -> tuple[Chain, ...]:
    """Return, shortest first, the shortest chain from every root that keeps a tensor; none if no tensor has the name.

    Every root is followed by a search of its own, because one search opens what two roots share only once: this
    is for one tensor, not for all.

    Args:
        name: a name or a place of a row of the report, such as ``"model.fc.weight"``, ``"w.grad"`` or
            ``"Out[3]['k']"``; or a root, such as ``"model"`` or ``"last traceback"``, for the largest tensor below it.
        namespace: the notebook's variables.
        shell: the shell they belong to, whose outputs and last error may keep tensors alive.
    """
    with uncollected(), undisturbed():
        found = list(_chains(name, namespace, shell))
        if not found and name.endswith(_GRADIENT):
            owner = _chains(name.removesuffix(_GRADIENT), namespace, shell)
            found = [each._replace(steps=(*each.steps, f"{_last(each)}{_GRADIENT} (gradient)")) for each in owner]
    return tuple(sorted(found, key=lambda chain: len(chain.steps)))


def _chains(name: str, namespace: Mapping[str, object], shell: object | None) -> Iterator[Chain]:
    roots = list(holders.all_roots(namespace, shell))
    ledger = Ledger()
    wanted = _storages_named(name, holders.search_for(namespace, shell), [root[:2] for root in roots], ledger)
    shortest: dict[str, Chain] = {}
    for label, value, releasable in roots if wanted else ():
        search = holders.search_for(namespace, shell)
        try:
            ways = search.run([(label, value)])
            names = Names(ways)
            reached = [way for key, each in search.tensors.items() if wanted & _keys(ledger, each) for way in ways[key]]
            if reached:
                first = min(reached, key=lambda way: way.depth)
                chain = Chain(label, tuple(_described(step, names) for step in first.steps()), releasable)
                if label not in shortest or len(chain.steps) < len(shortest[label].steps):
                    shortest[label] = chain
        finally:
            search.release()
    yield from shortest.values()


def _storages_named(
    name: str, search: Search, roots: Iterable[tuple[str, object]], ledger: Ledger
) -> frozenset[object]:
    """Return the keys of the storage with this name, or else of the largest one below a root of this name."""
    try:
        ways = search.run(roots)
        names = Names(ways)
        largest: tuple[int, frozenset[object]] = (-1, frozenset())
        for key, tensor in search.tensors.items():
            if name in names.of(key):
                return _keys(ledger, tensor)
            if any(_starts(way, name, names) for way in ways[key]):
                storage, parts = ledger.find(tensor)
                size = sum(part.nbytes or 0 for part in parts or [storage])
                largest = max(largest, (size, _keys(ledger, tensor)), key=lambda each: each[0])
        return largest[1]
    finally:
        search.release()


def _starts(way: Path, name: str, names: Names) -> bool:
    return any(spell(step, names.best) == name for step in way.steps())


def _keys(ledger: Ledger, tensor: Any) -> frozenset[object]:
    storage, parts = ledger.find(tensor)
    return frozenset(parts or [storage])


def _described(step: Path, names: Names) -> str:
    kind = f" ({step.kind.__name__})" if step.kind is not None else ""
    return f"{spell(step, names.best)}{kind}"


def _last(chain: Chain) -> str:
    return chain.steps[-1].rpartition(" (")[0]
