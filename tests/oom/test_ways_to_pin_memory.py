"""The seventeen ways to pin memory by failing, in a real kernel and a real terminal; hundreds of failures on end."""

from __future__ import annotations

import sys

import pytest

from tests.kernels import environment, plain
from tests.oom.oom_cells import FREED, PRELUDE

pytestmark = pytest.mark.ipython

SIMGPU = {"GPUMAGIC_SIMGPU": "2x4GiB"}
ALLOCATED = "torch.simgpu.memory_allocated(0)"


def test_in_a_kernel_every_failure_gives_back_all_it_pins(start_kernel) -> None:
    kernel = start_kernel(**SIMGPU)
    assert (
        kernel.run(f"%load_ext gpumagic\n%config GPUMagic.advice_seconds = 0\n{PRELUDE}").status
        == "ok"
    )
    left = {}
    for name, code in FREED.items():
        cell = kernel.run(f"%%oomguard\n{code}")
        left[name] = cell.ename, kernel.value(ALLOCATED)
    assert left == dict.fromkeys(FREED, ("OutOfMemory", "0"))


@pytest.mark.deep
def test_in_a_terminal_too_with_every_cell_guarded(tmp_path) -> None:
    pexpect = pytest.importorskip("pexpect", reason="pexpect drives the terminal")
    prelude = tmp_path / "prelude.py"
    prelude.write_text(PRELUDE)
    arguments = [
        "-m",
        "IPython",
        "--simple-prompt",
        "--no-banner",
        "--no-confirm-exit",
        "--ext=gpumagic",
    ]
    child = pexpect.spawn(
        sys.executable, [*arguments, "--HistoryManager.enabled=False"], encoding="utf-8", timeout=60,
        env=environment(tmp_path, TERM="dumb", **SIMGPU), dimensions=(50, 200),
    )  # fmt: skip
    child.delaybeforesend = None

    def type_(*lines: str) -> str:
        child.expect(r"In \[\d+\]: ")
        for line in lines:
            child.sendline(line)
        child.expect("done\r?\n")
        return plain(child.before)

    try:
        type_(f"%run -i {prelude}", "%oomguard on", "print('do' 'ne')")
        left = {}
        for name, code in FREED.items():
            path = tmp_path / "cell.py"
            path.write_text(code)
            run = f"get_ipython().run_cell(open({str(path)!r}).read(), store_history=True)"
            shown = type_(
                f"shown = {run}",
                f"print(type(shown.error_in_exec).__name__, {ALLOCATED}, 'do' 'ne')",
            )
            left[name] = shown.splitlines()[-1].split()[-2:]
        assert left == {name: ["OutOfMemory", "0"] for name in FREED}
    finally:
        child.close(force=True)


BRIM = """
def brim():
    kept = [take(0.5) for _ in range(8)]
    kept.append(take(0.001))
def state():
    import gc, resource
    gc.collect()
    return (torch.simgpu.memory_allocated(0), torch.simgpu.memory_reserved(0), len(gc.get_objects()),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.deep
def test_hundreds_of_failures_at_the_brim_leave_a_kernel_as_it_was(start_kernel) -> None:
    kernel = start_kernel(**SIMGPU)
    kernel.run(f"%load_ext gpumagic\n%config GPUMagic.advice_seconds = 0\n{PRELUDE}\n{BRIM}")
    for _ in range(
        20
    ):  # what is made once, by the first failures: modules, caches of compiled patterns
        kernel.run("%%oomguard --keep-going\nbrim()", store_history=False)
    kernel.run(
        "import gc; gc.freeze()"
    )  # or each collection would go through all of torch's objects
    before = eval(kernel.value("state()"))
    cells = [kernel.run("%%oomguard --keep-going\nbrim()", store_history=False) for _ in range(180)]
    after = eval(kernel.value("state()"))
    assert {(cell.status, "Freed 4.0 GiB." in cell.reports[0]) for cell in cells} == {("ok", True)}
    assert after[:2] == before[:2] == (0, 0)
    assert after[2] - before[2] < 2000, "objects grow with the failures"
    assert after[3] - before[3] < 64 * 1024, "memory grows with the failures"
