"""What a dry run shows: its answer in the first line, then what makes up the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumagic.dryrun.report import (
    DeviceNeed,
    DryRunPoint,
    DryRunReport,
    DryRunRow,
    Search,
    Trial,
)
from gpumagic.dryrun.wire import Passes
from gpumagic.report.base import to_html, to_text

MIB, GIB = 1 << 20, 1 << 30
CODE = {6: "loss = model(x).mean()", 7: "loss.backward()"}
REPORT = DryRunReport(
    "cuda:0", {"cuda:0": 12 * GIB, "cuda:1": GIB}, {"cuda:0": 13 * GIB, "cuda:1": GIB}, 7, CODE[7], "addmm",
    {"activations": 9 * GIB, "optimizer state": 2 * GIB, "parameters": GIB}, True, 15 * GIB, complete=True,
    certain=True, gpu="T4", overhead=(300 * MIB, 700 * MIB), operator_bytes=GIB, operators=3000, seconds=1.24,
    timeline=tuple(DryRunPoint("cuda:0", 500 * n, 6, (n + 6) * GIB, {"activations": n * GIB}) for n in range(7)),
    lines=tuple(DryRunRow("cuda:0", line, code, (line + 5) * GIB, GIB) for line, code in CODE.items()),
    devices=(
        DeviceNeed("cuda:0", 0, 12 * GIB, GIB, 13 * GIB, 15 * GIB, True),
        DeviceNeed("cuda:1", 0, GIB, 0, GIB, 15 * GIB, True),
    ),
    modules={
        "model.0.mlp": {"parameters": GIB, "activations": 2 * GIB}, "model.0.norm": {"activations": GIB},
        "head": {"activations": GIB},
    },
    assumed=("a number read from the device is taken to be 1.0",),
)  # fmt: skip


def test_the_whole_report_at_eighty_columns() -> None:
    assert (
        to_text(REPORT, 80)
        == """\
Fits: 12.0 of 15.0 GiB on cuda:0 (T4)
7 | loss.backward()   # peak: addmm adds 1.0 GiB
At the peak                           Size
──────────────────────  ───────────────────────────────
activations                        9.0 GiB █████████░░░
optimizer state                    2.0 GiB ██░░░░░░░░░░
parameters                         1.0 GiB █░░░░░░░░░░░
reserved with cache               13.0 GiB
CUDA itself (estimate)  300.0 to 700.0 MiB
Memory on cuda:0 over 3,000 operators, by kind
▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▆▆▆▆▆▆▆▆▆▆▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇██████████
                                     peak 12.0 GiB, line 6 ↑
By line: line 7 12.0 GiB, line 6 11.0 GiB
By module: model.* 4.0 GiB, head 1.0 GiB
Other devices: 1.0 GiB on cuda:1
How: a dry run on fake tensors, 1.24 s; 1 assumption"""
    )


def test_html_folds_what_text_leaves_out() -> None:
    page = to_html(REPORT)
    assert (
        page.index("Fits: 12.0 of 15.0 GiB") < page.index("activations") < page.index("<details>")
    )
    assert page.count("<details>") == 4
    assert "a number read from the device is taken to be 1.0" in page


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, "Fits: 12.0 of 15.0 GiB on cuda:0 (T4)"),
        ({"peak": {"cuda:0": MIB}, "gpu": None}, "Fits: 1.0 MiB of 15.0 GiB on cuda:0"),
        ({"peak": {}}, "Fits: it allocates nothing on cuda:0 (T4)"),
        (
            {"fits": False, "peak": {"cuda:0": 20 * GIB}, "failure_line": 6},
            "Does not fit: needs 20.0 GiB, 5.0 GiB more than cuda:0 (T4) has; line 6 runs out of memory",
        ),
        (
            {
                "fits": False,
                "peak": {"cuda:0": 20 * GIB},
                "failure_line": 6,
                "sizes": ("batch_size",),
            },
            (
                "Does not fit: needs 20.0 GiB, 5.0 GiB more than cuda:0 (T4) has; line 6 runs out of memory. "
                "--fit batch_size finds what fits"
            ),
        ),
        (
            {"fits": False, "failure_line": 6},
            (
                "Does not fit: needs 12.0 of 15.0 GiB on cuda:0 (T4), and what is free lies in pieces that are too "
                "small; line 6 runs out of memory"
            ),
        ),
        (
            {"fits": None, "open_on": ((9, "if loss < best:"),)},
            "May not fit: it depends on line 9 (`if loss < best:`); it needs 12.0 of 15.0 GiB on cuda:0 (T4) or more",
        ),
        (
            {"fits": None, "complete": False, "open_on": ((9, "loss.item()"),)},
            (
                "May not fit: with other values of line 9 (`loss.item()`) it did not run to the end; it needs 12.0 of "
                "15.0 GiB on cuda:0 (T4) or more"
            ),
        ),
        (
            {
                "fits": None,
                "complete": False,
                "seconds": 60.0,
                "passes": (Passes("line 4", 12, 40),),
            },
            "12 of 40 passes of line 4 were run in 1 min 0 s: needs at least 12.0 of 15.0 GiB on cuda:0 (T4)",
        ),
        (
            {"fits": None, "peak": {"cuda:0": 15 * GIB - MIB}, "failure_line": 6},
            (
                "May not fit: needs 15.0 of 15.0 GiB on cuda:0 (T4), and CUDA itself takes 300.0 to 700.0 MiB "
                "(an estimate)"
            ),
        ),
        (
            {"fits": None, "error": "the cell fails on line 2: KeyError: 'x'"},
            "The cell fails on line 2: KeyError: 'x'; up to there it needs 12.0 GiB",
        ),
        (
            {"fits": None, "capacity": None},
            "Needs 12.0 GiB on cuda:0 (T4), whose memory is not known",
        ),
    ],
)
def test_the_first_line_is_the_answer(changes, answer) -> None:
    assert replace(REPORT, **changes).verdict == answer


def test_a_search_answers_with_the_value_and_its_neighbour() -> None:
    trials = (
        Trial(64, GIB, True, ""),
        Trial(1703, 14 * GIB, True, ""),
        Trial(1737, 15 * GIB, False, "line 6 runs out"),
    )
    shown = to_text(
        replace(REPORT, largest=1703, search=Search("batch_size", 64, trials)), 80
    ).splitlines()
    assert shown[:3] == [
        "batch_size up to 1,703 fits: 12.0 of 15.0 GiB on cuda:0 (T4)",
        "1,737 does not: line 6 runs out.",
        "3 dry runs, with batch_size from 64 to 1,737; now 64",
    ]


def test_a_search_that_ended_with_its_first_run_says_so() -> None:
    search = Search("batch", 64, (Trial(64, 0, None, "it fails"),), "with batch = 64 it fails")
    shown = to_text(replace(REPORT, search=search), 80).splitlines()
    assert shown[:2] == [
        "No largest batch found: with batch = 64 it fails",
        "1 dry run, with batch = 64",
    ]
