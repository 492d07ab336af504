"""The corpus of failing cells: reads them, runs each in a real shell, makes the advised change, runs it again.

Each file of `failing_cells/` is a notebook in the percent format. Its header says what the cell is about, the verdict
(`OomReport.cause`) and the beginning of the first suggestion's title. The cells before the last set the stage; the
last one fails. Run as a program it prints, as JSON, what came of each: all cells share one process, and each has a
shell and an empty device to itself.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from gpumagic.advice.search import AGAIN
from gpumagic.dryrun import client
from gpumagic.oom import evidence
from gpumagic.report.units import size

FOLDER = Path(__file__).parent / "failing_cells"
MEMORY = "128MiB"
PRELUDE = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"


@dataclass(frozen=True)
class Case:
    name: str
    verdict: str
    advice: str
    setup: tuple[str, ...]
    cell: str
    memory: str = MEMORY
    strangers: str = ""
    """What another process holds of the first device: a block that no name reaches stands in for it."""
    alike: str = "pass"
    """`silent`: the cell looks like one that the rule in `advice` is for, and must not get it; `told`: no edit makes
    it fit, and `advice` is what is said instead."""
    tight: str = ""
    """`yes`: the number advised is nearly the largest, and a tenth more fails."""


def read(path: Path) -> Case:
    head, *cells = re.split(r"^# %%.*\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    fields = dict(
        re.findall(r"^# (verdict|advice|memory|strangers|alike|tight): (.+)$", head, re.MULTILINE)
    )
    *setup, cell = [each.strip("\n") for each in cells]
    return Case(path.stem, setup=tuple(setup), cell=f"%%oomguard -o report\n{cell}", **fields)


def cases() -> list[Case]:
    return [read(path) for path in sorted(FOLDER.glob("*.py"))]


def run(case: Case) -> dict[str, object]:
    """Return what came of a case: the verdict, the titles, whether the cell passes after the first suggestion."""
    from gpumagic import simgpu

    simgpu.enable(devices=2, memory=case.memory)
    with _stranger(case.strangers), _notebook() as shell:
        seen = _outcome(shell, case)
        advice = seen.pop("advice", ())
    seen["untrue"] = [found for each in advice for found in _untrue(case, each)]
    if case.tight and seen.get("passes"):
        with _notebook(seconds=0) as shell:
            seen["passes with more"] = _with_more(
                shell, case, str(seen["cell"]), str(seen["evidence"]), seen["first"]
            )
    return seen


@contextmanager
def _notebook(seconds: float = 120.0):
    """Yield a shell; what is advised in it is not to depend on how busy this machine is."""
    shell = _shell()
    shell.run_line_magic("load_ext", "gpumagic")
    shell.run_line_magic("config", f"GPUMagic.advice_seconds = {seconds}")
    try:
        yield shell
    finally:
        with mock.patch.object(client, "close"):  # one worker serves all cells
            shell.run_line_magic("unload_ext", "gpumagic")
        _forget(shell)  # the next case fails to set its capacity if something is left on a device


def _with_more(shell, case: Case, cell: str, evidence: str, first: str | None) -> bool:
    """Fail once more, and return whether the cell passes with a tenth more than what was advised or said to fit."""
    for text in (PRELUDE, *case.setup):
        _ran(shell, text)
    _run(shell, case.cell)
    if first is not None:
        _ran(shell, first)
    old_lines = case.cell.splitlines()
    line = next(
        new for new in cell.splitlines() if new not in old_lines and re.search(r"\d\d", new)
    )
    said = re.search(r"up to (\d+) fits", evidence)
    more = re.sub(r"\d+", lambda number: str(int(said[1] if said else number[0]) * 11 // 10), line)
    if said is None:
        return _run(shell, cell.replace(line, more)).success
    old = case.cell.splitlines()[
        cell.splitlines().index(line)
    ]  # the batch alone, without passes that accumulate
    return _run(shell, case.cell.replace(old, more)).success


def _outcome(shell, case: Case) -> dict[str, object]:
    import torch

    numbers = [_ran(shell, text) for text in (PRELUDE, *case.setup)]
    _run(shell, case.cell)
    report = shell.user_ns.get("report")
    if report is None:
        return {"error": "no report: the cell passed, or failed otherwise"}
    seen = {
        "verdict": report.cause, "sentence": report.verdict, "titles": [each.title for each in report.advice],
        "text": report_text(report), "advice": report.advice, "contradictions": contradictions(report),
    }  # fmt: skip
    if not report.advice or case.alike != "pass":
        return seen
    first = report.advice[0]
    seen |= {"edit": first.edit, "first": first.first, "evidence": first.evidence}
    torch.simgpu.reset_peak_memory_stats(0)
    seen |= _follow(shell, case, first, numbers[1:])
    if seen["passes"]:
        seen["again"] = _on_a_fuller_device(shell, str(seen["cell"]), case.memory)
    return seen


def _on_a_fuller_device(shell, cell: str, memory: str) -> list[str]:
    """Return what is advised to a cell that did as told, and fails where it has a quarter less than it needs."""
    import torch

    from gpumagic.report.units import parse_size

    needs = torch.simgpu.max_memory_allocated(0)
    room = parse_size(memory) - max(int(0.75 * needs), torch.simgpu.memory_allocated(0))
    ballast = []
    with suppress(torch.OutOfMemoryError):
        ballast += (
            torch.empty(1 << 20, dtype=torch.uint8, device="simgpu:0") for _ in range(room >> 20)
        )
    shell.user_ns["report"] = None
    shell.run_line_magic("config", "GPUMagic.advice_seconds = 0")
    _run(shell, cell)
    ballast.clear()
    report = shell.user_ns["report"]
    return [] if report is None else [each.title for each in report.advice]


def report_text(report) -> str:
    from gpumagic.report.base import to_text

    return to_text(report, width=80, unicode=True)


def _ran(shell, text: str) -> int:
    """Run a cell that must pass, and return its number; its result would keep what it displays."""
    number = shell.execution_count
    result = _run(shell, text)
    assert result.success, result.error_in_exec or result.error_before_exec
    return number


def contradictions(report) -> list[str]:
    """Return what of a report's figures does not agree with the others."""
    found, need = [], report.need
    if need is None:
        return [
            f"tried without a need: {each.title}"
            for each in report.advice
            if each.trial and each.trial.needs
        ]
    if need.missing and need.fits:
        found.append("it fits with memory missing")
    if (
        report.cause == "shortage"
        and need.missing
        and f"{size(need.missing)} missing" not in report.verdict
    ):
        found.append(f"{report.verdict}: not {size(need.missing)}")
    for each in report.advice:
        trial = each.trial
        if trial is None or trial.needs is None:
            found += (
                [f"{each.title}: covers {each.covers}, not tried"]
                if each.covers is not None
                else []
            )
            continue
        if each.covers is not trial.fits or (trial.fits and trial.needs > trial.available):
            found.append(f"{each.title}: {each.covers}, {trial}")
        if trial.saves is not None and each.frees != trial.saves:
            found.append(f"{each.title}: saves {each.frees}, {trial}")
        if (
            trial.fits is False
            and trial.saves is not None
            and need.needed - trial.saves != trial.needs
        ):
            found.append(f"{each.title}: {need.needed} less {trial.saves} is not {trial.needs}")
    return found


