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
_storages: dict[int, tuple[int, int]] = {}
"""By the storage's address: torch's weak reference, and the storage's number."""
_tensors: dict[int, tuple[weakref.ref[Any], int]] = {}
"""By the `id` of a tensor that shows no storage."""


def of_storage(storage: torch.UntypedStorage) -> int:
    """Return the number of a live storage, a new one if it was never seen."""
    key = storage._cdata
    known = _storages.get(key)
    if known is not None:
        if not storage._expired(known[0]):
            return known[1]
        storage._free_weak_ref(known[0])
    number = next(_numbers)
    _storages[key] = (storage._weak_ref(), number)
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
    for key in [key for key, (reference, _) in _storages.items() if expired(reference)]:
        free(_storages.pop(key)[0])
    for each in [each for each, (reference, _) in _tensors.items() if reference() is None]:
        del _tensors[each]
