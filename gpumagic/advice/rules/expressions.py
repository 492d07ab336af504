"""Expressions, recognised by example, that make a large tensor without need: attention scores, expansions, results."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpumagic.advice.facts import Facts
from gpumagic.advice.records import Advice
from gpumagic.advice.rules.proposal import propose
from gpumagic.advice.rules.regions import bracketed, calls, failed, in_a_row, substituted
from gpumagic.report.units import size
from gpumagic.source import text as texts
from gpumagic.source.text import CellText, Change, apply_changes, called_name, keyword, names_in

FUNCTIONS = ("F", "torch", "functional")
"""What the names of torch's modules of functions end with."""
UNARY = frozenset({
    "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "clamp", "square", "sin", "cos", "pow",
})  # fmt: skip
"""Functions and methods that compute each element by itself, of one tensor."""
CASTS = frozenset({"to", "float", "double", "half", "bfloat16"})
_COLUMN, _ROW = ([":", "None"], [":", "None", ":"]), (["None"], ["None", ":"], ["None", ":", ":"])
_OTHERWISE = {
    ("pow", "2"): "square", ("square",): "square", ("transpose", "-2", "-1"): "mT", ("transpose", "-1", "-2"): "mT",
    ("unsqueeze", "1"): "column", ("unsqueeze", "0"): "row",
}  # fmt: skip

_ALSO = {"matmul": "MatMult", "concat": "cat", "concatenate": "cat"}


def match(pattern: str, node: ast.AST) -> dict[str, ast.expr] | None:
    """Return what the names in capitals stand for where code is like the pattern, else None.

    A method is like a function, a keyword like a position: ``x.softmax(dim=-1)`` is ``softmax(x, -1)``. ``square(x)``,
    ``mT(x)`` (the last two dimensions exchanged), ``column(x)`` and ``row(x)`` (a new second and first dimension) and
    ``cast(x)`` (another dtype) are all ways to write it.
    """
    found: dict[str, ast.expr] = {}
    return found if isinstance(node, ast.expr) and _is_like(_parsed(pattern), node, found) else None


@functools.cache
def _parsed(pattern: str) -> ast.expr:
    return ast.parse(pattern, mode="eval").body


def _is_like(pattern: ast.expr, node: ast.expr, found: dict[str, ast.expr]) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        return hasattr(node, "lineno") and ast.dump(found.setdefault(pattern.id, node)) == ast.dump(
            node
        )
    (one, parts), (other, others) = _form(pattern), _form(node)
    return (
        one == other
        and len(parts) == len(others)
        and all(_is_like(*each, found) for each in zip(parts, others, strict=True))
    )


