"""The names of tensors: plain variables, paths through what they hold, and nobody's code run on the way."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import importlib
import multiprocessing
import queue
import sys
import threading
import types
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumagic.heap import holders
from gpumagic.heap.holders import Search, name_storages
from gpumagic.tensors.report import TensorReport, root_of
from gpumagic.tensors.scan import scan

pytestmark = pytest.mark.usefixtures("few_objects")


def names_of(tensor, namespace, shell=None):
    """Return the names of a tensor's storage."""
    return name_storages(namespace, shell).get(tensor.untyped_storage()._cdata, ())


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("never_set", "weight")

    def __init__(self, weight):
        self.weight = weight


class Plain:
    """An object whose attributes CPython keeps inline until someone asks for its `__dict__`."""

    def __init__(self):
        self.number = 1


@dataclasses.dataclass
class Batch:
    """What a collate function returns."""

    inputs: torch.Tensor


Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024  the form found in notebooks


class Attentive:
    """An object whose every attribute access is an event."""

    calls = 0

    def __init__(self, tensor):
        object.__setattr__(self, "tensor", tensor)

    def __getattribute__(self, name):
        Attentive.calls += 1
        raise RuntimeError(name)

    def __iter__(self):
        Attentive.calls += 1
        raise RuntimeError

    __len__ = __bool__ = __hash__ = __eq__ = __iter__


class LoudDict(dict):
    """A dict that nobody may ask."""

    def items(self):
        raise RuntimeError

    __iter__ = __len__ = keys = values = items


WAYS = {
    "x": lambda t: {"x": t},
    "batch[0]": lambda t: {"batch": [t]},
    "batch[1][2]": lambda t: {"batch": (0, [1, 2, t])},
    "cfg['k']": lambda t: {"cfg": {"k": t}},
    "cfg[3]": lambda t: {"cfg": {3: t}},
    "cfg['3']": lambda t: {"cfg": {"3": t}},
    "cfg[(1, ('k',))]": lambda t: {"cfg": {(1, ("k",)): t}},
    "cfg[<Slotted>]": lambda t: {"cfg": {Slotted(0): t}},
    "cfg[float('inf')]": lambda t: {"cfg": {float("inf"): t}},
    "cfg[<int>]": lambda t: {"cfg": {10**5000: t}},
    "q[0]": lambda t: {"q": collections.deque([t])},
    "s{...}": lambda t: {"s": {t}},
    "o['a'][0]": lambda t: {"o": collections.OrderedDict(a=[t])},
    "d['a']": lambda t: {"d": collections.defaultdict(list, a=t)},
    "pair.y": lambda t: {"pair": Pair(0, t)},
    "run.best.weight": lambda t: {"run": SimpleNamespace(best=Slotted(t))},
    "batch.inputs": lambda t: {"batch": Batch(t)},
    "odd.tensor": lambda t: {"odd": Attentive(t)},
    "loud['k']": lambda t: {"loud": LoudDict(k=t)},
    "net.weight": lambda t: {"net": module(weight=torch.nn.Parameter(t))},
    "net.mean": lambda t: {"net": module(mean=t)},
    "net[0].weight": lambda t: {"net": torch.nn.Sequential(module(weight=torch.nn.Parameter(t)))},
    "net.layers[1].weight": lambda t: {
        "net": layered(torch.nn.ModuleList([module(), module(weight=torch.nn.Parameter(t))]))
    },
    "net.layers.head.weight": lambda t: {
        "net": layered(torch.nn.ModuleDict({"head": module(weight=torch.nn.Parameter(t))}))
    },
    "models[0].cache['k']": lambda t: {"models": [cached(t)]},
    "ps[0]": lambda t: {"ps": torch.nn.ParameterList([torch.nn.Parameter(t)])},
    "f.<closure>.t": lambda t: {"f": lambda: t},
    "f.__defaults__[0]": lambda t: {"f": lambda t=t: None},
    "f.cache['k']": lambda t: {"f": with_attribute(lambda: None, t)},
    "Table.entries[0]": lambda t: {"Table": type("Table", (), {"entries": [t]})},
    "m.__self__.weight": lambda t: {"m": Method(t).method},
    "add.__self__[0]": lambda t: {"add": [t].append},
    "p.args[0]": lambda t: {"p": functools.partial(print, t)},
    "p.keywords['end']": lambda t: {"p": functools.partial(print, end=t)},
    "c.<...>": lambda t: {"c": cached_call(t)},
    "g.<locals>.mine": lambda t: {"g": started(generator(t))},
    "co.<locals>.mine": lambda t: {"co": awaiting(t)},
    "it.<...>[0]": lambda t: {"it": iter([t])},
    "g.<locals>.<...>[1]": lambda t: {"g": started(each for each in iter([0, t]))},
    "error.args[0]": lambda t: {"error": ValueError(t)},
    "error.<fails()>.local": lambda t: {"error": failed(t)},
    "error.__cause__.<fails()>.local": lambda t: {"error": caused(failed(t))},
    "q.queue[0]": lambda t: {"q": filled(queue.Queue(), t)},
    "q.<...>" if sys.version_info >= (3, 13) else "q.<...>[0]": lambda t: {"q": filled(queue.SimpleQueue(), t)},
    "w.data[<ReferenceType>]": lambda t: {"w": weakref.WeakKeyDictionary({Slotted: t})},
    "d{...}": lambda t: {"d": {t: 1}},
}


