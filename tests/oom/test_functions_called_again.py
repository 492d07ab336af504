"""`@gpumagic.oomguard(shrink="batch_size")` in plain Python: the function is called again until it fits."""

from __future__ import annotations

import gc

import pytest
import torch

import gpumagic
from tests.oom.oom_cells import GIB, allocated

pytestmark = pytest.mark.usefixtures("few_objects", "warm_worker")


@pytest.fixture(autouse=True)
def _empty_device(two_devices):
    gc.collect()
    assert allocated() == 0


def take(gib, device="simgpu:0"):
    return torch.empty(int(gib * GIB), dtype=torch.uint8, device=device)


def test_a_function_is_called_with_half_until_it_fits() -> None:
    guard = gpumagic.oomguard(shrink="batch_size")
    sizes = []

    @guard
    def train(scale, batch_size=64):
        """Train."""
        sizes.append(batch_size)
        kept = take(1)
        return kept.nbytes + take(batch_size / scale).nbytes

    assert train(8) == 3 * GIB
    assert sizes == [64, 32, 16]
    assert [each.size for each in guard.report.tries] == sizes
    assert guard.report.recovered
    assert (train.__name__, train.__doc__) == ("train", "Train.")
    sizes.clear()
    assert train(8, batch_size=8) == 2 * GIB
    assert sizes == [8]
    assert guard.report is None


def test_when_nothing_fits_one_light_error_is_raised() -> None:
    @gpumagic.oomguard(shrink="n")
    def work(n):
        kept = take(1)
        return take(9), kept, n

    with pytest.raises(gpumagic.OutOfMemory) as caught:
        work(4)
    assert caught.value.__context__ is None
    assert allocated() == 0
    guard = gpumagic.oomguard(shrink="n", keep_going=True)
    assert guard(lambda n: take(9 + n))(2) is None
    assert len(guard.report.tries) == 2


def test_a_call_goes_elsewhere_at_last() -> None:
    @gpumagic.oomguard(fallback="simgpu:1")
    def work():
        here = torch.empty(0).device
        return str(here) if here.type == "simgpu" else take(9)

    assert work() == "simgpu:1"


def test_any_other_error_is_the_functions_own() -> None:
    original = ValueError("no")

    @gpumagic.oomguard(shrink="n")
    def work(n):
        if n < 4:
            raise original
        return take(9)

    with pytest.raises(ValueError, match="no") as caught:
        work(4)
    assert caught.value is original


def test_a_with_block_says_that_it_cannot_run_again() -> None:
    refused = pytest.raises(
        gpumagic.OptionError, match="a with block cannot run again: decorate a function"
    )
    with refused, gpumagic.oomguard(shrink="n"):
        raise AssertionError("it ran")


def test_what_cannot_be_called_again_is_refused_where_it_is_decorated() -> None:
    guard = gpumagic.oomguard(shrink="n")
    with pytest.raises(gpumagic.OptionError, match=r"^<lambda> has no parameter 'n'; it has m$"):
        guard(lambda m: m)

    async def later(n):
        return n

    with pytest.raises(gpumagic.OptionError, match=r"^later only starts when it is called"):
        guard(later)
    with pytest.raises(gpumagic.DeviceNotFound):
        gpumagic.oomguard(fallback="simgpu:9")
    with pytest.raises(
        gpumagic.OptionError, match=r"^shrink='n': n must be an int of at least 1, not '3'$"
    ):
        guard(lambda n: n)("3")


def test_another_device_is_advised_only_for_what_it_has_room_for() -> None:
    """Nothing in a script can be tried, so the request itself decides."""
    edits = {}
    for gib in (3, 9):
        old = take(2)
        with gpumagic.oomguard(keep_going=True) as guard:
            take(gib)
        edits[gib] = [each.edit for each in guard.report.advice]
        del old
    assert "%%ondevice simgpu:1" in edits[3]
    assert "%%ondevice simgpu:1" not in edits[9]
