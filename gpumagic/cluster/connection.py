"""Which engines `--engines` means, which device each of them works on, and what each answers to a request.

An engine runs one thing at a time: in a cell of its own it cannot answer. A request that it has not begun when the
time is up is cancelled, so that it does not run later.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import pickle
import time
import weakref
import zlib
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gpumagic import _compat
from gpumagic.cluster import requests
from gpumagic.cluster.report import ClusterReport, EngineAnswer
from gpumagic.errors import DeviceNotFound, OptionError
from gpumagic.notebook import session
from gpumagic.options import ENGINE_TIMEOUT, parser
from gpumagic.report.base import Origin

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

    @property
    def known(self) -> dict[int, Origin]:
        """Return where the client's engines run, including those that are gone."""
        return _known_engines.setdefault(self.client, {})


def check_options(magic: str, options: Namespace, alternative: str) -> None:
    """Raise `OptionError` for an option that is about one process."""
    for name in parser(magic).refused:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} is about one process: {alternative}{magic} {option} has each engine answer for itself"
            )


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


def assign_devices(device: str, origins: Mapping[int, Origin]) -> dict[int, tuple[str, int]]:
    """Return the device of each engine, and the engine's number on its host.

    Args:
        device: ``"auto"``, or a name in which ``{rank}`` and ``{local_rank}`` stand for the engine's.
        origins: where each engine runs.

    Raises:
        OptionError: something else in braces.
    """
    device = device.replace("{{", "{").replace("}}", "}")  # as IPython leaves it where it expands nothing
    try:
        return {
            engine: (device.format_map({"rank": rank, "local_rank": local}), local)
            for engine, (rank, local) in _ranks(origins).items()
        }
    except (KeyError, ValueError, IndexError):
        raise OptionError(
            f"{device!r} is no device of engines; write cuda:{{rank}}, cuda:{{local_rank}} or auto"
        ) from None


def _ranks(origins: Mapping[int, Origin]) -> dict[int, tuple[int, int]]:
    """Return each engine's rank and local rank: the launcher's where they are distinct, else the engines' order."""
    origins = dict(sorted(origins.items()))
    ranks = _distinct_ranks({engine: origin.rank for engine, origin in origins.items()})
    order = sorted(origins, key=lambda engine: ranks[engine])
    hosts: dict[str, dict[int, int | None]] = {}
    for engine in order:
        hosts.setdefault(origins[engine].host, {})[engine] = origins[engine].local_rank
    local = {engine: rank for of_host in hosts.values() for engine, rank in _distinct_ranks(of_host).items()}
    return {engine: (ranks[engine], local[engine]) for engine in order}


def _distinct_ranks(ranks: Mapping[int, int | None]) -> dict[int, int]:
    """Return the ranks as they are, or the engines' order where ranks are missing or equal.

    Engines that a batch script starts without a launcher all inherit the script's own rank.
    """
    known = {engine: rank for engine, rank in ranks.items() if rank is not None}
    if len(set(known.values())) == len(ranks):
        return known
    return {engine: place for place, engine in enumerate(ranks)}


_ENGINE_CODE = "exec(source) or answer(*request)"
"""Run by `eval` in the engine, with names of its own, so that the engine needs neither a module nor our bytecode."""
_REPLY_TIMEOUT = 1.0
"""Seconds to wait for the engines' threads that cancel requests."""

Request = tuple[str, Mapping[str, object]]
"""A function of `requests`, and its arguments."""


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
    asked = {each: _send(connection, each, by_engine[each]) for each in connection.alive}
    try:
        wait(asked.values(), timeout=timeout)
    except BaseException:  # Ctrl-C
        _cancel(connection, asked)
        raise
    late = {engine: future for engine, future in asked.items() if not future.done()}
    answers = _cancel(connection, late, timeout) if late else {}
    answers.update((engine, _read_answer(engine, future)) for engine, future in asked.items() if engine not in answers)
    gone = EngineAnswer(0, state="dead", detail="it is gone")
    found = [replace(answers.get(engine, gone), engine=engine) for engine in connection.engines]
    connection.known.update((int(answer.engine), answer.origin) for answer in found if answer.origin.host)
    return tuple(replace(each, origin=connection.known.setdefault(int(each.engine), Origin())) for each in found)


def _send(connection: Connection, engine: int, request: Request) -> Any:
    """Return the future of one engine's answer; its attribute ``begun`` is set once the engine starts on it."""
    name, arguments = request
    client = connection.client
    source = f"from __future__ import annotations\n{inspect.getsource(requests.answer)}"
    names = {"source": source, "request": (name, dict(arguments), _compat.installed_version())}
    future = client.send_apply_request(
        client._mux_stream, eval, (_ENGINE_CODE, names), ident=client._engines[engine].encode()
    )
    future.begun = False
    future.iopub_callbacks.append(lambda message: _hear(future, message))
    return future


