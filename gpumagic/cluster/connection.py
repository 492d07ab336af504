"""Which engines `--engines` means: those that `%%px` of the notebook goes to, or what `use` said."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from gpumagic.errors import OptionError
from gpumagic.notebook import session
from gpumagic.report.origin import Origin

AS_PX = "px"
"""Those that `%%px` goes to, which `%pxconfig --targets` changes."""

_chosen: Any = None
_seen: MutableMapping[Any, dict[int, Origin]] = weakref.WeakKeyDictionary()
"""Of each client, the engines that it has had: one that is gone is still told of."""
_waiting: MutableMapping[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


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
        return _seen.setdefault(self.client, {})

    @property
    def waiting(self) -> dict[int, Any]:
        """Return the last requests that engines could not answer in time."""
        return _waiting.setdefault(self.client, {})


def use(client_or_view: Any = None) -> None:
    """Have `--engines` go to the engines of an ipyparallel client or view; without one, as `%%px` goes again.

    Engines of it that are gone are forgotten.
    """
    global _chosen  # noqa: PLW0603  # as `%%px`, it is one for the session
    _chosen = client_or_view
    if client_or_view is not None:
        _seen.pop(getattr(client_or_view, "client", client_or_view), None)


def connect(targets: str = AS_PX, *, gone: bool = True) -> Connection:
    """Return the engines that are meant.

    Args:
        gone: whether engines that were there earlier are told of, too.
        targets: ``"all"``, numbers such as ``"0,2"``, a slice such as ``"1:3"``, or ``"px"``.

    Raises:
        OptionError: there is no client, it is closed, it has no engines, or an engine was never there.
    """
    source = _chosen if _chosen is not None else _view_of_px()
    if source is None:
        raise OptionError(
            "no engines: connect an ipyparallel client (rc = ipyparallel.Cluster(n=4).start_and_connect_sync()), "
            "or choose one with gpumagic.cluster.use(rc)"
        )
    client = getattr(source, "client", source)
    if client._closed:
        raise OptionError("the client of %px is closed: choose another with gpumagic.cluster.use(rc)")
    known = sorted({*client.ids, *(_seen.get(client, ()) if gone else ())})
    if not known:
        raise OptionError("the client has no engines; start some, such as with cluster.start_engines_sync(n=4)")
    wanted = _of_view(source, known) if targets == AS_PX else _read(targets, known)
    if missing := [engine for engine in wanted if engine not in known]:
        raise OptionError(f"there is no engine {missing[0]}; there are {', '.join(map(str, known))}")
    return Connection(client, tuple(wanted))


def _view_of_px() -> Any:
    """Return the view that `%%px` sends cells to; None where nothing is connected."""
    shell = session.shell()
    magic = None if shell is None else shell.find_cell_magic("px")
    return getattr(getattr(magic, "__self__", None), "view", None)


def _of_view(source: Any, known: list[int]) -> list[int]:
    targets: Any = getattr(source, "targets", "all")
    if targets is None or targets == "all":
        return known
    return [targets] if isinstance(targets, int) else list(targets)


def _read(targets: str, known: list[int]) -> list[int]:
    if targets == "all":
        return known
    if ":" in targets:
        return known[slice(*(int(part) if part else None for part in targets.split(":")))]
    return [int(part) for part in targets.split(",")]
