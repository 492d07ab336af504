"""The live tensors of a process as rows: every layout, true bytes, kinds, and no trace of having looked."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from gpumagic._compat import torch_private
from gpumagic.heap import storages
from gpumagic.tensors import scan as scans
from gpumagic.tensors.scan import scan
from tests.looked_up import lose
from tests.stages import examples

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("few_objects")]


def row_of(name, namespace, **options):
    """Return the one row that carries a name."""
    (row,) = [row for row in scan(namespace, **options) if name in row.names]
    return row


def live_tensors():
    """Return how many tensors the gc sees."""
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


# -- what must not crash it -------------------------------------------------------------------------------


class Refuses(torch.Tensor):
    """A tensor whose `__torch_function__` always fails."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("not even metadata")


class Wrapper(torch.Tensor):
    """A tensor without a storage of its own, over an inner one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("no operator")


class FailsAtItsSizes(torch.Tensor):
    """A tensor that answers for its own sizes, and fails at it."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(
            cls, (2, 2), dispatch_sizes_strides_policy="sizes"
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("no sizes")


def quiet(make):
    """Return what a maker makes, without torch's warnings about prototypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def emptied():
    """Return a tensor whose storage was given back, as FSDP does between uses."""
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake():
    """Return a fake tensor that claims to be on a GPU."""
    with FakeTensorMode():
        return torch.ones(40_000, 40_000, device="cuda")


def ragged(layout):
    """Return a nested tensor of 5 elements."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def compressed(make, *block):
    """Return a compressed sparse identity of parts that share their storages with nothing."""
    return make(torch.arange(4), torch.arange(3), torch.ones(3, *block))


INT64 = 8
MATRIX = {
    "dense": (lambda: torch.ones(10), 40, None),
    "0-dim": (lambda: torch.tensor(1.0), 4, None),
    "empty": (lambda: torch.empty(0), 0, None),
    "meta": (lambda: torch.ones(1000, device="meta"), 0, "meta: occupies nothing"),
    "fake": (fake, 0, "fake: occupies nothing"),
    "sparse COO": (lambda: torch.eye(3).to_sparse(), 3 * 4 + 2 * 3 * INT64, "sparse coo"),
    "sparse CSR": (
        lambda: compressed(torch.sparse_csr_tensor),
        3 * 4 + (4 + 3) * INT64,
        "sparse csr",
    ),
    "sparse CSC": (
        lambda: compressed(torch.sparse_csc_tensor),
        3 * 4 + (4 + 3) * INT64,
        "sparse csc",
    ),
    "sparse BSR": (
        lambda: compressed(torch.sparse_bsr_tensor, 2, 2),
        3 * 4 * 4 + (4 + 3) * INT64,
        "sparse bsr",
    ),
    "mkldnn": (
        lambda: torch.ones(3, 3).to_mkldnn(),
        None,
        "layout torch._mkldnn does not tell its size",
    ),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), 3, None),
    "jagged nested": (
        lambda: ragged(torch.jagged),
        0,
        "a wrapper: its parts have rows of their own",
    ),
    "strided nested": (lambda: ragged(torch.strided), 20, None),
    "uninitialised": (lambda: torch.nn.LazyLinear(3).weight, 0, None),
    "resized to nothing": (emptied, 0, "its storage was emptied"),
    "raising subclass": (lambda: torch.ones(10).as_subclass(Refuses), 40, None),
    "wrapper subclass": (
        lambda: Wrapper(torch.ones(10)),
        0,
        "a wrapper: its parts have rows of their own",
    ),
    "raising sizes": (FailsAtItsSizes, 0, "a wrapper: its parts have rows of their own"),
    "copy on write": (lambda: torch._lazy_clone(torch.ones(10)), 40, None),
    "inference": (lambda: torch.inference_mode()(torch.ones)(10), 40, None),
    "conjugate": (lambda: torch.ones(4, dtype=torch.complex64).conj(), 32, None),
}


