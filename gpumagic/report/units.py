"""Numbers as people read and write them: the only place where bytes, times and shares become text, and back."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from gpumagic.errors import OptionError

NOT_AVAILABLE = "n/a"
LARGE = 1 << 20
"""Bytes from which memory is large enough to report: less has no line and no advice of its own."""
SPARK_CHARACTERS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: int | None) -> str:
    """Return bytes with one decimal in binary units, as torch and nvidia-smi have them: ``"512 B"``, ``"1.5 GiB"``."""
    if nbytes is None:
        return NOT_AVAILABLE
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    scale, unit = _scale(nbytes)
    return f"{nbytes / scale:.1f} {unit}"


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``"512"``, ``"100MB"``, ``"1.5GiB"`` or ``"2g"`` means.

    Units are binary whichever way they are written: 1 GB here is 1 GiB, as in torch's own messages.

    Raises:
        OptionError: the text is not a size; the message names what would be.
    """
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?\s*", text, re.IGNORECASE | re.ASCII
    )
    if match is None:
        raise OptionError(
            f"{text!r} is not a size; write bytes or a unit: 4096, 100MiB, 1.5GiB"
        )
    return int(float(match[1]) * 1024 ** " kmgtp".index(match[2].lower() or " "))


def size_pair(part: int, whole: int | None) -> str:
    """Return two sizes in the unit of the larger: ``"3.1 / 15.0 GiB"``; what is not nothing is never "0.0"."""
    if whole is None:
        return size(part)
    scale, unit = _scale(max(part, whole))
    if scale == 1:
        return f"{part} / {whole} {unit}"
    shown = f"{part / scale:.1f}"
    if part and float(shown) == 0:
        shown = "<0.1"
    return f"{shown} / {whole / scale:.1f} {unit}"


def size_of(part: int, whole: int | None) -> str:
    """Return ``"3.1 of 15.0 GiB"``; what is far less than the whole keeps a unit of its own."""
    if whole is None or part > whole / 100:
        return size_pair(part, whole).replace(" / ", " of ")
    return f"{size(part)} of {size(whole)}"


def size_range(least: int, most: int) -> str:
    """Return ``"0.3 to 0.7 GiB"``."""
    return size_pair(least, most).replace(" / ", " to ")


def _scale(nbytes: int) -> tuple[int, str]:
    """Return the unit in which a number of bytes has at most three digits and a decimal before its point."""
    scale = 1
    for unit in _UNITS:
        if round(abs(nbytes) / scale, 1) < 1024 or unit == _UNITS[-1]:
            break
        scale *= 1024
    return scale, unit


def duration(seconds: float | None) -> str:
    """Return a time with three significant digits: ``"1.24 s"``, ``"12.4 ms"``, ``"310 us"``, ``"2 min 5 s"``.

    The unit is chosen for the number as it is shown: 59.97 seconds are a minute.
    """
    if seconds is None:
        return NOT_AVAILABLE
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if float(f"{seconds:.3g}") >= 60:
        return _long_duration(seconds)
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        shown = f"{seconds * scale:.3g}"
        if float(shown) >= 1:
            return f"{shown} {unit}"
    nanoseconds = round(seconds * 1e9)
    if seconds > 0 and nanoseconds == 0:
        return "<0.001 us"
    return f"{nanoseconds / 1000:g} us"


def _long_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def percent(value: float | None) -> str:
    """Return a percentage without decimals: ``"37%"``."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:.0f}%"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return ``"1 tensor"``, ``"3,000 tensors"``."""
    if number != 1:
        noun = plural or f"{noun}s"
    return f"{number:,} {noun}"


def more(number: int, noun: str) -> str:
    """Return what is not listed, such as ``"and 3 more storages"``; "" for none."""
    if number <= 0:
        return ""
    return f"and {count(number, f'more {noun}')}"


def few(names: Sequence[str], most: int, noun: str = "") -> str:
    """Return the first of some names and how many more there are: ``"a, b and 4 more"``."""
    listed = ", ".join(names[:most])
    rest = len(names) - most
    if rest <= 0:
        return listed
    others = count(rest, f"more {noun}") if noun else f"{rest} more"
    return f"{listed} and {others}"


def shape(dims: tuple[int, ...]) -> str:
    """Return a shape as torch prints it inside ``torch.Size``: ``"[64, 3]"``."""
    return "[" + ", ".join(map(str, dims)) + "]"


def sparkline(shares: Sequence[float]) -> str:
    """Return shares of a whole, from 0 to 1, as blocks."""
    levels = len(SPARK_CHARACTERS)
    characters = []
    for share in shares:
        level = int(share * levels)
        characters.append(SPARK_CHARACTERS[max(0, min(levels - 1, level))])
    return "".join(characters)


MAX_LENGTH = 2000
"""Characters of a text that is read, and not typed: what is longer has come from outside."""
MAX_WORD_LENGTH = 300


def truncate_words(text: str) -> str:
    """Return text with words that have no end cut in their middle, and a text that has none, too."""
    if len(text) <= MAX_WORD_LENGTH:
        return text
    cut = _LONG_WORDS.sub(lambda word: truncate_middle(word[0], MAX_WORD_LENGTH), text)
    return truncate_middle(cut, MAX_LENGTH)


def truncate_middle(text: str, most: int) -> str:
    """Return text of at most so many characters; what it loses is in its middle."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


_LONG_WORDS = re.compile(rf"\S{{{MAX_WORD_LENGTH + 1},}}")


def printable(text: str) -> str:
    r"""Return text from outside with everything that could steer a terminal or reorder a line made visible.

    Control characters, bidirectional overrides, lone surrogates and line breaks become escapes such as ``\x1b``.
    """
    if text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
        return character.encode("unicode_escape").decode()
    return character
