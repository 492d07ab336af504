"""Which device each engine of a cluster works on."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

from gpumagic.cluster.connection import EngineResources, assign_devices
from gpumagic.errors import OptionError
from gpumagic.notebook.cells import PromoteCellMagics
from gpumagic.options import needing_body
from gpumagic.report.base import Origin


def site(host: str = "a", *gpus: str, rank: int | None = None, local_rank: int | None = None) -> EngineResources:
    found = tuple((f"cuda:{place}", f"{host}/{gpu}", 100 - place) for place, gpu in enumerate(gpus))
    return EngineResources(Origin(host, 1, rank, local_rank), found)


def test_ranks_are_the_launchers_where_all_engines_have_one() -> None:
    sites = {4: site("a", rank=1), 5: site("b", rank=0), 6: site("a", rank=2)}
    assert assign_devices("cuda:{rank}", sites) == {4: "cuda:1", 5: "cuda:0", 6: "cuda:2"}
    assert assign_devices("cuda:{local_rank}", sites) == {4: "cuda:0", 5: "cuda:0", 6: "cuda:1"}


def test_without_them_engines_are_numbered_in_their_order() -> None:
    sites = {9: site("b", local_rank=5), 4: site("a"), 7: site("a", local_rank=5)}
    assert assign_devices("{rank}", sites) == {4: "0", 7: "1", 9: "2"}
    assert assign_devices("cuda:{local_rank}", sites) == {4: "cuda:0", 7: "cuda:1", 9: "cuda:5"}
    assert assign_devices("cpu", sites) == dict.fromkeys((4, 7, 9), "cpu")


def test_a_rank_that_several_engines_inherited_tells_nothing() -> None:
    """As from a batch script of Slurm, which has a rank itself."""
    sites = {4: site("a", rank=0, local_rank=0), 5: site("a", rank=0, local_rank=0), 6: site("b", rank=0, local_rank=0)}
    assert assign_devices("cuda:{rank}", sites) == {4: "cuda:0", 5: "cuda:1", 6: "cuda:2"}
    assert assign_devices("cuda:{local_rank}", sites) == {4: "cuda:0", 5: "cuda:1", 6: "cuda:0"}


@pytest.mark.parametrize("device", ["cuda:{node}", "cuda:{", "cuda:{}", "cuda:{rank!x}"])
def test_other_braces_are_one_sentence(device: str) -> None:
    with pytest.raises(OptionError, match=r"write cuda:\{rank\}, cuda:\{local_rank\} or auto"):
        assign_devices(device, {0: site()})


def test_auto_without_a_gpu_says_which_engine_has_none() -> None:
    with pytest.raises(OptionError, match="engine 1 has no GPU"):
        assign_devices("auto", {0: site("a", "x"), 1: site("a")})


def test_auto_takes_the_freest_of_each_host() -> None:
    busy = EngineResources(Origin("a"), (("cuda:1", "a/y", 90), ("cuda:0", "a/x", 10)))
    assert assign_devices("auto", {0: busy}) == {0: "cuda:1"}
    assert assign_devices("auto", {0: busy, 1: busy}) == {0: "cuda:1", 1: "cuda:0"}
    assert sorted(assign_devices("auto", {0: busy, 1: busy, 2: busy, 3: busy}).values()) == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
        "cuda:1",
    ]


def test_an_engine_gives_way_to_one_that_sees_only_its_gpu() -> None:
    assert assign_devices("auto", {0: site("a", "x", "y"), 1: site("a", "x")}) == {0: "cuda:1", 1: "cuda:0"}


@given(st.lists(st.lists(st.sampled_from("wxyz"), min_size=1, unique=True), min_size=1, max_size=5))
def test_as_many_gpus_are_in_use_as_can_be(seen: list[list[str]]) -> None:
    """No two engines share one while there are enough."""
    sites = {engine: site("a", *gpus) for engine, gpus in enumerate(seen)}
    chosen = assign_devices("auto", sites)
    used = {next(gpu for name, gpu, _ in sites[engine].gpus if name == device) for engine, device in chosen.items()}
    orders = permutations(range(len(seen)))
    assert len(used) == max(len(_greedy([seen[engine] for engine in order])) for order in orders)


def _greedy(seen: list[list[str]]) -> set[str]:
    best: set[str] = set()

    def choose(rest: list[list[str]], taken: set[str]) -> None:
        nonlocal best
        if len(taken) > len(best):
            best = set(taken)
        for gpu in rest[0] if rest else ():
            choose(rest[1:], taken | {gpu})

    choose(seen, set())
    return best


def test_a_rank_of_engines_is_no_variable_of_the_notebook(bare_shell: InteractiveShell) -> None:
    promote = PromoteCellMagics(needing_body())
    bare_shell.user_ns.update(rank=7, n=2)
    (line, _) = promote(["%%ondevice cuda:{rank} --engines {n}\n", "x = 1\n"])
    assert bare_shell.var_expand(line, 0) == "%%ondevice cuda:{rank} --engines 2\n"
    assert promote([line, "x = 1\n"]) == [line, "x = 1\n"]
    assert promote(["%%ondevice cuda:{rank}\n", "x = 1\n"])[0] == "%ondevice cuda:{rank}\n"


@pytest.fixture
def bare_shell() -> InteractiveShell:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()