@pytest.mark.parametrize("case", MATRIX)
def test_every_layout_is_a_row_with_its_true_bytes_or_says_why_not(case) -> None:
    make, nbytes, note = MATRIX[case]
    namespace = {"it": quiet(make)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = row_of("it", namespace)
    assert (row.nbytes, row.note) == (nbytes, note)


def test_a_wrapper_s_parts_are_named_below_it() -> None:
    nested = quiet(lambda: ragged(torch.jagged))
    assert row_of("nested._values", {"nested": nested}).nbytes == 20
    assert row_of("wrapped.inner", {"wrapped": Wrapper(torch.ones(10))}).nbytes == 40


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch was built without torch.distributed"
)
@pytest.mark.filterwarnings("ignore")
def test_a_distributed_tensor_is_its_local_part() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        spread = distribute_tensor(torch.ones(100), init_device_mesh("cpu", (1,)), [Shard(0)])
        row = row_of("spread", {"spread": spread})
        assert row.nbytes == 400
        assert row.names == ("spread", "spread._local_tensor")
    finally:
        torch.distributed.destroy_process_group()


def test_a_tensor_inside_vmap_is_of_unknown_size() -> None:
    seen = []

    def look(x):
        seen.append(row_of("x", {"x": x}))
        return x

    torch.vmap(look)(torch.ones(3, 4))
    assert [row.nbytes for row in seen] == [None]


class RaisesOnClass:
    """An unbound proxy: asking for its class fails."""

    @property
    def __class__(self):
        raise RuntimeError("working outside of a context")


class Lazy:
    """A lazy object: asking for its class evaluates it."""

    evaluated = 0

    @property
    def __class__(self):
        Lazy.evaluated += 1
        return torch.Tensor

    def __getattr__(self, name):
        Lazy.evaluated += 1
        return torch.ones(1)

    def __len__(self):
        Lazy.evaluated += 1
        return 1


def test_dead_proxies_and_lazy_objects_stay_as_they_are() -> None:
    class Target:
        pass

    target = Target()
    dead = weakref.proxy(target)
    del target
    namespace = {
        "dead": dead,
        "raises": RaisesOnClass(),
        "lazy": Lazy(),
        "x": torch.ones(3),
        "many": [Lazy(), dead],
    }
    Lazy.evaluated = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = scan(namespace)
    assert Lazy.evaluated == 0
    assert "x" in [row.name for row in report]


def test_no_mode_of_the_user_sees_what_is_read() -> None:
    calls = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    namespace = {"x": torch.ones(10)[:3], "s": torch.eye(3).to_sparse()}
    with Watch():
        scan(namespace)
    assert calls == []


# -- bytes ------------------------------------------------------------------------------------------------


def test_views_are_folded_under_their_storage() -> None:
    base = torch.ones(100, 100)
    row = row_of(
        "base", {"base": base, "top": base[:10], "turned": base.t(), "bits": base.view(torch.int32)}
    )
    assert (row.nbytes, row.views, row.note) == (40_000, 3, None)
    assert set(row.names) == {"base", "top", "turned", "bits"}


@pytest.mark.parametrize(
    "make", [lambda big: big[:1], lambda big: big[:1].detach(), lambda big: big.data[:1]]
)
def test_a_small_view_that_keeps_a_large_storage_is_flagged(make) -> None:
    small = make(torch.ones(1000, 1000))
    row = row_of("small", {"small": small})
    assert (row.nbytes, row.viewed_nbytes, row.shape) == (4_000_000, 4_000, (1, 1000))
    assert row.note == "a 3.9 KiB view keeps a 3.8 MiB storage alive; .clone() it"


def test_a_strided_view_looks_at_its_elements_only() -> None:
    column = torch.ones(1000, 1000)[:, 0]
    assert row_of("column", {"column": column}).viewed_nbytes == 4_000


def test_views_that_cover_the_storage_together_are_not_flagged() -> None:
    left, right = torch.ones(1000).chunk(2)
    row = row_of("left", {"left": left, "right": right})
    assert (row.viewed_nbytes, row.note) == (4_000, None)


def test_an_expanded_scalar_costs_its_scalar() -> None:
    row = row_of("wide", {"wide": torch.zeros(1).expand(1000, 1000)})
    assert (row.nbytes, row.shape, row.note) == (4, (1000, 1000), None)


def test_arrays_of_numpy_seen_through_two_storages_count_once() -> None:
    array = np.ones(100, dtype=np.float32)
    namespace = {
        "whole": torch.from_numpy(array),
        "again": torch.from_numpy(array),
        "half": torch.from_numpy(array[50:]),
    }
    row = row_of("whole", namespace)
    assert (row.nbytes, set(row.names), row.views) == (400, {"whole", "again", "half"}, 2)


def test_overlapping_arrays_count_their_union() -> None:
    array = np.ones(100, dtype=np.uint8)
    namespace = {
        "low": torch.from_numpy(array[:60]),
        "high": torch.from_numpy(array[40:]),
        "inner": torch.from_numpy(array[:5]),
    }
    assert row_of("low", namespace).nbytes == 100
    assert row_of("high", namespace) == row_of("inner", namespace) == row_of("low", namespace)


