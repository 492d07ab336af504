"""A dry run on torch's own CUDA: what it tells is what the allocator has when the same cell is run here."""

from __future__ import annotations

import contextlib
import gc
import io
import linecache
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic import fakecuda
from gpumagic.dryrun import client, request, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of
from gpumagic.memory import allocator
from tests.dryrun.dryrun_cells import CELLS, COMMON

MIB = 1 << 20
NEED_VALUES = ("lengths read back",)
"""A kernel computes these values, so that what really runs here knows them less than a dry run does."""
TIGHT = (
    "adamw, its default",
    "a gpt",
    "a gpt, checkpointed",
    "gradient accumulation",
    "autocast, bfloat16",
)


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    yield
    client.close()


@pytest.fixture
def card() -> Iterator[None]:
    """Set the first device's capacity back."""
    capacity = fakecuda.memory(0).capacity
    yield
    fakecuda.set_memory(0, capacity=capacity)


def notebook(earlier: str) -> dict[str, Any]:
    """Return the namespace after the earlier cells, on empty cards."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    names: dict[str, Any] = {"__name__": "__main__"}
    for label, source in (("<common>", COMMON), ("<earlier>", earlier)):
        text = source.replace("simgpu", "cuda")
        linecache.cache[label] = (len(text), None, text.splitlines(True), label)
        exec(compile(text, label, "exec"), names)
    return names


def dry_run(cell: str, names: dict[str, Any]) -> DryRunReport:
    return run.dry_run(script_of(cell), names, targets.choose("cuda:0", None))


def really(cell: str, names: dict[str, Any]) -> tuple[bool, list[int], list[int]]:
    """Run the cell; return whether it ended, and what each device had allocated and reserved at most."""
    for device in range(2):
        torch.cuda.reset_peak_memory_stats(device)
    ended = True
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(cell, "<cell>", "exec"), names)
    except torch.OutOfMemoryError:
        ended = False
    peaks = [torch.cuda.max_memory_allocated(device) for device in range(2)]
    return ended, peaks, [torch.cuda.max_memory_reserved(device) for device in range(2)]


@pytest.mark.parametrize("name", [name for name in CELLS if name not in NEED_VALUES])
def test_the_peak_is_the_allocators_to_the_byte(name: str) -> None:
    earlier, cell = CELLS[name][0], CELLS[name][1].replace("simgpu", "cuda")
    names = notebook(earlier)
    report = dry_run(cell, names)
    assert report.engine == "cuda"
    assert report.error is None
    ended, peaks, reserved = really(cell, names)
    assert ended
    assert [report.peak[f"cuda:{device}"] for device in range(2)] == peaks
    assert [device.reserved for device in report.devices] == reserved


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("name", TIGHT)
def test_it_fits_where_it_really_runs_and_does_not_where_it_fails(name: str) -> None:
    earlier, cell = CELLS[name][0], CELLS[name][1].replace("simgpu", "cuda")
    needed = dry_run(cell, notebook(earlier)).devices[0].reserved
    outcomes = []
    for capacity in (needed, needed - 2 * MIB, needed - 6 * MIB, needed * 2 // 3):
        names = notebook(earlier)
        fakecuda.set_memory(0, capacity=max(capacity, torch.cuda.memory_reserved(0)))
        told = dry_run(cell, names).fits
        outcomes.append((told, really(cell, names)[0]))
    assert [told for told, _ in outcomes] == [ended for _, ended in outcomes]
    assert {told for told, _ in outcomes} == {True, False}


@pytest.mark.usefixtures("card")
def test_the_largest_batch_that_it_finds_runs_and_a_larger_one_does_not() -> None:
    cell = "out = model(torch.ones(batch, 4096, device='cuda:0')).relu().sum()\nout.backward()\ndel out"
    earlier = "model = nn.Sequential(nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 64)).to('cuda:0')\nbatch = 8"
    names = notebook(earlier)
    fakecuda.set_memory(0, capacity=300 * MIB)
    found = gpumagic.dry_run(cell, names, device="cuda:0", fit="batch")
    assert found.largest is not None
    assert really(cell, {**names, "batch": found.largest})[0]
    gc.collect()
    assert not really(cell, {**names, "batch": int(found.largest * 1.02) + 1})[0]


def test_every_pass_of_a_loop_is_run() -> None:
    names = notebook("kept = []")
    report = dry_run(
        "for step in range(300):\n    kept.append(torch.ones(1000, device='cuda:0'))", names
    )
    assert report.peak["cuda:0"] == 300 * 4096
    assert report.line == 2


def test_a_list_that_is_concatenated_needs_both() -> None:
    names = notebook("")
    cell = "outs = []\nfor _ in range(50):\n    outs.append(torch.ones(MIB // 4, device=DEV))\nwhole = torch.cat(outs)"
    report = dry_run(cell.replace("MIB", str(MIB)), {**names, "DEV": "cuda:0"})
    assert report.peak["cuda:0"] == 100 * MIB
    assert report.line == 4


def test_a_run_that_is_too_long_is_told_as_far_as_it_came() -> None:
    names = notebook("")
    cell = "x = torch.ones(1024, device='cuda:0')\nwhile True:\n    y = x + 1"
    report = run.dry_run(script_of(cell), names, targets.choose("cuda:0", None), time_limit=1.0)
    assert report.fits is None
    assert report.peak["cuda:0"] == 3 * 4096
    assert any("it was run for 1 s" in each for each in report.unknown)


@pytest.mark.usefixtures("card")
def test_what_a_cell_needs_that_chooses_its_size_by_what_is_free_is_of_the_size_that_it_chooses_here() -> (
    None
):
    names = notebook("")
    fakecuda.set_memory(0, capacity=torch.cuda.memory_reserved(0) + 256 * MIB)
    cell = "free, _ = torch.cuda.mem_get_info(0)\nx = torch.ones(free // 4 - 2**20, device='cuda:0')\ny = x + 1"
    report = dry_run(cell, names)
    assert (report.fits, report.failure_line) == (False, 3)
    room = report.devices[0].capacity - report.devices[0].before
    assert 1.8 * room < report.peak["cuda:0"] - report.devices[0].before < 2 * room


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("spare", "cap", "fits"), [(500, None, True), (100, None, None), (100, 401, True)]
)
def test_what_cudas_libraries_may_yet_take_leaves_open_what_would_just_fit(
    monkeypatch: pytest.MonkeyPatch, spare: int, cap: int | None, fits: bool | None
) -> None:
    """As on an H200, whose context takes 527 MiB and grows to 871; a cap on this process leaves the rest to them."""
    names = notebook("first = torch.ones(1, device='cuda:0')")
    fakecuda.set_memory(0, capacity=2048 * MIB)
    ask = allocator.mem_get_info

    def with_a_context(device: str) -> tuple[int, int]:
        free, total = ask(device)
        return free - 527 * MIB, total

    monkeypatch.setattr(allocator, "mem_get_info", with_a_context)
    room = 2048 - 527 - (cap or 0)
    try:
        torch.cuda.set_per_process_memory_fraction(room / 2048 if cap else 1.0)
        asked = room - torch.cuda.memory_reserved() // MIB - (0 if cap else spare)
        report = dry_run(
            f"x = torch.empty({asked} << 20, dtype=torch.uint8, device='cuda:0')", names
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert report.fits is fits
    assert report.overhead == (0, 0 if cap else 350 * MIB)
    assert ("CUDA itself takes" in str(report)) is (fits is None)


def test_what_the_notebook_holds_and_the_gaps_between_are_there() -> None:
    names = notebook(
        "kept = [torch.ones(3 * 2**20, device='cuda:0') for _ in range(4)]\ndel kept[1], kept[1]"
    )
    report = dry_run("more = torch.ones(5 * 2**20, device='cuda:0')", names)
    _, peaks, reserved = really("more = torch.ones(5 * 2**20, device='cuda:0')", names)
    assert (report.peak["cuda:0"], report.devices[0].reserved) == (peaks[0], reserved[0])


def test_streams_events_and_generators_are_torchs_own() -> None:
    names = notebook("")
    cell = """
