"""A smaller model, where the model itself is what does not fit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import law
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import size
from gpumagic.source.text import Text

_DEPTH = re.compile(r"^((n|num|number)_?(of_)?((hidden|encoder|decoder)_)?(layers?|blocks)|depth)$", re.IGNORECASE)


def shallower(facts: Facts) -> Iterator[Advice]:
    """Make fewer layers: parameters grow with them in proportion."""
    if facts.stage != "move" or not facts.work.moving or facts.usable is None or facts.before is None:
        return
    room = int(facts.usable * law.MARGIN) - facts.before.allocated + facts.leftover_nbytes
    for text in facts.texts:
        for name, literal in _depths(text):
            layers = int(literal.value)  # type: ignore[arg-type]
            fewer = int(layers * room / facts.work.moving)
            if not 1 <= fewer < layers:
                continue
            yield propose(
                facts, f"Make the model smaller: {name} from {layers} to {fewer}",
                frees=facts.work.moving * (layers - fewer) // layers, covers=True, estimated=True,
                text=text, changes=[text.replace(literal, str(fewer))],
                evidence=f"its parameters take {size(facts.work.moving)}; there is room for {size(room)}",
                cost="a smaller model; training it takes its size again for gradients, and twice for Adam",
            )  # fmt: skip
            return


def _depths(text: Text) -> Iterator[tuple[str, ast.Constant]]:
    for node in text.nodes():
        name = node.arg if isinstance(node, ast.keyword) else None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        value = node.value if isinstance(node, ast.keyword | ast.Assign) else None
        if name is not None and _DEPTH.match(name) and isinstance(value, ast.Constant) and type(value.value) is int:
            yield name, value
