"""What a dry run runs: a cell's code, or a callable."""

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
        found = dict.fromkeys(names_looked_up(_compiled(self.source)))
        for each in ast.walk(ast.parse(self.source)):
            match each:
                case ast.Call(
                    ast.Attribute(), [ast.Constant("time" | "capture"), *_, ast.Constant(str(text))]
                ):
                    with contextlib.suppress(
                        OptionError
                    ):  # not Python: the dry run says so where it comes there
                        found |= dict.fromkeys(script_of(text).names())
        return list(found)


def script_of(what: str | Callable[[], object]) -> Script:
    """Return what to run.

    Args:
        what: code as a notebook's cell has it, or a callable without arguments.

    Raises:
        OptionError: the code has a syntax error, or it is neither.
    """
    if callable(what):
        code = getattr(what, "__code__", None)
        return Script(None, what, getattr(code, "co_filename", CELL))
    if not isinstance(what, str):
        raise OptionError(f"a dry run takes code or a callable, not {type(what).__name__}")
    from IPython.core.inputtransformer2 import TransformerManager

    above = what[: len(what) - len(what.lstrip())].count("\n")  # which IPython takes away
    source = "\n" * above + TransformerManager().transform_cell(what)
    _compiled(source)
    return Script(source, None, CELL)


def _compiled(source: str) -> Any:
    try:
        return compile(
            source, CELL, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
    except (
        SyntaxError,
        RecursionError,
    ) as error:  # Python's own limits, as for an expression of thousands of terms
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line is not None else ""
        raise OptionError(
            f"the code cannot be dry-run: {getattr(error, 'msg', error)}{where}"
        ) from None
