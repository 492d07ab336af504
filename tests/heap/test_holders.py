"""What keeps tensors that have no name: what no expression reaches, outputs, running functions, modules."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import queue
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.utils.data

from gpumagic.tensors.scan import scan
from tests.heap.makers import (
    Attentive,
    DataLoaderLike,
    Loud,
    awaiting,
    cached_call,
    caused,
    context_variable,
    context_with,
    failed,
    filled,
    generator,
    half_read,
    names_of,
    started,
    thread_local,
    thread_local_of_another,
)

pytestmark = pytest.mark.usefixtures("few_objects", "nothing_left")


HOLDERS = {
    "Attentive odd": lambda t: {"odd": Attentive(t)},
    "Loud loud": lambda t: {"loud": Loud(k=t)},
    "_lru_cache_wrapper c": lambda t: {"c": cached_call(t)},
    "list_iterator it": lambda t: {"it": iter([t])},
    "generator g": lambda t: {"g": started(generator(t))},
    "coroutine co": lambda t: {"co": awaiting(t)},
    "generator each": lambda t: {"each": started(each for each in iter([0, t]))},
    "SimpleQueue q": lambda t: {"q": filled(queue.SimpleQueue(), t)},
    "_tee copies[0]": lambda t: {"copies": half_read(itertools.tee([t]))},
    "accumulate sums": lambda t: {"sums": half_read([itertools.accumulate([t, t])])[0]},
    "map it": lambda t: {"it": map(None, [t])},
    "zip it": lambda t: {"it": zip([t])},
    "_local mine": lambda t: {"mine": thread_local_of_another(t)},
    "_local own": lambda t: {"own": thread_local([t])},
    "Context context": lambda t: {"context": context_with(t)},
    "DataLoaderLike cfg['loader']": lambda t: {"cfg": {"loader": DataLoaderLike(t)}},
}
"""What no expression reaches is said to be inside what it is in."""


def held(shape, namespace, shell=None):
    """Return who keeps the tensors of a shape that no variable reaches, where there, and whether they let go of it."""
    return [
        (row.holder, row.place, row.releasable)
        for row in scan(namespace, shell=shell)
        if row.shape == shape
    ]


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_no_expression_reaches_has_no_name_and_its_holder_is_told(holder) -> None:
    namespace = HOLDERS[holder](torch.ones(3, 1241))
    Attentive.calls = 0
    report = scan(namespace)
    (row,) = [row for row in report if row.shape == (3, 1241)]
    assert (row.name, row.holder) == (None, holder)
    assert row.variable in namespace
    assert row.numbers[0] not in [each.numbers[0] for each in report.leaks()]
    assert Attentive.calls == 0


def test_an_error_in_a_variable_holds_the_variables_of_the_call_that_failed() -> None:
    found = held((3, 1244), {"error": caused(failed(torch.ones(3, 1244)))})
    assert found == [("ValueError error.__cause__", "error.__cause__.<fails()>.local", False)]


def test_a_context_variable_that_nothing_names_keeps_its_value() -> None:
    context_variable([torch.ones(3, 1243)])
    label = "context variable var"
    assert held((3, 1243), {}) == [(label, f"{label}[0]", False)]


# -- what a shell keeps -----------------------------------------------------------------------------------


def shell_with(namespace, hidden):
    """Return what the probe reads of a shell."""
    namespace.update(hidden)
    return SimpleNamespace(user_ns=namespace, user_ns_hidden=dict(hidden))


def told(report):
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
    assert told(scan({}, shell=shell)) == ["_3"]


def test_only_what_the_session_lets_go_of_is_releasable() -> None:
    namespace: dict[str, object] = {"g": started(generator(0))}
    alone, shared = torch.ones(3, 1235), torch.ones(3, 1236)
    shell = shell_with(namespace, {"_oh": {3: [alone], 4: [shared]}})
    shapes = [alone.shape, shared.shape]
    del alone
    rows = {
        row.shape: (row.holder, row.releasable)
        for row in scan(namespace, shell=shell)
        if row.shape in shapes
    }
    assert rows[shapes[0]] == ("Out[3]", True)
    assert rows[shapes[1]] == (
        "running test_only_what_the_session_lets_go_of_is_releasable()",
        False,
    )


# -- what else keeps tensors ------------------------------------------------------------------------------


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
    (tmp_path / "my_notebook_module.py").write_text(
        "import torch\ncache = {'k': torch.ones(3, 1234)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_notebook_module")
    name = "module my_notebook_module"
    assert held((3, 1234), {}) == [(name, f"{name}.cache['k']", False)]
    del sys.modules["my_notebook_module"]


def test_the_loader_of_a_module_is_not_followed_for_it_may_lead_to_all_that_runs(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "my_loaded_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_loaded_module")
    module.__loader__ = module.__spec__.loader = SimpleNamespace(session=torch.ones(3, 1235))
    assert held((3, 1235), {"module": module}) == [(None, None, False)]
    del sys.modules["my_loaded_module"]