def test_a_sparse_tensor_shares_its_row_with_the_values_it_was_made_of() -> None:
    values = torch.ones(3)
    sparse = torch.sparse_coo_tensor(torch.arange(3)[None], values, (3,))
    row = row_of("sparse", {"sparse": sparse, "values": values})
    assert set(row.names) == {"sparse", "values"}
    assert row.nbytes == 3 * 4 + 3 * INT64


def test_empty_tensors_without_an_address_stay_apart() -> None:
    namespace = {"one": torch.empty(0), "two": torch.empty(0), "m": torch.ones(5, device="meta")}
    assert len({row_of(name, namespace).names for name in namespace}) == 3


# -- kinds ------------------------------------------------------------------------------------------------


def trained(device="cpu"):
    """Return a model, its optimizer and its loss after one step."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.ones(2, 8, device=device)).sum()
    loss.backward()
    optimizer.step()
    return model, optimizer, loss


@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_training_step_leaves_is_told_apart() -> None:
    model, optimizer, loss = trained()
    kinds = {
        row.name: row.kind
        for row in scan({"model": model, "opt": optimizer, "loss": loss, "x": torch.ones(3)})
    }
    assert kinds["model[0].weight"] == "parameter"
    assert kinds["model[1].running_mean"] == "buffer"
    assert kinds["model[0].weight.grad"] == "gradient"
    assert kinds["opt.state[model[0].weight]['exp_avg']"] == "optimizer state"
    assert kinds["loss"] == "activation"
    assert kinds["x"] == "plain"


@pytest.mark.usefixtures("nothing_frozen")
def test_kinds_do_not_depend_on_names() -> None:
    keep = trained()
    shapes = {(row.kind, row.shape) for row in scan({}) if row.name is None}
    assert {
        ("parameter", (4, 8)),
        ("gradient", (4, 8)),
        ("optimizer state", (4, 8)),
        ("buffer", (4,)),
    } <= shapes
    assert keep


# -- no trace ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_frozen")
def test_gradients_are_listed_without_becoming_objects_and_two_reports_agree() -> None:
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    before = live_tensors()
    first = scan({"model": model})
    assert live_tensors() == before
    assert "model.weight.grad" in [row.name for row in first]
    assert scan({"model": model}) == first
    assert model.weight.grad is not None  # now Python sees it
    assert live_tensors() == before + 1
    assert scan({"model": model}) == first


def test_a_torch_that_cannot_show_unseen_gradients_says_so(monkeypatch) -> None:
    model, _, _ = trained()
    lose(monkeypatch, torch_private.INTERPRET_GRAPH)
    report = scan({"model": model})
    assert any("gradients" in note for note in report.notes)
    assert all(
        row.kind != "gradient" for row in report if row.name and row.name.startswith("model")
    )


def test_no_unpack_hook_fires() -> None:
    fired = []
    with saved_tensors_hooks(lambda x: x, lambda x: fired.append(x) or x):
        weight = Parameter(torch.ones(10))
        loss = (weight * weight).sum()
    assert row_of("loss", {"loss": loss, "weight": weight}).kind == "activation"
    assert fired == []


def test_what_has_expired_is_forgotten_before_the_heap_is_read(monkeypatch) -> None:
    """Torch before 2.9 shows an expired storage's object while its record is kept; to read it is a crash."""
    scan({"x": torch.ones(3)})
    expired, read = [], gc.get_objects
    is_expired = torch.UntypedStorage._expired

    def reading():
        expired.extend(filter(is_expired, storages._storages))
        return read()

    monkeypatch.setattr(gc, "get_objects", reading)
    scan({})
    assert expired == []


def test_garbage_that_awaits_the_gc_is_counted_not_collected() -> None:
    many = [torch.ones(1) for _ in range(2000)]
    cycle: list[object] = [torch.ones(7, 11, 13)]
    cycle.append(cycle)
    del cycle
    report = scan({"many": many})
    assert (7, 11, 13) in [row.shape for row in report]
    assert gc.isenabled()


def test_no_collection_sets_in_meanwhile(monkeypatch) -> None:
    enabled = []
    monkeypatch.setattr(
        "gpumagic.tensors.scan.kinds_of", lambda owners: enabled.append(gc.isenabled()) or {}
    )
    scan({})
    assert (enabled, gc.isenabled()) == ([False], True)


