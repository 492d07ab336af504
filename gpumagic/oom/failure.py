"""What is read of a failure before the release, while the frames of its exception are whole.

What the code was working with becomes plain records: its text, its tensors, the failing operation, models, optimizers.
No frame and no tensor outlives the call.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic.advice.facts import Collection as Collected
from gpumagic.advice.facts import Facts, TensorFact
from gpumagic.heap.branches import attributes_of, class_attribute, dict_of, stored_attribute
from gpumagic.heap.holders import Identities
from gpumagic.memory import allocator, devices
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.oom import ownership, recognition
from gpumagic.oom.recognition import OomEvent
from gpumagic.oom.watch import CellWatch, Refusal
from gpumagic.source import cell_code, frames
from gpumagic.source import text as texts
from gpumagic.source.text import CellText

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Figures = Mapping[str, AllocatorStats]
NOT_IN_USE = AllocatorStats(0, 0, 0)
"""The figures of a backend that was not in use yet."""


class Failure(NamedTuple):
    """What is known of a failure while its frames are whole; it holds none of them."""

    event: OomEvent
    facts: Facts
    """Those that the exception and its frames tell."""
    notes: list[str]


@dataclass(frozen=True, slots=True)
class GuardState:
    """The session of a guarded block, as it was when the block began."""

    namespace: Mapping[str, object]
    """The notebook's variables, not a copy."""
    bound: Identities
    """What they were bound to."""
    before: Figures
    shell: InteractiveShell | None = None
    outside: frozenset[int] = frozenset()
    """The ids of exceptions that were being handled already."""
    watch: CellWatch = field(default_factory=lambda: CellWatch({}))


def examine(error: Exception, state: GuardState) -> Failure | None:
    """Return what the error and its frames tell, or None if it is not out-of-memory."""
    figures = allocator.all_device_stats()
    event, capacities = recognise(error, state.outside, figures)
    if event is None:
        return None
    facts, notes = Facts(event.kind.name, device=_device(event, capacities)), []
    try:
        facts = read_frames(facts, error, state)
    except Exception as fault:  # our own failure must not cost the user the release
        notes.append(f"The failing frames could not be read: {type(fault).__name__}: {fault}")
    is_pinning = facts.functions & {"pin_memory", "_pin_memory_loop"}
    # A copy back to the host that does not wait pins memory as well
    if event.kind.name == "cuda runtime" and (
        is_pinning or re.search("pin_memory|non_blocking", facts.code or "")
    ):
        event = event._replace(kind=recognition.PINNING)
        facts = replace(facts, device=_device(event, capacities))
    kind, numbers, device = event.kind, event.numbers, facts.device or ""
    requested, at_failure = _at_the_instant(
        event, figures.get(device), state.watch.refusals.get(device)
    )
    now = devices.available_memory() if kind.memory == "host" else capacities.get(device)
    free, capacity = now if now is not None else (None, numbers.capacity)
    cached = at_failure.reserved - at_failure.allocated if at_failure is not None else None
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_ALLOC_CONF", ""
    )
    can_expand = "expandable_segments" in event.text or "max_split_size_mb" in event.text
    facts = replace(
        facts,
        kind=kind.name,
        memory=kind.memory,
        requested=requested,
        capacity=capacity,
        free=free if numbers.free is None else numbers.free,
        unallocated=cached if numbers.unallocated is None else numbers.unallocated,
        before=state.before.get(device) or (NOT_IN_USE if at_failure is not None else None),
        at_failure=at_failure,
        from_allocator=kind.allocator,
        segments_can_expand=kind.allocator
        and can_expand
        and "expandable_segments:True" not in settings,
    )
    return Failure(event, facts, notes)


Capacities = Mapping[str, tuple[int, int] | None]
"""Free and total bytes of each device where memory was taken."""


def recognise(
    error: Exception, outside: Collection[int], figures: Figures
) -> tuple[OomEvent | None, Capacities]:
    """Return what the error says of itself, None if it is not out-of-memory, and what the devices have."""
    capacities: dict[str, tuple[int, int] | None] = {}
    for device, each in figures.items():
        if (
            each.reserved
        ):  # asking the driver about an idle CUDA device would create a context on it
            try:
                capacities[device] = allocator.mem_get_info(device)
            except RuntimeError:  # a sticky CUDA error makes every further call fail
                capacities[device] = None
    free = min((each[0] for each in capacities.values() if each is not None), default=None)
    return recognition.recognise(error, free, outside), capacities


def _at_the_instant(
    event: OomEvent, now: AllocatorStats | None, refusal: Refusal | None
) -> tuple[int | None, AllocatorStats | None]:
    """Return what was asked for, and the figures as they were when the allocator gave up.

    What an unwinding frame kept on its stack, such as a comprehension's list, is freed before it can be read. The
    allocator's text has what was allocated, to two decimals; it is used where it is clearly more.
    """
    requested, allocated = event.numbers.requested, event.numbers.allocated
    if not event.kind.allocator:
        return requested, now
    if refusal is not None and abs((requested or 0) - refusal[0]) <= 0.01 * refusal[0]:
        return refusal
    if now is not None and allocated is not None and allocated > now.allocated * 1.01:
        now = now._replace(allocated=min(allocated, now.reserved))
    return requested, now


