"""What rules share: where the forward pass is, and how a suggestion is made.

A rule says what to change and what it costs. What that saves, and whether it is enough, dry runs tell afterwards.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.advice.facts import Facts, Stage
from gpumagic.advice.records import Advice
from gpumagic.memory.devices import Device
from gpumagic.report.units import LARGE
from gpumagic.source.text import CellText, Change, called_name, keyword


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
        places = [place for place, each in enumerate(self.forward) if not does(each, "zero_grad")]
        return self.forward[places[0] : places[-1] + 1] if places else self.forward

    @property
    def through_backward(self) -> list[ast.stmt]:
        """The statements, that of `backward` included."""
        joined = self.backward is None or self.backward is self.forward[-1]
        return self.forward if joined or self.backward is None else [*self.forward, self.backward]


def find(facts: Facts) -> Region | None:
    """Return the forward pass that failed, or whose backward failed: the one that a text shows backward of, if any."""
    found = list[Region]()
    for text in reversed(facts.frames.texts):
        lines = [text.line, facts.frames.line] if text.cell == "" else [text.line]
        found += [
            each for line in filter(None, lines) if (each := _around(facts, text, line)) is not None
        ]
    return next((each for each in found if each.backward is not None), found[0] if found else None)


def in_a_pass(facts: Facts) -> bool:
    """Return whether it failed in a forward or a backward pass, or where a loss is computed of a model's output."""
    if (
        facts.frames.stage is not Stage.OTHER
        or not facts.frames.trains
        or "step" in facts.frames.functions
    ):
        return facts.frames.stage in (Stage.FORWARD, Stage.BACKWARD)
    region = find(facts)
    forward = region.forward if region is not None and region.backward is not None else []
    return any(True for each in forward for _ in called_models(facts, each))


def _around(facts: Facts, text: CellText, line: int) -> Region | None:
    statement = _out_of_with(text, text.statement_at(line))
    block = text.block_of(statement) if statement is not None else []
    if statement is None or not block:
        return None
    place = next(i for i, each in enumerate(block) if each is statement)
    last = next((i for i, each in enumerate(block) if i >= place and does(each, "backward")), None)
    first = next(
        (i for i, each in enumerate(block) if i <= place and any(called_models(facts, each))), place
    )
    first = max([first, *(i + 1 for i in range(first, place) if does(block[i], "backward"))])
    if first == place and does(
        statement, "backward"
    ):  # of a function that calls its model what it likes
        first = next(
            (i for i in range(place) if bound_in(block[i]) & set(facts.frames.graph_names)), place
        )
    if isinstance(statement, ast.For):  # with what it goes on from
        carried = {name for each in statement.body for name in bound_in(each)}
        while (
            first
            and isinstance(block[first - 1], ast.Assign)
            and bound_in(block[first - 1]) & carried
        ):
            first -= 1
    backward = block[last] if last is not None else None
    end = place + 1 if last is None else max(last, first + 1)
    forward = block[first:end]
    if any(isinstance(each, ast.FunctionDef | ast.ClassDef | ast.Return) for each in forward):
        return None
    return Region(text, forward, backward)


def bound_in(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement binds."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def in_a_row(block: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a block that run one after the other, those under a `with` in its place."""
    return [
        part
        for each in block
        for part in (in_a_row(each.body) if isinstance(each, ast.With) else [each])
    ]


def _out_of_with(text: CellText, statement: ast.stmt | None) -> ast.stmt | None:
    """Return the `with` or the loop that a statement is in where `backward` follows that, else the statement."""
    around = (
        each
        for each in text.nodes()
        if isinstance(each, ast.With | ast.For) and statement in each.body
    )
    outer = next((each for each in around if not does(each, "backward")), None)
    follows = text.block_of(outer) if outer is not None else []
    return outer if any(does(each, "backward") for each in follows) else statement


def does(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement calls something of this name."""
    return any(called_name(node) == name for node in ast.walk(statement))


def calls(texts: Iterable[CellText], *names: str) -> Iterator[tuple[CellText, ast.Call]]:
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
    is_simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return text.code(node) if is_simple else f"({text.code(node)})"


def substituted(text: CellText, node: ast.expr, inner: ast.expr, new: str) -> str:
    """Return the code of an expression with other code in the place of one inside it."""
    code, start = text.code(node), text.offset(inner) - text.offset(node)
    return f"{code[:start]}{new}{code[start + len(text.code(inner)) :]}"


def loop_around(text: CellText, line: int | None) -> ast.For | ast.While | None:
    """Return the innermost loop that a line is in."""
    loops = [node for node in text.nodes() if isinstance(node, ast.For | ast.While)]
    around = [
        loop for loop in loops if line is not None and loop.lineno < line <= (loop.end_lineno or 0)
    ]
    return max(around, key=lambda loop: loop.lineno, default=None)


def called_models(facts: Facts, node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of models in code."""
    models = {model.name for model in facts.notebook.models}
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name)
            and each.func.id in models
        ):
            yield each


