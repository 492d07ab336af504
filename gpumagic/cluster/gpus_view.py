"""The part of `%gpuinfo --engines` about GPUs: one row per GPU, or one per host where there are many."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from gpumagic.cluster.report import (
    MAX_GPUS,
    ClusterReport,
    EngineAnswer,
    SharedGpu,
    engine_ranges,
    engines_label,
    pooled,
    shared_gpus,
)
from gpumagic.gpus import view
from gpumagic.gpus.report import GPUReport, GpuRow, ProcessRow
from gpumagic.report.base import grouped
from gpumagic.report.document import Block, Cell, Column, Fold, Heading, Paragraph, Table
from gpumagic.report.units import NOT_AVAILABLE, count, percent, size, size_pair

MAX_HOSTS = 20
MAX_FOLDED = 128


def gpu_blocks(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks."""
    gpus = shared_gpus(report)
    hosts = grouped((gpu.host, gpu) for gpu in gpus)
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, GPUReport)]
    blocks: list[Block] = [Paragraph(text) for text in _versions(found)]
    if len(gpus) > MAX_GPUS:
        blocks += _host_blocks(hosts)
    elif gpus:
        blocks.append(_table(gpus))
    if len(gpus) <= MAX_GPUS:
        blocks += _detail_blocks([each for _, each in found], hosts)
    causes = grouped((own.cause, answer) for answer, own in found if own.cause)
    blocks += [Paragraph(f"{engines_label(answers)}: {cause}") for cause, answers in causes.items()]
    return _heading(gpus, hosts), blocks


def _heading(gpus: Sequence[SharedGpu], hosts: Collection[str]) -> str:
    """Return what the headline of one process says, with the host of the GPU where there are several."""
    if len(hosts) < 2:
        return view.headline([gpu.row for gpu in gpus])
    rows = [(gpu.host, gpu.row) for gpu in gpus]
    return view.headline([replace(row, device=row.device and f"{row.device} on {host}") for host, row in rows])


def _versions(found: Sequence[tuple[EngineAnswer, GPUReport]]) -> list[str]:
    """Return the torch versions where they differ: a distributed run wants one everywhere."""
    versions = grouped((f"torch {own.torch_version}" if own.torch_version else "no torch", each) for each, own in found)
    if len(versions) < 2:
        return []
    parts = "; ".join(f"{version} on {engine_ranges(answers)}" for version, answers in versions.items())
    return [f"The engines differ: {parts}."]


def _detail_blocks(reports: Sequence[GPUReport], hosts: Mapping[str, Sequence[SharedGpu]]) -> Iterator[Block]:
    """Return what `-p` and `-a` add, by host."""
    processes, everything = any(each.show_processes for each in reports), any(each.show_all for each in reports)
    for host, gpus in hosts.items() if processes or everything else ():
        rows = [_with_engine_names(gpu) for gpu in gpus]
        if len(hosts) > 1:
            yield Heading(host, apart=True)
        yield from view.process_blocks(rows) if processes else ()
        for row in rows if everything else ():
            yield from view.details_blocks(row, rows)


def _with_engine_names(gpu: SharedGpu) -> GpuRow:
    """Return the GPU with its engines named among the processes, and without a name that engines do not share."""
    names = {each.answer.origin.pid: each.answer.label for each in gpu.engines}

    def named(process: ProcessRow) -> ProcessRow:
        if process.pid is None or process.pid not in names:
            return replace(process, this_kernel=False)
        return replace(process, this_kernel=False, name=f"engine {names[process.pid]}: {process.name or 'python'}")

    device = gpu.row.device if len({each.row.device for each in gpu.engines}) == 1 else None
    processes = gpu.row.processes
    return replace(gpu.row, device=device, processes=None if processes is None else tuple(map(named, processes)))


def _table(gpus: Sequence[SharedGpu]) -> Table:
    several = len({gpu.host for gpu in gpus}) > 1
    columns = {
        Column("Host"): several,
        Column("GPU"): True,
        Column("Engine", shrinks=True): True,
        Column("Name", priority=4, shrinks=True): True,
        Column("Memory"): True,
        Column("Engines' part", "right", 1): True,
        Column("Util", "right", 2): any(gpu.row.utilization is not None for gpu in gpus),
        Column("Temp", "right", 3): any(gpu.row.temperature is not None for gpu in gpus),
    }
    shown = [column for column, is_shown in columns.items() if is_shown]
    grid = [[cells[column.title] for column in shown] for cells in map(_cells, gpus)]
    return Table(shown, grid, "GPUs" if several else f"GPUs of {gpus[0].host}", elsewhere="in a wider terminal")


