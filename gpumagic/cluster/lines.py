"""The lines of the magics with `--engines`: what of their other options goes to the engines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from gpumagic.cluster import cells, queries
from gpumagic.cluster.report import ClusterReport
from gpumagic.errors import OptionError
from gpumagic.options import parser


def look(magic: str, options: Namespace) -> ClusterReport:
    """Return what a line asks of the engines.

    Raises:
        OptionError: an option that is about one process; `%px` has each engine answer for itself.
    """
    _check(magic, options, "%px %")
    if magic == "devices":
        return queries.devices(
            *options.devices, engines=options.engines, timeout=options.timeout, minimum=options.min, sort=options.sort,
            by=options.by, limit=options.n,
        )  # fmt: skip
    return queries.gpuinfo(
        *options.devices, engines=options.engines, timeout=options.timeout, processes=options.processes,
        everything=options.all,
    )  # fmt: skip


def follow(options: Namespace) -> Callable[[], ClusterReport]:
    """Return what `%gpuinfo --watch` of engines asks from time to time.

    Raises:
        OptionError: as `look`.
    """
    _check("gpuinfo", options, "%px %")
    timeout = min(options.timeout, max(1.0, options.watch))  # a busy engine must not hold up the others
    return queries.GpuPoller(*options.devices, engines=options.engines, timeout=timeout, processes=options.processes)


def cell(magic: str, options: Namespace, body: str | None, device: str | None = None) -> cells.EngineCell:
    """Return a cell under one of the cell magics, ready to run on engines that can all run it.

    Args:
        magic: ``"ondevice"`` or ``"oomguard"``.
        options: of its line.
        body: the cell below; None where there is none.
        device: the device of `%%ondevice`.

    Raises:
        OptionError: there is no cell; an option that is about one process; or an engine cannot run it.
    """
    if body is None:
        raise OptionError(f"--engines takes all of a cell: write %%{magic} on its first line")
    _check(magic, options, "%%px, and below it %%")
    line = " ".join(word for name in parser(magic).forwarded for word in _written(name, getattr(options, name)))
    fallback = options.fallback if magic == "ondevice" else None
    return cells.prepare(
        magic, line, body, engines=options.engines, timeout=options.timeout, device=device, fallback=fallback,
        keep_going=magic == "oomguard" and options.keep_going,
    )  # fmt: skip


def _written(name: str, value: object) -> list[str]:
    """Return an option as it is typed; nothing where it is not given."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    return [option, ",".join(value) if isinstance(value, list) else str(value)] if value else []


def _check(magic: str, options: Namespace, there: str) -> None:
    for name in parser(magic).refused:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} is about one process: {there}{magic} {option} has each engine answer for itself"
            )
