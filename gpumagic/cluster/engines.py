"""What `--engines` does: which engines are meant, what is asked of each, and a magic on all of them.

A line magic asks each engine for its report. A cell is run by the engines, each under its own magic, which keeps its
report until it is collected; outputs are shown as `%%px` shows them, and no engine starts before all are ready.

An engine runs one thing at a time: in a cell of its own it cannot answer. A request that it has not begun when the
time is up is cancelled, so that it does not run later.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    source = _selected
    if source is None and (shell := notebook.shell()) is not None:
        source = getattr(getattr(shell.find_cell_magic("px"), "__self__", None), "view", None)
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
        return client, [of_px] if isinstance(of_px, int) else list(of_px)  # those that are gone too
    if targets in (PX, "all"):
        wanted = known
    elif ":" in targets:
        wanted = known[slice(*(int(part) if part else None for part in targets.split(":")))]
    else:
        wanted = [int(part) for part in targets.split(",")]
    missing = [str(engine) for engine in wanted if engine not in known]
    if missing or not wanted:
        lacking = missing[0] if missing else targets
        raise OptionError(
            f"there is no engine {lacking}; there are {', '.join(map(str, known))}, which --engines all asks"
        )
    return client, wanted


# ---- What an engine does


def answer(request: str, arguments: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Call one of the functions below with plain data, and return the fields of an `EngineAnswer`.

    Args:
        request: the name of the function.
        arguments: its keyword arguments.
        version: the gpumagic of the client; nothing is called in another version.
    """
    if (here := _compat.installed_version()) != version:
        return {"state": "other version", "detail": f"gpumagic {here} there, {_same(version)}"}
    found: dict[str, Any] = {"origin": current_origin()}
    try:
        return {**found, "report": globals()[f"answer_{request}"](**arguments)}
    except Exception as error:  # reported by the client
        return {**found, "state": "failed", "detail": f"{type(error).__name__}: {error}"}


def _same(version: str) -> str:
    return f"{version} here: install the same in its environment, and restart the engine"


def answer_gpuinfo(names: Sequence[str], *, processes: bool, everything: bool) -> object:
    """Return the GPUs of this engine; simulated ones too, where its environment asks for them."""
    from gpumagic.gpus import probe

    simgpu.enable_from_environment()
    return probe.read_gpus(names, processes=processes, everything=everything)


def answer_devices(names: Sequence[str], *, by: str | None, limit: int | None) -> object:
    """Return the live tensors of this engine, under the names of its notebook."""
    from gpumagic.tensors import scan

    simgpu.enable_from_environment()
    shell = notebook.shell()
    only = [resolve(name) for name in names]
    return scan.scan(
        notebook.user_variables(shell), devices=only, group_by=by, limit=limit, shell=shell
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
    alike = [
        each
        for each in allocator.accelerators()
        if device in ("auto", "gpu", Device.parse(each).backend)
    ]
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

_ENGINE_CODE = "__import__('gpumagic.cluster.engines', fromlist=['answer']).answer(*request)"
"""Run by `eval` in the engine, with names of its own: functions travel as bytecode, which another Python has not."""
_REPLY_TIMEOUT = 1.0
"""Seconds to wait for the engines' threads that cancel requests."""


def ask(
    client: Any, engines: Iterable[int], timeout: float, request: str, **arguments: object
) -> list[EngineAnswer]:
    """Return what each engine answered to a request, in their order; ``timeout`` is in seconds, for the slowest."""
    names = {"request": (request, arguments, _compat.installed_version())}
    asked = {
        engine: client.send_apply_request(
            client._mux_stream, eval, (_ENGINE_CODE, names), ident=client._engines[engine].encode()
        )
        for engine in engines
        if engine in client.ids
    }
    late: list[int] = []
    try:
        wait(asked.values(), timeout=timeout)
    finally:  # also after Ctrl-C
        late = [engine for engine, future in asked.items() if not future.done()]
        if alive := [engine for engine in late if engine in client.ids]:
            messages = [
                asked[engine].msg_id for engine in late
            ]  # a thread of the engine takes them back
            wait([client.abort(messages, targets=alive, block=False)], timeout=_REPLY_TIMEOUT)
    busy = {
        "state": "busy",
        "detail": f"no answer within {timeout:g} s: it is in a cell, or cannot be reached",
    }
    facts = {
        engine: busy if engine in late else future.result() for engine, future in asked.items()
    }
    gone = {"state": "dead", "detail": "it is gone"}
    return [_read_answer(engine, facts.get(engine, gone)) for engine in engines]


def _read_answer(engine: int, facts: Any) -> EngineAnswer:
    """Return the answer in an engine's reply."""
    if isinstance(facts, BaseException):
        kind, text = (
            getattr(facts, "ename", type(facts).__name__),
            getattr(facts, "evalue", str(facts)),
        )
        if kind == "EngineError":
            return EngineAnswer(engine, state="dead", detail="it died before it answered")
        if (
            kind == "ModuleNotFoundError" and "'gpumagic" in text
        ):  # other versions may lack the module that is asked
            state = "no gpumagic" if "'gpumagic'" in text else "other version"
            return EngineAnswer(
                engine, state=state, detail=f"{text} there, {_same(_compat.installed_version())}"
            )
        return EngineAnswer(engine, state="failed", detail=f"{kind}: {text}")
    return EngineAnswer(engine, **facts)


def _check_options(magic: str, options: Namespace, alternative: str) -> None:
    """Raise `OptionError` for an option that is about one process."""
    for name in PARSERS[magic].refused:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} is about one process: {alternative}{magic} {option} has each engine answer for itself"
            )


