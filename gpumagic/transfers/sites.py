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
from typing import Any, NamedTuple

from gpumagic._compat import torch_frames
from gpumagic.backends import DEVICE_METHODS
from gpumagic.source import frames
from gpumagic.source.frames import cell_file, lines_above, lines_of
from gpumagic.source.text import called_name, expression_at, names_in
from gpumagic.transfers import causes
from gpumagic.transfers.advice import CHECK
from gpumagic.transfers.report import MOVE

_MODULE_MOVES = DEVICE_METHODS | {"to", "cpu", "to_empty"}
_MODULE = "torch.nn.modules.module"
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


class _OwnFrame(NamedTuple):
    """A frame that runs the cell's code."""

    frame: FrameType
    above: int
    """How many lines of the cell stand above its code."""
    module_move: FrameType | None
    """The frame of a module's `to` or its like that it has called."""


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
        over, runs_body = None, False
        stack = list(frames.stack(sys._getframe(1)))
        for frame in stack:
            if frame.f_globals is self.namespace:
                over = frame
                break
        for frame in stack:
            if frame.f_code.co_name == "run_cell_magic" and frame.f_back is over:
                runs_body = True
        self._file_may_change &= self.filename is None or runs_body

    def line(self) -> int | None:
        """Return the line that runs now."""
        own = self._own_frame(self._innermost(1))
        return None if own is None else own.frame.f_lineno + own.above

    def find(self, asks: str, found: object) -> tuple[Site, object, str | None]:
        """Return who asks for what torch copies now, what is copied, and its variable.

        Args:
            asks: what is called ``".to"`` and so on where the code does not say it.
            found: the tensor that torch was given.
        """
        if self.moving is not None:
            return Site(cause=MOVE), found, self.moving
        site = None
        for depth in _DEPTHS:
            try:
                frame = sys._getframe(depth)
            except ValueError:  # autograd's threads have fewer frames
                break
            site = self._instructions.get((id(frame.f_code), frame.f_lasti, asks))
            if site is not None:
                break
        if site is None:
            innermost, is_called = causes.asking_frame(
                sys._getframe(3)
            )  # from the kernel's on
            if (
                innermost is None
                or not self.is_own(innermost)
                or get_ident() != self._thread
            ):
                return self._through_a_library(innermost, is_called, asks, found)
            frame = innermost
            site = self._site_of_instruction(frame, asks, found)
        subject = None if site.is_made else found
        return site, subject, site.name or _name(frame, site, subject)

    def _site_of_instruction(self, frame: FrameType, asks: str, found: object) -> Site:
        """Return what an instruction of the cell's own asks for, and remember it."""
        key = id(frame.f_code), frame.f_lasti, asks
        if len(self._instructions) > _MOST:
            self._instructions.clear()
        site = self._instructions.get(key)
        if site is None:
            site = self._instructions.setdefault(
                key, self._instruction(frame, asks, found)
            )
        return site

    def _instruction(self, frame: FrameType, asks: str, found: object) -> Site:
        """Return what an instruction of the cell's own asks for."""
        above = self._lines_above(frame) or 0
        line = frame.f_lineno + above
        source = lines_of(self.filename)[max(above, 0) :]
        cause, _ = causes.of_frames(frame, True, asks, found, source)
        node = expression_at(frame.f_code, frame.f_lasti, source, causes.ASKING)
        is_target = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "STORE_SUBSCR"
        if is_target or not isinstance(node, ast.Call | ast.Subscript):
            return self._site(
                frame, line, cause
            )  # what is assigned is not in the target
        site = self._site(frame, line, cause, tuple(sorted(names_in(node))))
        if isinstance(node, ast.Subscript):
            site.name, site.is_made = _index_that_is_copied(frame, node, asks)
        else:
            site.name, site.is_made = _argument_that_is_copied(frame, node, cause)
        return site

    def _through_a_library(
        self, innermost: FrameType | None, is_called: bool, asks: str, found: object
    ) -> tuple[Site, object, str | None]:
        """Return the same where a library's code, or autograd, asks for the copy."""
        if innermost is None or innermost.f_code.co_name == torch_frames.IN_BACKWARD:
            cause, subject = causes.BACKWARD, found
        else:
            cause, subject = causes.of_frames(innermost, is_called, asks, found)
            module = frames.module_of(innermost)
            if cause == "bool()" and module.startswith("torch.distributions"):
                cause = CHECK
        is_here = get_ident() == self._thread
        own = self._own_frame(innermost if is_here else self._innermost(0))
        if own is None:
            return Site(cause=cause), subject, None
        if own.module_move is not None:
            subject = own.module_move.f_locals.get("self")
            cause = f"Module.{own.module_move.f_code.co_name}"
        site = self._site(own.frame, own.frame.f_lineno + own.above, cause)
        return site, subject, _name(own.frame, site, subject)

    def _site(
        self,
        frame: FrameType,
        line: int,
        cause: str,
        names: tuple[str, ...] | None = None,
    ) -> Site:
        """Return a site, where any name that the code has may be what is copied, unless an expression limits them."""
        code = frame.f_code
        own = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        if names is None:
            names = (*code.co_names, *own)
        return Site(
            line,
            self._code(line),
            cause,
            names=names,
            own_names=tuple(name for name in names if name in own),
            source=code,
        )

    # ---- Which code is the cell's own

    def is_own(self, frame: FrameType) -> bool:
        """Return whether a frame runs the cell's code; what torch calls for an operator has a caller that is meant."""
        own = frame.f_globals is self.namespace and self._lines_above(frame) is not None
        return own and frame.f_code.co_name not in _DISPATCHERS

    def place(self, code: CodeType, line: int) -> tuple[str, int]:
        """Return the file and the line of the cell that a line of some code is."""
        known = self._above.get(id(code))
        if known is None:
            return code.co_filename, line
        same_code, above = known
        if same_code is not code or above is None:
            return code.co_filename, line
        return self.filename or code.co_filename, line + above

    def _innermost(self, depth: int) -> FrameType | None:
        """Return the run's innermost frame: autograd works for the cell in threads of its own."""
        if get_ident() == self._thread:
            return sys._getframe(1 + depth)
        return sys._current_frames().get(self._thread)

    def _own_frame(self, innermost: FrameType | None) -> _OwnFrame | None:
        """Return the innermost frame of the cell's, in the thread that waits for this one if this one has none."""
        own = self._walk(innermost)
        if own is None and self._waiting_thread is not None:
            own = self._walk(sys._current_frames().get(self._waiting_thread))
        return own

    def _walk(self, frame: FrameType | None) -> _OwnFrame | None:
        module_move = None
        dispatcher = None
        while frame is not None:
            if frame.f_globals is self.namespace:
                above = self._lines_above(frame)
                if above is not None:
                    if frame.f_code.co_name not in _DISPATCHERS:
                        return _OwnFrame(frame, above, module_move)
                    dispatcher = dispatcher or _OwnFrame(frame, above, None)
            elif (
                frame.f_code.co_name in _MODULE_MOVES
                and frames.module_of(frame) == _MODULE
            ):
                module_move = frame
            frame = frame.f_back
        return dispatcher

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
        for frame in frames.stack(innermost):
            if frame.f_globals is not self.namespace or frames.is_function_frame(frame):
                continue
            if linecache.getline(frame.f_code.co_filename, 1):
                file = cell_file(frame)
                if file != self.filename:
                    self.filename = file
                    self._above.clear()
                return

    def _code(self, line: int) -> str | None:
        lines = lines_of(self.filename)
        if not 0 < line <= len(lines):
            return None
        return lines[line - 1].strip() or None


