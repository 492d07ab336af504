"""Refuses the dtypes that a device's kernels refuse, which torch's meta kernels let pass. Runs in the worker's process.

An edit to half precision that breaks a cell is not to be advised. Which dtypes go together is checked in each kernel,
by macros and by hand, and no table of torch's says it. The CPU's kernels have the same checks as CUDA's: of 12,000
calls of torch's own samples of operators, with one operand in another dtype, the two disagree in what is listed here.
So the CPU's kernel is tried, on a few elements of each operand.
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
"""Finds the words of errors that are about dtypes; others may come of the small sizes."""
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
    dtypes = [tensor.dtype for _, tensor in call.tensors()]
    if is_cuda:
        _refuse_as_cuda(name, set(dtypes))
        if name in _STRICTER or name in _LAXER:
            return
    operands = (call.op, *dtypes)
    if operands in _taken or not _can_be_tried(call):
        return
    error = _error_on_cpu(call, keeps_halves=True)
    lacks_kernel = isinstance(error, NotImplementedError)
    if lacks_kernel and not _IS_LAPACK(
        name
    ):  # the CPU has fewer kernels for half precision
        error = _error_on_cpu(call, keeps_halves=False)
    if error is not None and _IS_OF_DTYPES(str(error)):
        raise error
    _taken.add(operands)


def _refuse_as_cuda(name: str, dtypes: set[torch.dtype]) -> None:
    """Raise what CUDA's kernels raise and the CPU's do not."""
    shown = " and ".join(map(str, dtypes))
    is_integral = not any(
        dtype.is_floating_point or dtype.is_complex for dtype in dtypes
    )
    if name in _MULTIPLIES and is_integral:
        raise RuntimeError(f'"{name}_cuda" not implemented for {shown}')
    if name in _STRICTER and len(dtypes) > 1:
        raise RuntimeError(
            f"{name}: operands must have the same dtype, but got {shown}"
        )


def _can_be_tried(call: Call) -> bool:
    """Return whether the CPU's kernel says of a call what the device's would."""
    # Autograd gives a backward kernel what CUDA's forward kernel left, which the CPU's does not always know.
    if "backward" in call.name:
        return False
    # The kernel would take random numbers from the host's generator.
    if torch.Tag.nondeterministic_seeded in call.op.tags:
        return False
    # A kernel that only writes makes as much as it is told.
    return not all(argument.is_write for argument, _ in call.tensors())


def _error_on_cpu(call: Call, *, keeps_halves: bool) -> Exception | None:
    """Return what the CPU's kernel raises of operands like a call's, but small.

    Args:
        call: the call.
        keeps_halves: whether operands in half precision stay so; else they are in float32.
    """
    arguments = {
        name: _on_cpu(value, keeps_halves) for name, value in call.given.items()
    }
    weight = arguments.get("weight")
    for name, value in arguments.items():
        is_statistic = name.startswith("running_") and isinstance(value, torch.Tensor)
        if is_statistic and weight is not None and value.is_floating_point():
            arguments[name] = value.to(
                weight.dtype
            )  # CUDA takes it in another precision too
    try:
        call.op.redispatch(CPU, **arguments)
    except (RuntimeError, IndexError) as error:
        has_kernel = "Could not run" not in str(
            error
        )  # torch's words where there is none
        if has_kernel:
            return error.with_traceback(
                None
            )  # whose frames would keep the operands alive
    return None


def _on_cpu(value: Any, keeps_halves: bool) -> Any:
    """Return an argument as the CPU's kernel gets it: tensors are small and of zeros."""
    if isinstance(value, torch.Tensor):
        dtype = value.dtype
        if dtype in _HALVES and not keeps_halves:
            dtype = torch.float32
        shape = [min(extent, _FEW) for extent in value.shape]
        return torch.zeros(shape, dtype=dtype, device="cpu")
    if isinstance(value, list | tuple):
        small = []
        for item in value:
            is_extent = type(item) is int
            small.append(min(item, _FEW) if is_extent else _on_cpu(item, keeps_halves))
        return small
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value
