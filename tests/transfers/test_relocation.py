"""`--move`: variables go to the device before the cell, each kind as its owner needs it, all of them or none."""

from __future__ import annotations

import collections
import gc
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError

import gpumagic
from gpumagic import simgpu
from gpumagic.errors import GpuMagicError, OptionError
from gpumagic.transfers import move
from gpumagic.transfers.run import DeviceRun
from tests.stages import examples

pytestmark = pytest.mark.usefixtures("two_devices")
THERE = "simgpu:0"


class Pair(NamedTuple):
    inputs: Any
    labels: Any


def relocate(names: list[str], namespace: dict[str, Any], device: str) -> tuple[Any, ...]:
    """Run nothing on a device, with variables that are moved there first, and return the rows of these."""
    run = DeviceRun(device, namespace=namespace, move=names, filename=__file__)
    run.open()
    run.close(None)
    assert run.report is not None
    return run.report.moves


def copied() -> tuple[int, int]:
    crossed = [nbytes for _, source, target, nbytes in simgpu.copies() if source != target]
    return len(crossed), sum(crossed)


def devices(value: Any) -> set[str]:
    if isinstance(value, torch.Tensor):
        return {str(value.device)}
    return set().union(*(devices(each) for each in value))


def move_all(device: str = THERE, *names: str, **namespace: Any) -> tuple[dict[str, Any], Any]:
    """Move every name given, and check that what is told is what the devices copied."""
    simgpu.reset_copies()
    rows = relocate(names or list(namespace), namespace, device)
    assert (sum(row.count for row in rows), sum(row.nbytes for row in rows)) == copied()
    return namespace, rows


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_tensors_name_is_bound_to_its_copy() -> None:
    x = torch.arange(6.0).reshape(2, 3).T
    names, (row,) = move_all(x=x)
    assert names["x"] is not x
    assert x.device.type == "cpu"
    assert str(names["x"].device) == THERE
    assert names["x"].stride() == x.stride()
    assert torch.equal(names["x"].cpu(), x)
    assert (row.name, row.cause, row.source, row.target, row.nbytes) == (
        "x",
        "--move",
        "cpu",
        THERE,
        24,
    )


def test_what_is_there_already_stays_the_object_it_is() -> None:
    x = torch.ones(3, device=THERE)
    batch = [x, 5]
    names, rows = move_all(x=x, batch=batch)
    assert names["x"] is x
    assert names["batch"] is batch
    assert rows == ()


def test_a_module_stays_the_object_it_is_and_takes_its_gradients_along() -> None:
    model, _ = trained()
    names, (row,) = move_all(model=model)
    assert names["model"] is model
    assert devices(model.parameters()) == {THERE}
    assert devices(each.grad for each in model.parameters()) == {THERE}
    assert (row.count, row.nbytes) == (4, 2 * 60)


def test_buffers_and_layers_of_a_module_go_along() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.LSTM(3, 2))
    move_all(model=model)
    assert devices([*model.parameters(), *model.buffers()]) == {THERE}
    model[1](torch.ones(1, 1, 3, device=THERE))


def test_a_tied_weight_stays_tied() -> None:
    model = torch.nn.ModuleList(
        [torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)]
    )
    model[1].weight = model[0].weight
    move_all(model=model)
    assert model[1].weight is model[0].weight


