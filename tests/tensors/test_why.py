"""Why a tensor is still there: every holder, the way from each, and the line that makes it let go."""

from __future__ import annotations

import collections
import dataclasses
import gc
import sys
import sysconfig
import types
import weakref
from types import SimpleNamespace

import pytest
import torch

from gpumagic.errors import OptionError
from gpumagic.tensors import why as why_
from gpumagic.tensors.scan import scan
from tests.stages import sample

pytestmark = pytest.mark.usefixtures("few_objects")


def why(name, namespace, shell=None):
    """Return the report without the holders that the tests are: running functions."""
    report = why_.find_holders(name, namespace, shell)
    return dataclasses.replace(
        report, ways=tuple(way for way in report if not way.root.startswith("running "))
    )


def commands(report):
    """Return the line for each holder, by the holder."""
    return {way.root: way.command for way in report}


class Net(torch.nn.Module):
    """A module that keeps a tensor on the side."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.cache = {}


Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024  the form found in notebooks


def test_the_way_to_a_parameter_is_told_step_by_step() -> None:
    (way,) = why("model.fc.weight", {"model": Net()})
    assert way.expression == "model.fc.weight"
    assert way.steps == (("model", "Net"), (".fc", "Linear"), (".weight", "Parameter"))
    assert way.command == "del model"


def test_every_variable_that_leads_to_it_is_a_holder_the_nearest_first() -> None:
    shared = [torch.ones(3)]
    namespace = {"deep": {"a": {"b": shared}}, "one": shared, "two": shared, "x": shared[0]}
    report = why("x", namespace)
    assert [way.root for way in report] == ["x", "one", "two", "deep"]
    assert report[3].expression == "deep['a']['b'][0]"


def test_a_view_keeps_the_whole_storage() -> None:
    whole = torch.ones(100)
    namespace = {"whole": whole, "part": whole[:1]}
    assert commands(why("whole", namespace)) == {"whole": "del whole", "part": "del part"}
    assert commands(why("part", namespace)) == {"whole": "del whole", "part": "del part"}


MAKERS = {
    "del x": lambda t: ("x", t),
    "del x[0]": lambda t: ("x", [t]),
    "del x['k']": lambda t: ("x", {"k": t}),
    "del x['k'][1]": lambda t: ("x", {"k": [0, t]}),
    "del x.best": lambda t: ("x", Run(t)),
    "del x[0].best": lambda t: ("x", [Run(t)]),
    "del x['pair']": lambda t: ("x", {"pair": (0, (t,))}),
    "del x ": lambda t: ("x", (t,)),
    "del x  ": lambda t: ("x", Pair(0, t)),
    "del x   ": lambda t: ("x", {t}),
    "del x['set']": lambda t: ("x", {"set": {t}}),
    "del x[(1, 2)]": lambda t: ("x", {(1, 2): t}),
    "del x    ": lambda t: ("x", {object(): t}),
    "del globals()['a b']['<unk>']": lambda t: ("a b", {"<unk>": t}),
}


class Run:
    """An object of a class of the user's."""

    def __init__(self, best):
        self.best = best


@pytest.mark.parametrize("line", sample(MAKERS, 2))
def test_the_line_given_is_code_that_frees_it(line) -> None:
    namespace = dict([MAKERS[line](torch.ones(3))])
    (row,) = [row for row in scan(namespace) if row.name]
    (way,) = why(row.name, namespace)
    assert way.command == line.strip()
    exec(way.command, namespace)
    gc.collect()
    assert not [row for row in scan(namespace) if row.name]


def test_a_module_that_its_own_class_keeps_is_freed_by_a_collection() -> None:
    gc.freeze()  # pytest's hooks, which are suspended meanwhile and lead to all tests
    linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(7, 1))
    namespace, weak = {"linear": linear}, weakref.ref(linear)
    del linear
    report = why("linear.bias", namespace)
    assert report.lines() == ("del linear; import gc; gc.collect()",)
    exec(report.lines()[0], namespace)
    assert weak() is None


