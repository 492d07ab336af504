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
    """Return the code that unbinds them; what was displayed is also in IPython's output cache, which %xdel clears."""
    displayed = [claim for claim in claims if any(name.startswith("Out[") for name in claim.names)]
    lines = [f"%xdel {_typed(claim)}" for claim in displayed]
    done = {name for claim in displayed for name in claim.names}
    plain = sorted({name for claim in claims for name in claim.names} - done)
    return "\n".join([*lines, *([f"del {', '.join(plain)}"] if plain else [])])


def _typed(claim: Claim) -> str:
    variables = sorted(name for name in claim.names if name.isidentifier())
    return variables[0] if variables else min(claim.names).replace("Out[", "_").rstrip("]")
