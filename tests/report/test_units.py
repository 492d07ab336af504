"""Numbers read as people write them, and text from outside cannot steer a terminal."""

from __future__ import annotations

import re

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
    size_of,
    size_pair,
    size_range,
    sparkline,
)
from tests.stages import examples


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


@given(st.integers(0, 2**59))
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
        (119.7, "2 min 0 s"),
        (59.97, "1 min 0 s"),
        (59.94, "59.9 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (7170, "2 h 0 min"),
        (0.9996, "1 s"),
        (0.0009997, "1 ms"),
        (9.999e-7, "1 us"),
        (4.2e-8, "0.042 us"),
        (1e-12, "<0.001 us"),
        (-0.9996, "-1 s"),
    ],
)
def test_times_have_three_digits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


MOST = {"B": 1024, "KiB": 1024, "MiB": 1024, "GiB": 1024, "TiB": 1024, "PiB": float("inf"),
        "us": 1000, "ms": 1000, "s": 60, "min": 60, "h": float("inf")}  # fmt: skip
"""What a number of each unit stays below."""
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}


def numbers_of(text: str, units: str) -> list[tuple[float, str]]:
    """Return the numbers of a text with the unit that follows each, or the text's last one: ``"0.3 / 15.0 GiB"``."""
    words = re.fullmatch(rf"-?<?[\d.]+( ({units}))?( (/|of|to)? ?[\d.]+ ({units}))*", text)
    assert words, text
    found = re.findall(rf"([\d.]+)(?: ({units}))?", text)
    return [(float(number), unit or found[-1][1]) for number, unit in found]


@examples(50, 1000)
@given(st.floats(0, 1e8) | st.floats(0, 100) | st.floats(0, 1e-2))
def test_no_unit_of_time_overflows_and_a_time_reads_back(seconds: float) -> None:
    shown = numbers_of(duration(seconds), "us|ms|s|min|h")
    assert all(number < MOST[unit] for number, unit in shown)
    total = sum(number * SECONDS[unit] for number, unit in shown)
    last = SECONDS[shown[-1][1]] if len(shown) == 2 else 0
    assert total == pytest.approx(seconds, rel=0.0051, abs=max(1e-9, last / 2))


@examples(50, 1000)
@given(st.integers(0, 2**60), st.integers(0, 2**60))
def test_no_unit_of_bytes_overflows(part: int, whole: int) -> None:
    part, whole = sorted([part, whole])
    for text in (size(part), size_pair(part, whole), size_of(part, whole), size_range(part, whole)):
        for number, unit in numbers_of(text, "B|KiB|MiB|GiB|TiB|PiB"):
            assert number < MOST[unit], text


@examples(50, 1000)
@given(st.integers(0, 10**12))
def test_counts_read_back(number: int) -> None:
    shown, noun = count(number, "copy", "copies").split(" ")
    assert int(shown.replace(",", "")) == number
    assert noun == ("copy" if number == 1 else "copies")


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
