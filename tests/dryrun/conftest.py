"""The cells and the worker that the tests of this folder share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def worker():
    """End the warm worker when the tests are through."""
    from gpumagic.dryrun import client

    yield client
    client.close()
