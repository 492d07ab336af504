"""The part of `%gpuinfo --engines` that is about GPUs: a row a GPU, or a row a host where there are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpumagic.cluster.report import ClusterReport, EngineAnswer, SharedGpu, engine_ranges, engines_label, shared_gpus
from gpumagic.gpus import view
from gpumagic.gpus.report import GPUReport, GpuRow, ProcessRow
from gpumagic.gpus.view import UTILIZATION_LEGEND, short_name
from gpumagic.report.document import Block, Cell, Column, Fold, Heading, Paragraph, Segment, Table
from gpumagic.report.units import NOT_AVAILABLE, count, pair, percent, size


def detail_blocks(report: ClusterReport, gpus: Sequence[SharedGpu]) -> Iterator[Block]:
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


MAX_ROWS = 32
"""GPUs with a row each; of more, each host has one."""
MAX_HOSTS = 20
MAX_FOLDED = 128
BAR_LEGEND = "Bar, from the left: tensors of all the engines on it, their caches, all else in use."


def gpu_blocks(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks."""
    gpus = shared_gpus(report)
    hosts: dict[str, list[SharedGpu]] = {}
    for gpu in gpus:
        hosts.setdefault(gpu.host, []).append(gpu)
    blocks: list[Block] = [Paragraph(text) for text in _versions(report)]
    if len(gpus) > MAX_ROWS:
        blocks += _by_host(hosts)
    elif gpus:
        blocks.append(_table(gpus))
    if any(_bar([gpu]) for gpu in gpus):
        blocks.append(
            Paragraph(BAR_LEGEND + (f" {UTILIZATION_LEGEND}" if _utilization(gpus) is not None else ""), muted=True)
        )
    if len(gpus) <= MAX_ROWS:
        blocks += detail_blocks(report, gpus)
    blocks += _causes(report)
    return _heading(gpus), blocks


def _heading(gpus: Sequence[SharedGpu]) -> str:
    simulated = sum(gpu.reading.simulated for gpu in gpus)
    if simulated == len(gpus) > 0:
        return count(simulated, "simulated GPU")
    number = count(len(gpus) - simulated, "GPU") if gpus else "No GPU"
    return f"{number}, {simulated} simulated" if simulated else number


def _versions(report: ClusterReport) -> list[str]:
    """Return what differs between engines that should be alike: a distributed run wants one torch everywhere."""
    found: dict[str, list[EngineAnswer]] = {}
    for answer in report.engines:
        if isinstance(answer.report, GPUReport):
            version = answer.report.torch_version
            found.setdefault(f"torch {version}" if version else "no torch", []).append(answer)
    if len(found) < 2:
        return []
    told = "; ".join(f"{version} on {engine_ranges(answers)}" for version, answers in found.items())
    return [f"The engines are not alike: {told}."]


def _causes(report: ClusterReport) -> list[Block]:
    causes: dict[str, list[EngineAnswer]] = {}
    for answer in report.engines:
        if isinstance(answer.report, GPUReport) and answer.report.cause:
            causes.setdefault(answer.report.cause, []).append(answer)
    return [Paragraph(f"{engines_label(who)}: {cause}") for cause, who in causes.items()]


def _table(gpus: Sequence[SharedGpu]) -> Table:
    several = len({gpu.host for gpu in gpus}) > 1
    measured = {
        "Util": any(gpu.reading.utilization is not None for gpu in gpus),
        "Temp": any(gpu.reading.temperature is not None for gpu in gpus),
        "Host": several,
    }
    shown = [place for place, column in enumerate(_COLUMNS) if measured.get(column.title, True)]
    grid = [[cells[place] for place in shown] for cells in map(_row, gpus)]
    caption = "GPUs" if several else f"GPUs of {gpus[0].host}"
    return Table([_COLUMNS[place] for place in shown], grid, caption, elsewhere="in a wider terminal")


_COLUMNS = (
    Column("Host"),
    Column("GPU"),
    Column("Engine", shrinks=True),
    Column("Name", priority=4, shrinks=True),
    Column("Memory"),
    Column("Engines' part", "right", 1),
    Column("Util", "right", 2),
    Column("Temp", "right", 3),
)


def _row(gpu: SharedGpu) -> list[Cell | str]:
    row = gpu.reading
    temperature = NOT_AVAILABLE if row.temperature is None else f"{row.temperature:.0f} C"
    name = Cell((row.name or "").removeprefix("NVIDIA "), title=row.name or "")
    return [
        gpu.host, _names(gpu), _users(gpu), name, _memory([gpu]), _part([gpu]), percent(row.utilization), temperature,
    ]  # fmt: skip


