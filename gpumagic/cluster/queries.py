"""`%gpuinfo --engines` and `%devices --engines`: one look at every engine, as one report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpumagic.cluster import connection, transport
from gpumagic.cluster.report import ClusterReport, EngineAnswer
from gpumagic.errors import DeviceNotFound
from gpumagic.options import QUERY_TIMEOUT


def gpuinfo(
    *devices: str, engines: str = connection.PX, timeout: float = QUERY_TIMEOUT, processes: bool = False,
    everything: bool = False,
) -> ClusterReport:  # fmt: skip
    """Return the GPUs of all engines; one that several of them see is one.

    Args:
        devices: only these, by each engine's own names.
        engines: ``"all"``, ``"0,2"``, ``"1:3"``; those of `%%px` without.
        timeout: seconds to wait; engines that have not answered by then are told of.
        processes: also read the processes on each GPU.
        everything: also read the fan, links, topology and so on.

    Raises:
        OptionError: there are no engines, or not these.
        DeviceNotFound: a device that none of them has.
    """
    return _query(engines, timeout, "gpuinfo", {"names": devices, "processes": processes, "everything": everything})


def devices(
    *devices: str, engines: str = connection.PX, timeout: float = QUERY_TIMEOUT, minimum: int = 0, sort: str = "size",
    by: str | None = None, limit: int | None = 20,
) -> ClusterReport:  # fmt: skip
    """Return the live tensors of all engines, a row a storage.

    Args:
        devices: only these, by each engine's own names.
        engines: ``"all"``, ``"0,2"``, ``"1:3"``; those of `%%px` without.
        timeout: seconds to wait; engines that have not answered by then are told of.
        minimum: only storages of at least this many bytes.
        sort: ``"size"``, ``"name"``, ``"device"``, ``"dtype"`` or ``"kind"``.
        by: show totals by ``"device"``, ``"dtype"``, ``"kind"`` or ``"holder"`` instead of rows.
        limit: how many rows to show; the report has all.

    Raises:
        OptionError: there are no engines, or not these.
        DeviceNotFound: a device that none of them has.
    """
    wanted = {"names": devices, "minimum": minimum, "sort": sort}
    return _query(engines, timeout, "devices", wanted, limit=limit, group_by=by)


class GpuPoller:
    """Looks at the GPUs of all engines again and again; of one that is busy, its last answer stays, with its age.

    Args:
        devices: as for `gpuinfo`, and so are the others.
    """

    def __init__(self, *devices: str, engines: str, timeout: float, processes: bool) -> None:
        self._arguments = {"names": devices, "processes": processes, "everything": False}
        self._engines, self._timeout = engines, timeout
        self._last: dict[int | str, tuple[float, EngineAnswer]] = {}

    def __call__(self) -> ClusterReport:
        """Return the engines as they are now."""
        now = time.monotonic()
        timeout = self._timeout if self._last else QUERY_TIMEOUT  # at first engines import what they need
        report = _query(self._engines, timeout, "gpuinfo", self._arguments, in_turn=True)
        self._last.update((answer.engine, (now, answer)) for answer in report.engines if answer.report is not None)
        return replace(report, engines=tuple(self._kept(answer, now) for answer in report.engines))

    def _kept(self, answer: EngineAnswer, now: float) -> EngineAnswer:
        if answer.report is not None or answer.engine not in self._last or answer.state == "dead":
            return answer
        then, last = self._last[answer.engine]
        detail = f"{answer.detail}; its figures are from {now - then:.0f} s ago"
        return replace(answer, report=last.report, detail=detail)


def _query(
    engines: str, timeout: float, errand: str, arguments: Mapping[str, object],
    limit: int | None = 20, group_by: str | None = None, in_turn: bool = False,
) -> ClusterReport:  # fmt: skip
    asked = connection.connect(engines)
    started = time.perf_counter()
    answers = transport.ask_all(asked, (errand, arguments), timeout, in_turn=in_turn)
    _check_devices(answers)
    return ClusterReport(errand, answers, time.perf_counter() - started, limit, group_by)


def _check_devices(answers: Sequence[EngineAnswer]) -> None:
    """Raise what all engines say of a device that none of them has: then it is the line that is wrong."""
    refused = [answer.detail for answer in answers if answer.detail.startswith(_NO_DEVICE)]
    if refused and len(refused) == len(answers):
        raise DeviceNotFound(f"on the engines: {refused[0].removeprefix(_NO_DEVICE)}")


_NO_DEVICE = "DeviceNotFound: "
