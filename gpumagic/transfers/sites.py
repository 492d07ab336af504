"""The line of the cell that asks for a copy, by which call, and for which variable.

Copies come by the thousand from few places, so what an instruction of the cell's own asks for is found out once and
then looked up. Where a library's code lies between the line and the copy, the frames up to the line are walked.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FrameType, ModuleType
from typing import Any

from gpumagic._compat import torch_frames
from gpumagic.backends import DEVICE_METHODS
from gpumagic.source import frames
from gpumagic.source.frames import cell_file, lines_above, lines_of
from gpumagic.source.text import called_name, expression_at, names_in
from gpumagic.transfers.advice import CHECK
from gpumagic.transfers.report import MOVE

_MODULE_MOVES = DEVICE_METHODS | {"to", "cpu", "to_empty"}
_DISPATCHERS = frozenset({"__torch_function__", "__torch_dispatch__"})
_DEPTHS = 5, 7
"""Where the line's frame mostly is: the function mode calls the kernel, itself or by a constructor's handler. To look
at each frame between, as is done where the line is not known yet, would make objects of them."""
_MOST = 10_000
"""Pieces of code and instructions that are remembered: `exec` in a loop makes new ones."""


@dataclass(eq=False, slots=True)
class Site:
    """A line of the cell, and what it asks for; all None where the cell's own code is not on the stack."""

    line: int | None = None
    code: str | None = None
    cause: str = ""
    name: str | None = None
    """The variable that is copied, where it is certain: a method of it is called."""
    names: tuple[str, ...] = ()
    """Else the variables that the expression mentions, of which one may be what is copied."""
    own_names: tuple[str, ...] = ()
    """Those of them that are a function's own."""
    source: CodeType | None = None
    """Kept, so that no other code has the `id` by which this one is remembered."""
    is_made: bool = False
    """Whether torch makes what it copies, of a list: it is another one each time."""
    sums: dict[Any, Any] = field(default_factory=dict)
    """What the log counts here, by devices and variable."""


