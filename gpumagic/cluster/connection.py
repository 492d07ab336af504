"""Which engines `--engines` means, which device each of them works on, what each answers, and what it calls for that.

An engine runs one thing at a time: in a cell of its own it cannot answer. A request that it has not begun when the
time is up is cancelled, so that it does not run later.
"""

from __future__ import annotations

import inspect
import time
import weakref
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

from gpumagic import _compat, simgpu
from gpumagic.cluster.report import ClusterReport, EngineAnswer
from gpumagic.errors import DeviceNotFound, OptionError
from gpumagic.memory.devices import resolve
from gpumagic.notebook import session
from gpumagic.options import PARSERS
from gpumagic.report.base import Origin, current_origin

PX = "px"
"""The engines that `%%px` goes to, which `%pxconfig --targets` changes."""
_selected: Any = None
_known_engines: MutableMapping[Any, dict[int, Origin]] = weakref.WeakKeyDictionary()
"""The engines that each client has had; those that are gone are still reported."""


@dataclass(frozen=True)
class Connection:
    """A client, and the numbers of the engines to ask."""

    client: Any
    engines: tuple[int, ...]

    @property
    def alive(self) -> tuple[int, ...]:
        """Return those of the engines that are registered now."""
        registered = set(self.client.ids)
        return tuple(engine for engine in self.engines if engine in registered)


def use(client_or_view: Any = None) -> None:
    """Select the ipyparallel client or view that `--engines` uses; without one, that of `%%px` again.

    Engines of it that are gone are forgotten.
    """
    global _selected  # noqa: PLW0603  # one for the session, as of `%%px`
    _selected = client_or_view
    if client_or_view is not None:
        _known_engines.pop(getattr(client_or_view, "client", client_or_view), None)


def connect(targets: str = PX, *, gone: bool = True) -> Connection:
    """Return the client and its engines for a value of `--engines`.

    Args:
        targets: ``"all"``, numbers such as ``"0,2"``, a slice such as ``"1:3"``, or ``"px"``.
        gone: whether to include engines that are gone.

    Raises:
        OptionError: there is no client, it is closed, it has no engines, or an engine was never there.
    """
    source = _selected
    if source is None and (shell := session.shell()) is not None:
        source = getattr(getattr(shell.find_cell_magic("px"), "__self__", None), "view", None)
    if source is None:
        raise OptionError(
            "no engines: connect an ipyparallel client (rc = ipyparallel.Cluster(n=4).start_and_connect_sync()), "
            "or choose one with gpumagic.cluster.use(rc)"
        )
    client = getattr(source, "client", source)
    if client._closed:
        raise OptionError("the client of %px is closed: choose another with gpumagic.cluster.use(rc)")
    known = sorted({*client.ids, *(_known_engines.get(client, ()) if gone else ())})
    if not known:
        raise OptionError("the client has no engines; start some, such as with cluster.start_engines_sync(n=4)")
    of_px = getattr(source, "targets", "all")
    if targets == PX and of_px not in (None, "all"):
        wanted = [of_px] if isinstance(of_px, int) else list(of_px)
    elif targets in (PX, "all"):
        wanted = known
    elif ":" in targets:
        wanted = known[slice(*(int(part) if part else None for part in targets.split(":")))]
    else:
        wanted = [int(part) for part in targets.split(",")]
    if missing := [engine for engine in wanted if engine not in known]:
        raise OptionError(
            f"there is no engine {missing[0]}; there are {', '.join(map(str, known))}, which --engines all asks"
        )
    return Connection(client, tuple(wanted))


def check_options(magic: str, options: Namespace, alternative: str) -> None:
    """Raise `OptionError` for an option that is about one process."""
    for name in PARSERS[magic].refused:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} is about one process: {alternative}{magic} {option} has each engine answer for itself"
            )


