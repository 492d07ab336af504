"""What a cell writes in a dry run is there for it, and nowhere else; torch.compile has its own peak."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of


def gives_private_files() -> bool:
    """Return whether the system lets a process have files of its own."""
    child = os.fork()
    if child == 0:
        from gpumagic.worker.box import files

        os._exit(not files.enter()[0])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


pytestmark = pytest.mark.skipif(
    not gives_private_files(), reason="the system gives no mount namespace"
)


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    yield
    client.close()


def dry_run(cell: str) -> DryRunReport:
    return run.dry_run(
        script_of(cell), {"torch": torch}, targets.choose("cuda:0", None), time_limit=120
    )


CELLS = {
    "its own checkpoint": """
import os
x = {"x": torch.ones(9, device="cuda"), "epoch": 3}
os.makedirs("runs/a")
torch.save(x, "runs/a/last.pt")
assert os.path.exists("runs/a/last.pt") and os.listdir("runs/a") == ["last.pt"]
again = torch.load("runs/a/last.pt")
assert again["epoch"] == 3 and again["x"].is_cuda
""",
    "a large checkpoint": """
big = {"w": torch.zeros(1 << 26, device="cuda"), "epoch": 3}
torch.save(big, "big.pt")
assert torch.load("big.pt", map_location="cpu")["w"].shape == (1 << 26,)
""",
    "a temporary folder": """
import pathlib, shutil, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "a.txt").write_text("hi")
assert [each.name for each in folder.iterdir()] == ["a.txt"] and (folder / "a.txt").read_text() == "hi"
shutil.rmtree(folder)
assert not folder.exists()
""",
    "a database and a table": """
import csv, sqlite3
with sqlite3.connect("log.db") as log:
    log.execute("create table t (a)")
with open("log.csv", "a") as file:
    csv.writer(file).writerow([1, 2])
assert open("log.csv").read() == "1,2\\n"
""",
    "a file of before": """
import os
assert open("kept.txt").read() == "precious"
open("kept.txt", "a").write(" and more")
assert open("kept.txt").read() == "precious and more"
os.remove("kept.txt")
assert not os.path.exists("kept.txt")
""",
    "safetensors": """
import safetensors.torch
safetensors.torch.save_file({"x": torch.ones(9, device="cuda")}, "x.safetensors")
assert safetensors.torch.load_file("x.safetensors", device="cuda")["x"].shape == (9,)
""",
}


@pytest.mark.parametrize("name", CELLS)
def test_what_a_cell_writes_it_finds_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name
) -> None:
    if name == "safetensors":
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.txt").write_text("precious")
    report = dry_run(CELLS[name])
    assert (report.error, report.fits) == (None, True)
    assert report.effects or name == "safetensors"  # which writes by no function of Python's
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("kept.txt", "precious")
    ]


COMPILED = """
@torch.compile
def f(x, w):
    return torch.nn.functional.gelu(x @ w).sum()
w = torch.nn.Parameter(torch.ones(512, 512, device="cuda"))
x = torch.ones(64, 512, device="cuda")
for _ in range(2):
    f(x, w).backward()
"""


def test_the_peak_of_a_compiled_function_is_the_allocators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(
            name, str(tmp_path / name)
        )  # so that both compile, and measure kernels, anew
    client.close()
    report = dry_run(COMPILED)
    client.close()
    assert (report.error, report.fits) == (None, True)
    assert not any(each.is_file() for each in tmp_path.rglob("*"))
    torch.cuda.reset_peak_memory_stats()
    names: dict[str, object] = {"torch": torch}
    exec(COMPILED, names)
    peak = torch.cuda.max_memory_allocated()
    del names["w"], names["x"]  # what was compiled keeps the names
    assert report.peak["cuda:0"] == peak
