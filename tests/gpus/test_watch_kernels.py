"""`%gpuinfo -w` in real kernels and a real terminal, over the stub driver."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.kernels import PATIENCE, ROOT, environment
from tests.nvml_stub.machine import GIB, Machine

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None,
    reason="the stub driver is built with gcc on Linux",
)
THREADS = (
    "import threading; [each.name for each in threading.enumerate() if 'gpumagic' in each.name]"
)


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """Return the environment of a machine with two GPUs, on whose first bob has a process."""
    machine = Machine(tmp_path_factory.mktemp("machine"), 2)
    machine.say(f"0.compute 4711 {GIB}")
    settings = machine.environment()
    return {name: settings[name] for name in ("LD_LIBRARY_PATH", "NVML_STUB", "PYTHONPATH")}


@pytest.fixture(scope="module")
def watching_kernel(start_kernel, stub):
    kernel = start_kernel(**{**stub, "PYTHONPATH": f"{stub['PYTHONPATH']}:{ROOT}"})
    assert kernel.run("%load_ext gpumagic").status == "ok"
    return kernel


@pytest.fixture
def kernel(watching_kernel):
    """Return a kernel with the extension; a watch that a test leaves running is a failure."""
    yield watching_kernel
    assert watching_kernel.value(THREADS) == "[]"


def updates(kernel, enough):
    """Return the texts that replaced others in place, until one of them is enough."""
    texts = []
    deadline = time.monotonic() + PATIENCE
    while not texts or not enough(texts):
        message = kernel._iopub(deadline)
        if message["msg_type"] == "update_display_data":
            assert message["content"]["transient"]["display_id"]
            texts.append(message["content"]["data"]["text/plain"])
    return texts


def ended(words):
    return lambda texts: words in texts[-1]


def test_the_table_is_refreshed_in_place_while_another_cell_runs(kernel, tmp_path):
    """The other cell reads from a pipe into which nobody writes before two refreshes have been seen."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    first = kernel.run("watch = %gpuinfo -w 0.1")
    assert "cuda:1" in first.reports[0]
    message = kernel.client.execute(f"open({str(pipe)!r}).read()")
    last = updates(kernel, lambda texts: len(texts) >= 3)[-1]
    assert "A100" in last
    pipe.write_text("read")
    assert kernel.collect([message])[0].value == "'read'"
    kernel.client.execute("%gpuinfo -w off")
    assert "every 0.1 s; stopped." in updates(kernel, ended("stopped"))[-1]
    assert (
        kernel.value("[(row.device, row.utilization) for row in watch.report][0]")
        == "('cuda:0', 30.0)"
    )


def test_an_error_or_an_interrupt_of_another_cell_does_not_stop_it(kernel):
    kernel.run("watch = %gpuinfo -w 0.1")
    [cell] = kernel.interrupt(
        "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"
    )
    assert cell.ename == "KeyboardInterrupt"
    assert kernel.run("1 / 0").ename == "ZeroDivisionError"
    assert kernel.run("1 +").ename == "SyntaxError"
    assert kernel.value("watch.ended") is None
    kernel.run("%gpuinfo -w off")


def test_an_interrupt_while_it_ends_leaves_nothing(kernel):
    """Who presses the button twice interrupts the wait for the thread; the table still says that it has ended."""
    kernel.run("import signal; watch = %gpuinfo -w 0.1")
    kernel.run(
        "join = watch._thread.join; watch._thread.join = lambda _: (join(), signal.raise_signal(signal.SIGINT))"
    )
    assert kernel.run("%gpuinfo -w off").ename == "KeyboardInterrupt"
    assert kernel.value("watch.ended") == "'stopped'"


def test_an_interrupt_while_it_starts_leaves_nothing(kernel):
    """No thread of it, which the fixture looks for."""
    kernel.run("import signal, threading\nstart = threading.Thread.start")
    kernel.run("def pressed(self):\n    start(self)\n    signal.raise_signal(signal.SIGINT)")
    assert (
        kernel.run("threading.Thread.start = pressed\n%gpuinfo -w 0.1").ename == "KeyboardInterrupt"
    )
    kernel.run("threading.Thread.start = start")


def test_starting_it_again_replaces_it(kernel):
    kernel.run("one = %gpuinfo -w 0.1")
    kernel.run("two = %gpuinfo -w 0.2")
    assert kernel.value("one.ended, two.ended") == "('stopped', None)"
    kernel.run("%gpuinfo -w off")
    assert kernel.value("two.ended") == "'stopped'"


def test_unloading_stops_it(kernel):
    kernel.run("watch = %gpuinfo -w 0.1")
    kernel.run("%unload_ext gpumagic")
    assert kernel.value("watch.ended") == "'stopped'"
    assert kernel.run("%load_ext gpumagic").status == "ok"


def test_what_is_wrong_with_the_line_is_said_at_once(kernel):
    """And no thread is left with it."""
    assert "cuda:9" in kernel.run("%gpuinfo cuda:9 -w 1").stderr
    assert "seconds of at least 0.1" in kernel.run("%gpuinfo -w cuda:0").stderr
    assert kernel.run("%gpuinfo -w off").status == "ok"


