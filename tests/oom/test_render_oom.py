"""The view of an out-of-memory report: verdict first, bytes beside every suggestion, 80 columns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpumagic.advice.records import Advice, EditTrial, Need
from gpumagic.oom.report import OomReport
from gpumagic.report.base import Holder, to_html, to_text
from gpumagic.source.text import Change

MIB, GIB = 2**20, 2**30

REPORT = OomReport(
    kind="cuda allocator", certainty="certain", device="cuda:0", requested=2 * GIB,
    allocated_before=3 * GIB, allocated_at_failure=7 * GIB, allocated_after=3 * GIB,
    reserved_before=3 * GIB + 300 * MIB, reserved_at_failure=7 * GIB + 100 * MIB, reserved_after=3 * GIB + 200 * MIB,
    capacity=8 * GIB, line=4, code="loss = criterion(net(x), y)",
    need=Need(9 * GIB, 8 * GIB, fits=False, certain=True),
    verdict="Not enough memory: the cell needs 9.0 GiB of cuda:0, which has 8.0 GiB for it: 1.0 GiB missing.",
    holders=(
        Holder("net", "cuda:0", 2 * GIB, "module", shared_with=("optimizer",)),
        Holder("features", "cuda:0", 800 * MIB, "tensor"),
        Holder("Out[3]", "cuda:0", 224 * MIB, "tensor"),
    ),
    advice=(
        Advice("Lower batch_size from 64 to 32", 2 * GIB, True, "batch_size = 32", "line 3 says batch_size=64",
               cost="accumulate 2 steps for the same gradient", first="del x", changes=(Change(3, 13, "64", "32"),),
               trial=EditTrial(fits=True, certain=True, needs=7 * GIB, available=8 * GIB, saves=2 * GIB)),
        Advice("Run the cell on cuda:1", None, None, "%%ondevice cuda:1", "cuda:1 has 20.0 GiB free",
               trial=EditTrial(reason="there was no time")),
        Advice("Delete 2 names that earlier cells left", GIB // 2, False, "%xdel _3\ndel features", "800.0 MiB",
               trial=EditTrial(fits=False, certain=True, needs=9 * GIB, available=8 * GIB, saves=GIB // 2)),
    ),
    message="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    notes=("Emptying the cache cannot help.",),
)  # fmt: skip

GOLDEN = """\
Out of memory on cuda:0, line 4. Lower batch_size from 64 to 32: fits (dry run:
  7.0 of 8.0 GiB)
Not enough memory: the cell needs 9.0 GiB of cuda:0, which has 8.0 GiB for it:
  1.0 GiB missing. Freed 4.0 GiB.
first | del x
    3 | batch_size = 32
