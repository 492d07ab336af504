"""Advice where a library's trainer ran out of memory: the arguments of the call that told it how to train."""

from __future__ import annotations

import pytest

from gpumagic.advice.facts import Facts
from gpumagic.advice.rules import batch, loops, training
from gpumagic.oom.trainers import find_trainer
from gpumagic.source import cell_code
from gpumagic.source.cell_code import BatchSize
from tests.oom.made_facts import changed, made_facts

SHORTAGE = made_facts(
    kind="cuda allocator", device="cuda:0", line=1, functions=frozenset({"_inner_training_loop"})
)
ARGUMENTS = type("TrainingArguments", (), {"__module__": "transformers.training_args"})
TRAINER = type("Trainer", (), {"__module__": "transformers.trainer"})
FITS = type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer"})
HISTORY = [
    "",
    "args = TrainingArguments(\n    'out',\n    per_device_train_batch_size=64, bf16=True)",
    "trainer = Trainer(model, args)\nx = 1",
]


def notebook() -> dict[str, object]:
    trainer, args = TRAINER(), ARGUMENTS()
    trainer.args = args
    return {"args": args, "trainer": trainer, "x": 1}


def facts(cell: str, history: list[str], names: dict[str, object], **more: object) -> Facts:
    read = cell_code.read_cell(cell)
    used = read.names & names.keys()
    return changed(
        SHORTAGE, cell=read, trainer=find_trainer(used, names, read.text, history), **more
    )


def titles(known: Facts) -> list[str]:
    rules = (training.checkpoint, training.mixed, training.leaner)
    return [each.title for rule in rules for each in rule(known)]


def test_the_statements_of_earlier_cells_are_to_be_run_again_with_another_batch() -> None:
    (choice,) = loops.batch(facts("trainer.train()", HISTORY, notebook()))
    assert (choice.name, choice.now) == ("per_device_train_batch_size", 64)
    advice = choice.finish(20)
    assert (
        advice.title
        == "Lower per_device_train_batch_size from 64 to 16 and accumulate 4 passes a step"
    )
    assert advice.evidence == "In [1] says so; up to 20 fits"
    assert advice.first == (
        "args = TrainingArguments(\n    'out',\n"
        "    per_device_train_batch_size=16, bf16=True, gradient_accumulation_steps=4)\n"
        "trainer = Trainer(model, args)"
    )
    assert not advice.changes


def test_a_call_in_the_cell_is_changed_there_and_counts_before_older_ones() -> None:
    cell = "args = TrainingArguments('out', gradient_accumulation_steps=2)\nTrainer(model, args).train()"
    known = facts(cell, HISTORY, notebook())
    (choice,) = loops.batch(known)
    assert choice.now == 8  # transformers' own
    advice = choice.finish(4)
    assert advice.evidence == "line 1 says nothing else than the default; up to 4 fits"
    assert advice.first is None
    assert advice.apply(cell).splitlines()[0] == (
        "args = TrainingArguments('out', gradient_accumulation_steps=4, per_device_train_batch_size=4)"
    )


def test_nothing_is_advised_that_is_told_already_or_whose_number_only_running_code_tells() -> None:
    told = "args = TrainingArguments('out', fp16=FAST, gradient_checkpointing=True, optim='sgd', "
    told += "per_device_train_batch_size=n)"
    known = facts(f"{told}\nTrainer(model, args).train()", [], notebook())
    assert titles(known) == []
    assert list(loops.batch(known)) == []


def test_what_trains_and_what_evaluates_are_told_apart() -> None:
    training = facts("trainer.train()", HISTORY, notebook())
    assert titles(training) == [
        "Recompute activations in backward instead of keeping them",
        "Replace AdamW by Adafactor",
    ]
    evaluating = changed(training, functions=frozenset({"evaluation_loop"}))
    assert titles(evaluating) == []
    (choice,) = loops.batch(evaluating)
    assert (choice.name, choice.now, choice.finish) == ("per_device_eval_batch_size", 8, None)


def test_lightnings_trainer_accumulates_what_a_loaders_batch_no_longer_holds() -> None:
    cell = "trainer = L.Trainer(max_epochs=1)\ntrainer.fit(net, DataLoader(data, batch_size=48))"
    known = facts(
        cell, [], {"trainer": FITS()}, batch_sizes=(BatchSize("batch_size", 48, 2),),
        line=2, functions=frozenset({"_fit_impl", "forward"}),
    )  # fmt: skip
    (choice,) = batch.smaller(known)
    assert choice.finish(20).apply(cell) == (
        "trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=3)\n"
        "trainer.fit(net, DataLoader(data, batch_size=16))"
    )
    assert titles(known) == ["Compute the forward pass in bfloat16"]


def test_a_batch_that_no_fair_number_divides_is_cut_all_the_same() -> None:
    cell = "bs = 97\nfor i in range(9):\n    loss = f(bs)\n    loss.backward()\n    opt.step()\n    opt.zero_grad()"
    known = facts(
        cell,
        [],
        {},
        batch_sizes=(BatchSize("bs", 97, 1),),
        line=4,
        functions=frozenset({"forward"}),
    )
    (choice,) = batch.smaller(known)
    advice = choice.finish(50)
    assert advice.title == "Lower bs from 97 to 48 and accumulate 2 passes a step"
    assert advice.cost == "the same gradient, of 96 of 97"


@pytest.mark.parametrize(
    "history", [[], ["", "def make():\n    trainer = Trainer(model, args)"], ["", "not python ("]]
)
def test_a_trainer_that_no_cell_shows_is_none(history: list[str]) -> None:
    assert facts("trainer.train()", history, notebook()).notebook.trainer is None
