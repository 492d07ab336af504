"""A dry run from the parent's side: what to send to the worker, which engine answers, which of many ranks are run."""

from __future__ import annotations

import contextlib
import linecache
import os
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpumagic.dryrun import client, parts, payload, scenarios, targets
from gpumagic.dryrun import report as records
from gpumagic.dryrun.effects import NOT_DONE
from gpumagic.dryrun.report import DeviceNeed, DryRunReport, peak_of, reserved_of
from gpumagic.dryrun.script import Script
from gpumagic.dryrun.targets import Target
from gpumagic.errors import DryRunUnavailable
from gpumagic.memory import segments
from gpumagic.options import Ranks, number_of_ranks
from gpumagic.source.cell_code import sizes_in
from gpumagic.source.frames import is_library

TIME_LIMIT = 60.0
_PRELOADED = frozenset({
    "torch", "numpy", "pandas", "matplotlib", "scipy", "sklearn", "PIL", "torchvision", "transformers", "timm",
    "einops", "accelerate", "peft", "diffusers", "lightning", "pytorch_lightning", "torchmetrics", "safetensors",
})  # fmt: skip
"""Packages of which the worker imports once what the notebook has imported; private modules come with the others."""
NCCL = (16 * targets.MIB, 1500 * targets.MIB)
"""What a communicator takes of the device, least and most: an estimate.

A channel has a buffer of 4 MiB a connection (NCCL_BUFFSIZE), and half a MiB and 4.7 MiB more where it uses the LL and
LL128 protocols; a ring has two connections, a tree three more, and there are 2 to 32 channels (NCCL_MAX_NCHANNELS).
People measured 1.6 GB for one communicator (https://github.com/NVIDIA/nccl/issues/864)."""
_HOST = re.compile(r"(_Array)?MemoryError:|.*DefaultCPUAllocator: ", re.DOTALL)
"""How Python, numpy and torch say that the host's memory does not do."""
_ZEROS = (
    f"of large tensors and arrays on the CPU, those beyond {parts.ROOM >> 20} MiB in all are assumed to be zeros",
)
_ROCM = (
    "what ROCm takes for itself: of this GPU only the size is known here, and CUDA on an A100 stands in",
)
_NEEDS_CUDA = (
    "ranks are dry-run on torch's own CUDA: "
    "that takes a CUDA build of torch, which needs no GPU, and a C compiler"
)
Rank = tuple[int, int, int, dict[str, list[str]]]
"""Which, of how many, how many a machine has, and what ranks that were run before have sent to it."""
Run = Callable[[Rank], tuple[DryRunReport, dict[str, Any]]]


def dry_run(
    what: Script,
    namespace: Mapping[str, Any],
    target: Target,
    *,
    values: Mapping[str, object] | None = None,
    time_limit: float = TIME_LIMIT,
    only: scenarios.Scenario | None = None,
) -> DryRunReport:
    """Return what running the code would need, of ranks the one that needs most.

    Args:
        what: the code.
        namespace: the names it sees; they are read and not changed.
        target: the devices.
        values: other values for some of the names.
        time_limit: seconds after which the dry run is given up.
        only: the one scenario of values of which only the figures are wanted; all that the cell needs without.

    Raises:
        DryRunUnavailable: this torch or system cannot.
    """

    def one(rank: Rank | None) -> tuple[DryRunReport, dict[str, Any]]:
        """Return the report, and what the worker told."""
        here = targets.with_engine(
            target if rank is None else replace(target, chosen=rank[0] % rank[2])
        )
        if here.engine == targets.FAKE and rank is not None:
            raise DryRunUnavailable(_NEEDS_CUDA)
        client.start(here.engine)  # it imports torch while the notebook is packed
        packed = payload.pack(namespace, what.names(), what.function, here)
        with contextlib.closing(packed.shared):
            request = _request(what, packed, here, dict(values or {}), time_limit)
            outcome = scenarios.run({**request, "rank": rank}, only)
        return report_of(outcome, here, packed, sizes_in(what.source or "")), outcome

    if target.ranks is None:
        report, outcome = one(None)
        if "ranks" not in outcome:
            return report
        target = targets.of_ranks(target, number_of_ranks(outcome["ranks"]))
    assert target.ranks is not None
    return _fullest(one, target.ranks)


