"""A cluster of engines: four with simulated GPUs, three that lack something, and two to be killed."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvml_stub.machine import Machine as Driver
from traitlets.config import Config

import gpumagic
from gpumagic.cluster.report import ClusterReport

ipyparallel = pytest.importorskip("ipyparallel")
psutil = pytest.importorskip("psutil")

ROOT = Path(gpumagic.__file__).parents[1]
PATIENCE = 60
HIDING = """
import os, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == os.environ.get("HIDDEN"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


class Machine:
    """A controller and its engines, those of a role told apart by their environment."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.others = set(psutil.Process().children(recursive=True))
        quick = Config({"LocalProcessLauncher": {"poll_seconds": 1, "stop_seconds_until_kill": 1}})
        self.cluster = ipyparallel.Cluster(profile_dir=str(home / "profile"), log_level=50, config=quick)
        self.pids: list[int] = []
        (home / "hiding").mkdir()
        (home / "hiding" / "sitecustomize.py").write_text(HIDING)
        (home / "old" / "gpumagic").mkdir(parents=True)
        (home / "old" / "gpumagic" / "__init__.py").write_text('__version__ = "0.0.1"\n')

    def start(self, number: int, role: str = "", *, path: str = "", **environment: str) -> None:
        """Start engines without waiting for them."""
        paths = [str(self.home / path)] if path else []
        wanted = {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]), "ROLE": role, **environment}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.home)  # where the engines find no checkout
            for name, value in wanted.items():
                patch.setenv(name, value)
            self.cluster.start_engines_sync(n=number)

    def connect(self, number: int) -> None:
        self.client = self.cluster.connect_client_sync()
        self.client.wait_for_engines(number, interactive=False, timeout=PATIENCE)
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
    machine.start(4, GPUMAGIC_SIMGPU="2x256MiB", OMP_NUM_THREADS="1")
    machine.start(1, "old", path="old")
    machine.start(1, "no gpumagic", path="hiding", HIDDEN="gpumagic")
    driver = Driver(machine.home / "driver", gpus=2).environment()
    driver = {name: driver[name] for name in ("LD_LIBRARY_PATH", "NVML_STUB")}
    machine.start(1, "no torch", path="hiding", HIDDEN="torch", **driver)
    machine.start(1, "victim", **driver)
    machine.start(1, "second victim")
    machine.connect(9)
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
            from gpumagic.cluster import requests
            ran, devices = [], requests.devices
            requests.devices = lambda names, **options: ran.append(names) or devices(names, **options)
        """),
        block=True,
    )
    gate = Gate(tmp_path / "open", view)
    yield gate
    gate.open()
    view.execute("requests.devices = devices", block=True)
