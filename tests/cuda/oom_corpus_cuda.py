"""The corpus of failing cells (`tests/oom/failing_cells`) over the fake runtime: what its reports say, and what was so.

Run as a program it prints, as JSON, what came of each cell: all share one process, and each has a shell and an empty
device to itself. The truth is torch's: an observer of its allocator notes what was asked for and what was allocated
when it gave up, and its statistics say what is allocated afterwards.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "oom")]

import oom_corpus
from oom_corpus import Case

import gpumagic
from gpumagic import fakecuda
from gpumagic.oom import evidence
from gpumagic.options import parse_size


@dataclass
class Truth:
    """What torch's allocator said of its last failure."""

    device: int | None = None
    requested: int | None = None
    allocated: int | None = None
    observed: list[int] = field(default_factory=list)

    def note(self, device: int, requested: int, total: int, free: int) -> None:
        """Called by torch, before anything is unwound."""
        self.device, self.requested = device, requested
        self.allocated = torch.cuda.memory_allocated(device)


TRUTH = Truth()


def cases() -> dict[str, Case]:
    """Return the cells, written for CUDA."""
    found = {}
    for case in oom_corpus.cases():
        texts = [text.replace("simgpu", "cuda") for text in (*case.setup, case.cell)]
        found[case.name] = Case(**{**vars(case), "setup": tuple(texts[:-1]), "cell": texts[-1]})
    return found


def run(case: Case) -> dict[str, object]:
    """Return what a cell's report says beside what was so."""
    capacity = fakecuda.memory(0).used + parse_size(case.memory)
    others = parse_size(case.strangers) if case.strangers else 0
    for index in (0, 1):
        fakecuda.set_memory(index, capacity=capacity, others=others if index == 0 else 0)
    TRUTH.__init__()
    with _notebook() as shell:
        for text in (oom_corpus.PRELUDE, *case.setup):
            oom_corpus._ran(shell, text)
        before = torch.cuda.memory_allocated(0)
        seen: dict[str, object] = {}
        hear(shell, seen)
        result = oom_corpus._run(shell, case.cell)
        report = shell.user_ns.get("report")
        seen |= {"failed": type(result.error_in_exec).__name__, "before": before, "truth": dict(vars(TRUTH))}
        if report is None:
            return seen
        seen |= {
            name: getattr(report, name)
            for name in ("kind", "certainty", "device", "requested", "allocated_before", "allocated_at_failure",
                         "allocated_after", "reserved_after", "message", "notes", "cause")
        }  # fmt: skip
        seen |= {"advice": [each.title for each in report.advice], "text": oom_corpus.report_text(report)}
        index = int((report.device or "cuda:0").partition(":")[2] or 0)
        seen |= {"now": [torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)]}
        left = gpumagic.devices(namespace=shell.user_ns)
        seen["pinned"] = [str(row.holder) for row in left if row.device.startswith("cuda") and row.name is None]
        seen["unexplained"] = sum(row.unexplained or 0 for row in left.by_device)
    return seen


def hear(shell, seen: dict[str, object]) -> None:
    """Note the error that the user sees."""
    show = shell._showtraceback

    def showing(kind, error, lines):
        seen.update(error=f"{type(error).__module__}.{type(error).__name__}", said=str(error))
        show(kind, error, lines)

    shell._showtraceback = showing


@contextmanager
def _notebook():
    shell = oom_corpus._shell()
    shell.run_line_magic("load_ext", "gpumagic")
    try:
        yield shell
    finally:
        shell.run_line_magic("unload_ext", "gpumagic")
        forget(shell)


def forget(shell) -> None:
    """Let go of whatever a cell left."""
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
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def main(wanted: list[str]) -> dict[str, object]:
    torch.cuda.init()
    torch._C._cuda_attach_out_of_memory_observer(TRUTH.note)
    evidence.REHEARSAL_SECONDS = 0.0  # what a rehearsal says is not asked here
    outcomes: dict[str, object] = {}
    for name, case in cases().items():
        if wanted and name not in wanted:
            continue
        try:
            outcomes[name] = run(case)
        except Exception as error:  # one broken case must not hide the others
            outcomes[name] = {"broken": f"{type(error).__name__}: {error}"}
        outcomes[name]["left"] = [torch.cuda.memory_allocated(index) for index in (0, 1)]
        gc.freeze()
    return outcomes


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
