"""`%%ondevice` on torch's own CUDA: waits, streams, graphs, devices, peaks and errors, against the fake runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic import fakecuda
from gpumagic.transfers.report import TransferReport

COLLECTED_GENERATION = 1

MIB = 2**20


def report_of(
    code: str, *, device: str = "cuda:0", trace: bool = False, **names: object
) -> TransferReport:
    """Return the report of code that runs on a device; the log begins with it."""
    namespace = {"torch": torch, **names}
    compiled = compile(code, __file__, "exec")
    fakecuda.reset()
    with gpumagic.ondevice(device, trace=trace) as run:
        exec(compiled, namespace)
    assert run.report is not None
    return run.report


def logged() -> tuple[Counter[str], Counter[str]]:
    """Return how often and how many bytes are in the log of copies, by direction, without those within a device."""
    return _summed(
        (copy.direction, 1, copy.nbytes) for copy in fakecuda.copies() if copy.source != copy.target
    )


def told(report: TransferReport) -> tuple[Counter[str], Counter[str]]:
    """Return the same of a report."""
    return _summed((row.direction, row.count, row.nbytes) for row in report)


def _summed(copies: Iterable[tuple[str, int, int]]) -> tuple[Counter[str], Counter[str]]:
    count, nbytes = Counter[str](), Counter[str]()
    for direction, times, size in copies:
        count[direction] += times
        nbytes[direction] += size
    return count, nbytes


WAITS = {
    "item": ("g.sum().item()", 1),
    "tolist": ("g.tolist()", 1),
    "cpu": ("g.cpu()", 1),
    "a comparison, which is no value yet": ("g > 0", 0),
    "if": ("if (g > 0).any(): pass", 1),
    "print": ("str(g[0, 0])", None),
    "synchronize a device": ("torch.cuda.synchronize()", 1),
    "synchronize a stream": ("torch.cuda.current_stream().synchronize()", 1),
    "synchronize an event": ("event = torch.cuda.Event(); event.record(); event.synchronize()", 1),
    "wait for an event on the device": (
        "event = torch.cuda.Event(); event.record(); event.wait()",
        0,
    ),
    "to the device": ("x.to('cuda:0')", 1),
    "to the device, non-blocking, from pageable memory": ("x.to('cuda:0', non_blocking=True)", 0),
    "to the device, non-blocking, from pinned memory": (
        "pinned.to('cuda:0', non_blocking=True)",
        0,
    ),
    "to the device, from pinned memory": ("pinned.to('cuda:0')", 1),
    "to the host, non-blocking": ("g.to('cpu', non_blocking=True)", 0),
    "between devices": ("g.to('cuda:1')", 0),
    "copy_, non-blocking": ("g.copy_(x, non_blocking=True)", 0),
    "nonzero": ("g.nonzero()", 1),
    "a mask": ("g[g > 0]", 1),
    "a number under a mask": ("g[g > 0] = 1.0", 0),
    "a number by an index": ("g[0, 0] = 1.0", 1),
    "a number to a row": ("g[0] = 1.0", 0),
    "unique": ("g.unique()", 1),
    "tensor of a list": ("torch.tensor([1.0, 2.0])", 1),
    "numpy": ("g.numpy(force=True)", 1),
    "a storage": ("g.untyped_storage().cpu()", 1),
}


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("what", WAITS)
def test_a_line_waits_as_often_as_the_host_waits_in_the_runtime(what: str, trace: bool) -> None:
    code, waits = WAITS[what]
    x, g = torch.ones(8, 4), torch.ones(8, 4, device="cuda:0")
    report = report_of(code, trace=trace, x=x, g=g, pinned=x.pin_memory())
    assert sum(report.syncs.values()) == fakecuda.syncs()
    assert waits is None or fakecuda.syncs() == waits
    assert told(report) == logged()


INDEXED = [
    "g[0, 0] = 5.0", "g[-1, -1] = True", "g[0, 0, ...] = 1", "g[(0, 1)] = 3.0", "one = g[0, 0]; one[()] = 2.0",
    "g[[0, 2]] = 1.0", "g[[0, 1], [0, 1]] = 4.0", "g[[0, 1], 1:] = 2.0", "g[i] = 1.0", "g[i] = v",
    "g[i[0], 0] = 1.0", "g[torch.tensor([0], device='cpu')] = 1.0", "g[:, 0] = 1.0", "g[...] = 1.0", "g[None] = 1.0",
    "g[True] = 2.0", "g[0, 0] += 1", "g[0, 0] = h[0]", "g[0] = h[0]", "g[0] = h", "h[0] = v",
    "g[m] = 1.0", "g[m] = v", "g[m] = h[0]", "g[m[:, 0], i] = 1.0", "g[m[:, 0], 0] = 1.0", "g[m[:, 0]] = v[None]",
    "g.index_put_((m,), v, accumulate=True)", "g[m]", "g[m[:, 0], m[0]] = 1.0", "g[m[:, 0], [0]]",
    "g[[True] * 8]", "g[m.cpu()] = 1.0", "torch.where(m)", "torch.where(m, g, 0.0)", "torch.argwhere(m)",
    "torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (4,)).coalesce()",
    "torch.sparse_coo_tensor([[0]], [1.0]).coalesce()",
    "torch.masked_select(g, m)", "m.unique()", "torch.unique(i)", "torch.unique_consecutive(g, dim=0)",
]  # fmt: skip


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("code", INDEXED)
def test_what_is_copied_for_an_index_is_told(code: str, trace: bool) -> None:
    """Numbers that are written to elements come from the host, and what a mask selects is counted for the host."""
    g, h, i = (
        torch.zeros(8, 4, device="cuda:0"),
        torch.ones(4),
        torch.zeros(1, dtype=torch.int64).to("cuda:0"),
    )
    m = torch.zeros(8, 4, dtype=torch.bool, device="cuda:0")
    report = report_of(code, trace=trace, g=g, h=h, i=i, m=m, v=torch.zeros((), device="cuda:0"))
    assert told(report) == logged()


CELLS = {
    "streams": """
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    there = pinned.to("cuda:0", non_blocking=True)
    back = there.to("cpu", non_blocking=True)