def _fullest(run: Run, ranks: Ranks) -> DryRunReport:
    """Return the dry run of the rank that needs most, with the figures of all that were run.

    Those are the first, the last, each stage of a pipeline; the others do what these do.

    Args:
        run: dry-runs a rank, and returns what the worker told, too.
        ranks: how many there are.
    """
    said: dict[str, list[str]] = {}
    reports: dict[int, DryRunReport] = {}
    waiting: set[int] = set()  # since one of them has said something new
    coming = [ranks.world - 1, 0]  # the last one is next
    while coming:
        number = coming.pop()
        if number in reports:
            continue
        reports[number], outcome = run((number, *ranks, said))
        told = outcome.get("rank") or {"said": {}, "stages": []}
        if not told["said"].items() <= said.items():
            waiting.clear()
        said = {**said, **told["said"]}
        source = (outcome.get("error") or {}).get("waits_for")
        if source is not None and number not in waiting:
            waiting.add(number)
            coming += [number, source]
            del reports[number]
            continue
        if not reports[number].fits:
            break
        coming[:0] = reversed([each for each in told["stages"] if each not in coming])
    most = max(reports, key=lambda each: (not reports[each].fits, peak_of(reports[each]), -each))
    needs = []
    for number, each in sorted(reports.items()):
        retries = next(
            (device.retries for device in each.devices if device.device == each.device), 0
        )
        peak, reserved = peak_of(each), reserved_of(each)
        needs.append(
            records.RankNeed(
                number, each.device or "", peak, reserved, retries, each.fits, each.breakdown
            )
        )
    return replace(reports[most], rank=most, world=ranks.world, ranks=tuple(needs))


def _request(
    what: Script,
    packed: payload.Payload,
    target: Target,
    values: dict[str, object],
    time_limit: float,
) -> dict[str, Any]:
    import torch

    base = [
        max(0, held - packed.device_bytes[name]) if segments is None else 0
        for name, held, segments in zip(
            target.names, target.allocated, target.segments, strict=True
        )
    ]
    # Where torch keeps workspaces for cuBLAS: on an imagined device nowhere.
    found = [] if target.is_imagined or target.ranks is not None else segments.find_workspaces()
    numpy = sys.modules.get("numpy")
    sources = {
        name: "".join(linecache.getlines(name)) for name in packed.files if not is_library("", name)
    }
    if what.source is not None:
        sources[what.filename] = what.source
    return {
        "engine": target.engine,
        "is_brief": False,
        "gpus": target.gpus,
        "gpu": target.gpu,
        "workspaces": [
            [(each.address, each.size) for each in found if each.device == name]
            for name in target.names
        ],
        "source": what.source,
        "filename": what.filename,
        "data": packed.buffer.getvalue(),
        "shared": packed.shared.path,
        "slots": packed.shared.slots,
        "scopes": len(packed.scopes),
        "sources": {name: text for name, text in sources.items() if text},
        "values": values,
        "backend": target.backend,
        "chosen": target.chosen,
        "base": base,
        "cuts_to_size": target.backend == "simgpu",  # see `worker.fake.allocator`
        "capacities": [
            None if each is None else max(0, each - target.extra[1]) for each in target.capacities
        ],
        "segments": target.segments,
        "time_limit": time_limit,
        "path": list(sys.path),
        "folder": os.getcwd(),  # noqa: PTH109
        "preload": [
            name
            for name in list(sys.modules)
            if name.partition(".")[0] in _PRELOADED and "._" not in name
        ],
        "installed": [
            name
            for name, module in list(sys.modules.items())
            if "." not in name and is_library(name, getattr(module, "__file__", None) or "")
        ],
        "random": random.getstate(),
        "torch_random": bytes(torch.get_rng_state().tolist()),
        "numpy_random": None if numpy is None else numpy.random.get_state(),
    }


