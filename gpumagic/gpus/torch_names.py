"""What torch calls each card: certain by UUID once CUDA is in use, until then predicted from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.gpus import cuda_in_use
from gpumagic.gpus.cards import Card, Snapshot
from gpumagic.gpus.torch_build import TorchBuild
from gpumagic.gpus.visibility import Visibility, visible


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
    in_use = cuda_in_use.devices()
    if in_use:
        return _certain_names(in_use, flat)
    if driver_is_too_old(answer, build):
        return {}
    return _predicted_names(answer, flat, view)


def driver_is_too_old(answer: Snapshot, build: TorchBuild) -> bool:
    """Return whether torch was built for a CUDA of a later major version; within one, older drivers do."""
    major = (build.cuda or "").partition(".")[0]
    return answer.cuda_version is not None and major.isdigit() and int(major) > answer.cuda_version[0]


def _certain_names(in_use: Mapping[str, tuple[int, Any]], flat: Sequence[Card]) -> dict[int, Naming]:
    uuids = [cuda_in_use.bare(each.uuid) for each in flat]
    return {
        position: Naming(in_use[uuid][0], predicted=False)
        for position, uuid in enumerate(uuids)
        if uuid and uuid in in_use
    }


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
