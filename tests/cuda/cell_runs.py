"""Cells in notebooks of their own over the fake runtime or on a real GPU: really run, or dry-run by either engine.

A server has imported what the cells import, and forks for each notebook. What a cell really needs is what torch's CUDA
allocator has after it has run there, which no code of a dry run's takes part in.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import json
import linecache
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.cuda.rooms import DEVICES, IS_REAL, limit

FOLDER = Path(__file__).parent
MIB = 1 << 20
AMPLE = 64 << 30
RUNS = 8
"""Of a cell whose own peak may differ from run to run."""


class Cell(NamedTuple):
    """A cell, what the notebook has run before it, and what the host reads each time it is really run."""

    name: str
    setup: str
    code: str
    reads: tuple[dict[str, str], ...] = ({},)


class Verdicts(NamedTuple):
    """Whether a cell fits on a device with what it needs, with one segment more, and with 2 MiB less."""

    need: int
    is_plain: bool
    """Whether no value that the host reads matters."""
    real: dict[str, bool]
    told: dict[str, bool | None]


@functools.cache
def cells() -> dict[str, Cell]:
    """Return the cells of real_cells/ and user_cells/ by name; `# %%` ends what has run before."""
    found = {}
    for path in sorted([*FOLDER.glob("real_cells/*.py"), *FOLDER.glob("user_cells/*.py")]):
        text = path.read_text(encoding="utf-8")
        before, _, after = text.rpartition("# %%\n")
        found[path.stem] = Cell(path.stem, before, after, tuple(_scripts_of(text)))
    return found


def _scripts_of(text: str) -> list[dict[str, str]]:
    from tests.cuda.cell_reads import scripts_of

    return scripts_of(text)


class Runs:
    """The server's client.

    Use it as a context manager; the server ends with it.
    """

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.cell_runs", "serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait()

    def ask(self, what: str, cell: Cell, **more: Any) -> dict[str, Any]:
        """Return what came of it; ``{"failed": sentence}`` where nothing did."""
        self._server.stdin.write(
            json.dumps({"what": what, "setup": cell.setup, "code": cell.code, **more}) + "\n"
        )
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def dry_run(self, cell: Cell, engine: str = "cuda", **more: Any) -> dict[str, Any]:
        """Return what its report tells."""
        return self.ask("dry_run", cell, engine=engine, **more)

    def really(
        self, cell: Cell, capacities: dict[int, int] | None = None, *, workspaces: bool = True
    ) -> dict[str, Any]:
        """Return what the cell has at most, of all that the host may read, and whether it ends each time.

        Args:
            cell: the cell.
            capacities: bytes of some of the devices.
            workspaces: whether cuBLAS is to have workspaces.
        """
        more = {"capacities": capacities or {}, "workspaces": workspaces}
        told = [
            self.ask("really", cell, reads=reads, **more)
            for reads in ([{}] if IS_REAL else cell.reads)
        ]
        failed = next((each for each in told if "failed" in each), None)
        if failed is not None:
            return failed
        return {
            "fits": [each["fits"] for each in told],
            "peak": [max(sizes) for sizes in zip(*(each["peak"] for each in told), strict=True)],
            "reserved": [
                max(sizes) for sizes in zip(*(each["reserved"] for each in told), strict=True)
            ],
            "held": told[0]["held"],
            "seconds": max(each["seconds"] for each in told),
            "answer": told[0]["answer"],
        }

    def really_like(
        self, told: dict[str, Any], cell: Cell, *, workspaces: bool = True, off: float = 0.0
    ) -> dict[str, Any]:
        """Return what the cell has at most in the first of some runs whose peak a dry run told; else in the last.

        Where threads of torch's free memory while the cell goes on, its peak differs from run to run.

        Args:
            told: what the dry run told.
            cell: the cell.
            workspaces: whether cuBLAS is to have workspaces.
            off: by which share of the peak the dry run may be off.
        """
        for _ in range(RUNS):
            real = self.really(cell, workspaces=workspaces)
            if "failed" in real or "failed" in told:
                break
            pairs = zip(told["peak"], real["peak"], strict=True)
            if all(abs(one - other) <= off * other for one, other in pairs):
                break
        return real

    def need(self, cell: Cell, found: dict[str, Any]) -> tuple[int, int]:
        """Return a device and the least capacity of it, in whole 2 MiB, with which the cell really ends.

        Args:
            cell: the cell.
            found: what `really` says of it on large devices.
        """
        device = max(range(DEVICES), key=lambda each: found["reserved"][each])
        most, least = -(-found["reserved"][device] // (2 * MIB)), found["held"][device] // (2 * MIB)
        least = max(least, found["peak"][device] // (2 * MIB)) - 1
        while most - least > 1:
            middle = (most + least) // 2
            if all(self.really(cell, {device: middle * 2 * MIB})["fits"]):
                most = middle
            else:
                least = middle
        return device, most * 2 * MIB

    def verdicts(
        self, cell: Cell, engine: str = "cuda", need: tuple[int, int] | None = None
    ) -> Verdicts:
        """Return what is told, and what is true, about as much room as the cell needs: on a device, that capacity."""
        device, least = need or self.need(cell, self.really(cell))
        rooms = {"at": least, "above": least + 20 * MIB, "below": least - 2 * MIB}
        real = {name: self.really(cell, {device: room})["fits"] for name, room in rooms.items()}
        told = {
            name: self.dry_run(cell, engine, capacities={device: room})
            for name, room in rooms.items()
        }
        return Verdicts(
            least,
            len(cell.reads) == 1,
            {name: all(ended) for name, ended in real.items()},
            {name: each.get("fits") for name, each in told.items()},
        )


def serve() -> None:
    """Answer each line of the input in a fork."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    workers: dict[str, Any] = {}
    # As optimizers and autograd do when first used, and as every notebook has.
    _import_all(
        "import torch._dynamo, torch.utils.checkpoint, IPython.core.interactiveshell, gpumagic.dryrun.run"
    )
    for line in sys.stdin:
        asked = json.loads(line)
        _import_all(asked["setup"] + "\n" + asked["code"])
        if asked["what"] == "dry_run":
            _share(workers, asked["engine"])
        read, write = os.pipe()
        if not os.fork():
            _answer(asked, write)
        os.close(write)
        with os.fdopen(read) as pipe:
            answers.write((pipe.read() or json.dumps({"failed": "the process died"})) + "\n")
        answers.flush()
        os.wait()
    for worker in workers.values():
        worker.close()


