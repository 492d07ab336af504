"""Which engines `--engines` means, what is asked of each, and what it does then; line magics on them.

An engine runs one thing at a time: in a cell of its own it cannot answer. A request that it has not begun when the
time is up is cancelled, so that it does not run later.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from gpumagic import _compat, notebook, simgpu
from gpumagic.cluster.report import ClusterReport, EngineAnswer
from gpumagic.errors import DeviceNotFound, OptionError
from gpumagic.memory import allocator
from gpumagic.memory.devices import Device, resolve
from gpumagic.options import PARSERS
from gpumagic.report.base import Origin  # the latter for engines

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
    if source is None:
        raise OptionError(
            "no engines: connect an ipyparallel client (rc = ipyparallel.Cluster(n=4).start_and_connect_sync()), "
            "or choose one with gpumagic.cluster.use(rc)"
        )
    client = getattr(source, "client", source)
    if client._closed:
        raise OptionError("the client of %px is closed: choose another with gpumagic.cluster.use(rc)")
    known = list(client.ids)
    if not known:
        raise OptionError("the client has no engines; start some, such as with cluster.start_engines_sync(n=4)")
    of_px = getattr(source, "targets", "all")
    if targets == PX and of_px not in (None, "all"):
        return client, [of_px] if isinstance(of_px, int) else list(of_px)  # those that are gone too
    if targets in (PX, "all"):
        wanted = known
    elif ":" in targets:
        wanted = known[slice(*(int(part) if part else None for part in targets.split(":")))]
    else:
        wanted = [int(part) for part in targets.split(",")]
    if missing := [engine for engine in wanted if engine not in known]:
        raise OptionError(
            f"there is no engine {missing[0]}; there are {', '.join(map(str, known))}, which --engines all asks"
        )
    return client, wanted


# ---- What an engine does

_LOADED_FOR_CELL = "gpumagic_of_engine_cell"


def answer(request: str, arguments: dict[str, Any], version: str) -> dict[str, Any]:
    """Call one of the functions below, and return the fields of an `EngineAnswer`, with any error.

    It is sent to the engine as text and stands alone: the engine may have no gpumagic, or another version.

    Args:
        request: the name of the function.
        arguments: its keyword arguments, plain data.
        version: the gpumagic of the client; nothing is called in another version.
    """
    import importlib
    import os
    import socket

    facts: dict[str, Any] = {"state": "answered", "origin": (socket.gethostname(), os.getpid())}
    try:
        here = importlib.import_module("gpumagic").__version__
    except ImportError:
        return {**facts, "state": "no gpumagic"}
    if here != version:
        return {**facts, "state": "other version", "detail": here}
    try:
        facts["origin"] = importlib.import_module("gpumagic.report.base").current_origin()
        ours = importlib.import_module("gpumagic.cluster.connection")
        facts["report"] = getattr(ours, f"answer_{request}")(**arguments)
    except Exception as error:  # reported by the client
        facts.update(state="failed", detail=f"{type(error).__name__}: {error}")
    return facts


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
    return scan.scan(notebook.user_variables(shell), devices=only, group_by=by, limit=limit, shell=shell)


def answer_prepare(device: str | None, fallback: str | None) -> list[str]:
    """Prepare for a cell under a cell magic, and return the devices that it may run on, which have its local rank."""
    shell = notebook.shell()
    if shell is None:
        raise OptionError("this engine runs no IPython")
    if shell.find_line_magic("oomguard") is None:
        shell.meta[_LOADED_FOR_CELL] = True
        shell.extension_manager.load_extension("gpumagic")
    if device is None:
        return [""]
    alike = [each for each in allocator.accelerators() if device in ("auto", "gpu", Device.parse(each).backend)]
    return alike or [resolve(device, fallback)]


def answer_collect(name: str) -> object:
    """Return the report that a cell left in a variable, and undo what was prepared."""
    shell = notebook.shell()
    assert shell is not None
    report = shell.user_ns.pop(name, None)
    shell.user_ns_hidden.pop(name, None)
    if shell.meta.pop(_LOADED_FOR_CELL, False):
        shell.extension_manager.unload_extension("gpumagic")
    return report


# ---- Asking them

_ENGINE_CODE = "exec(source) or answer(*request)"
"""Run by `eval` in the engine, with names of its own, so that the engine needs neither a module nor our bytecode."""
_REPLY_TIMEOUT = 1.0
"""Seconds to wait for the engines' threads that cancel requests."""