def _device(event: OomEvent, capacities: Capacities) -> str | None:
    """Return the device that failed: the one the text names, else the fullest in use of its type."""
    if event.kind.memory != "device":
        return "cpu"
    if event.device is not None:
        return event.device
    free = {
        device: now[0] if now is not None else 0
        for device, now in capacities.items()
        if event.kind.backend in (None, Device.parse(device).backend)
    }
    return min(free, key=lambda device: free[device], default=None)


FrameLine = tuple[FrameType, int]
"""A frame and the line it stood on."""
_MAGICS_ABOVE = re.compile(r"\A(%%.*\n)+")
"""What the text of a cell that was run again has above its body, as it was typed."""
_FUNCTIONAL = str(Path("torch", "nn", "functional.py"))


def read_frames(facts: Facts, error: BaseException, state: GuardState) -> Facts:
    """Return the facts with where the error happened, what its frames worked with, and what is on the device."""
    stack = list(frames.frames_in(error, state.outside))
    facts = replace(facts, functions=frozenset(frame.f_code.co_name for frame, _ in stack))
    users = [
        each
        for each in stack
        if frames.is_user_code(each[0]) or each[0].f_globals is state.namespace
    ]
    return _with_values(_with_place(facts, users, state), stack, users, state) if users else facts


def _with_place(facts: Facts, users: list[FrameLine], state: GuardState) -> Facts:
    own = [each for each in users if each[0].f_globals is state.namespace] or users
    filename = own[0][0].f_code.co_filename
    frame, line = [each for each in own if each[0].f_code.co_filename == filename][-1]
    deepest, its_line = users[-1]
    text = _source(frame)
    cell, inside = cell_code.read_cell(text) if text else None, None
    if deepest.f_code.co_filename != filename:
        code = frames.code_at(deepest, its_line)
        inside = f"{deepest.f_code.co_name}(), line {its_line}" + (f": {code}" if code else "")
    return replace(
        facts,
        line=line,
        code=frames.code_at(frame, line),
        source=text or None,
        cell=cell,
        inside=inside,
        calls_backward=any("backward" in frame.f_code.co_names for frame, _ in own),
        autocast=any("autocast" in frame.f_code.co_names for frame, _ in own),
    )


def _with_values(
    facts: Facts, stack: list[FrameLine], users: list[FrameLine], state: GuardState
) -> Facts:
    import torch

    (outermost, _), (frame, line) = users[0], users[-1]
    device, names = facts.device or "cpu", list(state.namespace.items())
    text = _text(outermost, frame, line, state.shell)
    values = {**dict(_values(facts.text, outermost)), **dict(_values(text, frame))}
    named = [(name, value, False) for name, value in names if not name.startswith("_")]
    locals_of = (each.f_locals for each, _ in users if each.f_locals is not each.f_globals)
    named += [
        (name, value, True) for variables in locals_of for name, value in list(variables.items())
    ]
    # The deepest function of torch.nn.functional with its tensors
    inside = next(
        (each for each, _ in reversed(stack) if each.f_code.co_filename.endswith(_FUNCTIONAL)), None
    )
    # The module that `Module.to` or its like was moving
    moved = (each.f_locals.get("self") for each, _ in stack if each.f_code.co_name == "_apply")
    moving: Any = next((each for each in moved if issubclass(type(each), torch.nn.Module)), None)
    weights = moving.parameters() if moving is not None else ()
    models, optimizers = ownership.find_models_and_optimizers(named, device)
    return replace(
        facts,
        failing=text,
        tensors=_tensors(values),
        numbers={code: value for code, value in values.items() if type(value) in (int, float)},
        collections=_collections(values, device),
        sums=frozenset(
            name
            for name, value in (*(each[:2] for each in named), *values.items())
            if ownership.kind_of(value) == "module"
            and attributes_of(value).get("reduction") == "sum"
        ),
        moving=sum(each.nbytes for each in weights if each.dtype == torch.float32),
        operands=_tensors(inside.f_locals) if inside is not None else {},
        models_there=models,
        optimizers_there=optimizers,
    )


def _text(
    outermost: FrameType, frame: FrameType, line: int, shell: object | None
) -> CellText | None:
    filename = frame.f_code.co_filename
    known: Any = getattr(getattr(shell, "compile", None), "_filename_map", {})
    number = known.get(filename)
    if number is None and filename.startswith(
        "<ipython-input-"
    ):  # IPython 7 writes it into the name
        number = filename.split("-")[2]
    cell = f"In [{number}]" if number is not None else "another cell"
    source = _source(frame)
    return (
        texts.parse(source, "" if filename == outermost.f_code.co_filename else cell, line)
        if source
        else None
    )


