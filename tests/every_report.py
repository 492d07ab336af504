"""A report of every kind with the same text wherever a report has text, made from the types of its fields."""

from __future__ import annotations

import dataclasses
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from typing import Any

import gpumagic
from gpumagic.cluster.report import KINDS as OF_ENGINES
from gpumagic.cluster.report import EngineAnswer
from gpumagic.gpus.report import GPUReport, GpuRow, ProcessRow
from gpumagic.report.base import Report
from gpumagic.report.document import document_of

MIB = 1024**2
for _module in pkgutil.walk_packages(gpumagic.__path__, "gpumagic."):
    if _module.name.endswith("view"):
        import_module(_module.name)
KINDS = sorted(kind.__name__ for kind in document_of.registry if kind is not object)
FIXED: dict[tuple[str, str], Any] = {
    ("TensorReport", "group_by"): None, ("ClusterReport", "magic"): "gpuinfo",
    ("DiffRow", "change"): "new", ("EngineAnswer", "state"): "answered",
    ("OomReport", "recovered"): False, ("OomReport", "retries"): 0,
}  # fmt: skip
"""Fields of a few known words, which no text from outside reaches, and flags that would fold all else away."""
_TYPES = {
    name: each
    for module in list(sys.modules.values())
    if module.__name__.startswith("gpumagic.")
    for name, each in vars(module).items()
    if isinstance(each, type) and name not in typing.__all__
}


def cases(text: str) -> Iterator[tuple[str, Report[Any]]]:
    """Yield every kind of report, and its other forms, by name."""
    for kind in KINDS:
        yield kind, report(kind, text)
    yield "OomReport, recovered", report("OomReport", text, recovered=True, retries=1)
    yield "GPUReport, none", report("GPUReport", text, devices=())
    for key in ("dtype", "kind", "holder"):
        yield f"TensorReport, by {key}", report("TensorReport", text, group_by=key)
    for magic, kind in OF_ENGINES.items():
        told = [EngineAnswer(number, report=report(kind.__name__, text)) for number in range(2)]
        silent = EngineAnswer(2, state="failed", detail=text)
        yield (
            f"ClusterReport, {magic}",
            report("ClusterReport", text, magic=magic, engines=(*told, silent)),
        )


def eight_gpus() -> GPUReport:
    """Return a report of a machine with eight GPUs of long names, each used by several processes."""
    name, gib = "NVIDIA GH200 120GB HBM3 Grace Hopper Superchip", 1024**3
    processes = tuple(
        ProcessRow(pid=4_000_000 + pid, name="python -m torch.distributed.run --nproc-per-node=8 train.py",
                   user="a.long.user.name", memory=20 * gib) for pid in range(3)
    )  # fmt: skip
    gpus = tuple(
        GpuRow(f"cuda:{index}", index, f"GPU-{index}", name, 120 * gib, 96 * gib, 23 * gib, gib, 30 * gib, 36 * gib,
               60 * gib, 100.0, 83.0, 652.0, 700.0, ("power cap", "thermal slowdown"), processes,
               clock_sm=1410, clock_sm_max=1980)
        for index in range(8)
    )  # fmt: skip
    return GPUReport(
        gpus, "2.13.0", "13.0", "580.65.06", "0,1,2,3,4,5,6,7", show_processes=True, show_all=True
    )


def report(kind: str, text: str, **fields: Any) -> Report[Any]:
    """Return a report of a kind in whose every text ``text`` stands."""
    made = _made(_TYPES[kind], text)
    assert isinstance(made, Report)
    return dataclasses.replace(made, **fields) if fields else made  # type: ignore[type-var]


def _made(kind: Any, text: str) -> Any:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType, typing.Literal):
        first = next(each for each in inside if each is not type(None))
        return first if origin is typing.Literal else _made(first, text)
    if origin is tuple:
        return tuple(_made(each, text) for each in (inside[:1] * 3 if ... in inside else inside))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_made(inside[0], text): _made(inside[1], text)}
    if kind is Report or (isinstance(origin, type) and issubclass(origin, Report)):
        return report("GPUReport", text)
    simple = {str: text, object: text, Any: text, int: 3 * MIB, float: 2.5, bool: True}
    if kind in simple:
        return simple[kind]
    return next(iter(kind)) if issubclass(kind, Enum) else _record(kind, text)


def _record(kind: Any, text: str) -> Any:
    """Return a dataclass or a named tuple, each of its fields made by its type."""
    own = vars(sys.modules[kind.__module__])  # what is imported for types alone is not in it
    others = {name: value for name, value in _TYPES.items() if name not in own}
    hints = typing.get_type_hints(kind, localns=others)
    names = (
        [each.name for each in dataclasses.fields(kind)]
        if dataclasses.is_dataclass(kind)
        else kind._fields
    )
    made = {name: _made(hints[name], text) for name in names if (kind.__name__, name) not in FIXED}
    return kind(
        **made, **{name: value for (of, name), value in FIXED.items() if of == kind.__name__}
    )