def read_tensors(region: Region) -> list[ast.Name]:
    """Return the uses of variables in a region that it has not itself bound before."""
    bound: set[str] = set()
    found: list[ast.Name] = []
    statements = list[ast.AST]()
    for each in region.through_backward:
        statements += [each.iter, *each.body] if isinstance(each, ast.For) else [each]
    for statement in statements:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        found += [each for each in names if isinstance(each.ctx, ast.Load) and each.id not in bound]
        bound |= {each.id for each in names if not isinstance(each.ctx, ast.Load)}
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """A suggestion with a number in it, of which dry runs find the largest with which the cell fits.

    Attributes:
        name: of the number.
        now: the number that stands for the cell as it is; smaller ones need less.
        make: returns the suggestion with a number.
        guess: the number to suggest where none can be tried.
        is_rounded: whether a round number is as good as a slightly larger one.
        finish: returns what computes the same with a number, of as many `passes` as that takes.
        changes_result: whether the number itself changes what the cell computes, which `finish` would not.
        is_setting: whether `%%dryrun --fit` finds the number by its name.
        least: the smallest number that helps anybody.
    """

    name: str
    now: int
    make: Callable[[int], Advice]
    guess: int
    is_rounded: bool = True
    finish: Callable[[int], Advice | None] | None = None
    changes_result: bool = False
    is_setting: bool = False
    least: int = 1

    @property
    def small(self) -> int:
        """The number with which a set is tried first: one that does not fit with it fits with no larger one."""
        return max(1, self.least, self.now // 16)

    @property
    def goes_on(self) -> str:
        """The line with which a search goes on that was cut short."""
        return (
            f"%%dryrun --fit {self.name}"
            if self.is_setting
            else "%config GPUMagic.advice_seconds = 60"
        )


def passes(now: int, most: int) -> int:
    """Return in how many passes of at most so many a number is had: the fewest, where few more divide it evenly."""
    least = -(-now // most)
    return next((each for each in range(least, 2 * least) if now % each == 0), least)


def propose(
    title: str,
    *,
    frees: int | None = None,
    text: CellText | None = None,
    changes: Sequence[Change] = (),
    first: str | None = None,
    **more: Any,
) -> Advice:
    """Return a suggestion, which is still to be tried: `changes` of a text, or code to run `first`.

    `frees` are the bytes it gives back, where that is known without a dry run; `more` are other fields of `Advice`.
    """
    try:
        edit = text.after(changes) if text is not None and changes else first
    except (
        ValueError
    ):  # changes that overlap: a suggestion without its edit is better than no report
        changes, edit = (), first
    return Advice(title, frees, None, changes=tuple(changes), first=first, **{"edit": edit, **more})


Edit = dict[str, Any]
"""What `propose` is told of an edit: a `text` with its `changes`, and code to run `first`."""


def written(text: CellText, numbers: Sequence[ast.expr]) -> Callable[[int], Edit]:
    """Return the edit that writes another number in the place of some that are there."""
    return lambda number: {
        "text": text,
        "changes": [text.replace(each, str(number)) for each in numbers],
    }


def argued(text: CellText, call: ast.Call, **arguments: str) -> list[Change]:
    """Return the changes that give a call keyword arguments, each in the place of one that it has."""
    given = {name: keyword(call, name) for name in arguments}
    changes = [
        text.replace(each.value, arguments[name])
        for name, each in given.items()
        if each is not None
    ]
    new = ", ".join(f"{name}={code}" for name, code in arguments.items() if given[name] is None)
    return [*changes, *([text.add_argument(call, new)] if new else [])]


def together(*edits: Edit) -> Edit:
    """Return several edits as one."""
    first = "\n".join(each["first"] for each in edits if each.get("first"))
    texts = [each["text"] for each in edits if each.get("text")]
    changes = [change for each in edits for change in each.get("changes", ())]
    return {"text": texts[-1] if texts else None, "changes": changes, "first": first or None}


def numbered(
    name: str,
    now: int,
    title: str | Callable[[int], str],
    edit: Callable[[int], Edit],
    *,
    evidence: str,
    cost: str,
    **more: Any,
) -> Choice:
    """Return the choice of a smaller number, half of it where none can be tried; `more` are other fields."""

    def make(number: int) -> Advice:
        said = f"{title} from {now} to {number}" if isinstance(title, str) else title(number)
        return propose(said, evidence=evidence, cost=cost, **edit(number))

    return Choice(name, now, make, **{"guess": now // 2, **more})


def cleared(first: str | None, facts: Facts) -> str | None:
    """Return what to run first, with what the failed cell left taken away: its next run would stand beside it."""
    said = set(re.findall(r"\w+", first or ""))
    left = [name for name in facts.notebook.left_by_failed_run if name not in said]
    lines = [f"del {', '.join(left)}"] if left else []
    lines += [
        code
        for name, code in facts.notebook.reset_code.items()
        if name not in said and name not in left
    ]
    # What has gradients now has them from the failed pass
    if any(calls(facts.frames.texts, "zero_grad")):
        there = [
            each
            for each in facts.notebook.models
            if each.gradient_nbytes >= LARGE and not each.local and each.name not in left
        ]
        lines += [f"{each.name}.zero_grad()" for each in there]
    return "\n".join([*lines, *([first] if first else [])]) or None


def prepare(facts: Facts, name: str, code: str) -> dict[str, Any]:
    """Return how to run code on a variable before it is used: in the cell where that makes it anew, else before it."""
    for text in facts.frames.texts:
        assignments = [node for node in text.nodes() if isinstance(node, ast.Assign)]
        made = [
            each
            for each in assignments
            if any(getattr(target, "id", None) == name for target in each.targets)
        ]
        changes = text.insert_after(made[-1], code) if made else ()
        if changes:
            return {"text": text, "changes": changes}
    return {"first": code}


Said = str | Callable[..., str]
"""A text, or what makes it: of the facts, the text, the call that is edited, and the argument's code as it is."""


@dataclass(frozen=True)  # without slots, for the defaults that are functions
class Remedy:
    """A rule as data: one setting, or one keyword argument of a call with another value."""

    title: Said
    when: Callable[[Facts], object]
    why: Said
    cost: str = "none"
    first: Said = ""
    """Code to run before the cell."""
    edit: str | None = None
    """What to set where no code can, such as an environment variable."""
    argument: Said = ""
    """The keyword argument to give to a call, ``"pin_memory=False"``; without one no call is edited."""
    calls: tuple[str, ...] = ()
    """What the functions may be called; any without."""
    of: Callable[..., object] = lambda *known: not known[-1]
    """Whether it is for this call; by default where the argument is not given."""
    in_line: bool = False
    """Whether only the statement that failed is searched for calls."""
    by_default: bool = False
    """Whether the function does so where it is told nothing: the argument goes where there is no other."""

    def __call__(self, facts: Facts) -> Iterator[Advice]:
        """Yield the suggestion where its facts hold; for the first of the calls."""
        if not self.when(facts):
            return
        if not self.argument:
            yield self._proposed((facts,), text=None)
            return
        statements = (
            failed(facts) if self.in_line else ((text, text.tree) for text in facts.frames.texts)
        )
        for text, call in ((text, node) for text, part in statements for node in ast.walk(part)):
            if not isinstance(call, ast.Call) or (
                self.calls and called_name(call) not in self.calls
            ):
                continue
            argument = _said(self.argument, facts, text, call)
            name, _, value = argument.partition("=")
            given = keyword(call, name)
            known = (facts, text, call, text.code(given.value) if given is not None else "")
            if self.of(*known):
                changes = argued(text, call, **{name: value})
                if self.by_default and len(call.args) + len(call.keywords) == 1:
                    changes = [text.replace(call, f"{text.code(call.func)}()")]
                yield self._proposed(known, text=text, changes=changes)
                return

    def _proposed(self, known: tuple[Any, ...], **more: Any) -> Advice:
        more |= {"edit": self.edit} if self.edit else {}
        title, why, first = (_said(each, *known) for each in (self.title, self.why, self.first))
        return propose(title, evidence=why, cost=self.cost, first=first or None, **more)


def _said(said: Said, *known: Any) -> str:
    return said if isinstance(said, str) else said(*known)


def backend(facts: Facts) -> str:
    """Return the backend's name: ``"cuda"`` for ``"cuda:1"``."""
    return Device.parse(facts.event.device or "cuda").backend
