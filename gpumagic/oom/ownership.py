"""Which names of the notebook reach which storages of a device, so that a `del` can be priced to the byte.

A storage that two names reach is released only when both are unbound; bytes are therefore counted by the set
of names that share them. Each name is followed by a search of its own, because one search opens an object that
two names share for the first of them only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumagic.heap import autograd, holders, readers
from gpumagic.heap.storages import Ledger, Storage, undisturbed
from gpumagic.report.base import Holder
from gpumagic.source import frames
from gpumagic.tensors import reconcile

if TYPE_CHECKING:
    from gpumagic.heap.paths import Search

FRAMES = "(failed frames)"
"""Stands among the names for the frames of an error that are kept."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Storages that the same set of names reaches."""

    names: frozenset[str]
    nbytes: int
    kind: str = "plain"


def by_names(namespace: Mapping[str, object], device: str, shell: object | None = None) -> list[Claim]:
    """Return the claims of the notebook's variables and displayed values on a device, largest first."""
    roots = [*holders.variables(namespace, shell), *_outputs(namespace, shell)]
    return _claims(roots, namespace, device, shell)


def in_frames(error: BaseException, namespace: Mapping[str, object], device: str, outside: Collection[int] = ()) -> int:
    """Return the bytes on a device that only the frames of an error reach; graphs may hold more, unseen."""
    locals_ = [each for frame, _ in frames.frames_of(error, outside) for each in readers.locals_of(frame)]
    roots = [*holders.variables(namespace, None), (FRAMES, locals_)]
    return released(_claims(roots, namespace, device, None), [FRAMES])


def released(claims: Iterable[Claim], names: Iterable[str]) -> int:
    """Return the bytes that unbinding all these names together releases."""
    gone = frozenset(names)
    return sum(claim.nbytes for claim in claims if claim.names <= gone)


def outputs(claims: Iterable[Claim]) -> set[str]:
    """Return the entries of the output cache among the claims, such as ``"Out[3]"``."""
    return {name for claim in claims for name in claim.names if name.startswith("Out[")}


def rows(claims: Iterable[Claim], device: str) -> tuple[Holder, ...]:
    """Return the claims as rows of a report; names that share storages stand in one row."""
    return tuple(Holder(", ".join(sorted(claim.names)), device, claim.nbytes, claim.kind) for claim in claims)


def _outputs(namespace: Mapping[str, object], shell: object | None) -> Iterator[tuple[str, object]]:
    """Yield the displayed values, one that was displayed twice only once: `%xdel` clears both."""
    seen: set[int] = set()
    for name, value in holders.hidden_roots(namespace, shell):
        if name.startswith("Out[") and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _claims(
    roots: Iterable[tuple[str, object]], namespace: Mapping[str, object], device: str, shell: object | None
) -> list[Claim]:
    ledger, reached, kinds = Ledger(), dict[Storage, set[str]](), dict[str, str]()
    for name, value in roots:
        search = holders.search_for(namespace, shell)
        try:
            with undisturbed():
                for storage in _storages(search, name, value, ledger):
                    reached.setdefault(storage, set()).add(name)
                    kinds[name] = kind_of(value)
        finally:
            search.release()
    grain = reconcile.granule(device)
    totals: dict[frozenset[str], int] = {}
    for storage, names in reached.items():
        if storage.device == device and storage.nbytes:
            key = frozenset(names)
            totals[key] = totals.get(key, 0) + -(-storage.nbytes // grain) * grain
    found = [Claim(names, nbytes, kinds[min(names)]) for names, nbytes in totals.items()]
    return sorted(found, key=lambda claim: (-claim.nbytes, sorted(claim.names)))


def _storages(search: Search, name: str, value: object, ledger: Ledger) -> Iterator[Storage]:
    search.run([(name, value)])
    tensors = list(search.tensors.values())
    for tensor in (*tensors, *(gradient for _, gradient in autograd.peek(autograd.leaves(tensors)) or ())):
        storage, parts = ledger.find(tensor)
        yield from parts or [storage]


def kind_of(value: object) -> str:
    """Return what a value is to a reader: "module", "optimizer", "tensor", or its type's name."""
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    kind = type(value)
    named = {torch.nn.Module: "module", torch.optim.Optimizer: "optimizer", torch.Tensor: "tensor"}
    return next((word for base, word in named.items() if issubclass(kind, base)), kind.__name__)
