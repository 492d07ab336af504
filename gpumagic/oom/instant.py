"""A look at the device from inside CUDA's allocator, when it has given up and nothing has been unwound yet.

By the time Python has an exception, the values that C++ and a comprehension held are gone. torch calls the observers
of its allocator before that, without the allocator's lock (`torch._C._cuda_attach_out_of_memory_observer`, since 2.0).
There is no way to detach one, so ours is attached once and looks only while a guard is open. It is attached only
once CUDA is up (before, old versions crash: pytorch#107330), and only to torch's own allocator: cudaMallocAsync calls
none. It is also called for failures that torch then mends itself, cuDNN's trials say, so what it saw counts only if
the guarded code fails.

Written to documented behaviour; it has not run on a real GPU.

Looked at while the failed frames are whole: their variables and graphs are part of the answer.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from gpumagic.oom.report import Instant, Shape, Share
from gpumagic.oom.rules.facts import Work
from gpumagic.source import frames
from gpumagic.source.frames import is_user_code
from gpumagic.tensors import scan
from gpumagic.tensors.records import TensorRow, root_of
from gpumagic.transfers import explain

if TYPE_CHECKING:
    from gpumagic.memory.allocator import AllocatorFigures


MAX_LOOKS = 4
"""Looks at most while one guard is open: a look costs some tens of milliseconds."""


class Gate:
    """Lets the observer look while it is open.

    Args:
        look: takes a device's name and returns what is to be known; it must not allocate on the device.
    """

    def __init__(self, look: Callable[[str], object]) -> None:
        self._look = look
        self._looks = 0
        self.seen: dict[str, object] = {}
        """What the last look at each device saw."""

    def open(self) -> None:
        """Have the allocator tell this gate of its failures, where there is such an allocator."""
        if _attach():
            _gates.append(self)

    def close(self) -> None:
        """Look no more."""
        if self in _gates:
            _gates.remove(self)

    def told(self, device: str) -> None:
        """Look at a device; never raises, because torch would raise that in place of its own error."""
        self._looks += 1
        try:
            if self._looks <= MAX_LOOKS:
                self.seen[device] = self._look(device)
            else:
                self.seen.pop(device, None)  # it is of an earlier failure
        except BaseException:
            self.seen.pop(device, None)


_gates: list[Gate] = []
"""The open ones, the innermost last."""
_attached: list[object] = []


def _attach() -> bool:
    """Attach the observer unless it is, and return whether it is now."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    if _attached:
        return True
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or torch.cuda.memory.get_allocator_backend() != "native":
        return False
    attach(_observe)
    _attached.append(attach)
    return True


def _observe(device: int, requested: int, total: int, free: int) -> None:
    """Called by torch's allocator."""
    del requested, total, free
    if _gates:
        _gates[-1].told(f"cuda:{device}")


PURPOSES = {
    "parameter": "parameters", "buffer": "buffers", "gradient": "gradients",
    "optimizer state": "optimizer state", "activation": "activations",
}  # fmt: skip
"""What a kind of tensor is counted under, whoever names it."""

NAMES = 3
"""How many names of each part are kept."""

SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**", ast.Mod: "%",
    ast.FloorDiv: "//",
}  # fmt: skip


def operation(error: BaseException, work: Work, outside: Collection[int] = ()) -> Instant:
    """Return the operation that failed and its tensors: torch's own function, else what the user's line says."""
    if work.function:
        return Instant(work.function, _shapes(work.operands, work))
    steps = [
        step
        for each in frames.related_exceptions(error, outside)
        for step in frames.traceback_steps(each.__traceback__)
        if is_user_code(step.tb_frame)
    ]
    node = explain.failing_node(steps[-1]) if steps else None
    if node is None:
        return Instant()
    if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return) and node.value is not None:
        node = node.value  # Python 3.10 does not say which part of the statement
    return Instant(_operator(node), _shapes({ast.unparse(each) for each in _operands(node)}, work))


def shares(
    namespace: Mapping[str, object], bound: Mapping[str, int], device: str, shell: object | None,
    figures: AllocatorFigures | None,
) -> tuple[Share, ...]:  # fmt: skip
    """Return what the bytes of a device are for, largest first, then what the allocator kept for reuse.

    Args:
        namespace: the notebook's variables.
        bound: ``{name: id of its value}`` when the cell began.
        device: which one.
        shell: the shell, whose outputs count apart.
        figures: of the device's allocator, at the failure; None where it has no allocator that counts.
    """
    rows = [row for row in scan.scan(namespace, shell=shell) if row.device == device and row.nbytes]
    parts: dict[str, list[TensorRow]] = {}
    for row in sorted(rows, key=lambda each: -(each.nbytes or 0)):
        parts.setdefault(_part(row, namespace, bound), []).append(row)
    found = [Share(what, sum(row.nbytes or 0 for row in those), _names(those)) for what, those in parts.items()]
    if figures is not None:
        unseen = figures.allocated - sum(share.nbytes for share in found)
        found += [Share("what had no name (graphs, C++, unfinished lists)", unseen)] if unseen > 0 else []
    found.sort(key=lambda share: -share.nbytes)
    cached = figures.reserved - figures.allocated if figures is not None else 0
    return (*found, Share("cache", cached)) if cached > 0 else tuple(found)


def _part(row: TensorRow, namespace: Mapping[str, object], bound: Mapping[str, int]) -> str:
    if row.kind in PURPOSES:
        return PURPOSES[row.kind]
    if row.name is not None:
        roots = {root_of(name) for name in row.names}
        old = any(root in bound and bound[root] == id(namespace.get(root)) for root in roots)
        return "names of earlier cells" if old else "names of this cell"
    if row.holder is not None and row.holder.startswith("Out["):
        return "outputs"
    return "variables of failed functions"


def _names(rows: Iterable[TensorRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(root_of(row.name) for row in rows if row.name is not None))[:NAMES]


def _operator(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return SIGNS.get(type(node.op), "")
    return ""


def _operands(node: ast.AST) -> list[ast.AST]:
    """Return the parts of an expression that may be tensors: what it applies its operator to."""
    if isinstance(node, ast.Call):
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [*owner, *node.args, *(keyword.value for keyword in node.keywords)]
    return list(ast.iter_child_nodes(node))


def _shapes(codes: Iterable[str], work: Work) -> tuple[Shape, ...]:
    facts = {**work.tensors, **work.operands}
    return tuple(Shape(code, facts[code].shape, facts[code].dtype) for code in sorted(codes) if code in facts)
