"""What each magic accepts, declared once: for parsing, for `--help`, for `%magic?` and for completion.

A line that cannot be read is an `OptionError` of one line that ends in what would be right.
"""

from __future__ import annotations

import argparse
import itertools
import keyword
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from gpumagic.errors import OptionError, nearest

_Argument = tuple[tuple[str, ...], dict[str, Any]]
"""The names of an argument, and argparse's settings for it."""
ENGINE_TIMEOUT = 10.0
"""Seconds to wait for engines to answer."""
_COMMENT = re.compile(r"""(?P<quoted>"[^"]*"|'[^']*')|(?:^|\s)#.*""", re.DOTALL)
_SPACED_COMMA = re.compile(r"""(?P<quoted>"[^"]*"|'[^']*')|,\s+(?!-)""")
"""What stands between the names of a list, `--move model, x`; an option may follow it."""

_SPACED_UNIT = re.compile(r"(?<!\S)(--capacity[\s=]+[\d.]+)\s+(?=[a-z])", re.IGNORECASE)


def device_memory(text: str) -> int:
    """Return the bytes of a device's memory, or raise `OptionError` for less than any device has."""
    from gpumagic.report.units import (
        parse_size,
    )  # loading the extension imports no report

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


PER_NODE = 8
"""How many GPUs a machine is taken to have."""
MOST_PER_NODE = 16


def number_of_ranks(text: str | int | Ranks) -> Ranks:
    """Return how many ranks ``"64"`` or ``"8x8"``, machines times GPUs, means, or raise `OptionError`."""
    if isinstance(text, Ranks):
        return text
    ranks = _read_ranks(str(text))
    if ranks is None or ranks.world < 1 or ranks.per_node > MOST_PER_NODE:
        raise OptionError(
            f"{text!r} is no number of ranks; write how many, 64, or machines times GPUs of each (at most "
            f"{MOST_PER_NODE}), 8x8"
        )
    return ranks


def _read_ranks(text: str) -> Ranks | None:
    match = re.fullmatch(r"(?:(?P<nodes>\d+)x)?(?P<number>\d+)", text, re.ASCII)
    if match is None:
        return None
    number = int(match["number"])
    if match["nodes"] is None:
        return Ranks(number, min(number, PER_NODE))
    return Ranks(int(match["nodes"]) * number, number)


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
        raise OptionError(
            f"{text!r} is neither off nor seconds of at least 0.1; write devices before -w"
        )
    return float(text)


