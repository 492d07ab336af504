"""A cell under `%%ondevice --engines` or `%%oomguard --engines`: run by the engines, reported as one.

Each engine runs the cell under its own magic, as IPython there runs any cell, and keeps its report until it is
collected. Outputs are shown as `%%px` shows them. No engine starts before all engines are ready.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from gpumagic.cluster.connection import Connection, ask_all, ask_each, assign_devices, check_options, connect
from gpumagic.cluster.report import ANSWERED, ClusterReport, EngineAnswer, engines_label
from gpumagic.errors import OptionError
from gpumagic.options import parser

REPORT_NAME = "_gpumagic_report"
"""The variable in which an engine keeps its report until it is collected."""
OUT_OF_MEMORY = "out of memory"
_INTERRUPT_TIMEOUT = 10.0
"""Seconds that engines have to end their cells after an interrupt."""
_CHECK_INTERVAL = 0.5
"""Seconds after which a wait for engines looks for an interrupt."""


def prepare(magic: str, options: Namespace, body: str | None, timeout: float, device: str | None = None) -> EngineCell:
    """Return a cell ready to run: all engines have answered, and each has its device.

    Args:
        magic: ``"ondevice"`` or ``"oomguard"``.
        options: of its line.
        body: the cell below; None where there is none.
        timeout: seconds to wait until the engines are ready.
        device: the device of `%%ondevice`, as `assign_devices` takes it.

    Raises:
        OptionError: there is no cell, an option is about one process, or an engine cannot run the cell or has no such
            device. Then it runs on no engine.
    """
    if body is None:
        raise OptionError(f"--engines takes all of a cell: write %%{magic} on its first line")
    check_options(magic, options, "%%px, and below it %%")
    line = " ".join(word for name in parser(magic).forwarded for word in _words(name, getattr(options, name)))
    connection = connect(options.engines, gone=False)
    ready = ask_all(connection, ("prepare", {}), timeout)
    try:
        _check(ready)
        lines = dict.fromkeys(connection.engines, line)
        if device is not None:
            origins = {int(answer.engine): answer.origin for answer in ready}
            wanted = {
                engine: ("resolve_device", {"name": name, "fallback": options.fallback, "local_rank": local_rank})
                for engine, (name, local_rank) in assign_devices(device, origins).items()
            }
            resolved = ask_each(connection, wanted, timeout)
            _check(resolved)
            lines = {int(answer.engine): f"{answer.report} {line}" for answer in resolved}
    except OptionError:
        able = tuple(int(answer.engine) for answer in ready if answer.state == ANSWERED)
        ask_all(replace(connection, engines=able), ("collect", {"name": REPORT_NAME}), timeout)
        raise
    return EngineCell(connection, magic, lines, body, timeout, magic == "oomguard" and options.keep_going)


def _words(name: str, value: object) -> list[str]:
    """Return an option as it is typed; nothing where it is not given."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    return [f"{option}={','.join(value) if isinstance(value, list) else value}"] if value else []


def _check(answers: Sequence[EngineAnswer]) -> None:
    for answer in answers:
        if answer.state != ANSWERED:
            others = ",".join(str(each.engine) for each in answers if each.state == ANSWERED)
            leave = f"; without it: --engines {others}" if others else ""
            raise OptionError(
                f"the cell ran nowhere: {engines_label([answer]).lower()}: {answer.state}, {answer.detail}{leave}"
            )


@dataclass(frozen=True)
class EngineCell:
    """A cell ready to run on engines."""

    connection: Connection
    magic: str
    lines: Mapping[int, str]
    """The line of the magic for each engine, without its name."""
    body: str
    timeout: float
    keep_going: bool = False

    def run(self, show: Callable[[ClusterReport], object]) -> None:
        """Run it, pass the report to ``show``, and raise what the engines' cells raised.

        Raises:
            OutOfMemory: engines ran out of memory, nothing else went wrong, and ``keep_going`` is not set.
            KeyboardInterrupt: after the engines were interrupted.
        """
        __tracebackhide__ = True
        from ipyparallel import AsyncResult

        started, interrupted = time.perf_counter(), False
        sent: dict[int, Any] = {}
        try:
            for engine, line in self.lines.items():
                sent[engine] = self._send(engine, line)
        except KeyboardInterrupt:  # the first may run by then
            if not sent:
                raise
            interrupted = True
            self._interrupt(sent)
        outputs = AsyncResult(self.connection.client, list(sent.values()), fname="", targets=list(sent))
        with outputs.stream_output():  # labelled as `%%px` labels outputs
            try:
                awaited = [*sent.values(), *(future.output for future in sent.values())]
                # A signal that comes just before a lock is waited for is not seen until that wait ends.
                while not interrupted and wait(awaited, timeout=_CHECK_INTERVAL).not_done:
                    pass
            except KeyboardInterrupt:
                interrupted = True
                self._interrupt(sent)
        report = self._report(sent, time.perf_counter() - started)
        show(report)
        if interrupted:
            raise KeyboardInterrupt
        self._raise(sent, report, outputs)

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
        answers = ask_all(ended, ("collect", {"name": REPORT_NAME}), self.timeout)
        ready = {answer.engine: _with_outcome(answer, sent[int(answer.engine)].result()) for answer in answers}
        running = EngineAnswer(-1, state="interrupted", detail="but its cell is still running")
        found = [ready.get(engine) or replace(running, engine=engine) for engine in sent]
        return ClusterReport(self.magic, tuple(found), elapsed)

    def _raise(self, sent: Mapping[int, Any], report: ClusterReport, outputs: Any) -> None:
        """Raise what `%%px` would, or `OutOfMemory` where nothing else went wrong."""
        __tracebackhide__ = True
        states = {answer.engine: answer.state for answer in report.engines}
        out = [answer for answer in report.engines if answer.state == OUT_OF_MEMORY]
        others = [future for engine, future in sent.items() if states[engine] not in (ANSWERED, OUT_OF_MEMORY)]
        if others:
            # ipyparallel streams no error that came before it listened, and none of a dead engine.
            _raise_as_px(others, f"%%{self.magic}", shown=outputs._streamed_errors >= len(others))
        if out and not self.keep_going:
            from gpumagic.oom.guard import raise_alone
            from gpumagic.oom.recognition import OutOfMemory

            parts = [f"engine {answer.engine} ran out of memory: {answer.detail}" for answer in out]
            raise_alone(OutOfMemory("; ".join(parts)))


def _with_outcome(answer: EngineAnswer, result: object) -> EngineAnswer:
    """Return an engine's answer with how its cell ended."""
    report = answer.report
    if answer.state != ANSWERED:
        return answer
    if type(report).__name__ == "OomReport" and not report.recovered:
        line = f" in line {report.line}" if report.line is not None else ""
        return replace(answer, state=OUT_OF_MEMORY, detail=f"{report.device or 'the host'}{line}")
    if not isinstance(result, BaseException):
        return answer
    name, value = getattr(result, "ename", type(result).__name__), getattr(result, "evalue", str(result))
    if name in {"KeyboardInterrupt", "TaskAborted"}:
        return replace(answer, state="interrupted")
    return replace(answer, state="raised", detail=f"{name}: {value}")


def _raise_as_px(futures: Sequence[Any], name: str, *, shown: bool) -> NoReturn:
    """Raise the errors of engines, in short where all of them have been shown already."""
    __tracebackhide__ = True
    from ipyparallel import error

    try:
        error.collect_exceptions([future.result() for future in futures], name)
    except error.CompositeError as several:
        if shown:
            raise error.AlreadyDisplayedError(several) from None
        raise
    raise AssertionError("none of them failed")
