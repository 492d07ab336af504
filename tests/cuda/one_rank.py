"""Run cells as ranks over the fake runtime, outside of any dry run: what their peaks are compared with.

The store and the rendezvous are written here a second time, so that a mistake in those of the package shows.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections import Counter
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


def pretend(rank: int, world: int, per_node: int, port: int | None) -> None:
    """Be a rank, alone or of processes that meet at a port."""
    node, local = divmod(rank, per_node)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(per_node),
        GROUP_RANK=str(node), MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="none",
        TORCH_NCCL_ENABLE_MONITORING="0",
    )  # fmt: skip
    store: Any = (
        Alone(world) if port is None else dist.TCPStore("localhost", port, world, rank == 0)
    )
    numbers: Counter[str] = Counter()

    def rendezvous(*_: object, **__: object) -> Iterator[Any]:
        yield store, rank, world

    def objects(listed: list[Any], thing: object, group: Any = None) -> None:
        listed[:] = [thing] * dist.get_world_size(group)

    def plans(listed: list[Any], *_: Any, **__: Any) -> None:
        listed[0] = listed[0] if listed[0] is not None else {"steps": 3}

    def letter(source: int, target: int) -> str:
        way = f"{source} to {target}"
        numbers[way] += 1
        return f"{way}, {numbers[way]}"

    def send(listed: list[Any], dst: int, *_: Any, **__: Any) -> None:
        store.set(letter(rank, dst), pickle.dumps(listed))

    def receive(listed: list[Any], src: int, *_: Any, **__: Any) -> None:
        listed[:] = pickle.loads(store.get(letter(src, rank)))

    c10d.rendezvous = rendezvous
    if (
        port is not None
    ):  # by way of the store, since nothing passes between processes over the fake NCCL
        dist.send_object_list, dist.recv_object_list = send, receive
    backends = c10d.BackendConfig.get_device_backend_map
    c10d.BackendConfig.get_device_backend_map = lambda config: {
        device: "fake" if name == "gloo" else name for device, name in backends(config).items()
    }
    dist.all_gather_object, dist.broadcast_object_list = objects, plans
    c10d.all_gather_object, c10d.broadcast_object_list = objects, plans


def measure(cell: str, rank: int, world: int, per_node: int, port: int | None) -> list[int] | str:
    """Return the bytes allocated and reserved at most on the device of the rank."""
    pretend(rank, world, per_node, port)
    run_ahead = ctypes.CDLL(None).fakecuda_run_ahead
    try:
        run_ahead(
            1
        )  # no collective has ended as long as the cell runs: the host is ahead of the device
        exec(compile(cell, "<cell>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException:
        return traceback.format_exc()
    finally:
        run_ahead(0)
    local = rank % per_node
    return [torch.cuda.max_memory_allocated(local), torch.cuda.max_memory_reserved(local)]


def begin(cell: str, rank: int, world: int, per_node: int, port: int | None) -> tuple[int, int]:
    """Start a process that is a rank; return its number and where it tells what it took."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.write(writing, json.dumps(measure(cell, rank, world, per_node, port)).encode()[:60_000])
        if port is not None and rank == 0:
            signal.pause()  # the store is in this process
        os._exit(0)
    os.close(writing)
    return child, reading


def main() -> None:
    """Read cells with their ranks, and write what each takes: a process each, which meet where that is asked for."""
    for cell, ranks, world, per_node, meet in json.load(sys.stdin):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        together = [ranks] if meet else [[each] for each in ranks]
        for group in together:
            begun = [begin(cell, each, world, per_node, port if meet else None) for each in group]
            for _, reading in begun:
                with os.fdopen(reading) as told:
                    line = b""
                    while not line.endswith((b"]", b'"')) and (
                        more := os.read(told.fileno(), 1 << 16)
                    ):
                        line += more
                print(line.decode() or '"it ended without a word"', flush=True)
            for child, _ in begun:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


if __name__ == "__main__":
    main()