def variable_name(text: str) -> str:
    """Return a Python name, or raise `OptionError`."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise OptionError(
            f"{text!r} cannot be a variable; write a Python name, such as report or batch_size"
        )
    return text


def variable_names(text: str) -> list[str]:
    """Return the names of a list such as ``"model,x"``, or raise `OptionError`."""
    names = _listed(text)
    wrong = [name for name in names or [text] if not name.isidentifier()]
    if wrong:
        raise OptionError(
            f"{wrong[0]!r} is not a variable name; write names such as --move model,x"
        )
    return names


def function_names(text: str) -> bool | list[str]:
    """Return the names of a list such as ``"model.forward,step"``, True for an empty one, or raise `OptionError`."""
    names = _listed(text)
    for name in names:
        if not all(map(str.isidentifier, name.split("."))):
            raise OptionError(
                f"{name!r} is not a function name; write names such as --trace=model.forward,step"
            )
    return names or True


def _listed(text: str) -> list[str]:
    """Return the words between the commas of a list."""
    return list(filter(None, map(str.strip, text.split(","))))


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
        arguments: what it takes; a list has options of which one excludes the others.
        takes: what it takes beside options, as the help shows it.
        needs_body: the options with which it needs the cell's text, to run it more than once or to read it.
        forwarded: the names of those that go to the engines with the cell.
        refused: the names of those that are about one process, and so are refused with ``--engines``.
        valued: options that may have a value, which stands behind a ``=``.
        hints: what to say of words that it does not take, by what matches them.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        *arguments: _Argument | list[_Argument],
        takes: str = "",
        needs_body: Sequence[str] = (),
        forwarded: Sequence[str] = (),
        refused: Sequence[str] = (),
        valued: Sequence[str] = (),
        hints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            add_help=False,
            allow_abbrev=False,
            formatter_class=_OneScreen,
            usage=f"%(prog)s [OPTIONS] {takes}".rstrip(),
        )
        self.needs_body = needs_body
        self.forwarded = forwarded
        self.refused = refused
        self.valued = valued
        self.hints = hints
        self.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
        for argument in arguments:
            if isinstance(argument, list):
                group = self.add_mutually_exclusive_group()
                for names, settings in argument:
                    group.add_argument(*names, **settings)
            else:
                names, settings = argument
                self.add_argument(*names, **settings)

    def format_help(self) -> str:
        text = super().format_help()
        for (
            option
        ) in self.valued:  # argparse does not know that their value may be left out
            text = re.sub(rf"{option} ([A-Z]+)  ", rf"{option}[=\1]", text)
        return text

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self.prog}: {message}; see {self.prog} --help")

    def parse_line(self, line: str) -> argparse.Namespace:
        """Return the options of a magic's line; a trailing `;` and a comment are not part of it.

        Raises:
            OptionError: an unknown option (the nearest known one is suggested), a bad value, an open quote.
        """
        line = (
            _COMMENT.sub(lambda match: match["quoted"] or "", line)
            .strip()
            .removesuffix(";")
        )
        line = _SPACED_COMMA.sub(lambda match: match["quoted"] or ",", line)
        line = _SPACED_UNIT.sub(r"\1", line)
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise OptionError(
                f"{self.prog}: {error} in {line!r}; close it or leave it out"
            ) from None
        words = [f"{word}=" if word in self.valued else word for word in words]
        known = {*self.option_strings(), "--"}
        for word in words:
            option, _, _ = word.partition("=")
            if word.startswith("--") and option not in known:
                raise OptionError(self._unknown(word, words))
        options, unknown = self.parse_known_args(words)
        if unknown:
            raise OptionError(self._unknown(unknown[0], words))
        if getattr(options, "devices", None):
            options.devices = list(filter(None, ",".join(options.devices).split(",")))
        return options

    def option_strings(self) -> list[str]:
        """Return every option as it is typed, in the order of the help."""
        strings: list[str] = []
        for action in self._actions:
            strings += action.option_strings
        return strings

    def _unknown(self, word: str, words: Sequence[str]) -> str:
        """Return what is wrong with one of the words of a line, and what would be right."""
        if not word.startswith("-"):
            return f"{self.prog}: {word!r} is one argument too many; {self._hint(word, words)}"
        option = word.partition("=")[0]
        near = nearest(option, self.option_strings())
        if near is not None:
            hint = f"did you mean {near}?"
        else:
            longest = [
                action.option_strings[-1:]
                for action in self._actions
                if action.dest != "help"
            ]
            hint = f"it has {', '.join(itertools.chain(*longest))}"
        return f"{self.prog} has no option {option!r}; {hint}"

    def _hint(self, word: str, words: Sequence[str]) -> str:
        """Return what to do about a word that is no option's value."""
        for option in self.valued:
            if f"{option}=" in words:
                return f"did you mean {option}={word}?"
        for pattern, hint in self.hints.items():
            if re.fullmatch(pattern, word):
                return hint
        return f"see {self.prog} --help"


def engine_targets(text: str) -> str:
    """Return which engines are meant, ``"px"``, ``"all"``, ``"0,2"`` or ``"1:3"``, or raise `OptionError`."""
    if not re.fullmatch(r"px|all|-?\d*:-?\d*(:-?\d*)?|\d+(,\d+)*", text, re.ASCII):
        raise OptionError(
            f"{text!r} names no engines; write all, 0,2 or 1:3, and a device before --engines"
        )
    return text


