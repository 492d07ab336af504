"""`python -m gpumagic demo` and `python -m gpumagic gpuinfo`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from gpumagic.errors import GpuMagicError, OptionError

SHORTEST_INTERVAL = 0.1
"""Seconds, as `%gpuinfo -w` has it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except GpuMagicError as error:
        print(f"gpumagic: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpumagic: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpumagic", description="See and steer your GPUs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="run a demo notebook on this machine's GPU, or on a simulated one")
    demo.add_argument("name", nargs="?", default="tour", metavar="NAME", help="which one (tour)")
    demo.add_argument(
        "--output", type=Path, default=Path("gpumagic-demo"), metavar="DIR", help="where the executed notebook goes"
    )
    demo.set_defaults(run=_demo)
    info = commands.add_parser("gpuinfo", help="show the GPUs, or why there is none")
    info.add_argument("devices", nargs="*", metavar="DEVICE", help="only these, such as cuda:1")
    info.add_argument("-p", "--processes", action="store_true", help="list the processes on each GPU")
    info.add_argument("-a", "--all", action="store_true", help="every field: clocks, fan, bus, UUID...")
    instead = info.add_mutually_exclusive_group()
    instead.add_argument(
        "-w", "--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="refresh every SECONDS until Ctrl-C"
    )
    instead.add_argument("--best", action="store_true", help="print only the device with most free memory")
    instead.add_argument("--json", action="store_true", help="print JSON instead of the table")
    info.set_defaults(run=_gpuinfo)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from gpumagic import demo

    return demo.run(options.name, options.output)


def _gpuinfo(options: argparse.Namespace) -> int:
    import json

    from gpumagic import api
    from gpumagic.gpus import live

    if options.watch is not None and not options.watch >= SHORTEST_INTERVAL:
        raise OptionError(f"-w {options.watch:g} is too fast; it takes seconds of at least {SHORTEST_INTERVAL}")
    ask = functools.partial(api.gpuinfo, *options.devices, processes=options.processes, everything=options.all)
    if options.watch is not None:
        live.Recorder(ask, options.watch, live.terminal_display()).run()
        return 0
    report = ask()
    if options.best:
        if report.best is None:
            raise GpuMagicError(report.cause or "no GPU here says how much memory it has free")
        print(report.best)
        return 0
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
