"""Each rule speaks when its facts hold and is silent when one of them is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumagic.advice import search as advising
from gpumagic.advice.facts import Collection, Model, Optimizer, Ownership, TensorFact
from gpumagic.advice.records import Need
from gpumagic.advice.rules import batch, collected, kept, limits, proposal, training, verdict
from gpumagic.advice.rules.verdict import explain
from gpumagic.advice.trials import Trials
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.report.base import Holder
from gpumagic.source import cell_code
from gpumagic.source import text as texts
from gpumagic.source.cell_code import BatchSize
from tests.oom.made_facts import changed, made_facts

MIB, GIB = 2**20, 2**30


def figures(allocated, reserved=None):
    return AllocatorStats(allocated, reserved or allocated, allocated)


SHORTAGE = made_facts(
    kind="cuda allocator", device="cuda:0", requested=2 * GIB, capacity=8 * GIB, free=GIB,
    before=figures(3 * GIB), at_failure=figures(7 * GIB), after=figures(3 * GIB), from_allocator=True,
)  # fmt: skip
TRAINING = changed(
    SHORTAGE,
    cell=cell_code.read_cell("loss = net(x)\nloss.backward()"),
    line=1,
    functions=frozenset({"forward", "_call_impl"}),
    models=(Model("net", GIB, GIB, training=True, checkpoints=None),),
)
EVALUATING = changed(
    SHORTAGE,
    cell=cell_code.read_cell("net.eval()\nfor x in data: out = net(x)"),
    line=2,
    functions=frozenset({"forward"}),
    tensors={"out": TensorFact((8,), "float32", 32, "cuda:0", has_graph=True)},
    models=(Model("net", GIB, GIB, training=False, checkpoints=None),),
)


def one(rule, facts):
    (advice,) = rule(facts)
    return advice


def half(rule, facts):
    """Return what a rule with a number in it suggests where none can be tried."""
    (choice,) = rule(facts)
    return choice.make(choice.guess)


def advise(facts):
    """Return what is advised where nothing can be tried."""
    return advising.advise(facts, Trials(facts, {}, seconds=0.0))


def test_the_shortage_is_what_was_asked_beyond_what_was_free() -> None:
    assert SHORTAGE.missing_bytes == GIB


def test_what_is_missing_for_the_whole_cell_counts_before_what_one_request_lacked() -> None:
    need = Need(needed=11 * GIB, available=8 * GIB, fits=False, certain=True)
    known = changed(SHORTAGE, need=need)
    assert known.missing_bytes == need.missing == 3 * GIB
    assert explain(known).sentence == (
        "Not enough memory: the cell needs 11.0 GiB of cuda:0, which has 8.0 GiB for it: 3.0 GiB missing."
    )
    assert next(limits.larger(known)).title == "Use a larger GPU, such as a T4 (14.6 GiB)"
    assert not list(limits.larger(SHORTAGE))


def test_memory_that_an_earlier_failure_kept_is_blamed_where_the_cell_fits_without_it() -> None:
    known = changed(
        SHORTAGE, need=Need(6 * GIB, 8 * GIB, fits=True, certain=True), after=figures(GIB)
    )
    assert explain(known).cause == "earlier failure"
    assert explain(known).sentence.startswith(
        "2.0 GiB of cuda:0 was kept by the traceback of an earlier failure"
    )


def test_a_plain_shortage_is_told_with_its_numbers() -> None:
    assert explain(SHORTAGE).sentence == (
        "Not enough memory on cuda:0: 2.0 GiB requested, 1.0 GiB free."
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
        (
            {"leftovers": (Ownership(frozenset({"a"}), GIB),)},
            "Earlier cells left 1.0 GiB on cuda:0",
        ),
        ({"segments_can_expand": True, "unallocated": 3 * GIB}, "Fragmentation: 3.0 GiB of cuda:0"),
        (
            {"requested": None, "kind": "cublas"},
            "cuda:0 ran out of memory in cublas: 1.0 GiB of 8.0 GiB was free",
        ),
        ({"free": None}, "Not enough memory: a request of 2.0 GiB did not fit on cuda:0."),
    ],
)
def test_the_most_particular_explanation_is_the_verdict(changes, beginning) -> None:
    assert explain(changed(SHORTAGE, **changes)).sentence.startswith(beginning)


def test_other_processes_that_hold_less_than_was_missing_are_not_blamed() -> None:
    assert explain(changed(SHORTAGE, other_processes=GIB - 1)).sentence.startswith(
        "Not enough memory"
    )


def test_leftovers_are_deleted_together_and_priced_together() -> None:
    claims = (
        Ownership(frozenset({"a", "b"}), GIB),
        Ownership(frozenset({"c"}), 2 * MIB),
        Ownership(frozenset({"d"}), 100),
    )
    advice = one(kept.leftovers, changed(SHORTAGE, leftovers=claims))
    assert (advice.edit, advice.frees, advice.covers) == ("del a, b, c", GIB + 2 * MIB, None)


def test_a_displayed_leftover_is_deleted_by_ipythons_own_magic() -> None:
    claims = (
        Ownership(frozenset({"Out[5]"}), GIB),
        Ownership(frozenset({"Out[6]", "x"}), GIB),
        Ownership(frozenset({"y"}), GIB),
    )
    assert (
        one(kept.leftovers, changed(SHORTAGE, leftovers=claims)).edit
        == "del x, y\n%xdel _5\n%xdel _6"
    )


def test_small_leftovers_are_not_mentioned() -> None:
    assert not list(
        kept.leftovers(changed(SHORTAGE, leftovers=(Ownership(frozenset({"a"}), 512),)))
    )


def test_an_old_value_about_to_be_replaced_is_deleted_first() -> None:
    advice = one(kept.rebound, changed(SHORTAGE, about_to_be_rebound={"x": GIB}))
    assert (advice.edit, advice.frees, advice.covers) == ("del x", GIB, None)


SUM = changed(SHORTAGE, tensors={"total": TensorFact((), "float32", 4, "cuda:0", has_graph=True)})
METER = changed(
    SHORTAGE,
    tensors={"loss": TensorFact((), "float32", 4, "cuda:0", has_graph=True)},
    collections={"meter": Collection(9, 36, graphs=9, is_of_numbers=True, place="meter.values")},
)
LIST = changed(SHORTAGE, collections={"outs": Collection(9, GIB, graphs=9)})


@pytest.mark.parametrize(
    ("line", "facts", "edit"),
    [
        ("total += loss", SUM, "total += loss.item()"),
        ("total += a * b", SUM, "total += (a * b).item()"),
        ("outs.append(m.out)", LIST, "outs.append(m.out.detach())"),
        ("outs[i] = m.out", LIST, "outs[i] = m.out.detach()"),
        ("outs.append(loss)", changed(SHORTAGE, collections={"outs": Collection(9, 36, graphs=9, is_of_numbers=True)}),
         "outs.append(loss.item())"),
        ("meter.update(loss, 64)", METER, "meter.update(loss.item(), 64)"),
    ],
)  # fmt: skip
def test_graphs_that_pile_up_are_cut_where_they_are_collected(line, facts, edit) -> None:
    cell = cell_code.read_cell(f"for x in y:\n    {line}\n    print(x)")
    advice = one(collected.graphs, changed(facts, cell=cell))
    assert advice.edit == edit
    assert advice.apply(cell.text.source).splitlines()[1] == f"    {edit}"
    assert not list(collected.graphs(changed(SHORTAGE, cell=cell))), "no live object has a graph"


def test_lists_in_a_dict_are_collected_in_the_hosts_memory() -> None:
    cell = cell_code.read_cell(
        "for name in names:\n    history.setdefault(name, []).append(p.grad.clone())"
    )
    lists = {"history": Collection(9, GIB)}
    advice = one(collected.results, changed(SHORTAGE, cell=cell, collections=lists))
    assert advice.edit == "history.setdefault(name, []).append(p.grad.clone().cpu())"


@pytest.mark.parametrize(
    "line", ["y = total.add(loss)", "y = meter.call(loss, 64)", "print(total)"]
)
def test_what_only_computes_collects_nothing(line) -> None:
    cell = cell_code.read_cell(f"for x in y:\n    {line}")
    facts = changed(METER, cell=cell, tensors={**METER.frames.tensors, **SUM.frames.tensors})
    assert not list(collected.graphs(facts))


def test_evaluation_with_a_graph_is_put_under_no_grad() -> None:
    advice = one(kept.graph_in_eval_mode, EVALUATING)
    assert advice.edit == "with torch.no_grad():\n    for x in data: out = net(x)"
    assert advice.apply(EVALUATING.frames.cell.text.source) == f"net.eval()\n{advice.edit}"


@pytest.mark.parametrize(
    "facts",
    [
        changed(EVALUATING, tensors={}, functions=frozenset()),
        changed(EVALUATING, calls_backward=True),
        changed(EVALUATING, models=TRAINING.notebook.models),
        changed(EVALUATING, cell=cell_code.read_cell("with torch.no_grad(): out = net(x)")),
        changed(EVALUATING, cell=cell_code.read_cell("net(x).sum().backward()")),
        changed(EVALUATING, cell=None),
        changed(
            EVALUATING,
            failing_text=texts.parse(
                "def f(x):\n    with torch.no_grad():\n        return net(x)", "In [2]", 3
            ),
        ),
    ],
)
def test_no_grad_is_not_advised_where_a_graph_is_needed_or_already_off(facts) -> None:
    assert not list(kept.graph_in_eval_mode(facts))


@pytest.mark.parametrize(
    ("cell", "found", "edit"),
    [
        ("bs = 64", BatchSize("bs", 64, line=1), "bs = 32"),
        ("f(x, bs=64)", BatchSize("bs", 64, line=1), "f(x, bs=32)"),
        ("def f(x, bs=64): pass", BatchSize("bs", 64, line=1), "def f(x, bs=32): pass"),
        ("f(bs)", BatchSize("bs", 3), "bs = 1"),
        ("f(loader)", BatchSize("loader", 16, loader=True), "loader.batch_sampler.batch_size = 8"),
    ],
)  # fmt: skip
def test_a_batch_is_lowered_where_it_is_written(cell, found, edit) -> None:
    running = frozenset({"forward"})
    advice = half(
        batch.smaller,
        changed(SHORTAGE, cell=cell_code.read_cell(cell), batch_sizes=(found,), functions=running),
    )
    assert (advice.edit, advice.frees, advice.covers) == (edit, None, None)


def test_a_batch_is_not_blamed_for_what_does_not_depend_on_it() -> None:
    stepping = changed(
        SHORTAGE, batch_sizes=(BatchSize("bs", 64),), functions=frozenset({"_multi_tensor_adamw"})
    )
    assert not list(batch.smaller(stepping))


def test_a_model_that_the_cell_does_not_use_goes_to_the_cpu_and_is_not_deleted() -> None:
    claims = (Ownership(frozenset({"net", "opt"}), GIB, "module"), Ownership(frozenset({"x"}), GIB))
    variables = (Holder("net", "cuda:0", GIB, "module"), Holder("x", "cuda:0", GIB, "tensor"))
    delete, move = kept.leftovers(
        changed(SHORTAGE, leftovers=claims, variables_on_device=variables)
    )
    assert (delete.first, move.first) == ("del x", "net.cpu()")


def test_mixed_precision_is_advised_to_float32_models_only_and_once() -> None:
    header = 'with torch.autocast("cuda", dtype=torch.bfloat16):'
    assert one(training.mixed, TRAINING).edit == f"{header}\n    loss = net(x)"
    half = Model("net", GIB, 0, training=True, checkpoints=None)
    assert not list(training.mixed(changed(TRAINING, models=(half,))))
    assert not list(
        training.mixed(
            changed(TRAINING, cell=cell_code.read_cell("with torch.autocast('cuda'): net(x)"))
        )
    )
    assert not list(training.mixed(changed(TRAINING, functions=frozenset({"step"}))))


def test_what_a_function_calls_its_model_is_computed_in_mixed_precision_and_not_backward_alone() -> (
    None
):
    code = "x = x.to(device)\nout = model(x)\nloss = criterion(out)\nloss.backward()"
    facts = changed(
        TRAINING, cell=cell_code.read_cell(code), line=4, functions=frozenset({"_engine_run_backward"}),
        tensors=dict.fromkeys(("out", "loss"), TensorFact((), "float32", 4, "cuda:0", has_graph=True)),
    )  # fmt: skip
    edited = one(training.mixed, facts).apply(code).splitlines()
    assert edited[1:4] == [
        'with torch.autocast("cuda", dtype=torch.bfloat16):', "    out = model(x)", "    loss = criterion(out)",
    ]  # fmt: skip


def test_checkpointing_is_advised_where_activations_came_free() -> None:
    assert not list(training.checkpoint(TRAINING)), "nothing says which of its parts"
    blocks = changed(
        TRAINING, models=(replace(TRAINING.notebook.models[0], blocks="net.children()"),)
    )
    advice = one(training.checkpoint, blocks)
    assert "4.0 GiB of what was in use was held by graphs" in advice.evidence
    assert "for b in net.children():" in advice.first
    switch = changed(
        TRAINING,
        models=(
            replace(
                TRAINING.notebook.models[0],
                checkpoints=False,
                saving_methods=("gradient_checkpointing_enable",),
            ),
        ),
    )
    assert one(training.checkpoint, switch).edit == "net.gradient_checkpointing_enable()"


@pytest.mark.parametrize(
    "facts",
    [
        changed(TRAINING, models=(replace(TRAINING.notebook.models[0], checkpoints=True),)),
        changed(TRAINING, functions=frozenset({"forward", "checkpoint"})),
        EVALUATING,
    ],
)
def test_checkpointing_is_not_advised_where_it_is_on_or_nothing_trains(facts) -> None:
    assert not list(training.checkpoint(facts))


def test_the_device_with_most_room_is_named_where_that_is_more_than_here() -> None:
    room = changed(SHORTAGE, free_elsewhere={"cuda:1": 7 * GIB, "cuda:2": 10 * GIB})
    assert one(limits.other_device, room).edit == "%%ondevice cuda:2"
    assert not list(limits.other_device(changed(SHORTAGE, free_elsewhere={"cuda:1": GIB // 2})))


def test_expandable_segments_are_advised_where_much_was_unallocated() -> None:
    some = changed(SHORTAGE, segments_can_expand=True, unallocated=3 * GIB)
    assert (
        one(limits.expandable_segments, some).edit
        == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    none = changed(SHORTAGE, segments_can_expand=True, unallocated=200 * MIB)
    assert not list(limits.expandable_segments(none))
    assert not list(limits.expandable_segments(changed(some, segments_can_expand=False)))


def test_emptying_the_cache_is_denied_only_where_the_allocator_did_it() -> None:
    assert any("Emptying the cache cannot help" in each for each in verdict.sentences(SHORTAGE))
    assert not list(verdict.sentences(changed(SHORTAGE, from_allocator=False)))


def test_the_foreach_form_of_adam_is_named_by_the_function_that_failed() -> None:
    facts = changed(TRAINING, functions=frozenset({"_multi_tensor_adamw"}))
    advice = one(training.one_by_one, facts)
    assert advice.edit == "fused=True"
    assert one(training.one_by_one, changed(facts, device="mps:0")).edit == "foreach=False"
    assert not list(training.one_by_one(TRAINING))


@pytest.mark.parametrize("device", ["cuda:0", "mps:0"])
def test_an_optimizer_of_an_earlier_cell_is_told_to_update_one_parameter_at_a_time_and_so_it_says(
    device: str,
) -> None:
    """It has counted its steps on the host, where Adam's fused form refuses them."""
    adam = Optimizer("opt", "AdamW", nbytes=1 << 30)
    stepping = changed(
        TRAINING,
        device=device,
        functions=frozenset({"_multi_tensor_adamw"}),
        optimizers=(adam,),
        cell=cell_code.read_cell("opt.step()"),
        source="opt.step()",
    )
    advice = one(training.one_by_one, stepping)
    assert "fused" not in advice.title
    assert "one parameter at a time" in advice.title
    assert advice.first == 'for group in opt.param_groups:\n    group["foreach"] = False'


