"""What the edits of advice compute: runs a cell as it is and with each edit made, and compares what both leave behind.

    python -m tests.oom.edit_values [NAME ...]

A cell fails on a small simulated device, which tells what the rules propose for it. Then it runs with ample memory, as
it is and with each proposal, from the same start and with the same seeds. Run as a program it prints what each rule was
found to change, as JSON.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import json
import math
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from IPython.utils.capture import capture_output

from gpumagic.advice import search as advising
from gpumagic.advice.facts import Facts
from gpumagic.advice.records import Advice
from gpumagic.advice.rules.proposal import Choice
from gpumagic.advice.suggestion import OTHER_RESULT
from gpumagic.report.units import parse_size
from tests.oom import oom_corpus
from tests.oom.made_facts import changed
from tests.oom.oom_corpus import Case

OTHERS = Path(__file__).parent / "other_cells"
AMPLE = 4 << 30
CANNOT_RUN = ("loader_workers", "outer_on_host", "shared_memory", "dataclass_config, another's")
"""What fails with any memory, for want of the host's or of a second run."""
AMPLIFY = (
    "greedy_decoding", "unet_segmentation", "gan", "batch_unnamed", "ddpm_training", "encoder_with_a_config_dict",
    "fit_function_of_an_earlier_cell", "reinforce", "similar_items", "wgan_gp",
)  # fmt: skip
"""What makes much of few digits: a token or an action that is chosen decides on the next, norms of batches on small
gradients; a loss is the difference of two means, a gradient of random labels nearly nothing after a dozen layers."""
SHARES = (60, 30)
"""The parts of what another's cell needs at which it fails, in percent."""
TOLERANCE, LOOSE = 1e-3, 0.1
"""The largest difference, as a share of the norm: of float32 sums in another order, a few steps later; of bfloat16."""


def cases() -> dict[str, Case]:
    """Return the cells of both corpora that can run here; those of others are written for `simgpu`."""
    found = {
        each.name: replace(each, cell=each.cell.partition("\n")[2]) for each in oom_corpus.cases()
    }
    for path in sorted(OTHERS.glob("*.py")):
        head, *parts = re.split(
            r"^# %%.*\n", path.read_text("utf-8").replace("cuda", "simgpu"), flags=re.MULTILINE
        )
        fields = dict(re.findall(r"^# (needs|device): (.+)$", head, re.MULTILINE))
        if (
            all(map(importlib.util.find_spec, fields.get("needs", "").split()))
            and "device" not in fields
        ):
            *setup, cell = [each.strip("\n") for each in parts]
            found[f"{path.stem}, another's"] = Case(
                path.stem, "", "", tuple(setup), cell, memory=""
            )
    return {name: case for name, case in found.items() if name not in CANNOT_RUN}


class OfDevice(NamedTuple):
    """A copy of a tensor on the host, and where the tensor was."""

    tensor: torch.Tensor
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OfDevice:
        return cls(tensor.detach().to("cpu", copy=True), str(tensor.device))


class Proposed(NamedTuple):
    """One edit that a rule proposes, with the tier of its rule."""

    rule: str
    tier: int
    advice: Advice

    @property
    def edit(self) -> tuple[object, ...]:
        return self.advice.changes, self.advice.first


@dataclass(frozen=True)
class Left:
    """What a cell has left behind: numbers, texts and tensors, by where they are found, and what it printed."""

    values: Mapping[str, Any]
    error: str = ""


def rules() -> Iterator[tuple[str, int, advising.Rule]]:
    """Yield every rule with its name and its tier."""
    modules = [
        value
        for value in vars(advising).values()
        if getattr(value, "__package__", "") == "gpumagic.advice.rules"
    ]
    for tier, each in (
        (tier, rule) for tier, several in enumerate(advising.TIERS) for rule in several
    ):
        names = (f"{one.__name__.rpartition('.')[2]}.{name}" for one in modules for name, it in vars(one).items()
                 if it is each)  # fmt: skip
        yield next(names), tier, each


