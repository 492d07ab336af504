"""What a dry run runs: a cell's code, or a callable. It is read in the notebook's process."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumagic.errors import OptionError
from gpumagic.source.frames import names_looked_up

CELL = "<dry run>"


@dataclass(frozen=True)
class Script:
    """What is dry-run.

    Attributes:
        source: Python code; None for a callable.
        function: what is called, without arguments, where there is no code.
    """

    source: str | None
    function: Callable[[], object] | None
    filename: str

    def names(self) -> list[str]:
        """Return the global names it may use, also in code that `%time` and `%%capture` get as text."""
        if self.source is None:
            return []
        names = dict.fromkeys(names_looked_up(_compiled(self.source)))
        for node in ast.walk(ast.parse(self.source)):
            text = _text_of_magic(node)
            if text is not None:
                # What is not Python is an error once the dry run comes there.
                with contextlib.suppress(OptionError):
                    names |= dict.fromkeys(script_of(text).names())
        return list(names)


def _text_of_magic(node: ast.AST) -> str | None:
    """Return the code that `%time` or `%%capture` gets as text, by the call that IPython makes of the magic."""
    match node:
        case ast.Call(
            func=ast.Attribute(),
            args=[ast.Constant("time" | "capture"), *_, ast.Constant(str(text))],
        ):
            return text
    return None


def script_of(what: str | Callable[[], object]) -> Script:
    """Return what to run.

    Args:
        what: code as a notebook's cell has it, or a callable without arguments.

    Raises:
        OptionError: the code has a syntax error, or it is neither.
    """
    if callable(what):
        code = getattr(what, "__code__", None)
        filename = getattr(code, "co_filename", CELL)
        return Script(source=None, function=what, filename=filename)
    if not isinstance(what, str):
        raise OptionError(
            f"a dry run takes code or a callable, not {type(what).__name__}"
        )
    from IPython.core.inputtransformer2 import TransformerManager

    blank = what[: len(what) - len(what.lstrip())]
    blank_lines = "\n" * blank.count("\n")  # which IPython takes away
    source = blank_lines + TransformerManager().transform_cell(what)
    _compiled(source)
    return Script(source=source, function=None, filename=CELL)


def _compiled(source: str) -> Any:
    try:
        return compile(
            source,
            CELL,
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
    except SyntaxError as error:
        where = f" in line {error.lineno}" if error.lineno is not None else ""
        raise OptionError(f"the code cannot be dry-run: {error.msg}{where}") from None
    except (
        RecursionError
    ) as error:  # Python's own limit, as for an expression of thousands of terms
        raise OptionError(f"the code cannot be dry-run: {error}") from None
