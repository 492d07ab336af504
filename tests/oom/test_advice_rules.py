"""Each rule speaks when its facts hold and is silent when one of them is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumagic.memory.allocator import AllocatorStats
from gpumagic.oom.rules import batch, kept, limits, training, verdict
from gpumagic.oom.rules.facts import BatchSize, Facts, Growth, Model, Ownership, Scene
from gpumagic.source import cell_code  # fmt: skip

MIB, GIB = 2**20, 2**30


def figures(allocated, reserved=None):
    return AllocatorStats(allocated, reserved or allocated, allocated)


SHORTAGE = Facts(
    kind="cuda allocator", device="cuda:0", requested=2 * GIB, capacity=8 * GIB, free=GIB,
    before=figures(3 * GIB), at_failure=figures(7 * GIB), after=figures(3 * GIB), from_allocator=True,
)  # fmt: skip
TRAINING = replace(
    SHORTAGE,
    cell=cell_code.read_cell("loss = net(x)\nloss.backward()"),
    scene=Scene(line=1, functions=frozenset({"forward", "_call_impl"})),
    models=(Model("net", GIB, GIB, training=True, checkpoints=None),),
)
EVALUATING = replace(
    SHORTAGE,
    cell=cell_code.read_cell("net.eval()\nfor x in data: out = net(x)"),
    scene=Scene(line=2, functions=frozenset({"forward"}), graph_names=("out",)),
    models=(Model("net", GIB, GIB, training=False, checkpoints=None),),
)


def one(rule, facts):
    (advice,) = rule(facts)
    return advice


def test_the_shortage_is_what_was_asked_beyond_what_was_free() -> None:
    assert (SHORTAGE.short, SHORTAGE.grown) == (GIB, 4 * GIB)
    assert (SHORTAGE.covers(GIB), SHORTAGE.covers(GIB - 1), SHORTAGE.covers(None)) == (True, False, None)


def test_a_plain_shortage_is_told_with_its_numbers() -> None:
    assert verdict.sentence(SHORTAGE) == (
        "A shortage: 3.0 GiB was in use on cuda:0 before the cell, the cell took 4.0 GiB more, "
        "and a further 2.0 GiB was 1.0 GiB too much."
    )


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        ({"kind": "size bug"}, "A bug, not a shortage"),
        ({"memory": "host", "device": "cpu"}, "Host memory (RAM) ran out, not a GPU's."),
        ({"memory": "shared", "device": "cpu"}, "Shared memory (/dev/shm)"),
        ({"requested": 9 * GIB}, "One request of 9.0 GiB is larger than all of cuda:0 (8.0 GiB)"),
        ({"kind": "memory fraction"}, "cuda:0 did not run out: this process is capped"),
        ({"other_processes": 4 * GIB}, "Other processes hold 4.0 GiB of the 8.0 GiB of cuda:0"),
        ({"leftovers": (Ownership(frozenset({"a"}), GIB),)}, "Earlier cells left 1.0 GiB on cuda:0"),
        ({"segments_can_expand": True, "unallocated": 3 * GIB}, "Fragmentation: 3.0 GiB of cuda:0"),
        ({"requested": None, "kind": "cublas"}, "cuda:0 ran out of memory in cublas: 1.0 GiB of 8.0 GiB was free"),
        ({"free": None}, "A shortage: a request of 2.0 GiB did not fit on cuda:0."),
        ({"before": None}, "A shortage: a request of 2.0 GiB on cuda:0 was 1.0 GiB too large."),
    ],
)
def test_the_most_particular_explanation_is_the_verdict(changes, beginning) -> None:
    assert verdict.sentence(replace(SHORTAGE, **changes)).startswith(beginning)


def test_other_processes_that_hold_less_than_was_missing_are_not_blamed() -> None:
    assert verdict.sentence(replace(SHORTAGE, other_processes=GIB - 1)).startswith("A shortage")


def test_leftovers_are_deleted_together_and_priced_together() -> None:
    claims = (
        Ownership(frozenset({"a", "b"}), GIB),
        Ownership(frozenset({"c"}), 2 * MIB),
        Ownership(frozenset({"d"}), 100),
    )
    advice = one(kept.leftovers, replace(SHORTAGE, leftovers=claims))
    assert (advice.edit, advice.frees, advice.covers) == ("del a, b, c", GIB + 2 * MIB, True)


def test_a_displayed_leftover_is_deleted_by_ipythons_own_magic() -> None:
    claims = (
        Ownership(frozenset({"Out[5]"}), GIB),
        Ownership(frozenset({"Out[6]", "x"}), GIB),
        Ownership(frozenset({"y"}), GIB),
    )
    assert one(kept.leftovers, replace(SHORTAGE, leftovers=claims)).edit == "del x, y\n%xdel _5\n%xdel _6"


def test_small_leftovers_are_not_mentioned() -> None:
    assert not list(kept.leftovers(replace(SHORTAGE, leftovers=(Ownership(frozenset({"a"}), 512),))))


def test_an_old_value_about_to_be_replaced_is_deleted_first() -> None:
    advice = one(kept.stale, replace(SHORTAGE, stale={"x": GIB}))
    assert (advice.edit, advice.frees, advice.covers) == ("del x", GIB, True)


@pytest.mark.parametrize(
    ("line", "growth", "edit"),
    [
        ("total += loss", Growth("total", "loss", 2, append=False, scalar=True, tensors=1), "total += loss.item()"),
        ("total += a * b", Growth("total", "a * b", 2, append=False, scalar=True, tensors=1),
         "total += (a * b).item()"),
        ("outs.append(m.out)", Growth("outs", "m.out", 2, append=True, scalar=False, tensors=9),
         "outs.append(m.out.detach())"),
    ],
)  # fmt: skip
def test_graphs_that_pile_up_are_cut_where_they_are_collected(line, growth, edit) -> None:
    cell = cell_code.read_cell(f"for x in y:\n    {line}\n    print(x)")
    advice = one(kept.graph_growth, replace(SHORTAGE, cell=cell, scene=Scene(growths=(growth,))))
    assert advice.edit == edit
    assert advice.apply(cell.text.source).splitlines()[1] == f"    {edit}"


def test_evaluation_with_a_graph_is_put_under_no_grad() -> None:
    advice = one(kept.no_grad, EVALUATING)
    assert advice.edit == "with torch.no_grad():\n    for x in data: out = net(x)"
    assert advice.apply(EVALUATING.cell.text.source) == f"net.eval()\n{advice.edit}"


@pytest.mark.parametrize(
    "facts",
    [
        replace(EVALUATING, scene=replace(EVALUATING.scene, graph_names=())),
        replace(EVALUATING, scene=replace(EVALUATING.scene, calls_backward=True)),
        replace(EVALUATING, scene=replace(EVALUATING.scene, functions=frozenset({"decorate_context"}))),
        replace(EVALUATING, models=TRAINING.models),
        replace(EVALUATING, cell=cell_code.read_cell("with torch.no_grad(): out = net(x)")),
        replace(EVALUATING, cell=cell_code.read_cell("net(x).sum().backward()")),
        replace(EVALUATING, cell=None),
    ],
)
def test_no_grad_is_not_advised_where_a_graph_is_needed_or_already_off(facts) -> None:
    assert not list(kept.no_grad(facts))


@pytest.mark.parametrize(
    ("cell", "found", "edit"),
    [
        ("bs = 64", BatchSize("bs", 64, line=1), "bs = 32"),
        ("f(x, bs=64)", BatchSize("bs", 64, line=1), "f(x, bs=32)"),
        ("def f(x, bs=64): pass", BatchSize("bs", 64, line=1), "def f(x, bs=32): pass"),
        ("f(bs)", BatchSize("bs", 3), "bs = 1"),
        ("f(loader)", BatchSize("loader", 16, loader=True),
         "loader = torch.utils.data.DataLoader(loader.dataset, batch_size=8, collate_fn=loader.collate_fn)"),
    ],
)  # fmt: skip
def test_a_batch_is_lowered_where_it_is_written(cell, found, edit) -> None:
    running = Scene(functions=frozenset({"forward"}))
    advice = one(batch.smaller, replace(SHORTAGE, cell=cell_code.read_cell(cell), batches=(found,), scene=running))
    assert (advice.edit, advice.frees, advice.covers) == (edit, None, None)


def test_a_batch_is_lowered_to_what_the_linear_law_lets_fit() -> None:
    facts = replace(SHORTAGE, cell=cell_code.read_cell("batch_size = 256"), batches=(BatchSize("batch_size", 256, 1),),
                    scene=Scene(functions=frozenset({"forward"})), fixed=3 * GIB)  # fmt: skip
    advice = one(batch.smaller, replace(facts, requested=2 * GIB, at_failure=figures(7 * GIB)))
    # 6 GiB are for the batch so far and 2 for what comes next; of the device 0.92 * 8 - 3 GiB are left: 139 rows.
    assert (advice.title, advice.edit) == ("Lower batch_size from 256 to 128", "batch_size = 128")
    assert (advice.frees, advice.covers, advice.estimated) == (4 * GIB, True, True)


def test_a_batch_is_not_blamed_for_what_does_not_depend_on_it() -> None:
    facts = replace(SHORTAGE, batches=(BatchSize("bs", 64),), fixed=int(7.5 * GIB), at_failure=figures(7 * GIB))
    assert not list(batch.smaller(facts))
    stepping = replace(facts, fixed=GIB, scene=Scene(functions=frozenset({"_multi_tensor_adamw"})))
    assert not list(batch.smaller(stepping))


def test_mixed_precision_is_advised_to_float32_models_only_and_once() -> None:
    header = 'with torch.autocast("cuda", dtype=torch.bfloat16):'
    assert one(training.mixed, TRAINING).edit == f"{header}\n    loss = net(x)"
    half = Model("net", GIB, 0, training=True, checkpoints=None)
    assert not list(training.mixed(replace(TRAINING, models=(half,))))
    assert not list(training.mixed(replace(TRAINING, cell=cell_code.read_cell("with torch.autocast('cuda'): net(x)"))))
    assert not list(training.mixed(replace(TRAINING, scene=Scene(functions=frozenset({"step"})))))


def test_checkpointing_is_advised_where_activations_came_free() -> None:
    advice = one(training.checkpoint, TRAINING)
    assert "4.0 GiB of the 7.0 GiB" in advice.evidence
    switch = replace(TRAINING, models=(replace(TRAINING.models[0], checkpoints=False),))
    assert one(training.checkpoint, switch).edit == "net.gradient_checkpointing_enable()"


@pytest.mark.parametrize(
    "facts",
    [
        replace(TRAINING, after=figures(6 * GIB)),
        replace(TRAINING, models=(replace(TRAINING.models[0], checkpoints=True),)),
        replace(TRAINING, scene=Scene(functions=frozenset({"forward", "checkpoint"}))),
        EVALUATING,
    ],
)
def test_checkpointing_is_not_advised_without_gain_or_where_it_is_on(facts) -> None:
    assert not list(training.checkpoint(facts))


def test_another_device_is_named_only_if_all_the_cell_needs_fits_there() -> None:
    room = replace(SHORTAGE, free_elsewhere={"cuda:1": 7 * GIB, "cuda:2": 10 * GIB})
    advice = one(batch.other_device, room)
    assert (advice.edit, advice.covers, advice.frees) == ("%%ondevice cuda:2", True, None)
    assert not list(batch.other_device(replace(room, requested=3 * GIB)))
    left = replace(room, requested=3 * GIB, leftovers=(Ownership(frozenset({"a"}), 3 * GIB),))
    assert one(batch.other_device, left).title == "Run the cell on cuda:2"


def test_expandable_segments_are_advised_or_denied_by_what_was_unallocated() -> None:
    some = replace(SHORTAGE, segments_can_expand=True, unallocated=3 * GIB)
    assert one(limits.expandable_segments, some).frees == 3 * GIB
    none = replace(SHORTAGE, segments_can_expand=True, unallocated=200 * MIB)
    assert not list(limits.expandable_segments(none))
    assert "only 200.0 MiB was reserved but unallocated, of 2.0 GiB asked for." in " ".join(verdict.sentences(none))
    assert not list(limits.expandable_segments(replace(some, segments_can_expand=False)))


def test_emptying_the_cache_is_denied_only_where_the_allocator_did_it() -> None:
    assert any("Emptying the cache cannot help" in each for each in verdict.sentences(SHORTAGE))
    assert not verdict.sentences(replace(SHORTAGE, from_allocator=False))


def test_the_foreach_form_of_adam_is_named_by_the_function_that_failed() -> None:
    facts = replace(TRAINING, scene=Scene(functions=frozenset({"_multi_tensor_adamw"})))
    advice = one(training.one_by_one, facts)
    assert (advice.edit, advice.frees, advice.estimated) == ("fused=True", GIB, True)
    elsewhere_ = one(training.one_by_one, replace(facts, device="mps:0"))
    assert (elsewhere_.edit, elsewhere_.frees) == ("foreach=False", int(0.87 * GIB))
    assert not list(training.one_by_one(TRAINING))


def test_a_request_beyond_the_device_is_to_be_divided() -> None:
    advice = one(limits.larger_than_the_device, replace(SHORTAGE, requested=9 * GIB))
    assert "3 parts" in advice.title
    assert not list(limits.larger_than_the_device(SHORTAGE))


def test_what_suffices_comes_first_then_the_most_bytes() -> None:
    facts = replace(
        SHORTAGE, leftovers=(Ownership(frozenset({"a"}), 500 * MIB),), stale={"x": 600 * MIB},
        batches=(BatchSize("bs", 8),), free_elsewhere={"cuda:1": 20 * GIB},
        scene=Scene(functions=frozenset({"forward"})),
    )  # fmt: skip
    assert [advice.edit for advice in verdict.advise(facts)] == ["%%ondevice cuda:1", "bs = 4", "del x", "del a"]


def test_nothing_is_advised_on_no_facts() -> None:
    assert verdict.advise(Facts(kind="cublas", device="cuda:0")) == ()
