"""What people do with a GPU gives the CPU's numbers on a simulated one, and stays on it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpumagic import simgpu


class Pixels(nn.Module):
    """Convolution, batch norm, pooling, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 4, 2),
        )
        self.head = nn.Linear(100, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


class Words(nn.Module):
    """Embedding, attention, layer norm, an LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(16, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(self.block(self.words(x)))[0])[0][:, -1]


def pixels() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=torch.float64).reshape(2, 3, 8, 8)


def words() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, 0.1, momentum=0.9, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, 0.01, **kw),
}


@pytest.mark.parametrize(("model", "batch"), [(Pixels, pixels), (Words, words)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
def test_training_gives_the_cpus_parameters(
    model: type[nn.Module], batch: Callable[[], torch.Tensor], optimizer: str, kind: dict[str, bool]
) -> None:
    """Three steps of every optimizer variant; nothing crosses between devices meanwhile."""
    torch.manual_seed(0)
    on_cpu = (
        model().double()
    )  # in float32, AdamW turns the rounding noise of a zero gradient into steps
    on_card = copy.deepcopy(on_cpu).to("simgpu:1")
    inputs, target = {"cpu": batch(), "simgpu:1": batch().to("simgpu:1")}, torch.tensor([1, 3])
    targets = {device: target.to(device) for device in inputs}
    simgpu.reset_copies()
    for network, device in ((on_cpu, "cpu"), (on_card, "simgpu:1")):
        steps = OPTIMIZERS[optimizer](network.parameters(), **kind)
        for _ in range(3):
            nn.functional.cross_entropy(network(inputs[device]), targets[device]).backward()
            steps.step()
            steps.zero_grad()
    assert simgpu.copies() == []
    for (name, expected), found in zip(
        on_cpu.state_dict().items(), on_card.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(
            found.cpu(), expected, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_follows_torchs_lists(dtype: torch.dtype) -> None:
    """Products in lower precision, softmax and losses in float32, sums of mixed types in the widest; CPU untouched."""
    x = torch.randn(4, 4, device="simgpu")
    with torch.autocast("simgpu", dtype=dtype):
        assert (x @ x).dtype == nn.functional.linear(x, x).dtype == dtype
        assert nn.functional.conv1d(x[None], x[..., None]).dtype == dtype
        assert (x @ x).softmax(0).dtype == torch.float32
        assert torch.cat([x, x @ x]).dtype == torch.float32
        assert nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]).dtype == dtype
        assert (x.cpu() @ x.cpu()).dtype == torch.float32
        with torch.autocast("simgpu", enabled=False):
            assert (x @ x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(x, x)
    assert (x @ x).dtype == torch.float32


def test_a_gradient_scaler_skips_a_step_that_overflowed() -> None:
    """`torch.amp.GradScaler("simgpu")` scales, finds infinities, halves its scale."""
    weight = torch.ones(3, device="simgpu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler = torch.amp.GradScaler("simgpu", init_scale=8.0)
    for factor, expected in ((1.0, 0.5), (float("inf"), 0.5)):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert weight.tolist() == [expected] * 3
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_same_random_numbers(use_reentrant: bool) -> None:
    """The recomputed forward drops what the first one dropped, so the gradient is that of the plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to("simgpu")
    gradients = []
    for forward in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        x = torch.ones(4, 8, device="simgpu", requires_grad=True)
        torch.manual_seed(1)
        loss = forward(x).sum()
        torch.rand(9, device="simgpu")
        loss.backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_checkpointing_needs_less_memory() -> None:
    """The peak falls, as it must for the fix that %%oomguard proposes."""
    layers = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
            for _ in range(4)
        )
    ).to("simgpu")
    x = torch.randn(2048, 256, device="simgpu", requires_grad=True)

    def peak(forward: Callable[[torch.Tensor], torch.Tensor]) -> int:
        torch.simgpu.reset_peak_memory_stats()
        forward(x).sum().backward()
        layers.zero_grad()
        return torch.simgpu.max_memory_allocated()

    def checkpointed(value: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            value = checkpoint(layer, value, use_reentrant=False)
        return value

    assert peak(checkpointed) < 0.8 * peak(layers)


def test_packed_sequences_keep_their_lengths_on_the_cpu() -> None:
    """As on CUDA: values on the device, batch sizes on the host."""
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(6, 3, 5, device="simgpu"), torch.tensor([6, 4, 2])
    )
    padded, lengths = nn.utils.rnn.pad_packed_sequence(nn.LSTM(5, 7).to("simgpu")(packed)[0])
    assert padded.shape == (6, 3, 7)
    assert (padded.device.type, lengths.device.type) == ("simgpu", "cpu")


def test_torch_func_and_modes_see_the_device() -> None:
    """vmap, grad, jvp, inference mode, fake tensors and dispatch modes work on it."""
    from torch._subclasses import FakeTensorMode

    x = torch.ones(3, device="simgpu")
    assert torch.func.grad(lambda t: (t**2).sum())(x).tolist() == [2, 2, 2]
    assert torch.vmap(lambda t: t * 2)(x).sum().item() == 6
    torch.func.jvp(lambda t: t.sin(), (x,), (x,))
    with torch.inference_mode():
        assert (x * 2).add_(1).sum().item() == 9
    with FakeTensorMode():
        fake = torch.empty(2, 2, device="simgpu:1")
        assert (fake @ fake).device == torch.device("simgpu:1")
    assert torch.simgpu.memory_allocated(1) == 0


def test_an_operator_written_in_python_for_the_cpu_runs() -> None:
    """A custom operator with a CPU kernel works without one for simgpu."""

    @torch.library.custom_op("gpumagic_tests::square", mutates_args=(), device_types="cpu")
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    assert square(torch.full((2,), 3.0, device="simgpu")).tolist() == [9, 9]