class Prepared(torch.optim.Optimizer):
    """Passes on to another optimizer, as accelerate's do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state


@pytest.mark.parametrize("named", [("model",), ("optimizer",)])
def test_an_optimizer_inside_a_wrapper_follows_too(named: tuple[str, ...]) -> None:
    model, optimizer = trained()
    move_all(THERE, *named, model=model, optimizer=Prepared(optimizer))
    assert {str(state["exp_avg"].device) for state in optimizer.state.values()} == {THERE}
    assert {str(each.device) for group in optimizer.param_groups for each in group["params"]} == {
        THERE
    }


@pytest.mark.parametrize("named", [("model",), ("model", "optimizer"), ("optimizer",)])
def test_an_optimizer_follows_its_parameters_with_its_state(named: tuple[str, ...]) -> None:
    model, optimizer = trained()
    _, rows = move_all(THERE, *named, model=model, optimizer=optimizer)
    (group,) = optimizer.param_groups
    if "model" in named:
        assert [id(each) for each in group["params"]] == [id(each) for each in model.parameters()]
    for parameter in group["params"]:
        assert str(parameter.device) == str(optimizer.state[parameter]["exp_avg"].device) == THERE
        assert (
            optimizer.state[parameter]["step"].device.type == "cpu"
        )  # where torch itself keeps it
    assert len(optimizer.state) == 2
    assert "optimizer" in {row.name for row in rows}


def test_training_goes_on_as_if_nothing_had_been_moved() -> None:
    torch.manual_seed(0)
    stayed, its_optimizer = trained()
    torch.manual_seed(0)
    model, optimizer = trained()
    move_all(THERE, "model", model=model, optimizer=optimizer)
    for each, steps, where in ((stayed, its_optimizer, "cpu"), (model, optimizer, THERE)):
        each(torch.ones(2, 4, device=where)).pow(2).sum().backward()
        steps.step()
    assert torch.allclose(stayed.weight, model.weight.cpu())


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS, torch.optim.Adagrad]
)
def test_every_kind_of_state_follows(kind: type[torch.optim.Optimizer]) -> None:
    model = torch.nn.Linear(4, 3)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(2, 4, device=model.weight.device)).pow(2).mean()
        value.backward()
        return value

    optimizer.step(loss)
    move_all(THERE, "model", model=model, optimizer=optimizer)
    optimizer.step(loss)
    assert devices(model.parameters()) == {THERE}


def test_a_leaf_collects_gradients_on_its_new_device_and_its_optimizer_knows_it() -> None:
    w = torch.ones(3, requires_grad=True)
    w.sum().backward()
    optimizer = torch.optim.SGD([w], lr=0.5)
    names, _ = move_all(THERE, "w", w=w, optimizer=optimizer)
    moved = names["w"]
    assert moved.is_leaf
    assert moved.requires_grad
    assert str(moved.grad.device) == THERE
    optimizer.step()
    assert moved.tolist() == [0.5] * 3


def test_what_a_graph_made_stays_in_the_graph() -> None:
    w = torch.ones(3, requires_grad=True)
    names, _ = move_all(y=w * 2)
    names["y"].sum().backward()
    assert w.grad.tolist() == [2.0] * 3


def test_a_parameter_in_a_list_is_the_modules_own() -> None:
    model, _ = trained()
    names, _ = move_all(model=model, weights=list(model.parameters()))
    assert [id(each) for each in names["weights"]] == [id(each) for each in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, "text"], lambda x: (x, 1), lambda x: {"a": x, "b": None}, lambda x: Pair(x, [x]),
        lambda x: collections.OrderedDict(a=x), lambda x: collections.defaultdict(list, a=[x]),
        lambda x: {"deep": [{"er": (x,)}]}, lambda x: x.max(0), lambda x: collections.deque([x]),
    ],
)  # fmt: skip
def test_containers_are_made_anew_around_what_moved(make: Any) -> None:
    x = torch.ones(2, 3)
    before = make(x)
    names, _ = move_all(batch=before)
    after = names["batch"]
    assert type(after) is type(before)
    assert after is not before
    found: list[Any] = [each for each in gc.get_referents(after) if isinstance(each, torch.Tensor)]
    assert devices(found) <= {THERE}
    assert THERE in str(after)
    assert "simgpu" not in str(before)


def test_two_names_of_one_tensor_or_one_list_stay_one() -> None:
    x = torch.ones(3)
    both = [x]
    names, (row,) = move_all(x=x, y=x, one=both, other=both)
    assert names["x"] is names["y"]
    assert names["one"] is names["other"]
    assert names["one"][0] is names["x"]
    assert row.count == 1


def test_a_view_becomes_a_tensor_of_its_own_as_by_to() -> None:
    x = torch.zeros(4, 4)
    names, _ = move_all(x=x, row=x[1])
    names["x"].fill_(7)
    assert names["row"].tolist() == [0.0] * 4


def test_parts_that_do_not_overlap_cross_alone_and_no_more_of_their_storage() -> None:
    x = torch.zeros(1000)
    _, rows = move_all(a=x[:10], b=x[500:510])
    assert sum(row.nbytes for row in rows) == 80


def test_from_card_to_card_and_back_to_the_host() -> None:
    model, optimizer = trained()
    move_all(THERE, "model", model=model, optimizer=optimizer)
    move_all("simgpu:1", "model", model=model, optimizer=optimizer)
    _, rows = move_all("cpu", "model", model=model, optimizer=optimizer)
    assert {row.direction for row in rows} == {"device-to-host"}
    assert devices(model.parameters()) == {"cpu"}


# ---- In a cell and a block


def test_a_cell_moves_its_variables_first_and_reports_it(bare_shell) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch; x = torch.ones(1000); model = torch.nn.Linear(1000, 2)")
    result = bare_shell.run_cell(
        "%%ondevice simgpu:0 --move model,x -o report\ny = model(x).sum().item()"
    )
    assert result.success
    report = bare_shell.user_ns["report"]
    moved = {(row.name, row.nbytes) for row in report if row.cause == "--move"}
    assert moved == {("model", 8008), ("x", 4000)}
    assert str(bare_shell.user_ns["x"].device) == THERE
    assert report.elsewhere == ()


@pytest.mark.parametrize("line", ["--move modle", "--move 2x", "--move model.weight", "--move lr"])
def test_a_cell_that_cannot_move_does_not_run(bare_shell, line: str) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch; model = torch.nn.Linear(2, 2); lr = 0.1")
    result = bare_shell.run_cell(f"%%ondevice simgpu:0 {line}\nran = True")
    assert isinstance(result.error_in_exec, UsageError)
    assert "ran" not in bare_shell.user_ns
    assert devices(bare_shell.user_ns["model"].parameters()) == {"cpu"}
    assert torch.zeros(1).device.type == "cpu"


def test_an_exported_script_is_told_in_one_line_too(bare_shell) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    result = bare_shell.run_cell(
        "get_ipython().run_cell_magic('ondevice', 'simgpu:0 --move zz', 'ran = True')"
    )
    assert isinstance(result.error_in_exec, UsageError)
    assert "ran" not in bare_shell.user_ns


x = torch.ones(1000)


def test_a_with_block_and_a_decorated_function_move_variables_of_their_module(monkeypatch) -> None:
    monkeypatch.setitem(globals(), "x", torch.ones(1000))
    with gpumagic.ondevice(THERE, move="x") as run:
        assert str(x.device) == THERE
    assert [(row.name, row.cause) for row in run.report] == [("x", "--move")]

    @gpumagic.ondevice("simgpu:1", move=["x"])
    def work() -> str:
        return str(x.device)

    assert work() == "simgpu:1"


def test_a_functions_own_variable_cannot_be_moved_from_outside() -> None:
    mine = torch.ones(3)
    with pytest.raises(OptionError, match=r'write mine = mine.to\("simgpu:0"\)'):
        gpumagic.ondevice(THERE, move="mine")
    assert mine.device.type == "cpu"


# ---- All or nothing


def state(namespace: dict[str, Any]) -> Any:
    """Return all that must not have changed: which objects there are, and where each tensor lies."""
    model, optimizer = namespace["model"], namespace["optimizer"]
    found = [
        *model.parameters(),
        *(each.grad for each in model.parameters()),
        *optimizer.param_groups[0]["params"],
    ]
    found += [value for kept in optimizer.state.values() for value in kept.values()]
    return (
        {name: id(value) for name, value in namespace.items()},
        [(id(each), each.data_ptr(), str(each.device)) for each in found],
        torch.simgpu.memory_allocated(0),
    )


class Graph:
    def to(self, device: str) -> None:
        pytest.fail("nobody knows what it would change")


class Refuses(torch.nn.Linear):
    """As the quantized models of transformers do."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("`.to` is not supported for 4-bit models")


