"""The models of a dry run, and what each would take in other types: sums over its tensors, not a rule of thumb."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gpumagic.errors import OptionError
from gpumagic.report.base import Report

OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}
"""Tensors of a parameter's own size that an optimizer of torch keeps on the device for it."""


class Model(NamedTuple):
    """A model that the cell leaves in a variable, or returns, in bytes as torch's CUDA allocator counts them.

    Attributes:
        name: the variable.
        kind: the class's name.
        parameters: how many numbers they are, each once where it is shared.
        buffers: bytes.
        weights: bytes of the parameters by the type that the model is cast to.
        trained: the same of those that are trained, without int8 and int4, which are not.
    """

    name: str
    kind: str
    parameters: int
    buffers: int
    weights: dict[str, int]
    trained: dict[str, int]


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
    copies = OPTIMIZERS[optimizer] if training else None
    return DtypeReport(
        models=tuple(f"{each.name} ({each.kind})" for each in models),
        parameters=sum(each.parameters for each in models), training=training, optimizer=optimizer, capacity=capacity,
        dtypes=tuple(_row(models, dtype, copies, capacity) for dtype in models[0].weights),
        notes=tuple(_notes(training)),
    )  # fmt: skip


def _row(models: Sequence[Model], dtype: str, copies: int | None, capacity: int | None) -> DtypeRow:
    """Return the row of a type of weights; ``copies`` is of the optimizer's state, None where nothing is trained."""
    weights, buffers = sum(each.weights[dtype] for each in models), sum(each.buffers for each in models)
    gradients = state = None
    if copies is not None and dtype in models[0].trained:
        gradients = sum(each.trained[dtype] for each in models)
        state = copies * gradients
    is_whole = copies is None or gradients is not None
    total = weights + buffers + (gradients or 0) + (state or 0) if is_whole else None
    left = None if capacity is None or total is None else capacity - total
    return DtypeRow(dtype, weights, buffers, gradients, state, total, left)


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