side = torch.cuda.Stream()
begun = torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(side):
    begun.record()
    drawn = torch.randn(1000, device='cuda:0', generator=torch.Generator('cuda:0'))
torch.cuda.synchronize()
"""
    report = dry_run(cell, names)
    assert report.error is None
    assert report.peak["cuda:0"] == 4096


def test_a_library_that_asks_for_the_devices_when_it_is_imported_changes_nothing() -> None:
    import torch.utils.cpp_extension  # it does, and the worker imports what the notebook has

    client.close()
    cell = "x = torch.ones(2**30, dtype=torch.uint8, device='cuda:1')"
    asked = {
        size: run.dry_run(script_of(cell), {"torch": torch}, targets.choose("cuda:1", size)).fits
        for size in (3 << 30, 1 << 29)
    }
    assert asked == {3 << 30: True, 1 << 29: False}


def test_a_device_that_is_not_here_is_imagined() -> None:
    names = notebook("")
    cell = "x = torch.ones(2**30, dtype=torch.uint8, device='cuda:0')"
    asked = {
        size: run.dry_run(script_of(cell), names, targets.choose("cuda:0", size)).fits
        for size in (3 << 30, 1 << 29)
    }
    assert asked == {3 << 30: True, 1 << 29: False}


def test_what_only_cudnn_knows_is_said_to_be_unknown() -> None:
    names = notebook("conv = nn.Conv2d(3, 8, 3).to('cuda:0')")
    report = dry_run("out = conv(torch.ones(2, 3, 16, 16, device='cuda:0'))", names)
    assert report.unknown == ("what cuDNN takes for itself, which only a real GPU tells",)


def test_what_was_allocated_before_a_long_history_begins_is_freed_in_it() -> None:
    """The allocator keeps only the last of its history: the list comes before that, and goes in it."""
    cell = (
        "kept = [torch.ones(2**20, device='cuda:0') for _ in range(4)]\nfor _ in range(70_000):\n"
    )
    cell += "    x = torch.ones(1, device='cuda:0')\n    del x\nkept.clear()\ny = torch.ones(2**21, device='cuda:0')"
    report = dry_run(cell, notebook(""))
    assert report.peak["cuda:0"] == sum(report.breakdown.values()) == 16 * MIB + 512
    assert {row.line: row.after for row in report}[6] == 8 * MIB


def test_a_library_that_wraps_the_allocators_error_hides_nothing() -> None:
    cell = """
