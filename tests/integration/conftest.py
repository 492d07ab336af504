"""Real shells and real kernels, with `probe_magics` at hand to load into them."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import KernelManager
from traitlets.config import Config

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))
PATIENCE = 60  # seconds until a kernel that says nothing is taken for hung


def environment(home: Path, **extra: str) -> dict[str, str]:
    """Return the environment for a child process: our modules importable, an empty IPython profile, one thread."""
    paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "IPYTHONDIR": str(home),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **extra,
    }  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs in a shell or a kernel; files that start theirs otherwise say so themselves."""
    for item in items:
        if {"bare_shell", "start_kernel"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("ipython")


@pytest.fixture
def unhindered(monkeypatch):
    """Run `%%ondevice` as in a fresh process: what other tests left there, and these don't use, asks for no mode."""
    from gpumagic.transfers import patches

    monkeypatch.setattr(patches, "_overriding_classes", lambda *_: iter(()))
    monkeypatch.setattr(patches, "_has_compiled", lambda: False)
    monkeypatch.setattr(patches, "_blocker_in_heap", lambda names: patches.find_holders(names) and None)


@pytest.fixture
def bare_shell():
    """Return a real in-process shell whose displays are kept instead of shown."""
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryAccessor.enabled = False
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config, display_pub_class=CapturingDisplayPublisher)
    shell.run_line_magic("colors", "nocolor")
    yield shell
    InteractiveShell.clear_instance()
    _empty(shell)


def _empty(shell: InteractiveShell) -> None:
    """Let go of what a test's cells made: shells live on in IPython's cycles, and tests ask what is on a device."""
    sys.modules[shell._orig_sys_modules_main_name] = shell._orig_sys_modules_main_mod  # it had put itself there
    shell.user_ns.clear()
    shell.user_ns_hidden.clear()
    shell.last_execution_result = None
    shell.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)


@pytest.fixture
def shell(bare_shell):
    """Return such a shell with the probe magics loaded."""
    import probe_magics

    probe_magics.events.clear()
    probe_magics.modes().clear()
    bare_shell.run_line_magic("load_ext", "probe_magics")
    yield bare_shell
    assert probe_magics.modes() == [], "a cell left its mode behind"


@pytest.fixture
def events(shell):
    """Return what has happened to the guards of the shell's cells so far."""
    return shell.user_ns["events"]


@pytest.fixture
def shown(bare_shell):
    """Return a function that lists what has been displayed, as plain text."""

    def texts():
        return [output["data"]["text/plain"] for output in bare_shell.display_pub.outputs]

    return texts


@dataclass
class Cell:
    """What a front end saw of one cell."""

    status: str = "no reply"
    ename: str = ""
    evalue: str = ""
    count: int | None = None
    payload: list = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)

    def texts(self, *kinds: str) -> list[str]:
        return [text for kind, text in self.seen if kind in kinds]

    @property
    def value(self) -> str | None:
        return next(iter(self.texts("execute_result")), None)

    @property
    def reports(self) -> list[str]:
        return self.texts("display_data")

    @property
    def tracebacks(self) -> list[str]:
        return self.texts("error")

    @property
    def stdout(self) -> str:
        return "".join(self.texts("stdout"))

    @property
    def stderr(self) -> str:
        return "".join(self.texts("stderr"))

    def hear(self, message: dict) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.seen.append((content["name"], content["text"]))
        elif kind in {"display_data", "execute_result"}:
            self.seen.append((kind, content["data"]["text/plain"]))
        elif kind == "error":
            self.seen.append((kind, plain("\n".join(content["traceback"]))))

    def take(self, reply: dict) -> Cell:
        self.status = reply["status"]
        self.ename, self.evalue = reply.get("ename", ""), reply.get("evalue", "")
        self.count, self.payload = reply.get("execution_count"), reply.get("payload", [])
        return self