def test_the_state_of_an_optimizer_is_freed_with_all_that_belongs_to_its_parameter() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.fc(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    namespace = {"model": model, "opt": optimizer, "first": [model.fc.weight]}
    (way,) = why("opt.state[model.fc.weight]['momentum_buffer']", namespace)
    assert [text for text, _ in way.steps] == [
        "opt",
        ".state[model.fc.weight]",
        "['momentum_buffer']",
    ]
    before = scan(namespace)
    exec(way.command, namespace)
    assert {row.kind for row in scan(namespace).since(before)} == {"optimizer state"}


def test_a_gradient_is_kept_by_its_leaf_and_freed_through_it() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.sum().backward()
    namespace = {"weight": weight, "all": [weight]}
    report = why("weight.grad", namespace)
    assert report.tensor.kind == "gradient"
    assert commands(report) == {"weight": "weight.grad = None", "all": "all[0].grad = None"}


def test_gradients_that_are_views_of_one_storage_have_a_line_each() -> None:
    """As adjoint methods make them, for all parameters at once: one line alone frees nothing."""
    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    flat = torch.ones(6)
    weight.grad, bias.grad = flat[:4].view(2, 2), flat[4:]
    del flat
    namespace = {"weight": weight, "bias": bias}
    (row,) = [row for row in scan(namespace) if row.kind == "gradient" and row.name]
    assert set(row.names) == {"weight.grad", "bias.grad"}
    for name in ("weight.grad", "bias.grad"):
        assert sorted(commands(why(name, namespace)).values()) == [
            "bias.grad = None",
            "weight.grad = None",
        ]


def test_a_name_may_have_lost_its_quotes_on_a_magic_s_line() -> None:
    namespace = {"cfg": {"a key": [torch.ones(3)]}}
    assert why("cfg[a key][0]", namespace).tensor.name == "cfg['a key'][0]"


def test_an_output_that_shares_a_container_is_a_holder_too_and_released_as_one() -> None:
    shared = {"batch": [torch.ones(3)]}
    namespace: dict[str, object] = {"near": shared["batch"], "_oh": {7: shared}}
    hook = SimpleNamespace(_="", __="", ___="")
    shell = SimpleNamespace(
        user_ns=namespace, user_ns_hidden={"_oh": namespace["_oh"]}, displayhook=hook, last_execution_result=None
    )  # fmt: skip
    del shared
    report = why("near[0]", namespace, shell)
    assert commands(report) == {"near": "del near[0]", "Out[7]": "%devices --free"}
    assert report[1].expression == "Out[7]['batch'][0]"


@pytest.mark.parametrize(
    "name", sample(["one[0]", "two[0]", "deep['a'][0]", "deep[a][0]", "run.best[0]"], 2)
)
def test_any_way_of_writing_it_will_do(name) -> None:
    shared = [torch.ones(3)]
    namespace = {"one": shared, "two": shared, "deep": {"a": shared}, "run": Run(shared)}
    assert why(name, namespace).tensor.shape == (3,)


def test_a_number_from_a_report_stands_for_its_storage() -> None:
    namespace = {"x": torch.ones(3)}
    (row,) = [row for row in scan(namespace) if row.name == "x"]
    assert why(str(row.numbers[0]), namespace).tensor.name == "x"
    del namespace["x"]
    with pytest.raises(OptionError, match="no live tensor has the number"):
        why(str(row.numbers[0]), namespace)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modle.fc.wieght", "did you mean model.fc.weight"),
        (
            "model",
            "'model' is no tensor but leads to model.fc.weight, model.fc.bias; name one of them",
        ),
        ("zzz", "%devices lists those there are"),
    ],
)
def test_an_unknown_name_is_one_line_that_says_what_is_near(name, message) -> None:
    with pytest.raises(OptionError) as caught:
        why(name, {"model": Net()})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_asking_keeps_nothing() -> None:
    namespace = {"cfg": {"k": [torch.ones(3)]}}
    watch = weakref.ref(namespace["cfg"]["k"][0])
    report = why("cfg['k'][0]", namespace)
    namespace.clear()
    assert watch() is None
    assert report.to_pandas()["root"].tolist() == ["cfg"]


def test_many_references_are_followed_only_so_far(monkeypatch) -> None:
    monkeypatch.setattr("gpumagic.heap.graph.MAX_STEPS_OF_ALL", 10)
    namespace = {"x": torch.ones(3), "many": [[number] for number in range(100)]}
    assert "there may be more holders" in why("x", namespace).notes[0]


def test_the_shell_is_no_holder() -> None:
    tensor = torch.ones(3)
    shell = SimpleNamespace(
        user_ns={}, user_ns_hidden={}, secret=tensor, displayhook=None, last_execution_result=None
    )  # fmt: skip
    shell.user_ns.update(ip=shell, x=tensor)
    assert [way.root for way in why("x", shell.user_ns, shell)] == ["x"]


def test_a_running_function_is_a_holder_that_no_line_frees() -> None:
    held = [torch.ones(3)]
    report = why_.find_holders("x", {"x": held[0]})
    name = test_a_running_function_is_a_holder_that_no_line_frees.__name__
    (way,) = [way for way in report if way.root == f"running {name}()"]
    assert (way.command, way.steps[1:]) == (None, ((".held", "list"), ("[0]", "Tensor")))
    assert f"It also has to go from running {name}()" in " ".join(str(report).split())


