"""Reports through dask.distributed: what each worker returns is merged by the one who asked."""

from __future__ import annotations

import pytest

import gpumagic

distributed = pytest.importorskip("distributed")


def test_what_the_workers_return_merges_by_their_names() -> None:
    """The workers are threads here, and their reports still travel pickled, over TCP."""
    options = {"processes": False, "protocol": "tcp://", "dashboard_address": None, "silence_logs": 50}
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        returned = client.run(gpumagic.gpuinfo)
        tensors = client.run(gpumagic.devices)
    merged = gpumagic.merge(returned)
    assert [answer.engine for answer in merged.engines] == list(returned)
    assert set(merged.to_pandas()["state"]) == {"answered"}
    assert gpumagic.merge(tensors).magic == "devices"