def plain(text: str) -> str:
    """Return text without terminal colours."""
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class Kernel:
    """A real kernel of the Python that runs the tests, spoken to as a front end does."""

    def __init__(self, home: Path, **extra: str) -> None:
        self.gate = home / "gate"
        self.manager = KernelManager()
        self.manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager.start_kernel(env=environment(home, **extra))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str, **options: object) -> Cell:
        """Run one cell; again, if it came while the kernel was still dropping cells after an earlier failure."""
        cell = Cell(status="aborted")
        while cell.status == "aborted":
            (cell,) = self.collect([self.client.execute(code, **options)])
        return cell

    def run_all(self, *codes: str, **options: object) -> list[Cell]:
        """Send all cells at once, as Run All does, and wait for each."""
        self.run("")  # the kernel is through with whatever was before
        sent = [self._hold(), *(self.client.execute(code, **options) for code in codes)]
        self._let_go()
        return self.collect(sent)[1:]

    def _hold(self) -> str:
        """Keep the kernel busy until `_let_go`: it aborts only those cells that it has got when one fails."""
        self.gate.unlink(missing_ok=True)
        wait = f"while not __import__('os').path.exists({str(self.gate)!r}): __import__('time').sleep(0.001)"
        return self.client.execute(wait, silent=True)

    def _let_go(self) -> None:
        self.client.control_channel.send(self.client.session.msg("kernel_info_request", {}))
        self.client.get_control_msg(timeout=PATIENCE)  # by then what was sent before has arrived as well
        self.gate.touch()

    def interrupt(self, code: str, *later: str) -> list[Cell]:
        """Run cells and press Ctrl-C when the first has printed ``ready``."""
        self.run("")
        sent = [self.client.execute(each) for each in (code, *later)]
        return self.collect(sent, on_ready=self.manager.interrupt_kernel)

    def ask(self, request: str, *args: object) -> dict:
        message = getattr(self.client, request)(*args)
        while True:
            reply = self.client.get_shell_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == message:
                return reply["content"]

    def open_subshell(self) -> str | None:
        """Open a second line of execution in the kernel, or return None where it has none (ipykernel before 7)."""
        if "create_subshell_request" not in self.run("sorted(get_ipython().kernel.control_handlers)").value:
            return None
        self.client.control_channel.send(self.client.session.msg("create_subshell_request", {}))
        return self.client.get_control_msg(timeout=PATIENCE)["content"]["subshell_id"]

    def send_to(self, subshell: str, code: str) -> str:
        """Send a cell to a subshell, and return the id of the message."""
        content = {
            "code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False,
            "stop_on_error": True,
        }  # fmt: skip
        message = self.client.session.msg("execute_request", content)
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def value(self, code: str) -> str | None:
        return self.run(code).value

    def collect(self, sent: list[str], on_ready: Callable[[], None] | None = None) -> list[Cell]:
        """Wait for each of the requests sent, those included that ``on_ready`` adds when a cell prints ``ready``."""
        cells = {message: Cell() for message in sent}
        idle: set[str] = set()
        deadline = time.monotonic() + PATIENCE
        while idle != set(sent):
            message = self._iopub(deadline)
            parent = message["parent_header"].get("msg_id")
            if parent not in cells:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                idle.add(parent)
            cells[parent].hear(message)
            if on_ready and "ready" in cells[parent].stdout:
                on_ready()
                on_ready = None
                cells.update((late, Cell()) for late in sent if late not in cells)
        waiting = set(sent)
        while waiting:
            reply = self.client.get_shell_msg(timeout=PATIENCE)
            parent = reply["parent_header"].get("msg_id")
            if parent in waiting:
                cells[parent].take(reply["content"])
                waiting.remove(parent)
        return list(cells.values())

    def _iopub(self, deadline: float) -> dict:
        try:
            return self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("the kernel says nothing") from None


@pytest.fixture(scope="session")
def start_kernel(tmp_path_factory):
    """Return a function that starts a kernel, with extra environment variables; all are stopped at the end."""
    kernels = []

    def start(**extra):
        kernels.append(Kernel(tmp_path_factory.mktemp("ipython"), **extra))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.stop()


@pytest.fixture(scope="module")
def module_kernel(start_kernel):
    kernel = start_kernel()
    assert kernel.run("%load_ext probe_magics").status == "ok"
    yield kernel
    assert kernel.value("modes()") == "[]", "a cell left its mode behind"


@pytest.fixture
def kernel(module_kernel):
    """Return a kernel with the probe magics, shared by the module; what happened before is forgotten."""
    module_kernel.run("events.clear()")
    return module_kernel


@pytest.fixture
def guarded(bare_shell, two_devices):
    """Return a function that runs a cell under %%oomguard -o report, in a shell with `take` and `fail`."""
    import gc

    from oom_cells import PRELUDE, forget_everything

    gc.collect()
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell(PRELUDE, store_history=True)

    def run(cell, options=""):
        bare_shell.user_ns.pop("report", None)
        return bare_shell.run_cell(f"%%oomguard -o report {options}\n{cell}", store_history=True)

    yield run
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    forget_everything(bare_shell)


@pytest.fixture(scope="session")
def _worker_of_the_tests():
    """One rehearsal worker for all tests: unloading the extension, which each shell's end does, leaves it alone."""
    from gpumagic.dryrun import client

    close = client.close
    yield
    close()


@pytest.fixture
def warm_worker(_worker_of_the_tests, monkeypatch):
    """Keep the rehearsal worker from ending with the test's shell."""
    from gpumagic.dryrun import client

    monkeypatch.setattr(client, "close", lambda: None)
