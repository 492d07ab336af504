"""Fake tensors tell the peak of torch's own allocator for the operators of models, or say that it is not known."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stages import sample, wanted

HERE = Path(__file__).parent
OPERATORS = (HERE / "operators.txt").read_text(encoding="utf-8").splitlines()
"""Expressions of the operands that `operator_peaks` makes."""
SPREAD = 6
"""Every sixth is in the sample."""
BY_VALUES = {
    "rows[rows.detach() > 0]", "rows.masked_select(other.detach() > 0)", "torch.nonzero(rows.detach())",
    "rows.masked_scatter(other.detach() > 0, other)", "torch.unique(label)", "torch.combinations(weights[:100])",
    "rows.prod(1)", "rows.prod()",
}  # fmt: skip
"""What is as large as values say: the fake runtime finds none, and fake tensors have some."""
TOO_HIGH = {
    "rows.max()": "autograd shares the gradient another way on CUDA",
    "rows.median()": "the same",
    "rows.renorm(2, 0, 1.0)": "one kernel on CUDA",
    "F.gaussian_nll_loss(rows, other.detach(), rows.detach().square())": "the renaming of devices holds arguments",
    "F.fractional_max_pool3d(volume, 2, output_size=8)": "samples",
}
TOO_LOW = {
    "on(nn.BatchNorm2d(32))(image.to(memory_format=torch.channels_last))": "by 1 %, in bfloat16",
}
REFUSED = {
    "F.embedding(tokens, table, sparse=True)", "label.bincount(minlength=1000)", "torch.unique_consecutive(label)",
    "torch.linalg.lstsq(square, square)",
}  # fmt: skip
"""What a dry run on fake tensors says that it does not know."""


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return what each engine has of each expression, from processes of their own."""
    expressions = "\n".join(wanted(request, "expression"))

    def peaks(engine: str) -> dict[str, Any]:
        found = subprocess.run(
            [sys.executable, str(HERE / "operator_peaks.py"), engine], input=expressions, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr[-2000:]
        return json.loads(found.stdout)

    with ThreadPoolExecutor() as pool:
        return dict(zip(("cuda", "fake"), pool.map(peaks, ("cuda", "fake")), strict=True))


@pytest.mark.parametrize("expression", sample(OPERATORS, SPREAD))
def test_fake_tensors_tell_the_peak_of_torchs_allocator_or_that_it_is_not_known(measured, expression) -> None:
    for dtype, real in measured["cuda"][expression].items():
        told = measured["fake"][expression][dtype]
        if "error" in real:  # CUDA has no such kernel, or the fake runtime no value that it wants
            continue
        assert ("error" in told) == (expression in REFUSED), told
        for part in ("forward", "backward", "of a sum"):
            share = told.get(part, 0) / real.get(part, 1) if part in real and part in told else 1
            if expression not in BY_VALUES and expression not in TOO_LOW and not told["unknown"]:
                assert share >= 0.99, f"too low {part} in {dtype}: {told} of {real}"
            if expression not in BY_VALUES and expression not in TOO_HIGH and not told["unknown"]:
                assert share <= 1.01, f"too high {part} in {dtype}: {told} of {real}"
