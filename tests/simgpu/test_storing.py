"""Saving, loading, and feeding from a DataLoader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpumagic import simgpu


@pytest.mark.parametrize(
    ("saved", "target", "loaded"),
    [
        ("simgpu:1", None, "simgpu:1"),
        ("simgpu:1", "cpu", "cpu"),
        ("cpu", "simgpu", "simgpu:0"),
        ("cpu", None, "cpu"),
        ("simgpu:1", "simgpu:0", "simgpu:0"),
        ("simgpu:1", {"simgpu:1": "simgpu:0"}, "simgpu:0"),
        ("cpu", lambda storage, _: storage.simgpu(1), "simgpu:1"),
    ],
)
def test_tensors_are_saved_and_loaded_anywhere(
    saved: str, target: object, loaded: str, tmp_path: Path
) -> None:
    """From either kind of device to either, by every form of map_location."""
    x = torch.arange(6.0, device=saved).reshape(2, 3)
    simgpu.reset_copies()
    torch.save({"x": x, "view": x[1]}, tmp_path / "x.pt")
    assert simgpu.copies() == ([] if saved == "cpu" else [("device-to-host", saved, "cpu", 24)])
    read = torch.load(tmp_path / "x.pt", map_location=target)
    assert {str(t.device) for t in read.values()} == {loaded}
    assert read["view"].tolist() == [3, 4, 5]
    read["x"].zero_()
    assert read["view"].sum().item() == 0


def test_loading_onto_a_device_that_is_not_there_says_so(tmp_path: Path) -> None:
    """In torch's words, with the remedy."""
    torch.save(torch.ones(1), tmp_path / "x.pt")
    with pytest.raises(RuntimeError, match="map_location"):
        torch.load(tmp_path / "x.pt", map_location="simgpu:7")


def test_training_can_be_resumed(tmp_path: Path) -> None:
    """State dicts of a module and its optimizer survive a file and go on to the same numbers."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        model.zero_grad()
        model(torch.ones(1, 3, device="simgpu")).sum().backward()
        optimizer.step()
        return [value for p in model.parameters() for value in p.flatten().tolist()]

    model = nn.Linear(3, 2, device="simgpu")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    expected = train(model, optimizer)
    fresh = nn.Linear(3, 2, device="simgpu")
    resumed = torch.optim.AdamW(fresh.parameters())
    for part, state in zip((fresh, resumed), torch.load(tmp_path / "state.pt"), strict=True):
        part.load_state_dict(state)
    assert train(fresh, resumed) == expected


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_feeds_the_device(pinned: bool, workers: int) -> None:
    """With and without worker processes and the thread that pins; each batch is one copy."""
    rows = TensorDataset(torch.arange(20.0).reshape(10, 2))
    total = torch.zeros((), device="simgpu")
    for (batch,) in DataLoader(rows, batch_size=4, num_workers=workers, pin_memory=pinned):
        assert batch.is_pinned() == pinned
        total += batch.to("simgpu", non_blocking=True).sum()
    assert simgpu.copies() == [
        ("host-to-device", "cpu", "simgpu:0", nbytes) for nbytes in (32, 32, 16)
    ]
    assert total.item() == 190
