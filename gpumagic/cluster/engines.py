"""What `--engines` does: which engines are meant, what is asked of each, and a magic on all of them.

A line magic asks each engine for its report. A cell is run by the engines, each under its own magic, which keeps its
report until it is collected; outputs are shown as `%%px` shows them, and no engine starts before all are ready.

An engine runs one thing at a time: in a cell of its own it cannot answer. A request that it has not begun when the
time is up is cancelled, so that it does not run later.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from gpumagic import _compat, notebook, simgpu
from gpumagic.cluster.report import ANSWERED, ClusterReport, EngineAnswer
from gpumagic.errors import DeviceNotFound, OptionError
from gpumagic.memory import allocator
from gpumagic.memory.devices import Device, resolve
from gpumagic.options import PARSERS
from gpumagic.report.base import current_origin, grouped

PX = "px"
"""The engines that `%%px` goes to, which `%pxconfig --targets` changes."""
_selected: Any = None


def use(client_or_view: Any = None) -> None:
    """Select the ipyparallel client or view that `--engines` uses; without one, that of `%%px` again."""
    global _selected  # noqa: PLW0603  # one for the session, as of `%%px`
    _selected = client_or_view


def connect(targets: str = PX) -> tuple[Any, list[int]]:
    """Return the client and the numbers of its engines for a value of `--engines`.

    Args:
        targets: ``"all"``, numbers such as ``"0,2"``, a slice such as ``"1:3"``, or ``"px"``.

    Raises:
        OptionError: there is no client, it is closed, it has no engines, or an engine was never there.
    """
    source = _selected if _selected is not None else _view_of_px()
    client = getattr(source, "client", source)
    if client is None or client._closed:
        raise OptionError(
            "no engines: connect an ipyparallel client (rc = ipyparallel.Cluster(n=4).start_and_connect_sync()), "
            "or choose one with gpumagic.cluster.use(rc)"
        )
    known = list(client.ids)
    if not known:
        raise OptionError(
            "the client has no engines; start some, such as with cluster.start_engines_sync(n=4)"
        )
    of_px = getattr(source, "targets", "all")
    if targets == PX and of_px not in (None, "all"):
        return client, [of_px] if isinstance(of_px, int) else list(
            of_px
        )  # those that are gone too
    wanted = _chosen(targets, known)
    missing = [str(engine) for engine in wanted if engine not in known]
    if missing or not wanted:
        lacking = missing[0] if missing else targets
        raise OptionError(
            f"there is no engine {lacking}; there are {', '.join(map(str, known))}, which --engines all asks"
        )
    return client, wanted


def _view_of_px() -> Any:
    """Return the view that `%%px` uses, or None."""
    shell = notebook.shell()
    if shell is None:
        return None
    magic = shell.find_cell_magic("px")
    return getattr(getattr(magic, "__self__", None), "view", None)


def _chosen(targets: str, known: list[int]) -> list[int]:
    """Return the engines that a value of `--engines` names."""
    if targets in (PX, "all"):
        return known
    if ":" in targets:
        bounds = [int(part) if part else None for part in targets.split(":")]
        return known[slice(*bounds)]
    return [int(part) for part in targets.split(",")]


# ---- What an engine does


def answer(request: str, arguments: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Call one of the functions below with plain data, and return the fields of an `EngineAnswer`.

    Args:
        request: the name of the function.
        arguments: its keyword arguments.
        version: the gpumagic of the client; nothing is called in another version.
    """
    here = _compat.installed_version()
    if here != version:
        return {
            "state": "other version",
            "detail": f"gpumagic {here} there, {_same(version)}",
        }
    fields: dict[str, Any] = {"origin": current_origin()}
    try:
        fields["report"] = globals()[f"answer_{request}"](**arguments)
    except Exception as error:  # reported by the client
        fields["state"] = "failed"
        fields["detail"] = f"{type(error).__name__}: {error}"
        if isinstance(error, DeviceNotFound):
            fields["no_device"] = str(error)
    return fields


def _same(version: str) -> str:
    return (
        f"{version} here: install the same in its environment, and restart the engine"
    )


def answer_gpuinfo(
    names: Sequence[str], *, processes: bool, everything: bool
) -> object:
    """Return the GPUs of this engine; simulated ones too, where its environment asks for them."""
    from gpumagic.gpus import probe

    simgpu.enable_from_environment()
    return probe.read_gpus(names, processes=processes, everything=everything)