def module(**tensors):
    """Return a module with these parameters and buffers."""
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        (made.register_parameter if is_parameter else made.register_buffer)(name, tensor)
    return made


def layered(layers):
    """Return a module with sub-modules."""
    made = torch.nn.Module()
    made.layers = layers
    return made


def cached(tensor):
    """Return a module that keeps a tensor on the side."""
    made = torch.nn.Module()
    made.cache = {"k": tensor}
    return made


class Method(Slotted):
    """An object with a method."""

    def method(self):
        """Do nothing."""


def with_attribute(function, tensor):
    """Return a function with a tensor in an attribute."""
    function.cache = {"k": tensor}
    return function


def cached_call(tensor):
    """Return a cached function that remembers a tensor."""

    @functools.lru_cache
    def call():
        return kept.pop()

    kept = [tensor]
    call()
    return call


def generator(mine):
    """Yield forever with a tensor in hand."""
    while True:
        yield 0


def started(generator):
    """Return a generator that stands at its first yield."""
    next(generator)
    return generator


def awaiting(tensor):
    """Return a coroutine that waits with a tensor in hand."""

    @types.coroutine
    def wait():
        yield

    async def call(mine):
        await wait()

    coroutine = call(tensor)
    coroutine.send(None)
    return coroutine


def failed(tensor):
    """Return the error of a call that failed with a tensor in hand."""

    def fails(local):
        raise ValueError

    try:
        fails(tensor)
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next
        return error


def caused(cause):
    """Return an error with a cause."""
    error = RuntimeError()
    error.__cause__ = cause
    return error


def filled(queue, tensor):
    """Return a queue with a tensor waiting in it."""
    queue.put(tensor)
    return queue


@pytest.mark.parametrize("name", WAYS)
def test_a_tensor_is_named_as_one_would_type_it(name) -> None:
    tensor = torch.ones(3)
    Attentive.calls = 0
    assert names_of(tensor, WAYS[name](tensor)) == (name,)
    assert Attentive.calls == 0


def test_weak_references_hold_nothing() -> None:
    tensor = torch.ones(3)
    weak = weakref.WeakValueDictionary(k=tensor)
    assert names_of(tensor, {"weak": weak, "ref": weakref.ref(tensor), "proxy": weakref.proxy(tensor)}) == ()


def test_looking_at_a_generator_leaves_nothing_in_its_frame() -> None:
    """Reading `f_locals` does, before Python 3.13."""

    def forgetful(mine):
        yield
        mine = None
        yield mine

    tensor = torch.ones(3)
    watch = weakref.ref(tensor)
    stands = started(forgetful(tensor))
    assert names_of(tensor, {"g": stands}) == ("g.<locals>.mine",)
    del tensor
    next(stands)
    assert watch() is None


def test_what_locals_handed_out_stays_as_it_is() -> None:
    def keeps():
        number = 1
        mine = locals()
        yield mine
        yield number

    stands = keeps()
    given = next(stands)
    name_storages({"g": stands})
    assert given["number"] == 1


def test_optimizer_states_are_named_by_their_parameter() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert names_of(momentum, {"opt": optimizer, "model": model}) == ("opt.state[model.weight].momentum_buffer",)
    alone = "opt.state[opt.param_groups[0]['params'][0]].momentum_buffer"
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


def test_cycles_end() -> None:
    tensor = torch.ones(3)
    ring: list[object] = [tensor]
    ring.append({"self": ring})
    assert names_of(tensor, {"ring": ring}) == ("ring[0]",)


def test_a_deep_chain_ends_without_recursion() -> None:
    chain: object = torch.ones(3)
    for _ in range(100_000):
        chain = [chain]
    assert name_storages({"chain": chain}) == {}


