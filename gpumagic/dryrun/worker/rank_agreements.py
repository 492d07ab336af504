"""What torch and DeepSpeed have ranks agree on, by values that they read from a device, and what they do in turns.

The rank that is dry-run is alone: where it would wait for what others say, it goes on as if they had said the same.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gpumagic import fakecuda


def arrange(mentions: Callable[[str], bool], assume: Callable[[str], None]) -> None:
    """Make the changes, for the rest of the process.

    Args:
        mentions: tells whether the cell has a word.
        assume: called with a sentence for each thing that is assumed.
    """
    if mentions("pipelining"):
        _vote_alone()
    if mentions("ZeroRedundancyOptimizer"):
        importlib.import_module("torch.distributed.optim")  # TorchScript reads torch's functions, as they are now
    if mentions("deepspeed"):
        _agree_with_rank_0()
    if mentions("Join"):
        _join_together(assume)
    if mentions("distributed.checkpoint") or mentions("import checkpoint"):
        _save_no_shards(assume)
    _run_ahead(assume)


def _join_together(assume: Callable[[str], None]) -> None:
    """Let a rank that has no more inputs find that no other has."""
    join: Any = importlib.import_module("torch.distributed.algorithms.join").Join

    def none_is_left(_: object) -> int:
        assume("the ranks have equally many inputs")
        return 0

    join._get_num_nonjoined_procs = none_is_left


def _save_no_shards(assume: Callable[[str], None]) -> None:
    """Let no checkpoint of shards be written, for which the ranks tell each other what they have."""
    module: Any = importlib.import_module("torch.distributed.checkpoint")

    def save(*_: object, **__: object) -> None:
        assume("a checkpoint of shards is not written, and takes none of the device's memory")

    def save_later(*_: object, **__: object) -> Future[None]:
        save()
        saved: Future[None] = Future()
        saved.set_result(None)
        return saved

    module.save, module.async_save = save, save_later


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
            assume("the host is ahead of the GPU in the second step, where DDP's first buckets are still in use")
        return made

    def destroyed(*args: Any, **kwargs: Any) -> None:
        fakecuda.run_ahead(False)  # it waits for what is under way
        destroy(*args, **kwargs)

    parallel._pre_forward = before
    c10d.destroy_process_group = dist.destroy_process_group = destroyed


def _agree_with_rank_0() -> None:
    """Let ZeRO-3's ranks agree with rank 0, whose numbers they read from a device to compare them."""
    with contextlib.suppress(ImportError):
        utils: Any = importlib.import_module("deepspeed.runtime.zero.utils")
        utils.get_lst_from_rank0, utils.assert_lst_len_same_as_other_ranks = list, len


def _vote_alone() -> None:
    """Let a pipeline's stages agree with each other on whether shapes are known; they vote by reading from a device."""
    stage = importlib.import_module("torch.distributed.pipelining.stage")
    base = stage.PipelineStage

    def vote(self: Any, has_backward: bool, received_acc: object = None) -> torch.Tensor:  # noqa: ARG001
        self._vote = torch.tensor([0 if stage.InferenceMode.needs_dynamic(self._user_meta, has_backward) else 1])
        return self._vote

    if hasattr(base, "_warmup_forward_vote"):
        base._warmup_forward_vote, base._warmup_backward_result = vote, lambda self, **_: self._vote
