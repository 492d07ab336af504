"""What a cell's text says about its use of memory is read without running it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.source import cell_code


def read(source):
    found = cell_code.read_cell(source)
    assert found is not None
    return found


@given(st.text())
def test_any_text_is_read_or_refused(text) -> None:
    assert cell_code.read_cell(text) is None or isinstance(
        cell_code.read_cell(text), cell_code.CellCode
    )


@pytest.mark.parametrize(
    "name", ["batch_size", "BATCH_SIZE", "bs", "per_device_train_batch_size", "microbatch"]
)
def test_batch_sizes_are_known_by_their_usual_names(name) -> None:
    (found,) = read(f"x = 1\n{name} = 64").batches
    assert (found.name, found.value, found.line) == (name, 64, 2)


@pytest.mark.parametrize(
    "code", ["batch_index = 64", "obs = 3", "batch_size = n", "bs = 1", "bs = True", "jobs = 8"]
)
def test_other_names_and_values_are_not_batch_sizes(code) -> None:
    assert not read(code).batches


def test_a_batch_size_given_as_an_argument_is_found() -> None:
    assert [each.value for each in read("loader = DataLoader(d, batch_size=128)").batches] == [128]


@pytest.mark.parametrize(
    ("code", "remade"),
    [
        ("x = make()", {"x"}),
        ("x = make()\nx.sum()", {"x"}),
        ("x = x + 1", set()),
        ("print(x)\nx = make()", set()),
        ("x += 1", set()),
        ("if ok:\n    x = make()", set()),
        ("for x in y: pass", set()),
        ("for x in x: pass", set()),
        ("for i in y:\n    x = make(i)\n    print(x)", set()),
        ("for i in y:\n    print(x)\n    x = make(i)", set()),
        ("with open(f) as x: pass", {"x"}),
        ("try:\n    x = make()\nexcept E: pass", set()),
        ("def f(): return x\nx = make()", set()),
        ("y = [x for x in z]\nx = 1", {"y"}),
        ("y = x = make()", {"x", "y"}),
    ],
)
def test_a_name_is_made_anew_if_nothing_read_it_before(code, remade) -> None:
    assert read(code).bound_first == remade


def test_training_autocast_and_no_grad_are_seen_however_they_are_imported() -> None:
    assert read("loss.backward()").trains
    assert read("with autocast('cuda'): pass").autocasts
    assert read("with torch.inference_mode(): pass").switches_grad_off
    plain = read("y = model(x)")
    assert (plain.trains, plain.autocasts, plain.switches_grad_off) == (False, False, False)


def test_a_function_with_a_cache_uses_what_the_function_does() -> None:
    names: dict[str, object] = {}
    exec(
        "import functools\nnet = print\n@functools.lru_cache\ndef embed(i):\n    return net(i)",
        names,
    )
    assert cell_code.names_used(["embed"], names) == {"embed", "net"}