def _cells(gpu: SharedGpu) -> dict[str, Cell | str]:
    row = gpu.row
    return {
        "Host": gpu.host,
        "GPU": _name(gpu),
        "Engine": _engines(gpu),
        "Name": Cell((row.name or "").removeprefix("NVIDIA "), title=row.name or ""),
        "Memory": _memory([gpu]),
        "Engines' part": _engines_part([gpu]),
        "Util": percent(row.utilization),
        "Temp": NOT_AVAILABLE if row.temperature is None else f"{row.temperature:.0f} C",
    }


def _name(gpu: SharedGpu) -> Cell:
    """Return the engines' name for a GPU, or the driver's where they have several."""
    names = list(dict.fromkeys(view.short_name(each.row) for each in gpu.engines))
    if len(names) == 1:
        return Cell(names[0])
    index = gpu.row.nvml_index
    return Cell(names[0] if index is None else f"NVML {index}", title=", ".join(names))


def _engines(gpu: SharedGpu) -> Cell:
    """Return the engines that hold memory on a GPU, or else those that see it."""
    reserved = ", ".join(f"{each.answer.label}: {size(each.row.kernel_reserved)}" for each in gpu.users)
    text = engine_ranges([each.answer for each in gpu.users or gpu.engines])
    return Cell(f"none of {text}" if not gpu.users and len(gpu.engines) > 1 else text, title=reserved)


def _engines_part(gpus: Sequence[SharedGpu]) -> Cell:
    row = pooled(gpus)
    if not row.kernel_reserved:
        return Cell("nothing", muted=True, title="no engine's torch holds memory there")
    return Cell(size_pair(row.kernel_allocated or 0, row.kernel_reserved), title="in tensors / with the caches")


def _has_memory(gpu: SharedGpu) -> bool:
    return gpu.row.memory_used is not None and bool(gpu.row.memory_total)


def _memory(gpus: Sequence[SharedGpu]) -> Cell:
    known = [gpu for gpu in gpus if _has_memory(gpu)]
    if not known:
        return Cell(size(gpus[0].row.memory_total) if len(gpus) == 1 else NOT_AVAILABLE, muted=True)
    row = pooled(known)
    return Cell(size_pair(row.memory_used or 0, row.memory_total), bar=view.memory_bar(row))


def _host_blocks(hosts: Mapping[str, Sequence[SharedGpu]]) -> list[Block]:
    """Return one row per host, those with least free memory first, and the rest as a sum."""
    fullness = {host: sum(gpu.used_share for gpu in gpus) / len(gpus) for host, gpus in hosts.items()}
    ordered = sorted(hosts, key=lambda host: (-fullness[host], host))
    shown, rest = ordered[:MAX_HOSTS], [gpu for host in ordered[MAX_HOSTS:] for gpu in hosts[host]]
    columns = [
        Column("Host"), Column("GPUs", "right"), Column("Memory"), Column("Engines' part", "right", 1),
        Column("Engines", priority=3, shrinks=True), Column("Util", "right", 2), Column("Fullest", priority=1),
    ]  # fmt: skip
    grid = [_host_cells(host, hosts[host]) for host in shown]
    blocks: list[Block] = [Table(columns, grid, "Hosts, the fullest first")]
    if rest:
        more = f"and {count(len(ordered) - len(shown), 'more host')} with {count(len(rest), 'GPU')}"
        blocks.append(Paragraph(f"{more}: {_memory(rest).text} in use", muted=True))
    return [*blocks, _fullest_hosts([hosts[host] for host in shown])]


def _host_cells(host: str, gpus: Sequence[SharedGpu]) -> list[Cell | str]:
    answers = {each.answer.engine: each.answer for gpu in gpus for each in gpu.engines}
    fullest = max(gpus, key=lambda gpu: gpu.used_share)
    return [
        host, f"{len(gpus):,}", _memory(gpus), _engines_part(gpus), engine_ranges(list(answers.values())),
        percent(pooled(gpus).utilization), f"{_name(fullest).text} {percent(100 * fullest.used_share)}",
    ]  # fmt: skip


def _fullest_hosts(hosts: Sequence[Sequence[SharedGpu]]) -> Fold:
    """Return the GPUs of the fullest hosts, about `MAX_FOLDED` of them."""
    tables: list[Block] = []
    number = 0
    for gpus in hosts:
        number += len(gpus)
        if tables and number > MAX_FOLDED:
            break
        tables.append(_table(gpus))
    return Fold(f"Each GPU of the fullest {count(len(tables), 'host')}; to_pandas() has all", tables)
