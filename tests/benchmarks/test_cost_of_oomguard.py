r"""How long after a failure the report of `%%oomguard` is there, with tried advice and without: `-m benchmark -s`.

On simgpu dry runs are of the fake-tensor engine; over the fake CUDA runtime they are of torch's own allocator:

    python -m pytest -m benchmark -s tests/benchmarks/test_cost_of_oomguard.py
    python -m gpumagic.fakecuda --devices 2 -- \
        python -m pytest -m benchmark -s tests/benchmarks/test_cost_of_oomguard.py

On two busy cores a report without trials came 0.3 to 1.1 s after the failure (half of it is a collection of garbage),
and one with trials 0.8 to 4.4 s after it on simgpu; a dry run took 0.3 to 0.8 of the time of the failing cell and its
report. So what counts is how many there are: of a batch to be lowered 15 before and 10 now, of a small GPT 7 and 3. The
search takes the run of the cell as it is for its first, tries round numbers only, and ends where a smaller number saves
nothing; another device is tried where it may have room; another optimizer, model or machine where nothing else fits.
"""

from __future__ import annotations

import statistics
import time

import pytest

from gpumagic import fakecuda
from gpumagic.advice.runs import EditedRuns
from tests.oom import oom_corpus

pytestmark = pytest.mark.benchmark

CELLS = ("leftovers", "batch_literal", "nanogpt", "together")


def failed(name: str, text: str | None, seconds: float) -> tuple[float, int]:
    """Return the seconds that a failing cell took, guarded where no text is given, and how many dry runs it made."""
    if fakecuda.is_enabled():
        from tests.cuda import oom_corpus_cuda

        case, forget = oom_corpus_cuda.cases()[name], oom_corpus_cuda.forget
        for index in (0, 1):
            fakecuda.set_memory(
                index,
                capacity=fakecuda.memory(index).used + oom_corpus_cuda.parse_size(case.memory),
            )
    else:
        from gpumagic import simgpu

        case, forget = (
            next(each for each in oom_corpus.cases() if each.name == name),
            oom_corpus._forget,
        )
        simgpu.enable(devices=2, memory=case.memory)
    counted: list[int] = []
    run = EditedRuns.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EditedRuns, "run", lambda *args: counted.append(1) or run(*args))
        patch.setattr(oom_corpus, "_forget", forget)
        with oom_corpus._notebook(seconds) as shell:
            for each in (oom_corpus.PRELUDE, *case.setup):
                oom_corpus._ran(shell, each)
            start = time.perf_counter()
            oom_corpus._run(shell, text or case.cell)
            return time.perf_counter() - start, len(counted)


def test_the_report_is_there_soon_after_the_failure() -> None:
    failed(CELLS[0], None, 8.0)  # the worker starts
    print(
        "\ncell              fails bare   report untried   report tried   dry runs   each of them"
    )
    dear = []
    for name in CELLS:
        case = next(each for each in oom_corpus.cases() if each.name == name)
        failed(name, None, 0.0)  # what torch does once only
        bare, _ = failed(name, case.cell.partition("\n")[2].replace("simgpu", _backend()), 0.0)
        untried, _ = failed(name, None, 0.0)
        tried, runs = failed(name, None, 8.0)
        each_run = (tried - untried) / runs
        dear.append(each_run / (bare + untried))
        print(
            f"{name:16} {bare:10.2f} s {untried - bare:14.2f} s {tried - bare:12.2f} s {runs:10} {each_run:13.2f} s",
            flush=True,
        )
    assert statistics.median(dear) < 1, (
        "a dry run costs less than the failure and its report without any"
    )


def _backend() -> str:
    return "cuda" if fakecuda.is_enabled() else "simgpu"
