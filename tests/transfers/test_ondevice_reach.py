"""How far `%%ondevice` sees without --trace: other threads, backward, indexing; and what it leaves behind of that."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint

import gpumagic
from gpumagic import simgpu
from gpumagic.report.base import to_text
from gpumagic.transfers import recorder as recorders
from tests.transfers import ondevice_corpus as corpus

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(abs, range(4)))
        yield pool


def in_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_is_told_by_the_line_of_the_code_that_it_runs(pool: ThreadPoolExecutor) -> None:
    x = torch.ones(10)
    with gpumagic.ondevice("simgpu:0") as run:
        in_a_thread(lambda: x.to("simgpu:0"))
        list(pool.map(lambda n: x[n].to("simgpu:1"), range(3)))
    assert run.report is not None
    assert {(row.target, row.count, row.nbytes, "x" in row.code) for row in run.report} == {
        ("simgpu:0", 1, 40, True), ("simgpu:1", 3, 12, True),
    }  # fmt: skip
    assert len({row.line for row in run.report}) == 2
    assert not recorders.open_runs


def test_a_cells_thread_is_told_by_its_line_in_a_real_shell(bare_shell) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch, threading\nx = torch.ones(10)")
    bare_shell.run_cell(
        "%%ondevice simgpu:0 -q -o r\ndef work():\n    x.to('simgpu:0')\n"
        "t = threading.Thread(target=work); t.start(); t.join()"
    )
    (row,) = bare_shell.user_ns["r"]
    assert (row.line, row.name, row.cause) == (3, "x", ".to")
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def test_what_an_earlier_thread_does_that_runs_none_of_the_blocks_code_is_not_the_blocks(
    pool: ThreadPoolExecutor,
) -> None:
    work = compile("def work(_):\n    return torch.ones(5).to('simgpu:0')", "<elsewhere>", "exec")
    names = {"torch": torch}
    exec(work, names)
    with gpumagic.ondevice("simgpu:0") as run:
        list(pool.map(names["work"], range(4)))
    assert run.report is not None
    assert len(run.report) == 0
    assert run.report.created == {}
    assert run.report.advice == ()


def test_a_thread_makes_its_tensors_where_torchs_default_is_there() -> None:
    with gpumagic.ondevice("simgpu:0") as run:
        made: list[torch.Tensor] = []
        in_a_thread(lambda: made.append(torch.zeros(3)))
    assert made[0].device.type == "cpu"
    assert run.report is not None


def test_threads_that_count_at_once_lose_nothing() -> None:
    x, many = torch.ones(2), 300
    simgpu.reset_copies()
    with gpumagic.ondevice("simgpu:0") as run, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: x.to("simgpu:0"), range(many)))
    assert run.report is not None
    assert corpus.reported(run.report) == corpus.counted(simgpu.copies())


def test_a_backward_after_the_cell_is_not_counted_and_finds_no_hook() -> None:
    w = torch.ones(4, requires_grad=True)
    with gpumagic.ondevice("simgpu:0") as run:
        y = w.to("simgpu:0") * 2
    recorder = weakref.ref(run._recording.recorder)
    y.sum().backward()
    assert w.grad is not None
    assert run.report is not None
    assert len(run.report.moves) == 1
    del run
    gc.collect()
    assert recorder() is None, "the graph keeps the run alive"


def test_an_index_error_is_the_users_and_what_was_copied_before_it_is_counted() -> None:
    g = torch.ones(3, device="simgpu:0")
    simgpu.reset_copies()
    with gpumagic.ondevice("simgpu:0") as run:
        with pytest.raises(IndexError):
            g[torch.tensor([0], device="cpu"), torch.tensor([0])]
        with pytest.raises(TypeError):
            g["a"]
    assert run.report is not None
    assert corpus.reported(run.report) == corpus.counted(simgpu.copies())


def test_finding_the_elements_under_a_mask_of_the_device_is_a_wait() -> None:
    report, _, _ = corpus.run("a = 1\ny = g[g > 0]\ng[g > 0] = 2.0\nh = x[x > 0]")
    assert report.syncs == {2: 1}


def test_what_is_loaded_is_moved_and_not_created() -> None:
    text = io.BytesIO()
    torch.save({"a": torch.ones(3), "b": torch.ones(4, device="simgpu:1")}, text)
    text.seek(0)
    with gpumagic.ondevice("simgpu:0") as run:
        torch.load(text)
    assert run.report is not None
    assert run.report.created == {}
    assert [(row.cause, row.target, row.nbytes) for row in run.report] == [
        ("torch.load", "simgpu:1", 16)
    ]


def test_a_comprehensions_variable_names_what_it_moves() -> None:
    """Python 3.12 runs a cell's comprehensions in the cell's own frame."""
    report, _, _ = corpus.run("moved = [row.to('simgpu:0') for row in rows]")
    assert [(row.name, row.line, row.count) for row in report] == [("row", 1, 2)]


def test_what_exec_and_eval_copy_is_told_by_the_line_that_calls_them() -> None:
    report, _, _ = corpus.run(
        "a = 1\nexec('y = x.to(\"simgpu:0\")')\nz = eval('x.to(\"simgpu:1\")')"
    )
    assert [(row.line, row.target, row.nbytes) for row in report] == [
        (2, "simgpu:0", 4000),
        (3, "simgpu:1", 4000),
    ]


def test_a_block_that_worked_on_the_host_or_on_another_device_says_so() -> None:
    x = torch.ones(3)
    with gpumagic.ondevice("simgpu:0") as on_host:
        y = x * 2
    with gpumagic.ondevice("simgpu:1") as elsewhere:
        z = torch.ones(9, device="simgpu:0") * 2
    assert y.device != z.device
    assert "the cell worked on cpu (" in to_text(on_host.report, width=200)
    assert "the cell worked on simgpu:0 (z)" in to_text(elsewhere.report, width=200)


def test_a_gradients_copy_is_told_by_the_line_that_calls_backward_also_from_within_a_checkpoint() -> (
    None
):
    w = torch.ones(4, requires_grad=True)
    with gpumagic.ondevice("simgpu:0") as run:
        y = torch.utils.checkpoint.checkpoint(
            lambda v: v.to("simgpu:0").exp(), w, use_reentrant=True
        )
        y.sum().backward()
    assert run.report is not None
    code = {row.cause: row.code for row in run.report if row.direction == "device-to-host"}
    assert code == {"backward": "y.sum().backward()"}
