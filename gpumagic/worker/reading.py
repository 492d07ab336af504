"""What the host reads from a device that computes nothing: what the host itself put there, else a guess."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gpumagic.heap.storages import local_of
from gpumagic.worker import cell
from gpumagic.worker.guesses import UnknownValues
from gpumagic.worker.known import LARGEST, Known, is_plain

if TYPE_CHECKING:
    from gpumagic.worker.fake.calls import Call
    from gpumagic.worker.fake.storages import Storages

_AMONG_RANKS = ("torch.distributed.utils", "torch.distributed.tensor._random")
"""Where DDP compares what the ranks have, and DTensors share a seed: it lies in the device's memory as it is."""
_UNSEEN = (*cell.COMPILERS, "torch.serialization", *_AMONG_RANKS)
"""What copies to the host and looks at no value: a file of weights has its size whatever they are."""
_COPY = torch.ops.aten.copy_.default
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Reading:
    """The answers of one run.

    Args:
        guesses: what is said of what is not known.
        known: tells what is known; None in a run that does not follow values.
    """

    def __init__(self, guesses: UnknownValues, known: Known | None) -> None:
        self.guesses = guesses
        self.known = known

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's contents; None if they are not known."""
        return None if self.known is None else self.known.of(tensor)

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return what `.item()` returns."""
        value = self.value(tensor)
        if value is not None:
            return value.item()
        # Of a loss, nothing that the host put there.
        return self.guesses.scalar(
            tensor.dtype, may_be_known=self.known is None and not tensor.requires_grad
        )

    def equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return what `torch.equal` returns."""
        if one.shape != other.shape:
            return False
        one.eq(other)  # for the memory that torch's kernel takes
        value = self.value(one)
        other_value = self.value(other)
        if value is None or other_value is None:
            return self.guesses.truth(may_be_known=self.known is None)
        return bool(torch.equal(value, other_value))

    def fetch(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """Fill a tensor on the host with what the device's holds."""
        value = self.value(source)
        if value is None:
            self.guesses.fill(host, may_be_known=self.known is None)
        else:
            host.copy_(value)

    def selected(self, mask: torch.Tensor) -> int:
        """Return how many elements a mask selects."""
        value = self.value(mask)
        if value is None:
            return self._selected(mask.numel())
        return int(value.count_nonzero())

    def distinct(self, most: int) -> int:
        """Return how many of some elements are different."""
        return max(1, self._selected(most)) if most else 0

    def _selected(self, most: int) -> int:
        return self.guesses.selected(most, may_be_known=self.known is None)


class CudaReading(Reading):
    """The answers on torch's CUDA, whose kernels do nothing.

    Values that were copied to the device lie in its memory, but so does what earlier tensors left. Which it is, only
    `Known` knows, and it has to see every operator, which makes each take three times as long. So a run begins without
    it, and where something is decided by what may be known, another run follows the values.

    Args:
        guesses: what is said of what is not known.
        known: tells what is known; None in a run that does not follow values.
        assume: called with a sentence for each thing that is assumed.
    """

    def __init__(
        self, guesses: UnknownValues, known: Known | None, assume: Callable[[str], None]
    ) -> None:
        super().__init__(guesses, known)
        self._assume = assume
        self._library: Any = None

    def install(self) -> None:
        """Answer for the rest of the process."""
        self._library = torch.library.Library("aten", "IMPL")
        answers: dict[str, Callable[..., Any]] = {
            "_local_scalar_dense": self.scalar,
            "copy_": self._copy,
            "equal": self.equal,
            "nonzero": self._positions,
            "_unique2": self._sorted_unique,
            "unique_dim": self._unique_slices,
            "unique_consecutive": self._unique,
        }
        for name, answer in answers.items():
            self._library.impl(name, answer, "CUDA", allow_override=True)
        torch.amp.GradScaler._maybe_opt_step = self._step

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return what `.item()` returns."""
        if torch.distributed.is_initialized() and cell.runs_in(*_AMONG_RANKS):
            return memory_of(tensor).view(tensor.dtype)[tensor.storage_offset()].item()
        return super().scalar(tensor)

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        # The CPU's kernel is torch's own for every pair of devices.
        _COPY.redispatch(_ON_CPU, target, source, non_blocking)
        if target.device.type != "cpu" or cell.runs_in(*_UNSEEN):
            return target
        # How DDP's ranks agree on buckets lies in the device's memory, too; C++ copies and reads it.
        caller = sys._getframe().f_back
        module = None if caller is None else caller.f_globals.get("__name__")
        if module != "torch.nn.parallel.distributed":
            self.fetch(source, target)
        return target

    def _positions(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.new_empty((self.selected(mask), mask.dim()), dtype=torch.int64)

    def _step(self, optimizer: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        self._assume(
            "gradients are taken to be finite, so that a gradient scaler steps"
        )
        return optimizer.step(*args, **kwargs)

    def _unique(
        self,
        tensor: torch.Tensor,
        inverse: bool = False,
        counts: bool = False,
        dim: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if dim is None:
            shape = [self.distinct(tensor.numel())]
            return _uniques(tensor, shape, shape[0], tensor.shape, inverse, counts)
        shape = list(tensor.shape)
        shape[dim] = self.distinct(shape[dim])
        return _uniques(tensor, shape, shape[dim], [tensor.shape[dim]], inverse, counts)

    def _sorted_unique(
        self, tensor: torch.Tensor, _: bool = True, *which: bool
    ) -> tuple[torch.Tensor, ...]:
        return self._unique(tensor, *which)

    def _unique_slices(
        self,
        tensor: torch.Tensor,
        dim: int,
        _: bool = True,
        inverse: bool = False,
        counts: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        return self._unique(tensor, inverse, counts, dim)


def _uniques(
    tensor: torch.Tensor,
    shape: list[int],
    distinct: int,
    inverse_shape: Sequence[int],
    inverse: bool,
    counts: bool,
) -> tuple[torch.Tensor, ...]:
    """Return what a function that finds the distinct elements of a tensor returns.

    Args:
        tensor: whose elements they are.
        shape: of the distinct elements.
        distinct: how many there are.
        inverse_shape: of the positions of the tensor's elements among them.
        inverse: whether those positions are asked for.
        counts: whether how often each occurs is asked for.
    """
    return (
        tensor.new_empty(shape),
        tensor.new_empty(inverse_shape if inverse else 0, dtype=torch.int64),
        tensor.new_empty(distinct if counts else 0, dtype=torch.int64),
    )


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins, or that of what this process has of it; 0 where it has none."""
    local = local_of(tensor)
    if local is tensor and not is_plain(tensor):
        return 0
    return int(local.data_ptr() - local.storage_offset() * local.itemsize)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor's storage, which for the fake runtime is the host's."""
    nbytes = tensor.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(
        (ctypes.c_char * nbytes).from_address(address_of(tensor)), dtype=torch.uint8
    )


class FakeReading(Reading):
    """The answers on fake tensors, and results that are as large as values say.

    Args:
        device_type: the name of the device of the dry run.
        storages: knows the size of each.
        key_of: tells the storage of a tensor.
        guesses: what the host gets of what is not known.
    """

    known: Known

    def __init__(
        self,
        device_type: str,
        storages: Storages,
        key_of: Callable[[torch.Tensor], int],
        guesses: UnknownValues,
    ) -> None:
        def blank(tensor: torch.Tensor) -> torch.Tensor:
            return torch.zeros(
                storages.nbytes_of(tensor), dtype=torch.uint8, device="cpu"
            )

        super().__init__(guesses, Known(device_type, key_of, blank, storages.nbytes_of))
        self._nbytes_of = storages.nbytes_of

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note a copy to the device."""
        is_small = self._nbytes_of(target) <= LARGEST
        self.known.write(target, self.known.of(source) if is_small else None)

    def indices(self, call: Call, here: torch.device) -> list[torch.Tensor | None]:
        """Return the indices as the device's kernel gets them: on the device, masks turned into positions."""
        moved: list[torch.Tensor | None] = []
        for index in call.given["indices"]:
            if index is None or index.dtype not in {torch.bool, torch.uint8}:
                moved.append(index if index is None else index.to(here))
                continue
            count = self.selected(index)
            for _ in range(index.dim()):
                moved.append(torch.empty(count, dtype=torch.int64, device=here))
        return moved

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `nonzero` returns."""
        value = self.known.of(tensor)
        if value is not None:
            return value.nonzero().to(tensor.device)
        # CUDA's and the CPU's kernels both lay the positions out by dimension.
        return tensor.new_empty(
            (tensor.dim(), self.selected(tensor)), dtype=torch.int64
        ).t()

    def masked(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return what `masked_select` returns."""
        if mask.dtype != torch.bool:
            raise RuntimeError("masked_select: expected BoolTensor for mask")
        return tensor.new_empty(self.selected(torch.broadcast_tensors(mask, tensor)[0]))

    def unique(
        self, tensor: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return what `unique` returns."""
        distinct = self.distinct(tensor.numel())
        return _uniques(
            tensor, [distinct], distinct, tensor.shape, inverse=True, counts=True
        )
