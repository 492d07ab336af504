"""Which storage is which: a number for each, for as long as the process lives, without keeping its bytes.

An address alone says nothing, since the next storage may get it. A weak reference of torch's own keeps a dead
storage's record, about a hundred bytes, and with it the address, until the next census forgets it; its memory
goes back to the allocator as ever (`c10::StorageImpl::release_resources`).
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    import torch

PROCESS = uuid4().hex[:12]
"""Tells this process's numbers from those of any other."""
_numbers = count(1)
_storages: dict[int, int] = {}
"""Numbers by the storage's address, which is also what torch gives for a weak reference to it."""
_tensors: dict[int, tuple[weakref.ref[Any], int]] = {}
"""By the `id` of a tensor that shows no storage."""


def of_storage(storage: torch.UntypedStorage) -> int:
    """Return the number of a live storage, a new one if it was never seen."""
    key = storage._cdata
    number = _storages.get(key)
    if number is None:  # nor can another storage have the address of one that is known: it stays taken
        number = _storages[storage._weak_ref()] = next(_numbers)
    return number


def of_tensor(tensor: object) -> int:
    """Return the number of a live tensor that shows no storage, such as one in mkldnn's own layout."""
    known = _tensors.get(id(tensor))
    if known is not None and known[0]() is tensor:
        return known[1]
    number = next(_numbers)
    _tensors[id(tensor)] = (weakref.ref(tensor), number)
    return number


def forget_the_dead() -> None:
    """Let go of the records of storages that are gone; their numbers are not given again."""
    if not _storages and not _tensors:
        return
    import torch

    expired, free = torch.UntypedStorage._expired, torch.UntypedStorage._free_weak_ref
    for reference in [reference for reference in _storages if expired(reference)]:
        del _storages[reference]
        free(reference)
    for each in [each for each, (reference, _) in _tensors.items() if reference() is None]:
        del _tensors[each]
