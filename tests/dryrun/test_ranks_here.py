"""What a cell that starts or joins other processes is told on any build of torch."""

from __future__ import annotations

import pytest
import torch

import gpumagic
from gpumagic.errors import DryRunUnavailable

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="tests/cuda/test_ranks.py has what CUDA builds do"
    ),
    pytest.mark.skipif(
        not torch.distributed.is_available(),
        reason="this torch was built without torch.distributed",
    ),
]
JOIN = """
import os, torch.distributed as dist
os.environ.update(WORLD_SIZE="8", RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29500")
dist.init_process_group("gloo")
"""


def test_a_cell_that_joins_others_does_not_wait() -> None:
    report = gpumagic.dry_run(JOIN, {}, gpu="T4")
    assert "stopped on line 4: it waits for 7 other processes: write --ranks 8" in report.verdict
    assert report.fits is None


def test_a_group_of_one_process_waits_for_nobody() -> None:
    code = JOIN.replace('"8"', '"1"').replace("29500", "0") + "dist.barrier()"
    assert gpumagic.dry_run(code, {}, gpu="T4").error is None


@pytest.mark.parametrize("ranks", [8, None])
def test_ranks_take_a_cuda_build(ranks: int | None) -> None:
    code = "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=8)"
    with pytest.raises(
        DryRunUnavailable, match="that takes a CUDA build of torch, which needs no GPU"
    ):
        gpumagic.dry_run(code, {}, gpu="T4", ranks=ranks)
