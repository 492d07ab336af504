"""Numbers read as people write them, and text from outside cannot steer a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.report.units import (
    count,
    duration,
    parse_size,
    percent,
    printable,
    shape,
    size,
    size_pair,
    sparkline,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "n/a"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"),
        (80 * 2**30, "80.0 GiB"), (-2048, "-2.0 KiB"), (2**50, "1.0 PiB"), (5 * 2**60, "5120.0 PiB"),
    ],
)  # fmt: skip
def test_bytes_have_one_decimal_and_binary_units(nbytes: int | None, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, None, "0 B"), (3, 1000, "3 / 1000 B"), (1, 2**30, "<0.1 / 1.0 GiB"), (2**29, 15 * 2**30, "0.5 / 15.0 GiB"),
        (2**20, 143 * 2**20, "1.0 / 143.0 MiB"), (1, 143 * 2**20, "<0.1 / 143.0 MiB"),
        (2**20, 64 * 2**20, "1.0 / 64.0 MiB"),
    ],
)  # fmt: skip
def test_a_part_and_its_whole_share_a_unit(part: int, whole: int | None, text: str) -> None:
    assert size_pair(part, whole) == text


@given(st.integers(0, 2**49))
def test_a_printed_size_reads_back_within_its_rounding(nbytes: int) -> None:
    assert parse_size(size(nbytes)) == pytest.approx(nbytes, rel=0.06)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0, "0 us"),
        (3.1e-4, "310 us"),
        (0.0124, "12.4 ms"),
        (1.239, "1.24 s"),
        (75, "1 min 15 s"),
    ],
)
def test_times_have_three_digits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_counts_agree_with_their_noun() -> None:
    assert [count(1, "tensor"), count(3000, "tensor"), count(2, "copy", "copies")] == [
        "1 tensor", "3,000 tensors", "2 copies",
    ]  # fmt: skip
    assert percent(37.2) == "37%"
    assert percent(None) == "n/a"
    assert shape((64, 3)) == "[64, 3]"
    assert shape(()) == "[]"


@given(st.text())
def test_printable_text_has_no_control_character_and_one_line(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert not any(ord(ch) < 32 or ch in "\x7f\x1b\u202e\u2066\u200f" for ch in shown)


def test_an_escape_sequence_is_shown_not_sent() -> None:
    assert printable("a\x1b[31mb\u202ec") == "a\\x1b[31mb\\u202ec"


@pytest.mark.parametrize(("shares", "line"), [([], ""), ([0, 0.5, 1], "▁▅█"), ([-0.1, 5], "▁█")])
def test_sparklines_stay_within_their_scale(shares: list[float], line: str) -> None:
    assert sparkline(shares) == line
