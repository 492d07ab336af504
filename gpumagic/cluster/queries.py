"""`%gpuinfo --engines` and `%devices --engines`: one query to every engine, whose answers become one report."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpumagic.cluster import connection, transport
from gpumagic.cluster.report import ClusterReport, EngineAnswer
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
        everything: also read the fan, links, topology and so on.

    Raises:
        OptionError: there are no engines, or not these.
        DeviceNotFound: a device that no engine has.
    """
    arguments = {"names": devices, "processes": processes, "everything": everything}
    return Query("gpuinfo", arguments, engines, timeout).run()


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
    arguments = {"names": devices}
    return Query("devices", arguments, engines, timeout, limit, by).run()


@dataclass(frozen=True)
class Query:
    """A request to every engine, and how the report of their answers is shown."""

    magic: str
    """Also the name of the function in `requests` that answers it."""
    arguments: Mapping[str, object]
    engines: str
    timeout: float
    limit: int | None = 20
    group_by: str | None = None

    def run(self, *, skip_pending: bool = False) -> ClusterReport:
        """Ask the engines; `transport.ask_each` explains ``skip_pending``."""
        connected = connection.connect(self.engines)
        started = time.perf_counter()
        answers = transport.ask_all(connected, (self.magic, self.arguments), self.timeout, skip_pending=skip_pending)
        refused = [answer.detail for answer in answers if answer.detail.startswith(_NO_DEVICE)]
        if refused and len(refused) == len(answers):  # no engine has the device: the line itself is wrong
            raise DeviceNotFound(f"on the engines: {refused[0].removeprefix(_NO_DEVICE)}")
        return ClusterReport(self.magic, answers, time.perf_counter() - started, self.limit, self.group_by)


def query_of(magic: str, options: Namespace, timeout: float) -> Query:
    """Return the query of a line with `--engines`; the timeout is in seconds.

    Raises:
        OptionError: an option is about one process; `%px` has each engine answer for itself.
    """
    connection.check_options(magic, options, "%px %")
    if magic == "devices":
        return Query(magic, {"names": options.devices}, options.engines, timeout, options.n, options.by)
    arguments = {"names": options.devices, "processes": options.processes, "everything": options.all}
    return Query(magic, arguments, options.engines, timeout)


def poller_of(options: Namespace, timeout: float) -> GpuPoller:
    """Return what `%gpuinfo --engines --watch` calls for each snapshot."""
    query = query_of("gpuinfo", options, timeout)
    timeout = min(timeout, max(1.0, options.watch))  # a busy engine must not hold up the others
    return GpuPoller(replace(query, timeout=timeout, arguments={**query.arguments, "everything": False}))


class GpuPoller:
    """Runs a query again and again; of a busy engine the last answer is kept, with its age."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._last: dict[int | str, tuple[float, EngineAnswer]] = {}

    def __call__(self) -> ClusterReport:
        """Return the engines as they are now."""
        now = time.monotonic()
        query = (
            self._query if self._last else replace(self._query, timeout=ENGINE_TIMEOUT)
        )  # engines first import what they need
        report = query.run(skip_pending=True)
        self._last.update((answer.engine, (now, answer)) for answer in report.engines if answer.report is not None)
        return replace(report, engines=tuple(self._or_last(answer, now) for answer in report.engines))

    def _or_last(self, answer: EngineAnswer, now: float) -> EngineAnswer:
        if answer.report is not None or answer.engine not in self._last or answer.state == "dead":
            return answer
        then, last = self._last[answer.engine]
        detail = f"{answer.detail}; its figures are from {now - then:.0f} s ago"
        return replace(answer, report=last.report, detail=detail)
