"""The int that a cell's memory goes with is found where it stands, and nothing else of the text changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.errors import OptionError
from gpumagic.source import settings


def knob(source, name="batch_size", namespace=None):
    return settings.find_in_cell(source, name, {} if namespace is None else namespace, "--shrink")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("batch_size = 256", "batch_size = 64"),
        ("batch_size: int = 256  # of 256", "batch_size: int = 64  # of 256"),
        ("train(x, batch_size=256, epochs=256)", "train(x, batch_size=64, epochs=256)"),
        ("def f(x, batch_size=256): pass", "def f(x, batch_size=64): pass"),
        ("def f(x, *, batch_size=256, n): pass", "def f(x, *, batch_size=64, n): pass"),
        ("config = {'batch_size': 256, 'n': 256}", "config = {'batch_size': 64, 'n': 256}"),
        ("config.batch_size = 256", "config.batch_size = 64"),
        ("lr, batch_size = 256, 256", "lr, batch_size = 256, 64"),
        ("print(batch_size := 256)", "print(batch_size := 64)"),
        ("ä = 'ß'; batch_size = 256; ü = 256", "ä = 'ß'; batch_size = 64; ü = 256"),
        ("batch_size = 2_5_6", "batch_size = 64"),
        ("batch_size = 0x100; f(batch_size=128)", "batch_size = 64; f(batch_size=32)"),
        ("\n\nif x:\n    batch_size = 256", "\n\nif x:\n    batch_size = 64"),
    ],
)
def test_a_number_in_the_text_is_changed_and_nothing_else(before: str, after: str) -> None:
    found = knob(before)
    assert found.value == 256
    assert found.with_value(64) == (after, {})
    assert found.with_value(256) == (None, {})


@given(
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.text(st.characters(codec="utf-8", exclude_characters="'\\\n\r\0\f")),
)
def test_any_value_in_any_line(value: int, new: int, words: str) -> None:
    before, after = (
        f"s = '{words}'; f(batch_size={number}, s='{words}')" for number in (value, new)
    )
    assert knob(before).with_value(new) == (after if new != value else None, {})


def test_the_place_names_the_line() -> None:
    assert knob("x = 1\nbatch_size = 256").place(64) == "line 2: batch_size = 64"


def test_a_variable_of_the_notebook_is_given_another_value_and_the_text_none() -> None:
    found = knob("train(batch_size)", namespace={"batch_size": 8})
    assert found.with_value(4) == (None, {"batch_size": 4})
    assert found.with_value(8) == (None, {"batch_size": 8})
    assert found.place(4) == "batch_size = 4"


def test_a_variable_that_only_a_called_function_reads_counts_as_used() -> None:
    namespace: dict = {}
    exec("batch_size = 8\ndef work(): return batch_size", namespace)
    assert knob("work()", namespace=namespace).value == 8


@pytest.mark.parametrize(
    ("source", "namespace", "words"),
    [
        ("f(3)", {}, "--shrink batch_size: the cell has no int called batch_size; it has none"),
        ("f(batchsize=3)", {}, "did you mean batchsize?"),
        ("f(3)", {"batch_size": 8}, "the cell does not use batch_size"),
        ("f(batch_size)", {"batch_size": "8"}, "batch_size is a str, not an int"),
        ("f(batch_size)", {"batch_size": True}, "batch_size is a bool, not an int"),
        ("f(batch_size)", {"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ("n = 4\nbatch_size = 2 * n", {"batch_size": 8}, "line 2 computes batch_size"),
    ],
)
def test_what_cannot_be_changed_is_said_in_one_line(source, namespace, words) -> None:
    with pytest.raises(OptionError) as caught:
        knob(source, namespace=namespace)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
