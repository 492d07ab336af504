"""Runs sessions of stories until the time is over, and prints what was found with the cells that led to it."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.kernels import Cell, Kernel
from tests.nvml_stub.machine import Machine
from tests.soak import stories
from tests.soak.stories import Story

STORIES = 25
"""In one session."""
PATIENCE = 180
"""Seconds until a cell that says nothing is taken for hung."""
_DRIVER_FAULTS = (
    "init 9", "count 0", "fail * nvmlDeviceGetMemoryInfo_v2 15", "fail * nvmlDeviceGetHandleByIndex_v2 15",
    "fail * nvmlDeviceGetName 999", "fail 1 nvmlDeviceGetUUID 15", "fail * nvmlDeviceGetUtilizationRates 3",
)  # fmt: skip


_COUNTED = {
    "calm": "undisturbed", "signal": "signals", "injected": "injected interrupts", "full": "full devices",
    "driver": "faults of the driver",
}  # fmt: skip


@dataclass
class Disturbance:
    """What happens to one cell."""

    kind: str
    amount: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "signal":
            return f"SIGINT after {self.amount:.3f} s"
        if self.kind == "injected":
            return f"KeyboardInterrupt in {self.where or 'none of its lines'}"
        if self.kind == "full":
            return f"{self.amount:.0%} of the first device taken"
        return (
            f"the driver: {_DRIVER_FAULTS[int(self.amount)]}" if self.kind == "driver" else "calm"
        )


@dataclass
class Told:
    """What a soak did and found."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        done = ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
        return f"{done}; {len(self.findings)} findings"


_EXPECTED = ("KeyboardInterrupt", "OutOfMemory", "UsageError")
"""The errors that gpumagic raises where a cell or the user asks for them."""

_NEXT = """%%ondevice 1 -q -o soak_report
soak_there = torch.ones(300)
soak_here = soak_there.cpu()
assert soak_there.device.index == 1 and soak_there.device.type != 'cpu', soak_there.device"""
"""The cell after one that was interrupted."""


class Found(Exception):
    """Something was left behind: the kernel is of no more use."""


