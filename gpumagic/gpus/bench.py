"""`%gpuinfo --bench`: times matrix products by dtype and copies by direction on each device.

This is the one probe that uses the devices, because the user asks for it. It draws no random numbers, resets no
counter and empties no cache; it allocates at most an eighth of the free memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gpumagic.gpus import device_names
from gpumagic.gpus.report import BenchReport, BenchRow
from gpumagic.memory import allocator, host
from gpumagic.report import progress

DTYPES = ("float64", "float32", "float16", "bfloat16")
MIN_MATRIX, MAX_MATRIX = 256, 8192
MAX_COPY = 256 * 1024**2
MIN_SECONDS = 0.02
"""Seconds that one product must take to be timed well; the matrix grows until it does."""
MAX_SECONDS = 0.5
"""No larger product is tried where one would take longer than this."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A dtype or direction to time on a device."""

    device: str
    measure: str
    """``"matmul"`` or ``"copy"``."""
    what: str
    """The dtype, or the direction; ``"within"`` copies from the device to itself."""

    def __str__(self) -> str:
        return f"{self.device} {self.measure} {self.what}"


def benchmark(
    devices: Sequence[str] = (),
    *,
    seconds: float = 0.25,
) -> BenchReport:
    """Return how fast each device multiplies matrices and copies.

    Args:
        devices: written as anywhere else; by default every accelerator and the CPU.
        seconds: how long each measurement is repeated; there are about ten per device.

    Raises:
        DeviceNotFound: a device is not here.
    """
    import torch

    names = [device_names.resolve(name) for name in devices] or [*allocator.accelerators(), "cpu"]
    steps = [step for name in dict.fromkeys(names) if name != "meta" for step in _measurements(name)]
    rows = []
    with progress.counted(len(steps), "measurement") as tell:
        for step in steps:
            tell(str(step))
            rows.append(_measure(step, seconds))
    return BenchReport(
        tuple(rows), torch_version=str(torch.__version__), threads=torch.get_num_threads(),
        float32_precision=torch.get_float32_matmul_precision(),
    )  # fmt: skip


def _measurements(device: str) -> list[Measurement]:
    directions = ["within"]
    if device != "cpu":
        pinned = [f"{direction}, pinned" for direction in ("host-to-device", "device-to-host")]
        directions = ["host-to-device", "device-to-host", *pinned, *directions]
    if _next_device(device) is not None:
        directions.append("device-to-device")
    return [Measurement(device, "matmul", each) for each in DTYPES] + [
        Measurement(device, "copy", each) for each in directions
    ]


def _next_device(device: str) -> str | None:
    """Return the next device of the same backend, or the first after the last; None if it is the only one."""
    kind = [each for each in allocator.accelerators() if each.partition(":")[0] == device.partition(":")[0]]
    return kind[(kind.index(device) + 1) % len(kind)] if len(kind) > 1 else None


def _measure(step: Measurement, seconds: float) -> BenchRow:
    run = _matmul_workload if step.measure == "matmul" else _copy_workload
    simulated = step.device.startswith("simgpu")
    try:
        work, size, amount = run(step)
        best, repeats = _best_time(work, _synchronizer(step.device), seconds)
    except (RuntimeError, NotImplementedError, TypeError) as error:  # no such dtype or pinning, or no memory
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return BenchRow(step.device, step.measure, step.what, reason=reason, simulated=simulated)
    return BenchRow(
        step.device, step.measure, step.what, rate=amount / best, size=size, repeats=repeats, simulated=simulated
    )


Workload = tuple[Callable[[], object], int, float]
"""What to repeat, its size, and the operations or bytes of one run."""


def _matmul_workload(step: Measurement) -> Workload:
    import torch

    dtype = getattr(torch, step.what)
    room = _free_bytes(step.device) // 8
    size = MIN_MATRIX
    while True:
        # Not random, which would advance a generator; not constant, which costs a device less power and time.
        matrix = torch.linspace(-1, 1, size * size, device=step.device).sin_().reshape(size, size).to(dtype)
        work = _product(matrix)
        once, _ = _best_time(work, _synchronizer(step.device), 0)
        larger = 2 * size
        if once >= MIN_SECONDS or 8 * once > MAX_SECONDS or larger > MAX_MATRIX or 20 * larger**2 > room:
            return work, size, 2.0 * size**3
        size = larger


def _product(matrix: Any) -> Callable[[], object]:
    return lambda: matrix @ matrix


def _copy_workload(step: Measurement) -> Workload:
    import torch

    nbytes = min(MAX_COPY, _free_bytes(step.device) // 8, _free_bytes("cpu") // 8)
    direction, pinned = step.what.partition(",")[::2]
    there = torch.zeros(nbytes, dtype=torch.uint8, device=step.device)
    if direction in ("within", "device-to-device"):
        here = torch.zeros_like(there, device=_next_device(step.device) if direction == "device-to-device" else None)
    else:
        here = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=bool(pinned))
        if pinned and not here.is_pinned():
            raise RuntimeError("host memory cannot be pinned for this device")
    target, source = (here, there) if direction in ("device-to-host", "device-to-device") else (there, here)
    return (lambda: target.copy_(source)), nbytes, float(nbytes)


def _best_time(work: Callable[[], object], synchronize: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Return the best time of one run, and the number of runs; the first warms up and does not count."""
    work()
    synchronize()
    best, repeats, end = float("inf"), 0, time.perf_counter() + seconds
    while not repeats or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - start)
        repeats += 1
    return best, repeats


def _synchronizer(device: str) -> Callable[[], object]:
    backend, _, index = device.partition(":")
    module: ModuleType | None = None if backend == "cpu" else allocator.device_module(backend)
    if module is None or not hasattr(module, "synchronize"):
        return lambda: None
    if backend == "mps":  # there is one, and it takes no index
        wait: Callable[[], object] = module.synchronize
        return wait
    return lambda: module.synchronize(int(index or 0))


def _free_bytes(device: str) -> int:
    import torch

    if device == "cpu":
        found = host.available_memory()
        return found[0] if found else 2 * 1024**3
    torch.empty(0, device=device)  # initialises the device, without which its memory is not read
    room = allocator.mem_get_info(device)
    figures = allocator.device_stats(device)
    if room is None:
        return 2 * 1024**3
    return room[0] + (figures.reserved - figures.allocated if figures else 0)
