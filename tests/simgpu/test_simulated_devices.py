"""The devices themselves: `torch.simgpu`, `torch.accelerator`, ordinals, operands on different devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch import nn

from gpumagic import simgpu
from gpumagic.errors import OptionError, SimgpuUnavailable

SAME_DEVICE = "Expected all tensors to be on the same device, but found at least two devices, "


def test_torch_knows_two_accelerators() -> None:
    """Counted, named, available, through torch's general API and the backend's own module."""
    assert simgpu.is_enabled()
    assert torch.accelerator.current_accelerator() == torch.device("simgpu")
    assert torch.accelerator.device_count() == torch.simgpu.device_count() == 2
    assert torch.simgpu.is_available()
    properties = torch.simgpu.get_device_properties(1)
    assert (properties.name, properties.total_memory) == (torch.simgpu.get_device_name(), 4 * 2**30)
    assert properties.uuid != torch.simgpu.get_device_properties(0).uuid


def test_the_current_device_is_the_threads() -> None:
    """Set, nested and restored, also after an error."""
    assert torch.simgpu.current_device() == 0
    with torch.simgpu.device(1):
        assert (
            torch.ones(1, device="simgpu").device.index
            == torch.accelerator.current_device_index()
            == 1
        )
        with contextlib.suppress(ZeroDivisionError), torch.accelerator.device_index(0):
            _ = 1 / 0
        assert torch.simgpu.current_device() == 1
        with torch.simgpu.device_of(torch.ones(1, device="simgpu:0")):
            assert torch.simgpu.current_device() == 0
    torch.accelerator.set_device_index(1)
    assert torch.simgpu.current_device() == 1
    torch.simgpu.set_device("simgpu:0")
    torch.simgpu.synchronize()
    torch.accelerator.synchronize()


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.empty(2, device="simgpu:9"),
        lambda: torch.ones(2).to("simgpu:2"),
        lambda: torch.simgpu.set_device(5),
        lambda: torch.simgpu.memory_allocated(7),
        lambda: torch.Generator(device="simgpu:3"),
    ],
)
def test_a_device_that_is_not_there_is_an_invalid_ordinal(use: Callable[[], object]) -> None:
    """In CUDA's words."""
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        use()


def test_tensors_and_modules_have_methods_of_the_devices_name() -> None:
    """`.simgpu()`, `.is_simgpu`, `Module.simgpu()`, as `.cuda()`."""
    x = torch.ones(2).simgpu(1)
    assert x.is_simgpu
    assert x.device.index == 1
    assert next(nn.Linear(2, 2).simgpu().parameters()).device == torch.device("simgpu:0")


def test_default_device_and_device_context() -> None:
    """Constructors land there without being told."""
    with torch.device("simgpu:1"):
        assert torch.zeros(2).device == nn.Linear(2, 2).weight.device == torch.device("simgpu:1")
    torch.set_default_device("simgpu")
    try:
        assert torch.arange(3).is_simgpu
    finally:
        torch.set_default_device(None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "read", [lambda x: x.numpy(), np.asarray, np.array, lambda x: np.add(x, 1)]
)
def test_numpy_cannot_read_a_device(read: Callable[[torch.Tensor], object]) -> None:
    """TypeError in torch's usual words, and nothing is copied."""
    x = torch.zeros(2, device="simgpu")
    with pytest.raises(TypeError, match="can't convert simgpu:0 device type tensor to numpy"):
        read(x)
    assert simgpu.copies() == []


@pytest.mark.parametrize(
    ("use", "devices"),
    [
        (lambda a, b: a + b, "simgpu:0 and simgpu:1!"),
        (lambda a, b: a.add_(b), "simgpu:0 and simgpu:1!"),
        (lambda a, b: a + b.cpu(), "simgpu:0 and cpu!"),
        (lambda a, b: a.cpu() @ b, "cpu and simgpu:1!"),
        (lambda a, b: a @ b, "simgpu:0 and simgpu:1!"),
        (lambda a, b: torch.cat([a, b]), "simgpu:0 and simgpu:1!"),
        (torch.equal, "simgpu:0 and simgpu:1!"),
        (lambda a, b: torch.mul(a, a, out=b), "simgpu"),
        (lambda a, b: a[b.long()], "simgpu:0 and simgpu:1!"),
        (lambda a, b: nn.functional.linear(a, b.cpu()), "simgpu:0 and cpu!"),
        (lambda a, b: torch.stack([a[0, 0], torch.tensor(1.0)]), "simgpu:0 and cpu!"),
        (lambda a, b: torch.tensor(1.0).add_(a[0, 0]), "simgpu"),
    ],
)
def test_operands_on_different_devices_are_refused_in_torchs_words(
    use: Callable[[torch.Tensor, torch.Tensor], object], devices: str
) -> None:
    """Both devices are named."""
    a, b = torch.ones(2, 2, device="simgpu:0"), torch.ones(2, 2, device="simgpu:1")
    with pytest.raises(RuntimeError, match=r"two devices|same device") as caught:
        use(a, b)
    if devices.endswith("!"):
        assert SAME_DEVICE + devices in str(caught.value)


def test_a_number_on_the_cpu_goes_with_any_device() -> None:
    """0-dim CPU tensors take part in pointwise operators, as on CUDA, without a copy."""
    x = torch.ones(3, device="simgpu:1")
    two = torch.tensor(2.0)
    for result in (
        x + two,
        two * x,
        torch.where(x > 0, two, x),
        x.lerp(x, two),
        x.masked_fill(x > 0, two),
    ):
        assert result.device == x.device
    x[1] = two
    assert simgpu.copies() == [("host-to-device", "cpu", "simgpu:1", 4)]


