"""Which engines `--engines` means, and which device each of them works on."""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from gpumagic.errors import OptionError
from gpumagic.notebook import session
from gpumagic.options import parser
from gpumagic.report.base import Origin

PX = "px"
"""The engines that `%%px` goes to, which `%pxconfig --targets` changes."""
_selected: Any = None
_known_engines: MutableMapping[Any, dict[int, Origin]] = weakref.WeakKeyDictionary()
"""The engines that each client has had; those that are gone are still reported."""


@dataclass(frozen=True)
class Connection:
    """A client, and the numbers of the engines to ask."""

    client: Any
    engines: tuple[int, ...]

    @property
    def alive(self) -> tuple[int, ...]:
        """Return those of the engines that are registered now."""
        registered = set(self.client.ids)
        return tuple(engine for engine in self.engines if engine in registered)

    @property
    def known(self) -> dict[int, Origin]:
        """Return where the client's engines run, including those that are gone."""
        return _known_engines.setdefault(self.client, {})


def check_options(magic: str, options: Namespace, alternative: str) -> None:
    """Raise `OptionError` for an option that is about one process."""
    for name in parser(magic).refused:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} is about one process: {alternative}{magic} {option} has each engine answer for itself"
            )


def use(client_or_view: Any = None) -> None:
    """Select the ipyparallel client or view that `--engines` uses; without one, that of `%%px` again.

    Engines of it that are gone are forgotten.
    """
    global _selected  # noqa: PLW0603  # one for the session, as of `%%px`
    _selected = client_or_view
    if client_or_view is not None:
        _known_engines.pop(getattr(client_or_view, "client", client_or_view), None)


def connect(targets: str = PX, *, gone: bool = True) -> Connection:
    """Return the client and its engines for a value of `--engines`.

    Args:
        targets: ``"all"``, numbers such as ``"0,2"``, a slice such as ``"1:3"``, or ``"px"``.
        gone: whether to include engines that are gone.

    Raises:
        OptionError: there is no client, it is closed, it has no engines, or an engine was never there.
    """
    source = _selected
    if source is None and (shell := session.shell()) is not None:
        source = getattr(getattr(shell.find_cell_magic("px"), "__self__", None), "view", None)
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
    of_px = getattr(source, "targets", "all")
    if targets == PX and of_px not in (None, "all"):
        wanted = [of_px] if isinstance(of_px, int) else list(of_px)
    elif targets in (PX, "all"):
        wanted = known
    elif ":" in targets:
        wanted = known[slice(*(int(part) if part else None for part in targets.split(":")))]
    else:
        wanted = [int(part) for part in targets.split(",")]
    if missing := [engine for engine in wanted if engine not in known]:
        raise OptionError(
            f"there is no engine {missing[0]}; there are {', '.join(map(str, known))}, which --engines all asks"
        )
    return Connection(client, tuple(wanted))


def assign_devices(device: str, origins: Mapping[int, Origin]) -> dict[int, tuple[str, int]]:
    """Return the device of each engine, and the engine's number on its host.

    Args:
        device: ``"auto"``, or a name in which ``{rank}`` and ``{local_rank}`` stand for the engine's.
        origins: where each engine runs.

    Raises:
        OptionError: something else in braces.
    """
    device = device.replace("{{", "{").replace("}}", "}")  # as IPython leaves it where it expands nothing
    try:
        return {
            engine: (device.format_map({"rank": rank, "local_rank": local}), local)
            for engine, (rank, local) in _ranks(origins).items()
        }
    except (KeyError, ValueError, IndexError):
        raise OptionError(
            f"{device!r} is no device of engines; write cuda:{{rank}}, cuda:{{local_rank}} or auto"
        ) from None


def _ranks(origins: Mapping[int, Origin]) -> dict[int, tuple[int, int]]:
    """Return each engine's rank and local rank: the launcher's where they are distinct, else the engines' order."""
    origins = dict(sorted(origins.items()))
    ranks = _distinct_ranks({engine: origin.rank for engine, origin in origins.items()})
    order = sorted(origins, key=lambda engine: ranks[engine])
    hosts: dict[str, dict[int, int | None]] = {}
    for engine in order:
        hosts.setdefault(origins[engine].host, {})[engine] = origins[engine].local_rank
    local = {engine: rank for of_host in hosts.values() for engine, rank in _distinct_ranks(of_host).items()}
    return {engine: (ranks[engine], local[engine]) for engine in order}


def _distinct_ranks(ranks: Mapping[int, int | None]) -> dict[int, int]:
    """Return the ranks as they are, or the engines' order where ranks are missing or equal.

    Engines that a batch script starts without a launcher all inherit the script's own rank.
    """
    known = {engine: rank for engine, rank in ranks.items() if rank is not None}
    if len(set(known.values())) == len(ranks):
        return known
    return {engine: place for place, engine in enumerate(ranks)}
