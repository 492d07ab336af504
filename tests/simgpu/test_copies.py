"""`simgpu.copies()` lists every copy between devices, with the bytes that cross, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpumagic import simgpu

UP = ("host-to-device", "cpu", "simgpu:0")
DOWN = ("device-to-host", "simgpu:0", "cpu")
ACROSS = ("device-to-device", "simgpu:0", "simgpu:1")


def counted(*expected: tuple[tuple[str, str, str], int]) -> bool:
    """Assert that exactly these copies were counted, in this order."""
    found = simgpu.copies()
    assert found == [(*kind, nbytes) for kind, nbytes in expected]
    return True


def test_each_direction_counts_the_bytes_of_the_tensor() -> None:
    """Up, across and down are one copy each."""
    x = torch.ones(3, 5).to("simgpu:0").to("simgpu:1").to("simgpu:0").cpu()
    assert x.sum() == 15
    assert counted(
        (UP, 60), (ACROSS, 60), (("device-to-device", "simgpu:1", "simgpu:0"), 60), (DOWN, 60)
    )


def test_work_on_a_device_copies_nothing() -> None:
    """Operators, new tensors, in-place changes and a whole training step cross no device boundary."""
    model = nn.Linear(8, 2, device="simgpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 8, device="simgpu")).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counted()


def test_a_copy_onto_the_same_device_is_not_between_devices() -> None:
    """Clones, `copy_` within a device and `.to` of its own device count nothing."""
    x = torch.ones(4, device="simgpu:1")
    x.clone().copy_(x.to("simgpu:1"))
    torch.ones(4).clone().cpu()
    assert counted()


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_conversion_happens_on_the_host_unless_the_copy_does_not_block(
    non_blocking: bool,
) -> None:
    """As in CUDA: a blocking copy crosses in the device's type, a non-blocking one in the host's."""
    x = torch.ones(10).to("simgpu:0", torch.float16, non_blocking=non_blocking)
    x.to("cpu", torch.float64, non_blocking=non_blocking)
    assert counted((UP, 40 if non_blocking else 20), (DOWN, 80 if non_blocking else 20))


def test_an_expanded_source_crosses_at_its_full_size() -> None:
    """A broadcast copy moves what the target holds."""
    target = torch.empty(4, 3, device="simgpu:0")
    target.copy_(torch.ones(3))
    assert target.sum().item() == 12
    assert counted((UP, 48), (DOWN, 4))


def test_reading_single_values_is_a_copy_of_one_element() -> None:
    """`item`, `bool`, `float` and `equal` each fetch their answer."""
    x = torch.tensor(2.0, device="simgpu:0", dtype=torch.float64)
    simgpu.reset_copies()
    assert x.item() == float(x) == 2
    assert bool(x)
    assert torch.equal(x, x)
    assert counted((DOWN, 8), (DOWN, 8), (DOWN, 8), (DOWN, 1))


def test_tolist_is_one_copy_and_print_at_least_one() -> None:
    """`tolist` fetches the tensor whole; printing reads values back too."""
    x = torch.arange(6, device="simgpu:0")
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert counted((DOWN, 48))
    simgpu.reset_copies()
    assert "device='simgpu:0'" in repr(x)
    assert simgpu.copies()
    assert {kind for kind, *_ in simgpu.copies()} == {"device-to-host"}


def test_a_module_moves_parameter_by_parameter() -> None:
    """`Module.to` and `load_state_dict` copy each parameter and buffer once."""
    model = nn.BatchNorm1d(4)
    model.to("simgpu:0")
    sizes = [(UP, 16)] * 2 + [(UP, 16)] * 2 + [(UP, 8)]
    assert counted(*sizes)
    simgpu.reset_copies()
    model.load_state_dict(nn.BatchNorm1d(4).state_dict())
    assert counted(*sizes)


def test_a_tensor_from_python_values_is_uploaded() -> None:
    """`torch.tensor(list, device=...)` builds on the host and copies; `torch.full` does not."""
    torch.tensor([1.0, 2.0], device="simgpu:0")
    torch.full((2,), 1.0, device="simgpu:0")
    assert counted((UP, 8))


def test_indices_on_the_cpu_are_uploaded() -> None:
    """Indexing with CPU tensors costs their upload; a mask becomes indices first."""
    x = torch.arange(6.0, device="simgpu:0")
    simgpu.reset_copies()
    assert x[torch.tensor([0, 2, 4])].sum().item() == 6
    x[torch.tensor([True, False, False, False, False, True])] = 1
    assert x[0].item() == x[5].item() == 1
    assert counted((UP, 24), (DOWN, 4), (UP, 16), (DOWN, 4), (DOWN, 4))


def test_nothing_is_counted_for_empty_tensors() -> None:
    """No bytes, no copy."""
    torch.empty(0).to("simgpu:0").cpu()
    assert counted()