def report_of(
    outcome: dict[str, Any], target: Target, packed: payload.Payload, sizes: tuple[str, ...]
) -> DryRunReport:
    """Return the report of a worker's outcome; of one without figures with the sentence that says why."""
    if "ended" in outcome:
        return DryRunReport(
            target.names[target.chosen],
            {},
            {},
            capacity=target.capacities[target.chosen],
            gpu=target.gpu,
            engine=target.engine,
            error=outcome["ended"],
            exceeds_host=outcome.get("exceeds_host", False),
            effects=tuple(outcome.get("effects", ())),
        )
    error, names, communicators = outcome["error"], target.names, outcome.get("communicators", 0)
    complete = error is None and not outcome["is_open"]
    decided = complete and not outcome.get("depends")
    devices = tuple(
        _device(name, found, capacity, target.extra, decided=decided)
        for name, found, capacity in zip(names, outcome["devices"], target.capacities, strict=True)
    )
    deciding = min(range(len(devices)), key=lambda each: _room(devices[each], names[target.chosen]))
    device, found = devices[deciding], outcome["devices"][deciding]
    at, failure, fits = found["at"], found["failure"], {each.fits for each in devices}
    unknown = (*outcome["unknown"], *packed.notes, *target.unknown, *_ROCM * target.is_amd)
    return DryRunReport(
        device=device.device,
        peak={each.device: each.peak for each in devices},
        reserved={each.device: each.reserved for each in devices},
        line=at["line"],
        code=at["code"] or None,
        operator=at["operator"] or None,
        breakdown=dict(sorted(found["breakdown"].items(), key=lambda item: -item[1])),
        fits=False if False in fits else None not in fits or None,
        capacity=device.capacity,
        complete=complete,
        certain=complete
        and not outcome.get("varies")
        and not outcome.get("lacks")
        and not target.is_amd,
        passes=tuple(records.Passes(*each) for each in outcome["passes"]),
        modules=dict(found.get("modules", ())),
        timeline=tuple(
            records.DryRunPoint(names[index], *point) for index, *point in outcome["timeline"]
        ),
        assumed=(
            *outcome["assumed"],
            *_ZEROS * any(each.offset is None for each in packed.shared.slots),
        ),
        unknown=tuple(dict.fromkeys(unknown)),
        engine=target.engine,
        gpu=target.gpu,
        overhead=target.extra,
        scenario=outcome.get("most"),
        runs=outcome["runs"],
        flat=tuple((place, number) for place, number in outcome.get("flat", ())),
        function=at["function"] or None,
        operator_bytes=at["nbytes"],
        failure_line=None if failure is None else failure["line"],
        open_on=tuple((line, code) for line, code in outcome.get("open_on", ())),
        effects=tuple(outcome["effects"]),
        error=None if error is None else _failure_sentence(error),
        exceeds_host=error is not None
        and _HOST.match(f"{error['kind']}: {error['text']}") is not None,
        devices=devices,
        nccl=(NCCL[0] * communicators, NCCL[1] * communicators),
        lines=tuple(
            records.DryRunRow(
                names[each["device"]], each["line"], each["code"], each["peak"], each["after"]
            )
            for each in sorted(outcome["lines"], key=lambda each: (each["line"], each["device"]))
        ),
        operators=outcome["operators"],
        seconds=outcome["seconds"],
        worked=outcome["worked"],
        versions=outcome.get("versions", {}),
        sizes=sizes,
    )


def _device(
    name: str, found: dict[str, Any], capacity: int | None, extra: tuple[int, int], *, decided: bool
) -> DeviceNeed:
    """Judge one device: a clear no, a clear yes only of a run that was seen to its end, and between them None."""
    fits = True if decided else None
    if found["failed"]:
        fits = False if extra[0] == extra[1] or found["peak"] + extra[0] > (capacity or 0) else None
    return DeviceNeed(
        name,
        found["before"],
        found["peak"],
        found["after"],
        found["reserved"],
        capacity,
        None if capacity is None else fits,
        found.get("retries", 0),
    )


def _room(device: DeviceNeed, chosen: str) -> tuple[int, float, bool]:
    """Order devices: those that fail, then by the share that is left, then the one that was asked about."""
    verdict = {False: 0, None: 1, True: 2}[device.fits]
    share = (device.capacity - device.peak) / device.capacity if device.capacity else 1.0
    return verdict, share, device.device != chosen


def _failure_sentence(error: dict[str, Any]) -> str:
    """Return how the dry run ended, where not at the cell's end."""
    where = f" on line {error['line']}" if error["line"] is not None else ""
    own, undone = (
        f"{error['kind']}: {error['text']}",
        [f"it {each}, {NOT_DONE}" for each in error["undone"][-1:]],
    )
    if error["refused"]:
        return f"the dry run stopped{where}: {error['text']}"
    if undone and error["is_denied"]:
        return f"the dry run stopped{where}: {undone[0]} ({own})"
    depends = (
        [f"it depends on {error['depends']}, whose values are assumed"]
        if "depends" in error
        else []
    )
    reasons = [*depends, *(f"before that {each}" for each in undone)]
    return (
        f"the cell may fail{where}: {own} ({'; '.join(reasons)})"
        if reasons
        else f"the cell fails{where}: {own}"
    )
