"""The view of `%gpuinfo`: golden text in 80 columns, and HTML that stays safe and complete."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from gpumagic.gpus.report import GPUReport, GpuRow, ProcessRow
from gpumagic.report.base import to_html, to_text
from gpumagic.report.units import size_pair

KIB, MIB, GIB = 1024, 1024**2, 1024**3
PROCESSES = (
    ProcessRow(4211, "python -m ipykernel_launcher", "ana", 20 * GIB, this_kernel=True),
    ProcessRow(77, "python train.py", "bob", 10 * GIB),
    ProcessRow(12, None, None, None, kind="graphics"),
    ProcessRow(None, "2 processes outside this container", None, GIB),
)
A100: dict[str, Any] = {
    "name": "NVIDIA A100-SXM4-48GB", "memory_total": 48 * GIB, "memory_used": 32 * GIB, "memory_free": 16 * GIB,
    "memory_reserved": 512 * MIB, "kernel_allocated": 12 * GIB, "kernel_reserved": 20 * GIB,
    "other_processes": 11 * GIB, "utilization": 37.0, "temperature": 61.0, "power": 252.3, "power_limit": 400.0,
    "throttle_reasons": (), "processes": PROCESSES,
}  # fmt: skip
FIRST = GpuRow("cuda:0", 0, "GPU-1", **A100)


def report(*rows: GpuRow, **more: Any) -> GPUReport:
    """Return a report of those devices on a healthy machine."""
    facts = {"torch_version": "2.13.0", "cuda_build": "12.8", "driver_version": "570.86"}
    return GPUReport(rows, **{**facts, **more})


def shown(*rows: GpuRow, width: int = 80, unicode: bool = True, **more: Any) -> str:
    """Return the text of such a report."""
    return to_text(report(*rows, **more), width, unicode)


def test_one_gpu_in_80_columns() -> None:
    """What matters most fits: whose memory, and how busy."""
    assert shown(FIRST).splitlines() == [
        "cuda:0 has 16.0 of 48.0 GiB free",
        "torch 2.13.0 (CUDA 12.8) · driver 570.86",
        "Device  Name            Memory                            This kernel  Util",
        "──────  ──────────────  ────────────────────────────  ───────────────  ────",
        "cuda:0  A100-SXM4-48GB  32.0 / 48.0 GiB ███▓▓▒▒▒░░░░  12.0 / 20.0 GiB   37%",
        "Others, Temp, Power: in a wider terminal, or with -a.",
    ]


def test_a_full_gpu_says_in_the_first_line_who_fills_it() -> None:
    """And what lists them, where the report does not."""
    full = dataclasses.replace(FIRST, memory_free=GIB, kernel_reserved=0, other_processes=47 * GIB)
    assert shown(full, width=120).splitlines()[0] == (
        "cuda:0 has only 1.0 of 48.0 GiB free: other processes hold 47.0 GiB, "
        "most of it PID 77 of bob (python train.py)"
    )
    unlisted = dataclasses.replace(full, processes=None)
    assert shown(unlisted, dataclasses.replace(unlisted, device="cuda:1"), width=200).splitlines()[
        0
    ] == (
        "2 GPUs, all full: cuda:0 has most free memory, 1.0 of 48.0 GiB; other processes hold 47.0 GiB, "
        "%gpuinfo -p lists them"
    )
    own = dataclasses.replace(full, kernel_reserved=40 * GIB, other_processes=GIB)
    assert shown(own, width=120).startswith(
        "cuda:0 has only 1.0 of 48.0 GiB free: this kernel holds 40.0 GiB, %devices lists it"
    )


def test_wider_terminals_show_every_column() -> None:
    """Others, temperature and power come back as soon as there is room, and nothing is said to be elsewhere."""
    lines = shown(FIRST, width=110).splitlines()
    assert lines[2].split("  ")[-1].strip() == "Power"
    assert lines[4].endswith("  11.0 GiB   37%  61 C  252/400 W")
    assert len(lines) == 5


def test_ascii_terminals_get_ascii() -> None:
    """Bars and dashes have a plain form."""
    text = shown(FIRST, unicode=False)
    assert text.isascii()
    assert "32.0 / 48.0 GiB ###==---...." in text


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("flags", [{}, {"show_processes": True}, {"show_all": True}])
def test_no_line_is_wider_than_the_terminal(width: int, flags: dict[str, bool]) -> None:
    """Whatever is shown."""
    second = dataclasses.replace(FIRST, device="cuda:11", nvml_index=7, predicted=True)
    simulated = GpuRow(
        "simgpu:0", name="Simulated GPU", memory_total=GIB, memory_used=0, simulated=True
    )
    assert all(
        len(line) <= width
        for line in shown(FIRST, second, simulated, width=width, **flags).splitlines()
    )


def test_nvml_indices_appear_where_they_differ() -> None:
    """And a predicted name carries its mark."""
    other = dataclasses.replace(FIRST, device="cuda:1", nvml_index=3, predicted=True)
    text = shown(FIRST, other)
    assert re.search(r"^cuda:1\? +3  A100", text, re.MULTILINE)
    assert "NVML" not in shown(FIRST)


def test_a_column_that_nobody_has_is_left_out_and_explained() -> None:
    """A column of n/a says less than a sentence."""
    rows = [dataclasses.replace(FIRST, utilization=None, reasons={"utilization": "n/a (MIG)"})] * 2
    text = shown(*rows)
    assert "Util  " not in text.splitlines()[2]
    assert "Util: n/a (MIG)." in text


def test_an_instance_stands_indented_under_its_card_and_says_what_mig_hides() -> None:
    """In the cell itself, so that no sentence need repeat it."""
    card = dataclasses.replace(FIRST, device=None, reasons={"device": "split into MIG instances"})
    lacks = {**A100, **dict.fromkeys(("utilization", "temperature"))}
    instance = GpuRow(
        "cuda:0",
        0,
        "MIG-1",
        **lacks,
        reasons=dict.fromkeys(("utilization", "temperature"), "n/a (MIG)"),
    )
    lines = shown(card, instance, width=110).splitlines()
    assert lines[4].startswith("NVML 0 ")
    assert lines[5].startswith("· cuda:0 ")
    assert lines[5].count("n/a (MIG)") == 2
    assert "MIG" not in " ".join(lines[6:]).replace("split into MIG instances", "")


def test_an_instance_is_called_by_its_slice() -> None:
    """Cut to the width, the card's name would be all that is left of it."""
    name = "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    instance = dataclasses.replace(FIRST, uuid="MIG-1", name=name)
    assert shown(FIRST, instance).splitlines()[5].split("  ")[1].strip() == "MIG 3g.40gb"
    assert f'title="{name}"' in to_html(report(FIRST, instance))
    assert "A100-X" in shown(dataclasses.replace(instance, name="A100-X"))