def _untrue(case: Case, advice) -> list[str]:
    """Return what a suggestion says that is not so when it is followed in a notebook of its own."""
    if advice.covers is None:
        return []
    with _stranger(case.strangers), _notebook(seconds=0) as shell:
        numbers = [_ran(shell, text) for text in (PRELUDE, *case.setup)]
        _run(shell, case.cell)
        followed = _follow(shell, case, advice, numbers[1:])
    if followed["passes"] is advice.covers:
        return []
    return [
        f"{advice.title}: said to {'fit' if advice.covers else 'fail'}; {followed['why'] or 'it passes'}"
    ]


def _follow(shell, case: Case, advice, numbers: list[int]) -> dict[str, object]:
    """Do what a suggestion says, as a user would: change earlier cells and run them again, then this one."""
    try:
        for number, text in zip(numbers, case.setup, strict=True):
            changed = advice.apply(text, f"In [{number}]")
            if changed != text and not _run(shell, changed).success:
                return {"passes": False, "why": "the changed earlier cell failed"}
        if advice.first is not None and not _run(shell, advice.first).success:
            return {"passes": False, "why": "what is to be run before it failed"}
        text = advice.apply(case.cell)
    except ValueError as error:
        return {"passes": False, "why": str(error)}
    is_changed = (
        text != case.cell or advice.first is not None or any(each.cell for each in advice.changes)
    )
    if not is_changed and advice.title != AGAIN:
        return {"passes": False, "why": "no change"}
    result = _run(shell, text)
    error = result.error_in_exec or result.error_before_exec
    return {
        "passes": result.success,
        "why": "" if error is None else f"{type(error).__name__}: {error}",
        "cell": text,
    }


def _run(shell, text: str):
    from IPython.utils.capture import capture_output

    with capture_output():
        return shell.run_cell(text, store_history=True)


def _shell():
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryAccessor.enabled = False
    InteractiveShell.clear_instance()
    return InteractiveShell.instance(config=config, display_pub_class=CapturingDisplayPublisher)


def _stranger(size: str):
    """Take memory that no name reaches, and have every account of it say that another process has it."""
    if not size:
        return ExitStack()
    import torch

    from gpumagic.memory import allocator
    from gpumagic.oom import recognition
    from gpumagic.report.units import parse_size

    nbytes = parse_size(size)
    block = [torch.empty(nbytes, dtype=torch.uint8, device="simgpu:0")]
    figures, read, others = allocator._read_stats, recognition.read_numbers, evidence.other_devices

    def without(backend, module, index):
        found = figures(backend, module, index)
        mine = nbytes if (backend, index) == ("simgpu", 0) else 0
        return found._replace(allocated=found.allocated - mine, reserved=found.reserved - mine)

    def said(text):
        numbers = read(text)
        return replace(numbers, allocated=numbers.allocated and numbers.allocated - nbytes)

    stack = ExitStack()
    stack.callback(block.clear)
    stack.enter_context(mock.patch.object(allocator, "_read_stats", without))
    stack.enter_context(mock.patch.object(recognition, "read_numbers", said))
    stack.enter_context(
        mock.patch.object(evidence, "other_devices", lambda device: (others(device)[0], nbytes))
    )
    return stack


def _forget(shell) -> None:
    import torch

    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.InteractiveTB.tb = shell.InteractiveTB.pdb = None
    shell.reset(new_session=False)
    shell.user_ns.clear()
    shell.user_ns_hidden.clear()
    shell.displayhook.__dict__.pop("_", None)
    shell.last_execution_result = None
    gc.collect()
    torch.simgpu.empty_cache()


if __name__ == "__main__":
    wanted = sys.argv[1:]
    chosen = [case for case in cases() if not wanted or case.name in wanted]
    outcomes = {}
    for each in chosen:
        try:
            outcomes[each.name] = run(each)
        except Exception as error:  # one broken case must not hide the others
            outcomes[each.name] = {"error": f"{type(error).__name__}: {error}"}
        gc.freeze()  # what is there by now stays; each collection would look at all of torch again
    print(json.dumps(outcomes))