def test_no_tensor_lives_longer_for_having_been_listed() -> None:
    keep = [torch.ones(10) for _ in range(10)]
    watchers = [weakref.ref(tensor) for tensor in keep]
    report = scan({"keep": keep})
    del keep
    assert [watch() for watch in watchers] == [None] * 10
    assert len(report) >= 10


@pytest.mark.parametrize("broken", ["group_by_memory", "kinds_of", "RowBuilder"])
def test_its_own_failure_keeps_no_tensor(monkeypatch, broken) -> None:
    def fail(*_args, **_options):
        raise ZeroDivisionError

    monkeypatch.setattr(f"gpumagic.tensors.scan.{broken}", fail)
    tensor = torch.ones(10)
    watch = weakref.ref(tensor)
    namespace = {"tensor": tensor, "list": [tensor]}
    with pytest.raises(ZeroDivisionError) as caught:
        scan(namespace)
    del tensor
    namespace.clear()
    assert caught.value.__traceback__ is not None  # the traceback lives
    assert watch() is None


def test_the_few_objects_that_python_312_begins_with_frozen_are_no_note(monkeypatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    assert not any("gc.freeze()" in note for note in scan({"x": torch.ones(3)}).notes)


def test_a_name_that_is_frozen_away_is_found_through_the_namespace() -> None:
    """And so is what it is for, from the modules and optimizers that the names lead to."""
    net = torch.nn.BatchNorm1d(3)
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    opt.step()
    gc.freeze()
    report = scan({"frozen": torch.ones(123), "net": net, "opt": opt})
    kinds = {row.name: row.kind for row in report}
    assert kinds["frozen"] == "plain"
    assert kinds["net.running_mean"] == "buffer"
    assert kinds["opt.state[net.weight]['exp_avg']"] == "optimizer state"
    assert any("gc.freeze()" in note for note in report.notes)


def test_without_torch_the_report_is_empty_and_says_so() -> None:
    code = (
        "import sys\nfrom gpumagic.tensors.scan import scan\nreport = scan({})\n"
        "print(len(report), report.notes, 'torch' in sys.modules, str(report).splitlines()[0])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.strip() == "0 ('torch is not imported: no tensors',) False No live tensors"


# -- what is asked for ------------------------------------------------------------------------------------


def test_only_the_devices_asked_for_are_listed_largest_first() -> None:
    namespace = {"b": torch.ones(1000), "a": torch.ones(10), "m": torch.ones(1, device="meta")}
    assert {row.device for row in scan(namespace, devices=["meta"])} == {"meta"}
    assert {row.device for row in scan(namespace, devices=["meta"]).by_device} == {"meta"}
    sizes = [row.nbytes for row in scan(namespace)]
    assert sizes == sorted(sizes, reverse=True)


def test_unknown_sizes_are_counted_in_a_note() -> None:
    report = scan({"opaque": quiet(lambda: torch.ones(3, 3).to_mkldnn())})
    assert "storages of unknown size, in no sum: 1" in report.notes


def test_the_sums_are_those_of_the_rows() -> None:
    report = scan({"a": torch.ones(1000), "b": [torch.ones(10)]})
    (cpu,) = [row for row in report.by_device if row.device == "cpu"]
    rows = [row for row in report if row.device == "cpu"]
    assert cpu.named == sum(row.nbytes or 0 for row in rows if row.is_reached())
    assert cpu.held + (cpu.graph or 0) == sum(
        row.nbytes or 0 for row in rows if not row.is_reached()
    )
    assert (cpu.allocated, cpu.unexplained, cpu.cached) == (None, None, None)
    assert (cpu.storages, cpu.tensors) == (len(rows), sum(row.views + 1 for row in rows))


# -- against an allocator ---------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(0, 1), st.integers(0, 2000)),
        st.tuples(st.just("view"), st.integers(0, 30), st.integers(1, 50)),
        st.tuples(st.just("alias"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("list"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("dict"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("hide"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("display"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 30), st.integers(1, 500)),
        st.tuples(st.just("operate"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("delete"), st.integers(0, 30), st.just(0)),
    ),
    max_size=30,
)


def failure(value, size):
    """Return the error of a call that failed with a tensor of its own and one of the caller's in hand."""

    def fails(given):
        local = torch.ones(size, device="simgpu:0")
        raise ValueError(local.shape, given)

    try:
        fails(value)
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next
        return error


def as_kept_by_a_shell(namespace, hidden):
    """Return a shell that keeps hidden dicts as outputs, and errors as the results of cells that failed."""
    outputs = {key: value for each in hidden if type(each) is dict for key, value in each.items()}
    errors = [each for each in hidden if isinstance(each, ValueError)]
    namespace["_oh"] = outputs
    result = types.SimpleNamespace(error_in_exec=errors[-1] if errors else None)
    return types.SimpleNamespace(user_ns_hidden={"_oh": outputs}, last_execution_result=result)


NAMED = {
    "view": lambda value, size: value[:size] if isinstance(value, torch.Tensor) else value,
    "alias": lambda value, _: value,
    "list": lambda value, _: [value, (value,)],
    "dict": lambda value, _: {"k": value},
    "operate": lambda value, _: (
        value.detach().clone().requires_grad_().exp() if type(value) is torch.Tensor else 0
    ),
}
"""What a step makes of a variable and names."""


def play(steps, devices):
    """Return the variables and the unreachable tensors that a random program leaves."""
    names: dict[str, object] = {}
    hidden: list[object] = []
    for number, (action, which, size) in enumerate(steps):
        chosen = list(names)[which % len(names)] if names else None
        if action == "new":
            names[f"v{number}"] = torch.ones(size, device=devices[which])
        elif chosen is None:
            continue
        elif action in NAMED:
            names[f"v{number}"] = NAMED[action](names[chosen], size)
        elif action == "display":
            hidden.append({number: names[chosen]})
        elif action == "fail":
            hidden.append(failure(names[chosen], size))
        else:
            value = names.pop(chosen)
            if action == "hide":
                hidden.append(value)
    return names, hidden


def accelerator_sums(report):
    """Return what the report says of each simulated device."""
    return {row.device: row for row in report.by_device if row.device.startswith("simgpu")}


@pytest.fixture(scope="module")
def used_devices(two_devices):
    """Two simulated devices with their allocators at work."""
    for device in two_devices:
        torch.ones(1, device=device)
    return two_devices


@examples(few=8, deep=60)
@given(steps=STEPS)
def test_the_rows_and_the_remainder_are_exactly_what_the_allocator_handed_out(
    steps, used_devices
) -> None:
    """And what a program leaves is gone when the program's names, outputs and errors are, as without a report."""
    before = [torch.simgpu.memory_allocated(index) for index in (0, 1)]
    namespace, hidden = play(steps, used_devices)
    shell = as_kept_by_a_shell(namespace, hidden)
    report = scan(namespace, shell=shell)
    for device, row in accelerator_sums(report).items():
        rows = [each.nbytes for each in report if each.device == device]
        assert row.allocated == torch.simgpu.memory_allocated(int(device[-1]))
        assert (row.unexplained, sum(rows)) == (0, row.allocated)
        assert row.named + row.held + row.graph == row.allocated
        assert row.cached == torch.simgpu.memory_reserved(int(device[-1])) - row.allocated
    del shell
    namespace.clear()
    hidden.clear()
    assert [torch.simgpu.memory_allocated(index) for index in (0, 1)] == before


@examples(few=6, deep=40)
@given(steps=STEPS)
def test_every_reachable_tensor_is_named_and_dies_when_it_would_have(steps, used_devices) -> None:
    namespace, hidden = play(steps, used_devices)
    reached: list[object] = list(namespace.values())
    for value in reached:
        if isinstance(value, dict | list | tuple):
            reached.extend(value.values() if isinstance(value, dict) else value)
    keys = {value.untyped_storage()._cdata for value in reached if isinstance(value, torch.Tensor)}
    watchers = [weakref.ref(value) for value in reached if isinstance(value, torch.Tensor)]
    del reached
    report = scan(namespace)
    assert sum(row.name is not None for row in report) == len(keys)
    namespace.clear()
    hidden.clear()
    value = None
    assert [watch() for watch in watchers] == [None] * len(watchers)
    assert value is None


def test_one_thread_at_a_time_searches_the_heap(monkeypatch) -> None:
    """Another's lists of all objects would be searched as holders of each: twelve failures took 79 s."""
    inside, met = threading.Barrier(2), []

    def meet(found):
        with contextlib.suppress(threading.BrokenBarrierError):
            inside.wait(0.1)
            met.append(found)
        return []

    monkeypatch.setattr(scans.TensorScan, "run", meet)
    threads = [threading.Thread(target=scan, args=({},)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
