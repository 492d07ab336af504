"""What this process has of a DTensor has the names of that, its kind and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import gpumagic

TRAIN = """
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 512, device="cuda")).sum().backward()
optimizer.step()
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[torch.nn.Module]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    made = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 256)).cuda()
    for each in [*made, made]:
        fully_shard(each)
    yield made
    dist.destroy_process_group()


def test_devices_names_and_counts_what_is_here_of_a_dtensor(model: torch.nn.Module) -> None:
    names: dict[str, Any] = {"torch": torch, "model": model}
    exec(TRAIN, names)
    for _ in range(2):  # a first look leaves nothing that a second one sees
        rows = {
            row.name: row
            for row in gpumagic.devices("cuda", namespace=names).rows
            if row.nbytes != 0
        }
        found = {name: (row.kind, row.nbytes) for name, row in rows.items()}
        assert found["model[0].weight"] == ("parameter", 512 * 512 * 4)
        assert found["model[1].weight"] == ("parameter", 512 * 256 * 4)
        assert found["optimizer.state[model[0].weight]['exp_avg']"] == (
            "optimizer state",
            512 * 512 * 4,
        )
        assert found["model[0].weight.grad"] == (
            "gradient",
            (512 * 512 + 512) * 4,
        )  # in a buffer with the bias's
        assert not [row for row in rows.values() if row.nbytes is None]
    assert rows["model[0].weight"].shape == (512, 512)


def test_ondevice_counts_a_copy_of_what_is_here_of_a_dtensor(model: torch.nn.Module) -> None:
    with gpumagic.ondevice("cuda") as run:
        saved = {name: each.cpu() for name, each in model.state_dict().items()}
        made = torch.distributed.tensor.zeros(512, 4, device_mesh=model[0].weight.device_mesh)
    moved = {row.name: (row.direction, row.nbytes) for row in run.report.rows}
    assert sum(nbytes for _, nbytes in moved.values()) == sum(
        each.nbytes for each in saved.values()
    )
    assert {direction for direction, _ in moved.values()} == {"device-to-host"}
    assert run.report.created["cuda:0"] == (1, made.to_local().nbytes)


def test_oomguard_names_the_shards_that_hold_the_device(
    model: torch.nn.Module, bare_shell: Any
) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.user_ns.update(torch=torch, model=model)
    bare_shell.run_cell(TRAIN)
    large = 'large = torch.empty(1 << 42, dtype=torch.uint8, device="cuda")'
    bare_shell.run_cell(f"%%oomguard --keep-going -q -o report\n{large}")
    holders = bare_shell.user_ns["report"].holders
    assert {"model", "optimizer"} <= {name for holder in holders for name in holder.names}
    assert sum(holder.nbytes for holder in holders) >= 4 * sum(
        each.to_local().nbytes for each in model.parameters()
    )
