"""The names of tensors: plain variables and paths through what they hold, as one would type them."""

from __future__ import annotations

import collections
import functools
import queue
import types
import weakref
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumagic.heap import holders
from gpumagic.tensors.report import root_of
from gpumagic.tensors.scan import scan
from tests.heap.makers import (
    Batch,
    Method,
    Pair,
    Shadowing,
    Slotted,
    filled,
    hooked,
    keyword_only,
    module,
    names_of,
    of_a_class,
    of_objects,
    with_attribute,
    with_old,
    with_property,
    with_static_method,
)

pytestmark = pytest.mark.usefixtures("few_objects", "nothing_left")


WAYS = {
    "x": lambda t: {"x": t},
    "batch[0]": lambda t: {"batch": [t]},
    "batch[1][2]": lambda t: {"batch": (0, [1, 2, t])},
    "cfg['k']": lambda t: {"cfg": {"k": t}},
    "cfg[3]": lambda t: {"cfg": {3: t}},
    "cfg['3']": lambda t: {"cfg": {"3": t}},
    "cfg[(1, ('k',))]": lambda t: {"cfg": {(1, ("k",)): t}},
    "[*cfg.values()][0]": lambda t: {"cfg": {Slotted(0): t}},
    "cfg[float('inf')]": lambda t: {"cfg": {float("inf"): t}},
    "[*cfg.values()][0] ": lambda t: {"cfg": {10**5000: t}},
    "q[0]": lambda t: {"q": collections.deque([t])},
    "[*s][0]": lambda t: {"s": {t}},
    "o['a'][0]": lambda t: {"o": collections.OrderedDict(a=[t])},
    "d['a']": lambda t: {"d": collections.defaultdict(list, a=t)},
    "pair.y": lambda t: {"pair": Pair(0, t)},
    "run.best.item": lambda t: {"run": SimpleNamespace(best=Slotted(t))},
    "batch.inputs": lambda t: {"batch": Batch(t)},
    "net.weight": lambda t: {"net": module(weight=torch.nn.Parameter(t))},
    "net.mean": lambda t: {"net": module(mean=t)},
    "net[0].weight": lambda t: {"net": torch.nn.Sequential(module(weight=torch.nn.Parameter(t)))},
    "net.layers[1].weight": lambda t: {
        "net": module(layers=torch.nn.ModuleList([module(), module(weight=torch.nn.Parameter(t))]))
    },
    "net.layers.head.weight": lambda t: {
        "net": module(layers=torch.nn.ModuleDict({"head": module(weight=torch.nn.Parameter(t))}))
    },
    "models[0].cache['k']": lambda t: {"models": [module(cache={"k": t})]},
    "ps[0]": lambda t: {"ps": torch.nn.ParameterList([torch.nn.Parameter(t)])},
    "f.__closure__[0].cell_contents": lambda t: {"f": lambda: t},
    "f.__defaults__[0]": lambda t: {"f": lambda t=t: None},
    "f.cache['k']": lambda t: {"f": with_attribute(lambda: None, t)},
    "Table.entries[0]": lambda t: {"Table": type("Table", (), {"entries": [t]})},
    "m.__self__.item": lambda t: {"m": Method(t).method},
    "add.__self__[0]": lambda t: {"add": [t].append},
    "p.args[0]": lambda t: {"p": functools.partial(print, t)},
    "p.keywords['end']": lambda t: {"p": functools.partial(print, end=t)},
    "error.args[0]": lambda t: {"error": ValueError(t)},
    "q.queue[0]": lambda t: {"q": filled(queue.Queue(), t)},
    "[*w.data.values()][0]": lambda t: {"w": weakref.WeakKeyDictionary({Slotted: t})},
    "[*d][0]": lambda t: {"d": {t: 1}},
    "f.__kwdefaults__['k']": lambda t: {"f": keyword_only(t)},
    "p.old": lambda t: {"p": with_old(torch.nn.Parameter(torch.ones(1)), t)},
    "batch[0].old": lambda t: {"batch": [with_old(torch.ones(1), t)]},
    "array[1]": lambda t: {"array": of_objects([0, t])},
    "array[0, 1]": lambda t: {"array": of_objects([0, t]).reshape(1, 2)},
    "array[()]": lambda t: {"array": of_objects([t]).reshape(())},
    "cell.cell_contents": lambda t: {"cell": types.CellType(t)},
    "p._backward_hooks[0].__defaults__[0]": lambda t: {"p": hooked(t)},
    "trainer.__class__.best": lambda t: {"trainer": of_a_class(t)},
    "Table.__dict__['make'].__func__.__defaults__[0]": lambda t: {"Table": with_static_method(t)},
    "Table.__dict__['size'].fget.__defaults__[0]": lambda t: {"Table": with_property(t)},
    "holder.__dict__['size']": lambda t: {"holder": with_property(0)().keep(t)},
    "head[0].weight": lambda t: {
        "head": torch.nn.Sequential(module(), module(), module(weight=torch.nn.Parameter(t)))[2:]
    },
    "net._modules['0'].weight": lambda t: {
        "net": module(**{"0": module(weight=torch.nn.Parameter(t))})
    },
    "net._parameters['shadowed']": lambda t: {"net": Shadowing(t)},
    "frame['emb'].iloc[1]": lambda t: {"frame": pd.DataFrame({"n": [1, 2], "emb": [None, t]})},
    "frame[3].iloc[0]['k']": lambda t: {"frame": pd.DataFrame({3: [{"k": t}]})},
    "twice.iloc[:, 1].iloc[0]": lambda t: {"twice": pd.DataFrame([[0, t]], columns=["x", "x"])},
    "parts.iloc[:, 0].iloc[0]": lambda t: {"parts": pd.DataFrame({("a", "x"): [t]})},
    "own.iloc[:, 0].iloc[0]": lambda t: {"own": type("Own", (pd.DataFrame,), {})({"x": [t]})},
    "series.iloc[1]": lambda t: {"series": pd.Series([None, t], index=["a", "b"])},
    "top.data[0]": lambda t: {"top": collections.UserList([t])},
}


