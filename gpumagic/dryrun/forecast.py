"""A dry run from the parent's side: what to send to the worker, what its answer means, and the sentences about it.

Some values that the host reads from the device are unknown, so the cell is run again with other values in their place.
A loss that is printed changes nothing; a length that sizes a tensor, or a number that decides a branch, does, and then
it is unknown whether the cell fits.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumagic.dryrun import client, engine, parcel, sendable
from gpumagic.dryrun.engine import Engine
from gpumagic.dryrun.report import DeviceForecast, RehearsalPoint, RehearsalReport, RehearsalRow
from gpumagic.dryrun.targets import Target
from gpumagic.errors import OptionError, RehearsalUnavailable
from gpumagic.memory import workspaces
from gpumagic.report.units import count, size
from gpumagic.source.frames import is_library


def verdict_sentence(device: DeviceForecast, error: dict[str, Any] | None) -> str:
    """Return one sentence with the figures of the device that decides."""
    need = f"{size(device.peak)} at its peak"
    if error is not None and device.fits is not False:
        return f"It cannot be told whether the cell fits: {failure_sentence(error)}. Up to there it needs {need}."
    if device.capacity is None:
        return f"The cell needs {need} on {device.device}."
    room = f"{size(device.capacity)} on {device.device}"
    if device.fits:
        return f"The cell fits: it needs {need}, of {room}."
    if device.fits is False:
        where = f", first in line {device.failure_line}" if device.failure_line is not None else ""
        why = (
            ": what is free lies in pieces, each too small" if device.peak + device.extra[1] <= device.capacity else ""
        )
        return f"The cell does not fit: it needs {need}, of {room}; it would run out of memory{where}{why}."
    return f"It cannot be told whether the cell fits: it needs {need}, of {room}, and what is not known matters."


def failure_sentence(error: dict[str, Any]) -> str:
    """Return how the rehearsal ended, where not at the cell's end."""
    where = f" in line {error['line']}" if error["line"] is not None else ""
    if error["refused"]:
        return f"the rehearsal stopped{where}: {error['text']}"
    return f"the cell fails{where} with {error['kind']}: {error['text']}"


def cut_sentence(place: str, passes: int) -> str:
    """Return what a loop's end says that was cut short."""
    made = count(passes, "pass", "passes")
    return f"the loop in {place} was rehearsed for {made}, and further ones are taken to repeat them"


def missed_sentence(place: str) -> str:
    """Return what a branch says that was never taken."""
    return f"{place} was not reached in the passes rehearsed, and may need more"


def not_modelled(extra: tuple[int, int], name: str) -> str:
    """Return what an engine does not model, as a band."""
    what = "the context takes" if name == engine.CUDA else "the context and the workspaces of kernels take"
    return (
        f"{what} another {size(extra[0])} to {size(extra[1])}, an estimate; nothing of this was measured on a real GPU"
    )


TIME_LIMIT = 60.0
CELL = "<rehearsed cell>"
_PRELOADED = frozenset({"torch", "numpy", "pandas", "matplotlib", "torchvision", "transformers", "timm", "einops"})
"""Packages of which the worker imports once what the notebook has imported."""


@dataclass(frozen=True)
class Script:
    """What is rehearsed.

    Attributes:
        source: Python code; None for a callable.
        function: what is called, without arguments, where there is no code.
    """

    source: str | None
    function: Callable[[], object] | None
    filename: str

    def names(self) -> list[str]:
        """Return the global names it may use."""
        if self.source is None:
            return []
        return list(sendable.names_of(_compiled(self.source)))


def script(what: str | Callable[[], object], above: int = 0) -> Script:
    """Return what to rehearse.

    Args:
        what: code as a notebook's cell has it, or a callable without arguments.
        above: how many lines stand above the code in its cell.

    Raises:
        OptionError: the code has a syntax error, or it is neither.
    """
    if callable(what):
        code = getattr(what, "__code__", None)
        return Script(None, what, getattr(code, "co_filename", CELL))
    if not isinstance(what, str):
        raise OptionError(f"a rehearsal takes code or a callable, not {type(what).__name__}")
    from IPython.core.inputtransformer2 import TransformerManager

    above += len(what[: len(what) - len(what.lstrip())].splitlines())  # which IPython takes away
    source = "\n" * above + TransformerManager().transform_cell(what)
    _compiled(source)
    return Script(source, None, CELL)


def rehearse(
    what: Script,
    namespace: Mapping[str, Any],
    target: Target,
    *,
    values: Mapping[str, object] | None = None,
    time_limit: float = TIME_LIMIT,
    note: Callable[[dict[str, Any]], object] | None = None,
) -> RehearsalReport:
    """Return what running the code would need.

    Args:
        what: the code.
        namespace: the names it sees; they are read and not changed.
        target: the devices.
        values: other values for some of the names.
        time_limit: seconds after which the rehearsal is given up.
        note: called with the worker's account, where it gave one.

    Raises:
        RehearsalUnavailable: this torch or system cannot.
    """
    chosen = engine.choose(target)
    target = chosen.target
    if chosen.name == engine.FAKE:
        _check_torch()
    sent = parcel.pack(namespace, what.names(), what.function, with_graphs=target.tells_segments())
    with contextlib.closing(sent) as parts:
        order = _order(what, parts, chosen, dict(values or {}), time_limit)
        told = ask(order)
        if "ended" in told:
            return _nothing(target, told["ended"])
        if told["guessed"] and told["error"] is None:
            told = compare(told, order)
        if note is not None:
            note(told)
        return _report(told, chosen, parts)


