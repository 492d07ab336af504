"""A machine that the stub `libnvidia-ml.so.1` plays: described here, run in a real subprocess with the real pynvml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

GIB = 1024**3
SOURCE = Path(__file__).with_name("stub.c")
ROOT = Path(__file__).parents[2]

PROBE = """
import json, os, sys, ctypes
stub = ctypes.CDLL("libnvidia-ml.so.1")
from gpumagic.gpus import cards, probe
{before}
before = stub.nvml_stub_calls()
report = probe.read_gpus({arguments})
calls = stub.nvml_stub_calls() - before
print(json.dumps({{"report": report.to_dict(), "text": str(report), "calls": calls,
                  "imported": [name for name in ("torch", "pandas") if name in sys.modules], "extra": {extra}}}))
"""


@cache
def library(*, old_driver: bool = False) -> Path:
    """Compile the stub once and return the folder of its `libnvidia-ml.so.1`."""
    folder = Path(mkdtemp(prefix="nvml_stub_"))
    flags = ["-DOLD_DRIVER"] if old_driver else []
    target = folder / "libnvidia-ml.so.1"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-Wl,-soname,libnvidia-ml.so.1",
        *flags,
        str(SOURCE),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)
    return folder


@dataclass
class Machine:
    """GPUs, faults and an installed torch; `probe` runs `gpus.probe` on it in a process of its own."""

    folder: Path
    gpus: int = 1
    cuda: str | None = "12.8"
    """CUDA of the torch that an import would find; that torch cannot really be imported."""
    old_driver: bool = False
    lines: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.say(f"count {self.gpus}", "driver 570.86")
        for number in range(self.gpus):
            self.add_card(number)
        package = self.folder / "site" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('torch was imported')")
        (package / "version.py").write_text(
            f"__version__ = '2.13.0'\ncuda = {self.cuda!r}\nhip = None\n"
        )
        # The host's own pid namespace, where the driver's pids are ours; a test may move the process out of it.
        (self.folder / "proc/self/ns").mkdir(parents=True)
        self.namespace("pid:[4026531836]")

    def namespace(self, name: str) -> None:
        link = self.folder / "proc/self/ns/pid"
        link.unlink(missing_ok=True)
        link.symlink_to(name)

    def process(self, pid: int, command: str, files: tuple[str, ...] = ()) -> None:
        """Put a process into this machine's /proc, with the device files it has open."""
        folder = self.folder / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        for number, name in enumerate(files):
            (folder / "fd" / str(number)).symlink_to(name)

    def add_card(self, number: int) -> None:
        self.say(
            f"{number}.name NVIDIA A100-SXM4-80GB", f"{number}.uuid GPU-{number:08d}-0000-0000-0000-000000000000",
            f"{number}.memory {80 * GIB} {GIB // 2} {70 * GIB} {9 * GIB}", f"{number}.util {30 + number}",
            f"{number}.temp 60", f"{number}.power 250500", f"{number}.cap 400000", f"{number}.throttle 0x1",
            f"{number}.state 0", f"{number}.fan 40", f"{number}.clock 1410 1980",
            f"{number}.memutil 12", f"{number}.pcie 3 4 8 16",
        )  # fmt: skip

    def say(self, *lines: str | bytes) -> None:
        """Add settings of stub.c; later ones overrule earlier ones."""
        self.lines += [line if isinstance(line, bytes) else line.encode() for line in lines]

    def fail(self, symbol: str, code: int, device: int | str = "*") -> None:
        self.say(f"fail {device} {symbol} {code}")

    def probe(
        self,
        arguments: str = "",
        *,
        before: str = "",
        extra: str = "None",
        real_torch: bool = False,
        **environment: str,
    ) -> dict[str, Any]:
        """Return the report as JSON, its text, the NVML calls it took and which heavy modules were imported."""
        setup = (
            f"from pathlib import Path; cards.PROC = Path({str(self.folder / 'proc')!r})\n{before}"
        )
        code = PROBE.format(arguments=arguments, before=setup, extra=extra)
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**self.environment(real_torch=real_torch), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert not result.stderr, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def environment(self, *, real_torch: bool = False) -> dict[str, str]:
        """Return the environment of a process on this machine; what is said of it later has no effect there."""
        settings = self.folder / "machine.txt"
        settings.write_bytes(b"\n".join(self.lines) + b"\n")
        site = [] if real_torch else [str(self.folder / "site")]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "NVIDIA_"))}
        paths = {
            "LD_LIBRARY_PATH": str(library(old_driver=self.old_driver)),
            "NVML_STUB": str(settings),
            "PYTHONPATH": os.pathsep.join([*site, str(ROOT)]),
            "COLUMNS": "80",
        }
        return {**clean, **paths}
