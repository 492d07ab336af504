"""Names that hold memory the failed cell has no use for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpumagic.advice.facts import Facts
from gpumagic.render.units import count, size
from gpumagic.reports import Advice

if TYPE_CHECKING:
    from gpumagic.probes.claims import Claim

WORTH_NAMING = 1024**2
"""Bytes below which a leftover is not worth a word."""


def leftovers(facts: Facts) -> Iterator[Advice]:
    """Delete what earlier cells left behind and this one does not use."""
    large = [claim for claim in facts.leftovers if claim.nbytes >= WORTH_NAMING]
    frees = sum(claim.nbytes for claim in large)
    if not large:
        return
    names = sorted({name for claim in large for name in claim.names})
    yield Advice(
        f"Delete {count(len(names), 'name')} that earlier cells left",
        frees,
        facts.covers(frees),
        _deletion(large),
        "; ".join(f"{', '.join(sorted(claim.names))} {size(claim.nbytes)}" for claim in large)
        + "; neither this cell nor what it calls uses them",
    )


def stale(facts: Facts) -> Iterator[Advice]:
    """Delete a name before binding it anew: old and new are alive at once otherwise."""
    for name, frees in facts.stale.items():
        if frees >= WORTH_NAMING:
            yield Advice(
                f"Delete the old {name} before the cell makes the new one",
                frees,
                facts.covers(frees),
                f"del {name}",
                f"the {name} of an earlier run, {size(frees)}, stays alive until the new one is bound",
            )


def _deletion(claims: list[Claim]) -> str:
    """Return the code that unbinds them.

    A displayed value is also in six places of IPython's, all of which `%xdel _N` clears. It comes last: it also
    unbinds the variables that are the very same object, which `del` would then miss.
    """
    names = sorted({name for claim in claims for name in claim.names})
    variables = [name for name in names if name.isidentifier()]
    displayed = [name.replace("Out[", "_").rstrip("]") for name in names if not name.isidentifier()]
    lines = [f"del {', '.join(variables)}"] if variables else []
    return "\n".join([*lines, *(f"%xdel {each}" for each in displayed)])