def answer_devices(
    names: Sequence[str], *, by: str | None, limit: int | None
) -> object:
    """Return the live tensors of this engine, under the names of its notebook."""
    from gpumagic.tensors import scan

    simgpu.enable_from_environment()
    shell = notebook.shell()
    only = [resolve(name) for name in names]
    return scan.scan(
        notebook.user_variables(shell),
        devices=only,
        group_by=by,
        limit=limit,
        shell=shell,
    )


def answer_prepare(device: str | None, fallback: str | None) -> list[str]:
    """Load the extension for a cell, and return the devices that it may run on, which have its local rank."""
    shell = notebook.shell()
    if shell is None:
        raise OptionError("this engine runs no IPython")
    if shell.find_line_magic("oomguard") is None:
        shell.extension_manager.load_extension("gpumagic")
    if device is None:
        return [""]
    alike: list[str] = []
    for name in allocator.accelerators():
        if device in ("auto", "gpu", Device.parse(name).backend):
            alike.append(name)
    return alike or [resolve(device, fallback)]


REPORT_NAME = "_gpumagic_report"
"""The variable in which an engine keeps the report of a cell until it is collected."""


def answer_collect() -> object:
    """Return the report that a cell left in a variable."""
    shell = notebook.shell()
    assert shell is not None
    shell.user_ns_hidden.pop(REPORT_NAME, None)
    return shell.user_ns.pop(REPORT_NAME, None)


# ---- Asking them

_ENGINE_CODE = (
    "__import__('gpumagic.cluster.engines', fromlist=['answer']).answer(*request)"
)
"""Run by `eval` in the engine, with names of its own: functions travel as bytecode, which another Python has not."""
_REPLY_TIMEOUT = 1.0
"""Seconds to wait for the engines' threads that cancel requests."""


def ask(
    client: Any,
    engines: Sequence[int],
    timeout: float,
    request: str,
    **arguments: object,
) -> list[EngineAnswer]:
    """Return what each engine answered to a request, in their order; ``timeout`` is in seconds, for the slowest."""
    names = {"request": (request, arguments, _compat.installed_version())}
    asked: dict[int, Any] = {}
    for engine in engines:
        if engine in client.ids:
            asked[engine] = client.send_apply_request(
                client._mux_stream,
                eval,
                (_ENGINE_CODE, names),
                ident=client._engines[engine].encode(),
            )
    try:
        wait(asked.values(), timeout=timeout)
    finally:  # also after Ctrl-C
        late = [engine for engine, future in asked.items() if not future.done()]
        alive = [engine for engine in late if engine in client.ids]
        if alive:  # a thread of each engine takes the requests back
            messages = [asked[engine].msg_id for engine in late]
            wait(
                [client.abort(messages, targets=alive, block=False)],
                timeout=_REPLY_TIMEOUT,
            )
    answers: list[EngineAnswer] = []
    for engine in engines:
        if engine not in asked:
            answers.append(EngineAnswer(engine, state="dead", detail="it is gone"))
        elif engine in late:
            detail = (
                f"no answer within {timeout:g} s: it is in a cell, or cannot be reached"
            )
            answers.append(EngineAnswer(engine, state="busy", detail=detail))
        else:
            answers.append(_read_answer(engine, asked[engine].result()))
    return answers


def _read_answer(engine: int, reply: Any) -> EngineAnswer:
    """Return the answer in an engine's reply."""
    if not isinstance(reply, BaseException):
        return EngineAnswer(engine, **reply)
    kind = getattr(reply, "ename", type(reply).__name__)
    text = getattr(reply, "evalue", str(reply))
    if kind == "EngineError":
        return EngineAnswer(engine, state="dead", detail="it died before it answered")
    # Another version may lack the module that is asked.
    if kind == "ModuleNotFoundError" and "'gpumagic" in text:
        state = "no gpumagic" if "'gpumagic'" in text else "other version"
        detail = f"{text} there, {_same(_compat.installed_version())}"
        return EngineAnswer(engine, state=state, detail=detail)
    return EngineAnswer(engine, state="failed", detail=f"{kind}: {text}")


