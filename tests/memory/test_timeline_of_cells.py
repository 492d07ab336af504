"""Memory over a cell on simulated devices, against sums made by hand and the device's own counters.

The clock is stopped here: cells call `look()`, which does what the sampler's thread would do at that moment, and
`watched(n)`, which looks before and after it makes n MiB.
"""

from __future__ import annotations

import threading

import pytest
import torch

import gpumagic
from gpumagic.memory import sampler, view
from gpumagic.memory.timeline import TimelineLog

pytestmark = pytest.mark.usefixtures("few_objects")

MIB = 1024**2


def make(mib: int, index: int = 0) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=f"simgpu:{index}")


def watched(mib: int, index: int = 0) -> torch.Tensor:
    sampler.sample_all()
    made = make(mib, index)
    sampler.sample_all()
    return made


@pytest.fixture(autouse=True)
def fresh_counters(two_devices, monkeypatch):
    """As a user does who wants a peak: the counters begin anew, and nobody of ours does that."""
    monkeypatch.setattr(sampler, "FIRST_DELAY", 3600.0)
    monkeypatch.setattr(view, "MIN_POINTS", 1)  # these cells take no time, but for IPython's traceback
    for index in range(2):
        torch.simgpu.reset_peak_memory_stats(index)
    yield
    assert "gpumagic memory" not in [thread.name for thread in threading.enumerate()], "a thread was left behind"


@pytest.fixture
def run(bare_shell, warm_worker):
    """Return a function that runs a cell and gives its stored report."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.user_ns.update(torch=torch, make=make, watched=watched, look=sampler.sample_all, MIB=MIB)

    def run(cell):
        bare_shell.user_ns.pop("report", None)
        bare_shell.run_cell(cell)
        return bare_shell.user_ns.get("report")

    yield run
    bare_shell.run_line_magic("unload_ext", "gpumagic")


RISE_AND_FALL = """%%ondevice 0 -q -o report
a = watched(10)
b = watched(30)
look(); c = b.clone(); look()
del b, c; look()
d = watched(5)
"""


def test_a_timeline_shows_the_rise_and_the_fall_and_the_peak_on_its_line(run) -> None:
    """10, then 40, then 70 MiB, back to 10, and 15 in the end."""
    before = torch.simgpu.memory_allocated(0)
    report = run(RISE_AND_FALL)
    (course,) = report.timeline.courses
    assert (course.before, course.after) == (before, before + 15 * MIB)
    assert course.peak == torch.simgpu.max_memory_allocated(0) == before + 70 * MIB
    assert (course.line, course.code) == (4, "look(); c = b.clone(); look()")
    assert report.peak == {"simgpu:0": course.peak}
    lasts = [(point.last - before) // MIB for point in course.points]
    highs = [(point.high - before) // MIB for point in course.points]
    assert lasts[: highs.index(70)] == sorted(lasts[: highs.index(70)]), "it only rises up to there"
    assert lasts[-1] == 15


def test_a_peak_in_a_loop_is_claimed_for_the_loop_and_for_no_line_of_it(run) -> None:
    report = run(
        "%%ondevice 0 -q -o report\n"
        "kept = []; look()\n"
        "for n in range(3):\n"
        "    kept.append(make(n + 1)); look()\n"
        "    more = 1; look()\n"
        "del kept; look()\n"
    )
    (course,) = report.timeline.courses
    assert (course.line, course.lines) == (None, (3, 5))
    assert "peak 6.0 MiB, lines 3-5" in str(report)


def test_what_an_earlier_cell_had_at_most_is_not_this_ones_peak(run) -> None:
    run("big = make(100); del big")
    (course,) = run("%%ondevice 0 -q -o report\na = make(20); look()\ndel a; look()").timeline.courses
    assert torch.simgpu.max_memory_allocated(0) > course.seen
    assert (course.peak, course.line) == (None, 2)


def test_what_move_takes_is_not_the_first_lines(run) -> None:
    run("host = torch.ones(8 * MIB)")
    (course,) = run("%%ondevice 0 -q -o report --move host\nx = 1; look()\ny = 2; look()").timeline.courses
    assert (course.line, course.code) == (1, "%%ondevice 0 -q -o report --move host")


def test_devices_have_a_course_each_and_those_untouched_none(run) -> None:
    timeline = run("%%ondevice 1 -q -o report\na = make(3, 1); look()").timeline
    assert [course.device for course in timeline.courses] == ["simgpu:1"]
    both = run("%%ondevice 1 -q -o report\na = make(3, 1); b = make(2, 0); look()").timeline
    assert [(course.device, (course.after - course.before) // MIB) for course in both.courses] == [
        ("simgpu:0", 2),
        ("simgpu:1", 0),
    ]
    assert run("%%ondevice 1 -q -o report\nx = 1; look()").timeline is None


def test_looking_keeps_no_frame_and_so_no_tensor_alive(run) -> None:
    """Without a collection: this is when the frames of the cell's functions go."""
    import gc

    gc.disable()
    try:
        before = torch.simgpu.memory_allocated(0)
        for options in ("", " --trace"):
            run(f"%%ondevice 0 -q -o report{options}\na = watched(20); look(); a = a.clone()\ndel a")
            assert torch.simgpu.memory_allocated(0) == before
    finally:
        gc.enable()


