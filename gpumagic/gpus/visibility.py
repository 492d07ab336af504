"""Which GPUs torch can use in this process: torch's name of each, or why there is none, with the remedy.

A name is certain by UUID once CUDA is in use, and until then predicted from the environment. NVML ignores
CUDA_VISIBLE_DEVICES and numbers cards in PCI order; CUDA reads it once, when it starts. The prediction follows CUDA's
rules, as torch repeats them (`_parse_visible_devices`): numbers are read as by C's strtoul, the first entry that names
nothing ends the list, a duplicate makes it empty, UUIDs may be abbreviated, and at most one MIG instance is used.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from gpumagic.gpus.cards import ONE_INSTANCE, SPLIT, NvmlSnapshot
from gpumagic.gpus.nvml import NvmlFailure
from gpumagic.gpus.report import GpuRow
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
    variable: str | None,
    uuids: Sequence[str | None],
    instance_uuids: Sequence[str | None] = (),
) -> Visibility:
    """Return what a value of CUDA_VISIBLE_DEVICES leaves visible.

    Args:
        variable: the value, None if it is not set.
        uuids: UUID of each card in NVML's order, with its ``GPU-`` prefix; None where it cannot be read.
        instance_uuids: UUID of each MIG instance of all cards in order.
    """
    if variable is None:
        return Visibility(tuple(range(len(uuids))))
    entries = [entry.strip() for entry in variable.split(",")]
    if variable.startswith("MIG-"):
        instance = _match_uuid(entries[0], instance_uuids)
        problem = _ended_by(entries[0]) if instance is None else None
        return Visibility(instance=instance, by_uuid=True, problem=problem)
    by_uuid = variable.startswith("GPU-")
    if by_uuid:
        entries = list(takewhile(lambda entry: entry.startswith("GPU-"), entries))
    indices: list[int] = []
    problem = None
    for entry in entries:
        index = _match_uuid(entry, uuids) if by_uuid else parse_ordinal(entry)
        if index in indices:
            twice = f"names {entry} twice, which hides every GPU"
            return Visibility(by_uuid=by_uuid, problem=twice)
        if index is None:
            problem = _ended_by(entry)
            break
        indices.append(index)
    if by_uuid and len(set(entries)) < len(entries):  # also behind an invalid one
        return Visibility(
            by_uuid=True, problem="names a UUID twice, which hides every GPU"
        )
    here = list(takewhile(lambda index: index < len(uuids), indices))
    if len(here) < len(indices):
        problem = _ended_by(str(indices[len(here)]))
    return Visibility(tuple(here), by_uuid=by_uuid, problem=problem)


def _match_uuid(entry: str, uuids: Sequence[str | None]) -> int | None:
    """Return the one device whose UUID starts with the entry, None if there are several."""
    matching = []
    for index, uuid in enumerate(uuids):
        if uuid is not None and uuid.startswith(entry):
            matching.append(index)
    return matching[0] if len(matching) == 1 else None


def parse_ordinal(text: str) -> int | None:
    """Return the leading number of a text, such as 1 for ``"1gpu"``; None if there is none, or a negative one."""
    match = re.match(r"[+]?[0-9]{1,18}", text)
    return int(match[0]) if match else None


def _ended_by(entry: str) -> str:
    if entry == "-1":
        return "names -1, which hides every GPU from there on"
    if not entry:
        return "is empty"
    return f"names no GPU with {entry!r}, and CUDA stops at the first such entry"


def with_torch_names(
    answer: NvmlSnapshot, build: TorchBuild, view: Visibility
) -> list[GpuRow]:
    """Return the rows, those that torch can use with its names for them."""
    in_use = cuda_devices()
    if build.cuda is None or (not in_use and driver_is_too_old(answer, build)):
        return list(answer.rows)
    if in_use:
        ordinals = _ordinals_in_use(answer, in_use)
        predicted = False
    else:
        ordinals = _predicted_ordinals(answer, view)
        predicted = _is_unsure(answer, view)
    rows = []
    for row in answer.rows:
        ordinal = ordinals.get(id(row))
        if ordinal is not None:
            row = replace(row, device=f"cuda:{ordinal}", predicted=predicted)  # noqa: PLW2901
        rows.append(row)
    return rows


def _ordinals_in_use(
    answer: NvmlSnapshot, in_use: Mapping[str, tuple[int, object]]
) -> dict[int, int]:
    """Return CUDA's number of each row by the row's `id`, as CUDA itself says."""
    ordinals = {}
    for row in answer.rows:
        device = in_use.get(bare_uuid(row.uuid)) if row.uuid else None
        if device is not None:
            ordinals[id(row)], _ = device
    return ordinals


def _predicted_ordinals(answer: NvmlSnapshot, view: Visibility) -> dict[int, int]:
    """Return CUDA's number of each row by the row's `id`, as it follows from the environment."""
    if view.instance is not None:
        instances = [
            row for row in answer.rows if row.reasons.get("device") == ONE_INSTANCE
        ]
        return {id(instances[view.instance]): 0}
    ordinals = {}
    for ordinal, index in enumerate(view.cards):
        card, *instances = answer.cards[index]
        if card.reasons.get("device") != SPLIT:
            ordinals[id(card)] = ordinal
        elif (
            instances
        ):  # CUDA never uses a card in MIG mode itself, but its first instance
            ordinals[id(instances[0])] = ordinal
    return ordinals


def _is_unsure(answer: NvmlSnapshot, view: Visibility) -> bool:
    """Return whether CUDA may number the cards otherwise: by default the fastest comes first, whatever its slot."""
    if view.instance is not None:
        return False
    if any(row.reasons.get("device") == SPLIT for row in answer.rows):
        return True
    if view.by_uuid or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    names = {card.name for card, *_ in answer.cards}
    return len(answer.cards) > 1 and (None in names or len(names) > 1)


def driver_is_too_old(answer: NvmlSnapshot, build: TorchBuild) -> bool:
    """Return whether torch was built for a later major version of CUDA; within one, older drivers work."""
    major, _, _ = (build.cuda or "").partition(".")
    if answer.cuda_version is None or not major.isdigit():
        return False
    return int(major) > answer.cuda_version[0]


ROOT = Path("/")


def detect_environment() -> set[str]:
    """Return what files and environment variables say of the machine around this process; starts nothing."""
    signs = {
        "mac": sys.platform == "darwin",
        "colab": "COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules,
        "kaggle": "KAGGLE_KERNEL_RUN_TYPE" in os.environ,
        "container": _exists(".dockerenv", "run/.containerenv")
        or "KUBERNETES_SERVICE_HOST" in os.environ,
        "wsl": _exists("dev/dxg"),
        "driver": _exists(
            "proc/driver/nvidia/version", "dev/nvidiactl", "sys/module/nvidia"
        ),
    }
    return {name for name, is_there in signs.items() if is_there}


def explain(
    answer: NvmlSnapshot | NvmlFailure,
    build: TorchBuild,
    view: Visibility | None,
    here: Collection[str] | None = None,
) -> str:
    """Return why torch can use no GPU, with the remedy.

    ``view`` is what CUDA_VISIBLE_DEVICES leaves visible of NVML's cards, None if NVML did not answer.
    """
    if here is None:
        here = detect_environment()
    if build.hip:
        return "torch is a ROCm build, whose GPUs are only shown once in use: run torch.cuda.init() and ask again."
    if isinstance(answer, NvmlFailure):
        if build.xpu:
            return "torch is an XPU build, whose devices are shown once it is imported: import torch and ask again."
        return _sentence(answer.problem, here).format(answer.detail)
    if not answer.rows:
        return _sentence("no GPU", here)
    return _hidden_from_cuda(answer, build, view)


def _sentence(problem: str, here: Collection[str]) -> str:
    """Return the first of the sentences about a problem whose signs are all here."""
    for about, signs, sentence in _CAUSES:
        if about in ("", problem) and set(signs.split()) <= set(here):
            return sentence
    raise AssertionError("the last cause is for every problem")


def _hidden_from_cuda(
    answer: NvmlSnapshot, build: TorchBuild, view: Visibility | None
) -> str:
    if build.version is None:
        return "PyTorch is not installed in this environment, so nothing here can use the GPU: pip install torch."
    if build.cuda is None:
        return (
            f"torch {build.version} is a CPU-only build and cannot use the GPU: install a CUDA build with the command "
            "that https://pytorch.org/get-started gives."
        )
    if driver_is_too_old(answer, build) and answer.cuda_version is not None:
        newest = "{}.{}".format(*answer.cuda_version)
        return (
            f"torch {build.version} needs CUDA {build.cuda}, and the driver {answer.driver_version} knows CUDA only "
            f"up to {newest}: update the driver, or install a torch for CUDA {answer.cuda_version[0]}."
        )
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (
        variable is not None
        and view is not None
        and not view.cards
        and view.instance is None
    ):
        problem = view.problem or "names no GPU"
        return (
            f"CUDA_VISIBLE_DEVICES={variable!r} {problem}, so this process may use none of the "
            f"{len(answer.cards)} here: correct or unset it and restart the kernel."
        )
    empty = [card for card, *instances in answer.cards if not instances]
    if any(card.reasons.get("device") == SPLIT for card in empty):
        return "The GPU is in MIG mode without an instance: have an administrator create one (nvidia-smi mig)."
    return "CUDA started in this process and found none of the driver's GPUs: restart the kernel."


_ASK_FOR_GPU = (
    "start it with --gpus all (Docker) or ask for nvidia.com/gpu (Kubernetes)."
)
_CAUSES = (
    ("", "colab", "This Colab runtime has no GPU: choose one in the menu Runtime > Change runtime type."),
    ("", "kaggle", "This Kaggle session has no GPU: choose one under Settings > Accelerator."),
    ("", "mac", "A Mac has no NVIDIA driver; its own GPU is shown once torch is imported and was built with MPS."),
    ("no GPU", "container", f"The NVIDIA driver answers but has given this container no GPU: {_ASK_FOR_GPU}"),
    ("no GPU", "", "The NVIDIA driver runs but finds no GPU: see why in sudo dmesg (lines with NVRM), or reboot."),
    ("no answer", "", ("The NVIDIA driver did not answer in {}: see whether nvidia-smi does in a terminal; if it "
     "hangs too, the GPU or its driver does, which ends with a reboot.")),
    ("no binding", "", "nvidia-ml-py is not installed, so the driver cannot be asked: pip install nvidia-ml-py."),
    ("no library", "driver",
     ("The NVIDIA driver is loaded, but its library libnvidia-ml.so.1 is not found: reinstall the driver's user-space "
     "package, or start the container with the NVIDIA Container Toolkit.")),
    ("no library", "wsl",
     "WSL shows no NVIDIA driver: install NVIDIA's driver in Windows (not in WSL), then wsl --shutdown."),
    ("no library", "container",
     f"This container has no NVIDIA GPU and no driver: if its machine has one, {_ASK_FOR_GPU}"),
    ("no library", "", "This machine has no NVIDIA driver: install it if there is an NVIDIA GPU, and reboot."),
    ("no driver", "driver", "The NVIDIA driver is installed but not loaded: run sudo modprobe nvidia, or reboot."),
    ("no driver", "container", f"The driver's library is in this container, but no GPU: {_ASK_FOR_GPU}"),
    ("no driver", "", "The NVIDIA driver is installed but not loaded: run sudo modprobe nvidia, or reboot."),
    ("version mismatch", "", ("The NVIDIA driver was updated while the old one still runs (library and kernel "
     "module differ): reboot.")),
    ("no permission", "", ("This user may not open the NVIDIA devices: check the permissions of /dev/nvidia* (on "
     "many machines the group video), or ask an administrator.")),
    ("old driver", "", "The NVIDIA driver is too old to be asked: install a current one."),
    ("", "", "The NVIDIA driver does not answer ({}): see what nvidia-smi says in a terminal."),
)  # fmt: skip
"""Why NVML does not answer: its problem, the signs that must be there, and what to say; the first that applies."""


def _exists(*names: str) -> bool:
    return any((ROOT / name).exists() for name in names)
