"""The host's own memory, and checkpoints that are loaded beside what they fill."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.batch import remake
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import count, size
from gpumagic.source.text import Text, called, keyword

_MAKERS = frozenset({"zeros", "ones", "empty", "full", "rand", "randn", "random", "standard_normal"})


def workers(facts: Facts) -> Iterator[Advice]:
    """Load batches in the kernel's own process, where workers ran out."""
    if facts.memory not in ("host", "shared") or not _in_worker(facts):
        return
    found, edit = _workers(facts)
    if not found:
        return
    yield propose(
        facts, "Load the batches without worker processes", covers=None, cost="loading is not done ahead any more",
        evidence=f"{count(found, 'worker')}, each with its own copy of what the dataset holds and "
        "two batches ahead" + (" in /dev/shm" if facts.memory == "shared" else ""),
        **edit,
    )  # fmt: skip


def unpinned(facts: Facts) -> Iterator[Advice]:
    """Do not pin the host's memory where pinning it is what failed."""
    if "pin_memory" not in facts.scene.functions and "_pin_memory_loop" not in facts.scene.functions:
        return
    for text in facts.texts:
        flags = [keyword(node, "pin_memory") for node in text.nodes() if isinstance(node, ast.Call)]
        on = [flag for flag in flags if flag is not None and ast.unparse(flag.value) == "True"]
        if on:
            yield propose(
                facts, "Do not pin the batches", text=text, changes=[text.replace(flag.value, "False") for flag in on],
                evidence="it failed while pinning, and pinned memory cannot be swapped", cost="slower copies",
            )  # fmt: skip
            return


def half_as_wide(facts: Facts) -> Iterator[Advice]:
    """Make an array of float32 where numpy's float64 is what does not fit."""
    text = facts.failing
    if text is None or facts.requested is None or facts.kind not in ("numpy", "host allocator"):
        return
    statement = text.statement_at(text.line)
    for node in ast.walk(statement) if statement is not None else ():
        if not isinstance(node, ast.Call) or called(node) not in _MAKERS or not node.args:
            continue
        flag = keyword(node, "dtype")
        owner = ast.unparse(node.func).partition(".")[0]
        if owner not in ("np", "numpy") and flag is None:
            continue
        if flag is not None and "64" not in ast.unparse(flag.value):
            continue
        if called(node) in ("rand", "randn", "random", "standard_normal") and flag is None:
            continue
        narrow = f"{owner}.float32"
        changes = [text.replace(flag.value, narrow) if flag else text.add_argument(node, f"dtype={narrow}")]
        yield propose(
            facts, "Make the array of float32", frees=facts.requested // 2, covers=_half_fits(facts),
            text=text, changes=changes,
            evidence=f"float64 takes {size(facts.requested)}", cost="seven digits instead of sixteen",
        )  # fmt: skip
        return


def mapped(facts: Facts) -> Iterator[Advice]:
    """Read a checkpoint from its file as it is needed."""
    if facts.stage != "load" or facts.memory != "host":
        return
    for text in facts.texts:
        for node in text.nodes():
            if isinstance(node, ast.Call) and text.code(node.func) == "torch.load" and keyword(node, "mmap") is None:
                yield propose(
                    facts, "Map the checkpoint's file instead of reading it", frees=facts.requested, estimated=True,
                    text=text, changes=[text.add_argument(node, "mmap=True")], cost="the file must stay where it is",
                    evidence="mmap=True reads each tensor when it is used",
                )  # fmt: skip
                return


def _in_worker(facts: Facts) -> bool:
    return facts.kind in ("dataloader killed", "dataloader bus error", "shared memory") or (
        facts.kind == "python" and "_process_data" in facts.scene.functions
    )


def _workers(facts: Facts) -> tuple[int, dict[str, Any]]:
    """Return how many workers a loader of the cell's has, and the edit that does without them."""
    for text in facts.texts:
        flag = next(filter(None, map(_literal, text.nodes())), None)
        if flag is not None:
            changes = [text.replace(flag, "0"), *_without(text, "persistent_workers", "False")]
            changes += _without(text, "prefetch_factor", "None")
            return int(flag.value), {"text": text, "changes": changes}  # type: ignore[arg-type]
    loader = next((each for each in facts.loaders if each.workers), None)
    if loader is None:
        return 0, {}
    return loader.workers, {"first": remake(loader, num_workers=0)}


def _literal(node: ast.AST) -> ast.Constant | None:
    value = node.value if isinstance(node, ast.keyword) and node.arg == "num_workers" else None
    is_number = isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0
    return value if is_number and isinstance(value, ast.Constant) else None


def _without(text: Text, name: str, value: str) -> list[Any]:
    calls = [node for node in text.nodes() if isinstance(node, ast.Call) and keyword(node, "num_workers")]
    flags = [keyword(node, name) for node in calls]
    return [text.replace(flag.value, value) for flag in flags if flag is not None]


def _half_fits(facts: Facts) -> bool | None:
    if facts.free is None or facts.requested is None:
        return None
    return facts.requested // 2 <= facts.free


def on_the_host(facts: Facts) -> Iterator[Advice]:
    """Load a checkpoint into the host's memory, from where it is copied into the model piece by piece."""
    if facts.stage != "load" or facts.memory != "device":
        return
    for text in facts.texts:
        for node in text.nodes():
            if not isinstance(node, ast.Call) or text.code(node.func) not in ("torch.load", "load"):
                continue
            where = keyword(node, "map_location")
            if where is not None and ast.unparse(where.value) in ("'cpu'", "torch.device('cpu')"):
                continue
            change = text.replace(where.value, '"cpu"') if where else text.add_argument(node, 'map_location="cpu"')
            yield propose(
                facts, "Load the checkpoint into the host's memory", frees=facts.grown or None, covers=True, text=text,
                changes=[change], estimated=True, cost="its tensors are on the CPU until they are copied or moved",
                evidence=f"torch.load was {_far(facts)}putting the tensors where they were saved"
                if where is None else f"map_location={text.code(where.value)} puts the tensors beside the model's own",
            )  # fmt: skip
            return


def _far(facts: Facts) -> str:
    return f"{size(facts.grown)} into " if facts.grown else ""
