"""A private name of another package: what it is for, what stands in for it, and what is said where it is missing."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

MISSING = object()
"""What a look-up finds where there is nothing."""


class MissingName(AttributeError):
    """A package lacks a private name, and nothing stands in for it."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name, looked up when it is first asked for.

    Args:
        path: the dotted name; an attribute that objects of a class have is found as a function that reads it.
        use: what it is for.
        without: what is done without it.
        instead: what stands in for it, itself or its dotted name; None where nothing does.
        reports: the magics whose reports say that it is missing, with ``without``.
        since: the first version that has it; None if the oldest has it that this package works with.
    """

    path: str
    use: str
    without: str
    instead: str | Callable[..., Any] | None = None
    reports: tuple[str, ...] = ()
    since: str | None = None

    def is_there(self) -> bool:
        """Return whether the installed version has it."""
        return look_up(self.path) is not MISSING

    def get(self) -> Any:
        """Return it, or what stands in for it.

        Raises:
            MissingName: it is missing, and nothing stands in for it.
        """
        found = look_up(self.path)
        if found is not MISSING:
            return found
        if isinstance(self.instead, str):
            return look_up(self.instead)
        if self.instead is not None:
            return self.instead
        raise MissingName(self.missing())

    def missing(self) -> str:
        """Return the sentence that says that it is missing."""
        package = self.path.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "")
        return f"{package} {version} has no {self.path}"


@cache
def look_up(path: str) -> Any:
    """Return what a dotted name is, imported where it has to be; `MISSING` where there is nothing of that name."""
    try:
        found: Any = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return MISSING
    is_attribute = inspect.isdatadescriptor(found)
    return found.__get__ if is_attribute else found