# ---- Line magics

_NO_DEVICE = "DeviceNotFound: "


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
        each.detail.startswith(_NO_DEVICE) for each in answers
    ):  # the line itself is wrong
        raise DeviceNotFound(f"on the engines: {answers[0].detail.removeprefix(_NO_DEVICE)}")
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
        raise OptionError(f"--engines takes all of a cell: write %%{magic} on its first line")
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
    able = ",".join(str(each.engine) for each in ready if each.state == ANSWERED)
    for each in ready:
        if each.state != ANSWERED:
            leave = f"; without it: --engines {able}" if able else ""
            raise OptionError(
                f"the cell ran nowhere: engine {each.engine}: {each.state}, {each.detail}{leave}"
            )
    words = [
        _word(name, value) for name in PARSERS[magic].forwarded if (value := getattr(options, name))
    ]
    line = " ".join([*words, f"-q -o {REPORT_NAME}"])
    code = {
        engine: f"%%{magic} {own} {line}\n{body}" for engine, own in assign_devices(ready).items()
    }

    def run() -> None:
        __tracebackhide__ = True
        sent, is_interrupted = _run(client, code)
        ended = [engine for engine, each in sent.items() if each.done()]
        answers = {int(each.engine): each for each in ask(client, ended, timeout, "collect")}
        report = ClusterReport(
            magic, tuple(_outcome(engine, sent[engine], answers.get(engine)) for engine in sent)
        )
        show(report)
        if is_interrupted:
            raise KeyboardInterrupt
        _raise(sent, report, keep_going=getattr(options, "keep_going", False))

    return run


def _word(name: str, value: object) -> str:
    """Return an option as it is typed."""
    option = f"--{name.replace('_', '-')}"
    return (
        option
        if value is True
        else f"{option}={','.join(value) if isinstance(value, list) else value}"
    )


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


def _run(client: Any, code: Mapping[int, str]) -> tuple[dict[int, Any], bool]:
    """Run what each engine has to run, and return what each was sent, and whether Ctrl-C interrupted it."""
    sent: dict[int, Any] = {}
    with ExitStack() as streams:  # labelled as `%%px` labels outputs
        try:
            for engine, text in code.items():
                sent[engine] = client[engine].execute(text, silent=False, block=False)
                streams.enter_context(sent[engine].stream_output())
            for each in sent.values():
                while not (each.wait(_CHECK_INTERVAL) and each.wait_for_output(_CHECK_INTERVAL)):
                    pass
        except KeyboardInterrupt:
            if not sent:
                raise
            _interrupt(client, sent)
            return sent, True
    return sent, False


def _interrupt(client: Any, sent: Mapping[int, Any]) -> None:
    """Cancel the cells that have not begun and interrupt the others, each once: nothing heeds what comes before."""
    running = [engine for engine, each in sent.items() if engine in client.ids and not each.done()]
    if running:
        client.abort(
            [message for engine in running for message in sent[engine].msg_ids],
            running,
            block=False,
        )
    interrupted: set[int] = set()
    deadline = time.monotonic() + _INTERRUPT_TIMEOUT
    while running and time.monotonic() < deadline:
        begun = {
            engine
            for engine in running
            if client.metadata[sent[engine].msg_ids[0]]["execute_input"]
        }
        if begun - interrupted:
            client.send_signal("SIGINT", targets=sorted(begun - interrupted), block=False)
        interrupted |= begun
        sent[running[0]].wait(_CHECK_INTERVAL)
        running = [engine for engine in running if engine in client.ids and not sent[engine].done()]


def _raise(sent: Mapping[int, Any], report: ClusterReport, *, keep_going: bool) -> None:
    """Raise what `%%px` would, or `OutOfMemory` where nothing else went wrong."""
    __tracebackhide__ = True
    from ipyparallel import error

    out = [each for each in report.engines if each.state == OUT_OF_MEMORY]
    others = [
        sent[int(each.engine)]
        for each in report.engines
        if each.state not in (ANSWERED, OUT_OF_MEMORY)
    ]
    if others:
        try:
            error.collect_exceptions([each.exception() for each in others], f"%%{report.magic}")
        except error.CompositeError as several:
            # ipyparallel streams no error that came before it listened, and none of a dead engine.
            if all(each._streamed_errors for each in others):
                raise error.AlreadyDisplayedError(several) from None
            raise
    if out and not keep_going:
        from gpumagic.oom.guard import raise_alone
        from gpumagic.oom.recognition import OutOfMemory

        raise_alone(
            OutOfMemory(
                "; ".join(f"engine {each.engine} ran out of memory: {each.detail}" for each in out)
            )
        )


def _outcome(engine: int, sent: Any, answer: EngineAnswer | None) -> EngineAnswer:
    """Return how an engine's cell ended, with the report that it left."""
    if answer is None:
        return EngineAnswer(engine, state="interrupted", detail="but its cell is still running")
    report, error = answer.report, sent.exception()
    if answer.state != ANSWERED:
        return answer
    if type(report).__name__ == "OomReport" and not report.recovered:
        line = f" in line {report.line}" if report.line is not None else ""
        return replace(answer, state=OUT_OF_MEMORY, detail=f"{report.device or 'the host'}{line}")
    if error is None:
        return answer
    name, value = (
        getattr(error, "ename", type(error).__name__),
        getattr(error, "evalue", str(error)),
    )
    if name in {"KeyboardInterrupt", "TaskAborted"}:
        return replace(answer, state="interrupted")
    return replace(answer, state="raised", detail=f"{name}: {value}")
