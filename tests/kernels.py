"""Real kernels, spoken to as a front end does, with `tests.probe_magics` at hand to load into them."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
PATIENCE = 60  # seconds until a kernel that says nothing is taken for hung


def environment(home: Path, **extra: str) -> dict[str, str]:
    """Return the environment for a child process: our modules importable, an empty IPython profile, one thread."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "IPYTHONDIR": str(home),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **extra,
    }  # fmt: skip


@dataclass
class Cell:
    """What a front end saw of one cell."""

    status: str = "no reply"
    ename: str = ""
    evalue: str = ""
    count: int | None = None
    payload: list = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    displays: dict[str | None, int] = field(default_factory=dict)
    """Where each display is in what was seen, by its identifier."""

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
            self.displays[content.get("transient", {}).get("display_id")] = len(self.seen)
            self.seen.append((kind, content["data"]["text/plain"]))
        elif kind == "update_display_data" and content["transient"]["display_id"] in self.displays:
            text = content["data"].get("text/plain", "")  # "" where nothing is left
            self.seen[self.displays[content["transient"]["display_id"]]] = "display_data", text
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
    """A real kernel, spoken to as a front end does: of the Python that runs the tests, or another."""

    def __init__(
        self,
        home: Path,
        *,
        python: str = sys.executable,
        stderr: IO[str] | None = None,
        **extra: str,
    ):
        # Not above: what looks for a tensor's holders in this process would follow all that it leads to.
        from jupyter_client.manager import KernelManager

        self.gate = home / "gate"
        self.manager = KernelManager()
        self.manager.kernel_spec.argv = [
            python,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
        ]
        self.manager.start_kernel(env=environment(home, **extra), stderr=stderr)
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
        self.client.get_control_msg(
            timeout=PATIENCE
        )  # by then what was sent before has arrived as well
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
        if (
            "create_subshell_request"
            not in self.run("sorted(get_ipython().kernel.control_handlers)").value
        ):
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


def assert_only_cells_marked_so_failed(notebook) -> None:
    """Check an executed notebook: the cells that fail are those with the tag `raises-exception`."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", ())
        # A UsageError is one line on stderr, not an error output.
        failed = any(
            out.output_type == "error" or out.get("text", "").startswith("UsageError")
            for out in outputs
        )
        assert failed == ("raises-exception" in cell.metadata.get("tags", ())), cell.source
