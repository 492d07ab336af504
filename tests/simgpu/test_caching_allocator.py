"""The caching allocator: what it counts, what it keeps, what it gives back, and how it fails."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.stages import examples

MIB = 2**20
CARDS = ("simgpu:0", "simgpu:1")


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def expected_allocated(tensors: list[torch.Tensor], card: str) -> int:
    """Return the sum of the rounded storages that these tensors hold on a card, each once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if str(t.device) == card
    }
    return sum(map(rounded, storages.values()))


@pytest.fixture(autouse=True)
def fresh_peaks(empty_devices: None) -> None:
    for index in range(2):
        assert torch.simgpu.memory_reserved(index) == 0
        torch.simgpu.reset_peak_memory_stats(index)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["new", "new", "free", "view", "copy", "resize", "add", "cat", "mask", "storage"]
        ),
        st.sampled_from(CARDS),
        st.integers(0, 3 * MIB),
        st.integers(0, 10**6),
    ),
    max_size=30,
)


def step(tensors: list[torch.Tensor], kind: str, card: str, size: int, pick: int) -> None:
    if kind == "new" or not tensors:
        tensors.append(torch.zeros(size, dtype=torch.uint8, device=card))
        return
    chosen = tensors[pick % len(tensors)]
    if kind == "free":
        tensors.pop(pick % len(tensors))
    elif kind == "view":
        tensors.append(chosen.view(-1)[: chosen.numel() // 2])
    elif kind == "copy":
        tensors.append(chosen.to(card))
    elif kind == "resize":
        chosen.resize_(size)
    elif kind == "add":
        tensors.append(chosen + 1)
    elif kind == "cat":
        tensors.append(torch.cat([chosen, chosen]))
    elif kind == "mask":
        tensors.append(chosen[chosen == 0])
    else:
        chosen.untyped_storage().resize_(chosen.untyped_storage().nbytes() + size)


@examples(few=15, deep=100)
@given(program=OPERATIONS)
def test_allocated_is_the_sum_of_the_live_storages(
    program: list[tuple[str, str, int, int]],
) -> None:
    """Whatever is made, viewed, grown, copied and freed, on two cards, after every step, and nothing is left over."""
    tensors: list[torch.Tensor] = []
    for kind, card, size, pick in program:
        step(tensors, kind, card, size, pick)
        for index, name in enumerate(CARDS):
            allocated = torch.accelerator.memory_allocated(index)
            assert (
                allocated
                == torch.simgpu.memory_allocated(index)
                == expected_allocated(tensors, name)
            )
            assert allocated <= torch.accelerator.memory_reserved(index)
            assert allocated <= torch.accelerator.max_memory_allocated(index)
    tensors.clear()
    torch.accelerator.empty_cache()
    for index in range(2):
        assert (
            torch.accelerator.memory_allocated(index)
            == torch.accelerator.memory_reserved(index)
            == 0
        )


def blocks(card: str, state: str) -> list[tuple[int, int]]:
    """Return address and size of a card's blocks in a state, from the snapshot."""
    segments = [
        each for each in torch.simgpu.memory_snapshot() if f"simgpu:{each['device']}" == card
    ]
    assert sum(each["total_size"] for each in segments) == torch.simgpu.memory_reserved(card)
    assert all(
        sum(block["size"] for block in each["blocks"]) == each["total_size"] for each in segments
    )
    return [
        (block["address"], block["size"])
        for each in segments
        for block in each["blocks"]
        if block["state"] == state
    ]


@examples(few=10, deep=60)
@given(program=OPERATIONS)
def test_the_snapshot_has_every_live_storage_at_the_address_that_its_tensors_give(
    program: list[tuple[str, str, int, int]],
) -> None:
    tensors: list[torch.Tensor] = []
    for operation in program:
        step(tensors, *operation)
    for card in CARDS:
        storages = {
            each.untyped_storage() for each in tensors if str(each.device) == card and each.numel()
        }
        expected = {(each.data_ptr(), rounded(each.nbytes())) for each in storages}
        assert expected <= set(blocks(card, "active_allocated"))
        assert sum(
            size for _, size in blocks(card, "active_allocated")
        ) == torch.simgpu.memory_allocated(card)
    del storages, tensors
    torch.simgpu.empty_cache()


def test_the_snapshot_tells_segments_in_their_parts() -> None:
    kept = [torch.empty(3 * MIB, dtype=torch.uint8, device="simgpu:0") for _ in range(3)]
    del kept[1]
    (segment,) = torch.simgpu.memory_snapshot()
    told = [(block["size"] // MIB, block["state"]) for block in segment["blocks"]]
    assert told == [
        (3, "active_allocated"),
        (3, "inactive"),
        (3, "active_allocated"),
        (11, "inactive"),
    ]
    assert (segment["segment_type"], segment["total_size"], segment["allocated_size"]) == (
        "large",
        20 * MIB,
        6 * MIB,
    )
    kept.clear()
    torch.simgpu.empty_cache()
    assert torch.simgpu.memory_snapshot() == []


def test_segments_are_cudas() -> None:
    """2 MiB for small blocks, 20 MiB for blocks under 10 MiB, a multiple of 2 MiB above."""
    reserved = []
    kept = []
    for size in (1, MIB, MIB + 1, 9 * MIB, 15 * MIB + 1):
        kept.append(torch.empty(size, dtype=torch.uint8, device="simgpu"))
        reserved.append(torch.simgpu.memory_reserved() // MIB)
    assert reserved == [2, 2, 22, 22, 38]


def test_a_freed_block_is_kept_and_used_again() -> None:
    """Reserved memory stays after a tensor dies, serves the next one, and goes with `empty_cache`."""
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="simgpu")
    del x
    assert (torch.simgpu.memory_allocated(), torch.simgpu.memory_reserved()) == (0, 30 * MIB)
    x = torch.empty(25 * MIB, dtype=torch.uint8, device="simgpu")
    assert torch.simgpu.memory_reserved() == 30 * MIB
    torch.simgpu.empty_cache()
    assert torch.simgpu.memory_reserved() == 30 * MIB
    assert x.numel() == 25 * MIB


def test_peaks_last_until_they_are_reset() -> None:
    """The peak outlives the tensors; a reset starts it from the present."""
    torch.empty(8 * MIB, dtype=torch.uint8, device="simgpu:1")
    assert torch.simgpu.max_memory_allocated(1) == 8 * MIB
    assert torch.simgpu.max_memory_reserved("simgpu:1") == 20 * MIB
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == 0


def test_statistics_have_torch_cudas_names() -> None:
    """`torch.simgpu` and `torch.accelerator` give the same figures, by pool and kind."""
    x = torch.empty(100, dtype=torch.uint8, device="simgpu")
    stats = torch.simgpu.memory_stats()
    assert stats["allocated_bytes.small_pool.current"] == 512
    assert stats["requested_bytes.all.current"] == x.numel()
    assert stats["inactive_split_bytes.all.current"] == 2 * MIB - 512
    assert stats["segment.all.current"] == stats["active.all.current"] == 1
    general = torch.accelerator.memory_stats(0)
    assert {name: general[name] for name in stats if name in general} == {
        name: value for name, value in stats.items() if name in general
    }
    assert len(set(stats) & set(general)) > 100


def test_free_and_total_are_the_cards() -> None:
    """What is reserved, in use or cached, is not free."""
    kept = torch.empty(MIB, dtype=torch.uint8, device="simgpu")
    assert torch.simgpu.mem_get_info() == (4 * 2**30 - 2 * MIB, 4 * 2**30)
    assert torch.accelerator.get_memory_info() == torch.simgpu.mem_get_info("simgpu:0")
    assert torch.accelerator.get_memory_info(1)[0] == 4 * 2**30
    assert kept.numel()


def test_too_large_a_tensor_raises_torchs_out_of_memory() -> None:
    """The real exception, in CUDA's words, with the sizes of this moment; what was free stays usable."""
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="simgpu:1")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(7 << 29, dtype=torch.uint8, device="simgpu:1")
    assert str(caught.value) == (
        "simgpu out of memory. Tried to allocate 3.50 GiB. GPU 1 has a total capacity of 4.00 GiB of which 3.00 GiB "
        "is free. Of the allocated memory 1.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated."
    )
    assert torch.simgpu.memory_allocated(1) == kept.numel()
    assert torch.empty(3 << 30, dtype=torch.uint8, device="simgpu:1").numel() == 3 << 30


def test_cached_blocks_are_given_back_before_it_gives_up() -> None:
    """A full cache makes room for a new size instead of failing."""
    retries = torch.simgpu.memory_stats()["num_alloc_retries"]
    for size in (3 << 30, 7 << 29):
        torch.empty(size, dtype=torch.uint8, device="simgpu")
    stats = torch.simgpu.memory_stats()
    assert stats["num_alloc_retries"] == retries + 1
    assert torch.simgpu.memory_reserved() == 7 << 29


@pytest.mark.filterwarnings("ignore")
def test_an_operator_that_runs_out_leaves_nothing_behind() -> None:
    """The result of an operator, and the growth of an `out=` tensor, are refused without a trace."""
    x = torch.empty(3 << 30, dtype=torch.uint8, device="simgpu")
    out = torch.empty(5, dtype=torch.uint8, device="simgpu")
    ooms = torch.simgpu.memory_stats()["num_ooms"]
    for attempt in (
        lambda: x + 1,
        lambda: torch.cat([x, x]),
        lambda: torch.neg(x, out=out),
        lambda: out.resize_(x.shape),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()
    assert torch.simgpu.memory_stats()["num_ooms"] == ooms + 4
    assert torch.simgpu.memory_allocated() == (3 << 30) + 512
    assert out.untyped_storage().nbytes() == 5


def test_a_kernel_is_stopped_before_it_fills_the_host() -> None:
    """A result beyond the whole card is refused when the CPU kernel asks the host for it, not after computing it."""
    x = torch.ones(1 << 20, device="simgpu")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4096\.00 GiB"):
        torch.cdist(x[:, None], x[:, None])


def test_threads_allocate_and_free_at_once() -> None:
    """The books balance after many threads."""

    def work(card: str) -> None:
        for size in range(1, 200):
            torch.empty(size * 997, dtype=torch.uint8, device=card)

    threads = [threading.Thread(target=work, args=(CARDS[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.simgpu.memory_allocated(i) for i in range(2)] == [0, 0]
    torch.simgpu.empty_cache()
    assert [torch.simgpu.memory_reserved(i) for i in range(2)] == [0, 0]


def test_views_share_their_storage() -> None:
    """Views made by every common route cost nothing and see writes."""
    x = torch.zeros(4, 6, device="simgpu")
    before = torch.simgpu.memory_allocated()
    views = [
        x.view(6, 4),
        x.T,
        x[1:3],
        x[..., None],
        x.expand(2, 4, 6),
        x.unfold(1, 2, 2),
        x.diagonal(),
        x.detach(),
        *x.split(2),
    ]
    assert torch.simgpu.memory_allocated() == before
    x.fill_(3)
    assert all((view == 3).all().item() for view in views)
    assert {view.untyped_storage().data_ptr() for view in views} == {x.untyped_storage().data_ptr()}
    pairs = torch.zeros(3, dtype=torch.complex64, device="simgpu")
    torch.view_as_real(pairs)[:, 1] = 2
    assert torch.equal(pairs.imag, torch.full((3,), 2.0, device="simgpu"))
