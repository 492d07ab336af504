"""What ranks exchange by way of the host: a store, and the collectives of objects.

Runs in the worker's process, which is one rank. What it waits for comes from runs of other ranks that were made before;
where a rank was not run yet, `WaitsFor` says which.
"""

from __future__ import annotations

import base64
import gc
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.dryrun.wire import RankOutcome

Function = Callable[..., Any]
_NO_IDENTIFIER = bytes(128)
"""What NCCL identifies a communicator by, of which the fake one has no need."""


class Alone(dist.Store):
    """A store in which every other rank has said what is waited for.

    Args:
        world: how many ranks there are.
        objects: sends and receives what the cell itself puts there for other ranks; torch's own keys have a slash.
        other: the rank to ask for what is not there.
    """

    def __init__(self, world: int, objects: Objects, other: int) -> None:
        super().__init__()
        self._world = world
        self._objects = objects
        self._other = other
        self._kept: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value."""
        kept = value if isinstance(value, bytes) else value.encode()
        self._kept[key] = kept
        if _is_cells(key):
            self._objects.send(f"store {key}", kept)

    def get(self, key: str) -> bytes:
        """Return what was set here or by another rank, or else an identifier for NCCL, which asks for nothing else."""
        if key not in self._kept and _is_cells(key):
            received = self._objects.receive(f"store {key}", self._other)
            self._kept[key] = received
        return self._kept.get(key, _NO_IDENTIFIER)

    def add(self, key: str, amount: int) -> int:
        """Count as if all others had counted."""
        count = self._counts.get(key, 0) + amount
        self._counts[key] = count
        return max(count, self._world)

    def compare_set(self, key: str, _: object, desired: bytes | str) -> bytes:
        """Set what was not set yet."""
        if key not in self._kept:
            self.set(key, desired)
        return self._kept[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all was set here."""
        return all(key in self._kept for key in keys)

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        return self._kept.pop(key, None) is not None

    def wait(self, *_: object) -> None:
        """Wait for nobody."""

    def clone(self) -> Alone:
        """Return this one."""
        return self

    def has_extended_api(self) -> bool:
        """Return that there are no further functions, such as appending."""
        return False


def _is_cells(key: str) -> bool:
    """Return whether a key of a store is the cell's own, and not torch's."""
    return "/" not in key


class WaitsFor(CannotDryRun):
    """Raised where this rank waits for an object of another one, which has to be run first.

    Args:
        rank: the other one.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"it waits for what rank {rank} sends")
        self.rank = rank


class Objects:
    """The collectives of objects, in place of those of `torch.distributed`, which read lengths from a device.

    Args:
        rank: this one.
        heard: what ranks that were run before have sent, in its order: pickled objects, by what they were for.
    """

    def __init__(self, rank: int, heard: Mapping[str, Sequence[str]]) -> None:
        self._rank = rank
        self._heard = {key: iter(values) for key, values in heard.items()}
        """What is still to be received."""
        self._sent: dict[str, list[str]] = {}
        """What this rank sends."""

    def install(self) -> None:
        """Answer for the rest of the process."""
        answers: dict[str, Function] = {
            "all_gather_object": self._all_gather,
            "gather_object": self._gather,
            "broadcast_object_list": self._broadcast,
            "scatter_object_list": self._scatter,
            "send_object_list": self._send,
            "recv_object_list": self._receive,
        }
        for name, answer in answers.items():
            signature = inspect.signature(getattr(c10d, name))
            answered = _as_collective(signature, answer)
            setattr(c10d, name, answered)
            setattr(dist, name, answered)

    def outcome(self) -> RankOutcome:
        """Return what this rank has sent so far, and the ranks of its pipeline."""
        sent = {key: tuple(values) for key, values in self._sent.items()}
        return RankOutcome(sent, tuple(stages()))

    def send(self, key: str, value: object) -> None:
        """Keep what this rank sends, for those that are run later."""
        pickled = base64.b64encode(pickle.dumps(value)).decode()
        self._sent.setdefault(key, []).append(pickled)

    def receive(self, key: str, source: int) -> Any:
        """Return what was sent by a rank that was run before.

        Raises:
            WaitsFor: it was not run before.
        """
        heard = self._heard.get(key, iter(()))
        pickled = next(heard, None)
        if pickled is None:
            raise WaitsFor(source)
        return pickle.loads(base64.b64decode(pickled))  # noqa: S301  # from a run of the same cell

    def _share(self, what: str, value: object, group: Any, source: int) -> Any:
        """Send a value to a group if this rank is the source, and else receive it."""
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        first = members[0]
        last = members[-1]
        key = f"{what} {source} {first} {last} {len(members)}"
        if source != self._rank:
            return self.receive(key, source)
        self.send(key, value)
        return value

    # Each is called with the group, the rank from or to which objects go, and the objects.

    def _all_gather(self, group: Any, _: int, gathered: list[Any], value: Any) -> None:
        """Take all others to have sent the same."""
        if dist.get_rank(group) >= 0:
            sent = pickle.dumps(value)
            ranks = range(dist.get_world_size(group))
            gathered[:] = [pickle.loads(sent) for _ in ranks]  # noqa: S301  # our own

    def _gather(
        self, group: Any, target: int, value: Any, gathered: list[Any] | None
    ) -> None:
        if gathered is not None and target == self._rank:
            self._all_gather(group, target, gathered, value)

    def _broadcast(self, group: Any, source: int, values: list[Any]) -> None:
        values[:] = self._share("broadcast", values, group, source)

    def _scatter(
        self,
        group: Any,
        source: int,
        received: list[Any],
        values: list[Any] | None,
    ) -> None:
        scattered = self._share("scatter", values, group, source)
        received[0] = scattered[dist.get_rank(group)]

    def _send(self, _: object, target: int, values: list[Any]) -> None:
        self.send(f"{self._rank} to {target}", values)

    def _receive(self, _: object, source: int, values: list[Any]) -> int:
        values[:] = self.receive(f"{source} to {self._rank}", source)
        return source


def _as_collective(signature: inspect.Signature, answer: Function) -> Function:
    """Return a collective with torch's signature.

    Args:
        signature: of torch's function.
        answer: called with the group, the rank from or to which the objects go, and the objects.
    """

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group")
        peer = given.get("src", given.get("dst"))
        in_group = given.get("group_src", given.get("group_dst"))
        if in_group is not None:
            peer = dist.get_global_rank(group or dist.group.WORLD, in_group)
        objects = [given.get(name) for name in signature.parameters if "obj" in name]
        return answer(group, peer or 0, *objects)

    return collective


def stages() -> list[int]:
    """Return the ranks of this one's pipeline, a stage each; none where there is no pipeline."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return []
    for obj in gc.get_objects():
        if issubclass(type(obj), module._PipelineStageBase):
            group = obj.group or dist.group.WORLD
            ranks: list[int] = dist.get_process_group_ranks(group)
            return ranks
    return []
