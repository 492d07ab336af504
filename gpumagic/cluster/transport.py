"""Sends a request to engines, and returns what each answered or why it did not.

An engine runs one thing at a time: in a cell of its own it cannot answer. A request that it has not begun when the
time is up is cancelled, so that it does not run later.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import io
import pickle
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from enum import Enum
from functools import cache
from typing import Any

from gpumagic import _compat
from gpumagic.cluster.connection import Connection
from gpumagic.cluster.report import EngineAnswer
from gpumagic.report.base import Origin

_ENGINE_CODE = "exec(source) or answer(*request)"
"""Run by `eval` in the engine, with names of its own, so that the engine needs neither a module nor our bytecode."""
_REPLY_TIMEOUT = 1.0
"""Seconds to wait for immediate replies: the controller's, and those of the engines' threads that cancel requests."""

Request = tuple[str, Mapping[str, object]]
"""A function of `requests`, and its arguments."""


def ask_all(connection: Connection, request: Request, timeout: float) -> tuple[EngineAnswer, ...]:
    """Send one request to every engine of a connection; see `ask_each`."""
    return ask_each(connection, dict.fromkeys(connection.engines, request), timeout)


def ask_each(connection: Connection, requests: Mapping[int, Request], timeout: float) -> tuple[EngineAnswer, ...]:
    """Return what each engine answered, in the order of the engines.

    Args:
        connection: the engines.
        requests: by engine.
        timeout: seconds to wait for the slowest.
    """
    asked = {each: _send(connection, each, requests[each]) for each in connection.alive}
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


@cache
def _source() -> str:
    return importlib.resources.files("gpumagic.cluster").joinpath("engine_side.py").read_text(encoding="utf-8")


def _send(connection: Connection, engine: int, request: Request) -> Any:
    """Return the future of one engine's answer; its attribute ``begun`` is set once the engine starts on it."""
    name, arguments = request
    client = connection.client
    names = {"source": _source(), "request": (name, dict(arguments), _compat.installed_version())}
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
    queues = _engine_queues(connection, alive)
    return {engine: _why_no_answer(engine, late[engine], queues.get(engine), seconds) for engine in late}


def _why_no_answer(engine: int, future: Any, queue: Sequence[str] | None, seconds: float) -> EngineAnswer:
    within = f"no answer within {seconds:g} s"
    if future.begun:
        return EngineAnswer(engine, state="slow", detail=f"it started, but did not finish within {seconds:g} s")
    if queue and queue[0] != future.msg_id:
        return EngineAnswer(engine, state="busy", detail=f"in a cell; {within}")
    return EngineAnswer(engine, state="no answer", detail=within)


def _engine_queues(connection: Connection, engines: Sequence[int]) -> dict[int, Sequence[str]]:
    """Return the messages that the controller has not seen answered, oldest first; empty where it does not reply."""
    if not engines:
        return {}
    client = connection.client
    content = {"targets": list(engines), "verbose": True}
    future = client._send(client._query_stream, "queue_request", content=content)
    if not future.wait(_REPLY_TIMEOUT):
        return {}
    status: Mapping[Any, Any] = future.result()["content"]
    return {int(engine): found["queue"] for engine, found in status.items() if str(engine).isdecimal()}


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