def test_a_cell_that_one_device_lacks_is_explained_by_name() -> None:
    """In the text as well as in the title, which only a mouse finds."""
    lost = GpuRow(
        "cuda:1", 1, reasons=dict.fromkeys(A100, "lost"), kernel_allocated=0, kernel_reserved=0
    )
    text = shown(FIRST, lost, width=110)
    assert "Name, Memory, Others, Util, Temp, Power, Throttling of cuda:1: n/a (lost)." in text
    assert 'title="lost">n/a</td>' in to_html(report(FIRST, lost))


def test_a_gpu_torch_cannot_use_says_why() -> None:
    """It has no name in torch, so it goes by NVML's."""
    hidden = dataclasses.replace(
        FIRST, device=None, nvml_index=1, reasons={"device": "not visible to CUDA in this process"}
    )
    text = shown(FIRST, hidden)
    assert "NVML 1" in text.splitlines()[5]
    assert "Not usable in torch here: NVML 1 (not visible to CUDA in this process)." in " ".join(
        text.split()
    )


def test_throttling_is_told_in_words() -> None:
    """Only where something holds a GPU back."""
    assert "throttled" not in shown(FIRST)
    hot = dataclasses.replace(FIRST, throttle_reasons=("power cap", "hardware thermal limit"))
    assert "cuda:0 is throttled by: power cap, hardware thermal limit." in shown(hot)
    same = dataclasses.replace(hot, device="cuda:1")
    assert "cuda:0, cuda:1 are throttled by: power cap, hardware thermal limit." in shown(hot, same)


def test_throttling_that_cannot_be_read_is_not_taken_for_none() -> None:
    """There is no column that would show it."""
    unknown = dataclasses.replace(
        FIRST, throttle_reasons=None, reasons={"throttle_reasons": "no permission"}
    )
    assert "Throttling: n/a (no permission)." in shown(unknown)
    assert "Throttling of cuda:1: n/a (no permission)." in shown(
        FIRST, dataclasses.replace(unknown, device="cuda:1")
    )


def test_simulated_devices_cannot_be_taken_for_gpus() -> None:
    """Neither in the heading nor in the table."""
    row = GpuRow("simgpu:0", name="GPU", memory_total=GIB, memory_used=0, simulated=True)
    lines = shown(row, driver_version=None, cuda_build=None).splitlines()
    assert lines[:2] == ["1 simulated GPU", "torch 2.13.0 (CPU-only build)"]
    assert "GPU (simulated)" in lines[4]
    both = [dataclasses.replace(row, device=f"simgpu:{n}", memory_free=n * GIB) for n in (0, 1)]
    assert shown(*both).startswith(
        "2 simulated GPUs: simgpu:1 has most free memory, 1.0 of 1.0 GiB"
    )


def test_without_a_gpu_there_is_one_paragraph() -> None:
    """The cause with its remedy, and the facts about torch."""
    text = to_text(GPUReport((), "2.13.0+cpu", cause="This machine has no NVIDIA GPU."), 80)
    assert text.splitlines() == [
        "No GPU: This machine has no NVIDIA GPU.",
        "torch 2.13.0+cpu (CPU-only build)",
    ]
    assert "torch is not installed" in to_text(GPUReport((), cause="None."), 80)


