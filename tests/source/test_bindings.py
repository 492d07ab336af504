"""A variable counts as bound first only if the cell binds it before it reads it, whichever way the cell goes."""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.source import cell_code
from gpumagic.source.bindings import first_bindings
from tests.stages import examples


def bound_first(source: str) -> frozenset[str]:
    return first_bindings(ast.parse(source)).certain


RUNS_FOR_CERTAIN = [
    "model = make()",
    "model: Net = make()",
    "(model, size) = make()",
    "(model := make())",
    "use((model := make()))",
    "[(model := make()), 1]",
    "{(model := make()): 1}",
    "f'{(model := make())}'",
    "(model := make()) or 1",
    "(model := make()) < 1 < 2",
    "1 < (model := make()) < 2",
    "1 if (model := make()) else 2",
    "if (model := make()): pass",
    "while (model := make()): break",
    "for i in (model := make()): pass",
    "match (model := make()):\n    case 1: pass",
    "with (model := make()): pass",
    "with open(f) as model: pass",
    "with torch.no_grad():\n    model = make()",
    "with torch.no_grad(), suppress(E) as model: pass",
    "async with lock as model: pass",
    "try: pass\nfinally: model = make()",
    "for i in y:\n    if i: break\nmodel = make()",
    "for i in y:\n    while i: continue\nmodel = make()",
    "def f(): return 1\nmodel = make()",
    "f = lambda: 1\nmodel = make()",
]


@pytest.mark.parametrize("source", RUNS_FOR_CERTAIN)
def test_what_every_run_binds_is_bound_first(source: str) -> None:
    assert "model" in bound_first(f"{source}\nmodel(x)")


MAY_BE_PASSED_BY = [
    # statements
    "if fresh: model = make()",
    "if fresh: pass\nelse: model = make()",
    "if fresh: pass\nelif old: model = make()",
    "if fresh: pass\nelif (model := make()): pass",
    "match fresh:\n    case True: model = make()",
    "match fresh:\n    case True: pass\n    case _: model = make()",
    "match fresh:\n    case True if (model := make()): pass",
    "while fresh: model = make()",
    "while fresh: pass\nelse: model = make()",
    "for i in y: model = make()",
    "for model in y: pass",
    "for i in y: pass\nelse: model = make()",
    "async for i in y: model = make()",
    "async for model in y: pass",
    "try: model = make()\nexcept E: pass",
    "try: pass\nexcept E: model = make()",
    "try: pass\nexcept (model := make()): pass",
    "try: pass\nexcept E: pass\nelse: model = make()",
    "try: model = make()\nfinally: model(x)",
    "with suppress(E): model = make()",
    "with suppress(E), open(f) as model: pass",
    "with torch.no_grad(), suppress(E):\n    model = make()",
    "async with lock: model = make()",
    "assert (model := make())",
    "assert ok, (model := make())",
    "model: Net",
    # what leaves before
    "for i in y:\n    if done: break\n    model = make()",
    "for i in y:\n    if done: continue\n    model = make()",
    "while True:\n    if done: break\n    model = make()",
    "if done: raise Done\nmodel = make()",
    "for i in y:\n    if done: raise Done\nmodel = make()",
    "with torch.no_grad():\n    if done: raise Done\nmodel = make()",
    "if done: sys.exit()\nmodel = make()",
    "done and exit()\nmodel = make()",
    "for i in y:\n    for j in i: pass\n    else: break\n    model = make()",
    "match done:\n    case True: raise Done\nmodel = make()",
    "try: check()\nexcept E: raise\nmodel = make()",
    # operands
    "fresh and (model := make())",
    "fresh or (model := make())",
    "fresh and old and (model := make())",
    "1 < 2 < (model := make())",
    "(model := make()) if fresh else old",
    "old if fresh else (model := make())",
    "[(model := make()) for i in y]",
    "[i for i in y if (model := make())]",
    "{(model := make()) for i in y}",
    "{i: (model := make()) for i in y}",
    "any((model := make()) for i in y)",
    # bodies that run when they are called
    "def f(): model = make()",
    "def f():\n    global model\n    model = make()",
    "async def f():\n    global model\n    model = make()",
    "lambda: (model := make())",
    "def f(a=(model := make())): pass",
    "class A: model = make()",
]


