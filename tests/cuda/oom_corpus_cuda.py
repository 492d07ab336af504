"""The corpus of failing cells (`tests/oom/failing_cells`) over the fake runtime: what its reports say, and what was so.

All share one process, and each has a shell and an empty device to itself. The truth is torch's: an observer of its
allocator notes what was asked for and what was allocated when it gave up, and its statistics say what is afterwards.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import contextmanager

import torch

import gpumagic
from gpumagic.report.units import parse_size
from tests.cuda.rooms import DEVICES, as_small_cards, give
from tests.oom import oom_corpus
from tests.oom.oom_corpus import Case

TRUTH: dict[str, dict[str, int]] = {}
"""What torch's allocator said of the last failure of each device."""


def note(device: int, requested: int, total: int, free: int) -> None:
    """Called by torch when it gives up, before anything is unwound."""
    TRUTH[f"cuda:{device}"] = {
        "requested": requested,
        "allocated": torch.cuda.memory_allocated(device),
    }


def listen() -> None:
    """Have torch tell `TRUTH` of each failure from now on; it cannot be told to stop."""
    torch.cuda.init()
    torch._C._cuda_attach_out_of_memory_observer(note)


configure = (
    getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    or torch.cuda.memory._set_allocator_settings
)


def cases() -> dict[str, Case]:
    """Return the cells, written for CUDA."""
    found = {}
    for case in oom_corpus.cases():
        texts = [text.replace("simgpu", "cuda") for text in (*case.setup, case.cell)]
        found[case.name] = Case(**{**vars(case), "setup": tuple(texts[:-1]), "cell": texts[-1]})
    return found


def run(case: Case) -> dict[str, object]:
    """Return what a cell's report says beside what was so."""
    others = parse_size(case.strangers) if case.strangers else 0
    for index in range(DEVICES):
        give(index, parse_size(case.memory), others=others if index == 0 else 0)
    TRUTH.clear()
    seen: dict[str, object] = {}
    with _notebook() as shell:
        for text in (oom_corpus.PRELUDE, *case.setup):
            oom_corpus._ran(shell, text)
        before = torch.cuda.memory_allocated(0)
        hear(shell, seen)
        result = oom_corpus._run(shell, case.cell)
        report = shell.user_ns.get("report")
        seen |= {
            "failed": type(result.error_in_exec).__name__,
            "before": before,
            "truth": dict(TRUTH),
        }
        if report is not None:
            _read(report, shell, seen)
    seen["left"] = [torch.cuda.memory_allocated(index) for index in range(DEVICES)]
    return seen


def _read(report, shell, seen: dict[str, object]) -> None:
    seen |= {
        name: getattr(report, name)
        for name in ("kind", "certainty", "device", "requested", "allocated_before", "allocated_at_failure",
                     "allocated_after", "reserved_after", "message", "notes", "cause")
    }  # fmt: skip
    seen |= {
        "advice": [each.title for each in report.advice],
        "text": oom_corpus.report_text(report),
    }
    index = int((report.device or "cuda:0").partition(":")[2] or 0)
    seen |= {"now": [torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)]}
    left = gpumagic.devices(namespace=shell.user_ns)
    seen["pinned"] = [
        str(row.holder) for row in left if row.device.startswith("cuda") and row.name is None
    ]
    seen["unexplained"] = sum(row.unexplained or 0 for row in left.by_device)


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
    shell.run_line_magic("config", "GPUMagic.advice_seconds = 0")
    try:
        with as_small_cards():
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
    configure("expandable_segments:False")
    for index in range(DEVICES):
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def faults(seen: dict[str, object], unexplained: int = 0) -> list[str]:
    """Return what a report says of a failure of CUDA's allocator that is not so, and what was left behind.

    `unexplained` are the bytes that C++ may keep.
    """
    truth, device = seen["truth"], seen.get("device")
    found = []
    if (seen.get("error"), seen["failed"]) != ("torch.OutOfMemoryError", "OutOfMemory"):
        return [f"it failed with {seen.get('error')}, told as {seen['failed']}"]
    if (seen["certainty"], seen["kind"]) not in {
        ("certain", "cuda allocator"),
        ("certain", "memory fraction"),
    }:
        found.append(f"{seen['certainty']}: {seen['kind']}")
    told = {"requested": seen["requested"], "allocated": seen["allocated_at_failure"]}
    if told != truth.get(device):
        found.append(f"{device}: {told}, where torch says {truth}")
    if device == "cuda:0" and (seen["allocated_before"] or 0) != seen["before"]:
        found.append(f"before: {seen['allocated_before']} for {seen['before']}")
    if [seen["allocated_after"], seen["reserved_after"]] != seen["now"]:
        found.append(
            f"after: {seen['allocated_after']}, {seen['reserved_after']} for {seen['now']}"
        )
    pinned = [holder for holder in seen["pinned"] if not holder.startswith(("graph of ", "Out["))]
    if pinned or seen["unexplained"] != unexplained or any(seen["left"]):
        found.append(
            f"not given back: {pinned}, unexplained {seen['unexplained']}, in the end {seen['left']}"
        )
    found += [note for note in seen["notes"] if "could not be" in note]
    return found


