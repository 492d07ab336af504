"""What torch's errors about devices mean for the line that failed, and the line that fixes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gpumagic.report.units import LARGE, size
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
    expression: str | None = None
    """The expression that raised, if Python reports it."""
    operands: tuple[Operand, ...] = ()
    inner: frozenset[str] = frozenset()
    """Names that a comprehension or a lambda of the line binds: only within it can they be moved."""
    function: str | None = None
    """The function whose line it is."""


Rule = Callable[[DeviceError], "tuple[str, str | None, str]"]
"""Takes an error; returns what is wrong, the line that fixes it, and what else helps."""


def is_known(text: str) -> bool:
    """Return whether an exception's text is one that the rules explain."""
    return _rule(text) is not None


def explain(error: DeviceError) -> Explanation | None:
    """Return what an error means, or None if no rule matches it or the operands contradict the rule."""
    rule = _rule(error.text)
    if rule is None:
        return None
    what, fix, note = rule(error)
    if not what:
        return None
    return Explanation(what, fix, note, error.line, error.code, error.operands, error.function)


def _rule(text: str) -> Rule | None:
    return next((rule for pattern, rule in _RULES.items() if re.search(pattern, text)), None)


# ---- Operands on different devices


def _different_devices(error: DeviceError) -> tuple[str, str | None, str]:
    placed = _placed(error)
    devices = {device for each in placed for device in each.devices}
    if len(devices) < 2:
        return _unnamed_operand(error, placed, devices)
    target, others = _target(placed, error.device), misplaced(error)
    fixes = [_move_code(error, each, target) for each in others]
    return f"{_locations(placed)}.", "; ".join(fixes), ""


def _placed(error: DeviceError) -> list[Operand]:
    return [each for each in error.operands if each.kind != "device"]


def misplaced(error: DeviceError) -> list[Operand]:
    """Return what the line has elsewhere than where all should be; none where its names are on one device."""
    placed = _placed(error)
    target = _target(placed, error.device)
    others = [each for each in placed if each.devices != (target,)]
    return others if len({device for each in placed for device in each.devices}) > 1 else []


def is_given(error: DeviceError, parameters: Collection[str]) -> bool:
    """Return whether all that is misplaced comes by parameters of the function, so that its caller can mend it."""
    found = misplaced(error) if _rule(error.text) is _different_devices else []
    return bool(found) and all(_root(each) in parameters and not each.is_unregistered for each in found)


def _root(operand: Operand) -> str:
    """Return the variable by which an operand is reached."""
    return re.split(r"\W", operand.code, maxsplit=1)[0]


def _unnamed_operand(error: DeviceError, placed: Sequence[Operand], devices: set[str]) -> tuple[str, str | None, str]:
    """Explain an error where no name on the line is on another device: something created in the line is."""
    named = _devices_in(error.text)
    if "Input type" in error.text and len(named) < 2:
        return "", None, ""  # the dtypes differ, and not the devices
    if not placed:
        where = f" ({' and '.join(named)})" if named else ""
        return f"The operands of the line are on different devices{where}; none of them has a name in it.", None, ""
    others = [each for each in named if each not in devices]
    where = f" is on {others[0]}" if others else " is elsewhere"
    what = f"{_locations(placed)}; what is made in the line or inside the call{where}."
    if others != [error.device]:
        return what, None, ""
    # New tensors are where the cell runs, and these are not.
    fixes = "; ".join(_move_code(error, each, error.device) for each in placed)
    return what, fixes, ""


def _target(placed: Sequence[Operand], device: str) -> str:
    """Return where all should be: with the data that is indexed, else where the cell runs, else on a device."""
    indexed = [each for each in placed if not each.is_index]
    if len(indexed) < len(placed) and len({each.devices for each in indexed}) == 1 and len(indexed[0].devices) == 1:
        return indexed[0].devices[0]
    found = [each for operand in placed for each in operand.devices]
    if device in found:
        return device
    return next((each for each in found if each != "cpu"), device)


def _move_code(error: DeviceError, operand: Operand, target: str) -> str:
    code, move = operand.code, f'{operand.code}.to("{target}")'
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
    parts = []
    for number, each in enumerate(operands):
        of = "'s parameters and state are" if each.kind == "optimizer" else " is" if number == 0 else ""
        nbytes = f" ({size(each.nbytes)})" if each.nbytes >= LARGE else ""
        parts.append(f"{each.code}{nbytes}{of} on {' and '.join(each.devices)}")
    return ", ".join(parts)


