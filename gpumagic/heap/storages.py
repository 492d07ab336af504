"""The storages under tensors: which tensors share one, how many bytes it occupies, how much of it they view.

An address alone does not identify a storage, since the next one may get it. A weak reference of torch's own keeps an
expired storage's record, about a hundred bytes, and with it the address, until `forget_expired`; its memory
returns to the allocator as usual (`c10::StorageImpl::release_resources`).

A tensor is only read through torch's own descriptors, so that no subclass, mode or property of the user's runs.
What cannot be read becomes an entry of unknown size, never an error.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from gpumagic._compat import torch_private
from gpumagic.heap.branches import dict_of, name_of_type

if TYPE_CHECKING:
    import torch


PROCESS = uuid4().hex[:12]
"""Distinguishes the numbers of this process from those of others."""
_numbers = count(1)
_storages: dict[int, int] = {}
"""Numbers by the storage's address, which is also the value of a weak reference to it."""
_tensors: dict[int, tuple[weakref.ref[Any], int]] = {}
"""By the `id` of a tensor that has no storage to show."""
_NUMBERING = threading.RLock()
"""Held while a record is made or freed, so that no storage gets two numbers. A collection that begins meanwhile may
run code of the user's that asks for the live tensors in the same thread, hence the reentrant lock."""


def number_of(storage: torch.UntypedStorage) -> int:
    """Return the number of a live storage; storages are numbered as they are first seen, by any thread."""
    key = torch_private.STORAGE_IDENTITY.get()(storage)
    # Without the lock, for thousands of storages that are known: no other storage can have the address of one
    # that is known, as it stays taken until `forget_expired`.
    number = _storages.get(key)
    if number is None:
        with _NUMBERING:
            number = _storages.get(key)
            if number is None:
                number = next(_numbers)
                _storages[torch_private.weak_references().keep(storage)] = number
    return number


def number_of_tensor(tensor: object) -> int:
    """Return the number of a live tensor that shows no storage, such as one in mkldnn's own layout."""
    with _NUMBERING:
        known = _tensors.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        number = next(_numbers)
        _tensors[id(tensor)] = (weakref.ref(tensor), number)
        return number


def numbers_in_use() -> set[int]:
    """Return the numbers of the storages that have a record."""
    with _NUMBERING:
        return set(_storages.values())


def forget_expired() -> None:
    """Free the records of storages that are gone; their numbers are not used again."""
    if not _storages and not _tensors:
        return
    references = torch_private.weak_references()
    with _NUMBERING:
        for reference in list(_storages):
            if references.is_expired(reference):
                del _storages[reference]
                references.free(reference)
        for key, (tensor, _) in list(_tensors.items()):
            if tensor() is None:
                del _tensors[key]


UNKNOWN_DIMENSION = -1
"""The size of a dimension that torch only knows by a symbol, such as the ragged one of a nested tensor."""