KEEPS = "kept = [torch.empty(1 << 22, device='cuda') for _ in range(9)]"
WAYS = {
    "in the backward pass": """
x = torch.ones(1000, 1024, device="cuda", requires_grad=True)
y = x
for _ in range(14):
    y = y.sin()
y.sum().backward()
""",
    "in a hook of the backward pass": """
x = torch.ones(1000, device="cuda", requires_grad=True)
x.register_hook(lambda grad: torch.empty(1 << 30, device="cuda"))
x.sum().backward()
""",
    "in a custom function": """
class Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a, torch.empty(1 << 23, device=a.device))
        return torch.empty(1 << 24, device=a.device)
    @staticmethod
    def backward(ctx, grad):
        return grad
y = Wide.apply(torch.ones(10, device="cuda", requires_grad=True))
""",
    "in a thread of a pool": """
from concurrent.futures import ThreadPoolExecutor
def work():
    kept = [torch.empty(1 << 22, device="cuda") for _ in range(9)]
with ThreadPoolExecutor(1) as pool:
    pool.submit(work).result()
""",
    "in a coroutine": """
async def work():
    kept = [torch.empty(1 << 22, device="cuda") for _ in range(9)]
await work()
""",
    "while a CUDA graph is captured": """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kept = [torch.empty(1 << 22, device="cuda") for _ in range(9)]
""",
    "on a stream of its own": """
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    kept = [torch.empty(1 << 22, device="cuda") for _ in range(9)]
""",
    "on the other device": """
kept = [torch.empty(1 << 22, device="cuda:1") for _ in range(9)]
""",
    "for the workspace of cuBLAS": """
kept = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
product = torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
""",
    "in a checkpointed block": """
from torch.utils.checkpoint import checkpoint
x = torch.ones(1000, 1024, device="cuda", requires_grad=True)
y = checkpoint(lambda a: torch.cat([a.sin().cos() for _ in range(20)]), x, use_reentrant=False)
""",
    "in a convolution": """
y = nn.Conv2d(3, 64, 3).cuda()(torch.ones(64, 3, 64, 64, device="cuda"))
""",
    "in a replica of DataParallel": """
net = nn.DataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 20000)).cuda(), device_ids=[0, 1])
y = net(torch.ones(2000, 64, device="cuda"))
""",
    "in a library that asks for a copy": """
import copy
net = nn.Linear(1024, 8 << 10).cuda()
nets = [copy.deepcopy(net) for _ in range(3)]
""",
}
"""Ways to run out of 64 MiB that are CUDA's own, by what is going on."""


CAP = "torch.cuda.set_per_process_memory_fraction({} / torch.cuda.get_device_properties(0).total_memory)"
"""Of what torch saw when it began, in bytes."""
STREAMS = """
streams, a = [torch.cuda.Stream() for _ in range(4)], torch.ones(4, 4, device="cuda")
for stream in streams:
    with torch.cuda.stream(stream):
        product = a @ a
"""


def special() -> dict[str, Case]:
    """Return the cells for which something is set first."""
    grow = "from tests.cuda import oom_corpus_cuda\noom_corpus_cuda.configure('expandable_segments:True')"
    request = "y = torch.empty({} << 20, dtype=torch.uint8, device='cuda')"
    return {
        "segments that grow": _case(KEEPS, grow),
        "a cap": _case(KEEPS, CAP.format(64 << 20), memory="128MiB"),
        "a cap on a full card": _case(
            KEEPS, CAP.format(120 << 20), memory="128MiB", strangers="100MiB"
        ),
        "pinned": _case("torch.empty(1 << 45, dtype=torch.uint8, pin_memory=True)"),
        "many workspaces": _case(request.format(12), STREAMS, memory="90MiB"),
        "many workspaces, and a large request": _case(request.format(80), STREAMS, memory="90MiB"),
    }


def _case(cell: str, *setup: str, memory: str = "64MiB", strangers: str = "") -> Case:
    first = ("x = torch.ones(1, device='cuda')", *setup)
    return Case("", "", "", first, f"%%oomguard -o report\n{cell}", memory, strangers)


def main(wanted: list[str]) -> dict[str, object]:
    """Return what came of every cell."""
    listen()
    ways = {name: _case(cell) for name, cell in WAYS.items()}
    outcomes: dict[str, object] = {}
    for name, each in {**cases(), **ways, **special()}.items():
        if wanted and name not in wanted:
            continue
        try:
            outcomes[name] = run(each)
        except Exception as error:  # one broken case must not hide the others
            outcomes[name] = {"failed": f"{type(error).__name__}: {error}"}
        gc.freeze()  # what is there by now stays; each collection would look at all of torch again
    return outcomes


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
