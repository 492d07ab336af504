"""How a suggestion is made: edits, suggestions with a number that dry runs find, and rules that are data.

A rule says what to change and what it costs. What that saves, and whether it is enough, dry runs tell afterwards.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from gpumagic.advice.facts import Facts
from gpumagic.advice.records import FREE, Advice, NoCost
from gpumagic.advice.rules.regions import calls, failed
from gpumagic.memory.devices import Device
from gpumagic.report.units import LARGE
from gpumagic.source.text import CellText, Change, called_name, keyword


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
        if self.is_setting:
            return f"%%dryrun --fit {self.name}"
        return "%config GPUMagic.advice_seconds = 60"


def passes(now: int, most: int) -> int:
    """Return in how many passes a batch of `now` is computed with at most `most` a pass.

    That is the fewest, or up to twice as many where those divide the batch evenly.
    """
    least = math.ceil(now / most)
    for number in range(least, 2 * least):
        if now % number == 0:
            return number
    return least


def propose(
    title: str,
    *,
    frees: int | None = None,
    text: CellText | None = None,
    changes: Sequence[Change] = (),
    first: str | None = None,
    cost: str | NoCost = "",
    **more: Any,
) -> Advice:
    """Return a suggestion, which is still to be tried: `changes` of a text, or code to run `first`.

    `frees` are the bytes it gives back, where that is known without a dry run; `more` are other fields of `Advice`.
    """
    edit = first
    if text is not None and changes:
        try:
            edit = text.after(changes)
        except ValueError:
            # The changes overlap: a suggestion without its edit is better than no report
            changes = ()
    more = {"edit": edit, **more}
    return Advice(
        title,
        frees,
        covers=None,
        changes=tuple(changes),
        first=first,
        cost=str(cost),
        is_free=isinstance(cost, NoCost),
        **more,
    )


class Edit(TypedDict, total=False):
    """What `propose` is told of an edit; an empty one means that it is unclear how to make it."""

    text: CellText | None
    changes: Sequence[Change]
    """Those of the text."""
    first: str | None
    """Code to run before the cell."""
    edit: str
    """The code to show, where it is neither of these."""
    evidence: str
    ranks: int
    """As `Advice.ranks`."""


def replace_numbers(
    text: CellText, numbers: Sequence[ast.expr]
) -> Callable[[int], Edit]:
    """Return what makes the edit that writes another number in the place of some that are there."""

    def edit(number: int) -> Edit:
        return {
            "text": text,
            "changes": [text.replace(old, str(number)) for old in numbers],
        }

    return edit


def with_keywords(text: CellText, call: ast.Call, **arguments: str) -> list[Change]:
    """Return the changes that give a call keyword arguments, each in the place of one that it has."""
    changes: list[Change] = []
    added: list[str] = []
    for name, code in arguments.items():
        given = keyword(call, name)
        if given is not None:
            changes.append(text.replace(given.value, code))
        else:
            added.append(f"{name}={code}")
    if added:
        changes.append(text.add_argument(call, ", ".join(added)))
    return changes


def merge_edits(*edits: Edit) -> Edit:
    """Return several edits as one."""
    text: CellText | None = None
    changes: list[Change] = []
    statements: list[str] = []
    for edit in edits:
        text = edit.get("text") or text
        changes += edit.get("changes", ())
        first = edit.get("first")
        if first:
            statements.append(first)
    return {"text": text, "changes": changes, "first": "\n".join(statements) or None}


def numbered(
    name: str,
    now: int,
    title: str | Callable[[int], str],
    edit: Callable[[int], Edit],
    *,
    evidence: str,
    cost: str | NoCost,
    **more: Any,
) -> Choice:
    """Return the choice of a smaller number, half of it where none can be tried; `more` are other fields."""

    def make(number: int) -> Advice:
        sentence = (
            f"{title} from {now} to {number}"
            if isinstance(title, str)
            else title(number)
        )
        return propose(sentence, evidence=evidence, cost=cost, **edit(number))

    return Choice(name, now, make, **{"guess": now // 2, **more})


def cleared(first: str | None, facts: Facts) -> str | None:
    """Return what to run first, with what the failed cell left taken away: its next run would stand beside it."""
    mentioned = set(re.findall(r"\w+", first or ""))
    left = [name for name in facts.notebook.left_by_failed_run if name not in mentioned]
    lines: list[str] = []
    if left:
        lines.append(f"del {', '.join(left)}")
    for name, code in facts.notebook.reset_code.items():
        if name not in mentioned and name not in left:
            lines.append(code)
    # What has gradients now has them from the failed pass
    if any(calls(facts.frames.texts, "zero_grad")):
        for model in facts.notebook.models:
            is_reachable = not model.local and model.name not in left
            if is_reachable and model.gradient_nbytes >= LARGE:
                lines.append(f"{model.name}.zero_grad()")
    if first:
        lines.append(first)
    return "\n".join(lines) or None


def prepare(facts: Facts, name: str, code: str) -> Edit:
    """Return how to run code on a variable before it is used: in the cell where that makes it anew, else before it."""
    for text in facts.frames.texts:
        made = None
        for node in text.nodes():
            if isinstance(node, ast.Assign):
                targets = {getattr(target, "id", None) for target in node.targets}
                made = node if name in targets else made
        changes = text.insert_after(made, code) if made is not None else ()
        if changes:
            return {"text": text, "changes": changes}
    return {"first": code}


Text = str | Callable[..., str]
"""A text, or what makes it: of the facts, the text, the call that is edited, and the argument's code as it is."""


