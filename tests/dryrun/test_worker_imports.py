"""What runs import of the notebook's packages, their warm process imports once for all runs to come."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import gpumagic
from gpumagic.dryrun import client, request

STARTS_A_THREAD = "import threading\nCOUNT = 3\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
CODE = "import torch, a_package\nx = torch.ones(a_package.COUNT, device='cuda')"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch) -> Any:
    """Return a function that makes a package, dry-runs a cell that imports it twice, and tells when a run did."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    client.close()

    def ask(text: str, *, has_it: bool = True) -> list[list[str]]:
        (folder / "a_package.py").write_text(text, encoding="utf-8")
        if has_it:
            importlib.import_module("a_package")
        told, ask = [], client.Worker.ask

        def noted(self, requests):
            replies = ask(self, requests)
            told.append(
                [name for reply in replies for name in reply.imported if name == "a_package"]
            )
            return replies

        monkeypatch.setattr(client.Worker, "ask", noted)
        pids = set()
        for _ in range(2):
            assert gpumagic.dry_run(CODE, {}, device="cuda:0", capacity=2**30).error is None
            pids |= {worker.pid for worker in client._workers.values()}
        assert len(pids) == 1
        return told

    yield ask
    client.close()
    sys.modules.pop("a_package", None)


def test_a_package_that_a_run_imported_is_there_for_the_next(imported) -> None:
    assert imported("COUNT = 3") == [["a_package"], []]


def test_a_package_that_starts_a_thread_stays_out_of_the_process_that_forks(imported) -> None:
    assert imported(STARTS_A_THREAD) == [["a_package"], ["a_package"]]


def test_a_package_that_starts_a_thread_stays_out_also_where_it_would_be_preloaded(
    imported, monkeypatch
) -> None:
    monkeypatch.setattr(request, "_PRELOADED", frozenset({"a_package"}))
    assert imported(STARTS_A_THREAD) == [["a_package"], ["a_package"]]


def test_what_only_the_cell_imports_stays_out_of_it(imported) -> None:
    assert imported("COUNT = 3", has_it=False) == [[], []]


TRAINS = """
import sys, torch
model = torch.nn.Linear(10, 10).to("cuda:0")
optimizer = torch.optim.AdamW(model.parameters())
optimizer.zero_grad()
model(torch.ones(10, 10, device="cuda:0")).sum().backward()
optimizer.step()
assert "torch._dynamo" not in sys.modules
torch._dynamo.config.cache_size_limit
assert "torch._dynamo" in sys.modules
"""


def test_a_step_of_an_optimizer_imports_no_compiler_and_what_asks_for_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        request, "_PRELOADED", frozenset()
    )  # else what other tests have imported is there
    client.close()
    assert gpumagic.dry_run(TRAINS, {}, device="cuda:0", capacity=2**30).error is None


def test_mpi_which_starts_a_daemon_or_ends_the_process_is_not_there(
    tmp_path: Path, monkeypatch
) -> None:
    """As Lightning finds it, which looks for MPI wherever `mpi4py` is installed."""
    folder = tmp_path / "site-packages" / "mpi4py"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "MPI.py").write_text("import os\nos._exit(1)", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    code = "import torch\ntry:\n    from mpi4py import MPI\nexcept ImportError:\n    x = torch.ones(1000, device='cuda')"  # noqa: E501
    report = gpumagic.dry_run(code, {}, device="cuda:0", capacity=2**30)
    assert (report.error, report.peak) == (None, {"cuda:0": 4096})


LIBRARY = """
_SET = object.__setattr__
def define(made):
    def __setstate__(self, state):
        _SET(self, "size", state)
    made.__setstate__, made.__getstate__ = __setstate__, lambda self: self.size
    return made
"""


def test_what_a_library_has_put_into_a_class_of_the_notebook_finds_the_librarys_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the methods of `attrs`, of which one runs while the notebook's objects are made anew."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import torch, a_library\n@a_library.define\nclass Held:\n    size = 0\nheld = Held()\nheld.size = 1000",
        names,
    )
    report = gpumagic.dry_run(
        "x = torch.ones(held.size, device='cuda')", names, device="cuda:0", capacity=2**30
    )
    assert (report.error, report.peak) == (None, {"cuda:0": 4096})
    sys.modules.pop("a_library")
