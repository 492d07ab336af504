"""The fake runtime below torch's own CUDA: what it hands out, refuses and logs."""

from __future__ import annotations

import pytest
import torch

from gpumagic import fakecuda

pytestmark = pytest.mark.versions


def test_torch_sees_the_devices_that_were_asked_for() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_properties(0).total_memory == fakecuda.memory(0).capacity


def test_a_tensor_comes_back_from_a_device_as_it_went() -> None:
    there = torch.arange(1000.0).to("cuda:0")
    assert torch.equal(there.to("cuda:1").cpu(), torch.arange(1000.0))
    assert [copy[:4] for copy in fakecuda.copies()] == [
        ("host-to-device", "cpu", "cuda:0", 4000),
        ("device-to-device", "cuda:0", "cuda:1", 4000),
        ("device-to-host", "cuda:1", "cpu", 4000),
    ]


def test_the_runtime_holds_what_torch_has_reserved() -> None:
    before = torch.cuda.memory_allocated(0)
    kept = torch.empty(50 * 2**20, dtype=torch.uint8, device="cuda:0")
    assert fakecuda.memory(0).used == torch.cuda.memory_reserved(0)
    assert kept.nbytes == torch.cuda.memory_allocated(0) - before


def test_torch_raises_its_own_error_when_the_card_is_full() -> None:
    capacity = fakecuda.memory(1).capacity
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(capacity + 1, dtype=torch.uint8, device="cuda:1")


def test_what_others_hold_is_not_free() -> None:
    capacity = fakecuda.memory(1).capacity
    fakecuda.set_memory(1, others=capacity // 2)
    try:
        assert torch.cuda.mem_get_info(1)[0] <= capacity // 2
    finally:
        fakecuda.set_memory(1, others=0)