EMBEDDING = changed(
    TRAINING, cell=cell_code.read_cell("opt = torch.optim.Adam(net.parameters(), lr=0.1)\nnet(x).backward()"), line=2,
    models=(replace(TRAINING.notebook.models[0], embeddings=("net.users", "net.films")),),
    optimizers=(Optimizer("opt", "Adam", GIB, models=frozenset({"net"})),),
)  # fmt: skip


def test_gradients_of_large_embeddings_are_sparse_with_an_optimizer_that_takes_them() -> None:
    """Adam refuses sparse gradients, and its state has all rows of the table."""
    *_, advice = training.leaner(EMBEDDING)
    assert advice.title == "Replace Adam by SGD, with sparse gradients of embeddings"
    assert advice.first == "net.users.sparse = True\nnet.films.sparse = True"
    assert advice.edit == "opt = torch.optim.SGD(net.parameters(), lr=0.1)"


def test_embeddings_that_the_cell_makes_are_told_where_it_has_made_them() -> None:
    cell = "net = Net().cuda()\n" + EMBEDDING.frames.cell.text.source
    *_, advice = training.leaner(changed(EMBEDDING, cell=cell_code.read_cell(cell), line=3))
    assert advice.first is None
    assert advice.apply(cell).splitlines()[:4] == [
        "net = Net().cuda()", "net.users.sparse = True", "net.films.sparse = True",
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    [
        changed(EMBEDDING, models=(replace(EMBEDDING.notebook.models[0], embeddings=()),)),
        changed(EMBEDDING, models=(replace(EMBEDDING.notebook.models[0], local=True),)),
        changed(EMBEDDING, optimizers=(replace(EMBEDDING.notebook.optimizers[0], models=frozenset({"other"})),)),
        changed(EMBEDDING, cell=cell_code.read_cell(
            "opt = torch.optim.Adam(net.parameters(), 0.1, (0.9, 0.99))\nnet(x).backward()")),
    ],
    ids=["none are large", "no name reaches the model", "the optimizer is of another model", "who knows its arguments"],
)  # fmt: skip
def test_gradients_stay_as_they_are_where_no_line_can_make_them_sparse(facts) -> None:
    assert not any("sparse" in each.title for each in training.leaner(facts))


