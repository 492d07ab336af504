"""Which card is `cuda:1`? CUDA's ordinals as CUDA_VISIBLE_DEVICES makes them, in NVML's numbers.

NVML ignores the variable and always counts in PCI order; CUDA reads it once, when it starts. Until then the
mapping can only be predicted. The rules are CUDA's own, as torch repeats them (`_parse_visible_devices`):
numbers are read as C's strtoul reads them, the first entry that names nothing ends the list, an entry named
twice makes it empty, UUIDs may be abbreviated, and no more than one MIG instance is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visibility:
    """The cards or MIG instances that CUDA will number 0, 1, ... in this process."""

    cards: tuple[int, ...] = ()
    """NVML indices in CUDA's order."""
    instance: int | None = None
    """Index of the one MIG instance asked for, among all instances; then ``cards`` is empty."""
    by_uuid: bool = False
    """True if the variable names UUIDs, so that the order of the cards does not matter."""
    problem: str | None = None
    """Why fewer devices are visible than were asked for, as part of a sentence."""


def visible(variable: str | None, uuids: Sequence[str | None], instance_uuids: Sequence[str | None] = ()) -> Visibility:
    """Return what a value of CUDA_VISIBLE_DEVICES leaves visible.

    Args:
        variable: the value, None if it is not set.
        uuids: UUID of each card in NVML's order, with its ``GPU-`` prefix; None where it cannot be read.
        instance_uuids: UUID of each MIG instance of all cards in order.
    """
    if variable is None:
        return Visibility(tuple(range(len(uuids))))
    if variable.startswith("GPU-"):
        return _by_uuid(_prefixed(variable, "GPU-"), uuids)
    if variable.startswith("MIG-"):
        return _one_instance(_prefixed(variable, "MIG-"), instance_uuids)
    return _by_number(variable, len(uuids))


def _by_number(variable: str, count: int) -> Visibility:
    numbers: list[int] = []
    invalid = None
    for entry in variable.split(","):
        number = strtoul(entry.strip())
        if number in numbers:
            return Visibility(problem=f"names {number} twice, which hides every GPU")
        if number < 0:
            invalid = entry.strip()
            break
        numbers.append(number)
    beyond = next((position for position, number in enumerate(numbers) if number >= count), None)
    if beyond is not None:
        invalid, numbers = str(numbers[beyond]), numbers[:beyond]
    return Visibility(tuple(numbers), problem=_ended(invalid))


def _by_uuid(entries: Sequence[str], uuids: Sequence[str | None]) -> Visibility:
    if len(set(entries)) < len(entries):
        return Visibility(by_uuid=True, problem="names a UUID twice, which hides every GPU")
    found: list[int] = []
    for entry in entries:
        index = _match(entry, uuids)
        if index is None:
            return Visibility(tuple(found), by_uuid=True, problem=_ended(entry))
        if index in found:
            return Visibility(by_uuid=True, problem=f"names GPU {index} twice, which hides every GPU")
        found.append(index)
    return Visibility(tuple(found), by_uuid=True)


def _one_instance(entries: Sequence[str], uuids: Sequence[str | None]) -> Visibility:
    index = _match(entries[0], uuids)
    return Visibility(instance=index, by_uuid=True, problem=_ended(entries[0]) if index is None else None)


def _match(entry: str, uuids: Sequence[str | None]) -> int | None:
    """Return the one device whose UUID begins so; an ambiguous abbreviation names none."""
    found = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _prefixed(variable: str, prefix: str) -> list[str]:
    entries = variable.split(",")
    end = next((i for i, entry in enumerate(entries) if not entry.startswith(prefix)), len(entries))
    return entries[:end]


def strtoul(text: str) -> int:
    """Return the number a text begins with, such as 1 for ``"1gpu"``; negative where it begins with none."""
    match = re.match(r"[+-]?[0-9]{1,18}", text)
    return int(match[0]) if match else -1


def _ended(entry: str | None) -> str | None:
    if entry is None:
        return None
    return f"names no GPU with {entry!r}, and CUDA stops at the first such entry" if entry else "is empty"