torch.cuda.current_stream().wait_stream(side)
side.synchronize()
""",
    "events": """
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
there = x.cuda()
end.record()
end.synchronize()
spent = start.elapsed_time(end)
""",
    "pinned memory": "there = torch.ones(100, 10, device='cpu').pin_memory().to('cuda:0', non_blocking=True)",
    "a graph": """
static = torch.zeros(100, 10)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    out = static * 2
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = static * 2
static.copy_(x)
graph.replay()
last = out.cpu()
""",
    "autocast": """
net = torch.nn.Linear(10, 3)
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with torch.autocast("cuda", dtype=torch.float16):
    loss = net(x.cuda()).mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    "with torch.device": """
with torch.device("cuda:1"):
    there = torch.ones(5)
with torch.device("cpu"):
    here = torch.ones(5)
both = torch.stack([there.cpu(), here])
""",
    "torch.cuda.device": """
with torch.cuda.device(1):
    one = x.cuda()
zero = x.cuda()
assert (one.device.index, zero.device.index) == (1, 0)
assert torch.ones(1).device.index == 0
""",
    "data parallel": """
net = torch.nn.DataParallel(torch.nn.Linear(10, 3), device_ids=[0, 1])
out = net(x)
""",
    "a loader with pinned memory": """
loader = torch.utils.data.DataLoader([row for row in x], batch_size=50, pin_memory=False)
for batch in loader:
    batch.to("cuda:0", non_blocking=True)
""",
    "fft and sorting": "z = x.cuda().sort().values.std(); z = float(z)",
}


WAITS_OF_TORCH = {
    "a graph": 1
}  # torch 2.13 empties its cache before a capture, for which the allocator waits


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("what", CELLS)
def test_a_cell_that_knows_cuda_is_told_as_it_is_logged(what: str, trace: bool) -> None:
    x = torch.ones(100, 10)
    report = report_of(CELLS[what], trace=trace, x=x, pinned=x.pin_memory())
    assert told(report) == logged()
    assert fakecuda.syncs() - sum(report.syncs.values()) in {0, WAITS_OF_TORCH.get(what, 0)}
    assert torch.cuda.current_device() == 0
    assert torch.ones(1).device.type == "cpu"


