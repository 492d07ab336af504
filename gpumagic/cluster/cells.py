"""A cell under `%%ondevice --engines` or `%%oomguard --engines`: run by the engines, reported as one.

Each engine runs it under its own magic, as IPython there runs any cell, and keeps its report until it is collected.
Outputs are shown as `%%px` shows them. No engine begins before all of them can.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from gpumagic.cluster import transport
from gpumagic.cluster.connection import Connection, EngineResources, assign_devices, connect
from gpumagic.cluster.report import ANSWERED, ClusterReport, EngineAnswer
from gpumagic.errors import OptionError

REPORT_NAME = "_gpumagic_report"
"""The variable in which an engine keeps its report until it is collected."""
_INTERRUPT_TIMEOUT = 10.0
"""Seconds that engines have to end their cells after an interrupt."""


@dataclass(frozen=True)
class EngineCell:
    """A cell ready to run on engines.

    Args:
        connection: where.
        magic: ``"ondevice"`` or ``"oomguard"``.
        lines: the line of the magic for each engine, without its name.
        body: the cell below it.
    """

    connection: Connection
    magic: str
    lines: Mapping[int, str]
    body: str
    timeout: float
    keep_going: bool = False

    def run(self, show: Callable[[ClusterReport], object]) -> None:
        """Run it, hand the report to ``show``, and raise what the engines' cells raised.

        Raises:
            OutOfMemory: engines ran out of memory, nothing else went wrong, and it is not to go on.
            KeyboardInterrupt: after the engines were interrupted.
        """
        __tracebackhide__ = True
        started = time.perf_counter()
        sent = {engine: self._send(engine, line) for engine, line in self.lines.items()}
        interrupted = False
        with _stream_output(self.connection.client, sent):
            try:
                wait([*sent.values(), *(future.output for future in sent.values())])
            except KeyboardInterrupt:
                interrupted = True
                self._interrupt(sent)
        report = self._report(sent, time.perf_counter() - started)
        show(report)
        if interrupted:
            raise KeyboardInterrupt
        self._raise(sent, report)

    def _send(self, engine: int, line: str) -> Any:
        client = self.connection.client
        code = f"%%{self.magic} {line} -q -o {REPORT_NAME}\n{self.body}"
        return client.send_execute_request(
            client._mux_stream, code, silent=False, ident=client._engines[engine].encode()
        )  # fmt: skip

    def _interrupt(self, sent: Mapping[int, Any]) -> None:
        running = [engine for engine, future in sent.items() if not future.done()]
        alive = [engine for engine in self.connection.alive if engine in running]
        if not alive:
            return
        client = self.connection.client
        client.abort([sent[engine].msg_id for engine in alive], targets=alive, block=False)
        client.send_signal("SIGINT", targets=alive, block=False)
        wait([sent[engine] for engine in alive], timeout=_INTERRUPT_TIMEOUT)

    def _report(self, sent: Mapping[int, Any], elapsed: float) -> ClusterReport:
        """Collect the reports of the engines whose cells have ended."""
        ended = replace(self.connection, engines=tuple(engine for engine, future in sent.items() if future.done()))
        answers = transport.ask_all(ended, ("collect", {"name": REPORT_NAME}), self.timeout)
        told = {answer.engine: _with_outcome(answer, sent[int(answer.engine)].result()) for answer in answers}
        going_on = EngineAnswer(-1, state="interrupted", detail="but its cell goes on")
        found = [told.get(engine) or replace(going_on, engine=engine) for engine in sent]
        return ClusterReport(self.magic, tuple(found), elapsed)

    def _raise(self, sent: Mapping[int, Any], report: ClusterReport) -> None:
        """Raise what `%%px` would, or that memory ran out where nothing else went wrong."""
        __tracebackhide__ = True
        states = {answer.engine: answer.state for answer in report.engines}
        out = [engine for engine in sent if states[engine] == OUT_OF_MEMORY]
        others = [future for engine, future in sent.items() if states[engine] not in (ANSWERED, OUT_OF_MEMORY)]
        if others:
            _raise_as_px(others, f"%%{self.magic}", shown="dead" not in states.values())
        if out and not self.keep_going:
            _raise_out_of_memory(report)


OUT_OF_MEMORY = "out of memory"


def prepare(
    magic: str,
    line: str,
    body: str,
    *,
    engines: str,
    timeout: float,
    device: str | None = None,
    fallback: str | None = None,
    keep_going: bool = False,
) -> EngineCell:
    """Return a cell ready to run: all engines have answered, and each has its device.

    Args:
        magic: ``"ondevice"`` or ``"oomguard"``.
        line: the options that each engine's own magic gets.
        body: the cell below.
        engines: which.
        timeout: seconds to wait for them to be ready.
        device: as `placement.place` takes it; None where the magic has none.
        fallback: the device for engines that have not that one.
        keep_going: whether out-of-memory fails nothing.

    Raises:
        OptionError: an engine cannot run it, or has no such device. Then no engine has.
    """
    connection = connect(engines, gone=False)
    ready = transport.ask_all(connection, ("prepare", {}), timeout)
    try:
        _check(ready)
        lines = dict.fromkeys(connection.engines, line)
        if device is not None:
            places = _resolve_devices(connection, assign_devices(device, _resources(ready)), fallback, timeout)
            lines = {engine: f"{places[engine]} {line}" for engine in places}
    except OptionError:
        able = tuple(int(answer.engine) for answer in ready if answer.state == ANSWERED)
        transport.ask_all(replace(connection, engines=able), ("collect", {"name": REPORT_NAME}), timeout)
        raise
    return EngineCell(connection, magic, lines, body, timeout, keep_going)


def _resources(answers: Sequence[EngineAnswer]) -> dict[int, EngineResources]:
    return {int(answer.engine): EngineResources(answer.origin, answer.report) for answer in answers}


def _resolve_devices(
    connection: Connection, places: Mapping[int, str], fallback: str | None, timeout: float
) -> dict[int, str]:
    """Return the full name of each engine's device, by what is there."""
    wanted = {engine: ("resolve_device", {"name": name, "fallback": fallback}) for engine, name in places.items()}
    found = transport.ask_each(connection, wanted, timeout)
    _check(found)
    return {int(answer.engine): answer.report for answer in found}