@dataclass(frozen=True)  # without slots, for the defaults that are functions
class Remedy:
    """A rule as data: one setting, or one keyword argument of a call with another value."""

    title: Text
    when: Callable[[Facts], object]
    why: Text
    cost: str | NoCost = FREE
    first: Text = ""
    """Code to run before the cell."""
    edit: str | None = None
    """What to set where no code can, such as an environment variable."""
    argument: Text = ""
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
            yield self._as_suggestion((facts,), text=None)
            return
        for text, call in self._searched_calls(facts):
            argument = _text_of(self.argument, facts, text, call)
            name, _, value = argument.partition("=")
            given = keyword(call, name)
            known = (
                facts,
                text,
                call,
                text.code(given.value) if given is not None else "",
            )
            if not self.of(*known):
                continue
            if self.by_default and len(call.args) + len(call.keywords) == 1:
                changes = [text.replace(call, f"{text.code(call.func)}()")]
            else:
                changes = with_keywords(text, call, **{name: value})
            yield self._as_suggestion(known, text=text, changes=changes)
            return

    def _searched_calls(self, facts: Facts) -> Iterator[tuple[CellText, ast.Call]]:
        """Yield the calls that may be edited, with their texts."""
        searched: list[tuple[CellText, ast.AST]]
        if self.in_line:
            searched = list(failed(facts))
        else:
            searched = [(text, text.tree) for text in facts.frames.texts]
        for text, code in searched:
            for node in ast.walk(code):
                if not isinstance(node, ast.Call):
                    continue
                if not self.calls or called_name(node) in self.calls:
                    yield text, node

    def _as_suggestion(self, known: tuple[Any, ...], **more: Any) -> Advice:
        if self.edit:
            more["edit"] = self.edit
        return propose(
            _text_of(self.title, *known),
            evidence=_text_of(self.why, *known),
            cost=self.cost,
            first=_text_of(self.first, *known) or None,
            **more,
        )


def _text_of(text: Text, *known: Any) -> str:
    return text if isinstance(text, str) else text(*known)


def backend(facts: Facts) -> str:
    """Return the backend's name: ``"cuda"`` for ``"cuda:1"``."""
    return Device.parse(facts.event.device or "cuda").backend