class Died(Found):
    """The kernel's process has ended."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"the kernel died, with exit status {status}")
        self.status = status


class SoakKernel(Kernel):
    """A kernel that may leave a cell unanswered, as one that is interrupted outside of the cell does."""

    def one(self, code: str, *, store: bool = True, after: float | None = None) -> Cell:
        """Run one cell, with SIGINT so many seconds after it began; what ipykernel aborts after an error, again."""
        while (cell := self._once(code, store, after)).status == "aborted":
            pass
        return cell

    def _once(self, code: str, store: bool, after: float | None) -> Cell:
        message = self.client.execute(code, store_history=store, allow_stdin=False)
        cell, timer = Cell(), None
        deadline = time.monotonic() + PATIENCE
        try:
            while True:
                heard = self._heard(deadline)
                if heard["parent_header"].get("msg_id") != message:
                    continue
                cell.hear(heard)
                state = heard["content"].get("execution_state")
                if state == "busy" and after is not None and timer is None:
                    timer = threading.Timer(after, self.manager.interrupt_kernel)
                    timer.start()
                if state == "idle":
                    break
        finally:
            if timer is not None:
                timer.cancel()
                timer.join()
        return self._answered(cell, message)

    def _heard(self, deadline: float) -> dict:
        while True:
            with contextlib.suppress(queue.Empty):
                return self.client.get_iopub_msg(timeout=1)
            if not self.manager.is_alive():
                process = getattr(self.manager.provisioner, "process", None)
                raise Died(process and process.poll())
            if time.monotonic() > deadline:
                raise Found(f"the kernel has said nothing for {PATIENCE} s")

    def _answered(self, cell: Cell, message: str) -> Cell:
        with contextlib.suppress(queue.Empty):
            while True:
                reply = self.client.get_shell_msg(timeout=5)
                if reply["parent_header"].get("msg_id") == message:
                    return cell.take(reply["content"])
        return cell


class Session:
    """One kernel and its stories."""

    def __init__(
        self, seed: int, number: int, python: str, told: Told, kinds: tuple[str, ...] = ()
    ) -> None:
        self._rng = random.Random(f"{seed}/{number}")
        self._name = f"seed {seed}, session {number}"
        self._python, self._told, self._kinds = python, told, kinds
        self._steps: list[str] = []
        self._disturbed = ""

    def run(self, deadline: float) -> None:
        """Run stories until one finds something, all are done, or the time is over."""
        with tempfile.TemporaryDirectory() as home, (Path(home) / "stderr").open("w+") as errors:
            self._home, self._errors = Path(home), errors
            self._machine = Machine(Path(home) / "machine", gpus=2)
            kernel = self._kernel = self._start()
            try:
                self._begin()
                for number in range(STORIES):
                    if time.monotonic() > deadline:
                        break
                    self._tell(stories.draw(self._rng, self._backend, self._kinds), number)
                kernel.one("%unload_ext gpumagic\n%load_ext gpumagic")
            except Found as found:
                if self._was_ended_by_ipykernel(found):
                    self._count("kernels that ipykernel ended")
                else:
                    self._note(found)
            finally:
                kernel.stop()

    def _start(self) -> SoakKernel:
        backend = subprocess.check_output(
            [self._python, "-c", "import torch; print('cuda' if torch.version.cuda else 'simgpu')"],
            text=True,
        )
        self._backend = backend.strip()
        machine = self._machine.environment(real_torch=True)
        extra = {name: machine[name] for name in ("LD_LIBRARY_PATH", "NVML_STUB")}
        if self._backend == "cuda":
            from gpumagic import fakecuda

            extra = fakecuda.environment(
                devices=2, capacity="1GiB"
            )  # it brings a driver of its own
        return SoakKernel(self._home, python=self._python, stderr=self._errors, **extra)

    def _begin(self) -> None:
        ready = (
            "%load_ext gpumagic\nimport torch, gpumagic",
            'gpumagic.simgpu.enable(devices=2, memory="1GiB")' if self._backend == "simgpu" else "torch.cuda.init()",
            "%%ondevice 0 -q\ntorch.ones(1).cpu()", "%%oomguard\n1", "r = %devices", "r = %gpuinfo",
            f"%%dryrun --capacity 1GiB\ntorch.ones(9, device='{self._backend}:0')",
            f"from tests.soak import inside\ninside.begin({self._backend!r})",
        )  # fmt: skip
        for cell in ready:
            seen = self._kernel.one(cell)
            if seen.status != "ok":
                raise Found(f"{cell!r} fails: {seen.ename}: {seen.evalue}")

    def _was_ended_by_ipykernel(self, found: Found) -> bool:
        """Return whether SIGINT came between ipykernel's handlers: it ends as if asked to, also without gpumagic."""
        return isinstance(found, Died) and found.status == 0 and self._disturbed == "signal"

    def _tell(self, story: Story, number: int) -> None:
        self._steps = [f"story {number}: {story.name}"]
        self._count("stories")
        self._ask(f"inside.forget({story.memory!r})")
        for cell in story.setup:
            self._steps.append(cell)
            self._kernel.one(cell)
        for cell in story.cells:
            self._step(story, cell)
        for cell in story.ends:
            self._steps.append(cell)
            self._kernel.one(cell)
            self._look(cell)
        self._ask(f"inside.forget({story.memory!r})")

    def _step(self, story: Story, cell: str) -> None:
        disturbance = self._choose()
        self._disturbed = disturbance.kind
        self._steps.append(cell)
        self._prepare(disturbance)
        seen = self._kernel.one(
            cell, after=disturbance.amount if disturbance.kind == "signal" else None
        )
        self._count("cells")
        is_answered = seen.count is not None
        if (
            "reload_ext" in cell and seen.status != "ok"
        ):  # Ctrl-C in the middle of it: as a user would, again
            self._kernel.one(cell)
        if (
            not is_answered
        ):  # ipykernel lost it before its events: the user's next cell puts right what it has left
            self._steps.append("    ^ without a reply")
            self._kernel.one("pass")
        # SIGINT may come before IPython puts the cell into its history; an injected interrupt comes later.
        is_recorded = is_answered and not (
            disturbance.kind == "signal" and seen.ename == "KeyboardInterrupt"
        )
        self._look(cell if is_recorded else None, disturbance, goes_on=bool(story.ends))
        self._judge(story, seen, disturbance)
        self._restore(disturbance)
        if disturbance.kind in ("signal", "injected"):
            self._works_again(story)

    def _choose(self) -> Disturbance:
        rng = self._rng
        kind = rng.choices(("calm", "signal", "injected", "full", "driver"), (25, 25, 35, 8, 7))[0]
        if kind == "full":
            return Disturbance(kind, rng.uniform(0.3, 0.99))
        if kind == "driver" and self._backend == "simgpu":
            return Disturbance(kind, rng.randrange(len(_DRIVER_FAULTS)))
        if kind == "signal":
            return Disturbance(kind, 10 ** rng.uniform(-3, 0.3))
        if kind == "injected":
            return Disturbance(kind, rng.randrange(rng.choice((60, 400, 1200, 2500))))
        return Disturbance("calm")

    def _prepare(self, disturbance: Disturbance) -> None:
        if disturbance.kind == "injected":
            self._ask(f"inside.arm({int(disturbance.amount)})")
        if disturbance.kind == "full":
            self._ask(f"inside.fill({disturbance.amount})")
        if disturbance.kind == "driver":
            self._drive(_DRIVER_FAULTS[int(disturbance.amount)])

    def _restore(self, disturbance: Disturbance) -> None:
        if disturbance.kind == "full":
            self._ask("inside.empty()")
        if disturbance.kind == "driver":
            self._drive()

    def _drive(self, *faults: str) -> None:
        lines = self._machine.lines
        self._machine.say(*faults)
        self._machine.environment(real_torch=True)
        self._machine.lines = lines[: len(lines) - len(faults)]
        self._ask("inside.reread_driver()")

    def _look(
        self, text: str | None, disturbance: Disturbance | None = None, *, goes_on: bool = False
    ) -> None:
        where = self._ask(f"inside.check({text!r}, goes_on={goes_on})", disturbance)
        if disturbance is not None:
            disturbance.where = where
            self._count(
                _COUNTED[disturbance.kind]
                if where or disturbance.kind != "injected"
                else "not reached"
            )

    def _ask(self, question: str, disturbance: Disturbance | None = None) -> str:
        """Ask the kernel's part, again where a late SIGINT came into the question."""
        for _ in range(3):
            cell = self._kernel.one(f"print('answer', {question})", store=False)
            if cell.ename != "KeyboardInterrupt" and cell.status == "ok":
                break
        else:
            raise Found(
                f"{question} fails: {cell.ename}: {cell.evalue}\n{''.join(cell.tracebacks)}"
            )
        answer = cell.stdout.rpartition("answer ")[2].partition("\n")[0]
        if not answer.startswith("{"):
            return ""
        told = json.loads(answer)
        if disturbance is not None:
            disturbance.where = told["where"]
            self._steps.append(f"    ^ {disturbance}")
        if told["found"]:
            raise Found("\n".join(told["found"][:20]))
        return str(told["where"])

    def _judge(self, story: Story, seen: Cell, disturbance: Disturbance) -> None:
        """Fail where a cell ended as only a fault of gpumagic's would have it end."""
        interrupted = disturbance.kind in ("signal", "injected")
        if seen.ename == "KeyboardInterrupt" and not interrupted:
            raise Found(f"KeyboardInterrupt, and nobody interrupted\n{''.join(seen.tracebacks)}")
        # That of a late Ctrl-C, or of a callback, is shown beside the cell's own.
        trace = "".join(each for each in seen.tracebacks if seen.ename in each)
        for each in seen.tracebacks:
            if _is_of_gpumagic(each):
                raise Found(f"an error of gpumagic's own\n{each}")
        if disturbance.kind == "calm" and story.fails == "" and seen.status != "ok":
            raise Found(f"{seen.ename}: {seen.evalue}\n{trace}")
        said = seen.stdout + seen.stderr
        if not interrupted and ("Error in callback" in said or "Exception ignored" in said):
            raise Found(f"an error outside of the cell:\n{said}\n{''.join(seen.tracebacks)}")

    def _works_again(self, story: Story) -> None:
        """Check that the next cells are served as if nothing had been."""
        far = f"device='{self._backend}:0'"
        asked = [
            (
                _NEXT,
                "[(row.direction, row.nbytes) for row in soak_report.moves]",
                "[('device-to-host', 1200)]",
            )
        ]
        if story.name.startswith(("dryrun", "oom")):
            dry = f"%%dryrun --capacity 1GiB -o soak_dry\nsoak_far = torch.ones(2**20, {far})"
            asked.append(
                (
                    dry,
                    f"(soak_dry.peak['{self._backend}:0'] >= {2**22}, soak_dry.fits)",
                    "(True, True)",
                )
            )
        for code, question, expected in asked:
            self._steps.append(code)
            for _ in range(2):  # a late SIGINT may come into the first
                seen = self._kernel.one(code)
                if seen.ename != "KeyboardInterrupt":
                    break
            if seen.status != "ok":
                trace = "".join(seen.tracebacks)
                raise Found(
                    f"the cell after an interrupt fails: {seen.ename}: {seen.evalue}\n{trace}"
                )
            answer = self._kernel.one(question, store=False).value
            if answer != expected:
                shown = self._kernel.one(
                    "print(soak_dry if 'soak_dry' in dir() else soak_report)", store=False
                ).stdout
                if (
                    "could not be set up" not in shown
                ):  # for what the story keeps, with or without the interrupt
                    raise Found(
                        f"the cell after an interrupt: {question} is {answer}, not {expected}:\n{shown}"
                    )
            self._look(code, goes_on=bool(story.ends))
            self._count("cells after an interrupt")

    def _count(self, what: str) -> None:
        self._told.counts[what] += 1

    def _note(self, found: Found) -> None:
        self._errors.seek(0)
        log = self._errors.read()[-6000:]
        text = "\n".join(
            ("-" * 80, f"FOUND, {self._name}: {found}", *self._steps, f"stderr: {log}")
        )
        self._told.findings.append(text)
        print(text, flush=True)


