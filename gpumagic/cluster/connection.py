"""Which engines `--engines` means, and which device each of them works on."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.errors import OptionError
from gpumagic.notebook import session
from gpumagic.report.origin import Origin

PX = "px"
"""Those that `%%px` goes to, which `%pxconfig --targets` changes."""

_selected: Any = None
_known_engines: MutableMapping[Any, dict[int, Origin]] = weakref.WeakKeyDictionary()
"""Of each client, the engines that it has had: one that is gone is still told of."""
_pending: MutableMapping[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Connection:
    """A client, and the numbers of the engines that are asked."""

    client: Any
    engines: tuple[int, ...]

    @property
    def alive(self) -> tuple[int, ...]:
        """Return those of the engines that are registered now."""
        registered = set(self.client.ids)
        return tuple(engine for engine in self.engines if engine in registered)

    @property
    def seen(self) -> dict[int, Origin]:
        """Return what is known of the client's engines, those included that are gone."""
        return _known_engines.setdefault(self.client, {})

    @property
    def waiting(self) -> dict[int, Any]:
        """Return the last requests that engines could not answer in time."""
        return _pending.setdefault(self.client, {})


def use(client_or_view: Any = None) -> None:
    """Have `--engines` go to the engines of an ipyparallel client or view; without one, as `%%px` goes again.

    Engines of it that are gone are forgotten.
    """
    global _selected  # noqa: PLW0603  # as `%%px`, it is one for the session
    _selected = client_or_view
    if client_or_view is not None:
        _known_engines.pop(getattr(client_or_view, "client", client_or_view), None)


def connect(targets: str = PX, *, gone: bool = True) -> Connection:
    """Return the engines that are meant.

    Args:
        gone: whether engines that were there earlier are told of, too.
        targets: ``"all"``, numbers such as ``"0,2"``, a slice such as ``"1:3"``, or ``"px"``.

    Raises:
        OptionError: there is no client, it is closed, it has no engines, or an engine was never there.
    """
    source = _selected if _selected is not None else _px_view()
    if source is None:
        raise OptionError(
            "no engines: connect an ipyparallel client (rc = ipyparallel.Cluster(n=4).start_and_connect_sync()), "
            "or choose one with gpumagic.cluster.use(rc)"
        )
    client = getattr(source, "client", source)
    if client._closed:
        raise OptionError("the client of %px is closed: choose another with gpumagic.cluster.use(rc)")
    known = sorted({*client.ids, *(_known_engines.get(client, ()) if gone else ())})
    if not known:
        raise OptionError("the client has no engines; start some, such as with cluster.start_engines_sync(n=4)")
    wanted = _view_targets(source, known) if targets == PX else _parse_targets(targets, known)
    if missing := [engine for engine in wanted if engine not in known]:
        raise OptionError(f"there is no engine {missing[0]}; there are {', '.join(map(str, known))}")
    return Connection(client, tuple(wanted))


def _px_view() -> Any:
    """Return the view that `%%px` sends cells to; None where nothing is connected."""
    shell = session.shell()
    magic = None if shell is None else shell.find_cell_magic("px")
    return getattr(getattr(magic, "__self__", None), "view", None)


def _view_targets(source: Any, known: list[int]) -> list[int]:
    targets: Any = getattr(source, "targets", "all")
    if targets is None or targets == "all":
        return known
    return [targets] if isinstance(targets, int) else list(targets)


def _parse_targets(targets: str, known: list[int]) -> list[int]:
    if targets == "all":
        return known
    if ":" in targets:
        return known[slice(*(int(part) if part else None for part in targets.split(":")))]
    return [int(part) for part in targets.split(",")]


@dataclass(frozen=True, slots=True)
class EngineResources:
    """What there is where one engine runs."""

    origin: Origin
    gpus: tuple[tuple[str, str, int], ...] = ()
    """Of each of its GPUs its name there, what tells it from all others, and its free bytes, the freest first."""


def assign_devices(device: str, sites: Mapping[int, EngineResources]) -> dict[int, str]:
    """Return the device of each engine.

    Args:
        device: ``"auto"``; or a name, in which ``{rank}`` and ``{local_rank}`` stand for numbers.
        sites: by engine.

    Raises:
        OptionError: something else stands in braces; or ``auto`` where an engine has no GPU.
    """
    if device.lower() == "auto":
        return _assign_freest(sites)
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


def _ranks(sites: Mapping[int, EngineResources]) -> dict[int, tuple[int, int]]:
    """Return each engine's rank and that within its host: the launcher's where it tells all apart, else their order."""
    origins = {engine: sites[engine].origin for engine in sorted(sites)}
    ranks = _distinct_ranks({engine: origin.rank for engine, origin in origins.items()})
    order = sorted(origins, key=lambda engine: ranks[engine])
    hosts: dict[str, dict[int, int | None]] = {}
    for engine in order:
        hosts.setdefault(origins[engine].host, {})[engine] = origins[engine].local_rank
    local = {engine: rank for of_host in hosts.values() for engine, rank in _distinct_ranks(of_host).items()}
    return {engine: (ranks[engine], local[engine]) for engine in order}


def _distinct_ranks(ranks: Mapping[int, int | None]) -> dict[int, int]:
    """Return the ranks as they are, or the engines' order where some have none, or have the same.

    Engines that a batch script starts without a launcher all inherit the script's own rank.
    """
    known = {engine: rank for engine, rank in ranks.items() if rank is not None}
    if len(set(known.values())) == len(ranks):
        return known
    return {engine: place for place, engine in enumerate(ranks)}


def _assign_freest(sites: Mapping[int, EngineResources]) -> dict[int, str]:
    """Give each engine a GPU, as free as can be, and no two the same while there are enough."""
    if without := [engine for engine in sorted(sites) if not sites[engine].gpus]:
        raise OptionError(f"auto: engine {without[0]} has no GPU; %gpuinfo --engines says why")
    holders: dict[str, int] = {}
    for engine in sorted(sites):
        _assign(engine, sites, holders, set())
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


def _assign(engine: int, sites: Mapping[int, EngineResources], holders: dict[str, int], tried: set[str]) -> bool:
    """Take the freest GPU that is free, or can be made so by moving who has it to another of its own."""
    gpus: Sequence[str] = [gpu for _, gpu, _ in sites[engine].gpus]
    for gpu in sorted(gpus, key=lambda each: each in holders):  # the free ones first, each kind by free memory
        if gpu in tried:
            continue
        tried.add(gpu)
        if gpu not in holders or _assign(holders[gpu], sites, holders, tried):
            holders[gpu] = engine
            return True
    return False
