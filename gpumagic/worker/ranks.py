"""One rank of many: the process is what torchrun would have started, and the others are taken to do what it does.

torch's own ProcessGroupNCCL runs over the fake NCCL, so buckets, gathered parameters, streams and the rest are torch's.
What passes through the host is answered here: a store in which every other rank has said what is waited for, and the
collectives of objects. Groups on the CPU have torch's own backend that communicates with nobody. Where torch and
DeepSpeed have ranks agree on values that they read from a device, the others are taken to have said the same.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gpumagic import fakecuda
from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.dryrun.wire import Ended, Ending, Rank, RankOutcome, Request

_ON_CPU = frozenset({"gloo", "mpi", "ucc"})


class Alone(dist.Store):
    """A store in which every other rank has said what is waited for.

    Args:
        world: how many ranks there are.
        objects: keeps what the cell itself puts there for other ranks; torch's own keys have a slash.
        other: the rank to ask for what is not there.
    """

    def __init__(self, world: int, objects: Objects, other: int) -> None:
        super().__init__()
        self._world, self._objects, self._other = world, objects, other
        self._kept: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value."""
        self._kept[key] = value if isinstance(value, bytes) else value.encode()
        if "/" not in key:
            self._objects.say(f"store {key}", self._kept[key])

    def get(self, key: str) -> bytes:
        """Return what was set here or by another rank, or zeros, which are NCCL's identifier of a communicator."""
        if key not in self._kept and "/" not in key:
            self._kept[key] = self._objects.hear(f"store {key}", self._other)
        return self._kept.get(key, bytes(128))

    def add(self, key: str, amount: int) -> int:
        """Count as if all others had counted."""
        self._counts[key] = self._counts.get(key, 0) + amount
        return max(self._counts[key], self._world)

    def compare_set(self, key: str, _: object, desired: bytes | str) -> bytes:
        """Set what was not set yet."""
        if key not in self._kept:
            self.set(key, desired)
        return self._kept[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all was set here."""
        return all(each in self._kept for each in keys)

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        return self._kept.pop(key, None) is not None

    def wait(self, *_: object) -> None:
        """Wait for nobody."""

    def clone(self) -> Alone:
        """Return this one."""
        return self

    def has_extended_api(self) -> bool:
        """Return that appending and the like are not here."""
        return False


class WaitsFor(CannotDryRun):
    """The rank waits for an object of another one, which has to be run first.

    Args:
        rank: that one.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"it waits for what rank {rank} sends")
        self.rank = rank


class Objects:
    """The collectives of objects, in place of those of `torch.distributed`, which read lengths from a device.

    Args:
        rank: this one.
        heard: what ranks that were run before have sent: pickled objects by what they were for, in their order.
    """

    def __init__(self, rank: int, heard: Mapping[str, Sequence[str]]) -> None:
        self._rank = rank
        self._heard = {key: iter(values) for key, values in heard.items()}
        self._said: dict[str, list[str]] = {}
        """What this rank sends."""

    def install(self) -> None:
        """Answer for the rest of the process."""
        answers: dict[str, Callable[..., Any]] = {
            "all_gather_object": self._all_gather,
            "gather_object": self._gather,
            "broadcast_object_list": self._broadcast,
            "scatter_object_list": self._scatter,
            "send_object_list": self._send,
            "recv_object_list": self._receive,
        }
        for name, answer in answers.items():
            answered = _with_peer(inspect.signature(getattr(c10d, name)), answer)
            setattr(c10d, name, answered)
            setattr(dist, name, answered)

    def say(self, key: str, value: object) -> None:
        """Keep what this rank sends."""
        self._said.setdefault(key, []).append(base64.b64encode(pickle.dumps(value)).decode())

    def outcome(self) -> RankOutcome:
        """Return what this rank has sent so far, and the ranks of its pipeline."""
        said = {key: tuple(values) for key, values in self._said.items()}
        return RankOutcome(said, tuple(stages()))

    def hear(self, key: str, source: int) -> Any:
        """Return what was sent by a rank that was run before; else that one is run first."""
        heard = next(self._heard.get(key, iter(())), None)
        if heard is None:
            raise WaitsFor(source)
        return pickle.loads(base64.b64decode(heard))  # noqa: S301  # from a run of the same cell

    def _share(self, what: str, value: object, group: Any, source: int) -> Any:
        """Send a value to a group, or return what its source has sent to that."""
        among = dist.get_process_group_ranks(group or dist.group.WORLD)
        key = f"{what} {source} {among[0]} {among[-1]} {len(among)}"
        if source != self._rank:
            return self.hear(key, source)
        self.say(key, value)
        return value

    def _all_gather(self, group: Any, _: int, gathered: list[Any], value: Any) -> None:
        """Take all others to have sent the same."""
        if dist.get_rank(group) >= 0:
            sent = pickle.dumps(value)
            ranks = range(dist.get_world_size(group))
            gathered[:] = [pickle.loads(sent) for _ in ranks]  # noqa: S301  # our own

    def _gather(self, group: Any, target: int, value: Any, gathered: list[Any] | None) -> None:
        if gathered is not None and target == self._rank:
            self._all_gather(group, target, gathered, value)

    def _broadcast(self, group: Any, source: int, values: list[Any]) -> None:
        values[:] = self._share("broadcast", values, group, source)

    def _scatter(
        self, group: Any, source: int, received: list[Any], values: list[Any] | None
    ) -> None:
        received[0] = self._share("scatter", values, group, source)[dist.get_rank(group)]

    def _send(self, _: object, target: int, values: list[Any]) -> None:
        self.say(f"{self._rank} to {target}", values)

    def _receive(self, _: object, source: int, values: list[Any]) -> int:
        values[:] = self.hear(f"{source} to {self._rank}", source)
        return source


