"""What torch calls each card: certain by UUID once CUDA is in use, until then predicted from the environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from gpumagic.probes.cards import Card, Snapshot
from gpumagic.probes.torch_build import TorchBuild
from gpumagic.probes.visibility import Visibility, visible


@dataclass(frozen=True, slots=True)
class Naming:
    """What torch calls a card or instance, and whether that is only predicted."""

    ordinal: int
    predicted: bool


def visibility(answer: Snapshot) -> Visibility:
    """Return what CUDA_VISIBLE_DEVICES leaves visible of these cards."""
    instances = [instance.uuid for card in answer.cards for instance in card.instances]
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible(variable, [card.uuid for card in answer.cards], instances)


def names(answer: Snapshot, flat: Sequence[Card], build: TorchBuild, view: Visibility) -> dict[int, Naming]:
    """Return the torch ordinal of each position in ``flat`` that torch can use."""
    if build.version is None or (build.known and build.cuda is None):
        return {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return _certain_names(torch, flat)
    if driver_is_too_old(answer, build):
        return {}
    return _predicted_names(answer, flat, view)


def driver_is_too_old(answer: Snapshot, build: TorchBuild) -> bool:
    """Return whether torch was built for a CUDA of a later major version; within one, older drivers do."""
    major = (build.cuda or "").partition(".")[0]
    return answer.cuda_version is not None and major.isdigit() and int(major) > answer.cuda_version[0]


def _certain_names(torch: ModuleType, flat: Sequence[Card]) -> dict[int, Naming]:
    positions = {_bare(each.uuid): position for position, each in enumerate(flat) if each.uuid}
    named = {}
    for ordinal in range(torch.cuda.device_count()):
        uuid = _bare(str(getattr(torch.cuda.get_device_properties(ordinal), "uuid", "")))
        if uuid in positions:
            named[positions[uuid]] = Naming(ordinal, predicted=False)
    return named


def _predicted_names(answer: Snapshot, flat: Sequence[Card], view: Visibility) -> dict[int, Naming]:
    if view.instance is not None:
        instances = [position for position, each in enumerate(flat) if each.is_instance]
        return {instances[view.instance]: Naming(0, predicted=False)}
    unsure = _order_is_unsure(answer, view)
    named = {}
    for ordinal, index in enumerate(view.cards):
        card = answer.cards[index]
        # CUDA never uses a card in MIG mode itself, but its first instance.
        target = card.instances[0] if card.mig and card.instances else card
        if not (card.mig and not card.instances):
            position = next(i for i, each in enumerate(flat) if each is target)
            named[position] = Naming(ordinal, predicted=unsure)
    return named


def _order_is_unsure(answer: Snapshot, view: Visibility) -> bool:
    """Return whether CUDA may number differently: by default it puts the fastest card first, whatever its slot."""
    if any(card.mig for card in answer.cards):
        return True
    if view.by_uuid or len(answer.cards) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    names = [card.values.get("name") for card in answer.cards]
    return None in names or len(set(names)) > 1


def _bare(uuid: str | None) -> str:
    return re.sub(r"^(GPU-|MIG-)", "", uuid or "").lower()
