"""The lines `%gpuinfo --engines` and `%devices --engines`: what of their other options goes to engines."""

from __future__ import annotations

from argparse import Namespace

from gpumagic.cluster import looks
from gpumagic.errors import OptionError
from gpumagic.reports import ClusterReport

_ALONE = {
    "gpuinfo": ("each_cell", "best", "bench"),
    "devices": ("diff", "held", "why", "release_held"),
}
"""Options that are about one process."""


def look(magic: str, options: Namespace) -> ClusterReport:
    """Return what a line asks of the engines.

    Raises:
        OptionError: an option that is about one process; `%px` has each engine answer for itself.
    """
    for name in _ALONE[magic]:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is about one process: %px %{magic} {option} has each engine answer for itself")
    if magic == "devices":
        return looks.devices(
            *options.devices, engines=options.engines, timeout=options.timeout, minimum=options.min, sort=options.sort,
            by=options.by, limit=options.n,
        )  # fmt: skip
    return looks.gpuinfo(
        *options.devices, engines=options.engines, timeout=options.timeout, processes=options.processes,
        everything=options.all,
    )  # fmt: skip
