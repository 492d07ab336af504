"""One rank of many: the process is what torchrun would have started, and the others are taken to do what it does.

All of this is done to the worker's process, for the rest of it. torch's own ProcessGroupNCCL runs over the fake NCCL,
so buckets, gathered parameters, streams and the rest are torch's. What passes through the host is answered here: a
store in which every other rank has said what is waited for, and the collectives of objects. Groups on the CPU have
torch's own backend that communicates with nobody. Where torch and DeepSpeed let ranks agree on values that they read
from a device, the others are taken to have said the same.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gpumagic import fakecuda
from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.dryrun.wire import Ended, Ending, Rank, Request
from gpumagic.worker.exchange import Alone, Objects

Function = Callable[..., Any]
Assume = Callable[[str], object]
"""Is called with a sentence for each thing that is assumed."""
_ON_CPU = frozenset({"gloo", "mpi", "ucc"})
"""Backends whose ranks communicate by the host's memory and network."""


def take_part(
    request: Request, send: Callable[[Ended], None], assume: Assume
) -> Objects | None:
    """Let this process be the rank that a request asks for, or none, for the rest of it.

    Args:
        request: what is run.
        send: sends the outcome and ends the process, where the cell starts ranks and this is none.
        assume: called with a sentence for each thing that is assumed.
    """
    if not dist.is_available():
        return None

    def launch(function: Function, args: tuple[Any, ...], number: int) -> Any:
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
    """Let this process be a rank; return what sends and receives its objects."""
    rank = part.number
    world = part.world
    node, local = divmod(rank, part.per_node)
    nodes = -(-world // part.per_node)
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(node),
            "LOCAL_WORLD_SIZE": str(min(part.per_node, world)),
            "GROUP_WORLD_SIZE": str(nodes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }
    )

    objects = Objects(rank, part.heard)
    store = Alone(world, objects, 0 if rank else world - 1)

    def rendezvous(
        _: object, own: int = -1, number: int = -1, **__: object
    ) -> Iterator[Any]:
        yield store, (rank if own < 0 else own), (world if number < 0 else number)

    c10d.rendezvous = rendezvous
    dist.TCPStore = dist.FileStore = lambda *_, **__: store
    dist.monitored_barrier = c10d.monitored_barrier = lambda *_, **__: None
    _split_no_groups()
    _communicate_with_nobody_on_the_cpu()
    return objects


def _split_no_groups() -> None:
    """Let each group have a communicator of its own.

    For a group of a device that is named, torch splits another group's, and NCCL is not told of how many ranks it is.
    """
    make_group = c10d._new_process_group_helper

    def without_device(*args: Any, device_id: object = None, **kwargs: Any) -> Any:  # noqa: ARG001
        return make_group(*args, **kwargs)

    c10d._new_process_group_helper = without_device


def _communicate_with_nobody_on_the_cpu() -> None:
    backends_of = c10d.BackendConfig.get_device_backend_map

    def backends(config: Any) -> dict[str, str]:
        chosen = dict(backends_of(config))
        for device, backend in chosen.items():
            if backend in _ON_CPU:
                chosen[device] = "fake"
        return chosen

    c10d.BackendConfig.get_device_backend_map = backends


