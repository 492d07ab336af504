"""The cells and the worker that the tests of this folder share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def worker():
    """End the warm worker when the tests are through."""
    from gpumagic.dryrun import client

    yield client
    client.close()


@pytest.fixture(scope="module", autouse=True)
def _few_objects(few_objects: None) -> None:
    """Collect among few objects: these tests do so before and after each cell."""
