"""The installed torch and what it was built for, and CUDA's devices once CUDA is in use."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch; all None if there is none."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None
    known: bool = True
    """False if torch is installed but its build could not be read."""

    @property
    def label(self) -> str | None:
        """Return ``"12.8"`` for CUDA, ``"ROCm 6.2"``, ``"XPU 2025.0"``, or None for a CPU-only build."""
        if self.hip:
            return f"ROCm {self.hip}"
        return self.cuda or (f"XPU {self.xpu}" if self.xpu else None)


def torch_build() -> TorchBuild:
    """Return the imported torch, else the one that an import would find."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _installed()
    cuda, hip, xpu = (getattr(getattr(torch, "version", None), name, None) for name in ("cuda", "hip", "xpu"))
    return TorchBuild(str(torch.__version__), cuda, hip, xpu)


def _installed() -> TorchBuild:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return TorchBuild()
    try:
        text = Path(spec.submodule_search_locations[0], "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return TorchBuild(_distribution(), known=False)
    found = {name: _assigned(name, text) for name in ("__version__", "cuda", "hip", "xpu")}
    return TorchBuild(
        found["__version__"] or _distribution(), found["cuda"], found["hip"], found["xpu"],
        known=re.search(r"^cuda\b", text, re.MULTILINE) is not None,
    )  # fmt: skip


def _assigned(name: str, text: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _distribution() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def cuda_devices() -> dict[str, tuple[int, Any]]:
    """Return each device's index and properties by its bare UUID; empty while CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    properties = [(ordinal, torch.cuda.get_device_properties(ordinal)) for ordinal in range(torch.cuda.device_count())]
    return {bare_uuid(str(getattr(each, "uuid", ""))): (ordinal, each) for ordinal, each in properties}


def bare_uuid(uuid: str | None) -> str:
    """Return a UUID without NVML's prefix, which torch does not write."""
    return re.sub(r"^(GPU-|MIG-)", "", uuid or "").lower()
