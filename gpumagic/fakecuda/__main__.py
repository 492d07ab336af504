"""`python -m gpumagic.fakecuda -- python script.py`: run a command over a CUDA runtime without a GPU."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from gpumagic import fakecuda
from gpumagic.errors import GpuMagicError
from gpumagic.memory.presets import USUAL, typed


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by the command; return 2 if it cannot be started."""
    options = _parser().parse_args(arguments)
    try:
        wanted = fakecuda.environment(
            options.gpu or ["A100"],
            devices=options.devices,
            capacity=options.capacity,
            others=options.others,
            peer_access=options.peer_access,
        )
    except GpuMagicError as error:
        print(f"gpumagic: {error}", file=sys.stderr)
        return 2
    command = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        for name, value in wanted.items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    try:
        os.execvpe(command[0], command, {**os.environ, **wanted})  # noqa: S606  running it is the point
    except OSError as error:
        print(f"gpumagic: {command[0]}: {error.strerror}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpumagic.fakecuda",
        description="Run a command over torch's own CUDA, on a machine without a GPU. Kernels do nothing: what is "
        "allocated, copied and refused is real, what is computed is not.",
        epilog="A command that runs Python runs the one whose torch this is: python -m gpumagic.fakecuda of the same "
        "environment.",
    )
    usual = ", ".join(typed(USUAL))
    several = f"{usual} (A100) or another: --gpu list; again for a second"
    parser.add_argument("--gpu", action="append", metavar="NAME", help=several)
    parser.add_argument("--devices", type=int, metavar="N", help="how many of it")
    parser.add_argument(
        "--capacity", metavar="SIZE", help="the memory of each, such as 8GiB"
    )
    parser.add_argument(
        "--others",
        default="0",
        metavar="SIZE",
        help="what other processes hold of each",
    )
    parser.add_argument(
        "--peer-access",
        action="store_true",
        help="devices read each other's memory, as over NVLink",
    )
    command = "what to run; without one, the variables are printed"
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=command
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
