"""What an error about devices means: which line raised it, what is on which device, and the line that fixes it.

`x`, `self.mask`, `batch["labels"]`, `model.layers[0]` are resolved through instance attributes and built-in containers;
properties, results of methods and anything else that would run code are left out. The result is text and keeps no
frame.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import CodeType, FrameType, TracebackType
from typing import Any

from gpumagic._compat import torch_private
from gpumagic.heap import kinds
from gpumagic.heap.branches import stored_attribute
from gpumagic.memory import allocator
from gpumagic.report.units import LARGE, size
from gpumagic.source import frames
from gpumagic.source.frames import (
    MISSING,
    cell_file,
    is_function_frame,
    is_user_code,
    lines_above,
    lines_of,
)
from gpumagic.source.text import failing_node, names_in, parse_lines
from gpumagic.transfers.placed import bytes_by_device, kind_of
from gpumagic.transfers.report import Explanation, Operand


@dataclass(frozen=True, slots=True)
class DeviceError:
    """What the rules know of an error."""

    text: str
    """The exception's message."""
    device: str
    """The device the cell ran on."""
    here: tuple[str, ...] = ()
    """The devices of the machine."""
    line: int | None = None
    code: str | None = None
    operands: tuple[Operand, ...] = ()
    inner: frozenset[str] = frozenset()
    """Names that a comprehension or a lambda of the line binds: only within it can they be moved."""
    function: str | None = None
    """The function whose line it is."""


Rule = Callable[[DeviceError], "tuple[str, str | None]"]
"""Takes an error; returns what is wrong, and the line that fixes it."""


def explain(
    error: BaseException, namespace: Mapping[str, Any], device: str
) -> Explanation | None:
    """Return what an error about devices means, or None for any other error and for one that cannot be read."""
    try:
        text = str(error)
        if not isinstance(error, Exception) or _rule(text) is None:
            return None
        devices = (*allocator.accelerators(), "cpu", "meta")
        return interpret(_read(error, DeviceError(text, device, devices), namespace))
    except Exception:  # a failure here must not cost the user the report
        return None


def interpret(error: DeviceError) -> Explanation | None:
    """Return what an error means, or None if no rule matches it or the operands contradict the rule."""
    rule = _rule(error.text)
    if rule is None:
        return None
    what, fix = rule(error)
    if not what:
        return None
    return Explanation(
        what, fix, error.line, error.code, error.operands, error.function
    )


def _rule(text: str) -> Rule | None:
    for pattern, rule in _RULES.items():
        if re.search(pattern, text):
            return rule
    return None


# ---- The line that failed, and what it names


def _read(
    error: Exception, known: DeviceError, namespace: Mapping[str, Any]
) -> DeviceError:
    """Return what is known of the innermost line of the user's, or of the call that gave it what is elsewhere."""
    own = []
    for step in frames.traceback_steps(error.__traceback__):
        if step.tb_frame.f_globals is namespace or is_user_code(step.tb_frame):
            own.append(step)
    if not own:
        return known
    error_there = _at_line(own[-1], known)
    for step, caller in pairwise(reversed(own)):
        if not _was_given(step.tb_frame.f_code, misplaced(error_there)):
            break
        outer = _at_line(caller, known)
        if not misplaced(outer):
            break
        error_there = outer
    return error_there


def _was_given(code: CodeType, strays: Sequence[Operand]) -> bool:
    """Return whether a function's caller gave it all that is on another device."""
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for stray in strays:
        if stray.is_unregistered or _root(stray) not in parameters:
            return False
    return bool(strays)


def _at_line(step: TracebackType, known: DeviceError) -> DeviceError:
    """Return what is known of the line that a step of the traceback stands on."""
    frame, line = step.tb_frame, step.tb_lineno
    file = cell_file(frame)
    above = lines_above(frame, file) or 0
    lines = lines_of(file)[above:]
    code = frames.code_at(frame, line)
    if not code and 0 < line <= len(lines):
        code = lines[line - 1].strip()
    known = replace(
        known, line=line + above, code=code or None, function=_function_of(frame)
    )
    node = failing_node(step, lines)
    if node is None:
        return known
    operands = _operands_of(node, frames.resolve_names(frame, names_in(node)))
    return replace(known, operands=operands, inner=_bound_inside(lines, line))


