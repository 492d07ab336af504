"""What an edit of advice computes is what the cell computed, except for what its cost says.

Cells of both corpora, and generated ones that do what the rules are about, and what the rules must not break.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.kernels import environment
from tests.oom import edit_values
from tests.oom.edit_values import outcome
from tests.oom.oom_corpus import Case
from tests.stages import IS_WHOLE, examples, wanted

pytestmark = pytest.mark.usefixtures("few_objects")

CASES = edit_values.cases()
FIRST = ("last_turn", "running_sum")
RUN = [
    *FIRST,
    *(
        name
        for number, name in enumerate(CASES)
        if (IS_WHOLE or number % 8 == 0) and name not in FIRST
    ),
]
"""An eighth of the cells where not all are asked for: each runs ten times, for seconds."""


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Return what came of every cell asked for; one process runs them all."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.oom.edit_values", *wanted(request, "name")], check=False, capture_output=True,
        text=True, env=environment(tmp_path_factory.mktemp("ipython")), timeout=3600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return {
        name: came for line in result.stdout.splitlines() for name, came in json.loads(line).items()
    }


@pytest.mark.parametrize(
    "name", [RUN[0], *(pytest.param(each, marks=pytest.mark.deep) for each in RUN[1:])]
)
def test_an_edited_cell_leaves_what_the_cell_does_or_its_cost_says_what_differs(
    outcomes, name
) -> None:
    """An edit with which the cell fails is found by its dry run, and is not the matter here."""
    assert "error" not in outcomes[name], outcomes[name]["error"]
    found = {
        f"{each['rule']}: {each['edit']}": each["undeclared"] for each in outcomes[name]["edits"]
    }
    assert {edit: kinds for edit, kinds in found.items() if kinds and "fails" not in kinds} == {}


N = 1632
"""The rows and columns of the matrices of generated cells: each has a segment of the allocator to itself."""
SETUP = f"""
a, w = (torch.rand({N}, {N}, device="simgpu:0") + 0.5 for _ in range(2))
v, r, k = torch.rand({N}, 1, device="simgpu:0") + 0.5, torch.rand({N}, device="simgpu:0") + 0.5, 2
def scaled(q, by=3):
    return q * by"""

OF_ONE = (
    "{}.exp()", "torch.exp({})", "{}.relu()", "{}.clamp(min=0.9)", "torch.clamp({}, max=1.1)", "-{}", "{}.sqrt()",
    "({}) ** 2", "{}.pow(2)", "({}).abs()", "{}.T", f"{{}}.view({N}, {N})", "{}.softmax(-1)", "torch.relu({})",
    "torch.sigmoid(input={})", "{}[:]", "{}.neg().abs().log()", "scaled({})", "scaled({}, by=2)", "{}.half().float()",
    "{}.clone()", "{}.contiguous()", "({}  # why\n    )", "{}.reshape(-1).view_as(a)", "{}.detach()", "{}.float()",
)  # fmt: skip
OF_TWO = (
    "{} + {}", "{} * {}", "{} - {}", "{} / {}", "({} - {}).exp()", "({} + {}) * 0.5", "torch.maximum({}, {})",
    "torch.where({} > 1, {}, 0)", "torch.add({}, {}, alpha=2)", "torch.einsum('ij,ij->ij', {}, {})", "{} * ({} + 1)",
)  # fmt: skip
SMALL = (
    "2",
    "0.5",
    "v",
    "r",
    "r[None]",
    "{}[0]",
    "{}[:, :1]",
    "{}.mean(0)",
    "{}.max()",
    "k",
    "{}.sum(1)[:, None]",
)
OF_ALL = (
    "{}.sum()", "{}.mean(0)", "{}.argmin(1)", "{}.topk(3).values", "{}.max(dim=1).values", "{}[:, :2].clone()",
    "{}.norm(dim=-1)", "torch.softmax({}, -1).amax(1)", "{}.std(dim=0)", "{}.sort(-1).values[:, :2]", "{}.sum(0).sum()",
)  # fmt: skip


@st.composite
def expressions(draw: st.DrawFn, scope: list[str], depth: int = 2) -> str:
    """Return code of as large a matrix as its parts are."""
    name = draw(st.sampled_from(scope))
    if not depth:
        return name
    inner = draw(expressions(scope, depth - 1))
    inner = inner if inner.isidentifier() else f"({inner})"
    form = draw(st.sampled_from(["one", "one", "two", "small", "plain"]))
    if form == "one":
        return draw(st.sampled_from(OF_ONE)).format(inner)
    if form == "two":
        pair = draw(st.permutations([inner, draw(st.sampled_from(scope))]))
        return draw(st.sampled_from(OF_TWO)).format(*pair)
    if form == "small":
        pair = draw(st.permutations([inner, draw(st.sampled_from(SMALL)).format(name)]))
        return f"{pair[0]} {draw(st.sampled_from('+-*/'))} {pair[1]}"
    return inner


@st.composite
def statements(draw: st.DrawFn, scope: list[str], indent: str = "") -> str:  # noqa: PLR0911  # one for each kind
    """Return a statement of a cell; what it binds joins the names in scope, what it deletes leaves them."""
    kind = draw(st.sampled_from(["new"] * 6 + [
        "again", "sum", "sum", "alias", "delete", "print", "append", "function", "no_grad", "loop", "two", "leaf",
        "augmented",
    ]))  # fmt: skip
    code = draw(expressions(scope))
    new, old = draw(st.sampled_from("bcde")), draw(st.sampled_from(scope))
    if kind == "again" and len(scope) > 2:
        return f"{scope[-1]} = {code}"
    if kind == "sum":
        form = draw(st.sampled_from(OF_ALL)).format(f"({code})")
        return f"out{draw(st.integers(0, 3))} = {form}"
    if kind == "delete" and len(scope) > 2:
        return f"del {scope.pop()}"
    if kind == "print":
        return f"print(f'{{{old}.sum():.3f}}')"
    if kind == "append":
        return f"outs.append({code})"
    if kind == "augmented":
        return f"{old} {draw(st.sampled_from('+-*'))}= {draw(expressions(scope, 1))}"
    if kind in ("no_grad", "loop") and not indent:
        head = "with torch.no_grad():" if kind == "no_grad" else "for i in range(2):"
        inner = [draw(statements(scope, "    ")) for _ in range(draw(st.integers(1, 2)))]
        return (
            head
            + "".join(f"\n    {each}" for each in inner if not each.startswith("del"))
            + "\n    pass"
        )
    if kind == "function":
        body = f"def f(q):\n{indent}    return q * {old} + 1\n{indent}"
        scope.append(new)
        return f"{body}{new} = f({code})"
    value = {"alias": old, "leaf": f"({code}).detach().requires_grad_()"}.get(kind, code)
    if kind == "two":
        value, other = f"{code}, {draw(expressions(scope, 1))}", draw(st.sampled_from("fg"))
        scope += [new, other]
        return f"{new}, {other} = {value}"
    scope.append(new)
    return f"{new} = {value}"


@st.composite
def cells(draw: st.DrawFn) -> str:
    """Return a cell that makes large matrices of others, in the ways that notebooks do."""
    scope = ["a", "w"]
    made = [draw(statements(scope)) for _ in range(draw(st.integers(2, 6)))]
    first = f"outs = []\nb = {draw(expressions(['a', 'w']))}"
    return "\n".join([first, *made, "out = outs[-1].sum() if outs else 0"])


SETUP_OF_THEMES = """
import copy
dev = "simgpu:0"
data = [torch.randn(2048, 64) for _ in range(4)]
X, Y = torch.randn(4096, 64), torch.randn(4096, 16)
order = torch.randperm(4096)
net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 16)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
criterion = nn.MSELoss()
q, k, v = (torch.randn(1, 2, 1536, 16, device=dev) for _ in range(3))
mask = torch.ones(1536, 1536, device=dev).tril() == 0
a, b, c = torch.randn(640, 16, device=dev), torch.randn(640, 16, device=dev), torch.randn(16, device=dev)
table, ids = torch.randn(3000, 32, device=dev), torch.randint(0, 3000, (2000,), device=dev)
row, wide = torch.randn(1, 2048, device=dev), torch.randn(2048, 1500, device=dev)
earlier = []"""


def _slots() -> dict[str, list[list[str]]]:
    """Return kinds of cells, each with what may stand in the place of each statement."""
    text = (Path(__file__).parent / "cells_in_slots.txt").read_text("utf-8")
    kinds = dict(each.split("\n", 1) for each in text.split("## ")[1:])
    return {
        name: [
            [each.replace("\\n", "\n") for each in slot.split("\n")]
            for slot in slots.strip("\n").split("\n\n")
        ]
        for name, slots in kinds.items()
    }


THEMES = _slots()


@st.composite
def themed(draw: st.DrawFn) -> str:
    """Return a cell that does what some rule is about, and perhaps something that the rule must not break."""
    slots = THEMES[draw(st.sampled_from(sorted(THEMES)))]
    lines = [draw(st.sampled_from(each)) for each in slots]
    is_nested = any(
        each.startswith("with") for each in lines
    )  # then the loop stands two blanks further
    there = [each for each in lines if each != "-"]
    return "\n".join(
        f"  {each}" if is_nested and each.startswith("    ") else each for each in there
    )


def wrong(cell: str, setup: str, share: int) -> dict[str, dict[str, list[str]]]:
    """Return what edits of a cell change though they do not say so; a dry run finds those with which it fails."""
    case = Case("", "", "", (setup,), cell, memory="")
    if edit_values.left(case).error:  # it makes no sense by itself
        return {}
    found = {}
    for each, differs in outcome(case, [share]):
        rest = edit_values.undeclared(cell, each, differs)
        if rest and "fails" not in rest:
            found[
                f"{each.rule}: {each.advice.title}\n{each.advice.first or ''}\n{each.advice.edit}"
            ] = rest
    return found


SOME = settings(examples(1, 20), phases=[Phase.explicit, Phase.generate])
"""Without shrinking: a cell takes a second, and is short."""


@given(cells(), st.integers(5, 95))
@SOME
def test_edits_of_generated_cells_compute_what_the_cells_do(cell, share) -> None:
    assert wrong(cell, SETUP, share) == {}


@given(themed(), st.integers(5, 95))
@SOME
def test_edits_of_cells_that_rules_are_about_compute_what_the_cells_do(cell, share) -> None:
    assert wrong(cell, SETUP_OF_THEMES, share) == {}