def test_processes_are_listed_on_request() -> None:
    """This kernel is marked; what the driver does not say is not a zero."""
    assert "PID" not in shown(FIRST)
    assert shown(FIRST, show_processes=True).splitlines()[6:] == [
        "Processes",
        "Device   PID    Memory  User  Process",
        "──────  ────  ────────  ────  ─────────────────────────────────────────────",
        "cuda:0  4211  20.0 GiB  ana   python -m ipykernel_launcher (this kernel)",
        "cuda:0    77  10.0 GiB  bob   python train.py",
        "cuda:0    12       n/a  -     another user's or an ended process (graphics)",
        "cuda:0     -   1.0 GiB  -     2 processes outside this container",
    ]


def test_no_process_and_no_list_of_processes_are_told_apart() -> None:
    """One is a fact about the GPU, the other about the driver."""
    idle = dataclasses.replace(FIRST, processes=())
    assert "No process uses a GPU." in shown(idle, show_processes=True)
    unknown = dataclasses.replace(FIRST, processes=None, reasons={"processes": "no permission"})
    assert "Processes of cuda:0: n/a (no permission)." in shown(unknown, show_processes=True)


def test_all_fields_have_a_value_or_a_reason() -> None:
    """The long form says of each field what is known."""
    full = dataclasses.replace(
        FIRST, clock_sm=1410, clock_sm_max=1980, reasons={"ecc_errors": "not supported"}
    )
    text = shown(full, show_all=True)
    assert re.search(r"^SM clock +1410 / 1980 MHz$", text, re.MULTILINE)
    assert "\nUncorrected memory errors: n/a (not supported).\n" in text
    assert re.search(r"^Memory, driver's own +512\.0 MiB$", text, re.MULTILINE)


def test_what_a_gpu_lacks_is_named_in_a_line_for_each_reason() -> None:
    """A row of n/a each would hide what is there."""
    lacks = {
        "ecc_errors": "not supported",
        "clock_sm": "not supported",
        "temperature": "no permission",
    }
    lines = shown(
        dataclasses.replace(FIRST, temperature=None, reasons=lacks), show_all=True
    ).splitlines()
    assert "SM clock; Uncorrected memory errors: n/a (not supported)." in lines
    assert "Temperature: n/a (no permission)." in lines


def test_a_few_bytes_of_a_large_gpu_are_no_part_of_its_bar() -> None:
    """In text the least that can be drawn is a twelfth."""
    barely = dataclasses.replace(FIRST, memory_used=22 * MIB, kernel_allocated=0, kernel_reserved=0)
    assert "<0.1 / 48.0 GiB ░░░░░░░░░░░░" in shown(barely)


def test_hostile_names_are_escaped() -> None:
    """A process may call itself anything."""
    evil = ProcessRow(1, "<script>alert(1)</script>\x1b[2J", "<b>", None)
    row = dataclasses.replace(FIRST, name='"><img src=x>', processes=(evil,))
    html = to_html(report(row, show_processes=True, show_all=True, cuda_visible_devices="<i>"))
    assert not re.search(r"<(script|img|b>|i>)", html)
    assert "\x1b" not in html
    assert "\x1b" not in shown(row, show_processes=True)


def test_html_has_the_figures_beside_the_bars() -> None:
    """The bar's parts are this kernel's tensors, its cache, and the rest; none is said by colour alone."""
    html = to_html(report(FIRST))
    assert re.findall(r"height:.8em;width:([\d.]+)%", html)[:3] == ["25.0", "16.7", "25.0"]
    assert "32.0 / 48.0 GiB" in html
    assert "252/400 W" in html


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 15 * GIB, "0.0 / 15.0 GiB"),
        (1, 15 * GIB, "<0.1 / 15.0 GiB"),
        (3 * GIB, 15 * GIB, "3.0 / 15.0 GiB"),
        (256 * MIB, 341 * MIB, "256.0 / 341.0 MiB"),
        (1, 341 * MIB, "<0.1 / 341.0 MiB"),
        (10, 20, "10 / 20 B"),
        (3 * KIB, None, "3.0 KiB"),
        (2 * GIB, GIB, "2.0 / 1.0 GiB"),
    ],
)
def test_pairs_share_a_unit_and_never_show_something_as_nothing(
    part: int, whole: int | None, text: str
) -> None:
    """Comparing them takes no arithmetic."""
    assert size_pair(part, whole) == text


def test_room_that_a_wide_column_leaves_is_given_to_the_next() -> None:
    """Util does not fit where its cells say why there is none; Others does."""
    wide = {"uuid": "MIG-1", "utilization": None, "reasons": {"utilization": "n/a (MIG)"}}
    columns = shown(FIRST, dataclasses.replace(FIRST, **wide), width=81).splitlines()[2].split()
    assert "Others" in columns
    assert "Util" not in columns
