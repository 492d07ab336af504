"""What look-ups of private names of torch find, for the time of a test: nothing, or something else."""

from __future__ import annotations

import pytest

from gpumagic._compat import private_names
from gpumagic._compat.private_names import PrivateName


def replace(monkeypatch: pytest.MonkeyPatch, name: PrivateName, found: object) -> None:
    """Have look-ups of a name find an object, as if torch had it under that name."""
    look_up = private_names.look_up
    monkeypatch.setattr(
        private_names, "look_up", lambda path: found if path == name.path else look_up(path)
    )


def lose(monkeypatch: pytest.MonkeyPatch, name: PrivateName) -> None:
    """Have look-ups of a name find nothing, as in a torch that lacks it."""
    replace(monkeypatch, name, private_names.MISSING)