def test_indices_from_the_cpu_are_taken_but_not_from_another_gpu() -> None:
    """As CUDA does; and a CPU tensor takes no indices from a GPU."""
    x = torch.arange(4.0, device="simgpu:0")
    assert x[torch.tensor([3])].item() == 3
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        torch.arange(4)[torch.tensor([1], device="simgpu:0")]


def test_sparse_tensors_are_refused_in_a_sentence() -> None:
    """What simgpu does not do says so."""
    with pytest.raises(NotImplementedError, match="simgpu has dense tensors only"):
        torch.eye(2, device="simgpu").to_sparse()


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (
            lambda: (
                nn.Embedding(4, 2, sparse=True, device="simgpu")(torch.tensor([1]).simgpu())
                .sum()
                .backward()
            ),
            NotImplementedError,
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3, device="simgpu"), 0.1, 0, torch.quint8),
            NotImplementedError,
        ),
        (
            lambda: nn.DataParallel(nn.Linear(2, 2).simgpu(), [0, 1])(torch.ones(2, 2).simgpu()),
            (AttributeError, RuntimeError),
        ),
        (lambda: torch.from_dlpack(torch.ones(2, device="simgpu")), ValueError),
        (lambda: ForkingPickler.dumps(torch.ones(2, device="simgpu")), RuntimeError),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_it_lacks_raises(
    use: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    """The known gaps: when one closes, this and the module's docstring change."""
    with pytest.raises(error):
        use()


def test_streams_and_events_exist() -> None:
    """Work is done when the call returns; events still tell the time between them."""
    start, end = (torch.Event("simgpu", enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    assert torch.simgpu.current_stream(1).device == torch.device("simgpu:1")


def test_pinned_memory_is_known_as_such() -> None:
    """A pinned copy, and a view into it, say so; a pageable tensor does not."""
    pinned = torch.ones(10).pin_memory()
    assert pinned.is_pinned()
    assert pinned[5:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(10).is_pinned()
    assert pinned.to("simgpu", non_blocking=True).sum().item() == 10


def test_a_forked_child_can_work_on_its_copy() -> None:
    """No lock is inherited locked; the child allocates and computes."""
    x = torch.ones(3, device="simgpu")
    child = os.fork()
    if child == 0:
        os._exit(int((x + 1).sum().item()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6


@pytest.mark.usefixtures("empty_devices")
def test_enabling_again_is_harmless_and_changing_needs_empty_devices() -> None:
    """Same arguments: nothing. Others: refused in one sentence while tensors live, done when none does."""
    simgpu.enable(devices=2, memory=4 * 2**30)
    x = torch.ones(1, device="simgpu", requires_grad=True)
    x.sum().backward()  # starts autograd's threads, one a device
    with pytest.raises(SimgpuUnavailable, match="hold tensors") as caught:
        simgpu.enable(devices=3, memory="1GiB")
    assert "\n" not in str(caught.value)
    del x
    simgpu.enable(devices=3, memory="1GiB")
    try:
        assert torch.accelerator.get_memory_info(2) == (2**30, 2**30)
        y = torch.ones(1, device="simgpu:2", requires_grad=True)
        (y * 2).backward()
        assert y.grad.item() == 2
        del y
    finally:
        simgpu.enable(devices=2, memory="4GiB")
    assert torch.simgpu.device_count() == 2


@pytest.mark.parametrize(
    "arguments", [{"devices": 0}, {"devices": 65}, {"memory": "lots"}, {"memory": 0}]
)
def test_nonsense_is_an_option_error(arguments: dict[str, object]) -> None:
    """And changes nothing."""
    with pytest.raises(OptionError):
        simgpu.enable(**arguments)
    assert torch.simgpu.device_count() == 2


@pytest.mark.parametrize("text", ["2x4GiB", "2 x 4096MiB", "2", " 2X4gb "])
def test_the_environment_can_ask_for_them(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count, or a count and a capacity."""
    monkeypatch.setenv("GPUMAGIC_SIMGPU", text)
    assert simgpu.enable_from_environment()
    assert torch.accelerator.get_memory_info(1)[1] == 4 * 2**30


@pytest.mark.usefixtures("empty_devices")
def test_a_capacity_alone_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GPUMAGIC_SIMGPU=3GiB`."""
    monkeypatch.setenv("GPUMAGIC_SIMGPU", "3GiB")
    try:
        assert simgpu.enable_from_environment()
        assert torch.simgpu.device_count() == 1
    finally:
        simgpu.enable(devices=2, memory="4GiB")


def test_an_unset_variable_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """False, and no error."""
    monkeypatch.delenv("GPUMAGIC_SIMGPU", raising=False)
    assert not simgpu.enable_from_environment()


@pytest.mark.parametrize("text", ["yes", "2x", "x4GiB", "2x4 parsecs", "99x1GiB", "-1"])
def test_an_unreadable_variable_says_what_to_write(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, with an example."""
    monkeypatch.setenv("GPUMAGIC_SIMGPU", text)
    with pytest.raises(OptionError, match="GPUMAGIC_SIMGPU=2x4GiB"):
        simgpu.enable_from_environment()