def _check_options(magic: str, options: Namespace, alternative: str) -> None:
    """Raise `OptionError` for an option that is about one process."""
    for name in PARSERS[magic].refused:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} is about one process: {alternative}{magic} {option} has each engine answer for itself"
            )


# ---- Line magics


def of_line(magic: str, options: Namespace, timeout: float) -> ClusterReport:
    """Return the report of all engines that a line with `--engines` asks for; one that is late is listed as such.

    Raises:
        OptionError: there are no engines, or not these; or an option is about one process.
        DeviceNotFound: a device that no engine has.
    """
    _check_options(magic, options, "%px %")
    if magic == "devices":
        arguments = {"by": options.by, "limit": options.n}
    else:
        arguments = {"processes": options.processes, "everything": options.all}
    client, engines = connect(options.engines)
    answers = ask(client, engines, timeout, magic, names=options.devices, **arguments)
    if answers and all(
        answer.no_device for answer in answers
    ):  # the line itself is wrong
        raise DeviceNotFound(f"on the engines: {answers[0].no_device}")
    return ClusterReport(magic, tuple(answers))


# ---- Cell magics

OUT_OF_MEMORY = "out of memory"
_INTERRUPT_TIMEOUT = 10.0
"""Seconds that engines have to end their cells after an interrupt."""
_CHECK_INTERVAL = 0.5
"""Seconds after which a wait for engines looks for an interrupt: one that comes just before it is not seen in it."""


def of_cell(
    magic: str,
    options: Namespace,
    body: str | None,
    timeout: float,
    show: Callable[[ClusterReport], object],
    device: str | None = None,
) -> Callable[[], None]:
    """Return what runs a cell on the engines: all have answered, and each has its device.

    Args:
        magic: ``"ondevice"`` or ``"oomguard"``.
        options: of its line.
        body: the cell below; None where there is none.
        timeout: seconds to wait until the engines are ready.
        show: called with the report when the cell has ended.
        device: the device of `%%ondevice`; one without a number is dealt out to the engines of a host.

    Raises:
        OptionError: there is no cell, an option is about one process, or an engine cannot run the cell or has no such
            device. Then it runs on no engine.
    """
    if body is None:
        raise OptionError(
            f"--engines takes all of a cell: write %%{magic} on its first line"
        )
    _check_options(magic, options, "%%px, and below it %%")
    client, engines = connect(options.engines)
    ready = ask(
        client,
        engines,
        timeout,
        "prepare",
        device=device,
        fallback=getattr(options, "fallback", None),
    )
    able = ",".join(str(answer.engine) for answer in ready if answer.state == ANSWERED)
    for answer in ready:
        if answer.state != ANSWERED:
            where = f"engine {answer.engine}: {answer.state}, {answer.detail}"
            remedy = f"; without it: --engines {able}" if able else ""
            raise OptionError(f"the cell ran nowhere: {where}{remedy}")
    words: list[str] = []
    for name in PARSERS[magic].forwarded:
        value = getattr(options, name)
        if value:
            words.append(_word(name, value))
    line = " ".join([*words, f"-q -o {REPORT_NAME}"])
    code: dict[int, str] = {}
    for engine, own_device in assign_devices(ready).items():
        code[engine] = f"%%{magic} {own_device} {line}\n{body}"

    def run() -> None:
        __tracebackhide__ = True
        sent, is_interrupted = _run(client, code)
        ended = [engine for engine, cell in sent.items() if cell.done()]
        collected = ask(client, ended, timeout, "collect")
        answers = {int(answer.engine): answer for answer in collected}
        outcomes = [
            _outcome(engine, cell, answers.get(engine)) for engine, cell in sent.items()
        ]
        report = ClusterReport(magic, tuple(outcomes))
        show(report)
        if is_interrupted:
            raise KeyboardInterrupt
        _raise(sent, report, keep_going=getattr(options, "keep_going", False))

    return run


