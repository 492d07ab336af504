"""Whatever holds tensors, in whatever layout: nothing raises, and every name that is shown evaluates to its storage."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import itertools
import types
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpumagic.report.base import to_text
from gpumagic.tensors.scan import scan
from gpumagic.tensors.why import find_holders
from tests.heap.makers import (
    Hidden,
    Loud,
    Pair,
    Slotted,
    cached_call,
    failed,
    generator,
    module,
    of_objects,
    started,
    thread_local,
    with_old,
)
from tests.stages import examples

pytestmark = pytest.mark.usefixtures("few_objects")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """What cannot be assigned to."""

    item: object


class Subclassed(torch.Tensor):
    """A tensor with attributes of its own."""


def hooked(item):
    """Return a tensor with a hook that closes over the tensor and something else."""
    made = torch.ones(2, requires_grad=True)
    made.register_hook(lambda gradient: gradient if item is made else None)
    return made


def subclassed(item):
    """Return a tensor of a class of the user's, with an attribute."""
    made = torch.ones(2).as_subclass(Subclassed)
    made.extra = item
    return made


def optimizer(item):
    """Return an optimizer that has taken a step, with something among its states."""
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    made = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    made.step()
    made.state[weight]["item"] = item
    return made


def ring(item):
    """Return a list that is in itself."""
    made = [item]
    made.append(made)
    return made


HOLDERS = [
    Slotted, Frozen, Hidden, subclassed, hooked, failed, thread_local, cached_call, optimizer, ring, types.CellType,
    lambda item: module(item=item),
    lambda item: nn.Sequential(nn.Identity(), nn.Identity(), module(item=item))[1:],
    lambda item: started(generator(item)),
    lambda item: pd.DataFrame({"n": [1, 2], "item": of_objects([0, item])}),
    lambda item: of_objects([0, item]).reshape(1, 2),
    lambda item: with_old(nn.Parameter(torch.ones(2)), item),
    lambda item: iter([item]),
    lambda item: SimpleNamespace(**{"a b": item}),
    lambda item: collections.UserList([item]),
    lambda item: [0, item],
    lambda item: (item,),
    lambda item: {"k": item},
    lambda item: {Slotted(0): item, float("nan"): 0},
    lambda item: Loud(k=item),
    lambda item: Pair(item, 0),
    lambda item: collections.deque([item]),
    lambda item: lambda: item,
    lambda item: lambda *, key=item: key,
    lambda item: functools.partial(print, item, key=item),
    lambda item: itertools.tee([item])[0],
    lambda item: itertools.accumulate([item]),
    lambda item: zip([item], strict=True),
    lambda item: map(print, [item]),
    lambda item: type("Own", (), {"item": item, "__module__": __name__}),
    lambda item: type("Own", (), {"item": item, "__module__": __name__})(),
    lambda item: contextvars.ContextVar("var", default=item),
    lambda item: property(lambda self: item),
    lambda item: failed(item).__traceback__,
]  # fmt: skip


def result():
    """Return what autograd has recorded."""
    return (torch.ones(3, requires_grad=True) * 2).exp()


LEAVES = [
    lambda: torch.ones(3), lambda: nn.Parameter(torch.ones(3)), lambda: torch.ones(8)[2:4],
    lambda: result().detach(), lambda: result().sum(), lambda: result().grad_fn,
    lambda: torch.ones(3).untyped_storage(), lambda: torch.ones(3).to_sparse(), lambda: torch.ones(3, device="meta"),
    lambda: torch.ones(3).as_subclass(Subclassed),
]  # fmt: skip
LAYOUTS = st.lists(
    st.tuples(st.integers(0, len(LEAVES) - 1), st.lists(st.integers(0, len(HOLDERS) - 1), max_size=4), st.booleans()),
    min_size=1, max_size=4,
)  # fmt: skip


def built(layouts):
    """Return a notebook's variables; what is not kept in one is garbage, or part of another."""
    variables, last = {}, None
    for place, (leaf, steps, is_kept) in enumerate(layouts):
        value = LEAVES[leaf]()
        for step in steps:
            value = HOLDERS[step](value)
        if last is not None and place % 2:
            value = [value, last]
        if is_kept:
            variables[f"v{place}"] = value
        last = value
    return variables


def address_of(value):
    """Return the storage under a tensor, or a storage itself."""
    storage = (
        value
        if isinstance(value, torch.UntypedStorage)
        else torch._C.TensorBase.untyped_storage(value)
    )
    return storage._cdata


@pytest.mark.deep
@examples(few=4, deep=36)
@given(layouts=LAYOUTS)
def test_every_name_evaluates_to_its_storage_and_nothing_raises(layouts) -> None:
    variables = built(layouts)
    earlier = scan({})
    report = scan(variables)
    for each in (report, report.leaks(), report.since(earlier), scan(variables, group_by="holder")):
        to_text(each)
    addresses: dict[str, set[int]] = {}
    for row in report:
        for name in row.names:
            if "sparse" not in (row.note or "") and row.kind != "gradient":
                addresses.setdefault(str(row.numbers), set()).add(
                    address_of(eval(name, dict(variables)))
                )
            else:
                eval(name, dict(variables))
        assert row.variable is None or row.variable in variables
    assert all(len(found) == 1 for found in addresses.values())
    told = next((row.name for row in report if row.name), None)
    if told is not None:
        to_text(find_holders(told, variables))


@examples(few=4, deep=4)
@given(layouts=LAYOUTS)
def test_garbage_of_every_kind_is_looked_through(layouts) -> None:
    built([(leaf, steps, False) for leaf, steps, _ in layouts])
    to_text(scan({}, thorough=True).leaks())
