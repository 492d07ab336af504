"""What torch's complaints about devices mean for the line that failed, and the one line that mends it."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpumagic.report.units import size
from gpumagic.transfers.report import Explanation, Operand

WORTH_SAYING = 1024**2
"""Bytes from which a size is worth a word."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Everything the rules know of a failure."""

    text: str
    """What the exception says."""
    device: str
    """The device the cell ran on."""
    here: tuple[str, ...] = ()
    """The devices of the machine."""
    line: int | None = None
    code: str | None = None
    failing: str | None = None
    """The expression that raised, as far as Python tells."""
    operands: tuple[Operand, ...] = ()
    can_move: bool = False
    """Whether the line's names are the notebook's or a module's, which `--move` can bind."""
    in_cell: bool = True
    """Whether it was a cell, which has a magic, and not a `with` block."""
    function: str | None = None
    """The function whose line it is."""


Rule = Callable[[Failure], "tuple[str, str | None, str]"]
"""Takes a failure; returns what is the matter, the line that mends it, and what else helps."""


def is_known(text: str) -> bool:
    """Return whether an exception's text is one that the rules explain."""
    return _rule(text) is not None


def explain(failure: Failure) -> Explanation | None:
    """Return what a failure means, or None where no rule knows it or the operands belie the rule."""
    rule = _rule(failure.text)
    if rule is None:
        return None
    what, fix, note = rule(failure)
    if not what:
        return None
    return Explanation(what, fix, note, failure.line, failure.code, failure.operands, failure.function)


def _rule(text: str) -> Rule | None:
    return next((rule for pattern, rule in _RULES.items() if re.search(pattern, text)), None)


# ---- Operands on different devices


def _mixed(failure: Failure) -> tuple[str, str | None, str]:
    placed = [each for each in failure.operands if each.kind != "device"]
    devices = {device for each in placed for device in each.devices}
    if len(devices) < 2:
        return _unnamed(failure, placed, devices)
    target = _target(placed, failure.device)
    strays = [each for each in placed if each.devices != (target,)]
    fixes = [_to(each, target) for each in strays]
    what = f"{_places(placed)}: an operator needs all of them on one device."
    return what, "; ".join(fixes), _alternative(failure, strays, target)


def _unnamed(failure: Failure, placed: Sequence[Operand], devices: set[str]) -> tuple[str, str | None, str]:
    """Say what is known where no name on the line is elsewhere: something made in the line is."""
    told = _devices_told(failure.text)
    if "Input type" in failure.text and len(told) < 2:
        return "", None, ""  # the types differ, and not the devices
    if not placed:
        where = f" ({' and '.join(told)})" if told else ""
        return f"The operands of the line are on different devices{where}; none of them has a name in it.", None, ""
    others = [each for each in told if each not in devices]
    where = f" is on {others[0]}" if others else " is elsewhere"
    what = f"{_places(placed)}; what is made in the line or inside the call{where}."
    if others != [failure.device]:
        return what, None, ""
    fixes = "; ".join(_to(each, failure.device) for each in placed)  # new tensors are where the cell runs, these not
    return what, fixes, _alternative(failure, placed, failure.device)


def _target(placed: Sequence[Operand], device: str) -> str:
    """Return where all should be: with the data an index picks from, else where the cell runs, else on a device."""
    picked = [each for each in placed if not each.is_index]
    if len(picked) < len(placed) and len({each.devices for each in picked}) == 1 and len(picked[0].devices) == 1:
        return picked[0].devices[0]
    found = [each for operand in placed for each in operand.devices]
    if device in found:
        return device
    return next((each for each in found if each != "cpu"), device)


def _to(operand: Operand, target: str) -> str:
    code, move = operand.code, f'{operand.code}.to("{target}")'
    if operand.kind == "module":
        return move
    if operand.kind == "optimizer":
        return f"{code}.load_state_dict({code}.state_dict())  # takes its state to its parameters"
    if operand.kind == "container":
        return f'{code} = [each.to("{target}") for each in {code}]'
    if operand.is_unregistered:
        owner, _, name = code.rpartition(".")
        return f'{owner}.register_buffer("{name}", ...)  # in __init__, so that .to("{target}") takes it along'
    return f"{code} = {move}"


def _alternative(failure: Failure, strays: Sequence[Operand], target: str) -> str:
    movable = [each.code for each in strays if each.is_variable and each.kind in ("tensor", "module", "container")]
    if not failure.can_move or target != failure.device or len(movable) != len(strays):
        return ""
    names = ",".join(movable)
    if failure.in_cell:
        return f"Or before the cell: %%ondevice {target} --move {names}"
    return f'Or before the block: with gpumagic.ondevice("{target}", move="{names}")'


def _places(operands: Sequence[Operand]) -> str:
    """Return ``"x (2.0 GiB) is on cpu, model on simgpu:0"``."""
    said = []
    for number, each in enumerate(operands):
        of = "'s parameters and state are" if each.kind == "optimizer" else " is" if number == 0 else ""
        nbytes = f" ({size(each.nbytes)})" if each.nbytes >= WORTH_SAYING else ""
        said.append(f"{each.code}{nbytes}{of} on {' and '.join(each.devices)}")
    return ", ".join(said)


