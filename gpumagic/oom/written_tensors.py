"""Which tensors were written to since a moment, by the version that torch counts up at every change in place.

No tensor is kept alive for it and none is copied, so what was written cannot be put back: it can be said. What can be
put back is a gradient that was not there: it is taken away, because a second backward would add to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpumagic.heap import autograd, holders
from gpumagic.heap.storages import undisturbed


class _Mark(NamedTuple):
    tensor: weakref.ref[Any]
    version: int
    gradient: tuple[int, int] | None
    """Where its gradient lay, and its version; None where it had none."""


class WrittenTensors:
    """The tensors that some variables reach, as they are now.

    Args:
        reached: the tensors by variable; they are not kept.
    """

    def __init__(self, reached: Mapping[str, Iterable[Any]]) -> None:
        self._names = {name: [id(each) for each in tensors] for name, tensors in reached.items()}
        unique = {id(each): each for tensors in reached.values() for each in tensors}
        own = _gradients(list(unique.values()))
        self._marks = {key: _Mark(weakref.ref(each), version(each), own.get(key)) for key, each in unique.items()}

    def changed(self) -> dict[str, set[int]]:
        """Return the tensors written to, by variable, as numbers that tell them apart."""
        alive = {key: mark.tensor() for key, mark in self._marks.items()}
        own = _gradients([each for each in alive.values() if each is not None])
        written = {
            key
            for key, each in alive.items()
            if each is not None
            and (version(each), own.get(key)) != (self._marks[key].version, self._marks[key].gradient)
        }
        return {name: written & set(keys) for name, keys in self._names.items() if written & set(keys)}

    def drop_new_gradients(self) -> None:
        """Take away the gradients that were not there."""
        for mark in self._marks.values():
            tensor = mark.tensor()
            if tensor is not None and mark.gradient is None and tensor.is_leaf and tensor.grad is not None:
                tensor.grad = None


def reached_by(variables: Iterable[tuple[str, object]], namespace: Mapping[str, object], shell: object | None) -> Any:
    """Return the tensors that each variable reaches, ``{name: [tensor, ...]}``; the caller lets go of them."""
    search = holders.search_for(namespace, shell)
    reached: dict[str, list[Any]] = {}
    try:
        with undisturbed():
            for key, ways in search.run(variables).items():
                for name in dict.fromkeys(way.root() for way in ways):
                    reached.setdefault(name, []).append(search.tensors[key])
    finally:
        search.release()
    return reached


def version(tensor: Any) -> int:
    """Return how often a tensor has been changed in place; 0 for one of inference mode, which counts nothing."""
    try:
        return int(tensor._version)
    except Exception:
        return 0


def is_on_accelerator(tensor: Any) -> bool:
    """Tell whether a tensor occupies memory of a device."""
    return tensor.device.type not in ("cpu", "meta")


def _gradients(tensors: list[Any]) -> dict[int, tuple[int, int]]:
    """Return where each tensor's gradient lies and its version, by the tensor's `id`."""
    with undisturbed():
        leaves = autograd.leaves(tensors)
        found = autograd.peek(leaves) or ()
        return {id(leaves[i]): (alias.data_ptr(), version(alias)) for i, alias in found}