def _devices_in(text: str) -> list[str]:
    """Return the devices that a message names, such as ``["cuda:0", "cpu"]``."""
    found = re.findall(r"\b(cpu|meta|[a-z]+:\d+)\b", text)
    if "torch.FloatTensor" in text and re.search(r"torch\.\w+\.FloatTensor", text):
        found += ["cpu", re.findall(r"torch\.(\w+)\.FloatTensor", text)[0]]
    return list(dict.fromkeys(found))


# ---- Other errors


def _generator(error: DeviceError) -> tuple[str, str | None, str]:
    wanted, found = re.findall(r"'(\S+?)'", error.text)[:2]
    target = error.device if error.device.startswith(wanted) else wanted
    made = f'torch.Generator("{target}")'
    names = [each.code for each in error.operands if each.kind == "generator"]
    what = f"A generator works on its own device: {names[0] if names else 'this one'} is on {found}, the numbers go to"
    return f"{what} {wanted}.", f"{names[0]} = {made}" if names else f"generator={made}", ""


def _numpy(error: DeviceError) -> tuple[str, str | None, str]:
    there = [each for each in error.operands if each.kind == "tensor" and each.devices != ("cpu",)]
    what = "numpy works in the host's memory"
    if not there:
        device = next(iter(_devices_in(error.text)), "a device")
        return f"{what}, and the tensor is on {device}.", None, "Put .cpu() before it."
    what = f"{_locations(there)}, and {what}."
    call = ".detach().cpu()" if any(each.requires_grad for each in there) else ".cpu()"
    return what, "; ".join(f"{each.code}{call}" for each in there), "It is a copy, and the host waits."


def _ordinal(error: DeviceError) -> tuple[str, str | None, str]:
    asked = re.findall(r"[\"']([a-z]+:\d+)[\"']", error.expression or "")
    asked += [each for operand in error.operands if operand.kind == "device" for each in operand.devices]
    missing = [each for each in asked if each not in error.here]
    there = ", ".join(each for each in error.here if each not in ("cpu", "meta"))
    if not missing:
        return f"The line asks for a device number that does not exist; there are {there}.", None, ""
    return f"There is no {missing[0]} here; there are {there}.", None, "Numbers start at 0."


def _deserialize(error: DeviceError) -> tuple[str, str | None, str]:
    what = "The file was saved from a device that is not here, and without map_location a tensor goes back to its own."
    return what, f'torch.load(..., map_location="{error.device}")', ""


def _fork(error: DeviceError) -> tuple[str, str | None, str]:
    what = "A forked process cannot use a device that its parent has used."
    if "DataLoader" in error.text:
        what += " The workers of a DataLoader are forked, and the dataset or its collate_fn uses the device in them."
        fix = f'batch = batch.to("{error.device}")  # in the loop; the dataset stays on the host'
        return what, fix, 'Or DataLoader(..., multiprocessing_context="spawn"), or num_workers=0.'
    return what, 'torch.multiprocessing.set_start_method("spawn")', "Before the first process is started."


def _pin(error: DeviceError) -> tuple[str, str | None, str]:
    what = f"Only host memory can be pinned; new tensors are on {error.device} here, those of a dataset too."
    note = 'Or make the data with device="cpu". The Trainer of transformers takes dataloader_pin_memory=False.'
    return what, "DataLoader(..., pin_memory=False)", note


_RULES: dict[str, Rule] = {
    r"Attempting to deserialize object on": _deserialize,
    r"Cannot re-initialize \w+ in forked subprocess": _fork,
    r"invalid device ordinal": _ordinal,
    r"cannot pin '\S+' only dense CPU tensors can be pinned": _pin,
    r"can't convert \S+ device type tensor to numpy": _numpy,
    r"Expected all tensors to be on the same device": _different_devices,
    r"(tensors|tensor) (are|is) not (at|on) the same device": _different_devices,
    r"indices should be either on": _different_devices,
    r"Input type \(.*\) and weight type \(.*\) should be the same": _different_devices,
    r"Expected a '\S+' device type for generator but found '\S+'": _generator,
    r"different from other tensors on": _different_devices,
    r"Placeholder storage has not been allocated on MPS": _different_devices,
}
"""Pattern of a message, on any backend -> the rule for it."""
