"""What CUDA itself says of its devices, once it is in use in this process: by UUID, the only certain key."""

from __future__ import annotations

import re
import sys
from typing import Any


def devices() -> dict[str, tuple[int, Any]]:
    """Return the torch ordinal and the properties of each device by its bare UUID; none while CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    properties = [(ordinal, torch.cuda.get_device_properties(ordinal)) for ordinal in range(torch.cuda.device_count())]
    return {bare(str(getattr(each, "uuid", ""))): (ordinal, each) for ordinal, each in properties}


def bare(uuid: str | None) -> str:
    """Return a UUID without NVML's prefix, which torch does not write."""
    return re.sub(r"^(GPU-|MIG-)", "", uuid or "").lower()
