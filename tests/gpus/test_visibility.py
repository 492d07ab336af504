"""CUDA_VISIBLE_DEVICES -> the cards CUDA will number 0, 1, ..."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gpumagic.gpus.visibility import Visibility, parse_ordinal, visible_cards

A, B, C = "GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333"
UUIDS = (A, B, C)


@pytest.mark.parametrize(
    ("variable", "cards"),
    [
        (None, (0, 1, 2)),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        ("1gpu2,2ampere", (1, 2)),
        ("0,9,1", (0,)),
        ("0,-1,1", (0,)),
        ("0,,1", (0,)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,1", ()),
        ("1,01", ()),
        ("+1", (1,)),
        (A, (0,)),
        (f"{C},{A}", (2, 0)),
        ("GPU-b", (2,)),
        ("GPU-aaaa", ()),  # ambiguous
        (f"{C},GPU-x,{A}", (2,)),
        (f"{A},{A}", ()),
        (f"{C},GPU-bbbb", ()),
        (f"{C},0", (2,)),
        (f"0,{C}", (0,)),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(
    variable: str | None, cards: tuple[int, ...]
) -> None:
    """Numbers as by strtoul, stop at the first invalid entry, nothing at all for a duplicate."""
    assert visible_cards(variable, UUIDS).cards == cards


@pytest.mark.parametrize(
    ("variable", "problem"),
    [(None, None), ("0", None), (A, None), ("", "is empty"), ("5", "'5'"), ("x", "'x'"), ("1,1", "twice"),
     ("-1", "hides every GPU"), (f"{A},{A}", "twice"), ("GPU-aaaa", "'GPU-aaaa'"), ("MIG-none", "'MIG-none'")],
)  # fmt: skip
def test_what_is_wrong_with_the_variable_is_said(variable: str | None, problem: str | None) -> None:
    """A list that CUDA cuts short says where; a good one says nothing."""
    said = visible_cards(variable, UUIDS).problem
    assert said is None if problem is None else problem in (said or "")


def test_one_mig_instance_at_most_is_visible() -> None:
    """The first instance named counts, by a full or an abbreviated UUID, in the new form or the old one."""
    instances = ("MIG-1111", "MIG-2222", "MIG-GPU-aaaa1111/1/0")
    assert visible_cards("MIG-2222,MIG-1111", UUIDS, instances) == Visibility(
        instance=1, by_uuid=True
    )
    assert visible_cards("MIG-GPU-aaaa1111/1/0", UUIDS, instances).instance == 2
    assert visible_cards("MIG-1", UUIDS, instances).instance == 0


def test_a_card_whose_uuid_cannot_be_read_is_never_matched_by_one() -> None:
    """Such a card can only be named by its number."""
    assert visible_cards("GPU-", (None, None)).cards == ()
    assert visible_cards("1", (None, None)).cards == (1,)


entries = st.one_of(st.integers(-2, 9).map(str), st.text("0123 +-xGPU", max_size=4))
lists = st.lists(entries, max_size=5).map(",".join)


@given(lists, st.integers(1, 6))
@example("0,9,9", 4)
def test_numbers_agree_with_torch(variable: str, count: int) -> None:
    """Whatever stands in the variable, the visible cards are those that torch's own parser finds."""
    assume(not variable.startswith("GPU-"))
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": variable}):
        try:
            parsed = torch.cuda._parse_visible_devices()
        except ValueError:  # torch cannot read a lone sign
            assume(False)
    beyond = next((i for i, number in enumerate(parsed) if number >= count), len(parsed))
    assert list(visible_cards(variable, [None] * count).cards) == parsed[:beyond]


uuids = st.lists(
    st.text("ab", min_size=2, max_size=5).map("GPU-".__add__), min_size=1, max_size=4, unique=True
)


@given(uuids, st.data())
def test_uuids_agree_with_torch(machine: list[str], data: st.DataObject) -> None:
    """Abbreviated, ambiguous, unknown and repeated UUIDs mean what they mean to torch."""
    wanted = data.draw(
        st.lists(st.one_of(st.sampled_from(machine), st.text("ab", max_size=3).map("GPU-".__add__)))
    )
    variable = ",".join(wanted)
    assume(variable)
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": variable}):
        parsed = torch.cuda._transform_uuid_to_ordinals(
            torch.cuda._parse_visible_devices(), machine
        )
    assert list(visible_cards(variable, machine).cards) == parsed


@given(st.text(max_size=12), st.integers(0, 4))
def test_any_text_yields_distinct_cards_that_exist(variable: str, count: int) -> None:
    """No text in the variable makes the parser fail or name a card that is not there."""
    cards = visible_cards(variable, [f"GPU-{number}" for number in range(count)]).cards
    assert len(set(cards)) == len(cards)
    assert all(0 <= card < count for card in cards)


@pytest.mark.parametrize(
    ("text", "number"),
    [("12ab", 12), ("-3", None), ("+", None), ("", None), ("x1", None), ("²", None)],
)
def test_strtoul_reads_the_leading_number(text: str, number: int | None) -> None:
    """A text that begins with no number, or with a negative one, is none."""
    assert parse_ordinal(text) == number
