"""`Facts` written by hand: fields of all of its records by their names, each put into the record that has it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from gpumagic.advice.facts import Event, Facts, Frames, Kind, Memory, Notebook

_RECORD_OF = {
    field.name: name
    for name, record in (("event", Event), ("frames", Frames), ("notebook", Notebook))
    for field in fields(record)
}
_ENUMS = {"kind": Kind, "memory": Memory}


def made_facts(kind: str, **values: Any) -> Facts:
    """Return the facts of a failure of this kind with these fields; the others are as where nothing is known."""
    return changed(Facts(Event(Kind(kind))), **values)


def changed(facts: Facts, **values: Any) -> Facts:
    """Return facts with other values of some fields."""
    records: dict[str, Any] = {}
    if "need" in values:
        records["need"] = values.pop("need")
    for name in dict.fromkeys(_RECORD_OF[field] for field in values):
        own = {field: value for field, value in values.items() if _RECORD_OF[field] == name}
        own = {field: _ENUMS.get(field, lambda same: same)(value) for field, value in own.items()}
        records[name] = replace(getattr(facts, name), **own)
    return replace(facts, **records)
