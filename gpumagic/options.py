"""What each magic accepts, declared once: for parsing, for `--help`, for `%magic?` and for completion.

A line that cannot be read is an `OptionError` of one line that ends in what would be right.
"""

from __future__ import annotations

import argparse
import difflib
import keyword
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from typing import NoReturn, TypeVar

from gpumagic.errors import OptionError

_T = TypeVar("_T")
QUERY_TIMEOUT, CELL_TIMEOUT = 10.0, 30.0
"""Seconds to wait for engines to answer, and for those that run a cell and may import torch first."""
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``"512"``, ``"100MB"``, ``"1.5GiB"`` or ``"2g"`` means.

    Units are binary whichever way they are written: 1 GB here is 1 GiB, as in torch's own messages.

    Raises:
        OptionError: the text is not a size; the message names what would be.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise OptionError(f"{text!r} is not a size; write bytes or a unit: 4096, 100MiB, 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def positive_int(text: str) -> int:
    """Return a count of at least 1, or raise `OptionError`."""
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < 1:
        raise OptionError(f"{text!r} is not a whole number of at least 1, such as 3")
    return int(text)


def watch_interval(text: str) -> float:
    """Return seconds of at least 0.1, 0 for ``"off"``, or raise `OptionError`."""
    if text == "off":
        return 0.0
    if not re.fullmatch(r"\d+(\.\d+)?|\.\d+", text, re.ASCII) or float(text) < 0.1:
        raise OptionError(f"{text!r} is neither off nor seconds of at least 0.1; write devices before -w")
    return float(text)


def variable_name(text: str) -> str:
    """Return a Python name, or raise `OptionError`."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise OptionError(f"{text!r} cannot be a variable; write a Python name, such as report or batch_size")
    return text


def variable_names(text: str) -> list[str]:
    """Return the names of a list such as ``"model,x"``, or raise `OptionError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if not name.isidentifier()]
    if wrong or not names:
        raise OptionError(f"{(wrong or [text])[0]!r} is no variable's name; write names such as --move model,x")
    return names


class Parser(argparse.ArgumentParser):
    """argparse that raises `OptionError` with a suggestion instead of printing and exiting.

    Args:
        prog: the magic.
        description: what it does.
        needs_body: the options with which it needs the cell's text, to run it more than once or to read it.
        forwarded: the names of those that go to the engines with the cell.
        refused: the names of those that are about one process, and so are refused with ``--engines``.
        moved: options of `%%dryrun` that are looked for here.
    """

    def __init__(
        self, prog: str, description: str, *, needs_body: Sequence[str] = (), forwarded: Sequence[str] = (),
        refused: Sequence[str] = (), moved: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(
            prog=prog, description=description, add_help=False, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.needs_body, self.forwarded, self.refused, self.moved = needs_body, forwarded, refused, moved
        self.add_argument("-h", "--help", action="store_true", help="show this help; a cell does not run")

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")

    def parse_line(self, line: str) -> argparse.Namespace:
        """Return the options of a magic's line; a trailing `;` and a comment are not part of it.

        Raises:
            OptionError: an unknown option (the nearest known one is suggested), a bad value, an open quote.
        """
        line = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip().removesuffix(";")
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise OptionError(f"{self.prog}: {error} in {line!r}; close it or leave it out") from None
        moved = [word for word in words if word.partition("=")[0] in self.moved]
        if moved:
            raise OptionError(f"{self.prog} has no option {moved[0]!r}; %%dryrun has it")
        options, unknown = self.parse_known_args(words)
        if unknown:
            raise OptionError(self._unknown(unknown[0]))
        return options

    def option_strings(self) -> list[str]:
        """Return every option as it is typed, in the order of the help."""
        return [string for action in self._actions for string in action.option_strings]

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{self.prog}: {word!r} is one argument too many; see {self.prog} --help"
        near = difflib.get_close_matches(word, self.option_strings(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(self.option_strings())}"
        return f"{self.prog} has no option {word!r}; {hint}"


def _typed(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """Let argparse say our error: it keeps the text of an ArgumentTypeError and drops that of a ValueError."""

    def argument(text: str) -> _T:
        try:
            return read(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


def engine_targets(text: str) -> str:
    """Return which engines are meant, ``"px"``, ``"all"``, ``"0,2"`` or ``"1:3"``, or raise `OptionError`."""
    if not re.fullmatch(r"px|all|-?\d*:-?\d*(:-?\d*)?|\d+(,\d+)*", text, re.ASCII):
        raise OptionError(f"{text!r} names no engines; write all, 0,2 or 1:3, and a device before --engines")
    return text


def positive_seconds(text: str) -> float:
    """Return a time above 0, or raise `OptionError`."""
    if not re.fullmatch(r"\d+(\.\d+)?|\.\d+", text, re.ASCII) or float(text) == 0:
        raise OptionError(f"{text!r} is no number of seconds above 0, such as 10")
    return float(text)


def _add_engine_options(parser: Parser, timeout: float, more: str = "") -> None:
    parser.add_argument(
        "--engines", nargs="?", metavar="TARGETS", type=_typed(engine_targets), const="px",
        help="on the engines of the ipyparallel cluster: those of %%px, or all, 0,2, 1:3" + more,
    )  # fmt: skip
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_typed(positive_seconds), default=timeout,
        help=f"wait so long for engines ({timeout:g})",
    )  # fmt: skip


def _add_cell_options(parser: Parser, more: str = "") -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="show no report")
    parser.add_argument(
        "-o", "--out", metavar="NAME", type=_typed(variable_name), help="also store the report in a variable"
    )
    _add_engine_options(parser, CELL_TIMEOUT, more)


def _gpuinfo() -> Parser:
    parser = Parser(
        "%gpuinfo",
        "Show the GPUs, who uses them, and this kernel's part; or why there is none.\n"
        "A figure that cannot be had says why. Looking never initialises CUDA.\n\n"
        "    %gpuinfo -p                 who else is there\n"
        "    %gpuinfo -w                 keep the table moving while other cells run\n"
        "    device = %gpuinfo --best    where most memory is free\n"
        "    r = %gpuinfo                a report: r.to_pandas(), r.cause, r.best",
        refused=("each_cell", "best", "bench"),
    )
    parser.add_argument("devices", nargs="*", metavar="DEVICE", help="only these: cuda:1, 1, all are shown without")
    parser.add_argument("-p", "--processes", action="store_true", help="list the processes on each GPU")
    parser.add_argument("-a", "--all", action="store_true", help="every field; PCIe and NVLink traffic take a moment")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "-w", "--watch", nargs="?", metavar="SECONDS", type=_typed(watch_interval), const=2.0,
        help="refresh in place every SECONDS (2) while other cells run; -w off or an interrupt stops it",
    )  # fmt: skip
    parser.add_argument(
        "--each-cell", nargs="?", choices=("on", "off"), const=True,
        help="on: after every cell a line with its memory change, peak and time; alone, a table of the last cells: "
        "which grew memory by how much",
    )  # fmt: skip
    instead.add_argument("--best", action="store_true", help="only return the device with most free memory")
    instead.add_argument("--bench", action="store_true", help="measure matrix products and copies; takes some seconds")
    parser.add_argument("--json", action="store_true", help="return JSON text instead of the table")
    _add_engine_options(parser, QUERY_TIMEOUT)
    return parser


def _devices() -> Parser:
    parser = Parser(
        "%devices",
        "List the live tensors, a row a storage: where, how big, whose, what keeps them.\n"
        "Names are how to write it, such as model.fc.weight; (Out[12]) is what keeps one\n"
        "that no variable reaches. Looking frees, keeps alive and moves nothing.\n\n"
        "    %devices cuda:0 --min 100MiB     the large ones on one device\n"
        "    %devices --by holder             how much each variable leads to\n"
        "    %devices --diff                  after a cell: what it made, what it left\n"
        "    %devices --why model.fc.weight   why is it still here?\n"
        "    r = %devices                     a report: r.to_pandas(), r.since(earlier)",
        refused=("diff", "held", "why", "release_held"),
    )
    parser.add_argument("devices", nargs="*", metavar="DEVICE", help="only these devices: cuda:1, cpu")
    parser.add_argument("-n", metavar="N", type=_typed(positive_int), default=20, help="show N rows (20)")
    parser.add_argument(
        "--min", metavar="SIZE", type=_typed(parse_size), default=0, help="only storages of at least SIZE, such as 1MiB"
    )
    parser.add_argument("--sort", choices=("size", "name", "device", "dtype", "kind"), default="size", help="order")
    ask = parser.add_mutually_exclusive_group()
    ask.add_argument(
        "--by", metavar="KEY", choices=("device", "dtype", "kind", "holder"),
        help="totals by device, dtype, kind or holder instead",
    )  # fmt: skip
    ask.add_argument(
        "--diff", action="store_true",
        help="what came and what went since the last %%devices; or, with code before it in its cell, since that began",
    )  # fmt: skip
    ask.add_argument(
        "--held", action="store_true", help="only what no variable reaches: what keeps it, and the line that frees it"
    )
    ask.add_argument(
        "--why", metavar="NAME",
        help="what keeps one tensor: model.fc.weight, Out[12], or a number that --held gave it",
    )  # fmt: skip
    ask.add_argument(
        "--release-held", action="store_true",
        help="have IPython forget outputs and the last error that keep such tensors, and say what came back; "
        "your variables and all other outputs stay",
    )  # fmt: skip
    _add_engine_options(parser, QUERY_TIMEOUT)
    return parser


def _ondevice() -> Parser:
    parser = Parser(
        "%%ondevice",
        "Run the cell with new tensors landing on DEVICE, then report what was created\n"
        "where and what moved. %ondevice DEVICE inside a cell does the same for the rest\n"
        "of it. The cell's last value, its errors and Ctrl-C are as ever.\n\n"
        "    %%ondevice cuda:1                the second GPU\n"
        "    %%ondevice auto --fallback cpu   the emptiest GPU; the CPU if there is none\n"
        "    %%ondevice 0 --move model,x      first move these, with their optimizer\n"
        "    %%ondevice 0 -o r                keep the report: r.to_pandas(), r.syncs",
        needs_body=("--engines",),
        forwarded=("move", "trace", "strict"),
    )
    parser.add_argument("device", nargs="?", metavar="DEVICE", help="cuda:1, 1, auto (most free memory), cpu, meta")
    parser.add_argument(
        "--move", metavar="NAMES", type=_typed(variable_names), default=[],
        help="first move these variables there, all or none: tensors, modules with their optimizers, containers",
    )  # fmt: skip
    parser.add_argument("--fallback", metavar="DEVICE", help="use this device where DEVICE is not there")
    parser.add_argument(
        "--trace", action="store_true",
        help="count copies no line asks for too: indexing, backward, library code; slower",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true",
        help="fail, with the line, where a tensor of another device is used or copied unasked; traces, too",
    )  # fmt: skip
    _add_cell_options(parser, "; DEVICE may be cuda:{rank} or cuda:{local_rank}")
    return parser


def _oomguard() -> Parser:
    parser = Parser(
        "%%oomguard",
        "Run the cell; if it runs out of memory, free all that the failure pins, say\n"
        "what ran out and what would help, and let the cell fail, so that Run All stops.\n"
        "%oomguard inside a cell guards the rest of it, %oomguard on all cells to come.\n\n"
        "    %%oomguard -o r                  keep the report: r.verdict, r.advice\n"
        "    %%oomguard --shrink batch_size   halve it and run again, until it fits\n"
        "    %oomguard on                     guard every cell to come\n"
        "    %%dryrun --fit batch_size        the largest that fits, without running it",
        needs_body=("--retry", "--shrink", "--fallback", "--engines"),
        forwarded=("retry", "shrink", "fallback", "keep", "keep_going"),
        moved=("--fit", "--capacity", "--gpu"),
    )
    parser.add_argument("state", nargs="?", choices=("on", "off"), help="guard every cell from the next on, or no more")
    parser.add_argument(
        "--retry", metavar="N", type=_typed(positive_int), default=0, help="run again up to N times once freed"
    )
    parser.add_argument(
        "--shrink", metavar="INT", type=_typed(variable_name), help="halve this int and run again, until it fits"
    )
    parser.add_argument("--fallback", metavar="DEVICE", help="then run it on this device; auto: the emptiest other one")
    parser.add_argument("--keep", action="store_true", help="keep the failed frames for %%debug; say what they hold")
    parser.add_argument("--keep-going", action="store_true", help="let Run All go on after the report")
    _add_cell_options(parser)
    return parser


def _dryrun() -> Parser:
    parser = Parser(
        "%%dryrun",
        "Tell how much device memory the cell would need and whether it fits. The cell\n"
        "runs in another process that computes nothing on any device; the notebook stays\n"
        "as it is. It works without a GPU, too.\n\n"
        "    %%dryrun                         its peak, on which line, of what\n"
        "    %%dryrun --fit batch_size        the largest batch that fits\n"
        "    %%dryrun --gpu T4                on a GPU that is not here\n"
        "    %%dryrun --run                   run the cell, if it fits\n"
        "    %%dryrun -o r                    keep the report: r.peak, r.plot()",
    )
    parser.add_argument(
        "--fit", metavar="INT", type=_typed(variable_name), help="find the largest value of this int that fits"
    )
    parser.add_argument(
        "--capacity", metavar="SIZE", type=_typed(parse_size), help="on a GPU with this much memory, such as 16GiB"
    )
    parser.add_argument("--gpu", metavar="GPU", help="on a T4, V100, A100, A100-40GB, L4, RTX-3090, RTX-4090 or H100")
    parser.add_argument("--run", action="store_true", help="then run the cell, if it fits; else stop Run All")
    parser.add_argument(
        "-o", "--out", metavar="NAME", type=_typed(variable_name), help="also store the report in a variable"
    )
    return parser


_DECLARATIONS = {
    "gpuinfo": _gpuinfo, "devices": _devices, "ondevice": _ondevice, "oomguard": _oomguard, "dryrun": _dryrun,
}  # fmt: skip

MAGICS: Sequence[str] = tuple(_DECLARATIONS)


@cache
def parser(magic: str) -> Parser:
    """Return the parser of one of `MAGICS`."""
    return _DECLARATIONS[magic]()


def letting_run() -> dict[str, Sequence[str]]:
    """Return the options with which the cell of a magic runs that does not run it otherwise."""
    return {"dryrun": ("--run",)}


def needing_body() -> dict[str, Sequence[str]]:
    """Return the options of each cell magic with which it needs the cell's text."""
    return {magic: parser(magic).needs_body for magic in MAGICS if parser(magic).needs_body}
