"""What the host reads from a CUDA device whose kernels do nothing: what the host itself put there, else a guess.

Values that were copied to the device lie in its memory, but so does what earlier tensors left. Which it is, only
`Known` knows, and it has to see every operator, which costs time and lets some tensors live a little longer or shorter.
So a run begins without it. Where the host reads more than a loss, which nobody knows, the run ends, another one follows
the values and records what was known at each read, and a last one, plain again, is told the same.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpumagic.dryrun.worker import cell
from gpumagic.dryrun.worker.guesses import Guesses
from gpumagic.dryrun.worker.known import Known
from gpumagic.heap.running_module import tensors_in

_AMONG_RANKS = ("torch.distributed.utils", "torch.distributed.tensor._random")
"""Where DDP compares what the ranks have, and DTensors share a seed: it lies in the device's memory as it is."""
_UNSEEN = (*cell.COMPILERS, "torch.serialization", *_AMONG_RANKS)
"""What copies to the host and looks at no value: a file of weights has its size whatever they are."""
_COPY = torch.ops.aten.copy_.default
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_MOST_RECORDED = 1 << 20
"""Bytes of one read."""


class Contents(Protocol):
    """Tells what the host finds when it reads."""

    def of(self, tensor: torch.Tensor, /) -> torch.Tensor | None:
        """Return a tensor's contents on the CPU; None if they are not known."""


class Recorded:
    """What is known at each read, kept so that another run can be told the same.

    Args:
        known: tells it.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self.answers: list[str | None] = []
        """The bytes of each, in hexadecimal digits, in the order of the reads."""

    def of(self, tensor: torch.Tensor, /) -> torch.Tensor | None:
        """Return a tensor's contents on the CPU; None if they are not known."""
        value = self._known.of(tensor)
        if value is None or value.numel() * value.itemsize > _MOST_RECORDED:
            self.answers.append(None)
            return None
        raw = value.resolve_conj().resolve_neg().flatten().view(torch.uint8)
        self.answers.append(bytes(raw.tolist()).hex())
        return value


class Replayed:
    """What was known at each read of a run that was recorded.

    Args:
        answers: those of `Recorded`.
        give_up: ends a run that reads otherwise.
    """

    def __init__(self, answers: list[str | None], give_up: Callable[[], NoReturn]) -> None:
        self._coming = iter(answers)
        self._give_up = give_up

    def of(self, tensor: torch.Tensor, /) -> torch.Tensor | None:
        """Return a tensor's contents on the CPU; None if they are not known."""
        answer = next(self._coming, "none is left")
        if answer is None:
            return None
        if len(answer) != 2 * tensor.numel() * tensor.itemsize:
            self._give_up()
        raw = torch.tensor(list(bytes.fromhex(answer)), dtype=torch.uint8, device="cpu")
        return raw.view(tensor.dtype).reshape(tensor.shape)


class Reading:
    """The answers to the host, for the rest of the process.

    Args:
        guesses: what is said of what is not known.
        contents: tells what is known; None in a run that does not follow it.
        give_up: ends such a run, where it matters.
        assume: called with a sentence for each thing that is assumed.
    """

    def __init__(
        self,
        guesses: Guesses,
        contents: Contents | None,
        give_up: Callable[[], NoReturn],
        assume: Callable[[str], None],
    ) -> None:
        self._guesses = guesses
        self._contents = contents
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
        if self._contents is None:
            if not (cell.runs_in(*cell.COMPILERS) or self._guesses.is_ignoring):
                self._give_up()
            return None
        return self._contents.of(tensor)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        _COPY.redispatch(_ON_CPU, target, source, non_blocking)  # where torch has its own, for every pair of devices
        if target.device.type == "cpu" and not cell.runs_in(*_UNSEEN):
            self._fetch(source, target)
        return target

    def _fetch(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """Put something into what was copied from a device to the host."""
        if self._contents is None:
            if self._guesses.expects(host.dtype):
                self._guesses.fill(host, may_be_known=True)
            elif not self._guesses.leave(host):
                self._give_up()
            return
        value = self._contents.of(source)
        if value is None:
            self._guesses.fill(host)
        else:
            host.copy_(value)

    def _scalar(self, tensor: torch.Tensor) -> Any:
        if torch.distributed.is_initialized() and cell.runs_in(*_AMONG_RANKS):
            return memory_of(tensor).view(tensor.dtype)[tensor.storage_offset()].item()
        if self._contents is None and (tensor.requires_grad or self._guesses.expects(tensor.dtype)):
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


class Following(TorchDispatchMode):
    """Shows every operator to `Known`, in one thread."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self._known = known

    def in_threads(self) -> None:
        """Show those of all threads that begin, for the rest of the process."""
        threads: Any = threading.Thread
        begin, known = threads._bootstrap_inner, self._known

        def begin_with_mode(thread: threading.Thread) -> None:
            with Following(known):
                begin(thread)

        threads._bootstrap_inner = begin_with_mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile do its work as if this were not there."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__module__.startswith("torch.distributed.") for each in types):
            return NotImplemented  # what a DTensor makes of it comes here in its turn
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not any(isinstance(each, FakeTensor) for each in tensors_in(made)):  # by which DTensors learn of shapes
            self._known.follow(func, args, kwargs, made)
        return made


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins."""
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor's storage, which for the fake runtime is the host's."""
    nbytes = tensor.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address_of(tensor)), dtype=torch.uint8)