@pytest.mark.parametrize("name", WAYS)
def test_a_tensor_is_named_as_one_would_type_it(name) -> None:
    tensor = torch.ones(3)
    namespace = WAYS[name](tensor)
    assert names_of(tensor, namespace) == (name.strip(),)
    found = eval(name, dict(namespace))
    assert found.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_what_a_property_or_an_iterator_holds_is_named_by_a_variable_that_reaches_it_too() -> None:
    shared = [torch.ones(3)]
    assert names_of(shared[0], {"it": iter(shared), "deep": {"k": [shared]}}) == (
        "deep['k'][0][0]",
    )


def test_weak_references_hold_nothing() -> None:
    tensor = torch.ones(3)
    weak = weakref.WeakValueDictionary(k=tensor)
    assert (
        names_of(tensor, {"weak": weak, "ref": weakref.ref(tensor), "proxy": weakref.proxy(tensor)})
        == ()
    )


def test_optimizer_states_are_named_by_their_parameter() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert names_of(momentum, {"opt": optimizer, "model": model}) == (
        "opt.state[model.weight]['momentum_buffer']",
    )
    alone = "opt.state[opt.param_groups[0]['params'][0]]['momentum_buffer']"
    assert names_of(momentum, {"opt": optimizer}) == (alone,)


def test_a_variable_comes_before_a_module_s_path_and_that_before_a_container() -> None:
    model = torch.nn.Linear(2, 2)
    namespace = {"everything": list(model.parameters()), "model": model, "w": model.weight}
    assert names_of(model.weight, namespace) == ("w", "model.weight", "everything[0]")
    assert names_of(model.bias, namespace) == ("model.bias", "everything[1]")


def test_a_gradient_is_named_by_its_owner() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.sum().backward()
    (row,) = [row for row in scan({"cfg": {"w": weight}}) if row.kind == "gradient" and row.name]
    assert row.name == "cfg['w'].grad"


WORDS = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["ﬁ", "class", "a b", "²", "0", "𝔞", "ª", "µm", "\ud800", "é"]),
)
ATOMS = st.one_of(
    WORDS,
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=5),
)
KEYS = st.one_of(ATOMS, st.lists(ATOMS, max_size=2).map(tuple))
STEPS = st.one_of(
    st.tuples(st.just("list"), st.integers(0, 3)),
    st.tuples(st.just("dict"), KEYS),
    st.tuples(st.just("object"), WORDS),
)


def under(kind, key, value):
    """Return a container with a value under a key."""
    if kind == "object":
        made = SimpleNamespace()
        vars(made)[key] = value
        return made
    return [None] * key + [value] if kind == "list" else {key: value}


@settings(deadline=None)
@given(path=st.lists(STEPS, max_size=6), root=st.one_of(st.just("root"), WORDS))
def test_evaluating_the_name_gives_the_tensor(path, root) -> None:
    """Whatever the keys are, and the attributes: Python reads ``ﬁ`` as ``fi`` where it is typed."""
    tensor = torch.ones(1)
    value: object = tensor
    for kind, key in reversed(path):
        value = under(kind, key, value)
    (name,) = names_of(tensor, {root: value})
    assert eval(name, {root: value}) is tensor
    assert eval(root_of(name), {root: value}) is value


@pytest.mark.parametrize("name", ["ﬁ", "class", "a b", "0"])
def test_what_a_module_registers_under_an_odd_name_is_typed_as_it_can_be(name) -> None:
    net = torch.nn.Module()
    net.register_buffer(name, torch.ones(3))
    both = torch.nn.ModuleDict({name: net})
    (typed,) = names_of(net._buffers[name], {"both": both})
    assert eval(typed, {"both": both}) is net._buffers[name]


def test_a_key_of_a_state_dict_is_written_whole_and_a_longer_one_is_not() -> None:
    tensor = torch.ones(3)
    key = "model.decoder.layers.31.encoder_attn.out_proj.weight"
    assert names_of(tensor, {"sd": {key: tensor}}) == (f"sd[{key!r}]",)
    assert names_of(tensor, {"sd": {"x" * 300: tensor}}) == ("[*sd.values()][0]",)


def test_no_number_of_names_hides_another_variable() -> None:
    tensor = torch.ones(1000)
    namespace = {"many": [tensor[:1] for _ in range(50)], "same": [tensor] * 50, "late": [[tensor]]}
    assert {root_of(name) for name in names_of(tensor, namespace)} == {"many", "same", "late"}


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("x", "x"),
        ("model.fc.weight", "model"),
        ("batch[0].x", "batch"),
        ("cfg['a.b']", "cfg"),
        ("[*s][0]", "s"),
    ],
)
def test_the_root_of_a_name_is_its_variable(name, root) -> None:
    assert root_of(name) == root


def test_names_are_looked_up_in_a_copy_that_the_user_may_change() -> None:
    assert holders.variables({"a": 1}, None) == [("a", 1)]


def test_the_shell_is_not_a_way_to_a_tensor() -> None:
    tensor = torch.ones(3)
    shell = SimpleNamespace(user_ns_hidden={}, secret=tensor)
    assert names_of(tensor, {"ip": shell}, shell) == ()
