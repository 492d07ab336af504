"""The view of an out-of-memory report: verdict first, bytes beside every suggestion, 80 columns."""

from __future__ import annotations

from dataclasses import replace

from gpumagic.oom.report import Advice, OomReport
from gpumagic.report.base import Holder, to_html, to_text
from gpumagic.source.text import Change

MIB, GIB = 2**20, 2**30

REPORT = OomReport(
    kind="cuda allocator", certainty="certain", device="cuda:0", requested=2 * GIB,
    allocated_before=3 * GIB, allocated_at_failure=7 * GIB, allocated_after=3 * GIB,
    reserved_before=3 * GIB + 300 * MIB, reserved_at_failure=7 * GIB + 100 * MIB, reserved_after=3 * GIB + 200 * MIB,
    capacity=8 * GIB, line=4, code="loss = criterion(net(x), y)",
    verdict="A shortage: 3.0 GiB was in use on cuda:0 before the cell, the cell took 4.0 GiB more, "
            "and a further 2.0 GiB was 1.1 GiB too much.",
    holders=(
        Holder("net, optimizer", "cuda:0", 2 * GIB, "module"),
        Holder("features", "cuda:0", 800 * MIB, "tensor"),
        Holder("Out[3]", "cuda:0", 224 * MIB, "tensor"),
    ),
    advice=(
        Advice("Run the cell on cuda:1", None, True, "%%ondevice cuda:1", "cuda:1 has 20.0 GiB free"),
        Advice("Delete 2 names that earlier cells left", GIB, False, "%xdel _3\ndel features", "features 800.0 MiB"),
        Advice("Lower batch_size from 64 to 32", 2 * GIB, True, "batch_size = 32", "line 3 says batch_size=64",
               cost="accumulate 2 steps for the same gradient", estimated=True, first="del x",
               changes=(Change(3, 13, "64", "32"),)),
    ),
    message="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    notes=("Emptying the cache cannot help.",),
)  # fmt: skip

GOLDEN = """\
Out of memory on cuda:0, line 4 · 4.0 GiB given back
A shortage: 3.0 GiB was in use on cuda:0 before the cell, the cell took 4.0 GiB
  more, and a further 2.0 GiB was 1.1 GiB too much.
4 | loss = criterion(net(x), y)

What would help
1. Run the cell on cuda:1: enough
use | %%ondevice cuda:1
Why: cuda:1 has 20.0 GiB free.
2. Delete 2 names that earlier cells left: frees 1.0 GiB, not enough alone
use | %xdel _3
use | del features
Why: features 800.0 MiB.
3. Lower batch_size from 64 to 32: frees about 2.0 GiB, which should be enough
first | del x
    3 | batch_size = 32
Why: line 3 says batch_size=64. Cost: accumulate 2 steps for the same gradient.

Memory
cuda:0           allocated of 8.0 GiB                  cached
───────────────  ─────────────────────────────────  ─────────
before the cell               3.0 GiB ████▓░░░░░░░  300.0 MiB
at the failure                7.0 GiB ██████████▓░  100.0 MiB
now                           3.0 GiB ████▓░░░░░░░  200.0 MiB
held by         what    freed by del
──────────────  ──────  ─────────────────────────
net, optimizer  module       2.0 GiB ████████░░░░
features        tensor     800.0 MiB ███░░░░░░░░░
Out[3]          tensor     224.0 MiB █░░░░░░░░░░░
Emptying the cache cannot help."""


def test_the_report_in_80_columns() -> None:
    assert to_text(REPORT, width=80, unicode=True) == GOLDEN


def test_no_line_is_wider_than_a_narrow_terminal() -> None:
    lines = to_text(REPORT, width=60, unicode=False).splitlines()
    assert max(map(len, lines)) <= 60
    assert all(line.isascii() for line in lines)


def test_the_html_says_all_the_text_says() -> None:
    html = to_html(REPORT)
    for words in ("1.1 GiB too much", "net, optimizer", "%xdel _3", "which should be enough", "accumulate 2 steps"):
        assert words in html


def test_names_from_the_notebook_are_escaped() -> None:
    html = to_html(replace(REPORT, holders=(Holder("<img src=x>", "cuda:0", GIB),), code="x = '<b>'"))
    assert "<img" not in html
    assert "<b>" not in html


def test_more_than_five_suggestions_are_folded() -> None:
    many = replace(REPORT, advice=tuple(Advice(f"Do {n}", None, None) for n in range(8)))
    text = to_text(many, width=80)
    assert "5. Do 4" in text
    assert "6. Do 5" not in text
    assert "and 3 more: Do 5; Do 6; Do 7" in text
    assert "6. Do 5" in to_html(many)


def test_many_holders_are_summed_up() -> None:
    many = replace(REPORT, holders=tuple(Holder(f"x{n}", "cuda:0", GIB) for n in range(9)))
    assert "and 3 more names with 3.0 GiB" in to_text(many, width=80)


def test_a_recovered_cell_and_a_doubtful_one_say_so() -> None:
    recovered = replace(REPORT, retries=1, recovered=True)
    assert to_text(recovered).startswith("Out of memory on cuda:0, line 4 · passed after 1 retry\n")
    failed = replace(REPORT, retries=2)
    assert "also after 2 retries" in to_text(failed)
    assert to_text(replace(REPORT, certainty="probable")).startswith("Probably out of memory on cuda:0")


def test_a_report_without_figures_still_has_its_verdict() -> None:
    bare = OomReport("python", "certain", None, None, None, None, None, None, None, None, "Host memory (RAM) ran out.")
    assert to_text(bare, width=80) == "Out of memory\nHost memory (RAM) ran out."


def test_code_to_be_typed_is_never_cut() -> None:
    """A line too long for the terminal goes on below, and its pieces join to the line."""
    long = "block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
    text = to_text(
        replace(REPORT, advice=(Advice("Recompute", None, None, long, changes=(Change(7, 0, "", long),)),)), 60
    )
    start = next(i for i, line in enumerate(text.splitlines()) if line.startswith("7 | "))
    pieces = text.splitlines()[start : start + 3]
    assert max(map(len, pieces)) <= 60
    assert " ".join(piece[4:].strip() for piece in pieces) == long
    assert long in to_html(replace(REPORT, advice=(Advice("Recompute", None, None, long),)))


def test_a_change_in_another_cell_says_which() -> None:
    advice = Advice("Lower bs", None, None, "bs = 8", changes=(Change(2, 5, "16", "8", "In [3]"),))
    assert "In [3] 2 | bs = 8" in to_text(replace(REPORT, advice=(advice,)), width=80)
