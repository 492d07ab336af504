"""Runs what the pages show: `python -m tests.pages` writes the outputs anew, `--check` says which are out of date.

A block of Python that a block of text follows is a cell and its output; so is a command and its output, which runs on
the machine that the comment before it names. A block of text that ends in `...` has the first lines, one that begins
with it the last. Cells run on two simulated GPUs of 256 MiB, in a terminal of 80 columns; each section of a page begins
with no variables. A cell whose output is not shown must not fail, unless it has a `raise`.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *(f"demo_notebooks/{page}.md" for page in ("questions", "dryrun", "engines")))
_SECTION = re.compile(r"^## ", re.MULTILINE)
_EXAMPLE = re.compile(
    r"(?:^<!-- machine: (?P<machine>\w+) -->\n)?^```(?P<language>python|bash)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_TIMES = re.compile(r"\d+(?:\.\d+)?\s?(?:us|ms|s|min)\b")
_VERSION = re.compile(r"torch \d[\w.+]*")
_BARS = re.compile(r"[▁▂▃▄▅▆▇█░▏▎▍▌▋▊▉↑]+")
_VARIES = re.compile(r"[Ss]ampled |[Pp]eak .*lines? \d+|CPU time|Tried in ")


@dataclass(frozen=True)
class Example:
    """One cell or command of a page."""

    code: str
    language: str
    machine: str | None
    output: str | None
    place: tuple[int, int]
    """Where its output stands in the page's text."""
    begins_section: bool

    def shortened(self, output: str) -> str:
        """Return as much of an output as the page shows."""
        here = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
        lines = [here.sub("node1", line).rstrip() for line in output.strip("\n").splitlines()]
        shown = (self.output or "").splitlines()
        if shown[-1:] == ["..."] and len(lines) >= len(shown):
            lines = [*lines[: len(shown) - 1], "..."]
        elif shown[:1] == ["..."] and len(lines) >= len(shown):
            lines = ["...", *lines[1 - len(shown) :]]
        return "\n".join(lines) + "\n"


def examples(text: str) -> Iterator[Example]:
    """Yield the examples of a page in their order."""
    sections = [found.start() for found in _SECTION.finditer(text)]
    before = 0
    for found in _EXAMPLE.finditer(text):
        new = any(before <= start < found.start() for start in sections)
        before = found.start()
        if found["language"] == "python" or found["output"] is not None:
            place = found.span("output")
            yield Example(
                found["code"], found["language"], found["machine"], found["output"], place, new
            )


def comparable(output: str) -> str:
    """Return the words of an output without what differs from run to run.

    That is times, bars, places between samples, and where a line wraps, which depends on how wide its time is.
    """
    lines = (
        _BARS.sub("|", _TIMES.sub("T", _VERSION.sub("torch", line)))
        for line in output.splitlines()
        if not _VARIES.search(line)
    )
    return re.sub(r"[\s─|]+", " ", " ".join(lines)).strip()


class Session:
    """A terminal of IPython with gpumagic and the simulated GPUs."""

    def __init__(self) -> None:
        from IPython.core.displayhook import DisplayHook
        from IPython.core.displaypub import DisplayPublisher
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        class Hook(DisplayHook):  # type: ignore[misc, unused-ignore]
            def write_output_prompt(self) -> None:
                """Show values as a notebook does, without a number."""

        class Publisher(DisplayPublisher):  # type: ignore[misc, unused-ignore]
            def publish(self, data: Any, *_arguments: Any, **_more: Any) -> None:
                if not _more.get("update"):
                    print(data["text/plain"])

        config = Config()
        config.HistoryManager.enabled = False
        config.GPUMagic.advice_seconds = (
            120.0  # other processes of this machine must not decide what is tried
        )
        self.shell = InteractiveShell.instance(
            config=config, display_pub_class=Publisher, displayhook_class=Hook
        )
        self.shell.run_line_magic("colors", "nocolor")
        self.run("%load_ext gpumagic")
        self.begin()

    def begin(self) -> None:
        """Begin a section: no variables, nothing on the devices."""
        self.run(
            "%reset -f\nimport torch, gpumagic, gc\ngpumagic.free_leaks()\ngc.collect()\ntorch.simgpu.empty_cache()"
        )
        self.run(
            "for i in range(torch.simgpu.device_count()): torch.simgpu.reset_peak_memory_stats(i)\ndel i"
        )
        self.run("from torch import nn\ntorch.manual_seed(0)\n%devices --diff;")

    def run(self, code: str, *, may_fail: bool = False) -> str:
        """Run a cell and return what it shows."""
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            result = self.shell.run_cell(code, store_history=True)
        if not result.success and not may_fail and "raise" not in code:
            raise SystemExit(f"failed: {code}\n{shown.getvalue()}")
        return shown.getvalue()


def _without_driver(machine: Any) -> None:
    machine.fail("nvmlInit_v2", 9)
    machine.say("init 9")


def _busy(machine: Any) -> None:
    gib = 1024**3
    machine.say(
        f"0.memory {80 * gib} {gib // 2} {gib * 5 // 2} {77 * gib}",
        f"0.compute 4711 {70 * gib}",
        "0.util 98",
    )
    machine.process(4711, "python train.py --big")


MACHINES: dict[str, Callable[[Any], None]] = {"no_driver": _without_driver, "busy": _busy}


def on_machine(name: str, command: str) -> str:
    """Return what a command shows on a machine whose driver is a stub."""
    from tests.nvml_stub.machine import Machine

    with TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        MACHINES[name](machine)
        arguments = [sys.executable, *command.split()[1:]]
        done = subprocess.run(
            arguments, env=machine.environment(), capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr


def written_anew(text: str) -> str:
    """Return a page with the outputs that its examples have now; those that say the same stay as they are."""
    session, pieces, end = Session(), [], 0
    for example in examples(text):
        if example.begins_section:
            session.begin()
        if example.machine is not None:
            ran = on_machine(example.machine, example.code)
        else:
            ran = session.run(example.code, may_fail=example.output is not None)
        if example.output is None:
            continue
        now = example.shortened(ran)
        pieces += [
            text[end : example.place[0]],
            example.output if _says_the_same(now, example.output) else now,
        ]
        end = example.place[1]
    return "".join([*pieces, text[end:]])


def _says_the_same(one: str, other: str) -> bool:
    return comparable(one) == comparable(other)


def main(arguments: list[str]) -> int:
    """Write or check the pages named, all without; each in a process of its own."""
    check = "--check" in arguments
    names = [each for each in arguments if each != "--check"] or [*PAGES]
    if len(names) > 1:
        return max(
            subprocess.call(
                [sys.executable, "-m", "tests.pages", name, *["--check"][: int(check)]], cwd=ROOT
            )
            for name in names
        )
    path = ROOT / names[0]
    before = path.read_text(encoding="utf-8")
    after = written_anew(before)
    if check:
        sys.stdout.writelines(
            difflib.unified_diff(*(each.splitlines(keepends=True) for each in (before, after)))
        )
        return int(before != after)
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    os.environ |= {"COLUMNS": "80", "GPUMAGIC_SIMGPU": "2x256MiB"}
    sys.exit(main(sys.argv[1:]))