def test_its_thread_is_gone_before_the_process_ends(stub, tmp_path):
    """Whoever asks NVML while it is torn down crashes (nvitop#222)."""
    code = (
        "import atexit, threading\n"
        "atexit.register(lambda: print([each.name for each in threading.enumerate()]))\n"
        "import gpumagic\nfrom gpumagic.gpus import live\n"
        "seen = threading.Event()\n"
        "shown = []\ndef show(report, is_last):\n    shown.append(report)\n    if len(shown) > 2: seen.set()\n"
        "live.GpuWatch(gpumagic.gpuinfo, 0.01, show).start()\n"
        "assert seen.wait(30)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path, **stub), capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "['MainThread']\n", "")


def test_a_terminal_is_redrawn_in_place_until_ctrl_c(stub, tmp_path):
    pexpect = pytest.importorskip("pexpect", reason="pexpect drives the terminal")
    options = [
        "--simple-prompt",
        "--no-banner",
        "--no-confirm-exit",
        "--ext=gpumagic",
        "--HistoryManager.enabled=False",
    ]
    child = pexpect.spawn(
        sys.executable, ["-m", "IPython", *options], env=environment(tmp_path, TERM="xterm", **stub),
        encoding="utf-8", timeout=PATIENCE, dimensions=(50, 120),
    )  # fmt: skip
    try:
        child.expect(r"In \[1\]: ")
        child.sendline("w = %gpuinfo -w 0.1")
        child.expect(r"\x1b\[\d+F2 GPUs")
        child.expect(r"until Ctrl-C\.")
        child.expect(r"\x1b\[\d+F2 GPUs")
        child.sendintr()
        child.expect(r"every 0\.1 s; interrupted\.")
        child.expect(r"In \[2\]: ")
        child.sendline("len(w.report), w.ended")
        child.expect(r"\(2, 'interrupted'\)")
    finally:
        child.close(force=True)


def test_the_command_refreshes_until_ctrl_c(stub, tmp_path):
    """Where stdout is no terminal, one table below the other."""
    child = subprocess.Popen(
        [sys.executable, "-m", "gpumagic", "gpuinfo", "cuda:1", "-w", "0.1"], env=environment(tmp_path, **stub),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    tables = 0
    for line in child.stdout:
        tables += line.startswith("A snapshot every 0.1 s, until")
        if tables == 3:
            break
    child.send_signal(signal.SIGINT)
    rest, errors = child.communicate(timeout=PATIENCE)
    assert (child.returncode, errors) == (0, "")
    assert rest.rstrip().endswith("every 0.1 s; interrupted.")
    assert "\x1b" not in rest


def test_a_kernel_that_is_watching_shuts_down_in_peace(start_kernel, stub):
    """It ends by itself, with status 0, and is not killed."""
    leaving = start_kernel(**{**stub, "PYTHONPATH": f"{stub['PYTHONPATH']}:{ROOT}"})
    leaving.run("%load_ext gpumagic")
    leaving.run("%gpuinfo -w 0.1;")
    updates(leaving, lambda texts: len(texts) >= 2)
    process = leaving.manager.provisioner.process
    leaving.client.shutdown()
    assert process.wait(timeout=PATIENCE) == 0


@pytest.fixture
def hanging(tmp_path):
    """Return a file; as long as it is there, the driver of `hung_kernel` does not answer."""
    return tmp_path / "hanging"


@pytest.fixture
def hung_kernel(start_kernel, tmp_path, hanging):
    """Return a kernel that waits an hour for a driver that can hang."""
    machine = Machine(tmp_path)
    machine.say(f"hang nvmlDeviceGetUtilizationRates {hanging}")
    settings = machine.environment()
    stub = {name: settings[name] for name in ("LD_LIBRARY_PATH", "NVML_STUB", "PYTHONPATH")}
    kernel = start_kernel(**{**stub, "PYTHONPATH": f"{stub['PYTHONPATH']}:{ROOT}"})
    kernel.run("%load_ext gpumagic\nfrom gpumagic.gpus import nvml\nnvml.TIME_LIMIT = 3600")
    return kernel


HANGS = """
import os, threading, time

def wait_until_it_hangs():
    hangs = False
    while not hangs:
        time.sleep(0.01)
        turns = nvml._turns.get(os.getpid())
        last = turns and turns.last
        hangs = last and not last.answer.done() and time.monotonic() - last.began > 0.3
    print("ready", flush=True)
"""


def test_ctrl_c_ends_the_wait_for_a_driver_that_hangs(hung_kernel, hanging):
    """And the next question does not wait for it."""
    hung_kernel.run(HANGS)
    hanging.touch()
    [cell] = hung_kernel.interrupt("threading.Thread(target=wait_until_it_hangs).start()\n%gpuinfo")
    assert cell.ename == "KeyboardInterrupt"
    assert "did not answer in" in hung_kernel.value("%gpuinfo")


def test_a_driver_that_hangs_does_not_keep_a_kernel_that_watches_from_shutting_down(
    hung_kernel, hanging
):
    hung_kernel.run("%gpuinfo -w 0.1;")
    hanging.touch()
    assert "ready" in hung_kernel.run(f"{HANGS}\nwait_until_it_hangs()").stdout
    process = hung_kernel.manager.provisioner.process
    hung_kernel.client.shutdown()
    assert process.wait(timeout=PATIENCE) == 0