WITH_GRADIENTS = changed(
    TRAINING, cell=cell_code.read_cell("opt.zero_grad()\nnet(x).backward()"),
    models=(replace(TRAINING.notebook.models[0], gradient_nbytes=GIB),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "first"),
    [
        (WITH_GRADIENTS, "net.zero_grad()"),
        (changed(WITH_GRADIENTS, left_by_failed_run=("x", "loss"), reset_code={"opt": "opt.state.clear()"}),
         "del x, loss\nopt.state.clear()\nnet.zero_grad()"),
        (changed(WITH_GRADIENTS, left_by_failed_run=("net",)), "del net"),
        (changed(WITH_GRADIENTS, cell=TRAINING.frames.cell), None),
        (changed(WITH_GRADIENTS, models=(replace(WITH_GRADIENTS.notebook.models[0], local=True),)), None),
        (changed(WITH_GRADIENTS, models=(replace(WITH_GRADIENTS.notebook.models[0], gradient_nbytes=512),)), None),
    ],
    ids=["gradients", "variables before gradients", "the cell makes the model anew", "gradients that the cell adds up",
         "no name reaches the model", "small ones"],
)  # fmt: skip
def test_gradients_of_the_failed_pass_are_cleared_before_the_cell_runs_again(facts, first) -> None:
    """Where the cell clears them itself, they are of no use; before that they stand beside what it makes."""
    assert proposal.cleared(None, facts) == first
    assert proposal.cleared("y = 1", facts) == "\n".join(filter(None, (first, "y = 1")))


