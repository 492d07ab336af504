"""Dry runs in notebooks as they are: with open files, loggers, streams, locks and names that the cell gives up."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

import gpumagic

EARLIER = {
    "a module that raises KeyError for what it has not": (
        """
        class Odd(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(8, 8)
            def __getattr__(self, name):
                return self.__dict__["_modules"][name]
        odd = Odd().to(DEVICE)
        """,
        "y = odd.inner(torch.ones(4, 8, device=DEVICE)) + x[:4, :8]",
    ),
    "an object that asks itself for what it has not": (
        """
        class Wrapper:
            def __init__(self, inner):
                self.inner = inner
            def __getattr__(self, name):
                return getattr(self.inner, name)
        wrapped = Wrapper(torch.nn.Linear(8, 8).to(DEVICE))
        """,
        "y = wrapped.forward(torch.ones(4, 8, device=DEVICE)) + x[:4, :8]",
    ),
    "a file that is written": (
        "log = open(FOLDER / 'log.txt', 'w')",
        "y = x * 2\nlog.write('done')\nprint('done', file=log)\nlog.flush()",
    ),
    "a logger with a file": (
        """
        import logging
        handler = logging.FileHandler(FOLDER / "run.log")
        logger = logging.getLogger("run")
        logger.addHandler(handler)
        """,
        "y = x * 2\nlogger.warning('loss %s', 1.0)\nhandler.flush()",
    ),
    "an object that has a file": (
        """
        import csv
        class Table:
            def __init__(self):
                self.file = open(FOLDER / "table.csv", "w")
                self.writer = csv.writer(self.file)
            def add(self, *row):
                self.writer.writerow(row)
                self.file.flush()
        table = Table()
        """,
        "y = x * 2\ntable.add(1, 2)",
    ),
    "a database": (
        """
        import sqlite3
        database = sqlite3.connect(FOLDER / "runs.db")
        database.execute("create table runs (loss real)")
        """,
        "y = x * 2\nwith database:\n    database.execute('insert into runs values (1.0)')",
    ),
    "a generator that is not used": ("numbers = (each * 2 for each in range(3))", "kept = [numbers, x * 2]"),
    "locks": (
        """
        import threading, queue
        lock, again = threading.Lock(), threading.RLock()
        ready, todo = threading.Event(), queue.Queue()
        """,
        "with lock, again:\n    y = x * 2\nready.set()\ntodo.put(y)",
    ),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\npool.submit(int).result()",
        "y = x * 2\nsizes = list(pool.map(lambda part: part.nbytes, x.chunk(2)))\nassert sum(sizes) == x.nbytes",
    ),
    "a loader's iterator": (
        """
        from torch.utils.data import DataLoader, TensorDataset
        batches = iter(DataLoader(TensorDataset(torch.ones(64, 256)), batch_size=16))
        next(batches)
        """,
        "(batch,) = next(batches)\ny = batch.to(DEVICE) * 2",
    ),
    "a sparse matrix": (
        "graph = torch.eye(64).to_sparse().coalesce()\nrows = torch.eye(64).to_sparse_csr()",
        "y = x * 2\nkept = graph, rows",
    ),
    "a text in memory": ("import io\ntext = io.StringIO('1000')", "y = x[:int(text.read())] + 1"),
    "a thread": (
        "import threading\nthread = threading.Thread(target=int)\nthread.start()",
        "thread.join()\ny = x * 2",
    ),
}  # fmt: skip
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
REFUSED = {
    "what is typed": ("", "n = int(input('How many? '))"),
    "a generator": ("numbers = (each * 2 for each in range(3))", "n = next(numbers)"),
    "a file that is read": ("sizes = open(FOLDER / 'sizes.txt', 'w+')", "n = int(sizes.readline())"),
    "a sparse matrix": ("graph = torch.eye(64).to_sparse()", "y = graph @ x[:64]"),
    "a database's rows": ("import sqlite3\nd = sqlite3.connect(':memory:')", "rows = d.execute('select 1').fetchall()"),
    "an empty queue": ("import queue\ntodo = queue.Queue()", "y = todo.get()"),
}
NEW = {
    "assigned": "x = torch.ones(1024, 256, device=DEVICE)",
    "assigned in a block": "with torch.no_grad():\n    x = torch.ones(1024, 256, device=DEVICE)\ny = x + 1",
    "unpacked": "x, y = torch.ones(2, 1024, 256, device=DEVICE)",
    "the variable of a loop": "for x in torch.ones(3, 1024, device=DEVICE):\n    y = x + 1",
    "a function's own": "def double(x):\n    return x * 2\ny = double(torch.ones(1024, device=DEVICE))",
}

EVERYTHING = """
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
words = nn.Embedding(1000, 64, sparse=DEVICE.startswith('cuda')).to(DEVICE)
words(torch.arange(8, device=DEVICE)).sum().backward()
model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())
history, best = [], float("inf")
def step(batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
CELLS = (
    "history.append(step(x).item())", "for _ in range(3):\n    print(f'{step(x).item():.3f}')",
    "with torch.no_grad():\n    y = model(x).argmax(1)", "y = torch.cat([x, x])", "del x", "y = x.cpu().numpy()",
    "import copy\ntwin = copy.deepcopy(model)", "import io\ntorch.save(model.state_dict(), io.BytesIO())",
    "model.load_state_dict(model.state_dict())",
    "loss = F.cross_entropy(model(x), torch.zeros(1024, device=DEVICE).long())",
    "words(torch.arange(9, device=DEVICE)).sum().backward()", "torch.optim.SGD(words.parameters(), 0.1).step()",
    "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "y = [model(part) for part in x.split(100)]",
    "if step(x).item() < best:\n    best = copy = [each.clone() for each in model.parameters()]",
    "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)\nstep(x)\nschedule.step()",
    "big = nn.Linear(256, 4096).to(DEVICE)\nbig(x).mean().backward()", "y = torch.einsum('ij,kj->ik', x, x)",
    "losses = []\nwhile len(losses) < 4:\n    losses.append(step(x))",
    "class Net(nn.Module):\n    pass\nnet = Net().to(DEVICE)",
    "x = x.repeat(4, 1)\nmodel(x).sum().backward()",
)  # fmt: skip


def notebook(device: Any, earlier: str, folder: Any = None) -> dict[str, Any]:
    """Return the variables of a notebook with a batch of 1 MiB, after an earlier cell."""
    names: dict[str, Any] = {"__name__": "__main__", "DEVICE": device.name, "FOLDER": folder}
    exec("import torch\nx = torch.ones(1024, 256, device=DEVICE)\n" + textwrap.dedent(earlier), names)
    return names


@pytest.mark.parametrize("name", EARLIER)
def test_what_an_earlier_cell_has_left_does_not_stop_a_dry_run(device: Any, tmp_path: Any, name: str) -> None:
    earlier, cell = EARLIER[name]
    names = notebook(device, earlier, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    report = gpumagic.dry_run(cell, names, device=device.name)
    assert (report.fits, report.error) == (True, None)
    assert report.peak[device.name] >= 1 << 20
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.deep
def test_cells_of_a_notebook_that_has_all_of_it_are_told_as_in_one_that_has_not(device: Any, tmp_path: Any) -> None:
    cells = [*(cell for _, cell in EARLIER.values()), *CELLS]
    assert len(cells) >= 30
    everything = "\n".join([*(textwrap.dedent(each) for each, _ in EARLIER.values()), EVERYTHING])
    names = notebook(device, everything, tmp_path)
    alone = notebook(device, EVERYTHING, tmp_path)
    needs = {}
    for cell in cells:
        report = gpumagic.dry_run(cell, names, device=device.name)
        assert (report.fits, report.error) == (True, None), cell
        needs[cell] = report.peak[device.name] - report.devices[0].before
    for cell in CELLS:
        report = gpumagic.dry_run(cell, alone, device=device.name)
        assert needs[cell] == report.peak[device.name] - report.devices[0].before, cell


@pytest.mark.parametrize("cell", NOW.values(), ids=NOW)
def test_a_cell_that_runs_in_a_notebook_runs_in_a_dry_run(device: Any, cell: str) -> None:
    report = gpumagic.dry_run(cell, notebook(device, ""), device=device.name)
    assert (report.fits, report.error) == (True, None)


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_stands_for_is_said_where_it_is_really_used(device: Any, tmp_path: Any, name: str) -> None:
    earlier, cell = REFUSED[name]
    report = gpumagic.dry_run(cell, notebook(device, earlier, tmp_path), device=device.name)
    assert report.fits is None
    assert "which cannot be sent to a dry run" in (report.error or "") or "it asks for input" in (report.error or "")


@pytest.mark.parametrize("cell", NEW.values(), ids=NEW)
def test_a_name_that_the_cell_binds_anew_may_be_on_another_device(two_devices: list[str], cell: str) -> None:
    names = {"__name__": "__main__", "DEVICE": "cuda:0"}
    exec(f"import torch\nx = torch.ones(4, device={two_devices[0]!r})", names)
    assert gpumagic.dry_run(cell, names, capacity=1 << 30, device="cuda:0").fits is True
    for used in "y = x + 1", "y = torch.relu(x)", "y = x.cpu()":
        report = gpumagic.dry_run(f"{used}\nx = torch.ones(4, device=DEVICE)", names, capacity=1 << 30, device="cuda:0")
        assert "stopped on line 1: it uses a tensor on simgpu:0 (make it on cuda in the cell)" in report.error
