"""Numbers as people read them: the only place where bytes, times and shares become text."""

from __future__ import annotations

import unicodedata

NOT_AVAILABLE = "n/a"


def size(nbytes: int | None) -> str:
    """Return bytes as ``"512 B"``, ``"1.5 GiB"``: binary units, one decimal, as torch's own messages name them."""
    if nbytes is None:
        return NOT_AVAILABLE
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


def duration(seconds: float | None) -> str:
    """Return a time with three significant digits: ``"1.24 s"``, ``"12.4 ms"``, ``"310 us"``."""
    if seconds is None:
        return NOT_AVAILABLE
    if seconds >= 60:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("unreachable: microseconds always return")


def percent(value: float | None) -> str:
    """Return a percentage without decimals: ``"37%"``."""
    return NOT_AVAILABLE if value is None else f"{value:.0f}%"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return ``"1 tensor"``, ``"3,000 tensors"``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def shape(dims: tuple[int, ...]) -> str:
    """Return a shape as torch prints it inside ``torch.Size``: ``"[64, 3]"``."""
    return "[" + ", ".join(map(str, dims)) + "]"


def printable(text: str) -> str:
    r"""Return text from outside with everything that could steer a terminal or reorder a line made visible.

    Control characters, bidirectional overrides, lone surrogates and line breaks become escapes such as ``\x1b``.
    """
    return "".join(ch if _is_plain(ch) else ch.encode("unicode_escape").decode() for ch in text)


def _is_plain(ch: str) -> bool:
    return ch == " " or unicodedata.category(ch) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}
