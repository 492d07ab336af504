"""Devices over the fake CUDA runtime: pinned memory, processes, and what torch says of each."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpumagic import fakecuda
from gpumagic.memory import presets
from tests.forks import Forks

MIB = 1024**2


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    process = Forks()
    yield process
    process.close()


# Pinned memory, loaders, processes


def test_pinned_memory_is_known_as_such_until_it_is_freed() -> None:
    pinned = torch.empty(1000, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[500:].is_pinned()
    assert not torch.empty(1000).is_pinned()
    shared = torch.empty(1000).share_memory_()
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(shared.data_ptr(), shared.nbytes, 0)) == 0
    assert shared.is_pinned()
    assert int(runtime.cudaHostUnregister(shared.data_ptr())) == 0
    assert not shared.is_pinned()
    assert (
        int(runtime.cudaHostUnregister(shared.data_ptr())) == 713
    )  # cudaErrorHostMemoryNotRegistered
    ctypes.CDLL(None).cudaGetLastError()


def test_a_loader_with_workers_pins_its_batches_and_they_arrive() -> None:
    data = TensorDataset(torch.arange(32.0))
    loader = DataLoader(
        data, batch_size=8, num_workers=1, pin_memory=True, multiprocessing_context="fork"
    )
    batches = []
    for (batch,) in loader:
        assert batch.is_pinned()
        batches.append(batch.to("cuda:0", non_blocking=True))
    assert torch.equal(torch.cat([batch.cpu() for batch in batches]), torch.arange(32.0))


def _try_cuda(queue: multiprocessing.Queue[str]) -> None:
    try:
        torch.zeros(1, device="cuda:0")
        queue.put("it works")
    except RuntimeError as error:
        queue.put(str(error))


def test_cuda_cannot_be_used_in_a_fork_of_a_process_that_used_it() -> None:
    torch.zeros(1, device="cuda:0")
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork of a process with threads
        child = context.Process(target=_try_cuda, args=(queue,))
        child.start()
    assert "Cannot re-initialize CUDA in forked subprocess" in queue.get(timeout=60)
    child.join()


def test_a_tensor_that_is_there_cannot_be_used_in_a_fork_either() -> None:
    x = torch.zeros(10, device="cuda:0")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            said = str(x + 1)
        except Exception as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert b"initialization error" in pipe.read()
    os.waitpid(child, 0)


def test_a_process_that_is_spawned_has_devices_of_its_own() -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=_try_cuda, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == "it works"
    child.join()


def test_memory_of_a_device_cannot_be_shared_with_another_process() -> None:
    with pytest.raises(RuntimeError, match="not supported"):
        torch.zeros(10, device="cuda:0").untyped_storage()._share_cuda_()


# Devices


@pytest.mark.parametrize("peer", [False, True])
def test_devices_read_each_other_as_the_settings_say(forks: Forks, peer: bool) -> None:
    settings = os.environ[fakecuda.VARIABLE].replace("peer=0", f"peer={int(peer)}")
    answer = forks.run(
        """
x = torch.arange(10.0).to("cuda:0")
answer = [torch.cuda.can_device_access_peer(0, 1), x.to("cuda:1").cpu().tolist()]
""",
        **{fakecuda.VARIABLE: settings},
    )
    assert answer == [peer, list(range(10))]


def test_a_machine_without_gpus_is_one_for_torch_too(forks: Forks) -> None:
    answer = forks.run(
        """
try:
    torch.zeros(1, device="cuda")
except RuntimeError as error:
    said = str(error)
answer = [torch.cuda.is_available(), torch.cuda.device_count(), said]
""",
        **{fakecuda.VARIABLE: "peer=0"},
    )
    assert answer == [False, 0, "No CUDA GPUs are available"]


@pytest.mark.parametrize("first", range(0, len(presets.GPUS), fakecuda.MOST_DEVICES))
def test_what_torch_says_of_a_device_makes_the_same_device_again(forks: Forks, first: int) -> None:
    gpus = list(presets.GPUS.values())[first : first + fakecuda.MOST_DEVICES]
    settings = (presets.settings(gpu, number, 0) for number, gpu in enumerate(gpus))
    answer = forks.run(
        """
import dataclasses
from gpumagic.memory import presets
devices = range(torch.cuda.device_count())
answer = [[dataclasses.asdict(presets.like(i)), torch.cuda.mem_get_info(i)[1]] for i in devices]
""",
        **{fakecuda.VARIABLE: "|".join(["peer=0", *settings])},
    )
    assert answer == [[dataclasses.asdict(gpu), gpu.capacity] for gpu in gpus]


def test_looking_makes_no_context_on_any_device(forks: Forks) -> None:
    answer = forks.run("""
seen = []
def look(what):
    seen.append([what, [fakecuda.memory(i).context for i in (0, 1)]])

look("nothing")
gpumagic.gpuinfo(); look("gpuinfo")
torch.cuda.is_available(); torch.cuda.device_count(); look("count")
[torch.cuda.get_device_properties(i) for i in (0, 1)]; torch.cuda.get_device_capability(1); look("properties")
torch.cuda.get_arch_list(); torch.cuda.get_device_name(1); look("names")
gpumagic.gpuinfo(); look("gpuinfo again")
torch.zeros(1, device="cuda:1")
answer = [seen, [fakecuda.memory(i).context for i in (0, 1)]]
""")
    seen, after = answer
    assert all(contexts == [False, False] for _, contexts in seen), seen
    assert after == [False, True]


def test_devices_that_became_invisible_after_cuda_was_up_stay(forks: Forks) -> None:
    answer = forks.run("""
before = [fakecuda.memory(1).capacity > 0, torch.cuda.device_count()]
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
torch.zeros(1, device="cuda")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
torch.zeros(1, device="cuda")
try:
    fakecuda.memory(1)
except IndexError as error:
    answer = [*before, str(error), fakecuda.memory(0).used]
""")
    assert answer == [True, 2, "there is no device 1", 2 * MIB]


def test_a_device_that_is_not_there_is_torchs_own_error() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:7")
    assert torch.zeros(1, device="cuda:0").is_cuda
    value = ctypes.c_int()
    for function in ("cudaDeviceGetAttribute", "cuDeviceGetAttribute"):
        assert (
            getattr(ctypes.CDLL(None), function)(ctypes.byref(value), 16, 99) == 101
        )  # invalid device
    ctypes.CDLL(None).cudaGetLastError()


@pytest.mark.parametrize("gpu", ["L4", "RTX 4090", "H100"])
def test_kernels_of_cub_run_on_a_gpu_whose_architecture_torch_has_no_code_of_its_own_for(
    gpu: str,
) -> None:
    """As a GPU does, each runs the newest code for its major version; CUB refuses what it was not compiled for."""
    forks = Forks(**fakecuda.environment(gpu))
    try:
        assert forks.run(
            "answer = list(torch.cumsum(torch.ones(1, 128, device='cuda'), 1).shape)"
        ) == [1, 128]
    finally:
        forks.close()