COMPONENTS = {
    "torch.sparse_coo": (torch_private.SPARSE_INDICES, torch_private.SPARSE_VALUES),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""The methods that return what a sparse tensor consists of, by its layout."""

_LOCAL = {"DTensor": torch_private.LOCAL_TENSOR, "AsyncCollectiveTensor": "elem"}
"""Where tensors of `torch.distributed`, which have no storage, keep the one that this process has of them."""


def local_of(tensor: Any) -> Any:
    """Return what this process has of a `DTensor`; any other tensor as it is."""
    while (name := name_of_type(type(tensor))) in _LOCAL:
        module = str(dict_of(type(tensor)).get("__module__"))
        if not module.startswith("torch.distributed."):
            break
        tensor = object.__getattribute__(tensor, _LOCAL[name])
    return tensor


class View(NamedTuple):
    """One tensor's view of a storage."""

    shape: tuple[int, ...]
    dtype: str
    elements: int
    start: int
    end: int
    nbytes: int
    """Bytes viewed between start and end: fewer where the tensor strides."""


@dataclass(slots=True, eq=False)
class Storage:
    """One storage and what its tensors have in common; it keeps none of them alive."""

    device: str
    nbytes: int | None
    address: int = 0
    """Of its first byte; 0 for what occupies nothing."""
    number: int = 0
    """Never given to another storage of the process: see `number_of`."""
    note: str | None = None
    views: list[tuple[int, View]] = field(default_factory=list)
    """Of each live tensor over it, by its `id`."""
    requires_grad: bool = False
    from_graph: bool = False
    """Whether a tensor over it is the result of an operation that autograd recorded."""
    is_parameter: bool = False


class StorageTable:
    """The storages met so far, by identity."""

    def __init__(self) -> None:
        import torch

        base: Any = torch_private.TENSOR_BASE.get()
        self._base = base
        self._parameter = torch.nn.Parameter
        self._address = torch_private.DATA_ADDRESS.get()
        self._identity = torch_private.STORAGE_IDENTITY.get()
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._size = base.shape.__get__
        self._dtype = base.dtype.__get__
        self._device_of = base.device.__get__
        self._requires_grad = base.requires_grad.__get__
        self._is_leaf = base.is_leaf.__get__
        self._devices: dict[object, str] = {}
        self._dtypes: dict[object, tuple[str, int]] = {}
        self._wholes: dict[object, tuple[View, str]] = {}
        """The view of a tensor over all of its storage, and its device: many tensors are alike."""
        self.storages: dict[object, Storage] = {}
        self.joined: list[list[Storage]] = []
        """Storages that belong to one tensor: the parts of a sparse one."""

    def add_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add live tensors; the caller keeps them alive for as long as their `id` is used."""
        # The common case is inlined here, with local names: calls and attributes are most of its cost.
        untyped_storage = self._base.untyped_storage
        is_contiguous = self._base.is_contiguous
        address_of = self._address
        identity = self._identity
        size = self._size
        dtype = self._dtype
        device = self._device_of
        requires_grad_of = self._requires_grad
        storages = self.storages
        wholes = self._wholes
        plain = self._plain
        parameter = self._parameter
        for tensor in tensors:
            address = 0
            whole = None
            try:
                if type(tensor) in plain:
                    storage = untyped_storage(tensor)
                    key, nbytes = identity(storage), storage.nbytes()
                    whole = wholes.get(
                        (size(tensor), dtype(tensor), device(tensor), nbytes)
                    )
                    if (
                        whole is not None
                        and key not in storages
                        and is_contiguous(tensor)
                    ):
                        address = address_of(tensor)
            except Exception:
                whole = None
            if whole is None or not address:
                self.add(tensor)
                continue
            view, place = whole
            requires_grad = requires_grad_of(tensor)
            storages[key] = Storage(
                place,
                nbytes,
                address,
                number_of(storage),
                None,
                [(id(tensor), view)],
                requires_grad,
                requires_grad and not self._is_leaf(tensor),
                type(tensor) is parameter,
            )

    def add(self, tensor: torch.Tensor) -> Storage:
        """Add one live tensor; the caller keeps it alive for as long as its `id` is used."""
        local = tensor
        try:
            storage, parts = self.find(tensor)
            local = local_of(tensor)
            view = self._view(storage, local)
            requires_grad = self._requires_grad(tensor)
            from_graph = requires_grad and not self._is_leaf(tensor)
        except (
            Exception
        ) as error:  # a subclass that computes its own metadata, and fails
            kind = type(error).__name__
            storage = self._unknown(tensor, f"it cannot be read ({kind})")
            parts = []
            view = View((), "?", 0, 0, 0, 0)
            requires_grad = False
            from_graph = False
        if parts:
            self.joined.append(parts)
        storage.requires_grad |= requires_grad
        storage.from_graph |= from_graph
        storage.is_parameter |= issubclass(type(tensor), self._parameter)
        if local is tensor:
            storage.views.append((id(tensor), view))
        else:  # a DTensor, whose name is the one that people know
            storage.views.insert(0, (id(tensor), view))
            storage.is_parameter |= isinstance(tensor, self._parameter)
            shape = self._shape(tensor)
            if shape != view.shape:
                storage.note = f"a part of {list(shape)}"
        return storage

    def find(self, tensor: torch.Tensor) -> tuple[Storage, list[Storage]]:
        """Return the entry of a tensor's storage; for a sparse tensor those of all its parts too."""
        tensor = local_of(tensor)
        try:
            storage = self._base.untyped_storage(tensor)
            key = self._identity(storage)
        except (
            Exception
        ):  # sparse, opaque, batched, functional: whatever refuses to show a storage
            return self._without_storage(tensor)
        entry = self.storages.get(key)
        if entry is None:
            entry = self.storages[key] = self._open(tensor, storage)
            entry.number = number_of(storage)
        return entry, []

    def numbers(self, tensor: torch.Tensor) -> list[int]:
        """Return the number of each storage under a tensor."""
        storage, parts = self.find(tensor)
        return [part.number for part in parts or [storage]]

    def _open(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Storage:
        """Return the entry of a storage that is met for the first time, under this tensor."""
        device = self._device(tensor)
        try:
            nbytes = storage.nbytes()
            address = self._address(tensor)
        except Exception as error:
            kind = type(error).__name__
            return Storage(device, None, note=f"its size cannot be read ({kind})")
        if address == 0 and nbytes > 0:
            return Storage(device, 0, note=_why_nowhere(tensor, device))
        is_emptied = nbytes == 0 and prod(self._shape(tensor)) > 0
        note = "its storage was emptied" if is_emptied else None
        return Storage(device, nbytes, address, note=note)

    def _view(self, storage: Storage, tensor: torch.Tensor) -> View:
        """Return which part of its storage a tensor views; all of it where that cannot be told."""
        shape = self._shape(tensor)
        elements = prod(shape)
        dtype = self._dtype(tensor)
        known = self._dtypes.get(dtype)
        if known is None:
            known = (str(dtype).removeprefix("torch."), dtype.itemsize)
            self._dtypes[dtype] = known
        name, itemsize = known
        nbytes = storage.nbytes or 0
        whole = View(shape, name, elements, 0, nbytes, nbytes)
        try:
            if nbytes == 0:
                return whole
            if elements * itemsize == nbytes and self._base.is_contiguous(tensor):
                if type(tensor) in self._plain:
                    alike = (self._size(tensor), dtype, self._device_of(tensor), nbytes)
                    self._wholes[alike] = (whole, storage.device)
                return whole
            strides = self._base.stride(tensor)
            start = self._base.storage_offset(tensor) * itemsize
        except Exception:  # sparse and nested tensors have no strides
            return whole
        if len(strides) != len(shape):
            return whole
        reach, distinct = _extent(shape, strides)
        end = start + reach * itemsize
        return View(shape, name, elements, start, end, min(reach, distinct) * itemsize)

    def _without_storage(self, tensor: torch.Tensor) -> tuple[Storage, list[Storage]]:
        """Return the entry of a tensor that shows no storage; for a sparse one those of all its parts too."""
        try:
            layout = str(self._base.layout.__get__(tensor))
        except Exception:
            layout = type(tensor).__name__
        try:
            with torch_private.DISABLE_TORCH_DISPATCH.get()():
                components = [
                    getattr(self._base, name)(tensor) for name in COMPONENTS[layout]
                ]
                parts = [self.find(component)[0] for component in components]
        except Exception:  # mkldnn and other opaque layouts, tensors inside vmap...
            return self._unknown(tensor, f"layout {layout} does not tell its size"), []
        parts[-1].note = layout.removeprefix("torch.").replace("_", " ")
        return parts[-1], parts

    def _unknown(self, tensor: torch.Tensor, why: str) -> Storage:
        entry = Storage(
            device=self._device(tensor),
            nbytes=None,
            number=number_of_tensor(tensor),
            note=why,
        )
        return self.storages.setdefault(("no storage", id(tensor)), entry)

    def _device(self, tensor: torch.Tensor) -> str:
        try:
            device = self._device_of(tensor)
        except Exception:
            return "?"
        name = self._devices.get(device)
        if name is None:
            name = str(device)
            self._devices[device] = name
        return name

    def _shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        try:
            sizes = tuple(self._size(tensor))
        except Exception:  # strided nested tensors have no single shape
            return ()
        if type(tensor) in self._plain:
            return sizes
        return tuple(size if type(size) is int else UNKNOWN_DIMENSION for size in sizes)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return how far apart a tensor's first and last element are, both counted, and how many differ in their place."""
    if 0 in shape:
        return 0, 0
    reach = 1
    distinct = 1
    for size, step in zip(shape, strides, strict=True):
        reach += (size - 1) * step
        distinct *= size if step else 1
    return reach, distinct


def _why_nowhere(tensor: torch.Tensor, device: str) -> str:
    """Return the note of a tensor whose storage has a size and no address."""
    if device == "meta":
        return "meta: occupies nothing"
    if any(base.__name__ == "FakeTensor" for base in type(tensor).__mro__):
        return "fake: occupies nothing"
    return "a wrapper: its parts have rows of their own"


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse one, which has no ``nbytes``, those of its parts."""
    try:
        nbytes: int = tensor.nbytes
    except RuntimeError:
        storage, parts = StorageTable().find(tensor)
        return sum(part.nbytes or 0 for part in parts or [storage])
    return nbytes


def plain(tensor: torch.Tensor, attribute: str) -> Any:
    """Return an attribute of a tensor as torch has it, whatever its class has made of it; call it `undisturbed`."""
    return getattr(torch_private.TENSOR_BASE.get(), attribute).__get__(tensor)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disable `__torch_function__`, of subclasses and modes, and autograd for what is read inside."""
    # Not `no_grad`, which restores in Python code that Ctrl-C can tear: gradients would stay off.
    with (
        torch_private.DISABLE_TORCH_FUNCTION.get()(),
        torch_private.BELOW_AUTOGRAD.get()(),
    ):
        yield


_SEARCHES = threading.RLock()


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the gc: the many records made inside would trigger a collection, which frees what is being counted.

    One thread at a time: another's lists of all objects would be searched as holders of each.
    """
    with _SEARCHES:
        restore = gc.enable if gc.isenabled() else gc.disable
        try:
            try:
                gc.disable()
                yield
            finally:
                restore()
        finally:
            restore()  # once more: Ctrl-C may have come in place of the first
