"""Where a report was made: what tells it from those of other processes and machines."""

from __future__ import annotations

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
