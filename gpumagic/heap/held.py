"""What keeps a tensor that no variable reaches, as records. Reports show a holder's label; code reads its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

HolderKind = Literal[
    "output",
    "output name",
    "last result",
    "last traceback",
    "running call",
    "suspended call",
    "event callbacks",
    "script",
    "module",
    "context variable",
    "object",
    "graph",
    "cycle",
]
"""``Out[12]``; ``_`` and ``_12``; the result of the last cell; the last error; functions that run, in any thread;
generators and coroutines; the callbacks of IPython's events; the variables of a script that `%run` ran; modules;
context variables; an object that a variable leads to although no expression reaches inside it; the autograd graph of
another tensor; a reference cycle."""

_LABELS: dict[HolderKind, str] = {
    "output": "{}",
    "output name": "{}",
    "last result": "last result",
    "last traceback": "last traceback",
    "running call": "running {}",
    "suspended call": "suspended {}",
    "event callbacks": "get_ipython().events.callbacks",
    "script": "get_ipython()._main_mod_cache[{}]",
    "module": "module {}",
    "context variable": "context variable {}",
    "object": "{}",
    "graph": "graph of {}",
    "cycle": "cycle of {}",
}


class Holder(NamedTuple):
    """One thing that keeps tensors; the key of a root of `graph.HeapGraph` that is no variable."""

    kind: HolderKind
    name: str = ""
    """Which of its kind: ``"Out[12]"``, ``"train()"``, ``"losses[0]"`` for a graph; empty where it is not known."""
    thread: str = ""
    """The thread in which a function runs, if not in this one."""

    def __str__(self) -> str:
        """Return the label, as reports show it and as paths begin with it."""
        if self.kind == "graph" and not self.name:
            return "autograd graph"
        label = _LABELS[self.kind].format(self.name)
        return f"{label} in {self.thread}" if self.thread else label


Root: TypeAlias = tuple[Holder, object]
"""What keeps tensors besides variables, and the object that leads to them."""
RootKey: TypeAlias = str | Holder
"""The name of a variable, or what else keeps tensors."""
Namespace: TypeAlias = Mapping[str, object]
"""The notebook's variables."""
LAST_RESULT = Holder("last result")
LAST_TRACEBACK = Holder("last traceback")
UNKNOWN_GRAPH = Holder("graph")
"""The graph of a tensor of which it is not known what keeps it."""


class Held(NamedTuple):
    """What keeps one tensor that no variable reaches."""

    by: tuple[Holder, ...]
    """Its holders; usually one, more where all of them have to let go."""
    place: str
    """The path to it from the first of them: ``"Out[3]['k'][0]"``, ``"last traceback.<step()>.hidden"``."""
    releasable: bool
    """Whether it is freed once IPython and Python forget outputs and the last error."""
    variable: str | None = None
    """The variable that reaches it where no expression does."""
    unbinds: str | None = None
    """The statement that deletes the variable of a script that leads to it: ``"del get_ipython()...['a.py'].x"``."""

    def label(self) -> str:
        """Return what reports call its holders: ``"Out[3] and graph of losses[0]"``."""
        return " and ".join(map(str, self.by))