def proposed(facts: Facts) -> Iterator[Proposed]:
    """Yield the edits that the rules propose, numbers as they guess them, and what a smaller batch is finished to."""
    for name, tier, rule in rules():
        for each in rule(facts):
            if isinstance(each, Choice):
                yield Proposed(
                    name,
                    OTHER_RESULT if each.changes_result else tier,
                    each.make(each.guess),
                )
                better = each.finish(each.guess) if each.finish is not None else None
                if better is not None:
                    yield Proposed(f"{name}, finished", tier, better)
            else:
                yield Proposed(name, tier, each)


@contextmanager
def notebook(case: Case, memory: int = AMPLE):
    """Yield a shell on a device with so much memory, in which the earlier cells have run, and their numbers."""
    from gpumagic import simgpu

    simgpu.enable(devices=2, memory=AMPLE)
    taken = torch.simgpu.memory_reserved(0)
    others = [torch.empty(max(0, AMPLE - memory - taken), dtype=torch.uint8, device="simgpu:0")]
    with oom_corpus._notebook(0) as shell, ExitStack() as stack:
        stack.callback(others.clear)
        seed()
        numbers = [oom_corpus._ran(shell, text) for text in (oom_corpus.PRELUDE, *case.setup)]
        seed()
        yield shell, numbers[1:]


def seed() -> None:
    """Start all generators anew."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def failed(case: Case, memory: int) -> Facts | None:
    """Return what is known of the cell's failure with so much memory; None where it passes."""
    known: list[Facts] = []
    noting = mock.patch.object(advising, "advise", lambda facts, _: known.append(facts) or ())
    with noting, notebook(case, memory) as (shell, _):
        oom_corpus._run(shell, f"%%oomguard\n{case.cell}")
    return known[0] if known else None


def left(case: Case, advice: Advice | None = None) -> Left:
    """Return what the cell leaves with ample memory, with an edit made in the cells that it is of."""
    with notebook(case) as (shell, numbers), capture_output() as shown:
        try:
            for number, text in zip(numbers, case.setup, strict=True) if advice is not None else ():
                changed = advice.apply(text, f"In [{number}]")
                if changed != text:
                    shell.run_cell(changed).raise_error()
                    seed()
            if advice is not None and advice.first:
                with capture_output():
                    shell.run_cell(advice.first).raise_error()
                seed()
            code = f"%%oomguard\n{case.cell}"
            shell.run_cell(
                code if advice is None else advice.apply(code), store_history=True
            ).raise_error()
        except Exception as error:  # an edit that breaks the cell
            return Left({}, f"{type(error).__name__}: {error}"[:300])
        values = variables(shell)
    return Left(
        {
            **values,
            "what it printed": re.sub(r"\x1b\[[\d;]*m|Out\[\d+\]: |simgpu:\d", "", shown.stdout),
        }
    )


def variables(shell) -> dict[str, Any]:
    """Return what the variables of a notebook consist of; it keeps nothing on the device alive."""
    hidden = {*shell.user_ns_hidden, "In", "Out", "torch", "nn", "F"}
    named = {
        name: each for name, each in shell.user_ns.items() if name not in hidden and name[0] != "_"
    }
    return dict(flat(named, "", {}))