def test_a_list_of_a_million_records_does_not_hide_what_is_beside_it() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    records = [{"id": [number]} for number in range(300_000)]
    namespace = {"records": records, "model": model}
    search = Search()
    found = search.run(namespace.items())
    search.release()
    assert search.gave_up
    assert id(model[0][0].weight) in found


def test_records_of_atoms_are_passed_over() -> None:
    tensor = torch.ones(3)
    records: list[object] = [[number] for number in range(300_000)]
    records.append(tensor)
    assert names_of(tensor, {"records": records}) == ("records[300000]",)


def test_a_search_that_gives_up_says_so(monkeypatch) -> None:
    search = Search(steps=10)
    search.run([("many", [[torch.ones(1)] for _ in range(20)])])
    assert search.gave_up


def test_a_search_keeps_nothing_once_released() -> None:
    tensor = torch.ones(3)
    watch = weakref.ref(tensor)
    namespace = {"cfg": {"k": [tensor]}}
    search = Search()
    search.run(namespace.items())
    search.release()
    del tensor
    namespace.clear()
    assert watch() is None


def test_looking_into_an_object_allocates_nothing_in_it() -> None:
    plain = Plain()
    before = [type(each) for each in gc.get_referents(plain)]
    name_storages({"plain": plain})
    assert [type(each) for each in gc.get_referents(plain)] == before


def test_slots_that_were_never_set_are_passed_over() -> None:
    empty = Slotted.__new__(Slotted)
    assert name_storages({"empty": empty}) == {}


