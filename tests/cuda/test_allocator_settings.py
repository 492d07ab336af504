"""Torch's allocator over the fake runtime, under each of its settings: the card holds what torch says it reserved."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpumagic import fakecuda
from tests.forks import Forks

MIB = 1024**2
INVALID_VALUE = 1  # cudaErrorInvalidValue
SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"  # torch 2.9 and later also read PYTORCH_ALLOC_CONF


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    process = Forks()
    yield process
    process.close()


LIFE = """
def figures(device=0):
    return [fakecuda.memory(device).used, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)]

kept, rows = [], []
for size in (1000, 3 * MIB, 50 * MIB, 700 * MIB, 5000):
    kept.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))
    rows.append(figures())
del kept[1::2]
rows.append(figures())
kept.append(torch.empty(60 * MIB, dtype=torch.uint8, device="cuda:0"))
rows.append(figures())
kept.clear()
torch.cuda.empty_cache()
rows.append(figures())
answer = rows
"""


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.6",
        "roundup_power2_divisions:4",
        "expandable_segments:True",
        "pinned_use_cuda_host_register:True",
    ],
)
def test_the_card_holds_what_torch_has_reserved(forks: Forks, setting: str) -> None:
    rows = forks.run(LIFE, **{SETTINGS: setting})
    assert all(used == reserved for used, reserved, _ in rows), rows
    assert max(allocated for *_, allocated in rows) > 750 * MIB
    assert rows[-1] == [0, 0, 0]


def test_expandable_segments_grow_in_place_and_never_split_the_card(forks: Forks) -> None:
    answer = forks.run(
        """
fakecuda.set_memory(0, capacity=1000 * MIB)
first = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:0") for _ in range(9)]
del first[::2]                                          # 500 MiB free, no two of them side by side
large = torch.empty(450 * MIB, dtype=torch.uint8, device="cuda:0")
segments = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
try:
    torch.empty(500 * MIB, dtype=torch.uint8, device="cuda:0")
except torch.OutOfMemoryError as error:
    refused = "Tried to allocate 500.00 MiB" in str(error)
held = fakecuda.memory(0).used
del first, large
torch.cuda.empty_cache()
answer = [sorted(segments), refused, held <= 1000 * MIB, fakecuda.memory(0).used]
""",
        **{SETTINGS: "expandable_segments:True"},
    )
    assert answer == [[True], True, True, 0]


def test_expandable_segments_keep_their_contents_as_they_grow_on_two_devices(forks: Forks) -> None:
    answer = forks.run(
        """
kept = []
for index in range(40):
    kept.append(torch.full((5 * MIB,), index, dtype=torch.uint8).to(f"cuda:{index % 2}"))
copied = [tensor.to(f"cuda:{(index + 1) % 2}") for index, tensor in enumerate(kept)]
right = all(bool((tensor.cpu() == index).all()) for index, tensor in enumerate(kept))
right_there = all(bool((tensor.cpu() == index).all()) for index, tensor in enumerate(copied))
both = [fakecuda.memory(device).used == torch.cuda.memory_reserved(device) for device in (0, 1)]
answer = [right, right_there, both]
""",
        **{SETTINGS: "expandable_segments:True"},
    )
    assert answer == [True, True, [True, True]]


def test_without_expandable_segments_the_same_cell_finds_no_room(forks: Forks) -> None:
    answer = forks.run("""
fakecuda.set_memory(0, capacity=1000 * MIB)
first = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:0") for _ in range(9)]
middle = first[4]
del first
try:
    torch.empty(950 * MIB, dtype=torch.uint8, device="cuda:0")
    answer = "it fits"
except torch.OutOfMemoryError as error:
    answer = "Tried to allocate 950.00 MiB" in str(error)
""")
    assert answer is True


def test_the_asynchronous_allocator_of_cuda_reserves_in_its_own_chunks() -> None:
    forks = Forks(**{SETTINGS: "backend:cudaMallocAsync"})
    try:
        answer = forks.run(
            """
assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
fakecuda.set_memory(0, capacity=1000 * MIB)
kept = [torch.arange(1000, device="cpu").to("cuda:0") for _ in range(100)]
kept.append(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:0"))
figures = [fakecuda.memory(0).used == torch.cuda.memory_reserved(0), torch.cuda.memory_reserved(0) // MIB,
           torch.cuda.memory_allocated(0) >= 100 * 8000 + 100 * MIB]
right = all(tensor.cpu().tolist() == list(range(1000)) for tensor in kept[:100])
try:
    torch.empty(900 * MIB, dtype=torch.uint8, device="cuda:0")
    refused = False
except torch.OutOfMemoryError:
    refused = True
kept.clear()
torch.cuda.synchronize()
torch.cuda.empty_cache()
answer = [*figures, right, refused, torch.cuda.memory_reserved(0), fakecuda.memory(0).used]
"""
        )
    finally:
        forks.close()
    assert answer == [True, 160, True, True, True, 0, 0]


def test_memory_history_and_snapshots_have_what_happened(forks: Forks, tmp_path: Path) -> None:
    answer = forks.run(
        f"""
torch.cuda.memory._record_memory_history(max_entries=1000)
kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda:0")
gone = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda:0")
del gone
path = {str(tmp_path)!r} + "/snapshot.pickle"
torch.cuda.memory._dump_snapshot(path)
snapshot = torch.cuda.memory._snapshot()
torch.cuda.memory._record_memory_history(enabled=None)
actions = [entry["action"] for entry in snapshot["device_traces"][0]]
held = [block["size"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]
        if block["state"] == "active_allocated"]
answer = [os.path.getsize(path) > 0, actions, held]
"""
    )
    assert answer[1][:5] == ["segment_alloc", "alloc", "alloc", "free_requested", "free_completed"]
    assert answer[::2] == [True, [3 * MIB]]


def test_a_fraction_of_the_memory_is_a_limit_that_torch_keeps(forks: Forks) -> None:
    answer = forks.run("""
fakecuda.set_memory(0, capacity=1000 * MIB)
torch.cuda.set_per_process_memory_fraction(0.5, 0)
kept = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda:0")
try:
    torch.empty(200 * MIB, dtype=torch.uint8, device="cuda:0")
    answer = "it fits"
except torch.OutOfMemoryError as error:
    answer = "500.00 MiB" in str(error)
""")
    assert answer is True


def test_what_others_hold_is_missing_when_the_card_is_full(forks: Forks) -> None:
    answer = forks.run("""
fakecuda.set_memory(0, capacity=1000 * MIB, others=700 * MIB)
before = torch.cuda.mem_get_info(0)
try:
    torch.empty(400 * MIB, dtype=torch.uint8, device="cuda:0")
except torch.OutOfMemoryError as error:
    answer = [before, fakecuda.memory(0).used, "of which 300.00 MiB is free" in str(error)]
""")
    assert answer == [[300 * MIB, 1000 * MIB], 0, True]


def test_memory_that_is_freed_twice_is_refused_and_counted_once() -> None:
    runtime, pointer, before = ctypes.CDLL(None), ctypes.c_void_p(), fakecuda.memory(0).used
    with torch.cuda.device(0):
        assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(5 * MIB)) == 0
        assert fakecuda.memory(0).used - before == 6 * MIB
        assert runtime.cudaFree(pointer) == 0
        assert runtime.cudaFree(pointer) == INVALID_VALUE
        assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(0)) == 0
        assert pointer.value is None
    runtime.cudaGetLastError()  # or torch would find it at its next kernel
    assert fakecuda.memory(0).used == before


def test_addresses_are_used_again_the_lowest_first() -> None:
    tensors = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:0") for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    del tensors
    torch.cuda.empty_cache()
    again = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:0") for _ in range(3)]
    assert [tensor.data_ptr() for tensor in again] == addresses
    assert not again[0].cpu().any()