def test_the_device_is_the_default_and_the_current_one_and_neither_after_an_error() -> None:
    def fail() -> None:
        with gpumagic.ondevice("cuda:1"):
            assert (torch.cuda.current_device(), torch.ones(1).device.index) == (1, 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.cuda.current_device() == 0
    assert torch.get_default_device().type == "cpu"


def test_torchs_functions_are_its_own_again_after_a_cell() -> None:
    before = (
        torch.cuda.synchronize,
        torch.cuda.Stream.synchronize,
        torch.cuda.Event.synchronize,
        torch._C._scatter,
    )
    with gpumagic.ondevice("cuda:0"):
        assert torch.cuda.synchronize is not before[0]
    assert before == (
        torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize, torch._C._scatter,
    )  # fmt: skip


def test_the_peak_is_that_of_torchs_allocator() -> None:
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    report = report_of("a = torch.ones(40, 2**20); del a; b = torch.ones(1000)")
    assert report.peak == {"cuda:0": torch.cuda.max_memory_allocated(0)}
    assert report.peak["cuda:0"] == before + 160 * MIB
    assert report_of("b = torch.ones(1000)").peak == {}


def test_the_peak_of_a_lower_cell_is_not_taken_from_an_earlier_one() -> None:
    report_of("a = torch.ones(40, 2**20)")
    before = torch.cuda.max_memory_allocated(0)
    assert report_of("b = torch.ones(1000)").peak == {}
    assert torch.cuda.max_memory_allocated(0) == before


ERRORS = {
    "y = g + x": ("x on cpu", 'x = x.to("cuda:0")'),
    "y = torch.nn.Linear(10, 3)(x)": ("x is on cpu", 'x = x.to("cuda:0")'),
    "y = g @ far": ("far on cuda:1", 'far = far.to("cuda:0")'),
    "y = torch.cat([g, x])": ("x on cpu", 'x = x.to("cuda:0")'),
}


@pytest.mark.parametrize("code", ERRORS)
def test_an_error_about_devices_is_explained_as_on_simgpu(code: str, bare_shell: Any) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    names = {
        "x": torch.ones(4, 10),
        "g": torch.ones(4, 10, device="cuda:0"),
        "far": torch.ones(10, device="cuda:1"),
    }
    bare_shell.push({"torch": torch, **names})
    try:
        assert not bare_shell.run_cell(f"%%ondevice cuda:0 -q -o report\n{code}").success
        explanation = bare_shell.user_ns["report"].explanation
        what, fix = ERRORS[code]
        assert what in explanation.what
        assert explanation.fix == fix
    finally:
        bare_shell.run_line_magic("unload_ext", "gpumagic")


OPTIONS = {
    "cuda:0 --move x,net": "y = net(x)",
    "1 --move x,net": "y = net(x)",
    "cuda:7 --fallback cuda:1 --move net": "y = net(torch.ones(4, 10))",
    "cuda --trace": "y = x.to('cuda:0').sum().item()",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_magics_options_on_cuda(options: str, bare_shell: Any) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.push({"torch": torch, "x": torch.ones(4, 10), "net": torch.nn.Linear(10, 3)})
    fakecuda.reset()
    try:
        assert bare_shell.run_cell(f"%%ondevice {options} -q -o report\n{OPTIONS[options]}").success
        assert told(bare_shell.user_ns["report"]) == logged()
        assert bare_shell.user_ns["report"].device == (
            "cuda:1" if "1" in options.partition("--move")[0] else "cuda:0"
        )
    finally:
        bare_shell.run_line_magic("unload_ext", "gpumagic")


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
def test_the_allocators_settings_change_no_report(trace: bool) -> None:
    code = "y = x.to('cuda:0'); z = (y * 2).sum().item(); w = y[0].tolist(); y[0, 0] = 1.0; del y"
    x = torch.ones(1000, 1000)

    def figures() -> tuple[object, ...]:
        report = report_of(code, trace=trace, x=x)
        return told(report), dict(report.syncs), dict(report.created)

    plain = figures()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    torch.cuda.memory._record_memory_history()
    try:
        torch.cuda.empty_cache()
        assert figures() == plain
    finally:
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.cuda.empty_cache()
