"""The view of `%gpuinfo`: a row a device, what is absent and why, and what the figures mean."""

from __future__ import annotations

from gpumagic.gpus import bench_view, cells_view, gpu_details, gpu_processes, gpu_table, history_view  # noqa: F401  # they register their views
from gpumagic.gpus.report import GPUReport
from gpumagic.report.document import Block, Document, Heading, Paragraph, document_of
from gpumagic.report.units import count


@document_of.register(GPUReport)
def view_gpus(report: GPUReport) -> Document:
    """Return the report as a table of devices, or as one paragraph where there is none."""
    blocks: list[Block] = [Heading(_headline(report))]
    if report.cause:
        blocks.append(Paragraph(report.cause))
    if report.devices:
        blocks += gpu_table.blocks(report.devices, explained=report.cause is not None)
    if report.show_processes and report.devices:
        blocks += gpu_processes.blocks(report.devices)
    if report.show_all:
        blocks += [gpu_details.table(row, report.devices) for row in report.devices]
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _headline(report: GPUReport) -> str:
    real = {row.device if row.nvml_index is None else row.nvml_index for row in report.devices if not row.simulated}
    simulated = sum(row.simulated for row in report.devices)
    parts = [count(len(real), "GPU") if real else "No GPU"]
    if simulated:
        parts[0] += f", {simulated} simulated"
    if report.torch_version is None:
        parts.append("torch is not installed")
    else:
        parts.append(f"torch {report.torch_version} ({_build(report.cuda_build)})")
    if report.driver_version:
        parts.append(f"driver {report.driver_version}")
    if report.cuda_visible_devices is not None:
        parts.append(f'CUDA_VISIBLE_DEVICES="{report.cuda_visible_devices}"')
    return " · ".join(parts)


def _build(label: str | None) -> str:
    if label is None:
        return "CPU-only build"
    return f"CUDA {label}" if label[:1].isdigit() else label