def _word(name: str, value: object) -> str:
    """Return an option as it is typed."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    if isinstance(value, list):
        value = ",".join(value)
    return f"{option}={value}"


def assign_devices(ready: Sequence[EngineAnswer]) -> dict[int, str]:
    """Return the device of each engine: of those that it may have, the one of its number on its host.

    That number is the launcher's where the host's engines have one each, and else their order: engines that a batch
    script starts without a launcher all inherit the script's own.
    """
    devices: dict[int, str] = {}
    for engines in grouped((answer.origin.host, answer) for answer in ready).values():
        ranks = [answer.origin.local_rank for answer in engines]
        is_told = None not in ranks and len(set(ranks)) == len(ranks)
        for place, answer in enumerate(engines):
            rank = answer.origin.local_rank if is_told else place
            possible = answer.report
            devices[int(answer.engine)] = possible[(rank or 0) % len(possible)]
    return devices


def _run(client: Any, code: Mapping[int, str]) -> tuple[dict[int, Any], bool]:
    """Run what each engine has to run, and return what each was sent, and whether Ctrl-C interrupted it."""
    sent: dict[int, Any] = {}
    with ExitStack() as streams:  # labelled as `%%px` labels outputs
        try:
            for engine, text in code.items():
                sent[engine] = client[engine].execute(text, silent=False, block=False)
                streams.enter_context(sent[engine].stream_output())
            for cell in sent.values():
                while not (
                    cell.wait(_CHECK_INTERVAL) and cell.wait_for_output(_CHECK_INTERVAL)
                ):
                    pass
        except KeyboardInterrupt:
            if not sent:
                raise
            _interrupt(client, sent)
            return sent, True
    return sent, False


def _interrupt(client: Any, sent: Mapping[int, Any]) -> None:
    """Cancel the cells that have not begun and interrupt the others, each once: nothing heeds what comes before."""

    def is_running(engine: int) -> bool:
        return engine in client.ids and not sent[engine].done()

    def has_begun(engine: int) -> bool:
        return bool(client.metadata[sent[engine].msg_ids[0]]["execute_input"])

    running = list(filter(is_running, sent))
    if running:
        messages: list[str] = []
        for engine in running:
            messages += sent[engine].msg_ids
        client.abort(messages, running, block=False)
    interrupted: set[int] = set()
    deadline = time.monotonic() + _INTERRUPT_TIMEOUT
    while running and time.monotonic() < deadline:
        begun = set(filter(has_begun, running))
        if begun - interrupted:
            client.send_signal(
                "SIGINT", targets=sorted(begun - interrupted), block=False
            )
        interrupted |= begun
        sent[running[0]].wait(_CHECK_INTERVAL)
        running = list(filter(is_running, running))


def _raise(sent: Mapping[int, Any], report: ClusterReport, *, keep_going: bool) -> None:
    """Raise what `%%px` would, or `OutOfMemory` where nothing else went wrong."""
    __tracebackhide__ = True
    from ipyparallel import error

    shortages: list[str] = []
    failed: list[Any] = []
    for answer in report.engines:
        if answer.state == OUT_OF_MEMORY:
            shortages.append(
                f"engine {answer.engine} ran out of memory: {answer.detail}"
            )
        elif answer.state != ANSWERED:
            failed.append(sent[int(answer.engine)])
    if failed:
        try:
            error.collect_exceptions(
                [cell.exception() for cell in failed], f"%%{report.magic}"
            )
        except error.CompositeError as several:
            # ipyparallel streams no error that came before it listened, and none of a dead engine.
            if all(cell._streamed_errors for cell in failed):
                raise error.AlreadyDisplayedError(several) from None
            raise
    if shortages and not keep_going:
        from gpumagic.oom.guard import raise_alone
        from gpumagic.oom.recognition import OutOfMemory

        raise_alone(OutOfMemory("; ".join(shortages)))


def _outcome(engine: int, sent: Any, answer: EngineAnswer | None) -> EngineAnswer:
    """Return how an engine's cell ended, with the report that it left."""
    if answer is None:
        return EngineAnswer(
            engine, state="interrupted", detail="but its cell is still running"
        )
    if answer.state != ANSWERED:
        return answer
    report = answer.report
    error = sent.exception()
    if type(report).__name__ == "OomReport" and not report.recovered:
        line = f" in line {report.line}" if report.line is not None else ""
        return replace(
            answer, state=OUT_OF_MEMORY, detail=f"{report.device or 'the host'}{line}"
        )
    if error is None:
        return answer
    name = getattr(error, "ename", type(error).__name__)
    value = getattr(error, "evalue", str(error))
    if name in {"KeyboardInterrupt", "TaskAborted"}:
        return replace(answer, state="interrupted")
    return replace(answer, state="raised", detail=f"{name}: {value}")
