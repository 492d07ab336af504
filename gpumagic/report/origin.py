"""Where a report was made: its machine, its process, and its rank in a distributed run."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """The process that a report is about."""

    host: str = ""
    """The machine's name; empty where it is not known."""
    pid: int | None = None
    rank: int | None = None
    """Its number among the processes of a distributed run (torch.distributed's, else MPI's); None outside one."""
    local_rank: int | None = None
    """Its number among those of its machine."""


RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""torchrun's, Open MPI's, PMIx's, MPICH's and Slurm's; Slurm's also stands in a batch script, so it comes last."""
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def current_origin() -> Origin:
    """Return this process's origin. Imports nothing."""
    rank = _rank_in_torch()
    return Origin(
        host=socket.gethostname(), pid=os.getpid(),
        rank=_number(RANKS) if rank is None else rank, local_rank=_number(LOCAL_RANKS),
    )  # fmt: skip


def _rank_in_torch() -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank: int = distributed.get_rank()
    return rank


def _number(names: Sequence[str]) -> int | None:
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), None)