def assign_devices(device: str, origins: Mapping[int, Origin]) -> dict[int, tuple[str, int]]:
    """Return the device of each engine, and the engine's number on its host.

    Args:
        device: ``"auto"``, or a name in which ``{rank}`` and ``{local_rank}`` stand for the engine's.
        origins: where each engine runs.

    Raises:
        OptionError: something else in braces.
    """
    device = device.replace("{{", "{").replace("}}", "}")  # as IPython leaves it where it expands nothing
    origins = dict(sorted(origins.items()))
    ranks = _distinct_ranks({engine: origin.rank for engine, origin in origins.items()})
    hosts: dict[str, dict[int, int | None]] = {}
    for engine in sorted(origins, key=lambda engine: ranks[engine]):
        hosts.setdefault(origins[engine].host, {})[engine] = origins[engine].local_rank
    local = {engine: rank for of_host in hosts.values() for engine, rank in _distinct_ranks(of_host).items()}
    try:
        return {
            engine: (device.format_map({"rank": rank, "local_rank": local[engine]}), local[engine])
            for engine, rank in ranks.items()
        }
    except (KeyError, ValueError, IndexError):
        raise OptionError(
            f"{device!r} is no device of engines; write cuda:{{rank}}, cuda:{{local_rank}} or auto"
        ) from None


def _distinct_ranks(ranks: Mapping[int, int | None]) -> dict[int, int]:
    """Return the launcher's ranks, or the engines' order where ranks are missing or equal.

    Engines that a batch script starts without a launcher all inherit the script's own rank.
    """
    known = {engine: rank for engine, rank in ranks.items() if rank is not None}
    if len(set(known.values())) == len(ranks):
        return known
    return {engine: place for place, engine in enumerate(ranks)}


# ---- What an engine does

_LOADED_FOR_CELL = "gpumagic_of_engine_cell"
CELL_DEVICE = "_gpumagic_device"
"""The variable in which an engine keeps the device of the cell that it is to run."""


def answer(request: str, arguments: dict[str, Any], version: str) -> dict[str, Any]:
    """Call one of the functions below, and return the state, the report and any error.

    It is sent to the engine as text and stands alone: the engine may have no gpumagic, or another version.

    Args:
        request: the name of the function.
        arguments: its keyword arguments, plain data.
        version: the gpumagic of the client; nothing is called in another version.
    """
    import importlib
    import os
    import socket
    import time

    facts: dict[str, Any] = {"state": "answered", "host": socket.gethostname(), "pid": os.getpid()}
    try:
        here = importlib.import_module("gpumagic").__version__
    except ImportError:
        return {**facts, "state": "no gpumagic"}
    if here != version:
        return {**facts, "state": "other version", "detail": here}
    started = time.perf_counter()
    try:
        ours = importlib.import_module("gpumagic.cluster.connection")
        facts["origin"], facts["report"] = ours.serve(request, arguments)
    except Exception as error:  # reported by the client
        facts.update(state="failed", detail=f"{type(error).__name__}: {error}")
    return {**facts, "seconds": time.perf_counter() - started}


def serve(request: str, arguments: Mapping[str, Any]) -> tuple[Origin, Any]:
    """Return where this engine runs, and what one of the functions below returns."""
    return current_origin(), globals()[f"answer_{request}"](**arguments)


def answer_gpuinfo(names: Sequence[str], *, processes: bool, everything: bool) -> object:
    """Return the GPUs of this engine; simulated ones too, where its environment asks for them."""
    from gpumagic.gpus import probe

    simgpu.enable_from_environment()
    return probe.read_gpus(names, processes=processes, everything=everything)


def answer_devices(names: Sequence[str], *, by: str | None, limit: int | None) -> object:
    """Return the live tensors of this engine, under the names of its notebook."""
    from gpumagic.tensors import scan

    simgpu.enable_from_environment()
    shell = session.shell()
    only = [resolve(name) for name in names]
    return scan.scan(session.user_variables(shell), devices=only, group_by=by, limit=limit, shell=shell)


