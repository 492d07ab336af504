"""What each magic accepts, declared once: for parsing, for `--help`, for `%magic?` and for completion.

A line that cannot be read is an `OptionError` of one line that ends in what would be right.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, NoReturn, TypeVar

from gpumagic.errors import OptionError, nearest
from gpumagic.memory.presets import GPUS

_T = TypeVar("_T")
ENGINE_TIMEOUT = 10.0
"""Seconds to wait for engines to answer."""
_COMMENT = re.compile(r"""(?P<quoted>"[^"]*"|'[^']*')|(?:^|\s)#.*""", re.DOTALL)


def device_memory(text: str) -> int:
    """Return the bytes of a device's memory, or raise `OptionError` for less than any device has."""
    from gpumagic.report.units import parse_size  # loading the extension imports no report

    nbytes = parse_size(text)
    if nbytes < 1024**2:
        raise OptionError(f"{text!r} is {nbytes} bytes; write a unit, such as 16GiB")
    return nbytes


class Ranks(NamedTuple):
    """The processes of one training, each on a GPU of its own.

    Attributes:
        world: how many there are.
        per_node: how many a machine has.
    """

    world: int
    per_node: int


PER_NODE, MOST_PER_NODE = 8, 16


def number_of_ranks(text: str | int) -> Ranks:
    """Return how many ranks ``"64"`` or ``"8x8"``, machines times GPUs, means, or raise `OptionError`."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)", str(text), re.ASCII)
    nodes, number = (1, 0) if found is None else (int(found[1] or 1), int(found[2]))
    per_node = number if found is not None and found[1] else min(number, PER_NODE)
    if number < 1 or nodes < 1 or per_node > MOST_PER_NODE:
        raise OptionError(
            f"{text!r} is no number of ranks; write how many, 64, or machines times GPUs of each (at most "
            f"{MOST_PER_NODE}), 8x8"
        )
    return Ranks(nodes * number, per_node)


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
    wrong = [name for name in names or [text] if not name.isidentifier()]
    if wrong:
        raise OptionError(f"{wrong[0]!r} is not a variable name; write names such as --move model,x")
    return names


def function_names(text: str) -> bool | list[str]:
    """Return the names of a list such as ``"model.forward,step"``, True for an empty one, or raise `OptionError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if not all(map(str.isidentifier, name.split(".")))]
    if wrong:
        raise OptionError(f"{wrong[0]!r} is not a function name; write names such as --trace=model.forward,step")
    return names or True


class _OneScreen(argparse.RawDescriptionHelpFormatter):
    """A help in 80 columns with one line per option: ``-w, --watch [SECONDS]``, as Python 3.13 writes it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=79)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, '')}"


class Parser(argparse.ArgumentParser):
    """argparse that raises `OptionError` with a suggestion instead of printing and exiting.

    Args:
        prog: the magic.
        description: what it does.
        takes: what it takes beside options, as the help shows it.
        needs_body: the options with which it needs the cell's text, to run it more than once or to read it.
        forwarded: the names of those that go to the engines with the cell.
        refused: the names of those that are about one process, and so are refused with ``--engines``.
        moved: options of `%%dryrun` that are looked for here.
        valued: options that may have a value, which stands behind a ``=``.
    """

    def __init__(
        self, prog: str, description: str, *, takes: str = "", needs_body: Sequence[str] = (),
        forwarded: Sequence[str] = (), refused: Sequence[str] = (), moved: Sequence[str] = (),
        valued: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(
            prog=prog, description=description, add_help=False, allow_abbrev=False, formatter_class=_OneScreen,
            usage=f"%(prog)s [OPTIONS] {takes}".rstrip(),
        )  # fmt: skip
        self.needs_body, self.forwarded, self.refused, self.moved = needs_body, forwarded, refused, moved
        self.valued = valued
        self.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)

    def format_help(self) -> str:
        text = super().format_help()
        for option in self.valued:  # argparse does not know that their value may be left out
            text = re.sub(rf"{option} ([A-Z]+)  ", rf"{option}[=\1]", text)
        return text

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self.prog}: {message}; see {self.prog} --help")

    def parse_line(self, line: str) -> argparse.Namespace:
        """Return the options of a magic's line; a trailing `;` and a comment are not part of it.

        Raises:
            OptionError: an unknown option (the nearest known one is suggested), a bad value, an open quote.
        """
        line = _COMMENT.sub(lambda found: found["quoted"] or "", line).strip().removesuffix(";")
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise OptionError(f"{self.prog}: {error} in {line!r}; close it or leave it out") from None
        moved = [word for word in words if word.partition("=")[0] in self.moved]
        if moved:
            raise OptionError(f"{self.prog} has no option {moved[0]!r}; %%dryrun has it")
        known = (*self.option_strings(), "--")
        misspelt = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
        words = [f"{word}=" if word in self.valued else word for word in words]
        options, unknown = (None, misspelt) if misspelt else self.parse_known_args(words)
        if options is None or unknown:
            raise OptionError(self._unknown(unknown[0]))
        return options

    def option_strings(self) -> list[str]:
        """Return every option as it is typed, in the order of the help."""
        return [string for action in self._actions for string in action.option_strings]

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{self.prog}: {word!r} is one argument too many; see {self.prog} --help"
        option = word.partition("=")[0]
        near = nearest(option, self.option_strings())
        if near is not None:
            hint = f"did you mean {near}?"
        elif option == "--device":
            hint = f"write the device alone: {self.prog} cuda:1"
        else:
            last = [each.option_strings[-1] for each in self._actions if each.option_strings and each.dest != "help"]
            hint = f"it has {', '.join(last)}"
        return f"{self.prog} has no option {option!r}; {hint}"

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(each) for each in action.choices]
        near = nearest(str(value), choices)
        hint = f"did you mean {near}?" if near else f"write {', '.join(choices[:-1])} or {choices[-1]}"
        named = action if action.option_strings else None
        raise argparse.ArgumentError(named, f"invalid choice: {value!r}; {hint}")


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


def _add_engines(parser: Parser) -> None:
    parser.add_argument(
        "--engines", nargs="?", metavar="TARGETS", type=_typed(engine_targets), const="px",
        help="on ipyparallel's engines: of %%px, all, 0,2, 1:3",
    )  # fmt: skip


def _add_out(parser: Parser) -> None:
    parser.add_argument(
        "-o", "--out", metavar="NAME", type=_typed(variable_name), help="store the report in this variable"
    )


def _add_cell_options(parser: Parser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="show no report")
    _add_out(parser)
    _add_engines(parser)


def _gpuinfo() -> Parser:
    parser = Parser(
        "%gpuinfo",
        "Show the GPUs, who uses them and what this kernel has on them, or why there is\n"
        "none. A figure that is missing says why. CUDA is never initialised.\n\n"
        "    %gpuinfo -p                 with the processes on each GPU\n"
        "    %gpuinfo -w                 refreshed while other cells run\n"
        "    r = %gpuinfo                keep the report: r.to_pandas(), r.cause\n"
        "    r.best                      the device with most free memory",
        takes="[DEVICE ...]",
        refused=("each_cell", "watch"),
    )
    parser.add_argument("devices", nargs="*", metavar="DEVICE", help="only these, such as cuda:1 or 1; else all")
    parser.add_argument("-p", "--processes", action="store_true", help="list the processes on each GPU")
    parser.add_argument("-a", "--all", action="store_true", help="show every field")
    parser.add_argument(
        "-w", "--watch", nargs="?", metavar="SECONDS", type=_typed(watch_interval), const=2.0,
        help="refresh (every 2 s) while cells run, until -w off",
    )  # fmt: skip
    parser.add_argument(
        "--each-cell", choices=("on", "off"), metavar="on|off", help="print a line after every cell: time, memory"
    )
    _add_engines(parser)
    return parser


def _devices() -> Parser:
    parser = Parser(
        "%devices",
        "List the live tensors, one row per storage: name, device, size, and what keeps\n"
        "it alive. A name can be pasted: model.fc.weight. In parentheses, as (Out[12]),\n"
        "stands what keeps a tensor that no variable reaches. Nothing is changed.\n\n"
        "    %devices cuda:0 -n 5             the five largest on one device\n"
        "    %devices --by holder             totals by variable\n"
        "    %devices --diff                  after a cell: what it created and freed\n"
        "    %devices --why model.fc.weight   what keeps this tensor alive?\n"
        "    r = %devices                     keep the report: r.to_pandas(), r.leaks()",
        takes="[DEVICE ...]",
        refused=("diff", "leaks", "free", "why"),
    )
    parser.add_argument("devices", nargs="*", metavar="DEVICE", help="only these, such as cuda:1 or cpu; else all")
    parser.add_argument("-n", metavar="N", type=_typed(positive_int), default=20, help="show the largest N (20)")
    ask = parser.add_mutually_exclusive_group()
    ask.add_argument("--by", metavar="KEY", choices=("dtype", "kind", "holder"), help="totals by dtype, kind or holder")
    ask.add_argument("--diff", action="store_true", help="what was created and freed since the last %%devices")
    ask.add_argument("--leaks", action="store_true", help="what no variable reaches, and the line that frees it")
    ask.add_argument("--free", action="store_true", help="free what only outputs or the last error keep")
    ask.add_argument("--why", metavar="NAME", help="what keeps it: a name, Out[12], a number of --leaks")
    _add_engines(parser)
    return parser


def _ondevice() -> Parser:
    parser = Parser(
        "%%ondevice",
        "Run the cell with DEVICE as the device of new tensors, then report what was\n"
        "copied between devices, by which line, and what to change. %ondevice DEVICE\n"
        "does so for the rest of its cell.\n\n"
        "    %%ondevice cuda:1                the second GPU\n"
        "    %%ondevice auto --fallback cpu   the GPU with most free memory, or the CPU\n"
        "    %%ondevice 0 --move model,x      first move these, with their optimizer\n"
        "    %%ondevice 0 -o r                keep the report: r.to_pandas(), r.syncs",
        takes="[DEVICE]",
        needs_body=("--engines",),
        forwarded=("move", "trace"),
        valued=("--trace",),
    )
    parser.add_argument("device", nargs="?", metavar="DEVICE", help="cuda:1, 1, auto (most free memory), cpu, meta")
    parser.add_argument(
        "--move", metavar="NAMES", type=_typed(variable_names), default=[],
        help="first move these variables there; all or none",
    )  # fmt: skip
    parser.add_argument("--fallback", metavar="DEVICE", help="the device to use where DEVICE is not there")
    parser.add_argument(
        "--trace", metavar="FUNCTIONS", type=_typed(function_names), default=False,
        help="time and memory by line, in functions too; slower",
    )  # fmt: skip
    _add_cell_options(parser)
    return parser


def _oomguard() -> Parser:
    parser = Parser(
        "%%oomguard",
        "Run the cell. If it runs out of memory, free what the failed cell keeps, and\n"
        "say what ran out and which change makes it fit. Then the cell fails, and Run\n"
        "All stops. %oomguard guards the rest of its cell, %oomguard on all later cells.\n\n"
        "    %%oomguard -o r                  keep the report: r.verdict, r.advice\n"
        "    %%oomguard --shrink batch_size   halve it and run again, until it fits\n"
        "    %oomguard on                     guard every later cell\n"
        "    %%dryrun --fit batch_size        the largest that fits, without running it",
        takes="[on|off]",
        needs_body=("--shrink", "--fallback", "--engines"),
        forwarded=("shrink", "fallback", "debug", "keep_going"),
        moved=("--fit", "--capacity", "--gpu"),
    )
    parser.add_argument(
        "state", nargs="?", choices=("on", "off"), metavar="on|off", help="guard every later cell, or stop doing so"
    )
    parser.add_argument(
        "--shrink", metavar="NAME", type=_typed(variable_name), help="halve this int and run again, until it fits"
    )
    parser.add_argument("--fallback", metavar="DEVICE", help="run it again on this device, or auto")
    parser.add_argument("--debug", action="store_true", help="keep the failed frames for %%debug")
    parser.add_argument("--keep-going", action="store_true", help="do not fail: Run All goes on")
    _add_cell_options(parser)
    return parser


def _dryrun() -> Parser:
    parser = Parser(
        "%%dryrun",
        "Say how much device memory the cell would need, and whether it fits. It is run\n"
        "in another process that computes nothing; the notebook and its devices stay as\n"
        "they are. No GPU is needed.\n\n"
        "    %%dryrun                         the peak, its line, and what it is made of\n"
        "    %%dryrun --fit batch_size        the largest batch that fits\n"
        "    %%dryrun --gpu T4                on a GPU that is not here\n"
        "    %%dryrun --gpu H100 --ranks 64   as torchrun would start it on each of 64\n"
        "    %%dryrun --run                   then run the cell, if it fits\n"
        "    %%dryrun -o r                    keep the report: r.peak, r.fits",
    )
    parser.add_argument(
        "--fit", metavar="NAME", type=_typed(variable_name), help="find the largest value of this int that fits"
    )
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        type=_typed(device_memory),
        help="on a device with this much memory, such as 16GiB",
    )
    parser.add_argument(
        "--gpu", nargs="+", metavar=("NAME", "WORD"), help=f"on a T4, RTX-4090 or other of {len(GPUS)}: --gpu list"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=_typed(number_of_ranks), help="as each of N GPUs runs it: 64, or 8x8"
    )
    parser.add_argument("--run", action="store_true", help="then run the cell if it fits; else fail")
    _add_out(parser)
    return parser


_DECLARATIONS = {
    "gpuinfo": _gpuinfo, "devices": _devices, "ondevice": _ondevice, "oomguard": _oomguard, "dryrun": _dryrun,
}  # fmt: skip

MAGICS: Sequence[str] = tuple(_DECLARATIONS)
LETTING_RUN = {"dryrun": ("--run",)}
"""The options with which a cell runs whose magic does not run it otherwise."""


@cache
def parser(magic: str) -> Parser:
    """Return the parser of one of `MAGICS`."""
    return _DECLARATIONS[magic]()


def needing_body() -> dict[str, Sequence[str]]:
    """Return the options of each cell magic with which it needs the cell's text."""
    return {magic: parser(magic).needs_body for magic in MAGICS if parser(magic).needs_body}