class FailsHalfway(torch.nn.Module):
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise RuntimeError("no such luck")


def cycle() -> list[Any]:
    found: list[Any] = [torch.ones(2)]
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (cycle, "cannot be moved: it holds itself"), (lambda: torch.ones(2, device="meta"), "meta"),
    ],
)  # fmt: skip
def test_if_one_cannot_be_moved_nothing_has_changed(last: Any, said: str) -> None:
    model, optimizer = trained()
    namespace = {
        "model": model,
        "optimizer": optimizer,
        "x": torch.ones(1000),
        "batch": [torch.ones(5)],
        "last": last(),
    }
    gc.collect()
    before = state(namespace)
    with pytest.raises(GpuMagicError, match=said) as caught:
        relocate(["model", "x", "batch", "last"], namespace, THERE)
    assert "\n" not in str(caught.value)
    assert state(namespace) == before


@pytest.mark.parametrize(
    ("last", "said"), [(lambda: Refuses(2, 2), "nothing was moved: .*4-bit models"),
    (FailsHalfway, "model had been moved: no such luck")],
)  # fmt: skip
def test_a_module_that_raises_leaves_the_names_bound_as_they_were(last: Any, said: str) -> None:
    """Those before it have their copies by then, and the error says so."""
    model, optimizer = trained()
    namespace = {"model": model, "optimizer": optimizer, "x": torch.ones(1000), "last": last()}
    before = {name: id(value) for name, value in namespace.items()}
    with pytest.raises(GpuMagicError, match=said) as caught:
        relocate(["model", "x", "last"], namespace, THERE)
    assert caught.value.__context__ is None, "the first error's frames would keep the copies"
    assert {name: id(value) for name, value in namespace.items()} == before
    assert devices([namespace["x"]]) == {"cpu"}