def _check(answers: Sequence[EngineAnswer]) -> None:
    from gpumagic.cluster.report import engines_label

    for answer in answers:
        if answer.state != ANSWERED:
            others = ",".join(str(each.engine) for each in answers if each.state == ANSWERED)
            leave = f"; without it: --engines {others}" if others else ""
            raise OptionError(
                f"the cell ran nowhere: {engines_label([answer]).lower()}: {answer.state}, {answer.detail}{leave}"
            )


def _with_outcome(answer: EngineAnswer, result: object) -> EngineAnswer:
    """Return an engine's answer with how its cell has ended."""
    if answer.state != ANSWERED:
        return answer
    if _is_out_of_memory(answer):
        return replace(answer, state=OUT_OF_MEMORY, detail=_place_of_failure(answer.report))
    if not isinstance(result, BaseException):
        return answer
    name, value = getattr(result, "ename", type(result).__name__), getattr(result, "evalue", str(result))
    if name in {"KeyboardInterrupt", "TaskAborted"}:
        return replace(answer, state="interrupted")
    return replace(answer, state="raised", detail=f"{name}: {value}")


def _is_out_of_memory(answer: EngineAnswer) -> bool:
    return type(answer.report).__name__ == "OomReport" and not getattr(answer.report, "recovered", False)


def _place_of_failure(report: Any) -> str:
    place = f" in line {report.line}" if report.line is not None else ""
    return f"{report.device or 'the host'}{place}"


@contextlib.contextmanager
def _stream_output(client: Any, sent: Mapping[int, Any]) -> Iterator[None]:
    """Show the outputs of engines as they come, labelled as `%%px` labels them."""
    with _async_result(client, sent).stream_output():
        yield


def _async_result(client: Any, sent: Mapping[int, Any], name: str = "") -> Any:
    from ipyparallel import AsyncResult

    return AsyncResult(client, list(sent.values()), fname=name, targets=list(sent))


def _raise_as_px(futures: Sequence[Any], name: str, *, shown: bool) -> NoReturn:
    """Raise the errors of engines, in short where the streaming has shown them; a dead engine shows nothing."""
    __tracebackhide__ = True
    from ipyparallel import error

    try:
        error.collect_exceptions([future.result() for future in futures], name)
    except error.CompositeError as several:
        if shown:
            raise error.AlreadyDisplayedError(several) from None
        raise
    raise AssertionError("none of them failed")


def _raise_out_of_memory(report: ClusterReport) -> NoReturn:
    __tracebackhide__ = True
    from gpumagic.oom.guard import raise_alone
    from gpumagic.oom.recognition import OutOfMemory

    out = [answer for answer in report.engines if answer.state == OUT_OF_MEMORY]
    raise_alone(OutOfMemory("; ".join(f"engine {answer.engine} ran out of memory: {answer.detail}" for answer in out)))
