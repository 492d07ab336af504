"""Which process a report is about: its machine, its number, its rank in a distributed run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

import gpumagic
from gpumagic.report import base


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*base.RANKS, *base.LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)


def test_a_report_says_where_it_was_made() -> None:
    found = gpumagic.gpuinfo().origin
    assert (found.host, found.pid, found.rank, found.local_rank) == (
        socket.gethostname(),
        os.getpid(),
        None,
        None,
    )


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1", "SLURM_PROCID": "0"}, (3, 1)),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, (5, 2)),
        ({"PMI_RANK": "7", "MPI_LOCALRANKID": "0"}, (7, 0)),
        ({"SLURM_PROCID": "4", "SLURM_LOCALID": "4"}, (4, 4)),
        ({"RANK": "first"}, (None, None)),
    ],
)
def test_the_rank_is_the_launchers(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ranks: object
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = base.current_origin()
    assert (found.rank, found.local_rank) == ranks


def test_that_of_torch_distributed_comes_first() -> None:
    code = (
        "import os, tempfile, torch.distributed as dist\n"
        "os.environ['RANK'] = '9'\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "from gpumagic.report import base as origin\n"
        "print(origin.current_origin().rank)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "0"
