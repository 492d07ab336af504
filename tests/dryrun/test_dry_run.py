"""`gpumagic.dry_run`: it leaves no trace, survives whatever the cell does, and says what it does not know."""

from __future__ import annotations

import gc
import linecache
import os
import random
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpumagic
from gpumagic._compat import torch_private
from gpumagic.dryrun import client
from gpumagic.errors import OptionError
from tests.looked_up import lose
from tests.stages import examples

pytestmark = pytest.mark.usefixtures("two_devices")

NOTEBOOK = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 10)).to("simgpu:0")
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
x = torch.randn(256, 64, device="simgpu:0")
y = torch.randint(0, 10, (256,), device="simgpu:0")
loss = nn.functional.cross_entropy(model(x), y)
loss.backward()
optimizer.step()
history = [1.0]
"""
STEP = """
loss = nn.functional.cross_entropy(model(x), y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


@pytest.fixture
def notebook():
    """Return the names of a notebook with a model that has been trained for a step."""
    namespace = {"__name__": "__main__"}
    exec(NOTEBOOK, namespace)
    yield namespace
    namespace.clear()
    gc.collect()


def state(namespace) -> list[object]:
    """Return all that a dry run could change, byte for byte."""
    model, optimizer = namespace["model"], namespace["optimizer"]
    tensors = [
        *model.parameters(),
        *(p.grad for p in model.parameters() if p.grad is not None),
        namespace["x"],
    ]
    tensors += [value for each in optimizer.state.values() for value in each.values()]
    return [
        [(id(each), each._version, bytes(each.detach().cpu().contiguous().numpy().tobytes())) for each in tensors],
        {name: id(value) for name, value in namespace.items()}, list(namespace["history"]),
        random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist(),  # noqa: NPY002
        [torch.simgpu.get_rng_state(index).tolist() for index in range(2)],
        {path.name: path.read_bytes() for path in Path.cwd().iterdir()},
        [torch.simgpu.memory_stats(index)["allocated_bytes.all.current"] for index in range(2)],
    ]  # fmt: skip


def peaks() -> list[object]:
    return [torch.simgpu.memory_stats(index) for index in range(2)]


def needed(report, index=0) -> int:
    """Return the peak over what other tests of this process still hold."""
    return report.devices[index].peak - report.devices[index].before


LINES = st.sampled_from([
    "x = torch.randn(32, 64, device='simgpu:0')", "model(x).sum().backward()", "optimizer.step()", "history.append(2)",
    "optimizer.zero_grad()", "random.seed(1)", "torch.manual_seed(3)", "np.random.seed(4)", "del x", "model = None",
    "open('trace.txt', 'w').write('x')", "open('kept.txt', 'w').write('x')", "os.remove('kept.txt')",
    "torch.rand(3, device='simgpu:0')",
    "torch.rand(3, device='simgpu:1')", "random.random()",
    "torch.save(model, 'trace.pt')", "os.mkdir('trace')", "os.chdir('/')",
    "model[0].weight.data.zero_()", "x += 1", "1 / 0", "y = x.cpu().numpy()", "torch.set_default_dtype(torch.float64)",
    "for p in model.parameters(): p.grad = None", "raise SystemExit", "with torch.no_grad(): model[0].weight.mul_(2)",
])  # fmt: skip


@examples(few=4, deep=25)
@given(st.lists(LINES, min_size=1, max_size=6))
def test_no_cell_leaves_a_trace(tmp_path_factory, lines) -> None:
    """Weights, gradients, optimizer state, names, random states, files and device memory are as before."""
    namespace = {"__name__": "__main__"}
    exec(NOTEBOOK + "import os, random, numpy as np", namespace)
    home = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cell"))
    Path("kept.txt").write_text("precious")
    try:
        before = state(namespace)
        counters = peaks()
        gpumagic.dry_run("\n".join(lines), namespace)
        assert peaks() == counters
        assert state(namespace) == before
    finally:
        os.chdir(home)
        namespace.clear()
        gc.collect()


def test_the_allocator_is_not_even_asked_for_a_byte(notebook) -> None:
    before = peaks()
    gpumagic.dry_run(STEP, notebook)
    assert peaks() == before


def test_the_report_says_where_the_peak_is_and_what_it_is_made_of(notebook) -> None:
    report = gpumagic.dry_run(STEP, notebook)
    assert report.fits
    assert report.line in {2, 4, 5}
    assert report.code in STEP
    assert sum(report.breakdown.values()) == report.peak["simgpu:0"]
    assert report.breakdown["optimizer state"] == 2 * report.breakdown["parameters"]
    assert str(report).startswith("Fits: ")
    assert "<table" in report._repr_html_()
    assert list(report.to_pandas().columns) == ["device", "line", "code", "peak", "after"]
    assert report.to_dict()["peak"] == report.peak


def test_a_capacity_decides(notebook) -> None:
    assert gpumagic.dry_run(STEP, notebook, capacity="64MiB").fits
    report = gpumagic.dry_run(
        STEP + "big = torch.empty(2**28, device='simgpu:0')", notebook, capacity="64MiB"
    )
    assert report.fits is False
    assert report.failure_line == 6
    assert "line 6" in report.verdict


def test_a_callable_is_dry_run_with_what_it_closes_over(two_devices) -> None:
    size = 1 << 20

    def work():
        return torch.zeros(size, dtype=torch.uint8, device="simgpu:1")

    report = gpumagic.dry_run(work)
    assert report.error is None
    assert (needed(report, 0), needed(report, 1)) == (0, size)


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ("import os; os.abort()", "crashed"),
        ("import os; os._exit(3)", "crashed"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("import threading; threading.Event().wait(99)", "It did not run to the end in 2"),
    ],
)
def test_a_crash_or_a_hang_costs_one_sentence(cell, word) -> None:
    report = gpumagic.dry_run(cell, {}, time_limit=2)
    assert word in report.verdict
    assert report.fits is None
    assert needed(gpumagic.dry_run("import torch; torch.zeros(9, device='simgpu:0')", {})) == 512


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ("input('?')", "it asks for input"),
        ("import os; os.system('touch made')", "starts a program"),
        ("import os; os.fork()", "starts a process"),
        (
            "import socket; socket.create_connection(('127.0.0.1', 9))",
            "opens a connection to 127.0.0.1:9",
        ),
        ("import os; os.kill(os.getppid(), 15)", "signals another process"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_what_reaches_outside_is_one_sentence(tmp_path, monkeypatch, cell, word) -> None:
    monkeypatch.chdir(tmp_path)
    report = gpumagic.dry_run(cell, {})
    assert report.fits is None
    assert word in report.verdict
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "cell", ["import sqlite3; sqlite3.connect('made').execute('create table t (a)')",
             "import os; os.open('made', os.O_CREAT | os.O_WRONLY)", "import numpy; numpy.save('made', numpy.ones(9))"],
)  # fmt: skip
def test_what_writes_files_leaves_none(tmp_path, monkeypatch, cell) -> None:
    """It is refused by name where the system gives the dry run no files of its own."""
    monkeypatch.chdir(tmp_path)
    report = gpumagic.dry_run(cell, {})
    assert report.fits or "made" in report.verdict or "writes" in str(report.effects)
    assert report.effects
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "cell",
    [
        "!touch made",
        "import os; os.mkfifo('made')",
        "open('made', 'w').write('x'); import os; os.rename('made', 'moved')",
        "import sys; sys.exit(3)",
        "exit()",
        "import time; time.sleep(3600)",
        "import multiprocessing; multiprocessing.get_context('spawn').Lock()",
    ],
)
def test_what_does_nothing_in_a_dry_run_lets_it_go_on(tmp_path, monkeypatch, cell) -> None:
    monkeypatch.chdir(tmp_path)
    assert gpumagic.dry_run(cell, {}).fits
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_was_killed_is_replaced(notebook) -> None:
    gpumagic.dry_run(STEP, notebook)
    worker = client._workers["fake"].pid
    os.kill(worker, signal.SIGKILL)
    os.waitid(
        os.P_PID, worker, os.WEXITED | os.WNOWAIT
    )  # it has ended, and its parent is still to find that out
    assert gpumagic.dry_run(STEP, notebook).fits


