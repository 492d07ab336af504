"""What torch calls each card: certain by UUID once CUDA is in use, until then predicted from the environment.

NVML ignores the variable and always counts in PCI order; CUDA reads it once, when it starts. Until then the
mapping can only be predicted. The rules are CUDA's own, as torch repeats them (`_parse_visible_devices`):
numbers are read as C's strtoul reads them, the first entry that names nothing ends the list, an entry named
twice makes it empty, UUIDs may be abbreviated, and no more than one MIG instance is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.gpus.cards import Card, NvmlSnapshot
from gpumagic.gpus.torch_build import TorchBuild, bare_uuid, cuda_devices


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


def visible_cards(
    variable: str | None, uuids: Sequence[str | None], instance_uuids: Sequence[str | None] = ()
) -> Visibility:
    """Return what a value of CUDA_VISIBLE_DEVICES leaves visible.

    Args:
        variable: the value, None if it is not set.
        uuids: UUID of each card in NVML's order, with its ``GPU-`` prefix; None where it cannot be read.
        instance_uuids: UUID of each MIG instance of all cards in order.
    """
    if variable is None:
        return Visibility(tuple(range(len(uuids))))
    if variable.startswith("GPU-"):
        return _by_uuid(_leading_entries(variable, "GPU-"), uuids)
    if variable.startswith("MIG-"):
        return _by_instance(_leading_entries(variable, "MIG-"), instance_uuids)
    return _by_number(variable, len(uuids))


def _by_number(variable: str, count: int) -> Visibility:
    numbers: list[int] = []
    invalid = None
    for entry in variable.split(","):
        number = parse_ordinal(entry.strip())
        if number in numbers:
            return Visibility(problem=f"names {number} twice, which hides every GPU")
        if number < 0:
            invalid = entry.strip()
            break
        numbers.append(number)
    beyond = next((position for position, number in enumerate(numbers) if number >= count), None)
    if beyond is not None:
        invalid, numbers = str(numbers[beyond]), numbers[:beyond]
    return Visibility(tuple(numbers), problem=_ended_by(invalid))


def _by_uuid(entries: Sequence[str], uuids: Sequence[str | None]) -> Visibility:
    if len(set(entries)) < len(entries):
        return Visibility(by_uuid=True, problem="names a UUID twice, which hides every GPU")
    found: list[int] = []
    for entry in entries:
        index = _match_uuid(entry, uuids)
        if index is None:
            return Visibility(tuple(found), by_uuid=True, problem=_ended_by(entry))
        if index in found:
            return Visibility(by_uuid=True, problem=f"names GPU {index} twice, which hides every GPU")
        found.append(index)
    return Visibility(tuple(found), by_uuid=True)


def _by_instance(entries: Sequence[str], uuids: Sequence[str | None]) -> Visibility:
    index = _match_uuid(entries[0], uuids)
    return Visibility(instance=index, by_uuid=True, problem=_ended_by(entries[0]) if index is None else None)


def _match_uuid(entry: str, uuids: Sequence[str | None]) -> int | None:
    """Return the one device whose UUID begins so; an ambiguous abbreviation names none."""
    found = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _leading_entries(variable: str, prefix: str) -> list[str]:
    entries = variable.split(",")
    end = next((i for i, entry in enumerate(entries) if not entry.startswith(prefix)), len(entries))
    return entries[:end]


def parse_ordinal(text: str) -> int:
    """Return the number a text begins with, such as 1 for ``"1gpu"``; negative where it begins with none."""
    match = re.match(r"[+-]?[0-9]{1,18}", text)
    return int(match[0]) if match else -1


def _ended_by(entry: str | None) -> str | None:
    if entry is None:
        return None
    return f"names no GPU with {entry!r}, and CUDA stops at the first such entry" if entry else "is empty"


@dataclass(frozen=True, slots=True)
class TorchName:
    """What torch calls a card or instance, and whether that is only predicted."""

    ordinal: int
    predicted: bool


def read_visibility(answer: NvmlSnapshot) -> Visibility:
    """Return what CUDA_VISIBLE_DEVICES leaves visible of these cards."""
    instances = [instance.uuid for card in answer.cards for instance in card.instances]
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible_cards(variable, [card.uuid for card in answer.cards], instances)


def torch_names(
    answer: NvmlSnapshot, flat: Sequence[Card], build: TorchBuild, view: Visibility
) -> dict[int, TorchName]:
    """Return the torch ordinal of each position in ``flat`` that torch can use."""
    if build.version is None or (build.known and build.cuda is None):
        return {}
    in_use = cuda_devices()
    if in_use:
        return _known_names(in_use, flat)
    if driver_is_too_old(answer, build):
        return {}
    return _predicted_names(answer, flat, view)


def driver_is_too_old(answer: NvmlSnapshot, build: TorchBuild) -> bool:
    """Return whether torch was built for a CUDA of a later major version; within one, older drivers do."""
    major = (build.cuda or "").partition(".")[0]
    return answer.cuda_version is not None and major.isdigit() and int(major) > answer.cuda_version[0]


def _known_names(in_use: Mapping[str, tuple[int, Any]], flat: Sequence[Card]) -> dict[int, TorchName]:
    uuids = [bare_uuid(each.uuid) for each in flat]
    return {
        position: TorchName(in_use[uuid][0], predicted=False)
        for position, uuid in enumerate(uuids)
        if uuid and uuid in in_use
    }


def _predicted_names(answer: NvmlSnapshot, flat: Sequence[Card], view: Visibility) -> dict[int, TorchName]:
    if view.instance is not None:
        instances = [position for position, each in enumerate(flat) if each.is_instance]
        return {instances[view.instance]: TorchName(0, predicted=False)}
    unsure = _order_is_unsure(answer, view)
    named = {}
    for ordinal, index in enumerate(view.cards):
        card = answer.cards[index]
        # CUDA never uses a card in MIG mode itself, but its first instance.
        target = card.instances[0] if card.mig and card.instances else card
        if not (card.mig and not card.instances):
            position = next(i for i, each in enumerate(flat) if each is target)
            named[position] = TorchName(ordinal, predicted=unsure)
    return named


def _order_is_unsure(answer: NvmlSnapshot, view: Visibility) -> bool:
    """Return whether CUDA may number differently: by default it puts the fastest card first, whatever its slot."""
    if any(card.mig for card in answer.cards):
        return True
    if view.by_uuid or len(answer.cards) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    names = [card.values.get("name") for card in answer.cards]
    return None in names or len(set(names)) > 1
