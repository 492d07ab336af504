"""A cluster of engines: four with simulated GPUs, three that lack something, and two to be killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from traitlets.config import Config

import gpumagic
from gpumagic.cluster.report import ClusterReport
from tests.nvml_stub.machine import Machine as Driver

ipyparallel = pytest.importorskip("ipyparallel")
psutil = pytest.importorskip("psutil")

ROOT = Path(gpumagic.__file__).parents[1]
PATIENCE = 60
ENGINES = """
import json, os, sys
from ipyparallel.engine.app import IPEngine

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

roles, arguments = json.loads(sys.argv[1]), sys.argv[2:]
sys.meta_path.insert(0, Hidden())
for role in sorted(roles, key=lambda role: role["has_torch"]):
    hidden = []
    if role["has_torch"]:
        import torch  # once for all of them
    if os.fork() == 0:
        hidden = role["hidden"]
        for name in hidden:
            sys.modules.pop(name, None)  # torch has imported pynvml
        os.environ.update(role["environment"])
        sys.path[:0] = role["path"]
        IPEngine.launch_instance(arguments + ["--IPEngine.enable_nanny=%s" % role["has_torch"]])
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
"""Starts engines by forking: each of them would take seconds to import ipyparallel and torch for itself."""


class Machine:
    """A controller and its engines, those of a role told apart by their environment."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.others = set(psutil.Process().children(recursive=True))
        quick = Config({"LocalProcessLauncher": {"poll_seconds": 1, "stop_seconds_until_kill": 1}})
        self.cluster = ipyparallel.Cluster(
            profile_dir=str(home / "profile"), log_level=50, config=quick
        )
        self.pids: list[int] = []
        self.started: list[dict[str, object]] = []
        (home / "old" / "gpumagic").mkdir(parents=True)
        (home / "old" / "gpumagic" / "__init__.py").write_text('__version__ = "0.0.1"\n')

    def add(
        self, role: str = "", *, path: str = "", hidden: Sequence[str] = (), **environment: str
    ) -> None:
        """Have an engine among those that `connect` starts; one that imports torch can be interrupted and killed."""
        self.started.append({
            "environment": {"ROLE": role, **environment}, "path": [str(self.home / path)] if path else [],
            "hidden": hidden, "has_torch": not path and not {"torch", "gpumagic"}.intersection(hidden),
        })  # fmt: skip

    def connect(self, **environment: str) -> None:
        """Start the engines in a folder where they find no checkout, and wait for them."""
        profile = [
            "--profile-dir",
            str(self.home / "profile"),
            "--cluster-id",
            self.cluster.cluster_id,
        ]
        command = [
            sys.executable,
            "-c",
            ENGINES,
            json.dumps(self.started),
            *profile,
            "--log-level",
            "50",
        ]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        subprocess.Popen(command, cwd=self.home, env=variables)
        self.client = self.cluster.connect_client_sync()
        self.client.wait_for_engines(len(self.started), interactive=False, timeout=PATIENCE)
        self.pids = self.client[:].apply_sync(os.getpid)
        roles = self.client[:].apply_sync(os.getenv, "ROLE")
        self.roles: dict[int, str] = dict(zip(self.client.ids, roles, strict=True))
        self.plain = sorted(engine for engine, role in self.roles.items() if not role)

    def of(self, role: str) -> int:
        return next(engine for engine, its in self.roles.items() if its == role)

    def stop(self) -> None:
        children = set(psutil.Process().children(recursive=True)) - self.others
        engines = [psutil.Process(pid) for pid in self.pids if psutil.pid_exists(pid)]
        nannies = [child for engine in engines for child in engine.children()]
        self.client.close()
        for each in (*nannies, *engines, *children):  # asked to shut down they take ten seconds
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        _, left = psutil.wait_procs([*children, *engines, *nannies], timeout=PATIENCE)
        assert not left
        self.cluster.stop_cluster_sync()


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("cluster"))
    machine.cluster.start_controller_sync()
    for _ in range(4):
        machine.add(GPUMAGIC_SIMGPU="2x256MiB", hidden=["pynvml"])
    machine.add("old", path="old")
    machine.add("no gpumagic", hidden=["gpumagic"])
    machine.add("no torch", hidden=["torch"])
    machine.add("victim")
    machine.add("second victim", hidden=["pynvml"])
    driver = Driver(machine.home / "driver", gpus=2).environment()
    machine.connect(LD_LIBRARY_PATH=driver["LD_LIBRARY_PATH"], NVML_STUB=driver["NVML_STUB"])
    yield machine
    machine.stop()


@pytest.fixture
def here(machine, bare_shell) -> Iterator[object]:
    """A shell with the extension, connected to the engines as a notebook is."""
    view = machine.client[machine.plain]
    view.block = True
    view.activate()
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell(f"%config GPUMagic.engine_timeout = {PATIENCE}")
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    machine.client[:].clear(block=True)
    gpumagic.cluster.use(None)


def look(here, line: str, timeout: float = PATIENCE) -> ClusterReport:
    """Run a line, patiently: the first one has each engine import torch."""
    here.run_cell(f"%config GPUMagic.engine_timeout = {timeout}")
    report = here.run_cell(f"%{line}").result
    assert isinstance(report, ClusterReport)
    return report


def states(report: ClusterReport) -> dict[object, str]:
    return {answer.engine: answer.state for answer in report.engines}


def text_of(report: ClusterReport) -> str:
    return " ".join(str(report).split())


class Gate:
    """Keeps engines in a cell until it is opened."""

    def __init__(self, path: Path, view) -> None:
        self.path = path
        wait = f"while not os.path.exists({str(path)!r}): time.sleep(0.01)"
        self.cell = view.execute(f"import os, time\n{wait}", block=False)

    def open(self) -> None:
        self.path.touch()
        self.cell.get(PATIENCE)


@pytest.fixture
def gate(here, machine, tmp_path) -> Iterator[Gate]:
    """The first engine, kept in a cell, with a count of the requests that reached it."""
    look(here, "devices --engines")
    view = machine.client[machine.plain[0]]
    view.execute(
        textwrap.dedent("""
            from gpumagic.cluster import engines
            ran, devices = [], engines.answer_devices
            engines.answer_devices = lambda names, **options: ran.append(names) or devices(names, **options)
        """),
        block=True,
    )
    gate = Gate(tmp_path / "open", view)
    yield gate
    gate.open()
    view.execute("engines.answer_devices = devices", block=True)