def answer_prepare() -> None:
    """Prepare for a cell under a cell magic."""
    shell = session.shell()
    if shell is None:
        raise OptionError("this engine runs no IPython")
    if shell.find_line_magic("oomguard") is None:
        shell.meta[_LOADED_FOR_CELL] = True
        shell.extension_manager.load_extension("gpumagic")


def answer_choose(name: str, fallback: str | None, local_rank: int) -> None:
    """Choose the device of the cell; ``auto`` deals out the host's GPUs by local rank."""
    from gpumagic.memory import allocator

    shell, accelerators = session.shell(), allocator.accelerators()
    assert shell is not None
    if name.lower() == "auto" and accelerators:
        name = accelerators[local_rank % len(accelerators)]
    shell.user_ns[CELL_DEVICE] = resolve(name, fallback)


def answer_collect(name: str) -> object:
    """Return the report that a cell left in a variable, and undo what was prepared."""
    shell = session.shell()
    assert shell is not None
    report = shell.user_ns.pop(name, None)
    for each in (name, CELL_DEVICE):
        shell.user_ns.pop(each, None)
        shell.user_ns_hidden.pop(each, None)
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


def ask_all(connection: Connection, request: Request, timeout: float) -> tuple[EngineAnswer, ...]:
    """Send one request to every engine of a connection; see `ask_each`."""
    return ask_each(connection, dict.fromkeys(connection.engines, request), timeout)


def ask_each(connection: Connection, by_engine: Mapping[int, Request], timeout: float) -> tuple[EngineAnswer, ...]:
    """Return what each engine answered, in the order of the engines.

    Args:
        connection: the engines.
        by_engine: the request to each.
        timeout: seconds to wait for the slowest.
    """
    asked = {each: _send(connection.client, each, by_engine[each]) for each in connection.alive}
    late: list[int] = []
    try:
        wait(asked.values(), timeout=timeout)
    finally:  # also after Ctrl-C
        late = [engine for engine, future in asked.items() if not future.done()]
        if alive := [engine for engine in connection.alive if engine in late]:
            messages = [asked[engine].msg_id for engine in late]  # a thread of the engine takes them back
            wait([connection.client.abort(messages, targets=alive, block=False)], timeout=_REPLY_TIMEOUT)
    busy = f"no answer within {timeout:g} s: it is in a cell, or cannot be reached"
    known = _known_engines.setdefault(connection.client, {})
    found = []
    for engine in connection.engines:
        if engine in late:
            answered = EngineAnswer(engine, state="busy", detail=busy)
        elif engine in asked:
            answered = _read_answer(engine, asked[engine].result())
        else:
            answered = EngineAnswer(engine, state="dead", detail="it is gone")
        if answered.origin.host:
            known[engine] = answered.origin
        found.append(replace(answered, origin=known.setdefault(engine, Origin())))
    return tuple(found)


def _send(client: Any, engine: int, request: Request) -> Any:
    """Return the future of one engine's answer."""
    name, arguments = request
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
    state, detail, here = facts["state"], facts.get("detail", ""), _compat.installed_version()
    if state == "no gpumagic":
        detail = "gpumagic is not installed there: %pip install gpumagic in its environment"
    elif state == "other version":
        detail = f"gpumagic {detail} there, {here} here: install the same, and restart the engine"
    origin = facts.get("origin") or Origin(facts["host"], facts["pid"])
    return EngineAnswer(engine, origin, state, detail, facts.get("seconds"), facts.get("report"))


# ---- Line magics

_NO_DEVICE = "DeviceNotFound: "


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
    connection = connect(options.engines)
    started = time.perf_counter()
    answers = ask_all(connection, (magic, arguments), timeout)
    refused = [each.detail for each in answers if each.detail.startswith(_NO_DEVICE)]
    if refused and len(refused) == len(answers):  # no engine has the device: the line itself is wrong
        raise DeviceNotFound(f"on the engines: {refused[0].removeprefix(_NO_DEVICE)}")
    return ClusterReport(magic, answers, time.perf_counter() - started)
