"""What a run changed is put back where that can be known, and said where it cannot."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.notebook import guards
from gpumagic.oom.guard import OomGuard
from gpumagic.oom.rerun import Plan, Rerun, Rollback

pytestmark = pytest.mark.usefixtures("few_objects")


def run(source, namespace):
    """Run some code between a look and the way back; return what could not be put back."""
    rollback = Rollback(namespace, source)
    exec(source, namespace)
    lost = rollback.undo()
    namespace.pop("__builtins__", None)
    return lost.changes


def test_new_names_are_unbound() -> None:
    namespace: dict = {"kept": 1}
    assert run("x = 1\nimport math\ndef f(): pass\nfor i in range(2): pass", namespace) == ()
    assert namespace == {"kept": 1}


@pytest.mark.parametrize("old", [3, "text", None, 2.5, (1, [2])])
def test_a_name_that_was_read_and_replaced_is_bound_as_it_was(old) -> None:
    namespace = {"x": old}
    assert run("x = [x, x]", namespace) == ()
    assert namespace["x"] is old


def test_a_name_bound_by_a_function_is_put_back_if_it_was_a_number() -> None:
    namespace: dict = {}
    exec("count = 3\ndef work():\n    global count\n    count += 1", namespace)
    assert run("work()", namespace) == ()
    assert namespace["count"] == 3


def test_what_was_appended_to_a_list_is_taken_out() -> None:
    namespace = {"a": [1, 2]}
    a = namespace["a"]
    assert run("a.append(3); a += [4]", namespace) == ()
    assert namespace["a"] is a
    assert a == [1, 2]


@pytest.mark.parametrize(
    "source", ["a.pop()", "b.clear()", "b['new'] = 2", "c.remove(1)", "c.add(9)"]
)
def test_what_went_out_of_lists_or_changed_in_dicts_and_sets_is_said(source: str) -> None:
    namespace = {"a": [1, 2], "b": {"k": 1}, "c": {1, 2}}
    assert run(source, namespace) == (f"changes in place of {source[0]}",)


MADE = """
import array, collections, ctypes, functools, io, itertools, random, types
import numpy as np, pandas as pd, torch

class Box:
    def __init__(self, **own): self.__dict__.update(own)
class Slots:
    __slots__ = ("n",)
class Words(list):
    pass
class Point(collections.namedtuple("Point", "x y")):
    pass
def counter():
    n = 0
    def count():
        nonlocal n
        n += 1
    return count
def tally(x, seen=[]):
    seen.append(x)
@functools.lru_cache
def cached(x):
    return x
def numbers():
    yield
    yield
def waiting():
    it = numbers()
    next(it)
    return it
