"""`%gpuinfo --engines` and `%devices --engines`: one query to every engine, whose answers become one report."""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections.abc import Callable, Mapping

from gpumagic.cluster import connection
from gpumagic.cluster.report import ClusterReport
from gpumagic.errors import DeviceNotFound
from gpumagic.options import ENGINE_TIMEOUT

_NO_DEVICE = "DeviceNotFound: "


def gpuinfo(
    *devices: str, engines: str = connection.PX, timeout: float = ENGINE_TIMEOUT, processes: bool = False,
    everything: bool = False,
) -> ClusterReport:  # fmt: skip
    """Return the GPUs of all engines; a GPU that several engines see is reported once.

    Args:
        devices: only these, by each engine's own names.
        engines: ``"all"``, ``"0,2"``, ``"1:3"``; by default those of `%%px`.
        timeout: seconds to wait; engines that have not answered by then are listed as such.
        processes: also read the processes on each GPU.
        everything: also read the fan, the PCI bus and so on.

    Raises:
        OptionError: there are no engines, or not these.
        DeviceNotFound: a device that no engine has.
    """
    arguments = {"names": devices, "processes": processes, "everything": everything}
    return ask("gpuinfo", arguments, engines, timeout)


def devices(
    *devices: str, engines: str = connection.PX, timeout: float = ENGINE_TIMEOUT, by: str | None = None,
    limit: int | None = 20,
) -> ClusterReport:  # fmt: skip
    """Return the live tensors of all engines, one row per storage.

    Args:
        devices: only these, by each engine's own names.
        engines: ``"all"``, ``"0,2"``, ``"1:3"``; by default those of `%%px`.
        timeout: seconds to wait; engines that have not answered by then are listed as such.
        by: show totals by ``"dtype"``, ``"kind"`` or ``"holder"`` instead of rows.
        limit: how many rows to show; the report has all.

    Raises:
        OptionError: there are no engines, or not these.
        DeviceNotFound: a device that no engine has.
    """
    return ask("devices", {"names": devices, "by": by, "limit": limit}, engines, timeout)


def ask(magic: str, arguments: Mapping[str, object], engines: str, timeout: float) -> ClusterReport:
    """Return the report of the engines that were asked; the function of `requests` that answers is called as the magic.

    Raises:
        OptionError: there are no engines, or not these.
        DeviceNotFound: a device that no engine has.
    """
    connected = connection.connect(engines)
    started = time.perf_counter()
    answers = connection.ask_all(connected, (magic, arguments), timeout)
    refused = [answer.detail for answer in answers if answer.detail.startswith(_NO_DEVICE)]
    if refused and len(refused) == len(answers):  # no engine has the device: the line itself is wrong
        raise DeviceNotFound(f"on the engines: {refused[0].removeprefix(_NO_DEVICE)}")
    return ClusterReport(magic, answers, time.perf_counter() - started)


def query_of(magic: str, options: Namespace) -> Callable[[float], ClusterReport]:
    """Return what a line with `--engines` asks, to be called with a time limit in seconds.

    Raises:
        OptionError: an option is about one process; `%px` has each engine answer for itself.
    """
    connection.check_options(magic, options, "%px %")
    if magic == "devices":
        arguments = {"names": options.devices, "by": options.by, "limit": options.n}
    else:
        arguments = {"names": options.devices, "processes": options.processes, "everything": options.all}
    return functools.partial(ask, magic, arguments, options.engines)
