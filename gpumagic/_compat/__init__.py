"""Differences between versions: IPython 7.34 (Colab, Kaggle) to 9, Python 3.10 to 3.14, torch 2.6 to 2.14.

What differs in Python and IPython is here; what torch keeps under private names, which any version may rename, apart:

    private_names.py  a private name, looked up when it is first needed, and what stands in for it
    torch_private.py  those of torch, each once
    torch_frames.py   names by which frames of torch's own code are recognised
"""

from __future__ import annotations

import enum
import gc
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from gpumagic._compat import torch_private

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
else:

    class StrEnum(str, enum.Enum):
        """An enum whose members are their values as text, too; Python 3.10 has none."""

        def __str__(self) -> str:
            return str.__str__(self)

        def __format__(self, spec: str) -> str:
            return str.__format__(self, spec)


Magic = TypeVar("Magic", bound=Callable[..., object])
Complete = Callable[[str, str], "tuple[str, list[str]]"]

FRAMES_KEEP_SNAPSHOTS = sys.version_info < (3, 13)
"""Whether a function's frame keeps what `f_locals` returned, and so its variables, until it ends (gh-113939)."""
_NO_CODE = {
    tokenize.ENDMARKER,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.DEDENT,
}


def referrers(objects: Iterable[object]) -> list[Any]:
    """Return what refers to any of the objects.

    `gc.get_referrers` leaves out the tuple of its arguments; since Python 3.13 that is a copy of the one it was called
    with, which is then found as well.
    """
    asked = (*objects,)  # a new one, also of a tuple
    return [referrer for referrer in gc.get_referrers(*asked) if referrer is not asked]


def snapshot_without_traces(snapshot: Callable[..., Any]) -> Any:
    """Call torch's `memory_snapshot` for its segments alone: since 2.13 it can leave out the history of allocations."""
    if "include_traces" in inspect.signature(snapshot).parameters:
        return snapshot(include_traces=False)
    return snapshot()


def memory_fraction(backend: ModuleType | None, index: int) -> float | None:
    """Return the share of a device's memory that this process may reserve, or None where torch cannot tell.

    In torch 2.6 the device that is asked about is the current one from then on.
    """
    read = getattr(backend, "get_per_process_memory_fraction", None)
    if backend is None or read is None:
        return None
    current = backend.current_device()
    try:
        fraction: float = read(index)
    finally:
        if backend.current_device() != current:
            backend.set_device(current)
    return fraction


def skip_in_compilers(code: CodeType) -> None:
    """Have `torch.compile` run some code as it is."""
    if torch_private.SKIP_CODE.is_there():
        torch_private.SKIP_CODE.get()(code)
        return
    strategy = (
        torch_private.SET_STRATEGY,
        torch_private.STRATEGY,
        torch_private.FRAME_ACTION,
    )
    if all(name.is_there() for name in strategy):
        set_strategy, make_strategy, action = (name.get() for name in strategy)
        set_strategy(code, make_strategy(action.SKIP, action.DEFAULT))


def output_can_be_silenced(magic: Magic) -> Magic:
    """Mark a magic whose value a trailing `;` hides; IPython before 8.8 has no such mark (ipython PR#13841)."""
    from IPython.core import magic as magics

    marked: Magic = getattr(magics, "output_can_be_silenced", lambda same: same)(magic)
    return marked


def ends_with_semicolon(code: str) -> bool:
    """Return whether Python code ends in a `;`; IPython 7.34 can tell only for a whole cell (ipython PR#13841)."""
    last = ""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type not in _NO_CODE:
            last = token.string
    return last == ";"


def add_completer(
    shell: InteractiveShell,
    pattern: re.Pattern[str],
    complete: Complete,
    undo: list[Callable[[], object]],
) -> None:
    """Complete lines that match a pattern from their start (ipython PR#13745, since 8.6).

    ``complete`` takes the line up to the cursor and the lines below it, which are empty in IPython 7, and returns the
    line's last fragment and the completions of that. What undoes it is added to ``undo``, first.
    """
    from IPython.core import completer

    if not hasattr(completer, "context_matcher"):
        # IPython 7's hook has a fragment that starts after the last `:`.
        def hook(_: InteractiveShell, event: Any) -> list[str]:
            fragment, names = complete(event.text_until_cursor, "")
            cut = len(fragment) - len(event.symbol)
            return [name[cut:] for name in names]

        undo.append(
            lambda: shell.strdispatchers["complete_command"].regexs.pop(pattern, None)
        )
        shell.set_hook("complete_command", hook, re_key=pattern)
        return

    @completer.context_matcher()  # type: ignore[untyped-decorator, unused-ignore]
    def gpumagic_matcher(context: Any) -> dict[str, Any]:
        line = context.text_until_cursor
        if not pattern.match(line):
            return {"completions": []}
        below = context.full_text.splitlines()[context.cursor_line + 1 :]
        fragment, names = complete(line, "\n".join(below))
        offers = [completer.SimpleCompletion(text=name, type="magic") for name in names]
        return {"completions": offers, "matched_fragment": fragment, "suppress": True}

    matchers = shell.Completer.custom_matchers

    def remove() -> None:
        if gpumagic_matcher in matchers:
            matchers.remove(gpumagic_matcher)

    undo.append(remove)
    matchers.append(gpumagic_matcher)


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, once; Python 3.10 has none (PEP 678)."""
    if text not in getattr(error, "__notes__", ()) and hasattr(error, "add_note"):
        error.add_note(text)


def inlined_variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of comprehensions in a cell's frame, which Python 3.12 runs in it (PEP 709)."""
    names = frame.f_code.co_varnames  # a module's code has no others
    if not names:
        return {}
    variables = frame.f_locals
    return {name: variables[name] for name in names if name in variables}


def instruction_positions(
    code: CodeType,
) -> Iterable[tuple[int | None, int | None, int | None, int | None]]:
    """Return the lines and columns of each instruction; Python 3.10 has none (PEP 657)."""
    return code.co_positions() if hasattr(code, "co_positions") else ()


def installed_version() -> str:
    """Return the version of gpumagic itself; ``"unknown"`` for a checkout on the path that was never installed."""
    from importlib import metadata

    try:
        return metadata.version("gpumagic")
    except metadata.PackageNotFoundError:
        return "unknown"