def _function_of(frame: FrameType) -> str | None:
    """Return the function that a frame runs; None for the cell itself, to which a comprehension's frame belongs."""
    code = frame.f_code
    function: str = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[
        2
    ]
    is_named = is_function_frame(frame) and not function.startswith("<")
    return function if is_named else None


def _bound_inside(lines: tuple[str, ...], line: int) -> frozenset[str]:
    """Return the names that comprehensions and lambdas on a line bind."""
    tree = parse_lines(dict(enumerate(lines, 1)))
    names: set[str] = set()
    if tree is None:
        return frozenset()
    for node in ast.walk(tree):
        if isinstance(node, _INNER) and node.lineno <= line <= (
            node.end_lineno or line
        ):
            for inner in ast.walk(node):
                if isinstance(inner, ast.arg):
                    names.add(inner.arg)
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    names.add(inner.id)
    return frozenset(names)


_INNER = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def _operands_of(
    expression: ast.AST, variables: Mapping[str, Any]
) -> tuple[Operand, ...]:
    """Return the operands of an expression that have a device, each once, in order of appearance."""
    operands: dict[str, Operand] = {}
    for node, is_index in _paths(expression, is_index=False):
        operand = _describe_path(node, variables, is_index)
        if operand is not None:
            operands.setdefault(operand.code, operand)
    return tuple(operands.values())