WORDS = st.one_of(st.text(max_size=5), st.sampled_from(["ﬁ", "class", "a b", "²", "0", "𝔞", "ª", "µm", "\ud800", "é"]))
ATOMS = st.one_of(WORDS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.binary(max_size=5))
KEYS = st.one_of(ATOMS, st.lists(ATOMS, max_size=2).map(tuple))
STEPS = st.one_of(
    st.tuples(st.just("list"), st.integers(0, 3)), st.tuples(st.just("dict"), KEYS), st.tuples(st.just("object"), WORDS)
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
    if name != "0":  # of a Sequential's layers, which are looked up by number
        assert eval(typed, {"both": both}) is net._buffers[name]


def test_a_key_of_a_state_dict_is_written_whole_and_a_longer_one_is_no_code() -> None:
    tensor = torch.ones(3)
    key = "model.decoder.layers.31.encoder_attn.out_proj.weight"
    assert names_of(tensor, {"sd": {key: tensor}}) == (f"sd[{key!r}]",)
    assert names_of(tensor, {"sd": {"x" * 300: tensor}}) == (f"sd[<'{'x' * 35}...>]",)


# -- what a shell keeps -----------------------------------------------------------------------------------


def shell_with(namespace, hidden):
    """Return what the probe reads of a shell."""
    namespace.update(hidden)
    return SimpleNamespace(user_ns=namespace, user_ns_hidden=dict(hidden))


def told(report: TensorReport) -> list[str]:
    """Return the holders of a report, but for tensors that other tests' modules have."""
    return [row.holder for row in report if row.holder and "module test" not in row.holder]


def test_ipython_s_own_variables_are_not_names_until_the_user_rebinds_them() -> None:
    tensor, mine = torch.ones(3), torch.ones(4)
    namespace: dict[str, object] = {}
    shell = shell_with(namespace, {"_": tensor, "_3": tensor, "_oh": {3: tensor}, "__": 0})
    namespace["__"] = mine
    assert names_of(tensor, namespace, shell) == ()
    assert names_of(mine, namespace, shell) == ("__",)
    del tensor
    assert told(scan(namespace, shell=shell)) == ["Out[3]"]


def test_an_output_is_named_by_its_number_before_the_underscore() -> None:
    listed = [torch.ones(3)]
    namespace: dict[str, object] = {}
    shell = shell_with(namespace, {"_": listed, "_7": listed, "_oh": {7: listed}})
    del listed
    assert told(scan(namespace, shell=shell)) == ["Out[7]"]


def test_what_only_the_hidden_namespace_has_is_said_to_be_there() -> None:
    shell = SimpleNamespace(user_ns_hidden={"_3": torch.ones(3)})
    assert told(scan({}, shell=shell)) == ["user_ns_hidden['_3']"]


def test_the_shell_is_not_a_way_to_a_tensor() -> None:
    tensor = torch.ones(3)
    shell = SimpleNamespace(user_ns_hidden={}, secret=tensor)
    assert names_of(tensor, {"ip": shell}, shell) == ()


# -- what else keeps tensors ------------------------------------------------------------------------------


def held(shape, namespace, shell=None):
    """Return who keeps the tensors of a shape that no variable reaches, where there, and whether they let go of it."""
    return [(row.holder, row.place, row.releasable) for row in scan(namespace, shell=shell) if row.shape == shape]


def test_a_running_function_holds_its_variables() -> None:
    local = [torch.ones(3, 1231)]  # noqa: F841  it only has to be there
    label = "running test_a_running_function_holds_its_variables()"
    assert held((3, 1231), {}) == [(label, f"{label}.local[0]", False)]


def test_looking_at_a_running_function_leaves_nothing_in_its_frame() -> None:
    """A snapshot of its variables would keep what it deletes."""
    local = torch.ones(3)
    watch = weakref.ref(local)
    scan({})
    del local
    assert watch() is None


def test_a_function_that_runs_in_another_thread_holds_its_variables() -> None:
    started, ends = threading.Event(), threading.Event()

    def work():
        batch = torch.ones(3, 1232)
        started.set()
        ends.wait()
        return batch

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    started.wait()
    found = [(row.holder, row.place) for row in scan({}) if row.shape == (3, 1232)]
    ends.set()
    thread.join()
    assert found == [("running work() in loader", "running work() in loader.batch")]


class Slow(torch.utils.data.Dataset):
    """Data whose second item takes until it is told to come."""

    def __init__(self, go_on):
        self.go_on = go_on

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 1:
            self.go_on.wait()
        return torch.full((1237,), index)


def test_a_batch_that_a_loader_fetched_ahead_is_the_loader_s() -> None:
    """The third, which one worker has ready while the other is still at the second."""
    fork = multiprocessing.get_context("fork")
    go_on, pause = fork.Event(), threading.Event()
    loader = torch.utils.data.DataLoader(Slow(go_on), num_workers=2, multiprocessing_context=fork)
    it = iter(loader)
    next(it)
    waits = threading.Thread(target=next, args=(it,))
    waits.start()
    for _ in range(1000):
        if len(it._task_info[2]) == 2 or pause.wait(0.01):
            break
    found = [row.name for row in scan({"it": it}) if row.shape == (1, 1237)]
    go_on.set()
    waits.join()
    it._shutdown_workers()
    assert found == ["it._task_info[2][1]"]


def test_a_generator_that_nothing_names_holds_its_variables() -> None:
    stands = started(generator(torch.ones(3, 1233)))
    stands_in_a_cycle = [stands]
    stands_in_a_cycle.append(stands_in_a_cycle)
    del stands, stands_in_a_cycle
    label = "suspended generator()"
    assert [(row.holder, row.place) for row in scan({}) if row.shape == (3, 1233)] == [
        (label, f"{label}.<locals>.mine")
    ]


def test_a_module_of_the_user_holds_its_variables(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_notebook_module.py").write_text("import torch\ncache = {'k': torch.ones(3, 1234)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_notebook_module")
    name = "module my_notebook_module"
    assert held((3, 1234), {}) == [(name, f"{name}.cache['k']", False)]
    del sys.modules["my_notebook_module"]


def test_only_what_the_session_lets_go_of_is_releasable() -> None:
    namespace: dict[str, object] = {"g": started(generator(0))}
    alone, shared = torch.ones(3, 1235), torch.ones(3, 1236)
    shell = shell_with(namespace, {"_oh": {3: [alone], 4: [shared]}})
    shapes = [alone.shape, shared.shape]
    del alone
    rows = {row.shape: (row.holder, row.releasable) for row in scan(namespace, shell=shell) if row.shape in shapes}
    assert rows[shapes[0]] == ("Out[3]", True)
    assert rows[shapes[1]] == ("running test_only_what_the_session_lets_go_of_is_releasable()", False)


# -- what a name starts from ------------------------------------------------------------------------------


def test_no_number_of_names_hides_another_variable() -> None:
    tensor = torch.ones(1000)
    namespace = {"many": [tensor[:1] for _ in range(50)], "same": [tensor] * 50, "late": [[tensor]]}
    assert {root_of(name) for name in names_of(tensor, namespace)} == {"many", "same", "late"}


@pytest.mark.parametrize(
    ("name", "root"),
    [("x", "x"), ("model.fc.weight", "model"), ("batch[0].x", "batch"), ("cfg['a.b']", "cfg"), ("s{...}", "s")],
)
def test_the_root_of_a_name_is_its_variable(name, root) -> None:
    assert root_of(name) == root


def test_names_are_looked_up_in_a_copy_that_the_user_may_change() -> None:
    assert holders.variables({"a": 1}, None) == [("a", 1)]