def ask(order: dict[str, Any]) -> dict[str, Any]:
    """Return the account of a run; of one that ran out of memory on CUDA, with what it needs if there is enough."""
    told = client.ask(order)
    if order["engine"] == engine.FAKE or not _failures(told):
        return told
    more = client.ask({**order, "capacities": [None] * len(order["capacities"])})
    if "ended" in more:
        return told
    for device, failed in zip(more["devices"], told["devices"], strict=True):
        device |= {"failed": failed["failed"], "failure": failed["failure"]}
    return more


def _check_torch() -> None:
    import torch

    if not hasattr(torch._C, "_acc"):
        raise RehearsalUnavailable(
            f"a rehearsal needs a torch that takes backends written in Python (2.10 or newer), and this is "
            f"{torch.__version__}"
        )


def _compiled(source: str) -> Any:
    import ast

    try:
        return compile(source, CELL, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise OptionError(f"the code cannot be rehearsed: {error.msg} in line {error.lineno}") from None


def _order(
    what: Script, parts: parcel.Parcel, chosen: Engine, values: dict[str, object], time_limit: float
) -> dict[str, Any]:
    import torch

    target = chosen.target
    base = [
        max(0, held - parts.device_bytes.get(name, 0)) if segments is None else 0
        for name, held, segments in zip(target.names, target.allocated, target.segments, strict=True)
    ]
    numpy = sys.modules.get("numpy")
    sources = {name: "".join(linecache.getlines(name)) for name in parts.files if not is_library("", name)}
    if what.source is not None:
        sources[what.filename] = what.source
    return {
        "engine": chosen.name, "is_brief": False, "gpus": chosen.gpus, "workspaces": _workspaces(target),
        "source": what.source, "filename": what.filename, "data": parts.data, "scopes": parts.scopes,
        "sources": {name: text for name, text in sources.items() if text}, "values": values,
        "backend": target.backend, "chosen": target.chosen, "base": base, "cuts_to_size": target.cuts_to_size,
        "capacities": [
            None if each is None else max(0, each - target.extra[1]) for each in target.capacities
        ],
        "pinned": target.pinned, "segments": target.segments, "guess": 0,
        "time_limit": time_limit, "path": list(sys.path), "folder": os.getcwd(),  # noqa: PTH109
        "preload": [name for name in list(sys.modules) if name.partition(".")[0] in _PRELOADED],
        "random": random.getstate(), "torch_random": bytes(torch.get_rng_state().tolist()),
        "numpy_random": None if numpy is None else numpy.random.get_state(),
    }  # fmt: skip


def _workspaces(target: Target) -> list[list[tuple[int, int]]]:
    """Return where torch keeps workspaces for cuBLAS, and their bytes, for each device; none on an imagined one."""
    found = [] if target.is_imagined else workspaces.find_workspaces()
    return [[(each.address, each.nbytes) for each in found if each.device == name] for name in target.names]


def _report(told: dict[str, Any], chosen: Engine, parts: parcel.Parcel) -> RehearsalReport:
    target = chosen.target
    error, complete = told["error"], told["error"] is None and not told["missed"] and not told["is_open"]
    devices = tuple(
        _device(name, found, capacity, target.extra, complete)
        for name, found, capacity in zip(target.names, told["devices"], target.capacities, strict=True)
    )
    deciding = min(devices, key=lambda each: _room(each, target.names[target.chosen]))
    unknown = [*told["unknown"], *parts.notes, *target.unknown, *(missed_sentence(place) for place in told["missed"])]
    if target.extra[1]:
        unknown.append(not_modelled(target.extra, chosen.name))
    return RehearsalReport(
        device=deciding.device,
        peak={each.device: each.peak for each in devices},
        line=deciding.line,
        code=deciding.code,
        operator=deciding.operator,
        breakdown=deciding.breakdown,
        engine=chosen.name,
        fits=_together([each.fits for each in devices]),
        capacity=deciding.capacity,
        verdict=verdict_sentence(deciding, error),
        points=tuple(RehearsalPoint(target.names[index], *found) for index, *found in told["timeline"]),
        assumed=(*told["assumed"], *parts.assumed, *(cut_sentence(place, passes) for place, passes in told["cut"])),
        unknown=tuple(dict.fromkeys(unknown)),
        effects=tuple(told["effects"]),
        error=None if error is None else failure_sentence(error),
        devices=devices,
        lines=tuple(
            RehearsalRow(target.names[each["device"]], each["line"], each["code"], each["peak"], each["after"])
            for each in sorted(told["lines"], key=lambda each: (each["line"], each["device"]))
        ),
        operators=told["operators"],
        seconds=told["seconds"],
    )  # fmt: skip


def _device(
    name: str, found: dict[str, Any], capacity: int | None, extra: tuple[int, int], complete: bool
) -> DeviceForecast:
    at, failure = found["at"], found["failure"]
    return DeviceForecast(
        device=name, peak=found["peak"], reserved=found["reserved"], before=found["before"], after=found["after"],
        capacity=capacity, extra=extra, fits=_fits(found, capacity, extra, complete), line=at["line"],
        code=at["code"] or None, function=at["function"] or None, operator=at["operator"] or None,
        operator_bytes=at["nbytes"], failure_line=None if failure is None else failure["line"],
        breakdown=dict(sorted(found["breakdown"].items(), key=lambda item: -item[1])),
    )  # fmt: skip


def _fits(found: dict[str, Any], capacity: int | None, extra: tuple[int, int], complete: bool) -> bool | None:
    """Judge one device: a clear no, a clear yes only of a run that was seen to its end, and between them None."""
    if capacity is None:
        return None
    if not found["failed"]:
        return True if complete else None
    return False if extra[0] == extra[1] or found["peak"] + extra[0] > capacity else None


def _room(device: DeviceForecast, chosen: str) -> tuple[int, float, bool]:
    """Order devices: those that fail, then by the share that is left, then the one that was asked about."""
    verdict = {False: 0, None: 1, True: 2}[device.fits]
    share = (device.capacity - device.peak) / device.capacity if device.capacity else 1.0
    return verdict, share, device.device != chosen


def _together(fits: list[bool | None]) -> bool | None:
    if False in fits:
        return False
    return None if None in fits else True


def _nothing(target: Target, sentence: str) -> RehearsalReport:
    return RehearsalReport(
        device=target.names[target.chosen], peak={}, line=None, code=None, operator=None, breakdown={}, fits=None,
        capacity=target.capacities[target.chosen], verdict=f"{sentence[:1].upper()}{sentence[1:]}.", error=sentence,
    )  # fmt: skip


OTHERS = (1, 2, 3)
"""Which of `stage.contents.GUESSES` are tried besides the first."""
_MATH = frozenset({"ValueError", "OverflowError", "ZeroDivisionError", "LinAlgError", "_LinAlgError"})
"""What arithmetic with a made-up number, or status, may raise: it tells nothing."""
_ALIKE = 0.01
_NAMES = {
    "host": "what large tensors and arrays on the CPU hold",
    "chance": "what is drawn at random",
    "truths": "values on the device",
    "values": "values on the device",
}

Account = dict[str, Any]


def compare(told: Account, order: dict[str, Any]) -> Account:
    """Rehearse with other values; return the account with the higher peak, its verdict open where they matter.

    Truth values are two: where the cell fits with either, it is said to fit.

    Args:
        told: the first account.
        order: what it answers.
    """
    limit = min(order["time_limit"], 2 + 3 * told["seconds"])
    for guess in OTHERS[:1] if told["guessed"] == ["host"] else OTHERS:
        other = ask({**order, "guess": guess, "time_limit": limit, "is_brief": True})
        why = _difference(told, other)
        if not why:
            continue
        is_open = told["guessed"] != ["truths"] or not _is_seen_to_its_end(other) or _failures(told) != _failures(other)
        if "devices" in other and not _failures(other) and _peaks(other) > _peaks(told):
            told, other = ask({**order, "guess": guess}), told
        on = " or ".join(_NAMES[each] for each in sorted(_NAMES) if each in told["guessed"])
        told["unknown"].insert(0, f"what the cell does depends on {on or 'values on the device'}: {why}")
        told["is_open"] = told["is_open"] or is_open
        if not (_failures(told) and _failures(other)):
            for device in told["devices"] if is_open else ():
                device["failed"] = False  # with other values it may fit
        return told
    return told


def _difference(told: Account, other: Account) -> str:
    """Return what is different with other values, or nothing."""
    if "ended" in other:
        return f"with others {other['ended']}"
    if other["error"] is not None:
        error = other["error"]
        return "" if error["kind"] in _MATH else f"with others it ends with {error['kind']}: {error['text']}"
    for one, two in zip(_peaks(told), _peaks(other), strict=True):
        if abs(one - two) > _ALIKE * one:
            return f"it needs {size(one)} or {size(two)}, as they are"
    return "with others it does not fit, or does" if _failures(told) != _failures(other) else ""


def _is_seen_to_its_end(account: Account) -> bool:
    return "devices" in account and account["error"] is None and not account["is_open"] and not account["missed"]


def _peaks(account: Account) -> list[int]:
    return [device["peak"] for device in account["devices"]]


def _failures(account: Account) -> list[bool]:
    return [device["failed"] for device in account.get("devices", ()) if device["failed"]]
