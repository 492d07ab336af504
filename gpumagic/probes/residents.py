"""Where the variables that a piece of code names live: tensors and modules, by device."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from gpumagic.reports import Holder


def elsewhere(variables: Mapping[str, object], device: str) -> list[Holder]:
    """Return the variables, tensors and modules, that have bytes on a device other than ``device``."""
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
