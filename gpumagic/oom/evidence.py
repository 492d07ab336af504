"""What is gathered about the notebook after the release, and the report that the rules make of it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, TypeGuard

from gpumagic.advice import search
from gpumagic.advice.facts import Facts, Loader, Ownership, Trainer
from gpumagic.advice.rules import training, verdict
from gpumagic.advice.rules.proposal import calls
from gpumagic.advice.trials import Trials
from gpumagic.heap.branches import attributes_of, dict_of, mro_of, name_of_type
from gpumagic.memory import allocator, devices, segments
from gpumagic.memory.devices import Device
from gpumagic.oom import ownership
from gpumagic.oom.failure import Failure, GuardState
from gpumagic.oom.recognition import OomEvent
from gpumagic.oom.report import CUBLAS, WORKSPACE, OomReport
from gpumagic.report import base
from gpumagic.report.base import Holder
from gpumagic.report.units import LARGE, size
from gpumagic.source import text as texts
from gpumagic.source.cell_code import BatchSize, batches_in, is_batch_name, names_used
from gpumagic.source.text import CellText, names_in
from gpumagic.tensors import scan

FUSED_ATTENTION = ("cuda", "xpu", "mps")
"""Backends whose `scaled_dot_product_attention` has kernels that never make the matrix of all scores."""


def conclude(
    failure: Failure,
    state: GuardState,
    *,
    is_kept: bool = False,
    retries: int = 0,
    recovered: bool = False,
    seconds: float = 0.0,
    elsewhere: str = "",
) -> OomReport:
    """Return the report, from what was read before the release and what is alive now.

    Its frames may be kept for a debugger; dry runs of the advice may take so many `seconds`. The run that failed may
    have been sent `elsewhere`, to another device.
    """
    notes = list(failure.notes)
    facts = replace(
        failure.facts, after=allocator.all_device_stats().get(failure.facts.device or "")
    )
    try:
        facts = _with_notebook(facts, state)
    except Exception as fault:  # a partial report is better than the loss of it
        notes.append(
            f"What lives in the notebook could not be looked at: {type(fault).__name__}: {fault}"
        )
    tried = Trials(facts, state.namespace, 0.0 if recovered else seconds, elsewhere)
    if facts.source is None or state.shell is None:
        tried.reason = "only a cell of a notebook can be tried"
    elif facts.memory != "device" or facts.device is None or facts.kind == "size bug":
        tried.reason = "a dry run knows only of the devices' memory"
    elif seconds:
        tried.reason = state.watch.sentence()
    need = tried.need()
    if need is not None and need.fits and any(nbytes >= LARGE for nbytes in facts.stale.values()):
        tried.reason, need = (
            "a dry run leaves out the old values of names that the cell binds first",
            None,
        )
    facts = replace(facts, need=need)
    advised = () if recovered else search.advise(facts, tried)
    event = failure.event
    notes += (
        [f"Not all advice was tried: {tried.reason}."] if tried.reason and need is not None else []
    )
    # The first is shown, the others are folded away: what holds of most failures comes last.
    notes += [
        *dict.fromkeys(tried.exhausted),
        *_notes(facts, event, is_kept=is_kept),
        *verdict.sentences(facts),
    ]
    (before, reserved_before), (at_failure, reserved_at_failure), (after, reserved_after) = (
        (each.allocated, each.reserved) if each is not None else (None, None)
        for each in (facts.before, facts.at_failure, facts.after)
    )
    explanation = verdict.explain(facts)
    return OomReport(
        facts.kind,
        event.kind.certainty,
        facts.device,
        facts.requested,
        before,
        at_failure,
        after,
        reserved_after,
        facts.line,
        facts.code,
        explanation.sentence,
        cause=explanation.cause,
        reserved_before=reserved_before,
        reserved_at_failure=reserved_at_failure,
        need=need,
        untried=tried.reason if need is None else "",
        holders=facts.holders,
        advice=advised,
        capacity=facts.capacity,
        retries=retries,
        recovered=recovered,
        message=event.message,
        notes=tuple(notes),
        origin=base.current_origin(),
    )


def _notes(facts: Facts, event: OomEvent, *, is_kept: bool) -> Iterator[str]:
    if event.raised != event.message:
        yield f"It was raised as {event.raised}"
    if event.kind.memory == "device" and event.device is None and facts.device is not None:
        yield f"The error does not name the device; {facts.device} is the fullest of its kind in use."
    if facts.inside is not None:
        yield f"It failed inside {facts.inside}"
    named = sum(holder.nbytes for holder in facts.holders)
    unnamed = facts.after.allocated - named if facts.after is not None else 0
    if is_kept:
        yield f"Kept for %debug: the failed frames, which hold at most {size(unnamed)}."
    elif named and unnamed >= LARGE:
        yield f"{size(unnamed)} has no name, only autograd graphs or C++; see %devices --leaks."


def _with_notebook(facts: Facts, state: GuardState) -> Facts:
    """Return the facts with what lives in the notebook now, and what of it the cell uses."""
    import torch

    device, namespace, shell = facts.device, state.namespace, state.shell
    if device is None:
        return facts
    owned = ownership.by_names(namespace, device, shell)
    used, read_first, bound_first = set(namespace), set[str](), frozenset[str]()
    if facts.cell is not None:
        bound_first = facts.cell.bound_first
        used, read_first = (
            names_used(each, namespace)
            for each in (facts.cell.reads, facts.cell.reads - bound_first)
        )
    unchanged = {name for name, value in namespace.items() if state.bound.is_still(name, value)}
    outputs = {name for part in owned for name in part.names if name.startswith("Out[")}
    kept = segments.workspace_bytes().get(device, 0)
    rows = [Holder(", ".join(sorted(each.names)), device, each.nbytes, each.kind) for each in owned]
    rows += [Holder(CUBLAS, device, kept, WORKSPACE)] if kept else []
    now = facts.after.allocated if facts.after is not None else 0
    unnamed = now - sum(each.nbytes for each in rows)
    grew = now - (facts.before.allocated if facts.before is not None else 0)
    # What the cell leaves behind and makes anew when it runs again; of a graph a name holds no more than its end.
    left = {name for part in owned if max(part.nbytes, unnamed) >= LARGE for name in part.names}
    # Adams that failed in their first step, and what hooks have filled; the cell does not make them anew.
    half_made = {
        each.name: f"{each.name}.state"
        for each in facts.optimizers_there
        if facts.stage == "step"
        and 0 < each.state < 2 * each.nbytes
        and each.kind in training.ADAMS
        and not each.local
    }
    filled = {
        name: name
        for part in owned
        if LARGE <= part.nbytes <= grew
        for name in part.names
        if len(part.names) == 1
        and name in unchanged - used
        and isinstance(namespace[name], dict | list)
    }
    removable = (unchanged | outputs) - used - bound_first - set(filled)
    loaders, (free_elsewhere, others) = find_loaders(used, namespace), other_devices(device)
    cells = shell.user_ns.get("In") if shell is not None else None
    history = [each for each in cells if isinstance(each, str)] if isinstance(cells, list) else []
    first = (
        Device.parse(device).backend if Device.parse(device).index == 0 else device
    )  # "cuda" is "cuda:0" too
    return replace(
        facts,
        holders=tuple(sorted(rows, key=lambda each: -each.nbytes)),
        leftovers=tuple(part for part in owned if part.names <= removable),
        graphs=kept_graphs(device, unchanged - used, bound_first, namespace, shell)
        if unnamed >= LARGE
        else None,
        stale={
            name: sum(part.nbytes for part in owned if part.names == {name})
            for name in (unchanged & bound_first) - read_first
        },
        models=tuple(each for each in facts.models_there if each.local or each.name in used),
        optimizers=tuple(
            each for each in facts.optimizers_there if each.local or each.name in used
        ),
        brought=_holders(owned, (used & unchanged) - bound_first, namespace, device),
        kept=_holders(owned, set(namespace), namespace, device),
        residue=tuple(sorted((bound_first - read_first) & left & namespace.keys())),
        emptied=tuple(
            code
            for name, code in {**half_made, **filled}.items()
            if name in namespace and name not in bound_first
        ),
        device_names=tuple(
            sorted(
                name
                for name in used
                if type(namespace[name]) in (str, torch.device)
                and str(namespace[name]) in (device, first)
            )
        ),
        loaders=loaders,
        trainer=find_trainer(
            used | (bound_first & namespace.keys()), namespace, facts.text, history
        ),
        batches=_batches(facts, used, namespace, loaders),
        free_elsewhere=free_elsewhere,
        other_processes=others,
        fused_attention=Device.parse(device).backend in FUSED_ATTENTION,
    )


def _batches(
    facts: Facts, used: set[str], namespace: Mapping[str, object], loaders: Iterable[Loader]
) -> tuple[BatchSize, ...]:
    """Return the batch sizes of the cell, and of the function in another cell that failed."""
    if facts.cell is None:
        return ()
    text, found = (
        facts.failing,
        list(facts.cell.batches),
    )  # those that the cell writes, then of what it uses
    values = {name: namespace[name] for name in sorted(used - {each.name for each in found})}
    found += [BatchSize(name, each) for name, each in values.items() if _is_batch(each, name)]
    if not found:
        of_objects = [
            BatchSize(code, int(each))
            for code, each in facts.numbers.items()
            if "." in code and _is_batch(each, code.rpartition(".")[2])
        ]
        of_loaders = [BatchSize(each.name, each.batch_size, loader=True) for each in loaders]
        # A loader says no more than the number it was made with; one that the cell makes itself is made of another.
        found = (
            of_objects or of_loaders
            if "DataLoader" in facts.cell.attributes
            else of_loaders or of_objects
        )
    return (*found, *(batches_in(text.tree, text.cell) if text is not None and text.cell else ()))


def _is_batch(value: object, name: str) -> TypeGuard[int]:
    return is_batch_name(name) and type(value) is int and value > 1


def _holders(
    owned: Sequence[Ownership], names: set[str], namespace: Mapping[str, object], device: str
) -> tuple[Holder, ...]:
    """Return the variables of these names with memory on the device, what they share counted for each."""
    totals: Counter[str] = Counter()
    for part in owned:
        totals.update(dict.fromkeys(sorted(part.names & names), part.nbytes))
    return tuple(
        Holder(name, device, each, ownership.kind_of(namespace[name]))
        for name, each in totals.items()
    )


def kept_graphs(
    device: str,
    removable: AbstractSet[str],
    remade: AbstractSet[str],
    namespace: Mapping[str, object],
    shell: object,
) -> Ownership | None:
    """Return what autograd graphs keep on a device and the code that releases it; None if they keep nothing.

    A graph counts if each of its tensors is kept by a removable name, and otherwise only by names the cell binds first.
    """
    totals: Counter[str] = Counter()
    for row in scan.scan(namespace, devices=(device,), shell=shell):
        if row.in_graph and row.frees and not row.releasable:
            totals[row.frees] += row.nbytes or 0
    nbytes, names, statements = 0, frozenset[str](), dict[str, None]()
    for line, bytes_freed in totals.items():
        parsed = ast.parse(line).body
        changed = [
            target for each in parsed if isinstance(each, ast.Assign) for target in each.targets
        ]
        keeping = frozenset[str]().union(*map(names_in, changed))
        if keeping & removable and keeping <= removable | remade:
            nbytes, names = nbytes + bytes_freed, names | keeping
            statements |= dict.fromkeys(map(ast.unparse, parsed))
    return Ownership(names, nbytes, code="\n".join(statements)) if nbytes else None


def find_loaders(names: Iterable[str], namespace: Mapping[str, object]) -> tuple[Loader, ...]:
    """Return the DataLoaders among these names that make batches of more than one."""
    from torch.utils import data

    found = []
    for name in sorted(names):
        value: Any = namespace[name]
        if (
            issubclass(type(value), data.DataLoader)
            and isinstance(value.batch_size, int)
            and value.batch_size > 1
        ):
            found.append(Loader(name, value.batch_size, value.num_workers))
    return tuple(found)


def other_devices(device: str) -> tuple[dict[str, int], int | None]:
    """Return the free bytes of the other devices of the same type, and what other processes hold on this one.

    It asks the driver's tools, not the devices: `mem_get_info` of a device not yet in use would create a context.
    """
    backend = Device.parse(device).backend
    figures = devices.driver_figures({backend})
    alike = {
        other: each.free
        for other, each in figures.items()
        if Device.parse(other).backend == backend
    }
    free = {
        other: nbytes for other, nbytes in alike.items() if other != device and nbytes is not None
    }
    return free, figures[device].other_processes if device in figures else None


_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")


def find_trainer(
    names: Iterable[str],
    namespace: Mapping[str, object],
    cell: CellText | None,
    history: Sequence[str],
) -> Trainer | None:
    """Return the trainer among the names of a cell, where its text or an earlier cell's shows how it was made.

    `history` has the texts of the cells so far, by their numbers.
    """
    for name in sorted(names):
        library, kind = _kind_of(namespace[name])
        found = (cell, _earlier(name, namespace, kind, history)) if kind else ()
        for text, call in calls(filter(None, found), kind):
            return Trainer(library, text, call)
    return None


def _kind_of(value: object) -> tuple[str, str]:
    """Return the library of a trainer or of its arguments, and the class that is told how to train; else nothing."""
    bases = _bases(value)
    if any(str(module).startswith(_LIGHTNING) and name == "Trainer" for module, name in bases):
        return "lightning", name_of_type(type(value))
    if ("transformers.trainer", "Trainer") in bases:
        value = attributes_of(value).get("args")
        bases = _bases(value)
    is_told = ("transformers.training_args", "TrainingArguments") in bases
    return ("transformers", name_of_type(type(value))) if is_told else ("", "")


def _bases(value: object) -> set[tuple[object, str]]:
    """Return the modules and the names of an object's classes, without a word from a metaclass."""
    return {(dict_of(each).get("__module__"), name_of_type(each)) for each in mro_of(type(value))}


def _earlier(
    name: str, namespace: Mapping[str, object], kind: str, history: Sequence[str]
) -> CellText | None:
    """Return the statements of earlier cells that made a trainer and its arguments, as one text."""
    made = {  # the last statement outside of functions that bound a variable
        target.id: (number, text.code(node))
        for number, text in enumerate(map(texts.parse, history))
        if text is not None
        for node in text.tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if name not in made:
        return None
    used = sorted(names_in(ast.parse(made[name][1])) - {name})
    told = [
        made[each]
        for each in used
        if each in made and name_of_type(type(namespace.get(each))) == kind
    ]
    both = dict.fromkeys((*told, made[name]))
    return texts.parse("\n".join(statement for _, statement in both), f"In [{next(iter(both))[0]}]")