def _is_of_gpumagic(trace: str) -> bool:
    """Return whether gpumagic's code raised the last error of a traceback without being asked to."""
    lines = trace.splitlines()
    named = [line for line in lines if "Traceback (most recent call last)" in line] or lines
    last = [line for line in lines if line.startswith(("File ", "~/", "/", "Input", "Cell"))][-1:]
    return any("/gpumagic/" in line for line in last) and not any(
        name in named[-1] for name in _EXPECTED
    )


def main(arguments: list[str] | None = None) -> int:
    """Soak, print what was found, and return 1 where anything was."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="how long; the last story is finished"
    )
    parser.add_argument("--python", default=sys.executable, help="the Python whose kernels are run")
    parser.add_argument(
        "--only",
        nargs="*",
        default=(),
        help="kinds of stories: ondevice, oom, dryrun, looking, all",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="what the choices depend on; today's time"
    )
    parser.add_argument("--session", type=int, default=None, help="only this session of the seed")
    options = parser.parse_args(arguments)
    seed = int(time.time()) if options.seed is None else options.seed
    told, deadline = Told(), time.monotonic() + 60 * options.minutes
    number = options.session or 0
    while time.monotonic() < deadline:
        Session(seed, number, options.python, told, tuple(options.only)).run(deadline)
        told.counts["sessions"] += 1
        print(f"seed {seed}, session {number}: {told}", flush=True)
        number += 1
        if options.session is not None:
            break
    return 1 if told.findings else 0
