"""What is measured on a GPU and told beside it; each function prints a line of JSON for each row of the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.gpu.everything import MARK

MIB = 1 << 20
WORDS = {True: "fits", False: "not", None: "open"}


def tell(row: str) -> None:
    """Print a row of the page."""
    print(MARK + json.dumps({"row": row}), flush=True)


# ---- Cells


def cells(names: list[str]) -> None:
    """Dry-run cells, run them, and run them with about as much room as they then need."""
    from tests.cuda import cell_runs

    cell_runs.RUNS = 2  # a peak with workspaces of cuDNN is never what was told
    with cell_runs.Runs() as runs:
        for name in names:
            tell(_or_why_not(name, lambda name=name: _cell(runs, name)))


def _or_why_not(name: str, row: Callable[[], str]) -> str:
    try:
        return row()
    except Exception as error:
        return f"FAILED {name}: {type(error).__name__}: {error}".replace("\n", " ")[:400]


def _cell(runs: Any, name: str) -> str:
    from tests.cuda.cell_runs import Cell
    from tests.cuda.cell_runs import cells as known
    from tests.cuda.reading_cells import SETUP
    from tests.cuda.reading_cells import cells as reading

    read = name.removeprefix("reads: ")
    cell = known()[name] if read == name else Cell(name, SETUP, reading()[read][1])
    told = runs.dry_run(cell)
    real = runs.really_like(told, cell)
    fault = told.get("failed") or told["error"] or real.get("failed")
    if fault:
        return f"FAILED {name}: {fault}".replace("\n", " ")[:400]
    verdicts = runs.verdicts(cell, need=runs.need(cell, real))
    certain = "certain" if told["certain"] else ""
    same = (
        "equal"
        if told["reserved"] == real["reserved"]
        else f"{told['reserved'][0]} for {real['reserved'][0]}"
    )
    order = ("below", "at", "above")
    peaks = f"{told['peak'][0] / MIB:.1f} | {real['peak'][0] / MIB:.1f} | {_share(told['peak'][0], real['peak'][0])}"
    return (
        f"| {name} {certain} | {peaks} | {same} | {verdicts.need // MIB} | "
        f"{', '.join(WORDS[verdicts.told[each]] for each in order)} | "
        f"{', '.join(WORDS[verdicts.real[each]] for each in order)} | {told['seconds']:.2f} / {real['seconds']:.2f} |"
    )


def _share(told: int, real: int) -> str:
    return "equal" if told == real else f"{told / max(1, real) - 1:+.2%}"


# ---- Operators


def operators(expressions: list[str]) -> None:
    """Compare what operators take on this GPU with what the fake runtime and fake tensors have for such a GPU."""
    import torch

    from gpumagic import fakecuda
    from gpumagic.memory import presets

    gpu = presets.name_of(torch.cuda.get_device_name(0))
    fake = fakecuda.environment(presets.like(0))
    real, cuda, tensors = (
        _peaks("cuda", expressions, {}),
        _peaks("cuda", expressions, fake),
        _peaks("fake", expressions, fake, gpu),
    )
    names = ("parts", "equal by the fake runtime", "equal by fake tensors", "said to be unknown")
    counts = dict.fromkeys(names, 0)
    for expression in expressions:
        for dtype, truth in real[expression].items():
            told = (cuda[expression][dtype], tensors[expression][dtype])
            if "error" in truth or "error" in told[0]:
                if ("error" in truth) != ("error" in told[0]):
                    here, there = (each.get("error", "runs")[:90] for each in (truth, told[0]))
                    tell(f"    {expression}, {dtype}: {here} here, {there} there")
                continue
            for part in sorted(truth.keys() - {"unknown"}):
                figures = (
                    1,
                    *(each.get(part) == truth[part] for each in told),
                    bool(told[1]["unknown"]),
                )
                counts = {
                    name: counts[name] + more for name, more in zip(names, figures, strict=True)
                }
                if not figures[1]:
                    shares = [
                        _share(each[part], truth[part]) if part in each else "none" for each in told
                    ]
                    unknown = ", unknown" if told[1]["unknown"] else ""
                    tell(
                        f"    {expression}, {part} in {dtype}: {truth[part]} B here, "
                        f"fake runtime {shares[0]}, fake tensors {shares[1]}{unknown}"
                    )
    tell("; ".join(f"{count} {name}" for name, count in counts.items()))


def _peaks(
    engine: str, expressions: list[str], more: dict[str, str], gpu: str = "A100"
) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.operator_peaks", engine, gpu], input="\n".join(expressions),
        capture_output=True, text=True, check=False, env={**os.environ, **more},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{engine} ended with {done.returncode}: {done.stderr[-300:]}")
    return dict(json.loads(done.stdout))


# ---- Published figures


def published(run: str) -> None:
    """Run the cell of some published figures on this GPU, and over a fake runtime that is like it."""
    from gpumagic.memory import presets
    from tests.published import table

    cell, arguments = json.loads(run)
    wanted = [row for row in table.rows() if json.dumps([row.cell, dict(row.arguments)]) == run]
    drawn = table.NO_VALUES.replace("fakecuda.leave_out(2**20)", "")
    text = f"{drawn}\n{table.code_of(cell, arguments)}\nimport json; print('figures: ' + json.dumps(answer))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    figures = next((line for line in done.stdout.splitlines() if line.startswith("figures: ")), "")
    if not figures:
        tell(
            f"FAILED {wanted[0].name}: {' '.join((done.stdout + done.stderr).splitlines()[-1:])[:300]}"
        )
        return
    here = json.loads(figures.removeprefix("figures: "))
    table.ALIKE.update(dict.fromkeys((row.gpu for row in wanted), presets.like(0)))
    for row, fake in table.measure(wanted):
        mine, share = here[row.kind], _share(fake, here[row.kind])
        tell(
            f"| {row.name} | {row.figure} {row.unit} | {mine} | {share} | {row.error(mine):+.2%} | {row.versions} |"
        )


# ---- Failures

NOT_FAILURES = {"loader_workers", "outer_on_host", "shared_memory", "for the workspace of cuBLAS"}
"""What fails on the host, and for a workspace that is made small here."""


def failures(start: int, step: int) -> None:
    """Run cells that run out of memory, and compare what is told of each with what torch's allocator says."""
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}
    import gc

    from tests.cuda import oom_corpus_cuda as corpus

    corpus.listen()
    every = {**corpus.cases(), **{name: corpus._case(cell) for name, cell in corpus.WAYS.items()}}
    right = 0
    for name, case in list(every.items())[start::step]:
        text = "\n".join((*case.setup, case.cell))
        if case.strangers or "cuda:1" in text or "DataParallel" in text or name in NOT_FAILURES:
            continue
        try:
            found = corpus.faults(corpus.run(case), 1024 if "CUDA graph" in name else 0)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        right += not found
        if found:
            tell(f"FAILED {name}: {'; '.join(found)}".replace("\n", " ")[:500])
        gc.freeze()
    tell(f"{right} are told as torch's allocator has them")
