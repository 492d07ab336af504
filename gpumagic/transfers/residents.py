"""Where the variables that a piece of code names live: tensors, modules and lists of tensors, by device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

from gpumagic.report.base import Holder

_MOST = 10_000
"""Items of a container that are looked at."""


def elsewhere(variables: Mapping[str, object], device: str) -> list[Holder]:
    """Return the variables that have bytes on a device other than ``device``."""
    found = []
    for name, value in variables.items():
        # A module's `parameters` is the user's code: what it raises must cost neither the report nor the cell's error.
        with contextlib.suppress(Exception):
            totals = _bytes_by_device(value)
            found += [
                Holder(name, at, nbytes) for at, nbytes in totals.items() if nbytes and at not in (device, "meta")
            ]
    return sorted(found, key=lambda holder: -holder.nbytes)


def _bytes_by_device(value: object) -> dict[str, int]:
    import torch

    totals: dict[str, int] = {}
    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    if issubclass(type(value), torch.Tensor):
        tensors = [value]
    elif issubclass(type(value), torch.nn.Module):
        tensors = _module_tensors(value)
    elif type(value) in (list, tuple, dict):
        tensors = _items(value)
    else:
        return totals
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            where = str(tensor.device)  # type: ignore[attr-defined]
            totals[where] = totals.get(where, 0) + tensor.numel() * tensor.element_size()  # type: ignore[attr-defined]
    return totals


def _module_tensors(module: object) -> list[object]:
    import torch

    assert isinstance(module, torch.nn.Module)
    return [*module.parameters(), *module.buffers()]


def _items(container: Any) -> list[object]:
    """Return the tensors in a container, each once; of a very long one, those at its beginning."""
    import torch

    parts = itertools.islice(container.values() if type(container) is dict else container, _MOST)
    return list({id(part): part for part in parts if issubclass(type(part), torch.Tensor)}.values())
