"""What the fake-tensor engine says that CUDA's kernels allocate for themselves is what the allocator is asked for."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gpumagic.worker.fake.calls import Call
from gpumagic.worker.fake.scratch import scratch
from tests.stages import examples

aten = torch.ops.aten
REDUCTIONS: dict[str, Any] = {
    "sum": aten.sum.dim_IntList, "mean": aten.mean.dim, "std": aten.std.correction, "amax": aten.amax.default,
    "linalg_vector_norm": aten.linalg_vector_norm.default, "argmax": aten.argmax.default, "max": aten.max.dim,
}  # fmt: skip
EXTENTS = st.sampled_from([1, 2, 3, 7, 10, 32, 64, 100, 128, 256, 513, 784, 1000, 1024, 4096])
DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)


@pytest.fixture(scope="module", autouse=True)
def _leaves_the_device_empty() -> Iterator[None]:
    """Later dry runs begin with what this process has there."""
    yield
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def asked(work: Any) -> list[int]:
    """Return the bytes of every block that some work has the allocator take."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        work()
        (trace, *_) = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return sorted(_rounded(entry["size"]) for entry in trace if entry["action"] == "alloc")


def told(op: Any, **given: Any) -> list[int]:
    """Return what the engine says that an operator allocates besides its results, in whole blocks."""
    return [_rounded(nbytes) for nbytes in scratch(Call(op, (), given, "cuda"))]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


@examples(few=60, deep=1000)
@given(
    st.sampled_from(sorted(REDUCTIONS)),
    st.lists(EXTENTS, min_size=1, max_size=4),
    DTYPES,
    st.booleans(),
    st.data(),
)
def test_a_reduction_leaves_its_part_sums_where_torch_does(
    name, shape, dtype, turned, data
) -> None:
    assume(math.prod(shape) <= 1 << 24)
    assume(dtype.is_floating_point or name in {"sum", "amax", "argmax", "max"})
    assume(dtype != torch.bool or name == "sum")
    op, whole = REDUCTIONS[name], torch.empty(shape, dtype=dtype, device="cuda")
    if turned:
        whole = whole.transpose(0, -1)
    dims: Any = data.draw(st.lists(st.integers(0, whole.dim() - 1), min_size=1, unique=True))
    if name in {"argmax", "max"}:
        dims = dims[0]
    arguments = {"ord": 2} if name == "linalg_vector_norm" else {}
    blocks = asked(lambda: op(whole, *arguments.values(), dims))
    for nbytes in told(op, self=whole, dim=dims):
        assert nbytes in blocks
        blocks.remove(nbytes)
    assert len(blocks) == (2 if name == "max" else 1), "the results alone are left"


@pytest.mark.parametrize(
    "laid_out", ["expand(64, 32)", "t().contiguous().t()", "repeat(2, 2)[::2, ::2]", "clone()"]
)
def test_a_matrix_is_copied_for_cublas_where_torch_copies_it(laid_out) -> None:
    other = torch.empty(32, 16, device="cuda")
    matrix = eval(
        f"torch.empty({'1, 1' if 'expand' in laid_out else '64, 32'}, device='cuda').{laid_out}"
    )
    torch.mm(matrix, other)  # the workspaces are made
    blocks = asked(lambda: torch.mm(matrix, other))
    assert sorted([*told(aten.mm.default, self=matrix, mat2=other), 4096]) == blocks
