"""`python -m gpumagic demo` and `python -m gpumagic gpuinfo`.

The demo notebooks take the machine's GPU if it has one and simulate two otherwise, so they run anywhere.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumagic.errors import GpuMagicError, OptionError, nearest

if TYPE_CHECKING:
    from nbformat import NotebookNode

_DEMO_PACKAGES = ("nbclient", "nbconvert", "nbformat", "ipykernel")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit status."""
    options, rest = _parser().parse_known_args(arguments)
    try:
        status: int = options.run(options, rest)
    except GpuMagicError as error:
        print(f"gpumagic: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpumagic: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpumagic",
        description="What GPUs there are, and a demonstration of gpumagic.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="run a demo notebook on this machine's GPU, or on a simulated one"
    )
    demo.add_argument(
        "name", nargs="?", default="tour", metavar="NAME", help="which one (tour)"
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("gpumagic-demo"),
        metavar="DIR",
        help="where the executed notebook goes",
    )
    demo.set_defaults(run=_demo)
    info = commands.add_parser(
        "gpuinfo",
        help="show the GPUs, or why there is none",
        usage="%(prog)s [DEVICE ...] [OPTIONS]",
        epilog="-p, -a and -w [SECONDS] are those of %gpuinfo; -w goes on until Ctrl-C",
    )
    instead = info.add_mutually_exclusive_group()
    instead.add_argument(
        "--best",
        action="store_true",
        help="print only the device with most free memory",
    )
    instead.add_argument(
        "--json", action="store_true", help="print JSON instead of the table"
    )
    info.set_defaults(run=_gpuinfo)
    return parser


def _gpuinfo(options: argparse.Namespace, rest: Sequence[str]) -> int:
    import json

    from gpumagic import api
    from gpumagic.gpus import live
    from gpumagic.options import PARSERS

    asked = PARSERS["gpuinfo"].parse_line(shlex.join(rest))
    if asked.each_cell or asked.engines or asked.watch == 0:
        raise OptionError(
            "here are no cells, no engines and nothing to turn off: write that in a notebook"
        )
    if asked.watch is not None and (options.best or options.json):
        raise OptionError("-w is not allowed with --best and --json")
    ask = functools.partial(
        api.gpuinfo, *asked.devices, processes=asked.processes, everything=asked.all
    )
    if asked.watch is not None:
        live.GpuWatch(ask, asked.watch, live.terminal_display()).run()
        return 0
    report = ask()
    if options.best and report.best is None:
        raise GpuMagicError(
            report.cause or "no GPU here says how much memory it has free"
        )
    if options.best:
        print(report.best)
    elif options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(report)
    return 0


def _demo(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Execute a demo notebook and write it and its HTML; return 0 if every cell did what it should."""
    if rest:
        raise OptionError(
            f"there is no {rest[0]!r} here; there are NAME and --output DIR"
        )
    output: Path = options.output
    source = _notebook(options.name)
    missing = [
        name for name in _DEMO_PACKAGES if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise GpuMagicError(
            f"the demo needs {', '.join(missing)}; install them with: {sys.executable} -m pip install 'gpumagic[demo]'"
        )
    import nbformat
    from nbconvert import HTMLExporter

    from gpumagic.memory import allocator

    notebook = nbformat.read(source, as_version=4)
    if not allocator.accelerators():
        # It is compiled now, where it says so, rather than in a cell that seems to hang.
        from gpumagic.simgpu import _module

        _module.load()
    print(f"Running {source.name} in a fresh kernel:")
    error = execute_notebook(notebook)
    if error is not None:
        print(f"\nIt stopped at an error:\n{error}", file=sys.stderr)
    output.mkdir(parents=True, exist_ok=True)
    executed = output.resolve() / f"{source.stem}.ipynb"
    page = executed.with_suffix(".html")
    nbformat.write(notebook, executed)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    page.write_text(html, encoding="utf-8")
    print(f"\nExecuted notebook  {executed}\nAs a web page      {page}")
    return 0 if error is None else 1


def execute_notebook(notebook: NotebookNode) -> str | None:
    """Execute a notebook in place, and print what runs and says what; return the error that stopped it, if one did."""
    # A kernel named python3 elsewhere on the machine must not win over the one of this environment.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    numbers = itertools.count(1)

    def started(cell: Any, **_: object) -> None:
        if cell.cell_type == "code":
            print(
                f"  {next(numbers):>2}/{len(code_cells)}  {_title(cell)[:70]}",
                flush=True,
            )

    def executed(cell: Any, **_: object) -> None:
        answer = _answer(cell)
        if answer:
            print(f"        {answer}")

    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # a progress bar is then its last state, not each of them
        # The kernel's warnings are about its server, which is this process.
        extra_arguments=["--log-level=ERROR"],
        on_cell_start=started,
        on_cell_executed=executed,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return str(error)
    finally:
        # What cleared displays leave, such as that of progress, is empty; nbconvert warns of it.
        for cell in code_cells:
            cell.outputs = [
                output for output in cell.outputs if output.get("data") != {}
            ]
    return None


def _title(cell: Any) -> str:
    """Return the first line of a cell that is no comment."""
    for line in cell.source.splitlines():
        if not line.startswith("#"):
            return str(line)
    return ""


def _answer(cell: Any) -> str:
    """Return what the first report of a cell says first; empty where there is none."""
    for output in cell.outputs:
        data = output.get("data", {})
        if "text/html" in data and "text/plain" in data:
            first, *rest = data["text/plain"].splitlines()
            wrapped = itertools.takewhile(lambda line: line.startswith("  "), rest)
            return " ".join([first, *map(str.strip, wrapped)])
    return ""


def _notebook(name: str) -> Path:
    """Return a demo notebook inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).parent
    notebooks = [
        *(package / "demo_notebooks").glob("*.ipynb"),
        *(package.parent / "demo_notebooks").glob("*.ipynb"),
    ]
    for path in notebooks:
        if path.stem == name:
            return path
    names = sorted(path.stem for path in notebooks)
    near = nearest(name, names)
    hint = f"did you mean {near}? " if near else ""
    there = ", ".join(names) or f"none in {package / 'demo_notebooks'}"
    raise GpuMagicError(f"there is no demo {name!r}; {hint}there are {there}")


if __name__ == "__main__":
    raise SystemExit(main())