try:
    x = torch.ones(2**30, dtype=torch.uint8, device="cuda:0")
except Exception as error:
    raise RuntimeError("the backend failed") from error
"""
    report = run.dry_run(script_of(cell), notebook(""), targets.choose("cuda:0", 1 << 29))
    assert report.fits is False
    assert report.peak["cuda:0"] == 1 << 30


def test_a_card_that_is_too_small_for_what_the_notebook_holds_is_said_to_be() -> None:
    names = notebook("held = torch.ones(2**30, dtype=torch.uint8, device='cuda:0')")
    report = run.dry_run(
        script_of("y = held[:1].clone()"), names, targets.choose("cuda:0", 1 << 29)
    )
    assert report.fits is None
    assert report.error == "what the notebook holds already is more than the memory of the device"


WITHOUT_COMPILER = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in {"torch._dynamo", "torch._inductor"}:
            os._exit(3)
sys.meta_path.insert(0, Watch())
model = torch.nn.Linear(100, 100).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
optimizer.zero_grad()
model(torch.ones(10, 100, device="cuda")).sum().backward()
optimizer.step()
"""


def test_a_dry_run_imports_no_compiler_to_tell_what_a_step_of_training_takes() -> None:
    """It takes as long as the rest of the worker's start. Optimizers ask for it, and torch to name compiled lines."""
    client.close()
    assert gpumagic.dry_run(WITHOUT_COMPILER, {"torch": torch}, device="cuda:0").error is None


def test_a_package_that_starts_cuda_when_it_is_imported_is_imported_by_the_run(
    tmp_path, monkeypatch
) -> None:
    """Neither the process that forks may have it, nor does it keep the cells of the notebook from being dry-run."""
    (tmp_path / "starts_cuda.py").write_text("import torch\ntorch.cuda.init()\nCOUNT = 2**20")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(request, "_PRELOADED", frozenset({"starts_cuda"}))
    names = notebook("import starts_cuda")
    for _ in range(2):
        report = dry_run("x = torch.ones(starts_cuda.COUNT, device='cuda:0')", names)
        assert (report.error, report.peak["cuda:0"]) == (None, 4 * MIB)