def _import_all(code: str) -> None:
    """Import what the code imports, once for all forks."""
    for node in ast.walk(ast.parse(code)):
        # Those that are left out start CUDA.
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not re.search(
            "diffusers|skorch", ast.unparse(node)
        ):
            exec(compile(ast.Module([node], []), "<imports>", "exec"), {})
    gc.collect()
    gc.freeze()


def _share(workers: dict[str, Any], engine: str) -> None:
    """Let all forks use one warm worker: each is gone before the next asks."""
    from gpumagic.dryrun import client

    if engine not in workers or workers[engine]._process.poll() is not None:
        workers[engine] = client.Worker(engine)
        workers[engine].is_usable = lambda: True
    client._workers.clear()
    client._workers.update(workers)


def _answer(asked: dict[str, Any], write: int) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            told = {"dry_run": _dry_run, "really": _really}[asked["what"]](asked)
    except BaseException as error:
        told = {"failed": f"{type(error).__name__}: {error}"}
    os.write(write, json.dumps(told).encode())
    os._exit(0)


def _notebook(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the namespace after what ran before, with the devices' capacity set."""
    import torch

    if not asked.get("workspaces", True):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    random.seed(0)
    torch.manual_seed(0)
    for device in range(DEVICES):
        limit(device, AMPLE)
    warnings.simplefilter("ignore")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    names = vars(module)
    setup = asked["setup"]
    linecache.cache["<setup>"] = (len(setup), None, setup.splitlines(keepends=True), "<setup>")
    exec(compile(setup, "<setup>", "exec"), names)
    torch.cuda.init()
    for device, capacity in asked.get("capacities", {}).items():
        limit(int(device), capacity)
    return names


def _really(asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    from tests.cuda.cell_reads import Reads

    if not IS_REAL:
        Reads(**asked["reads"]).install()
    names = _notebook(asked)
    held = [torch.cuda.memory_reserved(device) for device in range(DEVICES)]
    for device in range(DEVICES):
        torch.cuda.reset_peak_memory_stats(device)
    start, fits = time.perf_counter(), True
    try:
        exec(compile(asked["code"], "<cell>", "exec"), names)
    except torch.OutOfMemoryError:
        fits = False
    return {
        "fits": fits,
        "peak": [torch.cuda.max_memory_allocated(device) for device in range(DEVICES)],
        "reserved": [torch.cuda.max_memory_reserved(device) for device in range(DEVICES)],
        "held": held,
        "seconds": time.perf_counter() - start,
        "answer": names.get("answer"),
    }


def _dry_run(asked: dict[str, Any]) -> dict[str, Any]:
    import gpumagic

    names = _notebook(asked)
    if asked["engine"] == "fake":
        os.environ["GPUMAGIC_DRYRUN_ENGINE"] = "fake"
    start = time.perf_counter()
    report = gpumagic.dry_run(asked["code"], names, device="cuda:0", **asked.get("options", {}))
    seconds = time.perf_counter() - start
    peak = [report.peak.get(f"cuda:{device}", 0) for device in range(DEVICES)]
    return {
        "peak": peak, "reserved": [each.reserved for each in report.devices], "fits": report.fits,
        "certain": getattr(report, "certain", None), "passes": getattr(report, "passes", None), "error": report.error,
        "engine": report.engine, "verdict": report.verdict, "unknown": report.unknown, "assumed": report.assumed,
        "seconds": seconds, "runs": getattr(report, "runs", None), "operators": report.operators,
        "largest": report.largest,
        "trials": [(each.value, each.fits) for each in report.search.trials] if getattr(report, "search", None) else [],
        "workspaces": report.breakdown.get("library workspaces", 0),
    }  # fmt: skip


if __name__ == "__main__":
    serve()
