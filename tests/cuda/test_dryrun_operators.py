"""Fake tensors tell the peak of torch's own allocator for the operators of models, or say that it is not known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpumagic import fakecuda
from tests.stages import sample, wanted

OPERATORS = Path(__file__).with_name("operators.txt").read_text(encoding="utf-8").splitlines()
"""Expressions of the operands that `operator_peaks` makes."""
SPREAD = 6
"""Every sixth is in the sample."""
BY_VALUES = {
    "rows[rows.detach() > 0]", "rows.masked_select(other.detach() > 0)", "torch.nonzero(rows.detach())",
    "rows.masked_scatter(other.detach() > 0, other)", "torch.unique(label)", "torch.combinations(weights[:100])",
    "rows.prod(1)", "rows.prod()",
}  # fmt: skip
"""What is as large as values say: the fake runtime finds none, and fake tensors have some."""
BY_A_RULE = {"convolution", "convolution_backward"}
"""What both engines estimate by the same rule, and say not to know."""
TOO_HIGH = {
    "rows.max()": "autograd shares the gradient another way on CUDA",
    "rows.renorm(2, 0, 1.0)": "one kernel on CUDA",
    "F.gaussian_nll_loss(rows, other.detach(), rows.detach().square())": "the renaming of devices holds arguments",
    "F.fractional_max_pool3d(volume, 2, output_size=8)": "samples",
    "on(nn.Conv3d(16, 16, 3))(volume)": "what is left of a block is not split off",
    'on(nn.Conv2d(32, 64, 3, padding="same", padding_mode="reflect"))(image)': "the same",
}
TOO_LOW = {
    "on(nn.BatchNorm2d(32))(image.to(memory_format=torch.channels_last))": "by 1 %, in bfloat16",
}
REFUSED = {
    "F.embedding(tokens, table, sparse=True)", "label.bincount(minlength=1000)", "torch.unique_consecutive(label)",
    "torch.linalg.lstsq(square, square)",
}  # fmt: skip
"""What a dry run on fake tensors says that it does not know."""


ON_OTHERS = """
F.scaled_dot_product_attention(q, k, v)
F.scaled_dot_product_attention(*(image.view(8, 32, 32, 128) for _ in range(3)))
F.scaled_dot_product_attention(*(image.view(8, 32, 16, 256) for _ in range(3)))
F.scaled_dot_product_attention(odd, odd, odd)
rows.sum(0)
rows.std()
F.mse_loss(rows, other)
""".strip().splitlines()
"""What hangs on how many multiprocessors a GPU has, and on their memory."""


def peaks_of(expressions: list[str], gpu: str = "A100") -> dict[str, dict[str, Any]]:
    """Return what each engine has of each expression, from processes of their own."""

    def ask(engine: str) -> dict[str, Any]:
        found = subprocess.run(
            [sys.executable, "-m", "tests.cuda.operator_peaks", engine, gpu], input="\n".join(expressions), text=True,
            capture_output=True, check=False, env={**os.environ, **fakecuda.environment(gpu)},
        )  # fmt: skip
        assert found.returncode == 0, found.stderr[-2000:]
        return json.loads(found.stdout)

    with ThreadPoolExecutor() as pool:
        return dict(zip(("cuda", "fake"), pool.map(ask, ("cuda", "fake")), strict=True))


def check(measured: dict[str, dict[str, Any]], expression: str) -> None:
    """Fail where a peak is off by more than 1 % and nothing says so."""
    for dtype, real in measured["cuda"][expression].items():
        told = measured["fake"][expression][dtype]
        if "error" in real:  # CUDA has no such kernel, or the fake runtime no value that it wants
            continue
        assert ("error" in told) == (expression in REFUSED), told
        if "error" in told or set(told["unknown"]) - BY_A_RULE or expression in BY_VALUES:
            continue
        for part in real.keys() - {"unknown"}:
            share = told[part] / max(1, real[part])
            assert share >= 0.99 or expression in TOO_LOW, (
                f"{part} in {dtype} is too low: {told} of {real}"
            )
            assert share <= 1.01 or expression in TOO_HIGH, (
                f"{part} in {dtype} is too high: {told} of {real}"
            )


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return peaks_of(wanted(request, "expression"))


@pytest.mark.parametrize("expression", sample(OPERATORS, SPREAD))
def test_fake_tensors_tell_the_peak_of_torchs_allocator_or_that_it_is_not_known(
    measured, expression
) -> None:
    check(measured, expression)


@pytest.mark.parametrize("gpu", sample(["T4", "RTX 4090"], 2))
def test_what_is_told_is_that_of_the_gpu_that_was_named(gpu) -> None:
    found = peaks_of(ON_OTHERS, gpu)
    for expression in ON_OTHERS:
        check(found, expression)
