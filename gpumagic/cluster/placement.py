"""Which device each engine works on: `cuda:{rank}`, `cuda:{local_rank}`, or `auto`, no two on the same GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumagic.errors import OptionError
from gpumagic.report.origin import Origin


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
    """Return each engine's rank and that within its host: the launcher's where it tells all apart, else their order."""
    origins = {engine: sites[engine].origin for engine in sorted(sites)}
    ranks = _told_apart({engine: origin.rank for engine, origin in origins.items()})
    order = sorted(origins, key=lambda engine: ranks[engine])
    hosts: dict[str, dict[int, int | None]] = {}
    for engine in order:
        hosts.setdefault(origins[engine].host, {})[engine] = origins[engine].local_rank
    local = {engine: rank for of_host in hosts.values() for engine, rank in _told_apart(of_host).items()}
    return {engine: (ranks[engine], local[engine]) for engine in order}


def _told_apart(ranks: Mapping[int, int | None]) -> dict[int, int]:
    """Return the ranks as they are, or the engines' order where some have none, or have the same.

    Engines that a batch script starts without a launcher all inherit the script's own rank.
    """
    known = {engine: rank for engine, rank in ranks.items() if rank is not None}
    if len(set(known.values())) == len(ranks):
        return known
    return {engine: place for place, engine in enumerate(ranks)}


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