Why: line 3 says batch_size=64. Cost: accumulate 2 steps for the same gradient.
2. Run the cell on cuda:1 (not tried: there was no time)
3. Delete 2 names that earlier cells left: saves 512.0 MiB, does not fit alone
cuda:0                              Allocated of 8.0 GiB                  Cached
──────────────────────────────────  ─────────────────────────────────  ─────────
Before the cell                                  3.0 GiB ████░░░░░░░   300.0 MiB
At the failure                         7.0 GiB + 2.0 GiB █████████▒▒▒  100.0 MiB
Now                                              3.0 GiB ████░░░░░░░   200.0 MiB
1. Lower batch_size from 64 to 32                7.0 GiB █████████░░
3. Delete 2 names that earlier ce…               9.0 GiB ███████████▒
Failed in loss = criterion(net(x), y)
Held now: net, optimizer 2.0 GiB, features 800.0 MiB, Out[3] 224.0 MiB
Emptying the cache cannot help."""


def test_the_report_in_80_columns() -> None:
    assert to_text(REPORT, width=80, unicode=True) == GOLDEN


def test_in_html_the_request_and_what_needs_too_much_stick_out_of_the_device() -> None:
    """Each bar lies on a ground as wide as the device, and goes on beyond it."""
    bars = re.findall(r'<span aria-hidden="true".*?</span></span>', to_html(REPORT))
    widths = [[float(share) for share in re.findall(r"width:([\d.]+)%", bar)] for bar in bars]
    device = 100 * 8 * GIB / (9 * GIB + 100 * MIB)
    before, failure, now, fits, fails = (sum(each) for each in widths[:5])
    assert [before, now, fits] == pytest.approx([device] * 3, abs=0.2)
    assert [failure, fails] == pytest.approx([100, 9 / 8 * device], abs=0.2)


def test_no_line_is_wider_than_a_narrow_terminal() -> None:
    lines = to_text(REPORT, width=60, unicode=False).splitlines()
    assert max(map(len, lines)) <= 60
    assert all(line.isascii() for line in lines)


def test_the_html_says_all_the_text_says() -> None:
    html = to_html(REPORT)
    for words in (
        "1.0 GiB missing",
        "net, optimizer",
        "%xdel _3",
        "does not fit alone",
        "accumulate 2 steps",
    ):
        assert words in html


def test_names_from_the_notebook_are_escaped() -> None:
    html = to_html(
        replace(REPORT, holders=(Holder("<img src=x>", "cuda:0", GIB),), code="x = '<b>'")
    )
    assert "<img" not in html
    assert "<b>" not in html


def test_five_suggestions_are_shown() -> None:
    many = replace(REPORT, advice=tuple(Advice(f"Do {n}", None, None) for n in range(8)))
    text = to_text(many, width=80)
    assert "5. Do 4" in text
    assert "6. Do 5" not in text


def test_many_holders_are_summed_up() -> None:
    many = replace(REPORT, holders=tuple(Holder(f"x{n}", "cuda:0", GIB) for n in range(9)))
    assert "Held now: x0 1.0 GiB, x1 1.0 GiB, x2 1.0 GiB, 6 names 6.0 GiB" in to_text(
        many, width=80
    )


def test_a_recovered_cell_and_a_doubtful_one_say_so() -> None:
    recovered = replace(REPORT, retries=1, recovered=True)
    assert to_text(recovered).startswith("Out of memory on cuda:0, line 4; passed after 1 retry\n")
    failed = replace(REPORT, retries=2)
    assert "also after 2 retries" in to_text(failed)
    assert to_text(replace(REPORT, certainty="probable")).startswith(
        "Probably out of memory on cuda:0"
    )


def test_a_report_without_figures_still_has_its_verdict() -> None:
    bare = OomReport(
        "python",
        "certain",
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        "Host memory (RAM) ran out.",
    )
    assert to_text(bare, width=80) == "Out of memory. Host memory (RAM) ran out."


def test_code_to_be_typed_is_never_cut() -> None:
    """A line too long for the terminal goes on below, and its pieces join to the line."""
    long = "block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
    text = to_text(
        replace(
            REPORT,
            advice=(Advice("Recompute", None, None, long, changes=(Change(7, 0, "", long),)),),
        ),
        60,
    )
    start = next(i for i, line in enumerate(text.splitlines()) if line.startswith("7 | "))
    pieces = text.splitlines()[start : start + 3]
    assert max(map(len, pieces)) <= 60
    assert " ".join(piece[4:].strip() for piece in pieces) == long
    assert long in to_html(replace(REPORT, advice=(Advice("Recompute", None, None, long),)))


def test_a_change_in_another_cell_says_which() -> None:
    advice = Advice("Lower bs", None, None, "bs = 8", changes=(Change(2, 5, "16", "8", "In [3]"),))
    assert "In [3] 2 | bs = 8" in to_text(replace(REPORT, advice=(advice,)), width=80)


def test_that_nothing_fits_is_said_where_only_another_machine_is_left() -> None:
    larger = Advice("Use a larger GPU, such as a T4 (14.6 GiB)", None, None)
    left = replace(REPORT, advice=(larger,))
    assert "Nothing that was tried fits on cuda:0." in to_text(left, width=80, unicode=True)
    unknown = replace(left, need=None, untried="dry runs of advice are turned off")
    assert "Nothing that was tried" not in to_text(unknown, width=80, unicode=True)
