"""Expressions, recognised by example, that make a large tensor without need: attention scores, expansions, results."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpumagic.advice.facts import Facts, TensorFact
from gpumagic.advice.records import Advice, NoCost
from gpumagic.advice.rules.inlining import Inlined, inlined
from gpumagic.advice.rules.patterns import match_pattern
from gpumagic.advice.rules.proposal import propose
from gpumagic.advice.rules.regions import bracketed, calls, failed, substituted
from gpumagic.report.units import size
from gpumagic.source.text import CellText

QUERIES = 128
"""Queries at a time, where the device has no fused attention."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Another way to compute an expression."""

    title: str
    pattern: str
    new: str
    """With the names of the pattern in braces; ``{PART}`` is the expression with a part of the queries."""
    why: str
    cost: str | NoCost = "rounding differs in the last digits"
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """How many dimensions some of the names of the pattern have."""
    fused: bool = False
    """Whether it takes attention kernels that never make the matrix of all scores."""


def _distances(last: str) -> Rewrite:
    """Return the rewrite of distances by differences, ``last`` being the dimension that they are summed over."""
    return Rewrite(
        "Compute the distances with torch.cdist",
        f"sum(square(column(A) - row(B)), {last})",
        "(torch.cdist({A}, {B}) ** 2)",
        "it makes all differences before it sums them",
        dimensions={"A": 2, "B": 2},
    )


_SCALES = {"Q @ mT(K) * S": "{S}", "Q @ mT(K) / S": "1 / ({S})", "Q @ mT(K)": "1.0"}
"""The ways to write scores of attention, and by what each of them scales."""
_TWICE_THE_SCORES = "softmax makes a second matrix as large as the scores"


def _fused_attention() -> Iterator[Rewrite]:
    for scores, scale in _SCALES.items():
        masked = f'masked_fill({scores}, MASK, float("-inf"))'
        for logits, mask in ((scores, ""), (masked, "attn_mask=~{MASK}, ")):
            yield Rewrite(
                "Use scaled_dot_product_attention",
                f"softmax({logits}, -1) @ V",
                f"torch.nn.functional.scaled_dot_product_attention({{Q}}, {{K}}, {{V}}, {mask}scale={scale})",
                _TWICE_THE_SCORES,
                dimensions={"Q": 4},  # its kernels take batch, heads, length and width
                fused=True,
            )


def _attention_by_parts(scores: str) -> Rewrite:
    return Rewrite(
        f"Attend with {QUERIES} queries at a time",
        f"softmax({scores}, -1) @ V",
        f"torch.cat([{{PART}} for q_part in {{Q}}.split({QUERIES}, dim=-2)], dim=-2)",
        _TWICE_THE_SCORES,
        cost="a little time",
    )


REWRITES = (
    _distances(last="-1"),
    _distances(last="2"),
    Rewrite(
        "Look the rows up by index",
        "cast(one_hot(IDS, N)) @ TABLE",
        "{TABLE}[{IDS}]",
        "it makes a matrix of zeros and ones",
        cost=NoCost(because="the values are the same"),
        dimensions={"TABLE": 2},
    ),
    Rewrite(
        "Multiply the small matrices first",
        "A @ B @ C",
        "{A} @ ({B} @ {C})",
        "the first product is as large as all of the first matrix",
        dimensions={"A": 2},
    ),
    *_fused_attention(),
    *map(_attention_by_parts, _SCALES),
)


def rewritten(facts: Facts) -> Iterator[Advice]:
    """Compute the same in a way that makes no large tensor."""
    for text, statement in failed(facts):
        for expression in inlined(text, statement):
            for rewrite in REWRITES:
                advice = _rewritten(facts, text, expression, rewrite)
                if advice is not None:
                    yield advice
                    return


def _rewritten(
    facts: Facts, text: CellText, expression: Inlined, rewrite: Rewrite
) -> Advice | None:
    for node in expression.text.expressions():
        operands = match_pattern(rewrite.pattern, node)
        if operands is not None and _applies(facts, expression.text, rewrite, operands):
            new = _new_code(expression.text, rewrite, node, operands)
            return propose(
                rewrite.title,
                text=text,
                changes=expression.changes(text, expression.text.replace(node, new)),
                evidence=f"the line asks for {size(facts.event.requested)}: {rewrite.why}",
                cost=expression.cost(rewrite.cost),
            )
    return None


def _applies(
    facts: Facts, text: CellText, rewrite: Rewrite, operands: Mapping[str, ast.expr]
) -> bool:
    """Return whether the operands have the dimensions that a rewrite needs, and the device what it takes."""
    for name, dimensions in rewrite.dimensions.items():
        tensor = facts.frames.tensors.get(text.code(operands[name]))
        if tensor is None or len(tensor.shape) != dimensions:
            return False
    if "Q" in operands and text.code(operands["Q"]) == "q_part":
        return False  # by this very advice
    return facts.notebook.has_fused_attention or not rewrite.fused


def _new_code(
    text: CellText, rewrite: Rewrite, node: ast.expr, operands: Mapping[str, ast.expr]
) -> str:
    code = {name: bracketed(text, operand) for name, operand in operands.items()}
    if "Q" in operands:
        code["PART"] = substituted(text, node, operands["Q"], "q_part")
    return rewrite.new.format(**code)


_WRITES = re.compile(r"\w_\(|[-+*/]=|\]\s*=[^=]|\bout=")
"""What writes to a tensor, or may: ``x.relu_()``, ``x += 1``, ``x[0] = 1``."""


def expand(facts: Facts) -> Iterator[Advice]:
    """Repeat without copies what has one element in the repeated dimension."""
    text = facts.frames.failing_text
    if text is None or _WRITES.search(text.source):
        return
    for _, call in calls([text], "repeat"):
        owner = text.code(call.func).removesuffix(".repeat")
        counts = [text.code(argument) for argument in call.args]
        tensor = facts.frames.tensors.get(owner)
        if tensor is not None and _may_be_expanded(tensor, counts):
            sizes = _sizes_to_expand_to(tensor, counts)
            yield propose(
                f"Expand {owner} instead of repeating it",
                text=text,
                changes=[text.replace(call, f"{owner}.expand({', '.join(sizes)})")],
                evidence=f"repeat copies {size(facts.event.requested)}; expand makes a view",
                cost="the view must not be written to",
            )
            return


def _may_be_expanded(tensor: TensorFact, counts: list[str]) -> bool:
    """Return whether each dimension that is repeated has one element."""
    dimensions = zip(reversed(counts), reversed(tensor.shape), strict=False)
    return all(count == "1" or length == 1 for count, length in dimensions)


def _sizes_to_expand_to(tensor: TensorFact, counts: list[str]) -> list[str]:
    """Return the arguments of `expand` for those of `repeat`, which may add dimensions in front."""
    added = max(0, len(counts) - len(tensor.shape))
    sizes = ["-1" if count == "1" else count for count in counts[added:]]
    return [*counts[:added], *sizes]