def _source(frame: FrameType) -> str:
    """Return the text of the cell that a frame runs; of a file nothing, which is not for a cell's advice to change."""
    filename = frame.f_code.co_filename
    text = "" if Path(filename).exists() else "".join(linecache.getlines(filename, frame.f_globals))
    return _MAGICS_ABOVE.sub(lambda found: "\n" * found[0].count("\n"), text)


def _tensors(values: Mapping[str, object]) -> dict[str, TensorFact]:
    return {code: fact for code, value in values.items() if (fact := _fact(value)) is not None}


def _collections(values: Mapping[str, Any], device: str) -> dict[str, Collected]:
    """Return the collections of tensors on the device among some values, and those that the notebook's objects have."""
    found = {code: _collected(value, device) for code, value in values.items()}
    for code, value in values.items():
        is_of_the_notebook = dict_of(type(value)).get("__module__") == "__main__"
        if found[code] is None and is_of_the_notebook and ownership.kind_of(value) != "module":
            kept = (
                (_collected(each, device), f"{code}.{name}")
                for name, each in attributes_of(value).items()
            )
            largest = max(
                ((each, place) for each, place in kept if each),
                key=lambda one: one[0].nbytes,
                default=None,
            )
            found[code] = largest and replace(largest[0], place=largest[1])
    return {code: each for code, each in found.items() if each is not None}


def _collected(value: Any, device: str) -> Collected | None:
    members = (
        list(value)
        if type(value) in (list, deque)
        else list(value.values())
        if type(value) is dict
        else []
    )
    if not any(_fact(part) for each in members[:8] for part in _parts(each)):
        return None  # do not read all of a long list of numbers
    records = [each for each in members if _kind_of_record(each)]
    parts = {id(part): part for each in members for part in _parts(each)}
    facts = [
        fact for fact in map(_fact, parts.values()) if fact is not None and fact.device == device
    ]
    if not facts or 0 < len(records) < len(members):
        return None
    return Collected(
        len(facts),
        sum(fact.nbytes for fact in facts),
        sum(fact.graph for fact in facts),
        not any(fact.shape for fact in facts),
        is_dict=type(value) is dict,
        member=_kind_of_record(members[0]) or "tensor",
    )


def _kind_of_record(record: Any) -> str:
    """Return what a member of a collection is that consists of tensors and more; nothing of a tensor or a number."""
    kind = ownership.kind_of(record)
    if kind in ("module", "optimizer", "list", "tuple", "dict"):
        return kind
    return (
        ("named tuple" if hasattr(type(record), "_make") else "tuple")
        if issubclass(type(record), tuple)
        else ""
    )


def _parts(record: Any) -> Iterable[Any]:
    """Return what a tuple, a list, a dict, a module or an optimizer has; of anything else itself."""
    kind = _kind_of_record(record)
    if kind in ("module", "optimizer"):
        return ownership.tensors_of(record)
    return record.values() if kind == "dict" else record if kind else (record,)


def _values(text: CellText | None, frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame, their stored attributes and the values of dicts, by the text that names them."""
    globals_read = frame.f_globals.keys() & frame.f_code.co_names
    variables = {**{name: frame.f_globals[name] for name in globals_read}, **frame.f_locals}
    for node in text.nodes() if text is not None else ():
        if isinstance(node, ast.Name) and node.id in variables:
            yield node.id, variables[node.id]
        owner: Any = variables.get(getattr(getattr(node, "value", None), "id", ""))
        if isinstance(node, ast.Attribute) and owner is not None:
            read = class_attribute if isinstance(owner, type) else stored_attribute
            yield ast.unparse(node), read(owner, node.attr)
        elif isinstance(node, ast.Subscript) and issubclass(type(owner), dict) and text is not None:
            index = node.slice
            key: Any = (
                variables.get(index.id)
                if isinstance(index, ast.Name)
                else getattr(index, "value", None)
            )
            if type(key) in (str, int):
                yield (
                    text.code(node),
                    dict.get(owner, key),
                )  # not by its own methods: a defaultdict would grow


def _fact(value: object) -> TensorFact | None:
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    if not issubclass(type(value), torch.Tensor):
        array: Any = value
        package, name = type(value).__module__.partition(".")[0], type(value).__name__
        if (package, name) == ("pandas", "DataFrame"):  # of which `values` makes one array
            dtypes = set(map(str, array.dtypes))
            return TensorFact(
                array.shape, dtypes.pop() if len(dtypes) == 1 else "object", 8 * array.size, "cpu"
            )
        is_array = (package, name) == ("numpy", "ndarray")
        return TensorFact(array.shape, str(array.dtype), array.nbytes, "cpu") if is_array else None
    tensor: Any = value
    with torch._C.DisableTorchFunction():
        if tensor.is_nested or issubclass(
            type(tensor), torch.nn.parameter.UninitializedTensorMixin
        ):
            return None  # it has no one shape, or none yet, and raises where it is asked for one
        return TensorFact(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            nbytes=tensor.numel() * tensor.element_size(),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            graph=tensor.grad_fn is not None,
        )
