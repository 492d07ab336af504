"""Install the wheel into an environment like Colab's, and fail if pip would change anything that was there.

Colab's versions are those of its published image (August 2026). Its torch is stood in for by metadata alone,
since only pip's resolver is asked and the real one is gigabytes of CUDA.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COLAB = (
    "ipython==7.34.0", "ipykernel==6.17.1", "ipywidgets==7.7.1", "traitlets==5.7.1", "jupyter_client==7.4.9",
    "pandas==2.2.3", "numpy==2.1.3", "nvidia-ml-py==13.610.43",
)  # fmt: skip
TORCH = "2.11.0+cu128"


def main(wheel: Path) -> int:
    python = find_python()
    if python is None:
        print("colab: no Python 3.13 or 3.12 on this machine, not checked")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        colab = make_environment(python, Path(folder) / "colab")
        report = subprocess.check_output(
            [
                colab,
                "-m",
                "pip",
                "install",
                "-q",
                "--dry-run",
                "--report",
                "-",
                str(wheel),
            ],
            text=True,
        )
        changes = sorted(
            item["metadata"]["name"] for item in json.loads(report)["install"]
        )
        subprocess.check_call(
            [colab, "-m", "pip", "install", "-q", "--no-deps", str(wheel)]
        )
        loaded = subprocess.check_output(
            [colab, "-W", "error", "-c", LOAD], text=True
        ).strip()
    print(f"colab ({python}): pip would install {changes}; {loaded}")
    return 0 if changes == ["gpumagic"] and loaded == "loaded" else 1


LOAD = """
import sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # IPython 7.34's own, on this Python
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config
    shell = InteractiveShell.instance(config=Config(HistoryManager=Config(enabled=False)))
shell.run_line_magic("load_ext", "gpumagic")
heavy = sorted({"torch", "pandas", "pynvml"} & set(sys.modules))
print("loaded" if not heavy and shell.find_line_magic("gpuinfo") else f"imported {heavy}")
"""


def find_python() -> str | None:
    """Return a Python of Colab's version, current or the one before."""
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    for version in ("3.13", "3.12"):
        pyenv = [
            str(path) for root in roots for path in root.glob(f"{version}.*/bin/python")
        ]
        for candidate in (shutil.which(f"python{version}"), *pyenv):
            if (
                candidate
                and subprocess.run(
                    [candidate, "--version"], capture_output=True, check=False
                ).returncode
                == 0
            ):
                return candidate
    return None


def make_environment(python: str, folder: Path) -> str:
    """Return the interpreter of a new environment that pip takes for Colab's."""
    subprocess.check_call([python, "-m", "venv", str(folder)])
    inside = str(folder / "bin" / "python")
    subprocess.check_call([inside, "-m", "pip", "install", "-q", *COLAB])
    purelib = subprocess.check_output(
        [inside, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        text=True,
    ).strip()
    metadata = Path(purelib) / f"torch-{TORCH}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}\n"
    )
    (metadata / "INSTALLER").write_text("gpumagic's CI\n")
    (metadata / "RECORD").write_text("")
    return inside


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
