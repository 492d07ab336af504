"""What `-p` and `-a` add to `%gpuinfo --engines`: the processes on each GPU, and every field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpumagic.cluster.report import ClusterReport
from gpumagic.cluster.shared_gpus import SharedGpu
from gpumagic.gpus import view
from gpumagic.gpus.report import GPUReport, GpuRow, ProcessRow
from gpumagic.report.document import Block, Heading


def blocks(report: ClusterReport, gpus: Sequence[SharedGpu]) -> Iterator[Block]:
    """Return what was asked for, by host."""
    asked = [each for each in report.reports.values() if isinstance(each, GPUReport)]
    processes, everything = any(each.show_processes for each in asked), any(each.show_all for each in asked)
    hosts: dict[str, list[GpuRow]] = {}
    for gpu in gpus:
        hosts.setdefault(gpu.host, []).append(_named(gpu))
    for host, rows in hosts.items() if processes or everything else ():
        if len(hosts) > 1:
            yield Heading(host, apart=True)
        yield from view.process_blocks(rows) if processes else ()
        yield from (view.details_table(row, rows) for row in rows if everything)


def _named(gpu: SharedGpu) -> GpuRow:
    """Return the GPU with the engines among its processes named, under a name that all of them would know."""
    engines = {kernel.answer.origin.pid: kernel.answer.place for kernel in gpu.kernels}
    shared = len({kernel.row.device for kernel in gpu.kernels}) > 1
    named = tuple(_process(each, engines.get(each.pid)) for each in gpu.reading.processes or ())
    row = gpu.reading
    return replace(row, device=None if shared else row.device, processes=named if row.processes is not None else None)


def _process(process: ProcessRow, engine: str | None) -> ProcessRow:
    if engine is None or process.pid is None:
        return replace(process, this_kernel=False)
    return replace(process, this_kernel=False, name=f"engine {engine}: {process.name or 'python'}")
