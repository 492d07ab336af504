"""Whatever the cell looks like, an edit yields code that parses and differs from it only where the edit says."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.advice import search as advising
from gpumagic.advice.facts import Collection, Facts, Model, TensorFact
from gpumagic.advice.records import Advice
from gpumagic.advice.trials import Trials
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.source import cell_code, text
from gpumagic.source.text import Change
from tests.oom.made_facts import made_facts

GIB = 2**30
SIMPLE = st.sampled_from([
    "x = data[i : i + batch_size].to('cuda:0')", "größe = f('ß', batch_size=256)  # 批", "total += loss", "pass",
    "outs.append(net(x))", "loss = F.mse_loss(net(x), y)", "loss.backward(retain_graph=True)", "a = 1; b = net(x)",
    "s = '''one\n  two\nthree'''", "y = f(\n    x,  # first\n  batch_size=256,\n)", "opt.zero_grad(set_to_none=False)",
    "z = 'é' + g(net(x))", "w = \\\n  net(x)", "loss = net(x).mean()", "batch_size = 256", "del x", "h = net(\n x)",
])  # fmt: skip


def indented(code: str, by: str) -> str:
    """Return a block's code under a header, without touching the insides of its strings."""
    lines, inside = [], False
    for line in code.split("\n"):
        lines.append(line if inside else by + line)
        inside ^= line.count("'''") % 2 == 1
    return "\n".join(lines)


def compound(blocks: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    heads = st.sampled_from(
        ["for i in range(3):", "if ok:", "with open(p) as f:", "def g(x, batch_size=256):", "try:"]
    )
    return st.builds(
        lambda head, block, by: f"{head}\n{indented(block, by)}"
        + ("\nfinally:\n    pass" if head == "try:" else ""),
        heads, blocks, st.sampled_from(["    ", "\t", " "]),
    )  # fmt: skip


CELLS = st.recursive(
    st.lists(SIMPLE, min_size=1, max_size=4).map("\n".join),
    lambda inner: st.lists(inner | compound(inner), min_size=1, max_size=3).map("\n".join),
    max_leaves=6,
)


def parsed(source: str) -> text.CellText:
    found = text.parse(source)
    assert found is not None
    return found


def dump(source: str) -> str:
    return ast.dump(ast.parse(source))


def restored(source: str, changes: tuple[Change, ...]) -> str:
    """Return a changed text with every change taken back, found where the changes before it have moved it."""
    lines = source.split("\n")
    starts = [sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines) + 1)]
    changed = Advice("", None, None, changes=changes).apply(source)
    shift, pieces, end = 0, [], 0
    for change in sorted(changes, key=lambda each: (each.line, each.column)):
        at = starts[change.line - 1] + change.column + shift
        assert changed[at : at + len(change.new)] == change.new
        pieces += [changed[end:at], change.old]
        end, shift = at + len(change.new), shift + len(change.new) - len(change.old)
    return "".join([*pieces, changed[end:]])


@pytest.mark.parametrize("before", ["", "if ok:\n    "])
def test_statements_are_wrapped_by_two_suggestions(before) -> None:
    found = parsed(f"{before}y = f(x)")
    (statement,) = [each for each in found.nodes() if isinstance(each, ast.Assign)]
    changes = [*found.wrap([statement], "with A:"), *found.wrap([statement], "with B:")]
    (outer,) = [
        node
        for node in ast.walk(ast.parse(text.apply_changes(changes, found.source)))
        if isinstance(node, ast.With)
    ][:1]
    assert ast.unparse(outer) == "with A:\n    with B:\n        y = f(x)"


def test_a_statement_goes_before_another_that_is_wrapped() -> None:
    found = parsed("y = f(x)")
    (statement,) = found.tree.body
    changes = [*found.insert(statement, "clear()"), *found.wrap([statement], "with A:")]
    changes += [found.replace(statement.targets[0], "z")]
    assert text.apply_changes(changes, found.source) == "clear()\nwith A:\n    z = f(x)"


class _Unwrapped(ast.NodeTransformer):
    def visit_With(self, node):
        self.generic_visit(node)
        return node.body if ast.unparse(node.items[0]) == "WRAPPED" else node