def test_what_is_to_be_run_first_is_not_taken_away_before() -> None:
    facts = changed(WITH_GRADIENTS, left_by_failed_run=("x", "y"))
    assert proposal.cleared("x = x.cpu()", facts) == "del y\nnet.zero_grad()\nx = x.cpu()"


def test_without_dry_runs_what_costs_nothing_comes_first() -> None:
    facts = changed(
        SHORTAGE, leftovers=(Ownership(frozenset({"a"}), 500 * MIB),), about_to_be_rebound={"x": 600 * MIB},
        batch_sizes=(BatchSize("bs", 8),), free_elsewhere={"cuda:1": 20 * GIB},
        functions=frozenset({"forward"}),
    )  # fmt: skip
    found = advise(facts)
    assert [advice.edit for advice in found] == ["del a", "del x", "%%ondevice cuda:1", "bs = 4"]
    assert {advice.covers for advice in found} == {None}


def test_nothing_is_advised_on_no_facts() -> None:
    assert advise(made_facts(kind="cublas", device="cuda:0")) == ()


@pytest.mark.parametrize(
    ("cell", "edited"),
    [
        (
            "g = vmap(grad(f), in_dims=(None, 0))(w, x)",
            "with torch.no_grad():\n    g = vmap(grad(f), in_dims=(None, 0), chunk_size=16)(w, x)",
        ),
        (
            "y = torch.vmap(f)(x, other)",
            "with torch.no_grad():\n    y = torch.vmap(f, chunk_size=16)(x, other)",
        ),
        ("y = vmap(f, chunk_size=8)(x)", None),
        ("y = vmap(f)(len(x))", None),
    ],
)
def test_vmap_maps_over_some_rows_at_a_time(cell, edited) -> None:
    there = {
        "w": TensorFact((7, 3), "float32", 84, "cuda:0"),
        "x": TensorFact((64, 3), "float32", 768, "cuda:0"),
    }
    facts = changed(
        SHORTAGE, cell=cell_code.read_cell(cell), line=1, functions=frozenset({"vmap_impl"}),
        tensors=there,
    )  # fmt: skip
    found = list(batch.mapped(facts))
    assert [each.now for each in found] == ([] if edited is None else [64])
    assert [each.make(16).apply(cell) for each in found] == ([] if edited is None else [edited])
    assert not list(batch.mapped(changed(facts, functions=frozenset())))


@pytest.mark.parametrize(
    ("made", "rows"), [("randn(3, 64, 64)", None), ("randn(3, 64)", 3), ("randn(8, 3, 64, 64)", 8)]
)
def test_the_channels_of_one_image_are_no_batch(made, rows) -> None:
    shape = tuple(map(int, made[6:-1].split(",")))
    facts = changed(
        TRAINING, cell=cell_code.read_cell(f"x = torch.{made}\nnet(x).sum().backward()"),
        tensors={"x": TensorFact(shape, "float32", 4, "cuda:0")},
    )  # fmt: skip
    assert [choice.now for choice in batch.unnamed(facts)] == ([] if rows is None else [rows])