def _with_peer(signature: inspect.Signature, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective of torch's signature that passes on its group, the rank from or to which, and its objects."""

    def answered(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group, peer = given.get("group"), given.get("src", given.get("dst"))
        in_group = given.get("group_src", given.get("group_dst"))
        if in_group is not None:
            peer = dist.get_global_rank(group or dist.group.WORLD, in_group)
        return answer(
            group, peer or 0, *(given.get(name) for name in signature.parameters if "obj" in name)
        )

    return answered


def take_part(
    request: Request, send: Callable[[Ended], None], assume: Callable[[str], None]
) -> Objects | None:
    """Let this process be the rank that a request asks for, or none, for the rest of it.

    Args:
        request: what is run.
        send: sends the outcome and ends the process, where the cell starts ranks and this is none.
        assume: called with a sentence for each thing that is assumed.
    """
    if not dist.is_available():
        return None

    def launch(function: Callable[..., Any], args: tuple[Any, ...], number: int) -> Any:
        if request.rank is None and number > 1:
            sentence = f"it starts {number} processes"
            send(Ended(reason=Ending.STARTS_RANKS, sentence=sentence, ranks=number))
        return function(*args)

    code = "\n".join(request.code.sources.values())
    _take_launches(launch, has_accelerate="notebook_launcher" in code)
    if request.rank is None:
        _become_none()
        return None
    objects = _become(request.rank)
    _agree(code, assume)
    objects.install()
    return objects


def _become(part: Rank) -> Objects:
    rank, world, per_node = part.number, part.world, part.per_node
    node, local = divmod(rank, per_node)
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(node),
            "LOCAL_WORLD_SIZE": str(min(per_node, world)),
            "GROUP_WORLD_SIZE": str(-(-world // per_node)),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }
    )

    objects = Objects(rank, part.heard)
    store = Alone(world, objects, 0 if rank else world - 1)

    def rendezvous(_: object, own: int = -1, number: int = -1, **__: object) -> Iterator[Any]:
        yield store, rank if own < 0 else own, world if number < 0 else number

    def without_device(*args: Any, device_id: object = None, **kwargs: Any) -> Any:  # noqa: ARG001
        return helper(
            *args, **kwargs
        )  # else groups are split off, and NCCL is not told of how many they are

    def backends(config: Any) -> dict[str, str]:
        return {
            device: "fake" if each in _ON_CPU else each
            for device, each in backends_of(config).items()
        }

    helper, backends_of = c10d._new_process_group_helper, c10d.BackendConfig.get_device_backend_map
    c10d.rendezvous, c10d._new_process_group_helper = rendezvous, without_device
    c10d.BackendConfig.get_device_backend_map = backends
    dist.TCPStore = dist.FileStore = lambda *_, **__: store
    dist.monitored_barrier = c10d.monitored_barrier = lambda *_, **__: None
    return objects


def _become_none() -> None:
    """Let a process that is no rank say so where it would wait for others, for the rest of it."""
    join, store = c10d.rendezvous, dist.TCPStore

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
        _refuse_others(world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0")))
        yield from join(url, rank, world_size, **kwargs)

    def tcp_store(
        host: str, port: int, world_size: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        _refuse_others(world_size or 0)
        return store(host, port, world_size, *args, **kwargs)

    c10d.rendezvous, dist.TCPStore = rendezvous, tcp_store


def _refuse_others(world: int) -> None:
    others, number = (f"{world - 1} other processes", world) if world else ("other processes", "N")
    if world != 1:
        raise CannotDryRun(
            f"it waits for {others}: write --ranks {number}, for one on each of {number} GPUs, to dry-run one of them"
        )


def _take_launches(
    launch: Callable[[Any, tuple[Any, ...], int], Any], *, has_accelerate: bool
) -> None:
    """Let functions that start ranks call one that gets what each is to run, its arguments, and how many there are."""

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: object, **__: object) -> Any:
        return launch(fn, (int(os.environ.get("RANK", "0")), *args), nprocs)

    def notebook_launcher(
        function: Any, args: Any = (), num_processes: int | None = None, *_: Any, **__: Any
    ) -> Any:
        return launch(function, tuple(args), num_processes or torch.cuda.device_count())

    module = sys.modules["torch.multiprocessing.spawn"]
    for name in "spawn", "start_processes":
        setattr(module, name, spawn)
        setattr(torch.multiprocessing, name, spawn)
    if has_accelerate:
        with contextlib.suppress(ImportError):
            accelerate: Any = importlib.import_module("accelerate")
            accelerate.notebook_launcher = accelerate.launchers.notebook_launcher = (
                notebook_launcher
            )


def stages() -> list[int]:
    """Return the ranks of this one's pipeline, a stage each; none where there is no pipeline."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return []
    stage: Any = next(
        (each for each in gc.get_objects() if issubclass(type(each), module._PipelineStageBase)),
        None,
    )
    return [] if stage is None else dist.get_process_group_ranks(stage.group or dist.group.WORLD)


# ---- What ranks agree on


def _agree(code: str, assume: Callable[[str], None]) -> None:
    """Let this rank go on as if the others had said the same, where it would wait for what they say.

    Args:
        code: the notebook's, which says what is worth importing.
        assume: called with a sentence for each thing that is assumed.
    """
    if "pipelining" in code:
        _vote_alone()
    if "ZeroRedundancyOptimizer" in code:
        importlib.import_module(
            "torch.distributed.optim"
        )  # TorchScript reads torch's functions, as they are now
    if "deepspeed" in code:
        with contextlib.suppress(
            ImportError
        ):  # ZeRO-3's ranks read numbers of rank 0 from a device to compare them
            utils: Any = importlib.import_module("deepspeed.runtime.zero.utils")
            utils.get_lst_from_rank0, utils.assert_lst_len_same_as_other_ranks = list, len
    if "distributed.checkpoint" in code or "import checkpoint" in code:
        _save_no_shards(assume)
    _run_ahead(assume)


def _save_no_shards(assume: Callable[[str], None]) -> None:
    """Let no checkpoint of shards be written, for which the ranks tell each other what they have."""
    module: Any = importlib.import_module("torch.distributed.checkpoint")

    def save(*_: object, **__: object) -> Future[None]:
        assume("a checkpoint of shards is not written, and takes none of the device's memory")
        saved: Future[None] = Future()
        saved.set_result(None)
        return saved

    module.save = module.async_save = save


def _run_ahead(assume: Callable[[str], None]) -> None:
    """Let DDP's first buckets be in use until the pass after the one that makes new ones, for the rest of the process.

    NCCL's watchdog keeps them until it sees that they have been sent, a race that a host ahead of its GPU always wins.
    """
    parallel = torch.nn.parallel.DistributedDataParallel
    pre_forward, destroy = parallel._pre_forward, c10d.destroy_process_group
    ahead: WeakSet[Any] = WeakSet()

    def before(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module._has_rebuilt_buckets:
            ahead.discard(module)
        elif module.static_graph or not module.find_unused_parameters:  # else it makes no new ones
            ahead.add(module)
        fakecuda.run_ahead(bool(ahead))
        made = pre_forward(module, *args, **kwargs)
        if module in ahead and module._has_rebuilt_buckets:
            assume(
                "the host is ahead of the GPU in the second step, where DDP's first buckets are still in use"
            )
        return made

    def destroyed(*args: Any, **kwargs: Any) -> None:
        fakecuda.run_ahead(False)  # it waits for what is under way
        destroy(*args, **kwargs)

    parallel._pre_forward = before
    c10d.destroy_process_group = dist.destroy_process_group = destroyed


def _vote_alone() -> None:
    """Let a pipeline's stages agree with each other on whether shapes are known; they vote by reading from a device."""
    stage = importlib.import_module("torch.distributed.pipelining.stage")
    base = stage.PipelineStage

    def vote(self: Any, has_backward: bool, received_acc: object = None) -> torch.Tensor:  # noqa: ARG001
        self._vote = torch.tensor(
            [0 if stage.InferenceMode.needs_dynamic(self._user_meta, has_backward) else 1]
        )
        return self._vote

    if hasattr(base, "_warmup_forward_vote"):
        base._warmup_forward_vote, base._warmup_backward_result = vote, lambda self, **_: self._vote
