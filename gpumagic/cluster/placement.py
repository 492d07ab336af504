"""Which device each engine works on: `cuda:{rank}`, `cuda:{local_rank}`, or `auto`, no two on the same GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumagic.errors import OptionError
from gpumagic.reports.origin import Origin


@dataclass(frozen=True, slots=True)
class Site:
    """What there is where one engine runs."""

    origin: Origin
    gpus: tuple[tuple[str, str, int], ...] = ()
    """Of each of its GPUs its name there, what tells it from all others, and its free bytes, the freest first."""


def place(device: str, sites: Mapping[int, Site]) -> dict[int, str]:
    """Return the device of each engine.

    Args:
        device: ``"auto"``; or a name, in which ``{rank}`` and ``{local_rank}`` stand for numbers.
        sites: by engine.

    Raises:
        OptionError: something else stands in braces; or ``auto`` where an engine has no GPU.
    """
    if device.lower() == "auto":
        return _freest(sites)
    device = device.replace("{{", "{").replace("}}", "}")  # as IPython leaves it where it expands nothing
    ranks = _ranks(sites)
    try:
        return {
            engine: device.format_map({"rank": rank, "local_rank": local}) for engine, (rank, local) in ranks.items()
        }
    except (KeyError, ValueError, IndexError):
        raise OptionError(
            f"{device!r} is no device of engines; write cuda:{{rank}}, cuda:{{local_rank}} or auto"
        ) from None


def _ranks(sites: Mapping[int, Site]) -> dict[int, tuple[int, int]]:
    """Return each engine's rank and that within its host: the launcher's where all have one, else their order."""
    origins = {engine: sites[engine].origin for engine in sorted(sites)}
    launched = all(origin.rank is not None for origin in origins.values())
    order = sorted(origins, key=lambda engine: (origins[engine].rank or 0, engine)) if launched else list(origins)
    found, on_host = {}, dict.fromkeys((origin.host for origin in origins.values()), 0)
    for place, engine in enumerate(order):
        origin = origins[engine]
        rank = origin.rank if launched and origin.rank is not None else place
        local = on_host[origin.host] if origin.local_rank is None else origin.local_rank
        on_host[origin.host] += 1
        found[engine] = (rank, local)
    return found


def _freest(sites: Mapping[int, Site]) -> dict[int, str]:
    """Give each engine a GPU, as free as can be, and no two the same while there are enough."""
    if without := [engine for engine in sorted(sites) if not sites[engine].gpus]:
        raise OptionError(f"auto: engine {without[0]} has no GPU; %gpuinfo --engines says why")
    holders: dict[str, int] = {}
    for engine in sorted(sites):
        _claim(engine, sites, holders, set())
    taken = {engine: gpu for gpu, engine in holders.items()}
    chosen: dict[int, str] = {}
    crowd = dict.fromkeys(holders, 1)
    for engine in sorted(sites):
        gpus = sites[engine].gpus
        mine = [name for name, gpu, _ in gpus if taken.get(engine) == gpu]
        if not mine:  # there are more engines than GPUs: the one with fewest of them
            name, gpu, _ = min(gpus, key=lambda each: crowd.get(each[1], 0))
            crowd[gpu] = crowd.get(gpu, 0) + 1
            mine = [name]
        chosen[engine] = mine[0]
    return chosen


def _claim(engine: int, sites: Mapping[int, Site], holders: dict[str, int], tried: set[str]) -> bool:
    """Take the freest GPU that is free, or can be made so by moving who has it to another of its own."""
    gpus: Sequence[str] = [gpu for _, gpu, _ in sites[engine].gpus]
    for gpu in sorted(gpus, key=lambda each: each in holders):  # the free ones first, each kind by free memory
        if gpu in tried:
            continue
        tried.add(gpu)
        if gpu not in holders or _claim(holders[gpu], sites, holders, tried):
            holders[gpu] = engine
            return True
    return False
