"""When exchanged entry points could be told from torch's own functions, so that a cell must run under the mode."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode

from gpumagic import _compat
from gpumagic.transfers import entry_points, watched_calls

MOST_EXCHANGES = 400
"""Of 1000 changes of a class that CPython 3.13 counts, a run makes two."""


def find(namespace: Mapping[str, object], source: str) -> str | None:
    """Return why a block cannot run with exchanged entry points, or None if it can.

    Args:
        namespace: the globals in which the block runs.
        source: the text of the block, as far as it is known.
    """
    return _of_process() or _of_source(source) or _of_holders(namespace)


def _of_process() -> str | None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "Python runs without its global lock"
    if _compat.CLASSES_COUNT_CHANGES and entry_points.exchanges >= MOST_EXCHANGES:
        return f"this process has had {MOST_EXCHANGES} such cells"
    if _len_torch_function_stack():
        return "a default device or another function mode is in force"
    if _has_compiled():
        return "torch.compile has been used"
    overriding = next(_overriding(torch.Tensor, TorchFunctionMode), None)
    return f"{overriding} overrides __torch_function__" if overriding else None


def _has_compiled() -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # there as soon as there is an optimizer
    backends = getattr(compiler, "cached_backends", {0: object()})
    return compiler is not None and any(backends.values())


def _overriding(*bases: type) -> Iterator[str]:
    """Yield the classes outside torch that see functions of torch's by identity, as `__torch_function__` does."""
    for base in bases:
        heirs: list[type] = base.__subclasses__()
        for heir in heirs:
            if "__torch_function__" in vars(heir) and heir.__module__.partition(".")[0] not in ("torch", "gpumagic"):
                yield heir.__name__
            yield from _overriding(heir)


@lru_cache(32)
def _of_source(source: str) -> str | None:
    if "__torch_function__" in source:
        return "the cell overrides __torch_function__"
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell with magics in it
        return None
    names = {each.name for each in watched_calls.functions() if each.owner is not torch.autograd}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and id(node) not in called:
            return f"the cell uses torch.{node.attr} as a value"
    return None


def _of_holders(namespace: Mapping[str, object]) -> str | None:
    census = entry_points.census(namespace)
    return None if census is None else census.stranger