class CallSites:
    """Finds the cell's innermost running line, looking outward from an operator's call.

    Args:
        namespace: the globals in which the cell runs (the notebook's ``user_ns``, a script's ``globals()``).
        filename: the file of the code being watched; None for a cell, whose file is that of the nearest
            module-level frame over ``namespace``.
        waiting_thread: the thread that waits for this one, whose line it is where this one has none.
    """

    def __init__(
        self,
        namespace: Mapping[str, object],
        filename: str | None = None,
        waiting_thread: int | None = None,
    ) -> None:
        from gpumagic.transfers import causes  # which imports torch

        self._causes = causes
        self.moving: str | None = None
        """The variable that `--move` moves now."""
        self.namespace = namespace
        self.filename = filename
        self._file_may_change = filename is None
        self._thread = get_ident()
        self._waiting_thread = waiting_thread
        self._above: dict[int, tuple[CodeType, int | None]] = {}
        self._instructions: dict[Any, Site] = {}

    def start(self) -> None:
        """Note the file of the cell that is on the stack; one that a magic is yet to run has another."""
        if self.filename is None:
            self._find_file(sys._getframe(1))
        stack = list(frames.stack(sys._getframe(1)))
        over = next((each for each in stack if each.f_globals is self.namespace), None)
        runs_body = any(
            each.f_code.co_name == "run_cell_magic" and each.f_back is over for each in stack
        )
        self._file_may_change &= self.filename is None or runs_body

    def line(self) -> int | None:
        """Return the line that runs now."""
        frame, above, _ = self._own_frame(self._innermost(1))
        return None if frame is None else frame.f_lineno + above

    def find(self, asks: str, found: object) -> tuple[Site, object, str | None]:
        """Return who asks for what torch copies now, what is copied, and its variable.

        Args:
            asks: what is called ``".to"`` and so on where the code does not say it.
            found: the tensor that torch was given.
        """
        if self.moving is not None:
            return Site(cause=MOVE), found, self.moving
        site, frame = None, None
        for depth in _DEPTHS:
            try:
                frame = sys._getframe(depth)
            except ValueError:  # autograd's threads have fewer frames
                break
            if (
                site := self._instructions.get((id(frame.f_code), frame.f_lasti, asks))
            ) is not None:
                break
        if site is None:
            frame, is_called = self._causes.asking_frame(sys._getframe(3))  # the kernel's
            if frame is None or not self.is_own(frame) or get_ident() != self._thread:
                return self._through_a_library(frame, is_called, asks, found)
            key = id(frame.f_code), frame.f_lasti, asks
            if len(self._instructions) > _MOST:
                self._instructions.clear()
            site = self._instructions.get(key) or self._instructions.setdefault(
                key, self._instruction(frame, asks, found)
            )
        subject = None if site.is_made else found
        assert frame is not None
        return site, subject, site.name or _name(frame, site, subject)

    def _instruction(self, frame: FrameType, asks: str, found: object) -> Site:
        """Return what an instruction of the cell's own asks for."""
        above = self._lines_above(frame) or 0
        source, line = lines_of(self.filename)[max(above, 0) :], frame.f_lineno + above
        cause, _ = self._causes.of_frames(frame, True, asks, found, source)
        node = expression_at(frame.f_code, frame.f_lasti, source, self._causes.ASKING)
        is_target = (
            dis.opname[frame.f_code.co_code[frame.f_lasti]] == "STORE_SUBSCR"
        )  # what is assigned is not in it
        if is_target or not isinstance(node, ast.Call | ast.Subscript):
            return self._site(frame, line, cause)
        site = self._site(frame, line, cause, tuple(sorted(names_in(node))))
        site.name, site.is_made = self._certain_name(frame, node, cause, asks)
        return site

    def _certain_name(
        self, frame: FrameType, node: ast.Call | ast.Subscript, cause: str, asks: str
    ) -> tuple[str | None, bool]:
        """Return the variable whose method is called, or of which torch makes what it copies, and whether it does."""
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            (index, *others) = [
                each for each in parts if not isinstance(each, ast.Constant | ast.Slice)
            ] or parts
            is_list = isinstance(_value(frame, index), list | tuple | range)
            is_made = asks == self._causes.COPY and not others and is_list
            return (ast.unparse(index) if is_made else None), is_made
        is_from_host = called_name(node) in self._causes.FROM_HOST
        given = node.args[0] if node.args else None
        if isinstance(node.func, ast.Attribute) and not isinstance(
            _value(frame, node.func.value), ModuleType
        ):
            given = node.func.value
        kind = object if is_from_host else sys.modules["torch"].Tensor
        is_certain = is_from_host or cause.startswith(".")
        is_it = (
            is_certain and isinstance(given, ast.Name) and isinstance(_value(frame, given), kind)
        )
        is_made = is_from_host and (cause == "tensor" or isinstance(given, ast.List | ast.ListComp))
        return (ast.unparse(given) if given is not None and is_it else None), is_made

    def _through_a_library(
        self, innermost: FrameType | None, is_called: bool, asks: str, found: object
    ) -> tuple[Site, object, str | None]:
        if innermost is None or innermost.f_code.co_name == torch_frames.IN_BACKWARD:
            cause, subject = self._causes.BACKWARD, found
        else:
            cause, subject = self._causes.of_frames(innermost, is_called, asks, found)
        if (
            innermost
            and cause == "bool()"
            and frames.module_of(innermost).startswith("torch.distributions")
        ):
            cause = CHECK
        is_here = get_ident() == self._thread
        frame, above, module_frame = self._own_frame(innermost if is_here else self._innermost(0))
        if frame is None:
            return Site(cause=cause), subject, None
        if module_frame is not None:
            subject, cause = (
                module_frame.f_locals.get("self"),
                f"Module.{module_frame.f_code.co_name}",
            )
        site = self._site(frame, frame.f_lineno + above, cause)
        return site, subject, _name(frame, site, subject)

    def _site(
        self, frame: FrameType, line: int, cause: str, names: tuple[str, ...] | None = None
    ) -> Site:
        """Return a site, where any name that the code has may be what is copied, unless an expression limits them."""
        code = frame.f_code
        own = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        names = (*code.co_names, *own) if names is None else names
        own_names = tuple(each for each in names if each in own)
        return Site(line, self._code(line), cause, None, names, own_names, code)

    # ---- Which code is the cell's own

    def is_own(self, frame: FrameType) -> bool:
        """Return whether a frame runs the cell's code; what torch calls for an operator has a caller that is meant."""
        own = frame.f_globals is self.namespace and self._lines_above(frame) is not None
        return own and frame.f_code.co_name not in _DISPATCHERS

    def place(self, code: CodeType, line: int) -> tuple[str, int]:
        """Return the file and the line of the cell that a line of some code is."""
        known = self._above.get(id(code))
        if known is None or known[0] is not code or known[1] is None:
            return code.co_filename, line
        return self.filename or code.co_filename, line + known[1]

    def _innermost(self, depth: int) -> FrameType | None:
        # Autograd works for the cell in threads of its own.
        return (
            sys._getframe(1 + depth)
            if get_ident() == self._thread
            else sys._current_frames().get(self._thread)
        )

    def _own_frame(
        self, innermost: FrameType | None
    ) -> tuple[FrameType | None, int, FrameType | None]:
        """Return the innermost frame of the cell's, the lines above its code, and a module's move made from there."""
        found = self._walk(innermost)
        if found[0] is None and self._waiting_thread is not None:
            found = self._walk(sys._current_frames().get(self._waiting_thread))
        return found

    def _walk(self, frame: FrameType | None) -> tuple[FrameType | None, int, FrameType | None]:
        module_frame, dispatcher = None, None
        while frame is not None:
            if frame.f_globals is self.namespace:
                above = self._lines_above(frame)
                if above is not None:
                    if frame.f_code.co_name not in _DISPATCHERS:
                        return frame, above, module_frame
                    dispatcher = dispatcher or (frame, above, None)
            elif (
                frame.f_code.co_name in _MODULE_MOVES
                and frames.module_of(frame) == "torch.nn.modules.module"
            ):
                module_frame = frame
            frame = frame.f_back
        return dispatcher or (None, 0, None)

    def _lines_above(self, frame: FrameType) -> int | None:
        code = frame.f_code
        known = self._above.get(id(code))
        if known is not None and known[0] is code:
            return known[1]
        if self._file_may_change:
            self._find_file(frame)
        above = lines_above(frame, self.filename)
        if len(self._above) > _MOST:
            self._above.clear()
        self._above[id(code)] = code, above
        return above

    def _find_file(self, innermost: FrameType) -> None:
        """Take the nearest module-level frame whose code can be read, which that of `exec` cannot, for the cell's."""
        for each in frames.stack(innermost):
            is_module = each.f_globals is self.namespace and not frames.is_function_frame(each)
            if is_module and linecache.getline(each.f_code.co_filename, 1):
                file = cell_file(each)
                if file != self.filename:
                    self.filename = file
                    self._above.clear()
                return

    def _code(self, line: int) -> str | None:
        lines = lines_of(self.filename)
        return (lines[line - 1].strip() or None) if 0 < line <= len(lines) else None


def _value(frame: FrameType, node: ast.expr) -> object:
    """Return what a name is bound to; what is no name has no value here."""
    return (
        frames.resolve_names(frame, {node.id}).get(node.id)
        if isinstance(node, ast.Name)
        else frames.MISSING
    )


def _name(frame: FrameType, site: Site, subject: object) -> str | None:
    """Return which of the site's names is bound to the subject in a frame: a global, else its own."""
    if subject is None:
        return None
    variables: Mapping[str, object] = frame.f_globals
    for name in site.names:
        if variables.get(name) is subject:
            return name
    if not site.own_names:
        return None
    variables = frames.local_variables(frame)
    return next((name for name in site.own_names if variables.get(name) is subject), None)
