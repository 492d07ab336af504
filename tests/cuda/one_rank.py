"""Run cells as ranks over the fake runtime, outside of any dry run: what their peaks are compared with.

The store and the rendezvous are written here a second time, so that a mistake in those of the package shows.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.optim
import torch.distributed.tensor.parallel
import torch.testing._internal.distributed.fake_pg


class Alone(dist.Store):  # type: ignore[misc]
    """A store in which every other rank has said what is waited for."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.kept, self.counts = world, {}, {}  # type: ignore[var-annotated]

    def set(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        value = self.kept.get(key, b"\0" * 128)
        return value if isinstance(value, bytes) else value.encode()

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return int(max(self.counts[key], self.world))

    def wait(self, keys: object, timeout: object = None) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return all(each in self.kept for each in keys)

    def compare_set(self, key: str, _: object, desired: bytes) -> bytes:
        self.kept.setdefault(key, desired)
        return self.get(key)

    @property
    def timeout(self) -> dt.timedelta:
        return dt.timedelta(seconds=300)


def pretend(rank: int, world: int, per_node: int) -> None:
    """Be a rank."""
    node, local = divmod(rank, per_node)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(per_node),
        GROUP_RANK=str(node), MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="none",
        TORCH_NCCL_ENABLE_MONITORING="0",
    )  # fmt: skip
    store = Alone(world)

    def rendezvous(*_: object, **__: object) -> Iterator[Any]:
        yield store, rank, world

    def objects(listed: list[Any], thing: object, group: Any = None) -> None:
        listed[:] = [thing] * dist.get_world_size(group)

    def plans(listed: list[Any], *_: Any, **__: Any) -> None:
        listed[0] = listed[0] if listed[0] is not None else {"steps": 3}

    parallel = torch.nn.parallel.DistributedDataParallel
    forward, passes = parallel._pre_forward, []

    def waiting(module: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(module)
        if len(passes) < 5:
            time.sleep(0.2)  # as a pass on a GPU would: NCCL's watchdog lets go of the first buckets meanwhile
        return forward(module, *args, **kwargs)

    parallel._pre_forward = waiting
    c10d.rendezvous = rendezvous
    backends = c10d.BackendConfig.get_device_backend_map
    c10d.BackendConfig.get_device_backend_map = lambda config: {
        device: "fake" if name == "gloo" else name for device, name in backends(config).items()
    }
    dist.all_gather_object, dist.broadcast_object_list = objects, plans
    c10d.all_gather_object, c10d.broadcast_object_list = objects, plans


def measure(cell: str, rank: int, world: int, per_node: int) -> list[int] | str:
    """Return the bytes allocated and reserved at most on the device of the rank."""
    pretend(rank, world, per_node)
    try:
        exec(compile(cell, "<cell>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException:
        return traceback.format_exc()
    local = rank % per_node
    return [torch.cuda.max_memory_allocated(local), torch.cuda.max_memory_reserved(local)]


def main() -> None:
    """Read cells with their ranks, and write what each takes: a process each."""
    for work in json.load(sys.stdin):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.write(writing, json.dumps(measure(*work)).encode()[:60_000])
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            print(told.read() or '"it ended without a word"', flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