def _hear(future: Any, message: Mapping[str, Any]) -> None:
    if message["header"]["msg_type"] == "status":
        future.begun = True


def _read_answer(engine: int, future: Any) -> EngineAnswer:
    """Return the answer in an engine's reply."""
    facts = future.result()
    if isinstance(facts, BaseException):
        kind = getattr(facts, "ename", type(facts).__name__)
        if kind == "EngineError":
            return EngineAnswer(engine, state="dead", detail="it died before it answered")
        return EngineAnswer(engine, state="failed", detail=f"{kind}: {getattr(facts, 'evalue', facts)}")
    state, detail = facts["state"], facts.get("detail", "")
    origin, report = Origin(facts["host"], facts["pid"]), None
    if "answer" in facts:
        try:
            origin, report = load_records(zlib.decompress(facts["answer"]))
        except Exception as error:
            state, detail = "other version", f"{type(error).__name__}: {error}"
    here = _compat.installed_version()
    explained = {
        "no gpumagic": "gpumagic is not installed there: %pip install gpumagic in its environment",
        "no torch": "torch is not installed there",
        "other version": f"gpumagic {detail} there, {here} here: install the same, and restart the engine",
    }
    return EngineAnswer(engine, origin, state, explained.get(state, detail), facts.get("seconds"), report)


def _cancel(connection: Connection, late: Mapping[int, Any], seconds: float = 0.0) -> dict[int, EngineAnswer]:
    """Cancel the requests that engines have not begun, and return for each engine why it did not answer."""
    alive = [engine for engine in connection.alive if engine in late]
    messages = [future.msg_id for future in late.values()]
    if alive:  # a thread of the engine confirms it, also while a cell runs
        wait([connection.client.abort(messages, targets=alive, block=False)], timeout=_REPLY_TIMEOUT)
    slow = "slow", f"it started, but did not finish within {seconds:g} s"
    busy = "busy", f"no answer within {seconds:g} s: it is in a cell, or cannot be reached"
    return {engine: EngineAnswer(engine, Origin(), *(slow if each.begun else busy)) for engine, each in late.items()}


_PLAIN = frozenset({
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "complex"), ("builtins", "bytearray"),
    ("builtins", "range"), ("builtins", "slice"), ("collections", "Counter"), ("collections", "OrderedDict"),
    ("collections", "deque"),
})  # fmt: skip


def load_records(data: bytes) -> Any:
    """Return what an engine pickled: records of gpumagic's own and plain data, and nothing else.

    A pickle can name any function to call. An engine runs its user's code, and what it answers need not come from ours.

    Raises:
        pickle.UnpicklingError: it has something else than records and plain data.
    """
    return _Records(io.BytesIO(data)).load()


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith("gpumagic.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type):
                is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
                if dataclasses.is_dataclass(found) or is_named_tuple or issubclass(found, Enum):
                    return found
        raise pickle.UnpicklingError(f"{module}.{name} is no record of gpumagic's")


_NO_DEVICE = "DeviceNotFound: "


def gpuinfo(
    *devices: str, engines: str = PX, timeout: float = ENGINE_TIMEOUT, processes: bool = False,
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
    *devices: str, engines: str = PX, timeout: float = ENGINE_TIMEOUT, by: str | None = None,
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
    connection = connect(engines)
    started = time.perf_counter()
    answers = ask_all(connection, (magic, arguments), timeout)
    refused = [answer.detail for answer in answers if answer.detail.startswith(_NO_DEVICE)]
    if refused and len(refused) == len(answers):  # no engine has the device: the line itself is wrong
        raise DeviceNotFound(f"on the engines: {refused[0].removeprefix(_NO_DEVICE)}")
    return ClusterReport(magic, answers, time.perf_counter() - started)


def query_of(magic: str, options: Namespace) -> Callable[[float], ClusterReport]:
    """Return what a line with `--engines` asks, to be called with a time limit in seconds.

    Raises:
        OptionError: an option is about one process; `%px` has each engine answer for itself.
    """
    check_options(magic, options, "%px %")
    if magic == "devices":
        arguments = {"names": options.devices, "by": options.by, "limit": options.n}
    else:
        arguments = {"names": options.devices, "processes": options.processes, "everything": options.all}
    return functools.partial(ask, magic, arguments, options.engines)
