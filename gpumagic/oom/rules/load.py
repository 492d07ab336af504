"""A checkpoint that is loaded beside what it is to fill."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import size
from gpumagic.source.text import keyword


def on_the_host(facts: Facts) -> Iterator[Advice]:
    """Load a checkpoint into the host's memory, from where it is copied into the model piece by piece."""
    if facts.stage != "load" or facts.memory != "device":
        return
    for text in facts.texts:
        for node in text.nodes():
            if not isinstance(node, ast.Call) or text.code(node.func) not in ("torch.load", "load"):
                continue
            where = keyword(node, "map_location")
            if where is not None and ast.unparse(where.value) in ("'cpu'", "torch.device('cpu')"):
                continue
            change = text.replace(where.value, '"cpu"') if where else text.add_argument(node, 'map_location="cpu"')
            yield propose(
                facts, "Load the checkpoint into the host's memory", frees=facts.grown or None, covers=True, text=text,
                changes=[change], estimated=True, cost="its tensors are on the CPU until they are copied or moved",
                evidence=f"torch.load was {_far(facts)}putting the tensors where they were saved"
                if where is None else f"map_location={text.code(where.value)} puts the tensors beside the model's own",
            )  # fmt: skip
            return


def _far(facts: Facts) -> str:
    return f"{size(facts.grown)} into " if facts.grown else ""