"""
CHANGES_IN_PLACE = {
    "the element of a list": ("[1, 2]", "x[0] = 5"),
    "a list in a list": ("[[1], 2]", "x[0].append(5)"),
    "the value of a dict": ("{'loss': 1.0}", "x['loss'] = 2.0"),
    "a list in a dict": ("{'loss': []}", "x['loss'].append(5)"),
    "the key of a dict": ("{'a': 1, 'b': 2}", "x['c'] = x.pop('a')"),
    "one for another in a set": ("{1, 2}", "x.remove(1), x.add(3)"),
    "a list in a tuple": ("([1], 2)", "x[0].append(5)"),
    "a list in a named tuple": ("Point([1], 2)", "x.x.append(5)"),
    "a deque": ("collections.deque([1])", "x.append(5)"),
    "a defaultdict": ("collections.defaultdict(list)", "x['loss'].append(5)"),
    "an OrderedDict": ("collections.OrderedDict(a=1, b=2)", "x.move_to_end('a')"),
    "a Counter": ("collections.Counter('a')", "x.update('a')"),
    "a ChainMap": ("collections.ChainMap({'a': 1})", "x['a'] = 2"),
    "a UserDict": ("collections.UserDict(a=1)", "x['a'] = 2"),
    "a list of one's own class": ("Words([1])", "x[0] = 2"),
    "the attribute of a list": ("Words([1])", "x.kind = 'verbs'"),
    "bytes": ("bytearray(b'ab')", "x[0] = 5"),
    "an array of Python's": ("array.array('i', [1, 2])", "x[0] = 5"),
    "an array of ctypes": ("(ctypes.c_int * 3)()", "x[0] = 5"),
    "an array": ("np.zeros(9)", "x[3] = 5"),
    "an array of integers": ("np.arange(9)", "x[:] = x[::-1].copy()"),
    "an array of times": ("np.zeros(3, 'datetime64[s]')", "x[0] = '2000-01-01'"),
    "an array of objects": ("np.array([[1], 2], dtype=object)", "x[0].append(5)"),
    "a part of an array": ("np.zeros((4, 4))[:, 1]", "x[0] = 5"),
    "a table": ("pd.DataFrame({'a': [1, 2]})", "x.iloc[0, 0] = 5"),
    "a new column of a table": ("pd.DataFrame({'a': [1, 2]})", "x['b'] = 0"),
    "an attribute": ("Box(n=1)", "x.n = 2"),
    "a new attribute": ("Box(n=1)", "x.m = 2"),
    "a slot": ("Slots()", "x.n = 2"),
    "a list in an attribute": ("Box(seen=[])", "x.seen.append(5)"),
    "an attribute of a namespace": ("types.SimpleNamespace(n=1)", "x.n = 2"),
    "an attribute of a class": ("Box", "x.rate = 0.1"),
    "a variable of a closure": ("counter()", "x()"),
    "a default": ("tally", "x(5)"),
    "a cache": ("cached", "x(5)"),
    "a bound method": ("Box(seen=[]).seen.append", "x(5)"),
    "a partial function": ("functools.partial(Box, n=[])", "x.keywords['n'].append(5)"),
    "an iterator": ("iter([1, 2])", "next(x)"),
    "an iterator over another": ("enumerate(zip([1, 2], [3, 4]))", "next(x)"),
    "a counter": ("itertools.count()", "next(x)"),
    "a generator": ("waiting()", "next(x)"),
    "a text": ("io.StringIO()", "x.write('a')"),
    "a random generator": ("random.Random(0)", "x.random()"),
    "numpy's random generator": ("np.random.default_rng(0)", "x.random()"),
    "torch's random generator": ("torch.Generator()", "torch.rand(1, generator=x)"),
    "the mode of a module": ("torch.nn.Linear(1, 1)", "x.eval()"),
    "the rate of an optimizer": ("torch.optim.SGD([torch.zeros(1)], 0.1)", "x.param_groups[0]['lr'] = 0.2"),
    "a scheduler": ("torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], 0.1), 2)",
                    "x.last_epoch += 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES_IN_PLACE)
def test_what_was_changed_in_place_is_said_of_every_kind_of_container(case) -> None:
    made, change = CHANGES_IN_PLACE[case]
    namespace: dict = {}
    exec(f"{MADE}\nx = {made}", namespace)
    assert "changes in place of x" in run(change, namespace)


@pytest.mark.parametrize("case", CHANGES_IN_PLACE)
def test_what_was_not_changed_is_not_said_to_be(case) -> None:
    namespace: dict = {}
    exec(f"{MADE}\nx = {CHANGES_IN_PLACE[case][0]}", namespace)
    assert run("y = [x, repr(x), dir(x), type(x), id(x)]", namespace) == ()


def test_what_a_table_keeps_of_columns_that_were_read_is_no_change() -> None:
    namespace: dict = {}
    exec(f"{MADE}\nx = pd.DataFrame({{'a': [1, 2], 'b': ['x', 'y']}})", namespace)
    assert run("y = x['a'].sum(), x.b.unique(), x.describe()", namespace) == ()


def test_a_change_that_two_variables_reach_is_said_of_the_first() -> None:
    inner: list[int] = []
    assert run("b['k'].append(1)", {"a": {"k": inner}, "b": {"k": inner}}) == (
        "changes in place of b",
    )
    assert run("a['k'].append(1); b['k'].append(1)", {"a": {"k": inner}, "b": {"k": inner}}) == (
        "changes in place of a",
    )


def test_variables_in_which_a_change_would_not_be_noticed_are_named(tmp_path) -> None:
    namespace: dict = {"file": (tmp_path / "log").open("w"), "n": 1, "unused": object()}
    exec(
        f"{MADE}\nloader = torch.utils.data.DataLoader([1, 2])\nlong = list(range(200_000))",
        namespace,
    )
    with namespace["file"]:
        rollback = Rollback(namespace, "for x in loader: file.write(str(n)); len(long)")
        lost = rollback.undo()
    assert lost.unseen == ("file", "loader", "long")
    assert Rollback(namespace, "n + 1").undo().unseen == ()


def test_random_numbers_come_again() -> None:
    draw = "[random.random(), np.random.rand(), torch.rand(1).item()]"
    namespace = {"random": random, "np": np, "torch": torch}
    eval(draw, namespace)
    rollback = Rollback(namespace, "")
    first = eval(draw, namespace)
    rollback.undo()
    assert eval(draw, namespace) == first
    rollback.undo()
    assert eval(draw, namespace) == first


def test_the_devices_random_numbers_come_again(two_devices) -> None:
    torch.rand(1, device="simgpu:1")
    rollback = Rollback({}, "")
    first = torch.rand(3, device="simgpu:1").tolist()
    rollback.undo()
    assert torch.rand(3, device="simgpu:1").tolist() == first


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop])
def test_steps_of_an_optimizer_are_said(optimizer) -> None:
    net = torch.nn.Linear(4, 4)
    namespace = {"net": net, "opt": optimizer(net.parameters()), "torch": torch}
    step = "net(torch.ones(1, 4)).sum().backward(); opt.step()"
    assert run(step, namespace) == ("changes in place of net", "changes in place of opt"), (
        "its state was not there before"
    )
    assert run(step, namespace) == ("changes in place of net", "changes in place of opt")


def test_steps_of_an_optimizer_that_counts_none_show_in_its_model() -> None:
    net = torch.nn.Linear(4, 4)
    namespace = {"net": net, "opt": torch.optim.SGD(net.parameters(), 0.1), "torch": torch}
    assert run("net(torch.ones(1, 4)).sum().backward(); opt.step()", namespace) == (
        "changes in place of net",
    )


def test_first_gradients_are_taken_away_and_others_said() -> None:
    namespace = {"net": torch.nn.Linear(4, 4), "torch": torch}
    backward = "net(torch.ones(1, 4)).sum().backward()"
    assert run(backward, namespace) == ()
    assert namespace["net"].weight.grad is None
    exec(backward, namespace)
    assert run(backward, namespace) == ("changes in place of net",)


def test_a_tensor_written_to_is_said_under_its_first_name_only() -> None:
    x = torch.zeros(3)
    assert run("x += 1", {"x": x, "same": [x], "other": torch.zeros(1)}) == (
        "changes in place of x",
    )


def test_nothing_on_a_device_is_kept_alive(two_devices) -> None:
    gc.collect()
    namespace = {"x": torch.zeros(3, device="simgpu:0"), "box": [torch.zeros(3, device="simgpu:0")]}
    watch = weakref.ref(namespace["x"]), weakref.ref(namespace["box"][0])
    rollback = Rollback(namespace, "x = x * 2\nbox = box + box")
    namespace["x"], namespace["box"] = 1, 2
    assert [each() for each in watch] == [None, None]
    assert sorted(rollback.undo().changes) == ["the new value of box", "the new value of x"]


def test_a_device_tensor_that_lives_on_elsewhere_gets_its_name_back(two_devices) -> None:
    x = torch.zeros(3, device="simgpu:0")
    namespace = {"x": x}
    assert run("x = x * 2", namespace) == ()
    assert namespace["x"] is x


def test_what_the_run_makes_anew_is_let_go_if_it_occupies_a_device(two_devices) -> None:
    namespace = {"x": torch.zeros(3, device="simgpu:0"), "y": torch.zeros(3), "torch": torch}
    assert run("x = torch.ones(9, device='simgpu:0'); y = torch.ones(9)", namespace) == ()
    assert "x" not in namespace
    assert namespace["y"].shape == (9,)


def test_a_deleted_name_is_bound_again_or_said(two_devices) -> None:
    namespace = {"x": [1], "y": torch.zeros(3, device="simgpu:0")}
    assert run("del x, y", namespace) == ("the deletion of y",)
    assert namespace == {"x": [1]}


def test_the_second_way_back_is_as_good_as_the_first() -> None:
    namespace: dict = {"n": 1, "a": []}
    rollback = Rollback(namespace, "n = n + 1\na.append(n)\nnew = n")
    for _ in range(2):
        exec("n = n + 1\na.append(n)\nnew = n", namespace)
        assert rollback.undo().changes == () or "__builtins__" in namespace
        assert (namespace["n"], namespace["a"], "new" in namespace) == (1, [], False)


@pytest.mark.parametrize("times", range(1, 9))
def test_a_value_made_anew_at_the_address_of_the_old_one_is_not_taken_for_it(
    two_devices, times
) -> None:
    """CPython gives the address of a freed object to the next one: after an even number of times it is the same."""
    namespace = {
        "x": torch.zeros(3, device="simgpu:0"),
        "box": [torch.zeros(3, device="simgpu:0")],
        "times": times,
    }
    source = "for _ in range(times):\n    x = x + 1\n    box = [each + 1 for each in box]\ndel _"
    assert sorted(run(source, namespace)) == ["the new value of box", "the new value of x"]


def tried(size: int, limit: int) -> list[int]:
    """Return the values with which code runs that fits up to a limit."""
    runs: list[int] = []

    def work(n: int) -> None:
        runs.append(n)
        if n > limit:
            raise MemoryError

    arguments: dict[str, object] = {"n": size}
    rerun = Rerun(Plan(shrink="n"), OomGuard(namespace={}), arguments, function=work)
    rerun.begin("")
    guards.run_guarded(rerun, lambda _: work(**arguments), "")
    return runs


@given(st.integers(1, 2**10), st.integers(0, 2**11))
def test_halving_stops_at_the_first_that_fits(size: int, limit: int) -> None:
    runs = tried(size, limit)
    assert runs == [size >> each for each in range(len(runs))]
    assert all(each > limit for each in runs[:-1])
    assert runs[-1] <= limit or runs[-1] == 1
