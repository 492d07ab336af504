"""The body of a cell magic as code: compiled once, run as often as asked.

IPython's own steps: its transformers, its compiler with the session's `__future__` imports, its name space.
"""

from __future__ import annotations

import ast
import inspect
from types import CodeType
from typing import TYPE_CHECKING, Any

from gpumagic import _compat
from gpumagic.errors import GpuMagicError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class CellBody:
    """The code under a cell magic's line.

    Args:
        shell: where it is to run.
        text: the body as the magic got it.
        cell: the text of the running cell, so that tracebacks name its lines; "" where there is none.

    Raises:
        SyntaxError: it cannot be compiled.
        GpuMagicError: it awaits, and an event loop is running already.
    """

    def __init__(self, shell: InteractiveShell, text: str, cell: str = "") -> None:
        self._shell = shell
        above = _above(text, cell)
        blank = text[: len(text) - len(text.lstrip())].count("\n")  # IPython drops the body's leading blank lines
        self._head = "\n" * (1 + blank) if above is None else above
        self.source = "\n" * self._head.count("\n") + shell.transform_cell(text)
        """The body as Python, its lines numbered as the cell's."""
        self.ends_cell = above is not None
        """Whether the running cell consists of this body and the magics above it."""
        self.is_silenced = _compat.ends_with_semicolon(self.source)
        """Whether a trailing `;` hides the value."""
        self._cell = cell
        self._compiled = self.source, self._compile(self.source)
        self._awaits = any(code.co_flags & inspect.CO_COROUTINE for code in self._compiled[1])
        if self._awaits and _loop_is_running():
            raise GpuMagicError(
                "a body that the magic itself runs cannot await inside a notebook's event loop; await in another cell"
            )

    def run(self, source: str) -> object:
        """Run ``source``, the body or an edit of it, and return the value of its last expression, or None."""
        __tracebackhide__ = True
        if source != self._compiled[0]:
            self._compiled = source, self._compile(source)
        if self._awaits:
            return self._shell.loop_runner(self._run_awaiting())
        value = None
        for code in self._compiled[1]:
            value = self._evaluate(code)
        return value

    def _evaluate(self, code: CodeType) -> Any:
        __tracebackhide__ = True
        return eval(code, self._shell.user_global_ns, self._shell.user_ns)  # noqa: S307  # to run it is the task

    async def _run_awaiting(self) -> object:
        __tracebackhide__ = True
        value = None
        for code in self._compiled[1]:
            value = self._evaluate(code)
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
        return value

    def _compile(self, source: str) -> list[CodeType]:
        compiler = self._shell.compile
        number = self._shell.displayhook.prompt_count  # not `execution_count`: since IPython 9.8 it is the next's
        text = self._head + source[self._head.count("\n") :]
        name = compiler.cache(text, number, raw_code=self._cell if self.ends_cell else None)
        parsed = compiler.ast_parse(source, filename=name)
        statements = self._shell.transform_ast(parsed).body
        last = [statements.pop()] if statements and isinstance(statements[-1], ast.Expr) else []
        with compiler.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self._shell.autoawait else 0):
            codes = [compiler(ast.Module(statements, []), name, "exec")]
            codes += [compiler(ast.Expression(each.value), name, "eval") for each in last]
        return codes


def _above(text: str, cell: str) -> str | None:
    """Return the lines of the cell above the body, or None where the cell is not some magics and this body."""
    body, cell = text.strip(), cell.rstrip()
    if not body or not cell.endswith(body):
        return None
    above = cell[: len(cell) - len(body)]
    lines = above[: above.rfind("\n") + 1]
    is_whole = not above[len(lines) :].strip() and all(
        line.startswith("%%") for line in lines.split("\n") if line.strip()
    )
    return lines if lines and is_whole else None


def _loop_is_running() -> bool:
    import asyncio  # not with %load_ext: it costs as much as all of ours

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
