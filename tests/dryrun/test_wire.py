"""Replies of the worker come back as they were sent, and whatever else comes is one sentence and no exception."""

from __future__ import annotations

import dataclasses
import json
import pickle
import types
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumagic.dryrun import wire
from gpumagic.dryrun.wire import Decision, DeviceOutcome, Ended, Ending, Key, Kind, Outcome
from gpumagic.memory.ledger import LineUse, Point
from tests.dryrun.wire_requests import request
from tests.stages import examples

DEVICES = 2
FIGURES = DeviceOutcome(before=1, peak=4, after=2, reserved=8, traffic=16)
OUTCOME = Outcome(
    devices=(FIGURES, FIGURES), decisions=(Decision(Key(3, "x > 0"), Kind.TRUTH, (True, False)),)
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:  # one way a kind of type
    """Return values of a type that a field of a reply has, with every field of every record filled."""
    plain = {
        int: st.integers(-(2**62), 2**62),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(),
        bool: st.booleans(),
        type(None): st.none(),
    }
    if kind in plain:
        return plain[kind]
    arguments = get_args(kind)
    if get_origin(kind) in {Union, types.UnionType}:
        return st.one_of([values_of(each) for each in arguments])
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(), values_of(arguments[1]), max_size=3)
    if get_origin(kind) is tuple:
        if arguments[1:] == (...,):
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*[values_of(each) for each in arguments])
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    fields = get_type_hints(kind)
    return st.builds(kind, **{name: values_of(fields[name]) for name in fields})


def with_devices(outcome: Outcome) -> Outcome:
    """Return an outcome that is of `DEVICES` devices, wherever it names one."""
    return dataclasses.replace(
        outcome,
        devices=tuple((*outcome.devices, FIGURES, FIGURES)[:DEVICES]),
        lines=tuple(
            [dataclasses.replace(use, device=use.device % DEVICES) for use in outcome.lines]
        ),
        timeline=tuple(
            [point._replace(device=point.device % DEVICES) for point in outcome.timeline]
        ),
    )


outcomes = values_of(Outcome).map(with_devices)
replies = st.one_of(outcomes, values_of(Ended))


@settings(examples(20, 200), deadline=None)
@given(replies)
def test_a_reply_comes_back_as_it_was_sent(reply: Outcome | Ended) -> None:
    assert wire.decode(wire.encode(reply), DEVICES) == reply


def test_a_request_comes_as_it_was_sent_and_what_several_have_in_common_once() -> None:
    one = request(data=b"x" * 10_000)
    other = dataclasses.replace(one, is_brief=True)
    packed = wire.pack([one, other])
    assert wire.unpack(packed) == [one, other]
    assert len(packed) < 20_000


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=20,
)


@settings(examples(40, 500), deadline=None)
@given(
    st.one_of(
        st.binary(),
        json_values.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(st.sampled_from(["Outcome", "Ended"]), json_values, max_size=1).map(
            lambda value: json.dumps(value).encode()
        ),
    )
)
def test_what_is_no_reply_is_one_sentence(data: bytes) -> None:
    assert wire.decode(data, DEVICES) == wire.UNREADABLE


def places_in(content: Any) -> list[tuple[Any, Any]]:
    """Return each container of a JSON value with each key or index in it."""
    if not isinstance(content, dict | list):
        return []
    keys = list(content) if isinstance(content, dict) else range(len(content))
    inner = [place for key in keys for place in places_in(content[key])]
    return [*((content, key) for key in keys), *inner]


@settings(examples(40, 500), deadline=None)
@given(replies, st.data())
def test_a_reply_in_which_something_is_of_another_type_is_read_or_is_one_sentence(
    reply: Outcome | Ended, data: st.DataObject
) -> None:
    content = json.loads(wire.encode(reply))
    container, key = data.draw(st.sampled_from(places_in(content)))
    container[key] = data.draw(json_values)
    found = wire.decode(json.dumps(content).encode(), DEVICES)
    assert isinstance(found, Outcome | Ended)
    assert wire.decode(wire.encode(found), DEVICES) == found


def garbled(change: Any) -> bytes:
    """Return an outcome as it is sent, with a change made."""
    content = json.loads(wire.encode(OUTCOME))
    change(content["Outcome"])
    return json.dumps(content).encode()


GARBLED = {
    "a field is missing": lambda fields: fields.pop("operators"),
    "a field of a record in it is missing": lambda fields: fields["devices"][0].pop("peak"),
    "there is a field too many": lambda fields: fields.update(more=1),
    "a number is a text": lambda fields: fields.update(operators="3"),
    "a number is a truth": lambda fields: fields.update(operators=True),
    "a whole number is none": lambda fields: fields.update(operators=3.5),
    "a figure is larger than any": lambda fields: fields.update(operators=10**400),
    "seconds are without end": lambda fields: fields.update(seconds=float("inf")),
    "seconds are no number": lambda fields: fields.update(seconds=float("nan")),
    "a list is a text": lambda fields: fields.update(assumed="abc"),
    "a kind is unknown": lambda fields: fields["decisions"][0].__setitem__(1, "of no kind"),
    "an expression is too short": lambda fields: fields["decisions"][0].__setitem__(0, [3]),
    "a device is missing": lambda fields: fields["devices"].pop(),
    "a line is of a device that is not there": lambda fields: fields["lines"].append(
        vars(LineUse(line=1, code="", device=DEVICES))
    ),
    "a point is of a device that is not there": lambda fields: fields["timeline"].append(
        Point(device=-1, operator=0, line=None, allocated=0, parts={})
    ),
}


@pytest.mark.parametrize("how", GARBLED)
def test_an_outcome_that_is_not_whole_is_one_sentence(how: str) -> None:
    assert wire.decode(garbled(lambda fields: None), DEVICES) == OUTCOME
    assert wire.decode(garbled(GARBLED[how]), DEVICES) == wire.UNREADABLE


@pytest.mark.parametrize(
    "data",
    [b"", b"[" * 10**6, b"9" * 10**5, b'{"Outcome": {}, "Ended": {}}', b'{"Request": {}}', b"\xff\xfe",
     pickle.dumps(OUTCOME), wire.encode(OUTCOME)[:-1], wire.encode(OUTCOME) * 2],
)  # fmt: skip
def test_bytes_that_are_no_reply_are_one_sentence(data: bytes) -> None:
    assert wire.decode(data, DEVICES) == wire.UNREADABLE


def test_the_sentence_of_what_cannot_be_read_says_so() -> None:
    assert wire.UNREADABLE.reason is Ending.UNREADABLE
    assert wire.UNREADABLE.sentence == "the dry run's worker sent an answer that cannot be read"
