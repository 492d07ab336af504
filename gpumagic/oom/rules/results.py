"""Results that a loop collects on the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Collection, Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import count, size
from gpumagic.source.text import Text

WORTH_MOVING = 1024**2


def to_the_host(facts: Facts) -> Iterator[Advice]:
    """Collect results in the host's memory."""
    for text in facts.texts:
        for target, value in _collected(text):
            held = facts.work.collections.get(target)
            if held is None or held.nbytes < WORTH_MOVING:
                continue
            if any(growth.target == target for growth in facts.scene.growths):
                continue  # its graph is the greater part, and said there
            plain = "detach().cpu()" if held.graphs else "cpu()"
            yield propose(
                facts, f"Collect {target} in the host's memory", frees=held.nbytes, text=text,
                changes=[text.append(value, f".{plain}")] if _is_simple(value)
                else [text.replace(value, f"({text.code(value)}).{plain}")],
                evidence=_evidence(target, held), cost=f"a copy a turn; what uses {target} finds it on the CPU",
            )  # fmt: skip
            return


def _collected(text: Text) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a loop adds to a list or a dict: ``found.append(x)``, ``found[i] = x``."""
    loops = [node for node in text.nodes() if isinstance(node, ast.For | ast.While)]
    for node in (each for loop in loops for each in ast.walk(loop)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            if isinstance(node.func.value, ast.Name) and len(node.args) == 1:
                yield node.func.value.id, node.args[0]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            owner = node.targets[0].value
            if isinstance(owner, ast.Name):
                yield owner.id, node.value


def _is_simple(value: ast.expr) -> bool:
    return isinstance(value, ast.Name | ast.Attribute | ast.Call | ast.Subscript)


def _evidence(target: str, held: Collection) -> str:
    return f"{target} holds {count(held.tensors, 'tensor')} with {size(held.nbytes)}, one more with every turn"
