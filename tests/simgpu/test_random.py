"""Seeds, generators and their states."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def test_torchs_seed_seeds_the_devices() -> None:
    """One seed gives one sequence, the CPU's, on every device."""
    torch.manual_seed(3)
    expected = torch.randn(5)
    for device in ("simgpu:0", "simgpu:1"):
        torch.manual_seed(3)
        assert torch.equal(torch.randn(5, device=device).cpu(), expected)


def test_devices_draw_from_generators_of_their_own() -> None:
    """Drawing on one device, dropout included, moves neither the CPU's generator nor another device's."""
    cpu, other = torch.get_rng_state(), torch.simgpu.get_rng_state(1)
    nn.functional.dropout(torch.ones(50, device="simgpu:0"))
    torch.randperm(9, device="simgpu:0")
    torch.rand(3, device="simgpu:0")
    assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(torch.simgpu.get_rng_state("simgpu:1"), other)


def test_a_saved_state_repeats_the_numbers() -> None:
    """`get_rng_state` and `set_rng_state`, for operators with and without a generator argument."""
    state = torch.simgpu.get_rng_state(0)
    first = torch.rand(4, device="simgpu"), nn.functional.dropout(torch.ones(40, device="simgpu"))
    torch.simgpu.set_rng_state(state, 0)
    again = torch.rand(4, device="simgpu"), nn.functional.dropout(torch.ones(40, device="simgpu"))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], torch.rand(4, device="simgpu"))


def test_fork_rng_leaves_no_trace() -> None:
    """What is drawn inside is forgotten after."""
    before = torch.simgpu.get_rng_state(0)
    with torch.random.fork_rng(devices=[0], device_type="simgpu"):
        torch.rand(4, device="simgpu")
    assert torch.equal(torch.simgpu.get_rng_state(0), before)


def test_generators_of_a_device() -> None:
    """They seed, repeat, report their device, and only work on it."""
    generator = torch.Generator(device="simgpu:1").manual_seed(5)
    first = torch.randn(3, device="simgpu:1", generator=generator)
    assert torch.equal(first, torch.randn(3, device="simgpu:1", generator=generator.manual_seed(5)))
    assert generator.device == torch.device("simgpu:1")
    assert torch.simgpu.default_generators[1].device == torch.device("simgpu:1")
    for device, wrong in (("simgpu", torch.Generator()), ("cpu", generator)):
        with pytest.raises(RuntimeError, match="device type for generator"):
            torch.randn(3, device=device, generator=wrong)
