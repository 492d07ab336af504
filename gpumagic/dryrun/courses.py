"""Other values in place of those that the host reads from the device and that a dry run does not know.

A loss that is printed changes nothing; a length that sizes a tensor, or a number that decides a branch, does, and then
it is unknown whether the cell fits.
"""

from __future__ import annotations

from typing import Any

from gpumagic.dryrun import client, engine
from gpumagic.report.units import size

OTHERS = (1, 2, 3)
"""Which of `stage.contents.GUESSES` are tried besides the first."""
_MATH = frozenset({"ValueError", "OverflowError", "ZeroDivisionError", "LinAlgError", "_LinAlgError"})
"""What arithmetic with a made-up number, or status, may raise: it tells nothing."""
_ALIKE = 0.01
_NAMES = {
    "host": "what large tensors and arrays on the CPU hold",
    "truths": "values on the device",
    "values": "values on the device",
}

Account = dict[str, Any]


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


def compare(told: Account, order: dict[str, Any]) -> Account:
    """Run with other values; return the account with the higher peak, its verdict open where they matter.

    Truth values are two: where the cell fits with either, it is said to fit.

    Args:
        told: the first account.
        order: what it answers.
    """
    limit = min(order["time_limit"], 2 + 3 * told["seconds"])
    for guess in OTHERS[:1] if kinds(told) == ["host"] else OTHERS:
        other = ask({**order, "guess": guess, "time_limit": limit, "is_brief": True})
        why = _difference(told, other)
        if not why:
            continue
        is_open = kinds(told) != ["truths"] or not _is_seen_to_its_end(other) or _failures(told) != _failures(other)
        if "devices" in other and not _failures(other) and _peaks(other) > _peaks(told):
            told, other = ask({**order, "guess": guess}), told
        on = " or ".join(_NAMES[each] for each in sorted(_NAMES) if each in kinds(told))
        told["unknown"].insert(0, f"what the cell does depends on {on or 'values on the device'}: {why}")
        told["is_open"] = told["is_open"] or is_open
        if not (_failures(told) and _failures(other)):
            for device in told["devices"] if is_open else ():
                device["failed"] = False  # with other values it may fit
        return told
    return told


def kinds(told: Account) -> list[str]:
    """Return what was not known of all that the host read."""
    known = {"truth": "truths", "host": "host"}
    return sorted({known.get(kind, "values") for _, _, kind in told["reads"]})


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
    return "devices" in account and account["error"] is None and not account["is_open"]


def _peaks(account: Account) -> list[int]:
    return [device["peak"] for device in account["devices"]]


def _failures(account: Account) -> list[bool]:
    return [device["failed"] for device in account.get("devices", ()) if device["failed"]]
