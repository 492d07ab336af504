"""One errand on every engine, and of each engine what came back, or why nothing did.

An engine runs one thing at a time: in a cell of its own it cannot answer. What has not begun when the time is up is
taken back, so that it does not run later.
"""

from __future__ import annotations

import importlib.resources
import pickle
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import cache
from typing import Any

from gpumagic.cluster.connection import Connection
from gpumagic.cluster.report import EngineAnswer
from gpumagic.report.origin import Origin

_ENGINE_CODE = "exec(source) or answer(*order)"
"""Run by `eval` in the engine, with names of its own: neither a module nor bytecode has to be known there."""
_REPLY_TIMEOUT = 1.0
"""Seconds to wait for what answers at once: the controller, and the threads of engines that take requests back."""

Request = tuple[str, Mapping[str, object]]
"""A function of `errands`, and its arguments."""


def ask_all(
    connection: Connection, errand: Request, seconds: float, *, in_turn: bool = False
) -> tuple[EngineAnswer, ...]:
    """Do one errand on every engine of a connection; see `ask_each`."""
    return ask_each(connection, dict.fromkeys(connection.engines, errand), seconds, in_turn=in_turn)


def ask_each(
    connection: Connection, errands: Mapping[int, Request], seconds: float, *, in_turn: bool = False
) -> tuple[EngineAnswer, ...]:
    """Return what each engine answered, in the order of the engines.

    Args:
        connection: where.
        errands: what for each engine.
        seconds: how long to wait for the slowest.
        in_turn: pass over engines that are still in the cell in which they could not answer the last time.
    """
    waiting = {engine: future for engine, future in connection.waiting.items() if not future.done()} if in_turn else {}
    asked = {engine: _send(connection, engine, errands[engine]) for engine in connection.alive if engine not in waiting}
    try:
        wait(asked.values(), timeout=seconds)
    except BaseException:  # Ctrl-C
        _cancel_pending(connection, asked)
        raise
    late = {engine: future for engine, future in asked.items() if not future.done()}
    connection.waiting.update(late)
    found = dict.fromkeys(waiting, EngineAnswer(0, state="busy", detail="in a cell"))
    found.update(_cancel_pending(connection, late, seconds) if late else {})
    found.update((engine, _read_answer(engine, future)) for engine, future in asked.items() if engine not in found)
    return tuple(
        _with_origin(connection, engine, found.get(engine) or _gone_answer(engine)) for engine in connection.engines
    )


@cache
def _source() -> str:
    return importlib.resources.files("gpumagic.cluster").joinpath("engine_side.py").read_text(encoding="utf-8")


def _send(connection: Connection, engine: int, errand: Request) -> Any:
    """Return the future of one engine's answer, which also knows whether it has begun."""
    import gpumagic

    name, arguments = errand
    client = connection.client
    names = {"source": _source(), "order": (name, dict(arguments), str(gpumagic.__version__))}
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
    """Return what an engine's reply says: what it found, or what it lacks."""
    facts = future.result()
    if isinstance(facts, BaseException):
        return _raised_answer(engine, facts)
    state, detail = facts["state"], facts.get("detail", "")
    origin, found = Origin(facts["host"], facts["pid"]), None
    if "answer" in facts:
        try:
            origin, found = pickle.loads(zlib.decompress(facts["answer"]))  # noqa: S301  # our own engines'
        except Exception as error:
            state, detail = "other version", f"{type(error).__name__}: {error}"
    return EngineAnswer(engine, origin, state, _explain_state(state, detail), facts.get("seconds"), found)


def _explain_state(state: str, detail: str) -> str:
    import gpumagic

    if state == "no gpumagic":
        return "gpumagic is not installed there: %pip install gpumagic in its environment"
    if state == "no torch":
        return "torch is not installed there"
    if state == "other version":
        return f"gpumagic {detail} there, {gpumagic.__version__} here: install the same, and restart the engine"
    return detail


def _raised_answer(engine: int, error: BaseException) -> EngineAnswer:
    kind = getattr(error, "ename", type(error).__name__)
    if kind == "EngineError":
        return EngineAnswer(engine, state="dead", detail="it died while it was asked")
    return EngineAnswer(engine, state="failed", detail=f"{kind}: {getattr(error, 'evalue', error)}")


def _gone_answer(engine: int) -> EngineAnswer:
    return EngineAnswer(engine, state="dead", detail="it is not there any more")


def _with_origin(connection: Connection, engine: int, answer: EngineAnswer) -> EngineAnswer:
    """Return the answer with the place where its engine was last seen, where it does not say itself."""
    if answer.origin.host:
        connection.seen[engine] = answer.origin
        return answer
    return replace(answer, engine=engine, origin=connection.seen.setdefault(engine, Origin()))


def _cancel_pending(connection: Connection, late: Mapping[int, Any], seconds: float = 0.0) -> dict[int, EngineAnswer]:
    """Have engines drop what they have not begun, and return of each why it did not answer."""
    alive = [engine for engine in connection.alive if engine in late]
    messages = [future.msg_id for future in late.values()]
    if alive:  # a thread of theirs confirms it, in a cell too
        wait([connection.client.abort(messages, targets=alive, block=False)], timeout=_REPLY_TIMEOUT)
    queues = _engine_queues(connection, alive)
    return {engine: _why_no_answer(engine, late[engine], queues.get(engine), seconds) for engine in late}


def _why_no_answer(engine: int, future: Any, queue: Sequence[str] | None, seconds: float) -> EngineAnswer:
    within = f"no answer within {seconds:g} s"
    if future.begun:
        return EngineAnswer(engine, state="slow", detail=f"it began, and was not through within {seconds:g} s")
    if queue and queue[0] != future.msg_id:
        return EngineAnswer(engine, state="busy", detail=f"in a cell; {within}")
    return EngineAnswer(engine, state="no answer", detail=within)


def _engine_queues(connection: Connection, engines: Sequence[int]) -> dict[int, Sequence[str]]:
    """Return the messages that the controller has not seen answered, oldest first; nothing where it does not say."""
    if not engines:
        return {}
    client = connection.client
    content = {"targets": list(engines), "verbose": True}
    future = client._send(client._query_stream, "queue_request", content=content)
    if not future.wait(_REPLY_TIMEOUT):
        return {}
    status: Mapping[Any, Any] = future.result()["content"]
    return {int(engine): found["queue"] for engine, found in status.items() if str(engine).isdecimal()}