def _paths(node: ast.AST, *, is_index: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the outermost names, attributes and subscripts, and whether each is an index of another."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        yield node, is_index
    if isinstance(node, ast.Subscript):
        yield from _paths(node.slice, is_index=True)
        node = node.value
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name | ast.Lambda | ast.FunctionDef | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(node):
        yield from _paths(child, is_index=is_index)


def _describe_path(
    node: ast.expr, variables: Mapping[str, Any], is_index: bool
) -> Operand | None:
    """Describe a path, or the part of it that has a device: for ``x.T`` that is ``x``."""
    steps: list[ast.expr] = [node]
    while isinstance(steps[-1], ast.Attribute | ast.Subscript):
        steps.append(steps[-1].value)
    value: Any = MISSING
    described = None
    for step in reversed(steps):
        owner = value
        value = _resolve_step(step, owner, variables)
        if value is MISSING:
            break
        operand = _describe(ast.unparse(step), value, owner, is_index)
        described = operand or described
        if kind_of(value) == "tensor":
            break
    return described


def _resolve_step(step: ast.expr, value: Any, variables: Mapping[str, Any]) -> Any:
    if isinstance(step, ast.Name):
        return variables.get(step.id, MISSING)
    if value is MISSING:
        return MISSING
    if isinstance(step, ast.Attribute):
        return stored_attribute(value, step.attr, MISSING)
    if isinstance(step, ast.Subscript):
        return _item(value, step.slice, variables)
    return MISSING


def _item(value: Any, index: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return an item of a built-in container by a constant or a variable."""
    if isinstance(index, ast.Constant):
        key: Any = index.value
    elif isinstance(index, ast.Name):
        key = variables.get(index.id, MISSING)
    else:
        return MISSING
    if type(value) is dict and type(key) in (str, int):
        return value.get(key, MISSING)
    if type(value) in (list, tuple) and type(key) is int:
        return value[key] if -len(value) <= key < len(value) else MISSING
    return MISSING


def _describe(code: str, value: Any, owner: Any, is_index: bool) -> Operand | None:
    import torch

    kind = kind_of(value)
    if kind is None:
        return None
    totals = bytes_by_device(value, kind)
    if not totals:
        return None
    is_tensor = kind == "tensor"
    is_dict = kind == "container" and issubclass(type(value), dict)
    return Operand(
        code,
        devices=tuple(device for device, _ in totals.most_common()),
        nbytes=sum(totals.values()),
        kind="dict" if is_dict else kind,
        is_unregistered=kind_of(owner) == "module" and not _is_registered(owner, value),
        is_index=is_index,
        requires_grad=is_tensor
        and bool(value.requires_grad)
        and torch.is_grad_enabled(),
    )


def _is_registered(module: Any, value: Any) -> bool:
    """Return whether a module has an object as a parameter, a buffer or a submodule."""
    for kind in torch_private.REGISTERED:
        for _, registered in kinds.registered(module, kind):
            if registered is value:
                return True
    return False


# ---- Operands on different devices


def _different_devices(error: DeviceError) -> tuple[str, str | None]:
    placed = error.operands
    devices = _devices_of(placed)
    if len(devices) < 2:
        return _unnamed_operand(error, devices)
    target = _target(placed, error.device)
    fixes = [_move_code(error, operand, target) for operand in misplaced(error)]
    return f"{_locations(placed)}.", "; ".join(fixes)


def _devices_of(operands: Sequence[Operand]) -> set[str]:
    devices: set[str] = set()
    for operand in operands:
        devices.update(operand.devices)
    return devices


def misplaced(error: DeviceError) -> list[Operand]:
    """Return what the line has elsewhere than where all should be; none where its names are on one device."""
    placed = error.operands
    if _rule(error.text) is not _different_devices or len(_devices_of(placed)) < 2:
        return []
    target = _target(placed, error.device)
    return [operand for operand in placed if operand.devices != (target,)]


def _root(operand: Operand) -> str:
    """Return the variable by which an operand is reached."""
    return re.split(r"\W", operand.code, maxsplit=1)[0]


def _unnamed_operand(error: DeviceError, devices: set[str]) -> tuple[str, str | None]:
    """Explain an error where no name on the line is on another device: something created in the line is."""
    named = _devices_in(error.text)
    if "Input type" in error.text and len(named) < 2:
        return "", None  # the dtypes differ, and not the devices
    placed = error.operands
    if not placed:
        where = f" ({' and '.join(named)})" if named else ""
        what = f"The operands of the line are on different devices{where}; none of them has a name in it."
        return what, None
    others = [device for device in named if device not in devices]
    where = f" is on {others[0]}" if others else " is elsewhere"
    what = f"{_locations(placed)}; what is made in the line or inside the call{where}."
    if others != [error.device]:
        return what, None
    # New tensors are where the cell runs, and these are not.
    fixes = [_move_code(error, operand, error.device) for operand in placed]
    return what, "; ".join(fixes)


def _target(placed: Sequence[Operand], device: str) -> str:
    """Return where all should be: with the data that is indexed, else where the cell runs, else on a device."""
    indexed = [operand for operand in placed if not operand.is_index]
    if len(indexed) < len(placed):
        homes = {operand.devices for operand in indexed}
        if len(homes) == 1:
            (home,) = homes
            if len(home) == 1:
                return home[0]
    found: dict[str, None] = {}
    for operand in placed:
        found.update(dict.fromkeys(operand.devices))
    if device in found:
        return device
    return next((other for other in found if other != "cpu"), device)


def _move_code(error: DeviceError, operand: Operand, target: str) -> str:
    code = operand.code
    move = f'{code}.to("{target}")'
    if operand.kind == "module" or _root(operand) in error.inner:
        return move
    if operand.kind == "optimizer":
        return f"{code}.load_state_dict({code}.state_dict())  # takes its state to its parameters"
    if operand.kind == "dict":
        return f'{code} = {{key: each.to("{target}") for key, each in {code}.items()}}'
    if operand.kind == "container":
        return f'{code} = [each.to("{target}") for each in {code}]'
    if operand.is_unregistered:
        owner, _, name = code.rpartition(".")
        return f'{owner}.register_buffer("{name}", ...)  # in __init__, so that .to("{target}") takes it along'
    return f"{code} = {move}"


def _locations(operands: Sequence[Operand]) -> str:
    """Return ``"x (2.0 GiB) is on cpu, model on simgpu:0"``."""
    verb = " is"
    parts = []
    for operand in operands:
        if operand.kind == "optimizer":
            verb = "'s parameters and state are"
        nbytes = f" ({size(operand.nbytes)})" if operand.nbytes >= LARGE else ""
        parts.append(f"{operand.code}{nbytes}{verb} on {' and '.join(operand.devices)}")
        verb = ""
    return ", ".join(parts)


def _devices_in(text: str) -> list[str]:
    """Return the devices that a message names, such as ``["cuda:0", "cpu"]``."""
    found = re.findall(r"\b(cpu|meta|[a-z]+:\d+)\b", text)
    if "torch.FloatTensor" in text and re.search(r"torch\.\w+\.FloatTensor", text):
        found += ["cpu", re.findall(r"torch\.(\w+)\.FloatTensor", text)[0]]
    return list(dict.fromkeys(found))


# ---- Other errors


def _generator(error: DeviceError) -> tuple[str, str | None]:
    wanted, found = re.findall(r"'(\S+?)'", error.text)[:2]
    target = error.device if error.device.startswith(wanted) else wanted
    new = f'torch.Generator("{target}")'
    names = [operand.code for operand in error.operands if operand.kind == "generator"]
    if names:
        name, fix = names[0], f"{names[0]} = {new}"
    else:
        name, fix = "this one", f"generator={new}"
    what = f"A generator works on its own device: {name} is on {found}, the numbers go to {wanted}."
    return what, fix


def _numpy(error: DeviceError) -> tuple[str, str | None]:
    elsewhere = []
    for operand in error.operands:
        if operand.kind == "tensor" and operand.devices != ("cpu",):
            elsewhere.append(operand)
    what = "numpy works in the host's memory"
    if not elsewhere:
        device = next(iter(_devices_in(error.text)), "a device")
        return f"{what}, and the tensor is on {device}: put .cpu() before it.", None
    has_graph = any(operand.requires_grad for operand in elsewhere)
    call = ".detach().cpu()" if has_graph else ".cpu()"
    fixes = [f"{operand.code}{call}" for operand in elsewhere]
    return f"{_locations(elsewhere)}, and {what}.", "; ".join(fixes)


def _ordinal(error: DeviceError) -> tuple[str, str | None]:
    accelerators = [device for device in error.here if device not in ("cpu", "meta")]
    what = "The line asks for a device number that does not exist"
    return f"{what}; there are {', '.join(accelerators)}.", None


def _deserialize(error: DeviceError) -> tuple[str, str | None]:
    what = "The file was saved from a device that is not here, and without map_location a tensor goes back to its own."
    return what, f'torch.load(..., map_location="{error.device}")'


def _fork(error: DeviceError) -> tuple[str, str | None]:
    what = "A forked process cannot use a device that its parent has used."
    if "DataLoader" not in error.text:
        return (
            what,
            'torch.multiprocessing.set_start_method("spawn")  # before the first process',
        )
    what += " The workers of a DataLoader are forked: keep its dataset and collate_fn on the host, or num_workers=0."
    return what, f'batch = batch.to("{error.device}")  # in the loop'


def _pin(error: DeviceError) -> tuple[str, str | None]:
    what = f"Only host memory can be pinned; new tensors are on {error.device} here, those of a dataset too."
    return what, 'DataLoader(..., pin_memory=False), or make the data with device="cpu"'


_RULES: dict[str, Rule] = {
    r"Attempting to deserialize object on": _deserialize,
    r"Cannot re-initialize \w+ in forked subprocess": _fork,
    r"invalid device ordinal": _ordinal,
    r"cannot pin '\S+' only dense CPU tensors can be pinned": _pin,
    r"can't convert \S+ device type tensor to numpy": _numpy,
    r"(tensors to be on|tensors? (are|is) not (at|on)) the same device|indices should be either on": _different_devices,
    r"Input type \(.*\) and weight type \(.*\) should be the same": _different_devices,
    r"Expected a '\S+' device type for generator but found '\S+'": _generator,
    r"different from other tensors on|Placeholder storage has not been allocated on MPS": _different_devices,
}
"""Pattern of a message, on any backend -> the rule for it."""