def _form(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return what an expression does, and to what."""
    if isinstance(node, ast.BinOp):
        is_square = isinstance(node.op, ast.Pow) and ast.unparse(node.right) == "2"
        return (
            ("square", [node.left])
            if is_square
            else (type(node.op).__name__, [node.left, node.right])
        )
    if isinstance(node, ast.List | ast.Tuple):
        return "list", node.elts
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        return "mT", [node.value]
    if isinstance(node, ast.Subscript):
        words = [
            ast.unparse(each)
            for each in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])
        ]
        return "column" if words in _COLUMN else "row" if words in _ROW else f"[{words}]", [
            node.value
        ]
    return _form_of_call(node) if isinstance(node, ast.Call) else (ast.unparse(node), [])


def _form_of_call(node: ast.Call) -> tuple[str, list[ast.expr]]:
    name, owner = (
        called_name(node),
        node.func.value if isinstance(node.func, ast.Attribute) else None,
    )
    is_method = owner is not None and not ast.unparse(owner).endswith(FUNCTIONS)
    parts = [
        *([owner] if owner is not None and is_method else []),
        *node.args,
        *(each.value for each in node.keywords),
    ]
    if name in CASTS:
        return "cast", parts[:1]
    if name == "einsum" and len(parts) == 3 and isinstance(parts[0], ast.Constant):
        one, other, result = [*re.split(",|->", str(parts[0].value).replace(" ", "")), "", ""][:3]
        if one[:-1] + other[-1:] == result and other[:-1] == one[:-2] + one[-1:]:
            return "MatMult", parts[1:]  # "ij,jk->ik", whatever stands before
        if one[:-1] + other[-2:-1] == result and other[:-2] + other[-1:] == one[:-2] + one[-1:]:
            return "MatMult", [parts[1], ast.Attribute(parts[2], "mT", ast.Load())]  # "ij,kj->ik"
    otherwise = _OTHERWISE.get((name, *map(ast.unparse, parts[1:])))
    return (otherwise, parts[:1]) if otherwise else (_ALSO.get(name, name), parts)


@dataclass(frozen=True, slots=True)
class Joined:
    """An expression that several statements compute, as one."""

    text: CellText
    last: ast.expr
    """Its place in the cell: the value of the last of the statements."""
    before: tuple[ast.Assign, ...]
    """The others, whose values are in it."""

    @property
    def lost(self) -> list[str]:
        """What it costs that the other statements go, as a sentence; none where there are none."""
        names = [
            target.id
            for each in self.before
            for target in each.targets
            if isinstance(target, ast.Name)
        ]
        return [f"{', '.join(names)} {'are' if names[1:] else 'is'} not made"] if names else []

    def changes(self, text: CellText, *changes: Change) -> list[Change]:
        """Return the changes of the cell's text for those of the expression; the other statements go."""
        code = apply_changes(changes, self.text.source)
        return [text.replace(self.last, code), *map(text.remove, self.before)]


MOST_STATEMENTS = 4


def joined_in(text: CellText, failed: ast.stmt | None = None) -> Iterator[Joined]:
    """Yield the expressions that a statement is part of, alone or with its neighbours: the one that failed without."""
    failed = failed or text.statement_at(text.line)
    if failed is None:
        return
    outer = next(
        (each for each in text.nodes() if isinstance(each, ast.With) and failed in each.body),
        failed,
    )
    block = in_a_row(text.block_of(outer))
    place = next((i for i, each in enumerate(block) if each is failed), 0)
    for i, last in enumerate(block[place : place + MOST_STATEMENTS], place):
        value = last.value if isinstance(last, ast.Assign | ast.Return | ast.Expr) else None
        if value is None:
            continue
        code, used = _inlined(text, value, block[max(0, i - MOST_STATEMENTS) : i])
        whole = texts.parse(f"({code})" if "\n" in code else code)
        if whole is not None and (last is failed or any(each is failed for each in used)):
            yield Joined(whole, value, tuple(used))


def _inlined(
    text: CellText, value: ast.expr, before: Sequence[ast.stmt]
) -> tuple[str, list[ast.Assign]]:
    """Return an expression's code with the values of variables in their place that are bound and read only once."""
    code, used = text.code(value), list[ast.Assign]()
    for each in reversed(before):
        target = (
            each.targets[0] if isinstance(each, ast.Assign) and len(each.targets) == 1 else None
        )
        if (
            not isinstance(each, ast.Assign)
            or not isinstance(target, ast.Name)
            or not text.stands_alone(each)
        ):
            continue
        if not names_in(each.value) - {"torch", "F", "nn"} or any(
            map(_makes_anew, ast.walk(each.value))
        ):
            continue
        uses = [
            node for node in text.nodes() if isinstance(node, ast.Name) and node.id == target.id
        ]
        reads = sum(isinstance(node.ctx, ast.Load) for node in uses)
        later = [node for node in uses if node.lineno > (each.end_lineno or 0)]
        bound = min(
            (node.lineno for node in later if not isinstance(node.ctx, ast.Load)), default=math.inf
        )
        read_after = sum(isinstance(node.ctx, ast.Load) and node.lineno <= bound for node in later)
        if (
            2 * reads == len(uses)
            and read_after == 1
            and len(re.findall(rf"\b{target.id}\b", code)) == 1
        ):
            put = f"({text.code(each.value)})".replace("\\", r"\\")  # no escapes of a template
            code, used = re.sub(rf"\b{target.id}\b", put, code), [*used, each]
    return code, used


def _makes_anew(node: ast.AST) -> bool:
    """Return whether a call gives another tensor each time, or one that is a parameter."""
    is_parameter = isinstance(node, ast.Call) and keyword(node, "requires_grad") is not None
    return is_parameter or called_name(node).startswith(("rand", "Parameter", "dropout"))


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
    cost: str = "rounding differs in the last digits"
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """How many dimensions some of the names of the pattern have."""
    fused: bool = False
    """Whether it takes attention kernels that never make the matrix of all scores."""


_PRODUCT = "the first product is as large as all of the first matrix"
_SCORES = {"Q @ mT(K) * S": "{S}", "Q @ mT(K) / S": "1 / ({S})", "Q @ mT(K)": "1.0"}
_MASKS = {"{}": "", 'masked_fill({}, MASK, float("-inf"))': "attn_mask=~{MASK}, "}
_SOFTMAX = "softmax makes a second matrix as large as the scores"
REWRITES = (
    *(
        Rewrite(
            "Compute the distances with torch.cdist",
            f"sum(square(column(A) - row(B)), {last})",
            "(torch.cdist({A}, {B}) ** 2)",
            "it makes all differences before it sums them",
            dimensions={"A": 2, "B": 2},
        )
        for last in ("-1", "2")
    ),
    Rewrite(
        "Look the rows up by index",
        "cast(one_hot(IDS, N)) @ TABLE",
        "{TABLE}[{IDS}]",
        "it makes a matrix of zeros and ones",
        "none: the values are the same",
        {"TABLE": 2},
    ),
    Rewrite(
        "Multiply the small matrices first",
        "A @ B @ C",
        "{A} @ ({B} @ {C})",
        _PRODUCT,
        dimensions={"A": 2},
    ),
    *(
        Rewrite(
            "Use scaled_dot_product_attention",
            f"softmax({mask.format(scores)}, -1) @ V",
            f"torch.nn.functional.scaled_dot_product_attention({{Q}}, {{K}}, {{V}}, {given}scale={scale})",
            _SOFTMAX,
            dimensions={"Q": 4},
            fused=True,  # its kernels take batch, heads, length and width
        )
        for (scores, scale), (mask, given) in itertools.product(_SCORES.items(), _MASKS.items())
    ),
    *(
        Rewrite(
            f"Attend with {QUERIES} queries at a time",
            f"softmax({scores}, -1) @ V",
            f"torch.cat([{{PART}} for q_part in {{Q}}.split({QUERIES}, dim=-2)], dim=-2)",
            _SOFTMAX,
            "a little time",
        )
        for scores in _SCORES
    ),
)


def rewritten(facts: Facts) -> Iterator[Advice]:
    """Compute the same in a way that makes no large tensor."""
    for text, statement in failed(facts):
        for joined, rewrite in itertools.product(joined_in(text, statement), REWRITES):
            for node in joined.text.expressions():
                found = match(rewrite.pattern, node)
                if found is None or not _holds(facts, joined.text, rewrite, found):
                    continue
                part = substituted(joined.text, node, found["Q"], "q_part") if "Q" in found else ""
                new = rewrite.new.format(
                    PART=part,
                    **{name: bracketed(joined.text, each) for name, each in found.items()},
                )
                yield propose(
                    rewrite.title,
                    text=text,
                    changes=joined.changes(text, joined.text.replace(node, new)),
                    evidence=f"the line asks for {size(facts.event.requested)}: {rewrite.why}",
                    cost="; ".join([rewrite.cost, *joined.lost]),
                )
                return


def _holds(facts: Facts, text: CellText, rewrite: Rewrite, found: Mapping[str, ast.expr]) -> bool:
    shapes = {name: facts.frames.tensors.get(text.code(found[name])) for name in rewrite.dimensions}
    is_so = all(
        fact is not None and len(fact.shape) == rewrite.dimensions[name]
        for name, fact in shapes.items()
    )
    is_split = "Q" in found and text.code(found["Q"]) == "q_part"  # by this very advice
    return is_so and not is_split and (facts.notebook.has_fused_attention or not rewrite.fused)


_WRITES = re.compile(r"\w_\(|[-+*/]=|\]\s*=[^=]|\bout=")
"""What writes to a tensor, or may: ``x.relu_()``, ``x += 1``, ``x[0] = 1``."""


def expand(facts: Facts) -> Iterator[Advice]:
    """Repeat without copies what has one element in the repeated dimension."""
    for text, node in calls(filter(None, [facts.frames.failing_text]), "repeat"):
        owner, counts = (
            text.code(node.func).removesuffix(".repeat"),
            [text.code(each) for each in node.args],
        )
        fact = facts.frames.tensors.get(owner)
        if fact is None or _WRITES.search(text.source):
            continue
        if all("1" in pair for pair in zip(counts[::-1], map(str, fact.shape[::-1]), strict=False)):
            added = len(counts) - len(fact.shape)
            arguments = ", ".join(
                "-1" if code == "1" and i >= added else code for i, code in enumerate(counts)
            )
            yield propose(
                f"Expand {owner} instead of repeating it",
                text=text,
                changes=[text.replace(node, f"{owner}.expand({arguments})")],
                evidence=f"repeat copies {size(facts.event.requested)}; expand makes a view",
                cost="the view must not be written to",
            )
            return