def test_blocks_and_functions_tell_their_own_lines() -> None:
    with gpumagic.ondevice("simgpu:0") as run:
        small = watched(1)
        large = watched(40)
    (course,) = run.report.timeline.courses
    assert course.code == "large = watched(40)"
    del small, large

    @gpumagic.ondevice("simgpu:0")
    def step():
        first = watched(60)
        return first.numel()

    step()
    (course,) = step.run.report.timeline.courses
    assert course.code == "first = watched(60)"


def test_an_interrupted_cell_and_a_cell_inside_a_cell_leave_no_thread(bare_shell, run) -> None:
    run("%%ondevice 0 -q -o report\nraise KeyboardInterrupt")
    run("%%oomguard\nget_ipython().run_cell('%%ondevice 0 -q\\nget_ipython().run_cell(\"1/0\")')\n1/0")
    run("%%ondevice 0 -q\n%%oomguard")
    assert sampler.is_idle()


def test_an_interrupt_while_the_thread_starts_leaves_none(run, monkeypatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "gpumagic memory":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    assert run("%%ondevice 0 -q -o report\nx = 1") is None
    assert sampler.is_idle()
    assert torch.get_default_device().type == "cpu"


def test_one_thread_looks_for_all_and_only_while_there_is_something_to_look_at(run) -> None:
    run(
        "%%ondevice 0 -q\n%oomguard\nimport threading\n"
        "names = [thread.name for thread in threading.enumerate()].count('gpumagic memory')"
    )
    assert "gpumagic memory" not in [thread.name for thread in threading.enumerate()]


def test_the_clock_looks_by_itself(run, monkeypatch) -> None:
    """Until it has seen the memory that this cell has."""
    monkeypatch.setattr(sampler, "FIRST_DELAY", 0.001)
    seen = threading.Event()
    look = sampler.sample_all

    def looked() -> None:
        look()
        seen.set()

    monkeypatch.setattr(sampler, "sample_all", looked)
    run("x = 1")
    sampler_cell = "%%ondevice 0 -q -o report\na = make(25)\nseen.clear(); ok = seen.wait(60)\ndel a"
    import IPython

    IPython.get_ipython().user_ns["seen"] = seen
    report = run(sampler_cell)
    (course,) = report.timeline.courses
    assert course.seen - course.before == 25 * MIB
    assert report.timeline.looks > 2


def test_a_short_cell_is_looked_at_soon_and_then_ever_less_often(monkeypatch) -> None:
    """After 64 ms, and from a tenth of a second on as often as the budget allows."""
    monkeypatch.undo()
    clock, asked = [100.0], sampler.CellMemory.__new__(sampler.CellMemory)
    asked.log = TimelineLog({})
    asked.log.started = clock[0]
    monkeypatch.setattr(sampler, "_sampled", [asked])
    monkeypatch.setattr(sampler.time, "perf_counter", lambda: clock[0])
    thread, moments = sampler._Sampler(), []
    while clock[0] < 101.0:
        clock[0] += thread._pause()
        moments.append(round(1e3 * (clock[0] - 100.0)))
    assert moments[:3] == [64, 128, 228]
    assert len(moments) < 12


def test_a_backend_whose_counters_fail_ends_the_looking_and_not_the_cell(run, monkeypatch, capfd) -> None:
    monkeypatch.setattr(sampler, "FIRST_DELAY", 0.001)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise RuntimeError("driver shutting down")

    monkeypatch.setattr(sampler, "sample_all", fail)
    import IPython

    IPython.get_ipython().user_ns["failed"] = failed
    assert run("%%ondevice 0 -q -o report\nok = failed.wait(60)") is not None
    assert "driver" not in capfd.readouterr().err
