"""What the host reads from a CUDA device whose kernels do nothing: what the host itself put there, else a guess.

Values that were copied to the device lie in its memory, but so does what earlier tensors left. Which it is, only
`Known` knows, and it has to see every operator. So a run begins without it; where the host reads more than a loss,
which nobody knows, the run ends and a new one begins with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpumagic.dryrun.stage import cell
from gpumagic.dryrun.stage.guesses import Guesses
from gpumagic.dryrun.stage.known import Known

_FETCHES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})


class Reading:
    """The answers to the host, for the rest of the process.

    Args:
        guesses: what is said of what is not known.
        known: what is known; None in a run that does not follow it.
        give_up: ends such a run, where it matters.
        assume: called with a sentence for each thing that is assumed.
    """

    def __init__(
        self, guesses: Guesses, known: Known | None, give_up: Callable[[], NoReturn], assume: Callable[[str], None]
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
            "equal": self._equal,
            "nonzero": self._nonzero,
            "_unique2": self._unique,
            "unique_dim": self._unique_dim,
            "unique_consecutive": self._unique_consecutive,
        }.items():
            self._library.impl(name, answer, "CUDA", allow_override=True)
        torch.amp.GradScaler._maybe_opt_step = self._step
        if self._known is None:
            for name in ("cpu", "tolist", "to", "copy_"):
                setattr(torch.Tensor, name, self._unless_it_fetches(getattr(torch.Tensor, name)))

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self._known is None:
            if not cell.runs_in(*cell.COMPILERS):
                self._give_up()
            return None
        return self._known.of(tensor)

    def _scalar(self, tensor: torch.Tensor) -> Any:
        if self._known is None and tensor.requires_grad:
            return self._guesses.scalar(tensor.dtype)  # a loss: nothing that the host put there, so no new beginning
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

    def _is_left(self, made: object) -> bool:
        return isinstance(made, torch.Tensor) and self._guesses.leave(made)

    def _unless_it_fetches(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of tensors that gives the run up where it copies from a device to the host."""

        def fetched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            source = args[0] if args and fetch.__name__ == "copy_" else tensor
            made = fetch(tensor, *args, **kwargs)
            is_fetched = _is_on_a_device(source) and not _is_on_a_device(made)
            if is_fetched and not cell.runs_in(*cell.COMPILERS) and not self._is_left(made):
                self._give_up()
            return made

        return fetched


def _is_on_a_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


class Following(TorchDispatchMode):
    """Shows every operator to `Known`, and fills what is copied to the host.

    Args:
        known: what is known.
        guesses: what is said of the rest.
    """

    def __init__(self, known: Known, guesses: Guesses) -> None:
        super().__init__()
        self._known = known
        self._guesses = guesses

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile do its work as if this were not there."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in _FETCHES and made.device.type == "cpu":
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type == "cuda":
                self._fetch(source, made)
        else:
            self._known.follow(func, args, kwargs, made)
        return made

    def _fetch(self, source: torch.Tensor, host: torch.Tensor) -> None:
        value = self._known.of(source)
        if value is None:
            self._guesses.fill(host)
        else:
            host.copy_(value)


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins."""
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor's storage, which for the fake runtime is the host's."""
    nbytes = tensor.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address_of(tensor)), dtype=torch.uint8)