def test_an_error_of_the_cell_is_told_with_its_line(notebook) -> None:
    report = gpumagic.dry_run("a = x + 1\nb = x @ x", notebook)
    assert report.fits is None
    assert report.error.startswith("the cell fails on line 2: RuntimeError: ")


def test_an_expression_that_python_takes_is_taken_however_long_it_is(notebook) -> None:
    assert gpumagic.dry_run("y = " + " + ".join(["1"] * 900), notebook).error is None


@pytest.mark.parametrize(("code", "words"), [
    ("y = " + " + ".join(["1"] * 3_000), "maximum recursion depth exceeded"),
    ("y = 'a\0b'", "source code string cannot contain null bytes"),
])  # fmt: skip
def test_code_that_python_does_not_take_is_refused_in_pythons_words(notebook, code, words) -> None:
    if sys.version_info >= (3, 12) and "recursion" in words:
        pytest.skip("this Python compiles it")
    with pytest.raises(OptionError, match=f"the code cannot be dry-run: {words}"):
        gpumagic.dry_run(code, notebook)


def test_writing_into_descriptors_that_the_cell_has_not_opened_does_not_end_it(notebook) -> None:
    write = "import os\nfor fd in range(3, 40):\n    try: os.write(fd, bytes(99))\n    except OSError: pass\n"
    assert gpumagic.dry_run(write + STEP, notebook).error is None


