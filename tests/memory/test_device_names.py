"""Devices are found however they are written, and one that is not here is refused with those that are."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.errors import DeviceNotFound
from gpumagic.memory import devices


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("simgpu:1", "simgpu:1"), ("SIMGPU:01", "simgpu:1"), ("1", "simgpu:1"), ("gpu:1", "simgpu:1"),
        ("gpu", "simgpu:0"), ("simgpu", "simgpu:0"), ("cpu", "cpu"), ("cpu:0", "cpu"), ("meta", "meta"),
        (" 0 ", "simgpu:0"),
    ],
)  # fmt: skip
def test_every_way_of_writing_a_device_means_the_same(
    two_devices: list[str], name: str, device: str
) -> None:
    assert devices.resolve(name) == device


def test_auto_is_the_device_with_most_free_memory(two_devices: list[str]) -> None:
    import torch

    taken = torch.ones(2**22, device="simgpu:0")
    assert devices.resolve("auto") == "simgpu:1"
    del taken


def test_a_bare_backend_is_its_current_device(two_devices: list[str]) -> None:
    import torch

    torch.accelerator.set_device_index(1)
    try:
        assert devices.resolve("simgpu") == "simgpu:1"
    finally:
        torch.accelerator.set_device_index(0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("simgpu:9", "did you mean simgpu:1?"),
        ("simgpux", "did you mean simgpu?"),
        ("9", "there are simgpu:0, simgpu:1, cpu, meta"),
        ("cuda:9", "there are simgpu:0, simgpu:1, cpu, meta"),
        ("cpu:3", "there are"),
        ("", "there are"),
        (":", "there are"),
        ("cuda:{i}", "is the variable in it defined?"),
    ],
)
def test_a_device_that_is_not_here_is_refused_with_those_that_are(
    two_devices: list[str], name: str, said: str
) -> None:
    with pytest.raises(DeviceNotFound) as caught:
        devices.resolve(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fallback_stands_in_for_a_device_that_is_not_here_but_not_for_a_typing_error(
    two_devices: list[str],
) -> None:
    assert devices.resolve("cuda:3", fallback="cpu") == "cpu"
    assert devices.resolve("simgpu:1", fallback="cpu") == "simgpu:1"
    with pytest.raises(DeviceNotFound, match="simgpux"):
        devices.resolve("simgpux", fallback="cpu")
    with pytest.raises(DeviceNotFound, match="nowhere"):
        devices.resolve("simgpu:0", fallback="nowhere")


@given(st.text(max_size=20))
def test_any_text_is_a_device_or_one_line(name: str) -> None:
    try:
        assert devices.resolve(name) in [*devices.available(), "cpu", "meta"]
    except DeviceNotFound as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017  # both outcomes are right


def test_a_simulated_device_that_is_not_on_says_how_to_turn_it_on() -> None:
    code = "import gpumagic\ntry: gpumagic.ondevice('simgpu:0')\nexcept gpumagic.DeviceNotFound as error: print(error)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert (
        said
        == "'simgpu:0' is not here: gpumagic.simgpu.enable() adds simulated GPUs; there are cpu, meta\n"
    )


def test_completion_does_not_import_torch() -> None:
    code = (
        "import sys, gpumagic.memory.devices as d; print(d.completions(), 'torch' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == "['cuda', 'auto', 'cpu', 'meta'] False\n"
