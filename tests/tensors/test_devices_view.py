"""The view of `%devices`: golden text in 80 columns, groups, and HTML that escapes what the user named."""

from __future__ import annotations

import dataclasses

import pytest

from gpumagic.report.base import to_html, to_text
from gpumagic.tensors.report import DeviceMemoryRow, TensorReport, TensorRow

KIB, MIB = 1024, 1024**2


def row(name, nbytes, device="simgpu:0", shape=(1024, 1024), kind="plain", **more):
    """Return a row with one name or none."""
    names = () if name is None else (name,)
    return TensorRow(device, nbytes, shape, more.pop("dtype", "float32"), kind, name, names, **more)


ROWS = (
    row("model.embed.weight", 512 * MIB, kind="parameter", shape=(131072, 1024)),
    row(
        "opt.state[model.embed.weight].exp_avg",
        512 * MIB,
        kind="optimizer state",
        shape=(131072, 1024),
    ),
    row(
        "small",
        300 * MIB,
        "cpu",
        (10,),
        views=1,
        viewed_nbytes=40,
        note="a 40 B view keeps a 300.0 MiB storage alive; .clone() it",
    ),
    row(None, 64 * MIB, kind="activation", shape=(4096, 4096), holder="Out[12]"),
    row(None, 16 * MIB, shape=(2048, 2048), holder="last traceback"),
    *(row(None, 4 * KIB, shape=(32, 32)) for _ in range(5000)),
    row("ragged", 0, "cpu", (2, -1), note="a wrapper: its parts have rows of their own"),
    row("opaque", None, "cpu", (3, 3), note="layout torch._mkldnn does not tell its size"),
)
SUMS = (
    DeviceMemoryRow(
        "simgpu:0", 5004, 5004, 1024 * MIB, 80 * MIB + 5000 * 4 * KIB, unexplained=100 * MIB,
        allocated=1204 * MIB + 5000 * 4 * KIB, cached=84 * MIB,
    ),
    DeviceMemoryRow("cpu", 4, 3, 300 * MIB, 0),
)  # fmt: skip
REPORT = TensorReport(ROWS, SUMS, limit=6, notes=("a note of the probe",))


def text(report, width=80):
    """Return a report's text without the ends of lines."""
    return "\n".join(line.rstrip() for line in to_text(report, width, unicode=True).splitlines())


def test_the_largest_storages_and_each_device_in_80_columns() -> None:
    assert text(REPORT) == GOLDEN


GOLDEN = """\
5,008 tensors in 5,007 storages: simgpu:0 1.1 GiB, cpu 300.0 MiB
Name                Device         Size  Shape           Kind
──────────────────  ────────  ─────────  ──────────────  ───────────────
model.embed.weight  simgpu:0  512.0 MiB  [131072, 1024]  parameter
opt.state[model.embed.weight].exp_avg
                    simgpu:0  512.0 MiB  [131072, 1024]  optimizer state
(Out[12])           simgpu:0   64.0 MiB  [4096, 4096]    activation
(no name) × 5,000   simgpu:0   19.5 MiB  [32, 32]        plain
(last traceback)    simgpu:0   16.0 MiB  [2048, 2048]    plain
small               cpu       300.0 MiB  [10]            plain
and 2 more storages, 0 B
small: a 40 B view keeps a 300.0 MiB storage alive; .clone() it
Device        Named  No variable  Unattributed  Allocated                 Cached
────────  ─────────  ───────────  ────────────  ──────────────────────  ────────
simgpu:0    1.0 GiB     99.5 MiB     100.0 MiB    1.2 GiB █████████▓▒░  84.0 MiB
cpu       300.0 MiB          0 B           n/a        n/a                    n/a
a note of the probe"""


def test_totals_by_what_holds_them() -> None:
    assert (
        text(dataclasses.replace(REPORT, group_by="holder")).split("\nDevice")[0]
        == GOLDEN_BY_HOLDER
    )


GOLDEN_BY_HOLDER = """\
5,008 tensors in 5,007 storages: simgpu:0 1.1 GiB, cpu 300.0 MiB
Holder                 Size               Tensors  Storages
────────────────  ──────────────────────  ───────  ────────
model             512.0 MiB ████░░░░░░░░        1         1
opt               512.0 MiB ████░░░░░░░░        1         1
small             300.0 MiB ███░░░░░░░░░        2         1
(Out[12])          64.0 MiB █░░░░░░░░░░░        1         1
(no name)          19.5 MiB █░░░░░░░░░░░    5,000     5,000
(last traceback)   16.0 MiB █░░░░░░░░░░░        1         1
and 2 more storages, 0 B"""


@pytest.mark.parametrize(
    ("key", "first"), [("dtype", "float32"), ("kind", "optimizer state"), ("holder", "model")]
)
def test_totals_by_each_key_come_largest_first(key, first) -> None:
    lines = text(dataclasses.replace(REPORT, group_by=key)).splitlines()
    assert lines[1].split() == [key.capitalize(), "Size", "Tensors", "Storages"]
    assert lines[3].startswith(first)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_asked(width) -> None:
    assert max(len(line) for line in text(REPORT, width).splitlines()) <= width


def test_what_no_name_tells_apart_is_one_line_at_the_place_of_its_sum() -> None:
    names = [line.split("  ")[0] for line in text(REPORT, 120).splitlines()]
    assert names.index("(no name) × 5,000") == names.index("(last traceback)") - 1