def _become_none() -> None:
    """Let a process that is no rank be refused where it would wait for others."""
    join = c10d.rendezvous
    store = dist.TCPStore

    def rendezvous(
        url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
    ) -> Iterator[Any]:
        world = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0"))
        _refuse_others(world)
        yield from join(url, rank, world_size, **kwargs)

    def tcp_store(
        host: str,
        port: int,
        world_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _refuse_others(world_size or 0)
        return store(host, port, world_size, *args, **kwargs)

    c10d.rendezvous = rendezvous
    dist.TCPStore = tcp_store


def _refuse_others(world: int) -> None:
    """Refuse to wait for other ranks, if there are any.

    Args:
        world: how many there are in all; 0 where that is not known.
    """
    if world == 1:
        return
    others = f"{world - 1} other processes" if world else "other processes"
    number = str(world) if world else "N"
    raise CannotDryRun(
        f"it waits for {others}: write --ranks {number}, for one on each of {number} GPUs, to dry-run one of them"
    )


Launch = Callable[[Function, tuple[Any, ...], int], Any]
"""Is called with what each rank is to run, its arguments, and how many ranks there are."""


def _take_launches(launch: Launch, *, has_accelerate: bool) -> None:
    """Let functions that start ranks call another one instead.

    Args:
        launch: what they call.
        has_accelerate: whether accelerate's function is among them.
    """

    def spawn(
        fn: Any, args: Any = (), nprocs: int = 1, *_: object, **__: object
    ) -> Any:
        return launch(fn, (int(os.environ.get("RANK", "0")), *args), nprocs)

    def notebook_launcher(
        function: Any,
        args: Any = (),
        num_processes: int | None = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        return launch(function, tuple(args), num_processes or torch.cuda.device_count())

    module = sys.modules["torch.multiprocessing.spawn"]
    for name in "spawn", "start_processes":
        setattr(module, name, spawn)
        setattr(torch.multiprocessing, name, spawn)
    if not has_accelerate:
        return
    with contextlib.suppress(ImportError):
        accelerate: Any = importlib.import_module("accelerate")
        accelerate.notebook_launcher = notebook_launcher
        accelerate.launchers.notebook_launcher = notebook_launcher


# ---- What ranks agree on


def _agree(code: str, assume: Assume) -> None:
    """Let this rank go on as if the others had said the same, where it would wait for what they say.

    Args:
        code: the notebook's, which says what is worth importing.
        assume: called with a sentence for each thing that is assumed.
    """
    if "pipelining" in code:
        _vote_alone()
    if "ZeroRedundancyOptimizer" in code:
        # TorchScript compiles what is in it, and has to read torch's own functions, as they are now.
        importlib.import_module("torch.distributed.optim")
    if "deepspeed" in code:
        _compare_with_nobody()
    if "distributed.checkpoint" in code or "import checkpoint" in code:
        _save_no_shards(assume)
    _run_ahead(assume)


def _compare_with_nobody() -> None:
    """Let ZeRO-3's ranks not compare numbers with those of rank 0, which they would read from a device."""
    with contextlib.suppress(ImportError):
        utils: Any = importlib.import_module("deepspeed.runtime.zero.utils")
        utils.get_lst_from_rank0 = list
        utils.assert_lst_len_same_as_other_ranks = len


def _save_no_shards(assume: Assume) -> None:
    """Let no checkpoint of shards be written, for which each rank would say to the others what it has."""
    module: Any = importlib.import_module("torch.distributed.checkpoint")

    def save(*_: object, **__: object) -> Future[None]:
        assume(
            "a checkpoint of shards is not written, and takes none of the device's memory"
        )
        saved: Future[None] = Future()
        saved.set_result(None)
        return saved

    module.save = module.async_save = save


def _run_ahead(assume: Assume) -> None:
    """Let DDP's first buckets be in use until the pass after the one that makes new ones.

    NCCL's watchdog keeps them until it sees that they have been sent. The host, which is ahead of its GPU, always asks
    for the new ones before that.
    """
    parallel = torch.nn.parallel.DistributedDataParallel
    pre_forward = parallel._pre_forward
    destroy = c10d.destroy_process_group
    ahead: WeakSet[Any] = WeakSet()

    def pre_forward_ahead(module: Any, *args: Any, **kwargs: Any) -> Any:
        makes_new_buckets = module.static_graph or not module.find_unused_parameters
        if module._has_rebuilt_buckets:
            ahead.discard(module)
        elif makes_new_buckets:
            ahead.add(module)
        fakecuda.run_ahead(bool(ahead))
        result = pre_forward(module, *args, **kwargs)
        if module in ahead and module._has_rebuilt_buckets:
            assume(
                "the host is ahead of the GPU in the second step, where DDP's first buckets are still in use"
            )
        return result

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        fakecuda.run_ahead(False)  # it waits for what is under way
        destroy(*args, **kwargs)

    parallel._pre_forward = pre_forward_ahead
    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group


def _vote_alone() -> None:
    """Let the stages of a pipeline agree on whether shapes are known, on which they vote by reading from a device."""
    module = importlib.import_module("torch.distributed.pipelining.stage")
    stage = module.PipelineStage

    def vote(
        self: Any,
        has_backward: bool,
        received_acc: object = None,  # noqa: ARG001
    ) -> torch.Tensor:
        needs_shapes = module.InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self._vote = torch.tensor([0 if needs_shapes else 1])
        return self._vote

    if hasattr(stage, "_warmup_forward_vote"):
        stage._warmup_forward_vote = vote
        stage._warmup_backward_result = lambda self, **_: self._vote