def test_a_closure_and_a_generator_are_ways_too() -> None:
    def keeper():
        hidden = torch.ones(5)
        return lambda: hidden

    def stream():
        hidden = torch.ones(7)
        yield hidden.sum().item()

    namespace = {"step": keeper(), "gen": stream()}
    next(namespace["gen"])
    found = {row.shape: row.name or row.place for row in scan(namespace) if row.is_reached()}
    assert commands(why(found[5,], namespace)) == {"step": "del step"}
    assert commands(why(found[7,], namespace)) == {"gen": "del gen"}


def test_an_autograd_graph_is_a_holder_with_the_line_that_frees_it() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    namespace = {"x": torch.ones(3), "weight": weight}
    del weight
    namespace["history"] = [(namespace["weight"] * namespace["x"]).sum() for _ in range(3)]
    report = why("x", namespace)
    assert [way.expression for way in report.ways] == ["x", "history[0].grad_fn"]
    assert report.lines() == ("del x; del history",)
    x = weakref.ref(namespace["x"])
    exec(report.lines()[0], namespace)
    assert x() is None


def test_what_only_the_last_error_keeps_is_not_promised_of_a_line_that_leaves_it(
    bare_shell,
) -> None:
    gc.freeze()  # pytest's hooks, which are suspended meanwhile and lead to all tests
    bare_shell.run_cell(
        "import torch\nx = torch.ones(100)\ndef fails():\n    own = torch.ones(300)\n    1 / 0"
    )
    bare_shell.run_cell("fails()")
    report = why("x", bare_shell.user_ns, bare_shell)
    assert (report.lines(), report.frees) == (("del x",), 400)


def test_the_frames_of_a_large_program_do_not_hide_the_notebook_s_own_holders(monkeypatch) -> None:
    """What is found there has steps of its own, after those of variables and outputs."""
    kept = torch.ones(3)
    program = [[[number]] for number in range(900)]  # a local of a running function: this one
    monkeypatch.setattr("gpumagic.heap.graph.MAX_STEPS_OF_ALL", 200)
    namespace: dict[str, object] = {"model": {"fc": {"weight": kept}}, "_oh": {4: [kept]}}
    shell = SimpleNamespace(
        user_ns=namespace,
        user_ns_hidden={"_oh": namespace["_oh"]},
        displayhook=None,
        last_execution_result=None,
    )
    report = why_.find_holders("model['fc']['weight']", namespace, shell)
    assert {"model", "Out[4]"} <= {way.root for way in report}
    assert any("only the first 200 references" in note for note in report.notes)
    assert len(program) == 900


def test_a_long_list_does_not_hide_what_is_beside_it(monkeypatch) -> None:
    monkeypatch.setattr("gpumagic.heap.graph.MAX_STEPS_OF_ALL", 3_000)
    namespace = {"records": [[[number]] for number in range(5_000)], "model": Net()}
    assert commands(why("model.fc.weight", namespace)) == {"model": "del model"}


def test_what_a_class_of_an_installed_library_keeps_in_a_list_has_to_go_from_there_too(
    monkeypatch,
) -> None:
    """snntorch's neurons are in `SpikingNeuron.instances`."""
    library = types.ModuleType("some_library")
    library.__file__ = f"{sysconfig.get_path('purelib')}/some_library.py"
    monkeypatch.setitem(sys.modules, "some_library", library)
    library.Module = torch.nn.Module
    exec(
        "class Neuron(Module):\n    instances = []\n    def __init__(self):\n        super().__init__()\n"
        "        self.instances.append(self)",
        vars(library),
    )
    neuron = library.Neuron()
    neuron.register_buffer("mem", torch.ones(300))
    report = why("mem", {"neuron": neuron, "mem": neuron.mem})
    assert commands(report) == {
        "mem": "del mem",
        "neuron": "del neuron",
        "module some_library": None,
    }
    assert report.frees is None


def test_a_node_of_a_graph_that_somebody_keeps_is_a_holder_of_what_it_saved() -> None:
    """Libraries that prune or draw a model keep the `grad_fn` of its outputs, not the outputs."""
    given = torch.ones(4, 8)
    kept = {"node": torch.nn.Linear(8, 2)(given).grad_fn}
    report = why("given", {"given": given, "kept": kept})
    assert commands(report) == {"given": "del given", "kept": "del kept"}
    assert report[1].steps[-1] == ("['node']", "AddmmBackward0")