def test_operands_on_two_devices_fail_in_torchs_words(notebook) -> None:
    report = gpumagic.dry_run("x + torch.ones(256, 64)", notebook)
    assert "Expected all tensors to be on the same device" in report.error


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ("torch.compile(model)(x)", "compile"),
        ("event.wait()", "Condition"),
        ("next(numbers)", "generator"),
        ("%run other.ipynb", "%run"),
        ("import subprocess; subprocess.run(['true'])", "program"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(notebook, cell, word) -> None:
    notebook |= {"event": threading.Event(), "numbers": (each for each in range(3))}
    report = gpumagic.dry_run(cell, notebook)
    assert report.fits is None
    assert word in report.error


def test_what_cannot_be_sent_does_no_harm_unless_it_is_used(notebook) -> None:
    notebook["odd"] = [(i for i in range(3)), lambda: 1, threading.Event()]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
    notebook["odd"].append(pool)
    assert gpumagic.dry_run(STEP + "also = odd[1]()", notebook).error is None


def test_weak_references_lead_to_what_is_sent(notebook) -> None:
    class Layer(torch.nn.Linear):
        def close(self) -> None: ...

    layer = Layer(2, 2)
    layer.itself = weakref.ref(layer)
    gone = weakref.ref(Layer(1, 1))
    kept = weakref.WeakValueDictionary(first=layer)
    notebook |= {
        "layer": layer,
        "closing": weakref.WeakMethod(layer.close),
        "gone": gone,
        "kept": kept,
    }
    cell = (
        STEP
        + "assert closing().__self__ is layer.itself() is layer is kept['first'] and gone() is None"
    )
    assert gpumagic.dry_run(cell, notebook).error is None


def test_effects_are_listed_and_go_nowhere(notebook, tmp_path) -> None:
    kept = tmp_path / "kept.pt"
    kept.write_text("precious")
    cell = f"torch.save(model.state_dict(), {str(kept)!r})\nopen({str(kept)!r}, 'w').write('gone')\nimport os\n"
    report = gpumagic.dry_run(cell + f"os.remove({str(kept)!r})", notebook)
    assert report.error is None
    assert kept.read_text() == "precious"
    assert report.effects[-1] in {
        f"removes {kept}",
        f"calls os.remove({kept})",
    }  # without files of its own


@pytest.mark.parametrize(
    ("line", "is_heard_of"),
    [
        ("open(path, 'w').close()", False),
        ("subprocess.run(['true'])", True),
        ("socket.create_connection(('192.0.2.1', 9), timeout=1)", True),
        ("ctypes.CDLL(None).kill(os.getppid(), 0)", True),
    ],
)
def test_effects_that_others_may_hear_of_are_told_apart(
    line, is_heard_of, notebook, tmp_path
) -> None:
    """A cell that has such effects is not run again for advice."""
    names = {**notebook, "path": str(tmp_path / "made")}
    cell = f"import contextlib, ctypes, os, socket, subprocess\nwith contextlib.suppress(Exception): {line}"
    report = gpumagic.dry_run(cell, names)
    assert report.effects
    assert report.reaching == (report.effects if is_heard_of else ())


def test_notebook_classes_go_by_value() -> None:
    """Inheritance, super(), closures, dataclasses, enumerations, properties, slots, class attributes, recursion."""
    source = """
import dataclasses, enum, functools, torch, typing
from torch import nn
class Base(nn.Module):
    width = 8
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(self.width, self.width)
    @property
    def twice(self):
        return 2 * self.width
    @staticmethod
    def one():
        return 1
    @classmethod
    def wide(cls):
        return cls.width
class Model(Base):
    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(self.twice, 4)
    def forward(self, x):
        assert super().twice == 16 and self.one() == 1 and Model.wide() == 8
        return self.outer(torch.cat([self.inner(x), x], 1))
@dataclasses.dataclass
class Config:
    size: int = 3
    names: list = dataclasses.field(default_factory=list)
class Mode(enum.Enum):
    FAST = 1
class Slotted:
    __slots__ = ("a",)
    def __init__(self, a):
        self.a = a
def counter(start):
    def again(n):
        return start if n == 0 else again(n - 1)
    return again
count, config, slotted, mode = counter(5), Config(7), Slotted(2), Mode.FAST
add = functools.partial(lambda a, b=1, *, c=2: a + b + c, 1)
@functools.lru_cache(maxsize=8)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
class Table:
    @functools.cache
    def rows(self, n):
        return fibonacci(n)
table = Table()
table.rows(9)
Kind = typing.TypeVar("Kind")
Count = typing.NewType("Count", int)
class Box(typing.Generic[Kind]):
    def __init__(self, inside: Kind):
        self.inside = inside
class Row(typing.TypedDict):
    size: int
class Lean:
    __slots__ = ("size",)
    def __getattr__(self, name):
        return getattr(self.size, name)
box, row, lean = Box(3), Row(size=4), Lean()
lean.size = 5
handle = nn.Linear(2, 2).register_forward_hook(print)
model = Model().to("simgpu:0")
"""
    namespace = {"__name__": "__main__"}
    exec(source, namespace)
    cell = """
assert dataclasses.asdict(config) == {"size": 7, "names": []} and Config(1).size == 1
assert mode is Mode.FAST and slotted.a == 2 and count(3) == 5 and add() == 4
assert (fibonacci(10), table.rows(10), fibonacci.cache_parameters()["maxsize"]) == (55, 55, 8)
assert Box[int](Count(box.inside)).inside == 3 and Row(size=5)["size"] - row["size"] == 1
assert type(handle).__name__ == "Absent"  # its module is gone
assert lean.size == lean.real == 5 and max.__module__ == "builtins" and torch.tensor.__name__ == "tensor"
assert isinstance(model, Base)
model(torch.ones(5, 8, device="simgpu:0")).sum().backward()
"""
    report = gpumagic.dry_run(cell, namespace)
    assert report.error is None, report.error


def test_records_of_a_named_tuple_are_there_before_what_makes_new_ones() -> None:
    """Its `__new__` reads a scope of its own, which is sent after a memory of records that holds it."""
    namespace = {"__name__": "__main__"}
    exec(
        "import collections, torch\nStep = collections.namedtuple('Step', 'state action')",
        namespace,
    )
    exec("memory = collections.deque([Step(torch.ones(3), 1)], maxlen=9)", namespace)
    cell = (
        "memory.append(Step(memory[0].state, 2))\nassert [each.action for each in memory] == [1, 2]"
    )
    report = gpumagic.dry_run(cell, namespace)
    assert report.error is None, report.error


def test_a_loop_of_another_size_each_pass_is_run_whole(two_devices) -> None:
    cell = (
        "import torch\nfor n in (10, 20, 900, 30):\n    x = torch.zeros(n, 512, device='simgpu:0')"
    )
    assert needed(gpumagic.dry_run(cell, {})) == (900 + 30) * 2048


def test_a_list_of_different_sizes_is_gone_through_to_its_end(two_devices) -> None:
    cell = (
        "import torch\nfor n in [10, 10, 10, 900]:\n    x = torch.zeros(n, 512, device='simgpu:0')"
    )
    assert needed(gpumagic.dry_run(cell, {})) == (900 + 10) * 2048


def test_growth_below_a_block_is_noticed(two_devices) -> None:
    """Passes that each keep eight bytes more."""
    cell = (
        "import torch\nx = torch.zeros(1, device='simgpu:0')\n"
        "for _ in range(3000):\n    x = torch.cat([x, torch.zeros(2, device='simgpu:0')])"
    )
    assert needed(gpumagic.dry_run(cell, {})) == 2 * 24_064 + 512


def test_data_loaders_need_no_worker_processes_and_no_pinned_memory(notebook) -> None:
    notebook["data"] = torch.utils.data.TensorDataset(torch.randn(40, 64))
    cell = (
        "from torch.utils.data import DataLoader\n"
        "for (each,) in DataLoader(data, 8, num_workers=2, pin_memory=True, persistent_workers=True):\n"
        "    model(each.pin_memory().to('simgpu:0', non_blocking=True))"
    )
    report = gpumagic.dry_run(cell, notebook)
    assert report.error is None
    assert any("without worker processes" in each for each in report.assumed)


PICKLED = """
import enum, pickle
class Net(torch.nn.Linear):
    pass
class Kind(enum.Enum):
    SMALL = 1
run = {"model": Net(8, 8).to("simgpu:0"), "kind": Kind.SMALL}
"""
UNPICKLED = """
import pickle
net = pickle.loads(pickle.dumps(run["model"].cpu())).to("simgpu:0")
assert pickle.loads(pickle.dumps(run["kind"])) is run["kind"]
"""


def test_pickle_finds_the_classes_of_a_notebook_as_when_a_whole_model_is_saved(notebook) -> None:
    exec(PICKLED, notebook)
    for cell in UNPICKLED, PICKLED + UNPICKLED:
        assert gpumagic.dry_run(cell, notebook).error is None


WITH_SOURCE = """
import inspect
def here(x: torch.Tensor):
    return x * 2
assert "x * 2" in inspect.getsource(here) and "x + 1" in inspect.getsource(earlier)
y = torch.jit.script(here)(torch.jit.script(earlier)(torch.ones(100, device="simgpu:0")))
"""


def test_functions_of_the_cell_and_of_earlier_ones_have_their_source(notebook) -> None:
    text = "def earlier(x: torch.Tensor):\n    return x + 1\n"
    linecache.cache["<earlier cell>"] = (
        len(text),
        None,
        text.splitlines(keepends=True),
        "<earlier cell>",
    )
    exec(compile(text, "<earlier cell>", "exec"), notebook)
    assert gpumagic.dry_run(WITH_SOURCE, notebook).error is None


STREAM = """
from torch.utils.data import DataLoader, IterableDataset
class Numbers(IterableDataset):
    def __iter__(self):
        yield from range(64)
loader = DataLoader(Numbers(), 8, num_workers=2, persistent_workers=True)
kept = [each.to("simgpu:0") for _ in range(3) for each in loader]
"""


def test_a_stream_of_workers_that_stay_begins_anew_in_each_epoch(notebook) -> None:
    before = needed(gpumagic.dry_run("pass", notebook))
    assert needed(gpumagic.dry_run(STREAM, notebook)) - before == 3 * 8 * 512


@pytest.mark.parametrize(
    ("saved_on", "place"),
    [("cpu", "map_location='simgpu:0'"), ("simgpu:0", ""), ("simgpu:0", "map_location={'simgpu:0': 'simgpu:0'}"),
     ("cpu", "map_location={'cpu': 'simgpu:0'}, mmap=True")],
)  # fmt: skip
def test_weights_are_loaded_onto_the_device(notebook, tmp_path, saved_on: str, place: str) -> None:
    torch.save({"w": torch.zeros(1000, 1000, device=saved_on)}, tmp_path / "w.pt")
    report = gpumagic.dry_run(f"state = torch.load({str(tmp_path / 'w.pt')!r}, {place})", notebook)
    assert report.error is None
    assert needed(report) == 4_000_256


def test_large_data_of_the_host_without_room_are_taken_to_be_zeros_and_that_is_said(
    two_devices, monkeypatch
) -> None:
    monkeypatch.setattr("gpumagic.dryrun.parts.ROOM", 0)
    data = {"torch": torch, "images": torch.rand(1 << 20), "table": np.ones((1000, 1000))}
    report = gpumagic.dry_run(
        "x = images.to('simgpu:0')\ny = torch.from_numpy(table).to('simgpu:0')", data
    )
    assert needed(report) == (4 << 20) + 8_000_000
    assert any("assumed to be zeros" in each for each in report.assumed)


def test_ctrl_c_ends_the_dry_run_and_the_next_one_works(notebook) -> None:
    gpumagic.dry_run(STEP, notebook)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(1)
    try:
        with pytest.raises(KeyboardInterrupt):
            gpumagic.dry_run("import threading; threading.Event().wait(50)", notebook)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert gpumagic.dry_run(STEP, notebook).fits


def test_a_torch_that_takes_no_backend_in_python_is_refused(monkeypatch) -> None:
    lose(monkeypatch, torch_private.BACKENDS_IN_PYTHON)
    with pytest.raises(
        gpumagic.DryRunUnavailable,
        match=r"a dry run needs torch 2\.10 or newer: torch \S+ has no torch._C._acc",
    ):
        gpumagic.dry_run("1", {})


def test_without_a_gpu_a_capacity_is_asked_for(monkeypatch) -> None:
    from gpumagic.memory import allocator

    monkeypatch.setattr(allocator, "accelerators", list)
    with pytest.raises(gpumagic.OptionError, match="--capacity 16GiB"):
        gpumagic.dry_run("1", {})


@pytest.mark.parametrize("bad", [("1 +", None), ("1", "12 apples"), (7, None)])
def test_bad_input_is_an_option_error(bad) -> None:
    with pytest.raises(gpumagic.OptionError):
        gpumagic.dry_run(bad[0], {}, capacity=bad[1])


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_module_whose_weight_is_computed_needs_what_it_then_takes(two_devices, norm: str) -> None:
    """Torch gives it a class of its own, which refuses to be pickled."""
    names: dict[str, object] = {"__name__": "__main__", "torch": torch}
    earlier = f"torch.nn.utils.parametrizations.{norm}(torch.nn.Linear(64, 64)).to('simgpu:0')"
    exec(f"net = {earlier}\nx = torch.ones(128, 64, device='simgpu:0')", names)
    cell = "net(x).sum().backward()\nw = net.weight"
    report = gpumagic.dry_run(cell, names)
    assert report.error is None
    torch.simgpu.reset_peak_memory_stats(0)
    exec(cell, names)
    assert report.peak["simgpu:0"] == torch.simgpu.max_memory_allocated(0)


def test_what_a_dict_is_asked_for_runs_no_code_of_the_notebooks() -> None:
    asked: list[str] = []

    class Loud(dict):
        def get(self, name, default=None):
            asked.append(name)
            return super().get(name, default)

    class Name:
        def __str__(self) -> str:
            asked.append("str")
            return "torch"

    names = {
        "__name__": "__main__",
        "torch": torch,
        "loud": Loud(size=3),
        "quiet": {"__name__": Name()},
    }
    cell = "quiet\nx = torch.ones(loud['size'], device='cuda')"
    assert gpumagic.dry_run(cell, names, device="cuda:0", capacity=2**30).error is None
    assert asked == []


def test_an_error_that_the_notebook_keeps_is_sent_whatever_it_is_made_with() -> None:
    earlier = """
import torch
class Failed(ValueError):
    def __init__(self, text, size):
        super().__init__(text)
        self.size = size
kept = Failed("too large", 8)
"""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(earlier, names)
    cell = "assert str(kept) == 'too large'\nx = torch.ones(kept.size, device='cuda')"
    assert gpumagic.dry_run(cell, names, device="cuda:0", capacity=2**30).error is None