@pytest.mark.parametrize("source", MAY_BE_PASSED_BY)
def test_what_may_be_passed_by_is_not_bound_first(source: str) -> None:
    assert "model" not in bound_first(f"{source}\nmodel(x)")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* came with Python 3.11")
@pytest.mark.parametrize(
    "source", ["try: model = make()\nexcept* E: pass", "try: pass\nexcept* E: model = make()"]
)
def test_the_body_of_a_try_with_groups_may_be_passed_by(source: str) -> None:
    assert "model" not in bound_first(f"{source}\nmodel(x)")


@pytest.mark.parametrize(
    "source",
    [
        "(model := model + 1)",
        "model: Net = model.half()",
        "{1: model, (model := make()): 2}",
        "model[0], model = make()",
        "for model in model: pass",
        "with open(model) as model: pass",
        "match model:\n    case 1: model = make()",
        "del model\nmodel = make()",
        "model += make()",
        "global model\nprint(model)\nmodel = make()",
    ],
)
def test_a_value_is_read_before_its_name_is_bound(source: str) -> None:
    assert "model" not in bound_first(source)


@pytest.mark.parametrize(
    "magic",
    [
        "run_line_magic('time', 'y = model(x)')",
        "run_cell_magic('time', '', 'y = model(x)')",
        "system('show {model}')",
    ],
)
def test_a_magic_reads_what_its_code_names(magic: str) -> None:
    cell = cell_code.read_cell(f"get_ipython().{magic}\nmodel = make()")
    assert cell is not None
    assert "model" not in cell.bound_first
    assert "model" in cell.reads


def test_of_code_that_is_nested_too_deep_nothing_is_certain() -> None:
    cell = cell_code.read_cell(f"model = {' + '.join(['1'] * 2000)}")
    assert cell is not None
    assert cell.bound_first == frozenset()


LOOP = "n = 0\nfor x in data:\n    model = make(x)\n    model(n)\nmodel(1)"


@pytest.mark.parametrize(
    ("source", "line", "rebound"),
    [(LOOP, 3, ()), (LOOP, 4, ()), (LOOP, 5, {"model"}), ("with lock:\n    model = make()", 2, ())],
)
def test_a_body_that_a_run_entered_binds_for_certain(source, line, rebound) -> None:
    cell = cell_code.read_cell(source)
    assert cell is not None
    assert "model" not in cell.bound_first
    assert "model" in cell.after_run(line, rebound).bound_first


@pytest.mark.parametrize(
    ("source", "line", "rebound"),
    [
        (LOOP, 1, {"n"}),
        (LOOP, 2, ()),
        (LOOP, 5, ()),
        (LOOP, None, ()),
        ("for x in make(data): model = x", 1, ()),
        ("for x in make(\n    data): model = x", 2, ()),
        ("with suppress(make()): model = 1", 1, ()),
        ("for x in data:\n    if x:\n        model = make(x)", 3, {"model"}),
        ("while fresh():\n    model = make(x)", 2, {"model"}),
        ("for x in data:\n    if done: break\n    model = make(x)", 2, {"model"}),
        ("for x in data:\n    if done: continue\n    model = make(x)", 2, {"model"}),
        (
            "for x in data:\n    for y in x: pass\n    else: break\n    model = make(x)",
            2,
            {"model"},
        ),
        ("for x in data: pass\nelse:\n    model = make(x)", 3, {"model"}),
    ],
)
def test_a_body_that_no_run_has_entered_or_that_a_condition_guards_does_not(
    source, line, rebound
) -> None:
    cell = cell_code.read_cell(source)
    assert cell is not None
    assert "model" not in cell.after_run(line, rebound).bound_first


# Programs of everything that Python may pass by, run with a namespace that watches each name. What a program asks
# itself, `flag()` and `some()`, is answered at random.

