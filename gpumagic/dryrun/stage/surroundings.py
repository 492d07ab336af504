"""What of torch around the device a rehearsal does another way: data loaders, pinned memory, loading, compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from gpumagic.dryrun.parts import NotRehearsed
from gpumagic.dryrun.stage.backend import DeviceModule

_OF_ANY_ACCELERATOR = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache",
    "synchronize", "device_count", "reset_peak_memory_stats", "is_available",
)  # fmt: skip


def arrange(module: DeviceModule, assume: Callable[[str], None]) -> None:
    """Make the changes, for the rest of the process.

    Args:
        module: the device's module.
        assume: called with a sentence for each thing that is assumed.
    """
    torch.compile = torch.nn.Module.compile = _refuse_compiler
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.load = _loading(torch.load)
    DataLoader._get_iterator = _in_this_process(DataLoader._get_iterator, assume)
    for name in _OF_ANY_ACCELERATOR:
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, getattr(module, name))


def _refuse_compiler(*_: object, **__: object) -> NoReturn:
    raise NotRehearsed("it uses torch.compile, whose kernels' memory is not known")


def _in_this_process(make: Callable[..., Any], assume: Callable[[str], None]) -> Callable[..., Any]:
    """Return a data loader's way to iterate without worker processes, which a rehearsal does not start."""

    def iterate(loader: Any) -> Any:
        if loader.num_workers:
            assume("data loaders are rehearsed without worker processes")
        for name, value in {"num_workers": 0, "prefetch_factor": None, "pin_memory": False, "timeout": 0}.items():
            object.__setattr__(loader, name, value)
        object.__setattr__(loader, "_DataLoader__multiprocessing_context", None)
        return make(loader)

    return iterate


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.load` by way of the CPU: torch would fill the device's storages from the file itself."""

    def through_the_host(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, str | torch.device) or torch.device(map_location).type == "cpu":
            return load(f, map_location, *args, **kwargs)
        return _moved(load(f, "cpu", *args, **kwargs), map_location)

    return through_the_host


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return value.to(device)
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _moved(each, device)
        return value
    return type(value)(_moved(each, device) for each in value) if type(value) in {list, tuple} else value
