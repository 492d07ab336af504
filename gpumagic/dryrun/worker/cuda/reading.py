"""What the host reads from a CUDA device whose kernels do nothing: what the host itself put there, else a guess.

Values that were copied to the device lie in its memory, but so does what earlier tensors left. Which it is, only
`Known` knows, and it has to see every operator, which makes each take three times as long.
So a run begins without it, and where something is decided by what may be known, another run follows the values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from gpumagic.dryrun.worker import cell
from gpumagic.dryrun.worker.guesses import Guesses
from gpumagic.dryrun.worker.known import Known
from gpumagic.dryrun.worker.shown import is_plain
from gpumagic.heap.storages import local_of

_AMONG_RANKS = ("torch.distributed.utils", "torch.distributed.tensor._random")
"""Where DDP compares what the ranks have, and DTensors share a seed: it lies in the device's memory as it is."""
_UNSEEN = (*cell.COMPILERS, "torch.serialization", *_AMONG_RANKS)
"""What copies to the host and looks at no value: a file of weights has its size whatever they are."""
_COPY = torch.ops.aten.copy_.default
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Reading:
    """The answers to the host, for the rest of the process.

    Args:
        guesses: what is said of what is not known.
        known: tells what is known; None in a run that does not follow values.
        give_up: ends such a run, where it matters.
        assume: called with a sentence for each thing that is assumed.
    """

    def __init__(
        self,
        guesses: Guesses,
        known: Known | None,
        give_up: Callable[[], NoReturn],
        assume: Callable[[str], None],
    ) -> None:
        self._guesses = guesses
        self._known = known
        self._give_up = give_up
        self._assume = assume
        self._library: Any = None

    def install(self) -> None:
        """Answer for the rest of the process."""
        self._library = torch.library.Library("aten", "IMPL")
        for name, answer in {
            "_local_scalar_dense": self._scalar,
            "copy_": self._copy,
            "equal": self._equal,
            "nonzero": self._nonzero,
            "_unique2": self._unique,
            "unique_dim": self._unique_dim,
            "unique_consecutive": self._unique_consecutive,
        }.items():
            self._library.impl(name, answer, "CUDA", allow_override=True)
        torch.amp.GradScaler._maybe_opt_step = self._step

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self._known is None:
            if not (cell.runs_in(*cell.COMPILERS) or self._guesses.is_ignoring):
                self._give_up()
            return None
        return self._known.of(tensor)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        _COPY.redispatch(_ON_CPU, target, source, non_blocking)  # where torch has its own, for every pair of devices
        if target.device.type == "cpu" and not cell.runs_in(*_UNSEEN):
            self._fetch(source, target)
        return target

    def _fetch(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """Put something into what was copied from a device to the host."""
        value = None if self._known is None else self._known.of(source)
        if value is None:
            self._guesses.fill(host, may_be_known=self._known is None)
        else:
            host.copy_(value)

    def _scalar(self, tensor: torch.Tensor) -> Any:
        if torch.distributed.is_initialized() and cell.runs_in(*_AMONG_RANKS):
            return memory_of(tensor).view(tensor.dtype)[tensor.storage_offset()].item()
        if self._known is None and (tensor.requires_grad or self._guesses.expects(tensor.dtype)):
            # Of a loss, nothing that the host put there; of the others it matters once something is decided by them.
            return self._guesses.scalar(tensor.dtype, may_be_known=not tensor.requires_grad)
        value = self._value(tensor)
        return self._guesses.scalar(tensor.dtype) if value is None else value.item()

    def _step(self, optimizer: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        self._assume("gradients are taken to be finite, so that a gradient scaler steps")
        return optimizer.step(*args, **kwargs)

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.shape != other.shape:
            return False
        values = self._value(one), self._value(other)
        if values[0] is None or values[1] is None:
            return self._guesses.truth()
        return bool(torch.equal(values[0], values[1]))

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        value = self._value(mask)
        found = self._guesses.selected(mask.numel()) if value is None else int(value.count_nonzero())
        return mask.new_empty((found, mask.dim()), dtype=torch.int64)

    def _unique(
        self, tensor: torch.Tensor, _sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
    ) -> tuple[torch.Tensor, ...]:
        value = self._value(tensor)
        found = self._some(tensor.numel()) if value is None else value.unique().numel()
        return self._uniques(tensor, [found], tensor.shape, return_inverse, return_counts)

    def _unique_dim(
        self,
        tensor: torch.Tensor,
        dim: int,
        _sorted: bool = True,
        return_inverse: bool = False,
        return_counts: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        return self._unique_consecutive(tensor, return_inverse, return_counts, dim)

    def _unique_consecutive(
        self, tensor: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        self._value(tensor)
        if dim is None:
            return self._uniques(tensor, [self._some(tensor.numel())], tensor.shape, return_inverse, return_counts)
        shape = list(tensor.shape)
        shape[dim] = self._some(shape[dim])
        return self._uniques(tensor, shape, [tensor.shape[dim]], return_inverse, return_counts)

    def _some(self, most: int) -> int:
        return max(1, self._guesses.selected(most)) if most else 0

    @staticmethod
    def _uniques(
        tensor: torch.Tensor, shape: list[int], of: Any, inverse: bool, counts: bool
    ) -> tuple[torch.Tensor, ...]:
        return (
            tensor.new_empty(shape),
            tensor.new_empty(of if inverse else 0, dtype=torch.int64),
            tensor.new_empty(shape[0] if counts else 0, dtype=torch.int64),
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
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address_of(tensor)), dtype=torch.uint8)
