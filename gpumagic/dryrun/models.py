"""The models of a dry run, and what each would take in other types: sums over its tensors, not a rule of thumb."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gpumagic.errors import OptionError
from gpumagic.memory.allocator import rounded
from gpumagic.report.base import Report

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}
"""Tensors of a parameter's own size that an optimizer of torch keeps on the device for it."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of a model that are alike."""

    role: str
    """``"parameter"`` or ``"buffer"``."""
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    requires_grad: bool
    is_linear: bool
    """Whether it is a linear layer's weight other than the output's, which is what int8 and int4 make smaller."""
    count: int

    @property
    def numel(self) -> int:
        """Elements of one."""
        return math.prod(self.shape)

    @property
    def is_floating(self) -> bool:
        """Whether a model that is cast to another type casts it."""
        return self.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True)
class Model:
    """A model that the cell leaves in a variable, or returns.

    Attributes:
        name: the variable.
        kind: the class's name.
        tensors: its parameters and buffers, each once where it is shared.
    """

    name: str
    kind: str
    tensors: tuple[TensorGroup, ...]

    @property
    def parameters(self) -> int:
        """The number of its parameters."""
        return sum(each.numel * each.count for each in self.tensors if each.role == "parameter")


@dataclass(frozen=True)
class DtypeRow:
    """What models take with their weights in one type, in bytes as torch's CUDA allocator counts them."""

    dtype: str
    weights: int
    """Parameters; with int8 and int4 their scales too, and all that is no linear layer's weight in 16 bits."""
    buffers: int
    gradients: int | None
    """None where nothing is trained; `DtypeReport.notes` say why where training was asked for."""
    optimizer: int | None
    total: int | None
    left: int | None
    """What is left of the device for activations, cache and CUDA itself; less than 0 where it is too small."""


@dataclass(frozen=True, repr=False)
class DtypeReport(Report[DtypeRow]):
    """What models take in each type of weights; activations and a cache of keys and values are not in it."""

    row_type: ClassVar[type[Any]] = DtypeRow

    models: tuple[str, ...]
    """``"model (LlamaForCausalLM)"`` of each."""
    parameters: int
    training: bool
    optimizer: str
    capacity: int | None
    dtypes: tuple[DtypeRow, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[DtypeRow, ...]:
        return self.dtypes


def models_of(told: Iterable[dict[str, Any]]) -> tuple[Model, ...]:
    """Return the models of a worker's outcome."""
    models = []
    for each in told:
        groups = [
            TensorGroup(role, dtype, itemsize, tuple(shape), *others)
            for role, dtype, itemsize, shape, *others in each["groups"]
        ]
        models.append(Model(each["name"], each["kind"], tuple(groups)))
    return tuple(models)


def table(
    models: Sequence[Model], capacity: int | None, *, training: bool = False, optimizer: str = "adamw"
) -> DtypeReport:
    """Return the table of some models together.

    Raises:
        OptionError: there is no model, or it is another optimizer.
    """
    if not models:
        raise OptionError("the code leaves no model in a variable and returns none; a table by dtype is of models")
    if optimizer not in OPTIMIZERS:
        raise OptionError(f"optimizer is one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    tensors = [each for model in models for each in model.tensors]
    copies = OPTIMIZERS[optimizer] if training else None
    rows = [_row(tensors, dtype, copies, capacity) for dtype in (*_ITEMSIZE, *_QUANTIZED)]
    return DtypeReport(
        models=tuple(f"{each.name} ({each.kind})" for each in models),
        parameters=sum(each.parameters for each in models), training=training, optimizer=optimizer, capacity=capacity,
        dtypes=tuple(rows), notes=tuple(_notes(training)),
    )  # fmt: skip


def _row(tensors: Sequence[TensorGroup], dtype: str, copies: int | None, capacity: int | None) -> DtypeRow:
    """Return the row of a type of weights.

    Args:
        tensors: of the models.
        dtype: float32 or bfloat16, to which a model is cast: buffers and whole numbers stay as they are. Or what
            bitsandbytes makes of linear layers, the rest in 16 bits, which is not trained.
        copies: tensors of the optimizer's for each trained one; None where nothing is trained.
        capacity: bytes of the device.
    """
    itemsize, is_cast = _ITEMSIZE.get(dtype, 2), dtype in _ITEMSIZE

    def weight(each: TensorGroup) -> int:
        if each.is_linear and not is_cast:
            return _QUANTIZED[dtype](each)
        return rounded(each.numel * (itemsize if each.is_floating else each.itemsize))

    weights = _sum(tensors, weight)
    buffers = sum(each.count * rounded(each.numel * each.itemsize) for each in tensors if each.role == "buffer")
    trained = _sum((each for each in tensors if each.requires_grad), lambda each: rounded(each.numel * itemsize))
    gradients, state = (trained, copies * trained) if is_cast and copies is not None else (None, None)
    total = weights + buffers + (gradients or 0) + (state or 0) if is_cast or copies is None else None
    left = None if capacity is None or total is None else capacity - total
    return DtypeRow(dtype, weights, buffers, gradients, state, total, left)


_QUANTIZED: dict[str, Callable[[TensorGroup], int]] = {
    # A byte a weight, and a float32 for each row.
    "int8": lambda each: rounded(each.numel) + rounded(4 * each.shape[0]),
    # Half a byte a weight, a float32 for each 64 of them, and the 16 numbers that they stand for.
    "int4": lambda each: rounded(-(-each.numel // 2)) + rounded(4 * -(-each.numel // 64)) + rounded(4 * 16),
}


def _sum(tensors: Iterable[TensorGroup], nbytes: Callable[[TensorGroup], int]) -> int:
    return sum(each.count * nbytes(each) for each in tensors if each.role == "parameter")


def _notes(training: bool) -> Iterable[str]:
    if training:
        yield (
            "not in it: activations, what the optimizer's step takes for itself, and CUDA's own memory; dry-run a "
            "training step for the peak"
        )
        yield "mixed precision (autocast) keeps weights, gradients and state as in the row of float32"
        yield "int8 and int4 weights are not trained themselves; adapters such as LoRA's are, in 16 or 32 bits"
    else:
        yield "not in it: activations, the cache of keys and values, and CUDA's own memory"
    yield (
        "buffers keep their types; int8 and int4 are laid out as bitsandbytes does by default (0.50): all but linear "
        "layers, and the output layer, stay in 16 bits"
    )