def _argument(
    *names: str, read: Callable[[str], object] | None = None, **settings: Any
) -> _Argument:
    """Return an argument as argparse takes it; ``read`` makes its value of the text, or raises `OptionError`."""

    def typed(text: str) -> object:
        assert read is not None
        try:
            return read(text)
        except OptionError as error:
            # argparse keeps the text of this error, and drops that of a ValueError.
            raise argparse.ArgumentTypeError(str(error)) from None

    if read is not None:
        settings["type"] = typed
    return names, settings


_ENGINES = _argument(
    "--engines",
    nargs="?",
    metavar="TARGETS",
    read=engine_targets,
    const="px",
    help="on ipyparallel's engines: of %%px, all, 0,2, 1:3",
)
_OUT = _argument(
    "-o",
    "--out",
    metavar="NAME",
    read=variable_name,
    help="store the report in this variable",
)
_QUIET = _argument("-q", "--quiet", action="store_true", help="show no report")

PARSERS = {
    "gpuinfo": Parser(
        "%gpuinfo",
        "Show the GPUs, who uses them and what this kernel has on them, or why there is\n"
        "none. A figure that is missing says why. CUDA is never initialised.\n\n"
        "    %gpuinfo -p                 with the processes on each GPU\n"
        "    %gpuinfo -w                 refreshed while other cells run\n"
        "    r = %gpuinfo                keep the report: r.to_pandas(), r.cause\n"
        "    r.best                      the device with most free memory",
        _argument(
            "devices",
            nargs="*",
            metavar="DEVICE",
            help="only these, such as cuda:1 or 1; else all",
        ),
        _argument(
            "-p",
            "--processes",
            action="store_true",
            help="list the processes on each GPU",
        ),
        _argument("-a", "--all", action="store_true", help="show every field"),
        _argument(
            "-w",
            "--watch",
            nargs="?",
            metavar="SECONDS",
            read=watch_interval,
            const=2.0,
            help="refresh (every 2 s) while cells run, until -w off",
        ),
        _argument(
            "--each-cell",
            choices=("on", "off"),
            metavar="on|off",
            help="print a line after every cell: time, memory",
        ),
        _ENGINES,
        takes="[DEVICE ...]",
        refused=("each_cell", "watch"),
    ),
    "devices": Parser(
        "%devices",
        "List the live tensors, one row per storage: name, device, size, and what keeps\n"
        "it alive. A name can be pasted: model.fc.weight. In parentheses, as (Out[12]),\n"
        "stands what keeps a tensor that no variable reaches. Nothing is changed.\n\n"
        "    %devices cuda:0 -n 5             the five largest on one device\n"
        "    %devices --by holder             totals by variable\n"
        "    %devices --diff                  after a cell: what it created and freed\n"
        "    %devices --why model.fc.weight   what keeps this tensor alive?\n"
        "    r = %devices                     keep the report: r.to_pandas(), r.leaks()",
        _argument(
            "devices",
            nargs="*",
            metavar="DEVICE",
            help="only these, such as cuda:1 or cpu; else all",
        ),
        _argument(
            "-n",
            metavar="N",
            read=positive_int,
            default=20,
            help="show the largest N (20)",
        ),
        [
            _argument(
                "--by",
                metavar="KEY",
                choices=("dtype", "kind", "holder"),
                help="totals by dtype, kind or holder",
            ),
            _argument(
                "--diff",
                action="store_true",
                help="what was created and freed since the last %%devices",
            ),
            _argument(
                "--leaks",
                action="store_true",
                help="what no variable reaches, and the line that frees it",
            ),
            _argument(
                "--free",
                action="store_true",
                help="free what only outputs or the last error keep",
            ),
            _argument(
                "--why",
                nargs="+",
                metavar=("NAME", "WORD"),
                help="what keeps it: a name, Out[12], a number of --leaks",
            ),
        ],
        _ENGINES,
        takes="[DEVICE ...]",
        refused=("diff", "leaks", "free", "why"),
    ),
    "ondevice": Parser(
        "%%ondevice",
        "Run the cell with DEVICE as the device of new tensors, then report what was\n"
        "copied between devices, by which line, and what to change. %ondevice DEVICE\n"
        "does so for the rest of its cell.\n\n"
        "    %%ondevice cuda:1                the second GPU\n"
        "    %%ondevice auto --fallback cpu   the GPU with most free memory, or the CPU\n"
        "    %%ondevice 0 --move model,x      first move these, with their optimizer\n"
        "    %%ondevice 0 -o r                keep the report: r.to_pandas(), r.syncs",
        _argument(
            "device",
            nargs="?",
            metavar="DEVICE",
            help="cuda:1, 1, auto (most free memory), cpu, meta",
        ),
        _argument(
            "--move",
            metavar="NAMES",
            read=variable_names,
            default=[],
            help="first move these variables there; all or none",
        ),
        _argument(
            "--fallback",
            metavar="DEVICE",
            help="the device to use where DEVICE is not there",
        ),
        _argument(
            "--trace",
            metavar="FUNCTIONS",
            read=function_names,
            default=False,
            help="time and memory by line, in functions too; slower",
        ),
        _QUIET,
        _OUT,
        _ENGINES,
        takes="[DEVICE]",
        needs_body=("--engines",),
        forwarded=("move", "trace"),
        valued=("--trace",),
    ),
    "oomguard": Parser(
        "%%oomguard",
        "Run the cell. If it runs out of memory, free what the failed cell keeps, and\n"
        "say what ran out and which change makes it fit. Then the cell fails, and Run\n"
        "All stops. %oomguard guards the rest of its cell, %oomguard on all later cells.\n\n"
        "    %%oomguard -o r                  keep the report: r.verdict, r.advice\n"
        "    %%oomguard --shrink batch_size   halve it and run again, until it fits\n"
        "    %oomguard on                     guard every later cell\n"
        "    %%dryrun --fit batch_size        the largest that fits, without running it",
        _argument(
            "state",
            nargs="?",
            choices=("on", "off"),
            metavar="on|off",
            help="guard every later cell, or stop doing so",
        ),
        _argument(
            "--shrink",
            metavar="NAME",
            read=variable_name,
            help="halve this int and run again, until it fits",
        ),
        _argument(
            "--fallback", metavar="DEVICE", help="run it again on this device, or auto"
        ),
        _argument(
            "--debug", action="store_true", help="keep the failed frames for %%debug"
        ),
        _argument(
            "--keep-going", action="store_true", help="do not fail: Run All goes on"
        ),
        _QUIET,
        _OUT,
        _ENGINES,
        takes="[on|off]",
        needs_body=("--shrink", "--fallback", "--engines"),
        forwarded=("shrink", "fallback", "debug", "keep_going"),
    ),
    "dryrun": Parser(
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
        _argument(
            "--fit",
            metavar="NAME",
            read=variable_name,
            help="find the largest value of this int that fits",
        ),
        _argument(
            "--capacity",
            metavar="SIZE",
            read=device_memory,
            help="on a device with this much memory, such as 16GiB",
        ),
        # How many there are is not said: that would read their table when the extension is loaded.
        _argument(
            "--gpu",
            nargs="+",
            metavar=("NAME", "WORD"),
            help="on a T4, RTX-4090 or another: --gpu list",
        ),
        _argument(
            "--ranks",
            metavar="N",
            read=number_of_ranks,
            help="as each of N GPUs runs it: 64, or 8x8",
        ),
        _argument(
            "--run", action="store_true", help="then run the cell if it fits; else fail"
        ),
        _OUT,
        hints={
            r"(cuda|gpu|mps|xpu|simgpu)(:\d+)?": "each device that the cell uses is looked at"
        },
    ),
}
MAGICS: Sequence[str] = tuple(PARSERS)
NEEDING_BODY = {
    magic: parser.needs_body for magic, parser in PARSERS.items() if parser.needs_body
}
"""The options of each cell magic with which it needs the cell's text."""
LETTING_RUN = {"dryrun": ("--run",)}
"""The options with which a cell runs whose magic does not run it otherwise."""
