"""Dry runs in notebooks as they are: with open files, loggers, streams, locks and names that the cell gives up."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic.dryrun import payload, targets
from tests.stages import sample

NOTEBOOK = """
import asyncio, contextlib, copy, csv, enum, io, logging, queue, sqlite3, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.manual_seed(0)
x = torch.randn(1024, 256, device=DEVICE)
model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())

def step(batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

step(x)  # so that cuBLAS has its workspaces

# Logs of a run
log = open(FOLDER / "log.txt", "w")
handler = logging.FileHandler(FOLDER / "run.log")
logger = logging.getLogger("ordinary")
logger.addHandler(handler)
logger.propagate = False

class Table:
    def __init__(self, path):
        self.file = open(path, "w")
        self.writer = csv.writer(self.file)

    def add(self, *row):
        self.writer.writerow(row)
        self.file.flush()

table = Table(FOLDER / "table.csv")
rows = csv.writer(log)

class SummaryWriter:
    __module__ = "torch.utils.tensorboard.writer"

    def __init__(self, path):
        self.file, self.lock, self.events = open(path, "w"), threading.Lock(), queue.Queue()
        self.thread = threading.Thread(target=self.events.get, daemon=True)
        self.thread.start()

    def add_scalar(self, tag, value, step=None):
        self.file.write(f"{tag} {float(value)} {step}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.events.put(None)
        self.file.close()

summary = SummaryWriter(FOLDER / "events")
database = sqlite3.connect(FOLDER / "runs.db", check_same_thread=False)
database.execute("create table runs (epoch int, loss real)")
cursor = database.cursor()
bar = tqdm(total=100, file=open(FOLDER / "bar.txt", "w"))
output = contextlib.ExitStack()
output.enter_context(open(FOLDER / "other.txt", "w"))
folder = tempfile.TemporaryDirectory()

# What waits, and what has begun
lock, again, gate = threading.Lock(), threading.RLock(), threading.Semaphore(2)
ready, todo, condition, local = threading.Event(), queue.Queue(), threading.Condition(), threading.local()
pool = ThreadPoolExecutor(2)
pool.submit(int).result()
future = pool.submit(int)
thread = threading.Thread(target=int)
thread.start()
numbers = (each * 2 for each in range(3))
coming = asyncio.Event()
batches = iter(DataLoader(TensorDataset(torch.ones(64, 256)), batch_size=16))
next(batches)
text = io.StringIO("1000")
lines = open(FOLDER / "sizes.txt", "w+")

# Objects that ask themselves
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __getattr__(self, name):
        return self.__dict__["_modules"][name]

odd = Odd().to(DEVICE)

class Wrapper:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

class Mode(str, enum.Enum):
    TRAIN = "train"
    TEST = "test"

    @property
    def is_last(self):
        return self is Mode.TEST

wrapped = Wrapper(nn.Linear(8, 8).to(DEVICE))

# What torch has besides plain tensors
stream, event = torch.Stream(DEVICE), torch.Event(DEVICE)
with stream:
    side = x @ x.T
event.record(stream)
randomness = torch.Generator(DEVICE)
random_here = torch.Generator()
ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
turned = torch.ones(4, dtype=torch.complex64).conj()
imagined = nn.Linear(1000, 1000, device="meta")
lazy = nn.LazyLinear(8)
elsewhere = torch.ones(4, device=OTHER)
leading = (x[:64] * x.new_ones(256, requires_grad=True)).exp()

hidden = model(x[:512])

class Named(torch.Tensor):
    pass

named = torch.ones(1024, device=DEVICE).as_subclass(Named).requires_grad_()
plain = (named * 2).as_subclass(torch.Tensor)

# Sparse tensors and gradients; simgpu has none
SPARSE = DEVICE if DEVICE.startswith("cuda") else "cpu"
graph = torch.eye(512).to_sparse().coalesce()
neighbours = torch.eye(512).to_sparse_csr()
on_device = torch.sparse_coo_tensor(torch.arange(512).repeat(2, 1), torch.ones(512), (512, 512)).to(SPARSE)
words = nn.Embedding(1000, 64, sparse=True).to(SPARSE)
words_optimizer = torch.optim.SparseAdam(words.parameters())
words(torch.arange(8, device=SPARSE)).sum().backward()
words_optimizer.step()
history, best = [], float("inf")
"""
CELLS = {
    "training with a logger": """
        for epoch in range(3):
            logger.warning('loss %s', step(x).item())
        handler.flush()""",
    "training that prints into a file": """
        loss = step(x).item()
        log.write(f'{loss}')
        print(loss, file=log, flush=True)""",
    "training with a table": "table.add(1, step(x).item())\nrows.writerow([1, 2])",
    "training with a SummaryWriter": """
        for epoch in range(2):
            summary.add_scalar('loss', step(x), epoch)""",
    "a SummaryWriter that ends": "with summary as writer:\n    writer.add_scalar('loss', step(x).item())",
    "metrics in a database": """
        with database:
            database.execute('insert into runs values (?, ?)', (1, step(x).item()))""",
    "metrics by a cursor": """
        cursor.execute('insert into runs values (1, ?)', (step(x).item(),))
        database.commit()
        cursor.close()""",
    "a progress bar": """
        for epoch in range(2):
            step(x)
            bar.update(1)
        bar.set_postfix(loss=1.0)
        bar.close()""",
    "a progress bar of its own": "for part in tqdm(x.split(256)):\n    step(part)",
    "files that are closed": "with output, log:\n    y = x * 2\nlines.close()",
    "under a lock": """
        with lock, again, gate:
            y = x * 2
        lock.acquire()
        y = y + x
        lock.release()""",
    "told to others": """
        ready.set()
        todo.put(x * 2)
        with condition:
            condition.notify_all()
        local.y = x * 2""",
    "in a pool": "sizes = list(pool.map(lambda part: part.nbytes, x.chunk(2)))\nassert sum(sizes) == x.nbytes",
    "after a thread": "thread.join()\ny = x * 2 + future.result()",
    "kept and not used": "kept = [numbers, coming, future, thread, lines, cursor, graph, ragged, turned, x * 2]",
    "the rest of a loader": "for (batch,) in batches:\n    step(batch.to(DEVICE))",
    "a text in memory": "y = x[:int(text.read())] + 1",
    "a module that raises KeyError": "y = odd.inner(torch.ones(4096, 8, device=DEVICE))\nodd.eval()",
    "a wrapper": "y = wrapped.forward(torch.ones(4096, 8, device=DEVICE))",
    "an enumeration of texts": """
        assert Mode.TRAIN == "train" and Mode("test").is_last
        y = x * len(Mode)""",
    "on a stream": "with stream:\n    y = x * 2\nstream.synchronize()\nevent.synchronize()",
    "random numbers": """
        y = torch.randn(1024, 256, generator=randomness, device=DEVICE)
        z = torch.randperm(8, generator=random_here)""",
    "a generator of its own": "randomness = torch.Generator(DEVICE).manual_seed(1)",
    "in place on what has a graph": "hidden.add_(1)\ny = hidden.exp()",
    "without its graph": "leading = leading.detach() * 2",
    "after an earlier cell's graph is gone": "hidden = hidden.detach()\ny = x[:256] + 1",
    "backward through an earlier cell's graph": "leading.sum().backward()",
    "a step after an earlier cell's graph": "hidden.square().mean().backward()\noptimizer.step()",
    "backward to a leaf of another class": "plain.sum().backward()",
    "bound anew on another device": "elsewhere = torch.ones(1024, 256, device=DEVICE)\ny = elsewhere + 1",
    "deleted": "del elsewhere, side, x",
    "products with sparse matrices": """
        y = graph @ torch.ones(512, 256)
        z = neighbours @ torch.ones(512, 256)
        w = (y + z).to(DEVICE)""",
    "a product on the device": "y = on_device @ torch.ones(512, 1024, device=SPARSE)",
    "backward through a sparse product": """
        y = torch.sparse.mm(on_device, torch.ones(512, 1024, device=SPARSE, requires_grad=True))
        y.sum().backward()""",
    "a sparse embedding's step": """
        words_optimizer.zero_grad()
        words(torch.arange(64, device=SPARSE)).sum().backward()
        words_optimizer.step()""",
    "a sparse gradient that grows": "words(torch.arange(64, device=SPARSE)).sum().backward()",
    "SGD on a sparse gradient": "torch.optim.SGD(words.parameters(), 0.1).step()",
    "packed sequences": "y = packed.to(DEVICE).data * 2",
    "a module of no memory": "imagined.to_empty(device=DEVICE)",
    "plain training": "history.append(step(x).item())",
    "validation": "with torch.no_grad():\n    y = model(x).argmax(1)",
    "the best so far": "if step(x).item() < best:\n    kept = [each.clone() for each in model.parameters()]",
    "a copy of the model": "twin = copy.deepcopy(model)\ntorch.save(model.state_dict(), io.BytesIO())",
    "clipping": "model(x).sum().backward()\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)",
}
"""Every cell is dry-run in the whole notebook, and then run."""
GOES_BACK = {
    "backward through an earlier cell's graph", "a step after an earlier cell's graph",
    "backward to a leaf of another class",
}  # fmt: skip
BY_VALUES = {
    "backward through a sparse product",
    "a product on the device",
    "a sparse embedding's step",
}
"""Where kernels count elements, so that nothing is certain: on an H200 the first took 4 MiB more than was told."""
REFUSED = {
    "what is typed": "n = int(input('How many? '))",
    "a generator": "n = next(numbers)",
    "a file that is read": "n = int(lines.readline())",
    "a database's rows": "rows = database.execute('select 1').fetchall()",
    "an empty queue": "y = todo.get()",
    "a nested tensor": "y = ragged * 2",
}
NOW = {
    "a stream of data that asks which worker it is": """
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
class Rows(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter([torch.ones(256) * info.id] * (8 // info.num_workers))
loader = DataLoader(Rows(), batch_size=2, num_workers=4)
assert [each.shape for each in loader] == [(2, 256)] * 4
assert len([x[:2] + each.to(DEVICE) for each in loader]) == 4 and loader.num_workers == 4
""",
}
NEW = {
    "assigned": "x = torch.ones(1024, 256, device=DEVICE)",
    "assigned in a block": "with torch.no_grad():\n    x = torch.ones(1024, 256, device=DEVICE)\ny = x + 1",
    "unpacked": "x, y = torch.ones(2, 1024, 256, device=DEVICE)",
    "the variable of a loop": "for x in torch.ones(3, 1024, device=DEVICE):\n    y = x + 1",
    "a function's own": "def double(x):\n    return x * 2\ny = double(torch.ones(1024, device=DEVICE))",
}


@pytest.fixture
def notebook(device: Any, tmp_path: Any) -> Iterator[dict[str, Any]]:
    """Return the variables of a notebook in which all of it lives."""
    names: dict[str, Any] = {
        "__name__": "__main__",
        "DEVICE": device.name,
        "OTHER": device.other,
        "FOLDER": tmp_path,
    }
    exec(NOTEBOOK, names)
    yield names
    names["logger"].removeHandler(names["handler"])
    names["handler"].close()
    names.clear()
    if device.backend == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # the stream of each notebook has its own


def test_there_are_thirty_cells() -> None:
    assert len(CELLS) >= 30


@pytest.mark.parametrize("name", sample(CELLS, 3))
def test_a_cell_needs_what_it_then_takes(
    device: Any, notebook: Any, tmp_path: Any, name: str
) -> None:
    cell = textwrap.dedent(CELLS[name]).strip()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    report = gpumagic.dry_run(cell, notebook, device=device.name)
    assert (report.fits, report.error) == (True, None)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    device.torch.reset_peak_memory_stats(0)
    exec(cell, notebook)
    real = device.torch.max_memory_allocated(0)
    if name in BY_VALUES and device.backend == "cuda":
        assert (report.peak[device.name], report.certain) == (pytest.approx(real, rel=0.1), False)
    elif name not in GOES_BACK:
        assert (report.peak[device.name], report.certain) == (real, True)
    else:
        assert report.peak[device.name] == pytest.approx(real, rel=0.1)
        assert not report.certain
        assert (
            "what a backward pass takes in graphs of earlier cells besides gradients"
            in report.unknown
        )


@pytest.mark.parametrize("cell", NOW.values(), ids=NOW)
def test_a_cell_that_runs_in_a_notebook_runs_in_a_dry_run(
    device: Any, notebook: Any, cell: str
) -> None:
    report = gpumagic.dry_run(cell, notebook, device=device.name)
    assert (report.fits, report.error) == (True, None)


@pytest.mark.parametrize("cell", REFUSED.values(), ids=REFUSED)
def test_what_it_stands_for_is_said_where_it_is_really_used(
    device: Any, notebook: Any, cell: str
) -> None:
    report = gpumagic.dry_run(cell, notebook, device=device.name)
    assert report.fits is None
    assert "which cannot be sent to a dry run" in (report.error or "") or "it asks for input" in (
        report.error or ""
    )


def test_fake_tensors_do_not_know_what_sparse_ones_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(targets.VARIABLE, targets.FAKE)
    names = {"graph": torch.eye(64).to_sparse(), "__name__": "__main__"}
    cell = (
        "import torch\ny = graph @ torch.ones(64, 8)\ny = graph.cuda() @ torch.ones(64, 8).cuda()"
    )
    report = gpumagic.dry_run(cell, names, device="cuda:0", capacity=1 << 30)
    assert report.error == (
        "the dry run stopped on line 3: it uses a sparse tensor on the device, and what its kernels take is not known"
    )


@pytest.mark.parametrize("cell", NEW.values(), ids=NEW)
def test_a_name_that_the_cell_binds_anew_may_be_on_another_device(
    two_devices: list[str], cell: str
) -> None:
    names = {"__name__": "__main__", "DEVICE": "cuda:0"}
    exec(f"import torch\nx = torch.ones(4, device={two_devices[0]!r})", names)
    assert gpumagic.dry_run(cell, names, capacity=1 << 30, device="cuda:0").fits is True
    for used in "y = x + 1", "y = torch.relu(x)", "y = x.cpu()":
        report = gpumagic.dry_run(
            f"{used}\nx = torch.ones(4, device=DEVICE)", names, capacity=1 << 30, device="cuda:0"
        )
        assert (
            "stopped on line 1: it uses a tensor on simgpu:0 (make it on cuda in the cell)"
            in report.error
        )


def test_what_cannot_be_sent_is_found_in_one_go_and_only_that_is_missed(monkeypatch) -> None:
    """Pickle does not go into lists that are nested as deep as these."""
    names: dict[str, Any] = {"torch": torch, "kept": 3}
    for place in range(9):
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        names[f"deep_{place}"] = deep
    fills: list[object] = []
    fill = payload.Payload.fill

    def counted(packed: payload.Payload, *args: Any) -> Any:
        fills.append(packed)
        return fill(packed, *args)

    monkeypatch.setattr(payload.Payload, "fill", counted)
    uses = "".join(f"if not kept: deep_{place}\n" for place in range(9))
    report = gpumagic.dry_run(
        f"{uses}x = torch.ones(kept << 18, device='cuda:0')", names, device="cuda:0", capacity=2**30
    )
    assert (report.error, report.peak) == (None, {"cuda:0": 3 << 20})
    assert len(fills) == 2
    report = gpumagic.dry_run("deep_3.append(1)", names, device="cuda:0", capacity=2**30)
    assert report.error is not None
    assert report.error.endswith("it uses `deep_3`, which cannot be sent to a dry run")