Request = tuple[str, Mapping[str, object]]
"""Which of the functions above, and its arguments."""


def ask(client: Any, requests: Mapping[int, Request], timeout: float) -> tuple[EngineAnswer, ...]:
    """Return what each engine answered to its request, in their order; ``timeout`` is in seconds, for the slowest."""
    asked = {engine: _send(client, engine, *requests[engine]) for engine in requests if engine in client.ids}
    late: list[int] = []
    try:
        wait(asked.values(), timeout=timeout)
    finally:  # also after Ctrl-C
        late = [engine for engine, future in asked.items() if not future.done()]
        if alive := [engine for engine in late if engine in client.ids]:
            messages = [asked[engine].msg_id for engine in late]  # a thread of the engine takes them back
            wait([client.abort(messages, targets=alive, block=False)], timeout=_REPLY_TIMEOUT)
    busy = {"state": "busy", "detail": f"no answer within {timeout:g} s: it is in a cell, or cannot be reached"}
    facts = {engine: busy if engine in late else future.result() for engine, future in asked.items()}
    gone = {"state": "dead", "detail": "it is gone"}
    return tuple(_read_answer(engine, facts.get(engine, gone)) for engine in requests)


def _send(client: Any, engine: int, name: str, arguments: Mapping[str, object]) -> Any:
    """Return the future of one engine's answer."""
    source = f"from __future__ import annotations\n{inspect.getsource(answer)}"
    names = {"source": source, "request": (name, dict(arguments), _compat.installed_version())}
    ident = client._engines[engine].encode()
    return client.send_apply_request(client._mux_stream, eval, (_ENGINE_CODE, names), ident=ident)


def _read_answer(engine: int, facts: Any) -> EngineAnswer:
    """Return the answer in an engine's reply."""
    if isinstance(facts, BaseException):
        kind = getattr(facts, "ename", type(facts).__name__)
        if kind == "EngineError":
            return EngineAnswer(engine, state="dead", detail="it died before it answered")
        return EngineAnswer(engine, state="failed", detail=f"{kind}: {getattr(facts, 'evalue', facts)}")
    if facts["state"] == "no gpumagic":
        facts["detail"] = "gpumagic is not installed there: %pip install gpumagic in its environment"
    elif facts["state"] == "other version":
        here = _compat.installed_version()
        facts["detail"] = f"gpumagic {facts['detail']} there, {here} here: install the same, and restart the engine"
    if isinstance(facts.get("origin"), tuple):  # it has no gpumagic that would know its rank
        facts["origin"] = Origin(*facts["origin"])
    return EngineAnswer(engine, **facts)


# ---- Line magics

_NO_DEVICE = "DeviceNotFound: "


def check_options(magic: str, options: Namespace, alternative: str) -> None:
    """Raise `OptionError` for an option that is about one process."""
    for name in PARSERS[magic].refused:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} is about one process: {alternative}{magic} {option} has each engine answer for itself"
            )


def of_line(magic: str, options: Namespace, timeout: float) -> ClusterReport:
    """Return the report of all engines that a line with `--engines` asks for; one that is late is listed as such.

    Raises:
        OptionError: there are no engines, or not these; or an option is about one process.
        DeviceNotFound: a device that no engine has.
    """
    check_options(magic, options, "%px %")
    arguments = {"names": options.devices}
    if magic == "devices":
        arguments |= {"by": options.by, "limit": options.n}
    else:
        arguments |= {"processes": options.processes, "everything": options.all}
    client, engines = connect(options.engines)
    answers = ask(client, dict.fromkeys(engines, (magic, arguments)), timeout)
    refused = [each.detail for each in answers if each.detail.startswith(_NO_DEVICE)]
    if refused and len(refused) == len(answers):  # no engine has the device: the line itself is wrong
        raise DeviceNotFound(f"on the engines: {refused[0].removeprefix(_NO_DEVICE)}")
    return ClusterReport(magic, answers)
