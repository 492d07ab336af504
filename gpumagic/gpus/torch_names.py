"""Torch's name of each card: certain by UUID once CUDA is in use, until then predicted from the environment.

NVML ignores CUDA_VISIBLE_DEVICES and numbers cards in PCI order; CUDA reads it once, when it starts. The prediction
follows CUDA's rules, as torch repeats them (`_parse_visible_devices`): numbers are read as by C's strtoul, the first
entry that names nothing ends the list, a duplicate makes it empty, UUIDs may be abbreviated, and at most one MIG
instance is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from gpumagic.gpus.cards import Card, NvmlSnapshot
from gpumagic.gpus.torch_devices import TorchBuild, bare_uuid, cuda_devices


@dataclass(frozen=True, slots=True)
class Visibility:
    """The cards or the MIG instance that CUDA will number 0, 1, ... in this process."""

    cards: tuple[int, ...] = ()
    """NVML indices in CUDA's order."""
    instance: int | None = None
    """Index of the requested MIG instance among all instances; ``cards`` is empty then."""
    by_uuid: bool = False
    """Whether the variable names UUIDs, so that the order of the cards does not matter."""
    problem: str | None = None
    """Why fewer devices are visible than requested, as part of a sentence."""


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
        return _by_uuid(list(takewhile(lambda entry: entry.startswith("GPU-"), variable.split(","))), uuids)
    if variable.startswith("MIG-"):
        entry = variable.split(",")[0]
        index = _match_uuid(entry, instance_uuids)
        return Visibility(instance=index, by_uuid=True, problem=_ended_by(entry) if index is None else None)
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


def _match_uuid(entry: str, uuids: Sequence[str | None]) -> int | None:
    """Return the one device whose UUID starts with the entry, None if there are several."""
    found = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def parse_ordinal(text: str) -> int:
    """Return the leading number of a text, such as 1 for ``"1gpu"``; -1 if there is none."""
    match = re.match(r"[+-]?[0-9]{1,18}", text)
    return int(match[0]) if match else -1


def _ended_by(entry: str | None) -> str | None:
    if entry is None:
        return None
    return f"names no GPU with {entry!r}, and CUDA stops at the first such entry" if entry else "is empty"


class TorchName(NamedTuple):
    """Torch's index of a card or instance, and whether it is only predicted."""

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
    """Return the names of those positions in ``flat`` that torch can use."""
    if build.version is None or (build.known and build.cuda is None):
        return {}
    in_use = cuda_devices()
    if in_use:
        found = {i: in_use.get(bare_uuid(each.uuid)) for i, each in enumerate(flat) if each.uuid}
        return {i: TorchName(device[0], predicted=False) for i, device in found.items() if device is not None}
    if driver_is_too_old(answer, build):
        return {}
    return _predicted_names(answer, flat, view)


def driver_is_too_old(answer: NvmlSnapshot, build: TorchBuild) -> bool:
    """Return whether torch was built for a later major version of CUDA; within one, older drivers work."""
    major = (build.cuda or "").partition(".")[0]
    return answer.cuda_version is not None and major.isdigit() and int(major) > answer.cuda_version[0]


def _predicted_names(answer: NvmlSnapshot, flat: Sequence[Card], view: Visibility) -> dict[int, TorchName]:
    if view.instance is not None:
        instances = [position for position, each in enumerate(flat) if each.is_instance]
        return {instances[view.instance]: TorchName(0, predicted=False)}
    unsure = _order_is_unsure(answer, view)
    named = {}
    for ordinal, index in enumerate(view.cards):
        card = answer.cards[index]
        # CUDA never uses a card in MIG mode itself, but its first instance.
        if not card.mig or card.instances:
            target = card.instances[0] if card.mig else card
            named[next(i for i, each in enumerate(flat) if each is target)] = TorchName(ordinal, predicted=unsure)
    return named


def _order_is_unsure(answer: NvmlSnapshot, view: Visibility) -> bool:
    """Return whether CUDA may number differently: by default it puts the fastest card first, whatever its slot."""
    if any(card.mig for card in answer.cards):
        return True
    if view.by_uuid or len(answer.cards) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    names = [card.values.get("name") for card in answer.cards]
    return None in names or len(set(names)) > 1
