"""Why torch can use no GPU here, in one sentence that names the cause and the remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpumagic.gpus.cards import NvmlSnapshot
from gpumagic.gpus.nvml import NvmlFailure
from gpumagic.gpus.torch_devices import TorchBuild
from gpumagic.gpus.torch_names import Visibility, driver_is_too_old

ROOT = Path("/")
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
INSTALL_TORCH = "install a CUDA build with the command that https://pytorch.org/get-started gives"


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine around this process, from its files and environment variables alone."""

    platform: str = "linux"
    colab: bool = False
    kaggle: bool = False
    container: bool = False
    wsl: bool = False
    driver_loaded: bool = False
    card: bool = False
    """Whether an NVIDIA card is on the PCI bus."""


def detect_environment() -> Environment:
    """Read files and variables; starts nothing and needs no privileges."""
    return Environment(
        platform=sys.platform,
        colab="COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules,
        kaggle="KAGGLE_KERNEL_RUN_TYPE" in os.environ,
        container=_exists(".dockerenv", "run/.containerenv") or "KUBERNETES_SERVICE_HOST" in os.environ,
        wsl=_exists("dev/dxg"),
        driver_loaded=_exists("proc/driver/nvidia/version", "dev/nvidiactl", "sys/module/nvidia"),
        card=_has_nvidia_card(),
    )


def explain(
    answer: NvmlSnapshot | NvmlFailure,
    build: TorchBuild,
    view: Visibility | None,
    environment: Environment | None = None,
) -> str:
    """Return why torch can use no GPU, with the remedy.

    ``view`` is what CUDA_VISIBLE_DEVICES leaves visible of NVML's cards, None if NVML did not answer.
    """
    environment = environment or detect_environment()
    if build.hip:
        return "torch is a ROCm build, whose GPUs are only shown once in use: run torch.cuda.init() and ask again."
    if isinstance(answer, NvmlFailure):
        return _no_driver(answer, build, environment)
    if not answer.cards:
        return _on_hosted_notebook(environment) or _NOT_LISTED[environment.container]
    if build.version is None:
        return "PyTorch is not installed in this environment, so nothing here can use the GPU: pip install torch."
    if build.known and build.cuda is None:
        return f"torch {build.version} is a CPU-only build and cannot use the GPU: {INSTALL_TORCH}."
    return _hidden_from_cuda(answer, build, view)


def _hidden_from_cuda(answer: NvmlSnapshot, build: TorchBuild, view: Visibility | None) -> str:
    if driver_is_too_old(answer, build) and answer.cuda_version is not None:
        newest = "{}.{}".format(*answer.cuda_version)
        return (
            f"torch {build.version} needs CUDA {build.cuda}, and the driver {answer.driver_version} knows CUDA only "
            f"up to {newest}: update the driver, or install a torch for CUDA {answer.cuda_version[0]}."
        )
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None and view is not None and not view.cards and view.instance is None:
        problem = view.problem or "names no GPU"
        return (
            f"CUDA_VISIBLE_DEVICES={variable!r} {problem}, so this process may use none of the "
            f"{len(answer.cards)} here: correct or unset it and restart the kernel."
        )
    if any(card.mig and not card.instances for card in answer.cards):
        return "The GPU is in MIG mode without an instance: have an administrator create one (nvidia-smi mig)."
    return "CUDA started in this process and found none of the driver's GPUs: restart the kernel."


def _no_driver(failure: NvmlFailure, build: TorchBuild, here: Environment) -> str:
    if hosted := _on_hosted_notebook(here):
        return hosted
    if here.platform == "darwin":
        return "A Mac has no NVIDIA driver; its own GPU is shown once torch is imported and was built with MPS."
    if build.xpu:
        return "torch is an XPU build, whose devices are shown once it is imported: import torch and ask again."
    for problem, applies, sentence in _CAUSES:
        if problem == failure.problem and applies(here):
            return sentence.format(failure.detail)
    return f"The NVIDIA driver does not answer ({failure.detail}): see what nvidia-smi says in a terminal."


def _on_hosted_notebook(here: Environment) -> str | None:
    if here.colab:
        return "This Colab runtime has no GPU: choose one in the menu Runtime > Change runtime type."
    if here.kaggle:
        return "This Kaggle session has no GPU: choose one under Settings > Accelerator."
    return None


def _always(_: Environment) -> bool:
    return True


_ASK_FOR_GPU = "start it with --gpus all (Docker) or ask for nvidia.com/gpu (Kubernetes)."
_CAUSES: tuple[tuple[str, Callable[[Environment], bool], str], ...] = (
    ("no answer", _always, ("The NVIDIA driver did not answer in {}: see whether nvidia-smi does in a terminal; if it "
     "hangs too, the GPU or its driver does, which ends with a reboot.")),
    ("no binding", _always, "nvidia-ml-py is not installed, so the driver cannot be asked: pip install nvidia-ml-py."),
    ("no library", lambda here: here.driver_loaded and here.container,
     ("The driver is loaded, but its library libnvidia-ml.so.1 was not brought into this container: start it with the "
     "NVIDIA Container Toolkit and NVIDIA_DRIVER_CAPABILITIES=compute,utility.")),
    ("no library", lambda here: here.driver_loaded,
     ("The NVIDIA driver is loaded, but its library libnvidia-ml.so.1 is not found: reinstall the driver's user-space "
     "package of the same version.")),
    ("no library", lambda here: here.wsl,
     "WSL shows no NVIDIA driver: install NVIDIA's driver in Windows (not in WSL), then wsl --shutdown."),
    ("no library", lambda here: here.card and not here.container,
     "There is an NVIDIA card, but no driver: install NVIDIA's driver and reboot."),
    ("no library", lambda here: here.card,
     f"The machine has an NVIDIA card, but this container was started without it: {_ASK_FOR_GPU}"),
    ("no library", lambda here: here.container,
     f"This container has no NVIDIA GPU and no driver: if its machine has one, {_ASK_FOR_GPU}"),
    ("no library", _always, "This machine has no NVIDIA GPU and no NVIDIA driver: run where there is one."),
    ("no driver", lambda here: here.container and not here.driver_loaded,
     f"The driver's library is in this container, but no GPU: {_ASK_FOR_GPU}"),
    ("no driver", _always, "The NVIDIA driver is installed but not loaded: run sudo modprobe nvidia, or reboot."),
    ("version mismatch", _always, ("The NVIDIA driver was updated while the old one still runs (library and kernel "
     "module differ): reboot.")),
    ("no permission", _always, ("This user may not open the NVIDIA devices: check the permissions of /dev/nvidia* (on "
     "many machines the group video), or ask an administrator.")),
    ("old driver", _always, "The NVIDIA driver is too old to be asked: install a current one."),
)  # fmt: skip
"""Why NVML does not answer: its problem, where it applies, and what to say; the first that applies is said."""
_NOT_LISTED = {
    False: "The NVIDIA driver runs but finds no GPU: see why in sudo dmesg (lines with NVRM), or reboot.",
    True: f"The NVIDIA driver answers but has given this container no GPU: {_ASK_FOR_GPU}",
}


def _exists(*names: str) -> bool:
    return any((ROOT / name).exists() for name in names)


def _has_nvidia_card() -> bool:
    try:
        return any(
            _read_text(device / "vendor").startswith(NVIDIA_VENDOR)
            and _read_text(device / "class").startswith(DISPLAY_CLASS)
            for device in (ROOT / "sys/bus/pci/devices").iterdir()
        )
    except OSError:
        return False


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
