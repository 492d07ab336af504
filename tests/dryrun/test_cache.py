"""A dry run begins where the device's own cache stands: what lies scattered there decides what fits."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gpumagic
from gpumagic.dryrun import targets
from gpumagic.memory import allocator, segments
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.worker.fake.allocator import Allocator
from tests.stages import examples

KIB, MIB = 1 << 10, 1 << 20
DEVICE = "simgpu:1"
SIZES = st.sampled_from([
    700, 300 * KIB, 2 * MIB, 15 * MIB, 90 * MIB, 300 * MIB, 301 * MIB, 600 * MIB, 1200 * MIB, 1300 * MIB
])  # fmt: skip
STEPS = st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=25)
"""What is asked for; a negative number lets go of what is alive, counted from the end."""


@pytest.fixture(scope="module")
def card(two_devices):
    """Begin with an empty cache."""
    gc.collect()
    torch.simgpu.empty_cache()


def lines(steps, alive) -> str:
    """Return code that does the steps; the names that are alive are changed with it."""
    code = ["pass"]
    for number, step in enumerate(steps):
        if step > 0:
            alive.append(f"t{len(alive)}_{number}")
            code.append(f"{alive[-1]} = torch.empty({step}, dtype=torch.uint8, device={DEVICE!r})")
        elif alive:
            code.append(f"del {alive.pop(step % len(alive))}")
    return "\n".join(code)


def fits(code, namespace) -> bool:
    try:
        exec(code, namespace)
    except torch.OutOfMemoryError:
        return False
    return True


@examples(few=3, deep=20)
@given(STEPS, STEPS)
@example([300 * MIB] * 12 + [-11, -9, -7, -5, -3, -1], [600 * MIB])
@example([1300 * MIB, 15 * MIB, -2], [1300 * MIB, 1300 * MIB])
@example([1300 * MIB, 300 * MIB, 1300 * MIB, -3, -1], [1300 * MIB, 1300 * MIB, 300 * MIB])
def test_a_cell_fits_if_and_only_if_it_is_said_to(card, before, cell) -> None:
    """After any requests and releases, on the card as they left it."""
    namespace, alive = {"torch": torch}, []
    code = lines(before, alive)
    if not fits(code, namespace):
        alive = [name for name in namespace if name.startswith("t") and name != "torch"]
    code = lines(cell, alive)
    try:
        report = gpumagic.dry_run(code, namespace, device=DEVICE)
        assert report.devices[1].before == torch.simgpu.memory_allocated(DEVICE)
        assert report.fits is fits(code, namespace), report.verdict
    finally:
        namespace.clear()
        torch.simgpu.empty_cache()


def test_memory_in_pieces_is_said_to_be_the_reason(card) -> None:
    """Half of the card is free, in gaps of 300 MiB."""
    kept = [torch.empty(300 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(12)][::2]
    torch.simgpu.empty_cache()  # whole segments go back, so it is these gaps that must be made
    code = f"x = torch.empty(2200 * {MIB}, dtype=torch.uint8, device={DEVICE!r})"
    assert gpumagic.dry_run(code, {"torch": torch, "kept": kept}, device=DEVICE).fits
    kept.clear()
    torch.simgpu.empty_cache()
    whole = torch.empty(3600 * MIB, dtype=torch.uint8, device=DEVICE)
    del whole
    kept += [torch.empty(300 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(12)][::2]
    nameless = kept.pop()
    report = gpumagic.dry_run(
        code.replace("2200", "900"), {"torch": torch, "kept": kept}, device=DEVICE
    )
    assert report.devices[1].before == 1500 * MIB + nameless.nbytes
    assert report.fits is False
    assert (
        "what is free lies in pieces that are too small; line 1 runs out of memory"
        in report.verdict
    )


def test_what_was_sent_to_a_dry_run_is_not_kept(card) -> None:
    """Not even until the next collection: the cell that is run afterwards counts on what it lets go of."""
    namespace = {"torch": torch, "x": torch.empty(300 * MIB, dtype=torch.uint8, device=DEVICE)}
    held = torch.simgpu.memory_allocated(DEVICE)
    gc.disable()
    try:
        gpumagic.dry_run("y = x", namespace, device=DEVICE)
        namespace.clear()
        assert torch.simgpu.memory_allocated(DEVICE) == held - 300 * MIB
    finally:
        gc.enable()


def test_what_an_earlier_graph_keeps_goes_with_the_tensor_that_leads_to_it(card) -> None:
    """Here 1.4 GiB of 4 GiB, and nothing else keeps it."""
    torch.simgpu.empty_cache()
    namespace = {
        "torch": torch,
        "scale": torch.ones(350 * MIB // 4, device=DEVICE, requires_grad=True),
    }
    exec("out = scale.sin()\nfor _ in range(4): out = out.sin()", namespace)
    big = f"x = torch.empty(3500 * {MIB}, dtype=torch.uint8, device={DEVICE!r})"
    held = torch.simgpu.memory_allocated(DEVICE)
    try:
        assert gpumagic.dry_run(big, namespace, device=DEVICE).fits is False
        report = gpumagic.dry_run(f"del out\n{big}", namespace, device=DEVICE)
        assert report.fits is fits(f"del out\n{big}", namespace) is True
        assert report.devices[1].before == held
    finally:
        namespace.clear()
        torch.simgpu.empty_cache()


def told(**changed) -> dict[str, object]:
    """Return a segment as CUDA's allocator tells it."""
    blocks = [
        {
            "address": 100 * MIB,
            "size": 4 * MIB,
            "requested_size": 4 * MIB,
            "state": "active_allocated",
        },
        {"address": 104 * MIB, "size": 6 * MIB, "requested_size": 0, "state": "inactive"},
        {
            "address": 110 * MIB,
            "size": 10 * MIB,
            "requested_size": 1,
            "state": "active_awaiting_free",
        },
    ]
    return {
        "device": 0, "address": 100 * MIB, "total_size": 20 * MIB, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "blocks": blocks, **changed,
    }  # fmt: skip