def _index_that_is_copied(
    frame: FrameType, node: ast.Subscript, asks: str
) -> tuple[str | None, bool]:
    """Return the variable of the one index that is a list, of which torch makes what it copies, and whether it is."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    indices = [part for part in parts if not isinstance(part, ast.Constant | ast.Slice)]
    if asks != causes.COPY or len(indices) != 1:
        return None, False
    is_list = isinstance(_value(frame, indices[0]), list | tuple | range)
    return (ast.unparse(indices[0]), True) if is_list else (None, False)


def _argument_that_is_copied(
    frame: FrameType, node: ast.Call, cause: str
) -> tuple[str | None, bool]:
    """Return the variable whose method is called, or of which torch makes what it copies, and whether it makes it."""
    is_from_host = called_name(node) in causes.FROM_HOST
    given = node.args[0] if node.args else None
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is not None and not isinstance(_value(frame, owner), ModuleType):
        given = owner  # it is a method
    is_made = is_from_host and (
        cause == "tensor" or isinstance(given, ast.List | ast.ListComp)
    )
    if not isinstance(given, ast.Name) or not (is_from_host or cause.startswith(".")):
        return None, is_made
    kind = object if is_from_host else sys.modules["torch"].Tensor
    return given.id if isinstance(_value(frame, given), kind) else None, is_made


def _value(frame: FrameType, node: ast.expr) -> object:
    """Return what a name is bound to; what is no name has no value here."""
    if not isinstance(node, ast.Name):
        return frames.MISSING
    return frames.resolve_names(frame, {node.id}).get(node.id)


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
    for name in site.own_names:
        if variables.get(name) is subject:
            return name
    return None