@given(CELLS, st.data())
def test_wrapping_statements_changes_nothing_but_their_place(source, data) -> None:
    found = parsed(source)
    block = data.draw(st.sampled_from(list(text.blocks(found.tree))))
    start = data.draw(st.integers(0, len(block) - 1))
    end = data.draw(st.integers(start + 1, len(block)))
    changes = found.wrap(block[start:end], "with WRAPPED:")
    changed = Advice("", None, None, changes=changes).apply(source)
    assert ast.dump(_Unwrapped().visit(ast.parse(changed))) == dump(source)
    if changes:
        assert changed.count("WRAPPED") == 1


@given(CELLS, st.data())
def test_inserted_lines_are_all_that_an_insertion_adds(source, data) -> None:
    found = parsed(source)
    statement = data.draw(
        st.sampled_from([node for node in found.nodes() if isinstance(node, ast.stmt)])
    )
    insert = data.draw(st.sampled_from([found.insert, found.insert_after]))
    changes = insert(statement, "ADDED()")
    changed = Advice("", None, None, changes=changes).apply(source)
    assert ast.parse(changed)
    assert changed.count("ADDED()") == len(changes)
    assert restored(source, changes) == source


@given(CELLS, st.data())
def test_an_argument_is_added_to_the_call_and_to_nothing_else(source, data) -> None:
    found = parsed(source)
    calls = [node for node in found.nodes() if isinstance(node, ast.Call)]
    if calls:
        call = data.draw(st.sampled_from(calls))
        change = found.add_argument(call, "added=True")
        changed = Advice("", None, None, changes=(change,)).apply(source)
        call.keywords.append(ast.keyword("added", ast.Constant(value=True)))
        assert ast.dump(found.tree) == dump(changed)


@given(CELLS, st.data())
def test_an_expression_is_replaced_where_it_stands(source, data) -> None:
    found = parsed(source)
    names = [
        node
        for node in found.nodes()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]
    if names:
        name = data.draw(st.sampled_from(names))
        changed = Advice("", None, None, changes=(found.replace(name, "REPLACED"),)).apply(source)
        name.id = "REPLACED"
        assert ast.dump(found.tree) == dump(changed)


TENSOR = TensorFact((256, 64), "float32", 256 * 64 * 4, "cuda:0")
LISTS = {"outs": Collection(9, GIB, graphs=9), "data": Collection(3, GIB)}
FIGURES = AllocatorStats(7 * GIB, 7 * GIB, 7 * GIB)


def facts(source: str, line: int, *, trains: bool) -> Facts:
    """Return facts under which as many rules as can be have something to say."""
    cell = cell_code.read_cell(source)
    model = Model("net", GIB, GIB, training=trains, checkpoints=None, blocks="net")
    at = text.parse(source, line=line)
    return made_facts(
        "cuda allocator", device="cuda:0", requested=2 * GIB, capacity=8 * GIB, free=GIB, before=FIGURES,
        at_failure=FIGURES, after=AllocatorStats(GIB, GIB, GIB), from_allocator=True, cell=cell,
        line=line, source=source, functions=frozenset({"forward"}), calls_backward=trains,
        models=(model,), free_elsewhere={"cuda:1": 80 * GIB},
        batch_sizes=cell.batches,
        failing_text=at, collections=LISTS,
        tensors={"y": TENSOR, **dict.fromkeys(("loss", "x", "total"), replace(TENSOR, has_graph=True))},
        models_alive=(model,),
    )  # fmt: skip


@given(CELLS, st.data(), st.booleans())
def test_every_edit_of_every_rule_parses_and_can_be_taken_back(source, data, trains) -> None:
    line = data.draw(st.integers(1, source.count("\n") + 1))
    known = facts(source, line, trains=trains)
    for advice in advising.advise(known, Trials(known, {}, seconds=0.0)):
        body = [change for change in advice.changes if not change.new.startswith("%%")]
        changed = Advice("", None, None, changes=tuple(body)).apply(source)
        assert ast.parse(changed), advice.title
        assert restored(source, tuple(body)) == source, advice.title
        if advice.first is not None:
            assert ast.parse(advice.first.replace("%xdel", "del")), advice.title


def test_an_edit_of_another_text_is_refused() -> None:
    advice = Advice("", None, None, changes=(Change(1, 4, "256", "96"),))
    assert advice.apply("b = 256") == "b = 96"
    with pytest.raises(ValueError, match="line 1 does not read '256' any more"):
        advice.apply("b = 128")