@pytest.fixture
def snapshot(monkeypatch):
    """Return a function that has the allocator tell segments, and reads them."""

    def read(*found, reserved=20 * MIB, allocated=4 * MIB):
        module = SimpleNamespace(memory_snapshot=lambda mempool_id=None: list(found))
        monkeypatch.setattr(allocator, "device_module", lambda backend: module)
        return segments.read_segments("cuda:0", AllocatorStats(allocated, reserved, None))

    return read


def test_what_awaits_another_stream_is_neither_free_nor_a_storages(snapshot) -> None:
    (segment,) = snapshot(told(), told(device=1))
    assert segment.is_open
    assert [(each.size // MIB, each.is_free, each.is_owned) for each in segment.blocks] == [
        (4, False, True), (6, True, False), (10, False, False)
    ]  # fmt: skip


def test_what_another_stream_has_free_serves_no_request_but_is_given_back() -> None:
    allocator = Allocator(40 * MIB, cuts_to_size=False)
    free = segments.MemoryBlock(0, 20 * MIB, is_free=True, is_owned=False)
    allocator.lay_out(segments.Segment(0, is_small=False, is_open=False, blocks=[free]))
    allocator.take(15 * MIB)
    assert allocator.reserved == 36 * MIB
    allocator.take(12 * MIB)
    assert (allocator.reserved, allocator.failed) == (28 * MIB, False)


def test_the_pool_of_a_cuda_graph_is_not_given_back(snapshot) -> None:
    (segment,) = snapshot(told(segment_pool_id=(0, 1)))
    assert not segment.is_open
    assert not any(each.is_free for each in segment.blocks)


def test_what_cannot_be_read_is_not_guessed(snapshot) -> None:
    """Neither segments that expand, nor figures that contradict each other."""
    assert snapshot(told(is_expandable=True)) is None
    assert snapshot(told(), reserved=22 * MIB) is None
    assert snapshot(told(), allocated=5 * MIB) is None
    assert snapshot({"device": 0}) is None
    assert snapshot(told(), told(device=1)) is not None


def test_segments_that_may_expand_are_said_not_to_be_modelled(card, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    (sentence,) = targets.choose("cuda:0", 1 << 30).unknown
    assert sentence.startswith("expandable segments are not modelled")
    assert targets.choose(DEVICE, None).unknown == ()