def test_of_many_lines_the_small_ones_are_one_and_a_large_cache_is_told_in_words() -> None:
    large = [row("host", 900 * MIB, "cpu"), *(row(name, 64 * MIB) for name in ("w", "x", "y", "z"))]
    small = [row(name, KIB) for name in ("norm", "bias", "step", "scale", "shift", "count", "mean")]
    sums = DeviceMemoryRow("simgpu:0", 11, 11, 256 * MIB, 0, allocated=256 * MIB, cached=107 * MIB)
    shown = text(
        TensorReport(
            (*large, *small), (sums, DeviceMemoryRow("cpu", 1, 1, 900 * MIB, 0)), limit=20
        ),
        100,
    )
    assert shown.startswith(
        "12 tensors in 12 storages: simgpu:0 256.0 MiB and 107.0 MiB of cache, cpu 900.0 MiB\n"
    )
    assert [line.split()[0] for line in shown.splitlines()[3:8]] == ["w", "x", "y", "z", "host"]
    assert "and 7 more storages, 7.0 KiB" in shown
    assert "norm" in text(TensorReport((*large, *small), (sums,), limit=50))


@pytest.mark.parametrize("width", [80, 100])
def test_each_name_is_there_whole_and_small_amounts_are_left_out_beside_large_ones(width) -> None:
    names = [
        f"optimizer.state[model.encoder[{n}].self_attention.projection.weight]['exp_avg_sq']"
        for n in range(3)
    ]
    rows = (
        *(row(name, 64 * MIB, kind="optimizer state") for name in names),
        row("few", 16, "cpu", (4,)),
    )
    sums = DeviceMemoryRow("simgpu:0", 3, 3, 192 * MIB, 0), DeviceMemoryRow("cpu", 1, 1, 16, 0)
    lines = text(TensorReport(rows, sums), width).splitlines()
    assert lines[0] == "4 tensors in 4 storages: simgpu:0 192.0 MiB"
    assert [line for line in lines if line in names] == names
    assert lines[4].split() == lines[6].split()
    assert lines[4].split()[:5] == ["simgpu:0", "64.0", "MiB", "[1024,", "1024]"]
    assert lines[4].endswith("optimizer state")


def test_a_few_tensors_of_a_list_have_a_line_each() -> None:
    rows = tuple(row(f"t[{number}]", 4 * KIB) for number in range(3))
    assert "t[2]" in text(TensorReport(rows, SUMS))


def test_many_alike_of_a_list_are_one_line_and_others_stay_apart() -> None:
    rows = [row(f"layers[{number}].weight", 4 * KIB, kind="parameter") for number in range(5000)]
    odd = [
        row("layers[5000].weight", 8 * KIB, shape=(64, 32), kind="parameter"),
        row("bias", 4 * KIB),
    ]
    lines = text(TensorReport((*rows, *odd), SUMS), 120).splitlines()[3:6]
    assert [line.split("  ")[0] for line in lines] == [
        "layers[…].weight × 5,000",
        "layers[5000].weight",
        "bias",
    ]
    assert "19.5 MiB" in lines[0]


def test_a_device_in_use_has_its_sums_and_an_idle_one_no_line() -> None:
    idle = DeviceMemoryRow("simgpu:1", 0, 0, 0, 0, unexplained=0, allocated=0, cached=0)
    assert "simgpu:1" not in text(dataclasses.replace(REPORT, by_device=(*SUMS, idle)))


def test_what_graphs_keep_has_a_column_where_it_is_known() -> None:
    known = dataclasses.replace(SUMS[0], graph=60 * MIB, unexplained=40 * MIB)
    lines = text(dataclasses.replace(REPORT, by_device=(known,)), 120).splitlines()
    assert "In graphs" in "".join(lines)


def test_what_is_not_shown_is_counted() -> None:
    shown = dataclasses.replace(REPORT, limit=1)
    assert "and 5,006 more storages, 911.5 MiB" in text(shown)
    assert "more storage" not in text(dataclasses.replace(REPORT, limit=None))


def test_a_size_that_is_not_known_is_not_zero() -> None:
    lines = [
        line
        for line in text(dataclasses.replace(REPORT, limit=None)).splitlines()
        if line.startswith("opaque")
    ]
    assert "n/a" in lines[0]


def test_a_process_without_tensors_says_so_in_one_line() -> None:
    assert text(TensorReport((), notes=("torch is not imported: no tensors",))) == (
        "No live tensors\ntorch is not imported: no tensors"
    )


def test_devices_without_a_counting_allocator_need_no_columns_for_it() -> None:
    lines = text(TensorReport(ROWS[2:3], SUMS[1:])).splitlines()
    assert "Allocated" not in "\n".join(lines)
    assert lines[-1].split() == ["cpu", "4", "3", "300.0", "MiB", "0", "B"]


def test_html_escapes_names_and_keeps_them_whole() -> None:
    evil = "cfg['<script>alert(1)</script>']"
    long = "model." + ".".join(f"layer{number}" for number in range(20))
    page = to_html(TensorReport((row(evil, 1), row(long, 1)), SUMS))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert long in page


def test_the_report_has_all_rows_whatever_is_shown() -> None:
    frame = dataclasses.replace(REPORT, limit=1).to_pandas()
    assert len(frame) == len(ROWS)
    assert {"device", "nbytes", "shape", "dtype", "kind", "name", "holder", "views"} <= set(
        frame.columns
    )


def test_what_occupies_nothing_and_has_no_name_is_neither_listed_nor_a_leak() -> None:
    """Libraries keep such tensors: torch's nested ones have some on meta."""
    nothing = TensorRow("meta", 0, (7, 3), "float32", "plain", None)
    report = dataclasses.replace(REPORT, tensors=(*REPORT.tensors, nothing), limit=None)
    assert "[7, 3]" not in to_text(report)
    assert nothing in report.rows
    assert nothing not in report.leaks().rows
