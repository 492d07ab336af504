"""Where the work is in a cell's code: the forward pass, the loop around a line, what calls a model.

Rules read the code of a failure with these functions, and `proposal` makes suggestions of what they find.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpumagic.advice.facts import Facts, Stage
from gpumagic.source.text import CellText, called_name


@dataclass(frozen=True, slots=True)
class Region:
    """The statements of a forward pass and what follows them in the same block."""

    text: CellText
    forward: list[ast.stmt]
    backward: ast.stmt | None
    """The statement that calls `backward`; it is the last of `forward` too where one statement does both."""

    @property
    def computed(self) -> list[ast.stmt]:
        """The statements, without those at their ends that clear gradients."""
        computing = []
        for place, statement in enumerate(self.forward):
            if not does(statement, "zero_grad"):
                computing.append(place)
        if not computing:
            return self.forward
        return self.forward[computing[0] : computing[-1] + 1]

    @property
    def through_backward(self) -> list[ast.stmt]:
        """The statements, that of `backward` included."""
        if self.backward is None or self.backward is self.forward[-1]:
            return self.forward
        return [*self.forward, self.backward]


def find(facts: Facts) -> Region | None:
    """Return the forward pass that failed or whose backward failed.

    Of several texts that show one, it is that of the first in which `backward` follows, if there is any.
    """
    regions: list[Region] = []
    for text in reversed(facts.frames.texts):
        lines = [text.line]
        if text.cell == "":
            lines.append(facts.frames.line)
        for line in lines:
            region = _around(facts, text, line) if line else None
            if region is not None:
                regions.append(region)
    for region in regions:
        if region.backward is not None:
            return region
    return regions[0] if regions else None


def in_a_pass(facts: Facts) -> bool:
    """Return whether it failed in a forward or a backward pass, or where a loss is computed of a model's output."""
    frames = facts.frames
    if (
        frames.stage is not Stage.OTHER
        or not frames.trains
        or "step" in frames.functions
    ):
        return frames.stage in (Stage.FORWARD, Stage.BACKWARD)
    region = find(facts)
    if region is None or region.backward is None:
        return False
    return any(calls_model(facts, statement) for statement in region.forward)


def _around(facts: Facts, text: CellText, line: int) -> Region | None:
    """Return the forward pass that a line of a text is in."""
    statement = _out_of_with(text, text.statement_at(line))
    block = text.block_of(statement) if statement is not None else []
    if statement is None or not block:
        return None
    place = next(i for i, other in enumerate(block) if other is statement)
    first = _first_of_pass(facts, block, place)
    last = None
    for index in range(place, len(block)):
        if does(block[index], "backward"):
            last = index
            break
    if last is None:
        backward = None
        end = place + 1
    else:
        backward = block[last]
        end = max(last, first + 1)
    forward = block[first:end]
    if any(
        isinstance(part, ast.FunctionDef | ast.ClassDef | ast.Return)
        for part in forward
    ):
        return None
    return Region(text, forward, backward)


def _first_of_pass(facts: Facts, block: list[ast.stmt], place: int) -> int:
    """Return where in a block the forward pass begins that the statement at a place belongs to."""
    first = place
    for index in range(place + 1):
        if calls_model(facts, block[index]):
            first = index
            break
    for index in range(first, place):
        if does(block[index], "backward"):  # of the pass before
            first = index + 1
    statement = block[place]
    if first == place and does(statement, "backward"):
        # A function calls its model what it likes
        for index in range(place):
            if bound_in(block[index]) & set(facts.frames.graph_names):
                first = index
                break
    if isinstance(statement, ast.For):  # with what it goes on from
        carried = set[str]().union(*map(bound_in, statement.body))
        while (
            first > 0
            and isinstance(block[first - 1], ast.Assign)
            and bound_in(block[first - 1]) & carried
        ):
            first -= 1
    return first


def _out_of_with(text: CellText, statement: ast.stmt | None) -> ast.stmt | None:
    """Return the `with` or the loop that a statement is in where `backward` follows that, else the statement."""
    for outer in text.nodes():
        if not isinstance(outer, ast.With | ast.For) or statement not in outer.body:
            continue
        if not does(outer, "backward"):
            follows = text.block_of(outer)
            return (
                outer if any(does(part, "backward") for part in follows) else statement
            )
    return statement


def bound_in(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement binds."""
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def in_a_row(block: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a block that run one after the other, those under a `with` in its place."""
    statements: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, ast.With):
            statements += in_a_row(statement.body)
        else:
            statements.append(statement)
    return statements


def does(node: ast.AST, name: str) -> bool:
    """Return whether code calls something of this name."""
    return any(called_name(part) == name for part in ast.walk(node))


def calls(
    texts: Iterable[CellText], *names: str
) -> Iterator[tuple[CellText, ast.Call]]:
    """Yield the calls of functions of these names, of any without names, each with the text that it is in."""
    for text in texts:
        for node in text.nodes():
            if isinstance(node, ast.Call) and (not names or called_name(node) in names):
                yield text, node


def failed(facts: Facts) -> Iterator[tuple[CellText, ast.stmt]]:
    """Yield the statement that failed with its text, where they are known."""
    text = facts.frames.failing_text
    statement = text.statement_at(text.line) if text is not None else None
    if text is not None and statement is not None:
        yield text, statement


def bracketed(text: CellText, node: ast.expr) -> str:
    """Return the code of an expression so that a method can be called on it."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return text.code(node)
    return f"({text.code(node)})"


def substituted(text: CellText, node: ast.expr, inner: ast.expr, new: str) -> str:
    """Return the code of an expression with other code in the place of one inside it."""
    code = text.code(node)
    start = text.offset(inner) - text.offset(node)
    end = start + len(text.code(inner))
    before = code[:start]
    after = code[end:]
    return f"{before}{new}{after}"


def loop_around(text: CellText, line: int | None) -> ast.For | ast.While | None:
    """Return the innermost loop that a line is in."""
    if line is None:
        return None
    innermost = None
    for node in text.nodes():
        if not isinstance(node, ast.For | ast.While):
            continue
        is_around = node.lineno < line <= (node.end_lineno or 0)
        if is_around and (innermost is None or node.lineno > innermost.lineno):
            innermost = node
    return innermost


def called_models(facts: Facts, node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of models in code."""
    models = {model.name for model in facts.notebook.models}
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if call.func.id in models:
            yield call


def calls_model(facts: Facts, node: ast.AST) -> bool:
    """Return whether code calls a model."""
    return next(called_models(facts, node), None) is not None


def read_tensors(region: Region) -> list[ast.Name]:
    """Return the uses of variables in a region that it has not itself bound before."""
    parts: list[ast.AST] = []
    for statement in region.through_backward:
        if isinstance(statement, ast.For):
            parts += [statement.iter, *statement.body]
        else:
            parts.append(statement)
    bound: set[str] = set()
    uses: list[ast.Name] = []
    for part in parts:
        names = [node for node in ast.walk(part) if isinstance(node, ast.Name)]
        uses += [
            name
            for name in names
            if isinstance(name.ctx, ast.Load) and name.id not in bound
        ]
        bound |= {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    return uses


def known_int(facts: Facts, text: CellText, node: ast.expr) -> int | None:
    """Return the integer that an expression was when it failed; None where it was another value, or is not known."""
    if isinstance(node, ast.Constant):
        value = node.value
    else:
        value = facts.frames.numbers.get(text.code(node))
    return value if type(value) is int else None
