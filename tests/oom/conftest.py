"""Every suggestion that any test here brings about says what its code does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumagic.advice.records import Advice
from tests.oom.words import mismatches


@pytest.fixture(autouse=True)
def _suggestions_say_what_their_code_does() -> Iterator[None]:
    wrong: list[str] = []
    make = Advice.__init__

    def made(self: Advice, *arguments: object, **fields: object) -> None:
        make(self, *arguments, **fields)
        wrong.extend(mismatches(self))

    # A context of its own: what a test patches is undone before the fixtures that the test uses.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Advice, "__init__", made)
        yield
    assert not wrong, "\n".join(dict.fromkeys(wrong))
