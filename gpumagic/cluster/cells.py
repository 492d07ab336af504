"""A cell under `%%ondevice --engines` or `%%oomguard --engines`: run by the engines, reported as one.

Each engine runs the cell under its own magic, as IPython there runs any cell, and keeps its report until it is
collected. Outputs are shown as `%%px` shows them. No engine starts before all engines are ready.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from gpumagic.cluster.connection import ask, check_options, connect
from gpumagic.cluster.report import ANSWERED, ClusterReport, EngineAnswer
from gpumagic.errors import OptionError
from gpumagic.options import PARSERS
from gpumagic.report.base import grouped

REPORT_NAME = "_gpumagic_report"
"""The variable in which an engine keeps its report until it is collected."""
_COLLECT = "collect", {"name": REPORT_NAME}
OUT_OF_MEMORY = "out of memory"
_INTERRUPT_TIMEOUT = 10.0
"""Seconds that engines have to end their cells after an interrupt."""
_CHECK_INTERVAL = 0.5
"""Seconds after which a wait for engines looks for an interrupt: one that comes just before it is not seen in it."""


def prepare(magic: str, options: Namespace, body: str | None, timeout: float, device: str | None = None) -> EngineCell:
    """Return a cell ready to run: all engines have answered, and each has its device.

    Args:
        magic: ``"ondevice"`` or ``"oomguard"``.
        options: of its line.
        body: the cell below; None where there is none.
        timeout: seconds to wait until the engines are ready.
        device: the device of `%%ondevice`; one without a number is dealt out to the engines of a host.

    Raises:
        OptionError: there is no cell, an option is about one process, or an engine cannot run the cell or has no such
            device. Then it runs on no engine.
    """
    if body is None:
        raise OptionError(f"--engines takes all of a cell: write %%{magic} on its first line")
    check_options(magic, options, "%%px, and below it %%")
    client, engines = connect(options.engines)
    wanted = {"device": device, "fallback": getattr(options, "fallback", None)}
    ready = ask(client, dict.fromkeys(engines, ("prepare", wanted)), timeout)
    able = [int(each.engine) for each in ready if each.state == ANSWERED]
    for each in ready:
        if each.state != ANSWERED:
            ask(client, dict.fromkeys(able, _COLLECT), timeout)
            leave = f"; without it: --engines {','.join(map(str, able))}" if able else ""
            raise OptionError(f"the cell ran nowhere: engine {each.engine}: {each.state}, {each.detail}{leave}")
    devices = assign_devices(ready)
    words = [_word(name, value) for name in PARSERS[magic].forwarded if (value := getattr(options, name))]
    line = " ".join([*words, f"-q -o {REPORT_NAME}"])
    code = {engine: f"%%{magic} {own} {line}\n{body}" for engine, own in devices.items()}
    return EngineCell(client, magic, code, timeout, magic == "oomguard" and options.keep_going)


def _word(name: str, value: object) -> str:
    """Return an option as it is typed."""
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option}={','.join(value) if isinstance(value, list) else value}"


def assign_devices(ready: Sequence[EngineAnswer]) -> dict[int, str]:
    """Return the device of each engine: of those that it may have, the one of its number on its host.

    That number is the launcher's where the host's engines have one each, and else their order: engines that a batch
    script starts without a launcher all inherit the script's own.
    """
    found = {}
    for engines in grouped((each.origin.host, each) for each in ready).values():
        ranks = [each.origin.local_rank for each in engines]
        is_told = None not in ranks and len(set(ranks)) == len(ranks)
        for place, each in enumerate(engines):
            rank = each.origin.local_rank if is_told else place
            found[int(each.engine)] = each.report[(rank or 0) % len(each.report)]
    return found


@dataclass(frozen=True)
class EngineCell:
    """A cell ready to run on engines: its magic, and what each of them runs."""

    client: Any
    magic: str
    code: Mapping[int, str]
    timeout: float
    keep_going: bool = False

    def run(self, show: Callable[[ClusterReport], object]) -> None:
        """Run it, pass the report to ``show``, and raise what the engines' cells raised.

        Raises:
            OutOfMemory: engines ran out of memory, nothing else went wrong, and ``keep_going`` is not set.
            KeyboardInterrupt: after the engines were interrupted.
        """
        __tracebackhide__ = True
        interrupted = False
        sent: dict[int, Any] = {}
        with ExitStack() as streams:  # labelled as `%%px` labels outputs
            try:
                for engine, code in self.code.items():
                    sent[engine] = self.client[engine].execute(code, silent=False, block=False)
                    streams.enter_context(sent[engine].stream_output())
                for each in sent.values():
                    while not (each.wait(_CHECK_INTERVAL) and each.wait_for_output(_CHECK_INTERVAL)):
                        pass
            except KeyboardInterrupt:
                if not sent:
                    raise
                interrupted = True
                self._interrupt(sent)
        report = self._report(sent)
        show(report)
        if interrupted:
            raise KeyboardInterrupt
        self._raise(sent, report)

    def _interrupt(self, sent: Mapping[int, Any]) -> None:
        running = [engine for engine, each in sent.items() if engine in self.client.ids and not each.done()]
        if not running:
            return
        messages = [message for engine in running for message in sent[engine].msg_ids]
        self.client.abort(messages, targets=running, block=False)
        self.client.send_signal("SIGINT", targets=running, block=False)
        deadline = time.monotonic() + _INTERRUPT_TIMEOUT
        for engine in running:
            sent[engine].wait(max(0.0, deadline - time.monotonic()))

    def _report(self, sent: Mapping[int, Any]) -> ClusterReport:
        """Collect the reports of the engines whose cells have ended."""
        ended = [engine for engine, each in sent.items() if each.done()]
        answers = ask(self.client, dict.fromkeys(ended, _COLLECT), self.timeout)
        ready = {answer.engine: _with_outcome(answer, sent[int(answer.engine)].exception()) for answer in answers}
        running = EngineAnswer(-1, state="interrupted", detail="but its cell is still running")
        found = [ready.get(engine) or replace(running, engine=engine) for engine in sent]
        return ClusterReport(self.magic, tuple(found))

    def _raise(self, sent: Mapping[int, Any], report: ClusterReport) -> None:
        """Raise what `%%px` would, or `OutOfMemory` where nothing else went wrong."""
        __tracebackhide__ = True
        from ipyparallel import error

        states = {answer.engine: answer.state for answer in report.engines}
        out = [answer for answer in report.engines if answer.state == OUT_OF_MEMORY]
        others = [each for engine, each in sent.items() if states[engine] not in (ANSWERED, OUT_OF_MEMORY)]
        if others:
            try:
                error.collect_exceptions([each.exception() for each in others], f"%%{self.magic}")
            except error.CompositeError as several:
                # ipyparallel streams no error that came before it listened, and none of a dead engine.
                if all(each._streamed_errors for each in others):
                    raise error.AlreadyDisplayedError(several) from None
                raise
        if out and not self.keep_going:
            from gpumagic.oom.guard import raise_alone
            from gpumagic.oom.recognition import OutOfMemory

            parts = [f"engine {answer.engine} ran out of memory: {answer.detail}" for answer in out]
            raise_alone(OutOfMemory("; ".join(parts)))


def _with_outcome(answer: EngineAnswer, error: BaseException | None) -> EngineAnswer:
    """Return an engine's answer with how its cell ended."""
    report = answer.report
    if answer.state != ANSWERED:
        return answer
    if type(report).__name__ == "OomReport" and not report.recovered:
        line = f" in line {report.line}" if report.line is not None else ""
        return replace(answer, state=OUT_OF_MEMORY, detail=f"{report.device or 'the host'}{line}")
    if error is None:
        return answer
    name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    if name in {"KeyboardInterrupt", "TaskAborted"}:
        return replace(answer, state="interrupted")
    return replace(answer, state="raised", detail=f"{name}: {value}")
