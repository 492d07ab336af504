"""The two stages of the tests: what everybody runs, and the rest, marked `deep`, which CI runs as well.

CI has time for a part of the deep stage's examples, the same in every run; with GPUMAGIC_WHOLE_CORPUS=1 all are made,
and others each time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

IS_WHOLE = "GPUMAGIC_WHOLE_CORPUS" in os.environ
FEW, MANY = 7, 100 if IS_WHOLE else 40
"""How many examples a test of Hypothesis has in each stage, where it does not say otherwise."""


def sample(cases: Iterable[Any], every: int) -> list[Any]:
    """Return the cases for `parametrize`: one in so many, from the first on, as it is, and the others marked deep."""
    return [
        case if number % every == 0 else pytest.param(case, marks=pytest.mark.deep)
        for number, case in enumerate(cases)
    ]


def sample_and_all(cases: Iterable[Any], every: int) -> list[Any]:
    """Return two sets of the cases for `parametrize`, for a test about all of them: the same sample, and all, deep."""
    cases = list(cases)
    few = list(itertools.islice(cases, 0, None, every))
    return [pytest.param(few, id="sample"), pytest.param(cases, id="all", marks=pytest.mark.deep)]


def wanted(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """Return what the tests that were chosen of this file have as an argument: what has to be prepared for them."""
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and _has_case(item)
    ]
    given = [params[argument] for params in chosen if argument in params]
    given += itertools.chain.from_iterable(
        params[f"{argument}s"] for params in chosen if f"{argument}s" in params
    )
    return list(dict.fromkeys(given))


def _has_case(item: pytest.Item) -> bool:
    return hasattr(item, "callspec")


def is_deep(config: pytest.Config) -> bool:
    """Return whether the tests that are marked deep are asked for."""
    expression = config.getoption("markexpr")
    return "deep" in expression and "not deep" not in expression


def examples(few: int, deep: int) -> settings:
    """Return how many examples a costly test of Hypothesis has in each stage; of the deep one's CI makes a third."""
    many = deep if IS_WHOLE else max(few, deep // 3)
    return settings(max_examples=many if settings.default.max_examples == MANY else few)
