"""Refuses the dtypes that a device's kernels refuse, which torch's meta kernels let pass.

Which dtypes go together is checked in each kernel, by macros and by hand, and no table of torch's says it. The CPU's
kernels have the same checks as CUDA's: of 12,000 calls of torch's own samples of operators, with one operand in another
dtype, the two disagree in what is listed here. So the CPU's kernel is tried, on a few elements of each operand.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from gpumagic.worker.fake.calls import Call
from gpumagic.worker.fake.storages import CPU

_MULTIPLIES = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "addbmm", "convolution"}
)
"""What CUDA has for fractions and complex numbers alone."""
_STRICTER = frozenset({"convolution", "native_layer_norm", "native_group_norm"})
"""What CUDA has for operands of one dtype alone, and the CPU for mixed ones."""
_LAXER = frozenset(
    {"max_unpool2d", "max_unpool3d", "abs", "histc", "median", "nanmedian", "nansum"}
)
"""What CUDA has for more dtypes than the CPU."""
_IS_LAPACK = re.compile(r"linalg|cholesky|^_?lu_|qr|triangular_solve").search
"""Finds what is solved in full precision everywhere."""
_HALVES = {torch.float16, torch.bfloat16}
_IS_OF_DTYPES = re.compile(
    r"type|implemented|supported|\b(bool|byte|int|long|float|complex)\b", re.IGNORECASE
).search
_taken: set[tuple[Any, ...]] = set()
"""Operators with the dtypes of operands that they are known to take."""
_FEW = 4
"""Elements along a dimension: sizes that are equal, or 1, stay so."""


def refuse(call: Call, is_cuda: bool) -> None:
    """Raise what the device's kernel would raise of the dtypes of a call's operands.

    Args:
        call: the call.
        is_cuda: whether the device stands for CUDA's.
    """
    name = call.name
    dtypes = {each.dtype for _, each in call.tensors()}
    if (
        is_cuda
        and name in _MULTIPLIES
        and not any(each.is_floating_point or each.is_complex for each in dtypes)
    ):
        raise RuntimeError(f'"{name}_cuda" not implemented for {" and ".join(map(str, dtypes))}')
    if is_cuda and name in _STRICTER:
        if len(dtypes) > 1:
            raise RuntimeError(
                f"{name}: operands must have the same dtype, but got {' and '.join(map(str, dtypes))}"
            )
        return
    # Autograd gives a backward kernel what CUDA's forward kernel left, which the CPU's does not always know; a kernel
    # that draws random numbers would take them from the host's generator; one that only writes makes as much as told.
    operands = call.op, *(each.dtype for _, each in call.tensors())
    draws = torch.Tag.nondeterministic_seeded in call.op.tags
    only_writes = all(argument.is_write for argument, _ in call.tensors())
    if (
        operands in _taken
        or "backward" in name
        or draws
        or only_writes
        or (is_cuda and name in _LAXER)
    ):
        return
    error = _tried(call, keeps_halves=True)
    if isinstance(error, NotImplementedError) and not _IS_LAPACK(
        name
    ):  # of halves, the CPU lacks more
        error = _tried(call, keeps_halves=False)
    if error is not None and _IS_OF_DTYPES(str(error)):
        raise error
    _taken.add(operands)


def _tried(call: Call, keeps_halves: bool) -> Exception | None:
    """Return what the CPU's kernel raises of operands like a call's, but small."""
    weight: Any = call.given.get("weight")

    def small(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_statistic = (
                name.startswith("running_") and weight is not None and value.is_floating_point()
            )
            dtype = (
                weight.dtype if is_statistic else value.dtype
            )  # which CUDA has in another precision too
            dtype = dtype if keeps_halves or dtype not in _HALVES else torch.float32
            return torch.zeros(
                [min(extent, _FEW) for extent in value.shape], dtype=dtype, device="cpu"
            )
        if isinstance(value, list | tuple):
            return [min(each, _FEW) if type(each) is int else small(name, each) for each in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    try:
        call.op.redispatch(CPU, **{name: small(name, value) for name, value in call.given.items()})
    except (RuntimeError, IndexError) as error:
        if "Could not run" not in str(error):  # which says that the CPU has no such kernel
            return error.with_traceback(None)  # whose frames would keep the operands alive
    return None