def test_too_much_is_refused_before_anything_is_copied() -> None:
    model, optimizer = trained()
    namespace = {
        "model": model,
        "optimizer": optimizer,
        "x": torch.empty(5 * 2**30, dtype=torch.uint8),
    }
    gc.collect()
    before = state(namespace)
    simgpu.reset_copies()
    with pytest.raises(
        GpuMagicError, match=r"need 5.0 GiB on simgpu:0, which has .* free; nothing was moved"
    ):
        relocate(["model", "x"], namespace, THERE)
    assert state(namespace) == before
    assert simgpu.copies() == []


def test_running_out_all_the_same_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "room", lambda device: None)
    model, optimizer = trained()
    namespace = {
        "model": model,
        "optimizer": optimizer,
        "x": torch.empty(5 * 2**30, dtype=torch.uint8),
    }
    before = state(namespace)
    with pytest.raises(GpuMagicError, match="out of memory"):
        relocate(["model", "x"], namespace, THERE)
    assert state(namespace) == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("modle", "there is no variable 'modle'; did you mean model?"), ("zz", "write names of variables"),
        ("lr", r"'lr' \(float\) holds no tensor"), ("array", "lists, tuples and dicts only"),
        ("empty", r"'empty' \(list\) holds no"), ("graph", r"graph = graph.to\(...\)"),
        ("packed", r"packed = packed.to\(...\)"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_meant_is_said_in_one_line(name: str, said: str) -> None:
    import numpy as np

    namespace = {
        "model": torch.nn.Linear(2, 2),
        "lr": 0.1,
        "array": np.ones(3),
        "empty": [1, "a"],
        "graph": Graph(),
    }
    namespace["packed"] = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(OptionError, match=said):
        relocate(["model", name], namespace, THERE)
    assert devices(namespace["model"].parameters()) == {"cpu"}


def test_moving_to_meta_is_refused_for_it_would_lose_the_values() -> None:
    with pytest.raises(OptionError, match="would lose them"):
        relocate(["x"], {"x": torch.ones(2)}, "meta")


def test_nothing_of_the_move_is_kept_alive() -> None:
    namespace = {"x": torch.ones(1000)}
    gc.collect()
    before = torch.simgpu.memory_allocated(0)
    relocate(["x"], namespace, THERE)
    namespace.clear()
    assert torch.simgpu.memory_allocated(0) == before


trees = st.recursive(
    st.integers(0, 3) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(tree=trees)
@examples(few=10, deep=60)
def test_any_container_keeps_its_shape_its_values_and_its_sharing(tree: Any) -> None:
    """Integers stand for four tensors, of which two are one."""
    base = torch.arange(8.0)
    pool = [base, torch.zeros(3), torch.ones(2, 2), base]

    def planted(value: Any, of: Any) -> Any:
        if isinstance(value, int):
            return of(value)
        if isinstance(value, dict):
            return {key: planted(part, of) for key, part in value.items()}
        return (
            type(value)(planted(part, of) for part in value)
            if isinstance(value, list | tuple)
            else value
        )

    namespace = {"tree": [base, planted(tree, pool.__getitem__)], "base": base}
    relocate(["base", "tree"], namespace, THERE)
    namespace["base"].add_(1)
    base.add_(1)
    assert planted_values(namespace["tree"][1]) == planted(tree, lambda i: pool[i].tolist())


def planted_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert str(value.device) == THERE
        return value.tolist()
    if isinstance(value, dict):
        return {key: planted_values(part) for key, part in value.items()}
    return type(value)(map(planted_values, value)) if isinstance(value, list | tuple) else value
