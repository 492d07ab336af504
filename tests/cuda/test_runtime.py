"""Streams, events, graphs, pinned memory, kernels and errors of torch's own CUDA over the fake runtime."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpumagic import fakecuda
from tests.forks import Forks

MIB = 1024**2
ADD = "CUDAFunctorOnSelf_add"  # of x + 1


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    process = Forks()
    yield process
    process.close()


def launched(name: str) -> int:
    """Return how many kernels were launched with a word in their name."""
    return sum(count for kernel, count in fakecuda.launches().items() if name in kernel)


# Kernels


def test_kernels_are_counted_by_their_names() -> None:
    x = torch.zeros(10, device="cuda:0")
    fakecuda.reset()
    for _ in range(3):
        x + 1
    assert launched(ADD) == 3
    assert all(name.startswith("_Z") for name in fakecuda.launches())
    fakecuda.reset()
    assert not fakecuda.launches()


def test_threads_that_launch_and_copy_at_once_lose_no_entry_of_the_log() -> None:
    def work(device: int) -> None:
        x = torch.arange(100.0).to(f"cuda:{device}")
        for _ in range(200):
            x + 1
            x.cpu()

    fakecuda.reset()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [0, 1, 0, 1]))
    assert launched(ADD) == 800
    assert len([copy for copy in fakecuda.copies() if copy.direction == "device-to-host"]) == 800


def test_a_launch_that_no_gpu_takes_raises_torchs_own_error() -> None:
    kernel = torch.cuda._compile_kernel(
        "__global__ void nothing() {}", "nothing", compute_capability="80"
    )
    fakecuda.reset()
    kernel(grid=(1, 1, 1), block=(32, 1, 1))
    with pytest.raises(RuntimeError, match="invalid argument"):
        kernel(grid=(1, 1, 1), block=(2048, 1, 1))
    assert launched("nothing") == 1


def test_kernels_that_nvrtc_compiles_run_under_the_name_they_were_given() -> None:
    twice = torch.cuda.jiterator._create_jit_fn(
        "template <typename T> T twice(T x) { return x + x; }"
    )
    x = torch.zeros(10, device="cuda:0")
    fakecuda.reset()
    assert twice(x).shape == torch.special.bessel_j0(x).shape == (10,)
    assert len(fakecuda.launches()) == 2


def test_a_compiled_function_runs_the_kernels_that_triton_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    compiled = torch.compile(
        lambda x: torch.nn.functional.gelu(x) * 2 + 1, mode="reduce-overhead", dynamic=False
    )
    x = torch.zeros(16, 64, device="cuda:0")
    for _ in range(3):
        compiled(x)
    fakecuda.reset()
    assert compiled(x).shape == (16, 64)
    assert launched("triton_poi_fused") == launched("a CUDA graph") == 1
    torch._dynamo.reset()


# CUDA graphs


def test_a_graph_copies_again_what_is_there_when_it_is_replayed() -> None:
    source, target = torch.zeros(1000, device="cuda:0"), torch.zeros(1000, device="cuda:0")
    host = torch.zeros(1000).pin_memory()
    graph = torch.cuda.CUDAGraph()
    fakecuda.reset()
    with torch.cuda.graph(graph):
        target.copy_(source)
        target + 1
        host.copy_(target, non_blocking=True)
    assert not fakecuda.copies()
    assert not launched(ADD)
    source.copy_(torch.arange(1000.0))
    fakecuda.reset()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(host, torch.arange(1000.0))
    assert launched(ADD) == launched("a CUDA graph") == 2
    assert [copy.direction for copy in fakecuda.copies()] == [
        "within a device",
        "device-to-host",
    ] * 2


def test_a_graph_keeps_a_pool_of_its_own_and_gives_it_back() -> None:
    x = torch.zeros(1000, device="cuda:0")
    before = fakecuda.memory(0).used
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda:0")
        z = x * 2
    torch.cuda.empty_cache()
    assert fakecuda.memory(0).used - before >= 50 * MIB
    assert any(segment["segment_pool_id"] != (0, 0) for segment in torch.cuda.memory_snapshot())
    del y, z, graph
    torch.cuda.empty_cache()
    assert fakecuda.memory(0).used == torch.cuda.memory_reserved(0) <= before


def test_graphed_callables_train() -> None:
    model = torch.nn.Linear(16, 16).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.zeros(4, 16, device="cuda:0"),))
    x = torch.zeros(4, 16, device="cuda:0")
    fakecuda.reset()
    graphed(x).sum().backward()
    assert launched("a CUDA graph") == 2
    assert model.weight.grad is not None


def test_a_wait_in_a_capture_is_torchs_error_and_the_device_works_afterwards() -> None:
    x = torch.ones(10, device="cuda:0")
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        (x + 1).sum().item()
    torch.cuda.set_stream(
        torch.cuda.default_stream()
    )  # torch leaves the capture's stream when its end fails
    assert torch.equal(torch.arange(5.0).cuda().cpu(), torch.arange(5.0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x + 1
    graph.replay()


def test_a_capture_takes_the_streams_in_that_wait_for_it() -> None:
    x, side = torch.zeros(10, device="cuda:0"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        torch.cuda.current_stream().wait_stream(side)
    fakecuda.reset()
    graph.replay()
    assert launched(ADD) == 1


# Streams and events


def test_streams_have_their_priorities_and_events_their_times() -> None:
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    assert (low.priority, high.priority) == (0, -1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(high)
    with torch.cuda.stream(high):
        x = torch.zeros(10, device="cuda:0")
        x.record_stream(low)
    end.record(high)
    end.synchronize()
    assert start.query()
    assert start.elapsed_time(end) > 0
    with pytest.raises((RuntimeError, ValueError)):
        torch.cuda.Event().elapsed_time(end)
    unrecorded = torch.cuda.Event(enable_timing=True)
    with pytest.raises((RuntimeError, ValueError)):
        unrecorded.elapsed_time(end)


def test_copies_know_the_stream_they_were_made_on() -> None:
    stream = torch.cuda.Stream()
    host = torch.arange(100.0).pin_memory()
    fakecuda.reset()
    with torch.cuda.stream(stream):
        there = host.to("cuda:0", non_blocking=True)
    there.cpu()
    first, second = fakecuda.copies()
    assert (first.stream, first.pinned) == (stream.cuda_stream, True)
    assert (second.stream, second.pinned) == (0, False)


def test_every_wait_of_the_host_is_a_sync() -> None:
    x = torch.zeros(10, device="cuda:0")
    event = torch.cuda.Event()
    event.record()
    fakecuda.reset()
    for wait in (
        torch.cuda.synchronize,
        torch.cuda.current_stream().synchronize,
        event.synchronize,
        x[0].item,
    ):
        before = fakecuda.syncs()
        wait()
        assert fakecuda.syncs() == before + 1, wait


def test_an_external_event_is_recorded_when_its_graph_is_replayed() -> None:
    before, inside = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(10, device="cuda:0")
    with torch.cuda.graph(graph):
        x + 1
        inside.record()
    before.record()
    graph.replay()
    assert before.elapsed_time(inside) > 0


# What else people run


def test_training_steps_with_checkpoints_and_generators_run() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator("cuda").manual_seed(3)
    for _ in range(2):
        x = torch.randn(8, 32, device="cuda:0", generator=generator)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        optimizer.step()
    assert generator.initial_seed() == 3
    assert generator.get_state().numel() == 16


def test_arrays_of_the_device_go_through_dlpack_in_place() -> None:
    x = torch.zeros(10, device="cuda:1")
    with torch.cuda.device(1):
        for same in (
            torch.utils.dlpack.from_dlpack(x),
            torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
        ):
            assert (same.data_ptr(), same.device) == (x.data_ptr(), x.device)


def test_the_profiler_runs_and_has_the_hosts_side() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    x = torch.zeros(10, device="cuda:0")
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        x + 1
    assert any(event.key == "aten::add" for event in profile.key_averages())


def test_launches_that_block_run_too(forks: Forks) -> None:
    answer = forks.run(
        'x = torch.ones(10, device="cuda"); x + 1; answer = len(fakecuda.launches())',
        CUDA_LAUNCH_BLOCKING="1",
    )
    assert answer == 2


# The end of a script

ENDS_BEHIND_BACKWARD = """
import sys, torch
x = torch.ones(10, 10, device="cuda", requires_grad=True)
sys.setswitchinterval(60)  # torch's thread does not have the GIL again before Python finalizes
(x @ x).sum().backward()
"""


def test_a_script_may_end_right_after_a_backward_pass() -> None:
    """Torch's thread of the device still holds the pass then. That aborted every second of these."""
    for _ in range(6):
        command = [sys.executable, "-c", ENDS_BEHIND_BACKWARD]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
