"""The allocator that a dry run reckons with puts blocks where the simulated card's puts them."""

from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.worker.fake.allocator import Allocator
from tests.stages import examples

SIZES = st.one_of(
    st.integers(1, 1 << 20),
    st.integers(1, 24 << 20),
    st.sampled_from([512, 1 << 20, (1 << 20) + 1]),
)
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=60)


@examples(few=8, deep=40)
@given(STEPS)
def test_it_reserves_what_the_simulated_card_reserves(two_devices, steps) -> None:
    """After every request and release, from an empty card."""
    gc.collect()
    torch.simgpu.empty_cache()
    base = torch.simgpu.memory_reserved(1)
    if base:
        return  # another test of this process still holds something there
    allocator, live = Allocator(4 << 30, cuts_to_size=True), []
    for frees, size, pick in steps:
        if frees and live:
            tensor, block = live.pop(pick % len(live))
            del tensor
            allocator.give_back(block)
        else:
            live.append(
                (torch.empty(size, dtype=torch.uint8, device="simgpu:1"), allocator.take(size))
            )
        assert allocator.reserved == torch.simgpu.memory_reserved(1)
    live.clear()
    torch.simgpu.empty_cache()


def test_a_full_device_gives_cached_segments_back_before_it_refuses() -> None:
    allocator = Allocator(100 << 20, cuts_to_size=True)
    allocator.give_back(allocator.take(80 << 20))
    allocator.take(90 << 20)
    assert not allocator.failed
    assert allocator.reserved == 90 << 20
    allocator.take(20 << 20)
    assert allocator.failed


def test_cudas_leaves_a_small_remainder_with_a_large_block() -> None:
    """From c10/cuda/CUDACachingAllocator: a remainder of at most 1 MiB is not cut off; simgpu cuts it."""
    size = (20 << 20) - (1 << 19)
    assert Allocator(None, cuts_to_size=True).take(size).size == size
    assert Allocator(None, cuts_to_size=False).take(size).size == 20 << 20
    assert Allocator(None, cuts_to_size=False).take(5 << 20).size == 5 << 20
