"""Which line of the cell is running, and by what name it calls the thing it moves."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from threading import get_ident
from types import FrameType

from gpumagic.source import frames

_MODULE_MOVES = frozenset({"to", "cuda", "cpu", "xpu", "to_empty"})


@dataclass(frozen=True, slots=True)
class CallSite:
    """A place in the cell; all None where the cell's own code is not on the stack."""

    line: int | None = None
    code: str | None = None
    name: str | None = None
    module_call: str | None = None
    """``"Module.to"`` and so on where a module's own move made the call."""


class CallSites:
    """Finds the cell's innermost running line, looking outward from an operator's call.

    Args:
        namespace: the globals in which the cell runs (the notebook's ``user_ns``, a script's ``globals()``).
        filename: the file of the code being watched; None for a cell, whose file is that of the nearest
            module-level frame over ``namespace``.
        asked_by: the thread that waits for this one, whose line it is where this one has none.
    """

    def __init__(
        self, namespace: Mapping[str, object], filename: str | None = None, asked_by: int | None = None
    ) -> None:
        self.namespace = namespace
        self._is_cell = filename is None
        self.filename = filename
        self._thread = get_ident()
        self._asked_by = asked_by

    def find(self, subject: object = None) -> CallSite:
        """Return where the cell stands now; ``subject`` is the object moved, whose name the line may say."""
        found, module_frame = self._frames()
        if self._is_cell:
            self.filename = self._cell_file(found) or self.filename
        frame = self._innermost(found)
        if frame is None and self._asked_by is not None:
            frame = self._innermost(self._over_namespace(sys._current_frames().get(self._asked_by))[0])
        if frame is None:
            return CallSite()
        module_call = None
        if module_frame is not None:
            subject, module_call = module_frame.f_locals.get("self"), f"Module.{module_frame.f_code.co_name}"
        code = frames.code_at(frame, frame.f_lineno)
        return CallSite(frame.f_lineno, code, _name(frame, subject), module_call)

    def _innermost(self, found: list[FrameType]) -> FrameType | None:
        return next((each for each in found if each.f_code.co_filename == self.filename), None)

    def _frames(self) -> tuple[list[FrameType], FrameType | None]:
        # Autograd works for the cell in threads of its own.
        is_here = get_ident() == self._thread
        return self._over_namespace(sys._getframe(2) if is_here else sys._current_frames().get(self._thread))

    def _over_namespace(self, innermost: FrameType | None) -> tuple[list[FrameType], FrameType | None]:
        """Return the frames over the namespace, innermost first, and a module's move made from the innermost."""
        found: list[FrameType] = []
        module_frame = None
        for frame in frames.stack(innermost):
            if frame.f_globals is self.namespace:
                found.append(frame)
            elif not found and _is_module_move(frame):
                module_frame = frame
        return found, module_frame

    @staticmethod
    def _cell_file(found: list[FrameType]) -> str | None:
        return next((each.f_code.co_filename for each in found if not frames.is_function_frame(each)), None)


def _is_module_move(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name in _MODULE_MOVES and frame.f_globals.get("__name__") == "torch.nn.modules.module"


def _name(frame: FrameType, subject: object) -> str | None:
    """Return the variable that the frame's code names and that is bound to the subject: a global, else its own."""
    if subject is None:
        return None
    found = next((name for name in frame.f_code.co_names if frame.f_globals.get(name) is subject), None)
    if found is None:
        found = next((name for name, value in frames.local_variables(frame).items() if value is subject), None)
    return found