def _devices_told(text: str) -> list[str]:
    """Return the devices an error's text names, such as ``["cuda:0", "cpu"]``."""
    found = re.findall(r"\b(cpu|meta|[a-z]+:\d+)\b", text)
    if "torch.FloatTensor" in text and re.search(r"torch\.\w+\.FloatTensor", text):
        found += ["cpu", re.findall(r"torch\.(\w+)\.FloatTensor", text)[0]]
    return list(dict.fromkeys(found))


# ---- The other complaints


def _generator(failure: Failure) -> tuple[str, str | None, str]:
    wanted, found = re.findall(r"'(\S+?)'", failure.text)[:2]
    target = failure.device if failure.device.startswith(wanted) else wanted
    made = f'torch.Generator("{target}")'
    names = [each.code for each in failure.operands if each.kind == "generator" and each.is_variable]
    what = f"A generator works on its own device: {names[0] if names else 'this one'} is on {found}, the numbers go to"
    return f"{what} {wanted}.", f"{names[0]} = {made}" if names else f"generator={made}", ""


def _numpy(failure: Failure) -> tuple[str, str | None, str]:
    there = [each for each in failure.operands if each.kind == "tensor" and each.devices != ("cpu",)]
    what = "numpy works in the host's memory"
    if not there:
        return f"{what}, and the tensor is on {_device_told(failure)}.", None, "Put .cpu() before it."
    what = f"{_places(there)}, and {what}."
    call = ".detach().cpu()" if any(each.requires_grad for each in there) else ".cpu()"
    return what, _read_first(failure.failing, {each.code for each in there}, call), "It is a copy, and the host waits."


def _device_told(failure: Failure) -> str:
    return next(iter(_devices_told(failure.text)), "a device")


def _ordinal(failure: Failure) -> tuple[str, str | None, str]:
    asked = re.findall(r"[\"']([a-z]+:\d+)[\"']", failure.failing or "")
    asked += [each for operand in failure.operands if operand.kind == "device" for each in operand.devices]
    missing = [each for each in asked if each not in failure.here]
    there = ", ".join(each for each in failure.here if each not in ("cpu", "meta"))
    if not missing:
        return f"The line asks for a device by a number that is not there; there are {there}.", None, ""
    near = difflib.get_close_matches(missing[0], failure.here, n=1) or [failure.device]
    failing = failure.failing or ""
    fix = failing.replace(missing[0], near[0]) if missing[0] in failing else None
    return f"There is no {missing[0]} here; there are {there}.", fix, "Numbers start at 0."


def _deserialize(failure: Failure) -> tuple[str, str | None, str]:
    what = "The file was saved from a device that is not here, and without map_location a tensor goes back to its own."
    fix = _with_keyword(failure.failing or failure.code, "load", f'map_location="{failure.device}"')
    return what, fix or f'torch.load(..., map_location="{failure.device}")', ""


def _fork(failure: Failure) -> tuple[str, str | None, str]:
    what = "A forked process cannot use a device that its parent has used."
    if "DataLoader" in failure.text:
        return (
            what
            + " The workers of a DataLoader are forked, and the dataset or its collate_fn uses the device in them.",
            f'batch = batch.to("{failure.device}")  # in the loop; the dataset stays on the host',
            'Or DataLoader(..., multiprocessing_context="spawn"), or num_workers=0.',
        )
    return what, 'torch.multiprocessing.set_start_method("spawn")', "Before the first process is started."


def _read_first(expression: str | None, codes: set[str], call: str) -> str | None:
    """Return the expression with a call before its `.numpy()`, or behind each of the codes where it has none."""
    if expression is None:
        return None
    tree = ast.parse(expression)
    asked = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "numpy"]
    places = {ast.unparse(each) for each in asked if not isinstance(each, ast.Name) or each.id in codes} or codes

    class Add(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, ast.expr) and ast.unparse(node) in places:
                return ast.parse(ast.unparse(node) + call, mode="eval").body
            return self.generic_visit(node)

    return ast.unparse(Add().visit(tree))


def _with_keyword(expression: str | None, function: str, keyword: str) -> str | None:
    """Return the expression with a keyword added to its call of a function; None where there is no such call."""
    try:
        tree = ast.parse(expression or "")
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == function:
            name, _, value = keyword.partition("=")
            others = [each for each in node.keywords if each.arg != name]
            node.keywords = [*others, ast.keyword(name, ast.parse(value, mode="eval").body)]
            return ast.unparse(tree)
    return None


_RULES: dict[str, Rule] = {
    r"Attempting to deserialize object on": _deserialize,
    r"Cannot re-initialize \w+ in forked subprocess": _fork,
    r"invalid device ordinal": _ordinal,
    r"can't convert \S+ device type tensor to numpy": _numpy,
    r"Expected all tensors to be on the same device": _mixed,
    r"(tensors|tensor) (are|is) not (at|on) the same device": _mixed,
    r"indices should be either on": _mixed,
    r"Input type \(.*\) and weight type \(.*\) should be the same": _mixed,
    r"Expected a '\S+' device type for generator but found '\S+'": _generator,
    r"different from other tensors on": _mixed,
    r"Placeholder storage has not been allocated on MPS": _mixed,
}
"""Text of an exception, on any backend -> the rule that knows it."""