NAMES = ("a", "b", "c", "d")
BINDINGS = st.sampled_from([f"({name} := 1)" for name in NAMES])
OPERANDS = st.one_of(
    BINDINGS, BINDINGS, st.sampled_from(["flag()", "(a := b)", "(b := b)", *NAMES])
)
EXPRESSIONS = {
    "and": "({} and {})",
    "or": "({} or {})",
    "if": "({} if {} else {})",
    "chain": "(1 < {} < {})",
    "dict": "{{1: {}, {}: 2}}[1]",
    "comprehension": "any([{} for i in some() if {}])",
    "lambda": "bool(lambda: {})",
}
STATEMENTS = {
    "annotation": "a: int\nb: int = {}",
    "augmented": "a += {}",
    "assert": "assert 1, {}",
    "if": "if {}:\n    {}\n    {}\nelse:\n    {}",
    "elif": "if {}: {}\nelif {}: {}\nelse: {}",
    "for": "for {} in some():\n    {}\n    {}\nelse:\n    {}",
    "while": "while flag() and {}:\n    {}\n    {}\nelse:\n    {}",
    "break": "for i in [1]:\n    if flag(): break\n    {}",
    "continue": "while flag():\n    if flag(): continue\n    {}\n{}",
    "forever": "while True:\n    {}\n    if flag(): break\n    {}\n    break",
    "with": "with maybe() as {}, suppress(Left):\n    {}\n    if flag(): raise Left\n    {}",
    "try": "try:\n    {}\n    if flag(): raise Left\n    {}\nexcept Left:\n    {}\nelse:\n    {}\nfinally:\n    {}",
    "raise": "{}\nif flag(): raise Left\n{}",
    "match": "match flag():\n    case True if {}: {}\n    case False if {}: {}\n    case _: {}",
    "def": "def f():\n    global a, b, c, d\n    {}\nflag() and f()",
}


def filled(template: str, parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return a template with something else in each of its places; a name where something is bound."""
    slots = [parts] * (template.count("{}"))
    if template.startswith(("for {}", "with maybe() as {}")):
        slots[0] = st.sampled_from(NAMES)
    return st.builds(template.format, *slots)


ANY_EXPRESSION = st.one_of(*(filled(template, OPERANDS) for template in EXPRESSIONS.values()))
PARTS = st.one_of(OPERANDS, ANY_EXPRESSION)


class LeftError(Exception):
    pass


class Watched(dict):
    """A namespace that remembers of which names the old values are read."""

    def __init__(self, names: dict) -> None:
        super().__init__(names, **{name: object() for name in NAMES})
        self.old = {name: dict.__getitem__(self, name) for name in NAMES}
        self.read: set[str] = set()

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if name in NAMES and value is self.old[name]:
            self.read.add(name)
            return 2
        return value


def check_claims(program: str, answers: list[bool]) -> None:
    """Run a program and see that what counts as bound first is bound, and that nothing reads its old value."""
    answer = iter(answers)
    names = Watched({
        "__builtins__": builtins.__dict__,
        "flag": lambda: next(answer, False),
        "some": lambda: [1] * next(answer, False),
        "maybe": lambda: contextlib.nullcontext(1),
        "suppress": contextlib.suppress,
        "Left": LeftError,
    })  # fmt: skip
    ended = False
    with contextlib.suppress(LeftError):
        exec(compile(program, "cell", "exec", dont_inherit=True), names)
        ended = True
    claimed = bound_first(program)
    assert not claimed & names.read
    if ended:
        assert not {name for name, value in names.items() if value is names.old.get(name)} & claimed


ANSWERS = st.lists(st.booleans(), min_size=6, max_size=6)


@pytest.mark.parametrize("operator", EXPRESSIONS)
@examples(40, 2000)
@given(st.data())
def test_no_run_reads_or_passes_by_what_an_expression_binds_first(operator, data) -> None:
    expression = data.draw(filled(EXPRESSIONS[operator], PARTS))
    check_claims(f"{expression}\n{data.draw(PARTS)}", data.draw(ANSWERS))


@pytest.mark.parametrize("construct", STATEMENTS)
@examples(40, 2000)
@given(st.data())
def test_no_run_reads_or_passes_by_what_a_statement_binds_first(construct, data) -> None:
    statement = data.draw(filled(STATEMENTS[construct], PARTS))
    check_claims(f"{statement}\n{data.draw(PARTS)}", data.draw(ANSWERS))