def flat(value: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and texts that a value consists of, each with where it is found."""
    if isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        yield path, value
        return
    if isinstance(value, torch.Tensor):
        if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
            return
        yield path, OfDevice.of(value)
        yield f"requires_grad of {path}", value.requires_grad
        if value.is_leaf and value.grad is not None:
            yield f"{path}.grad", OfDevice.of(value.grad)
        return
    if id(value) in seen:
        return
    seen[id(value)] = value
    for key, each in _parts(value):
        yield from flat(each, f"{path}.{key}" if path else str(key), seen)


def _parts(value: Any) -> Iterable[tuple[object, Any]]:
    if isinstance(value, torch.nn.Module):
        return [*value.named_parameters(), *value.named_buffers(), ("training", value.training)]
    if isinstance(value, torch.optim.Optimizer):
        return value.state_dict()["state"].items()
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return enumerate(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return [("as tensor", torch.as_tensor(value))] if value.dtype.kind in "fiub" else []
    is_own = type(value).__module__ == "__main__" and hasattr(value, "__dict__")
    return vars(value).items() if is_own else []


def differences(before: Left, after: Left, tolerance: float = TOLERANCE) -> dict[str, list[str]]:
    """Return where an edited cell leaves something else than the cell itself, by kind."""
    if after.error:
        return {"fails": [after.error]}
    found: dict[str, list[str]] = {}
    for path, old in before.values.items():
        if path.removeprefix("requires_grad of ") not in after.values and path.startswith(
            "requires"
        ):
            continue  # it is gone
        kind = _difference(old, after.values[path], tolerance) if path in after.values else "gone"
        kind = "graph" if kind and path.startswith("requires_grad") else kind
        if kind:
            found.setdefault(kind, []).append(path)
    return found


DECLARED = {
    "gone": r"\bgone\b|^Delete|(is|are) None|not made|begins anew|no gradients|another optim|no state|smaller model",
    "device": r"CPU|simgpu:1|host|another optimizer",
    "graph": r"graph|backward|no gradients",
    "dtype": r"digits|bfloat16",
    "number": r"for the number",
    "values": r"not what was meant|another result|another optimizer|a different gradient|slower to conv|loses precision"
    r"|fewer rows|a device is made there|batch norm|dropout",
}
"""What a suggestion's title or cost has to say where an edit changes so."""
PASSES = re.compile(r"more passes|^(Lower|Take|Make|Raise)")
"""What says that a loop has more passes than before, and that the last of them leaves something else."""
LEFT = re.compile(r"; (.*) of the last part is left|^(.*) (?:is|are) gone after")


MISSING = "NameError: "
"""How it fails where what is to run first is about what a failed run has left."""


def undeclared(cell: str, each: Proposed, differs: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return what of the differences a suggestion does not say."""
    said = f"{each.advice.title}\n{each.advice.cost}"
    in_loops = {
        one.id for loop in ast.walk(ast.parse(cell)) if isinstance(loop, ast.For) for one in ast.walk(loop)
        if isinstance(one, ast.Name)
    }  # fmt: skip
    numbers = set(re.findall(r"\w+", f"{each.advice.title} {each.advice.first}"))
    excused = in_loops | numbers if PASSES.search(said) else set()
    excused |= {
        name
        for found in LEFT.findall(each.advice.cost)
        for part in found
        for name in part.split(", ")
    }
    excused |= set(re.findall(r"(?m)^(\w+) = [\"\d]", each.advice.first or ""))
    excused |= {"what it printed"} if re.search("digits|graph|of the last part", said) else set()
    is_random = (
        re.search(r"rand|shuffle|sample|Dropout", f"{cell}{each.advice.edit}")
        and "same gradient" in said
    )
    found = {}
    for kind, paths in differs.items():
        if (is_random and kind == "values") or (kind == "fails" and paths[0].startswith(MISSING)):
            continue
        rest = [
            path
            for path in paths
            if path.removeprefix("requires_grad of ").partition(".")[0] not in excused
        ]
        if rest and not (kind in DECLARED and re.search(DECLARED[kind], said, re.MULTILINE)):
            found[kind] = rest
    return found


def _difference(old: Any, new: Any, tolerance: float) -> str:
    if isinstance(old, OfDevice) and isinstance(new, OfDevice):
        if old.tensor.shape != new.tensor.shape or not _is_close(old.tensor, new.tensor, tolerance):
            return "values"
        return (
            "dtype"
            if old.tensor.dtype != new.tensor.dtype
            else "device"
            if old.device != new.device
            else ""
        )
    if isinstance(old, str) and isinstance(new, str):
        words, others = (re.split(r"(-?\d+\.?\d*(?:e[-+]\d+)?)", each) for each in (old, new))
        pairs = list(zip(words, others, strict=False))
        is_like = len(words) == len(others) and all(
            abs(float(one) - float(other)) <= 10 * tolerance * max(1, abs(float(one)))
            if i % 2
            else one == other
            for i, (one, other) in enumerate(pairs)
        )
        return "" if is_like else "values"
    if isinstance(old, OfDevice) and isinstance(new, int | float) and not old.tensor.shape:
        return _difference(old.tensor.item(), new, tolerance) or "number"
    if isinstance(old, bool | int | float | complex) and isinstance(
        new, bool | int | float | complex
    ):
        is_same = abs(old - new) <= tolerance * max(1e-6, abs(old)) or str(old) == str(
            new
        )  # not a number, say
        return "" if is_same else "values"
    return "" if type(old) is type(new) and old == new else "values"


def _is_close(old: torch.Tensor, new: torch.Tensor, tolerance: float) -> bool:
    if not (old.is_floating_point() or old.is_complex() or old.numel() == 0):
        return (old != new).double().mean().item() <= tolerance  # labels of rows on the border
    if old.numel() == 0:
        return True
    wide = torch.complex128 if old.is_complex() or new.is_complex() else torch.float64
    one, other = old.to(wide), new.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    gap = (one - other).masked_fill(same, 0).norm().item()
    return gap <= tolerance * max(one.masked_fill(same & ~one.isfinite(), 0).norm().item(), 1e-6)


def edits(case: Case, shares: Sequence[int] = SHARES) -> list[Proposed]:
    """Return all edits that are proposed where the cell fails, each once; without a size it has shares of its need."""
    memories = [parse_size(case.memory)] if case.memory else _too_small(case, shares)
    found: dict[tuple[object, ...], Proposed] = {}
    for facts in filter(None, (failed(case, memory) for memory in memories)):
        for variant in (facts, changed(facts, has_fused_attention=True)):
            for each in proposed(variant):
                if any(each.edit):
                    found.setdefault(each.edit, each)
    return list(found.values())


def _too_small(case: Case, shares: Sequence[int]) -> list[int]:
    """Return what memory the device is to have: parts of what the cell needs beside what is there."""
    if hasattr(torch, "simgpu"):  # peaks are the process's
        torch.simgpu.reset_peak_memory_stats(0)
    with notebook(case) as (shell, _):
        before, least = torch.simgpu.memory_reserved(0), torch.simgpu.max_memory_reserved(0)
        torch.simgpu.reset_peak_memory_stats(0)
        oom_corpus._run(shell, case.cell)
        peak = torch.simgpu.max_memory_reserved(0)
    return [max(before + (peak - before) * share // 100, least + (1 << 20)) for share in shares]


def outcome(
    case: Case, shares: Sequence[int] = SHARES
) -> list[tuple[Proposed, dict[str, list[str]]]]:
    """Return the edits of a cell and how what they leave differs, except where two runs of the cell itself do."""
    before = left(case)
    assert not before.error, before.error
    found, unsteady = [], None
    for each in edits(case, shares):
        loose = math.inf if case.name in AMPLIFY else LOOSE
        tolerance = loose if "bfloat16" in f"{each.advice.title} {case.cell}" else TOLERANCE
        differs = differences(before, left(case, each.advice), tolerance)
        if differs and unsteady is None:
            unsteady = {
                path for paths in differences(before, left(case)).values() for path in paths
            }
        rest = {
            kind: [path for path in paths if path not in (unsteady or ())]
            for kind, paths in differs.items()
        }
        found.append((each, {kind: paths for kind, paths in rest.items() if paths}))
    return found


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for name, each in cases().items():
        if wanted and name not in wanted:
            continue
        try:
            came = {"edits": [
                {"rule": one.rule, "tier": one.tier, "title": one.advice.title, "cost": one.advice.cost,
                 "edit": one.advice.edit, "first": one.advice.first, "differs": differs,
                 "undeclared": undeclared(each.cell, one, differs)}
                for one, differs in outcome(each)
            ]}  # fmt: skip
        except Exception as error:  # one broken case must not hide the others
            came = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({name: came}), flush=True)
        gc.collect()
        gc.freeze()  # what is there by now stays; each collection would look at all of torch again