def _names(gpu: SharedGpu) -> Cell:
    """Return the engines' name for a GPU, or the driver's where they have several."""
    names = list(dict.fromkeys(short_name(kernel.row) for kernel in gpu.kernels))
    if len(names) == 1:
        return Cell(names[0])
    index = gpu.reading.nvml_index
    return Cell(names[0] if index is None else f"NVML {index}", title=", ".join(names))


def _users(gpu: SharedGpu) -> Cell:
    """Return the engines that hold memory on a GPU, or else those that see it."""
    users = gpu.users or gpu.kernels
    each = ", ".join(f"{kernel.answer.place}: {size(kernel.row.kernel_reserved)}" for kernel in gpu.users)
    text = engine_ranges([kernel.answer for kernel in users])
    return Cell(text if gpu.users else f"none of {text}" if len(gpu.kernels) > 1 else text, title=each)


def _part(gpus: Sequence[SharedGpu]) -> Cell:
    reserved = sum(gpu.reserved for gpu in gpus)
    if not reserved:
        return Cell("nothing", muted=True, title="no engine's torch holds memory there")
    return Cell(pair(sum(gpu.allocated for gpu in gpus), reserved), title="in tensors / with the caches")


def _memory(gpus: Sequence[SharedGpu]) -> Cell:
    known = [gpu for gpu in gpus if gpu.used is not None and gpu.reading.memory_total]
    if not known:
        return Cell(size(gpus[0].reading.memory_total) if len(gpus) == 1 else NOT_AVAILABLE, muted=True)
    total = sum(gpu.reading.memory_total or 0 for gpu in known)
    return Cell(pair(sum(gpu.used or 0 for gpu in known), total), bar=_bar(known))


def _bar(gpus: Sequence[SharedGpu]) -> tuple[Segment, ...]:
    total = sum(gpu.reading.memory_total or 0 for gpu in gpus)
    if not total or any(gpu.used is None for gpu in gpus):
        return ()
    allocated, reserved = sum(gpu.allocated for gpu in gpus), sum(gpu.reserved for gpu in gpus)
    used = sum(gpu.used or 0 for gpu in gpus)
    return (
        Segment(allocated / total, "main"),
        Segment(max(0, reserved - allocated) / total, "second"),
        Segment(max(0, used - reserved) / total, "other"),
    )


def _utilization(gpus: Sequence[SharedGpu]) -> float | None:
    known = [gpu.reading.utilization for gpu in gpus if gpu.reading.utilization is not None]
    return sum(known) / len(known) if known else None


def _by_host(hosts: dict[str, list[SharedGpu]]) -> list[Block]:
    """Return a row a host, those first that have least memory left; the rest as a sum."""
    ordered = sorted(hosts, key=lambda host: (-_used(hosts[host]), host))
    shown, rest = ordered[:MAX_HOSTS], [gpu for host in ordered[MAX_HOSTS:] for gpu in hosts[host]]
    columns = [
        Column("Host"), Column("GPUs", "right"), Column("Memory"), Column("Engines' part", "right", 1),
        Column("Engines", priority=3, shrinks=True), Column("Util", "right", 2), Column("Fullest", priority=1),
    ]  # fmt: skip
    blocks: list[Block] = [Table(columns, [_host(host, hosts[host]) for host in shown], "Hosts, the fullest first")]
    if rest:
        more = f"and {count(len(ordered) - len(shown), 'more host')} with {count(len(rest), 'GPU')}"
        blocks.append(Paragraph(f"{more}: {_memory(rest).text} in use", muted=True))
    return [*blocks, _host_tables([hosts[host] for host in shown])]


def _host_tables(hosts: Sequence[Sequence[SharedGpu]]) -> Fold:
    """Return the GPUs of the fullest hosts, as many as a page bears."""
    tables: list[Block] = []
    number = 0
    for gpus in hosts:
        number += len(gpus)
        if tables and number > MAX_FOLDED:
            break
        tables.append(_table(gpus))
    return Fold(f"Each GPU of the fullest {count(len(tables), 'host')}; to_pandas() has all", tables)


def _used(gpus: Sequence[SharedGpu]) -> float:
    return sum(gpu.share for gpu in gpus) / len(gpus)


def _host(host: str, gpus: Sequence[SharedGpu]) -> list[Cell | str]:
    answers = {kernel.answer.engine: kernel.answer for gpu in gpus for kernel in gpu.kernels}
    fullest = max(gpus, key=lambda gpu: gpu.share)
    return [
        host, f"{len(gpus):,}", _memory(gpus), _part(gpus), engine_ranges(list(answers.values())),
        percent(_utilization(gpus)), f"{_names(fullest).text} {percent(100 * fullest.share)}",
    ]  # fmt: skip
