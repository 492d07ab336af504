"""Each suggestion about moves appears where the counts bear it, and not for what only looks alike."""

from __future__ import annotations

from typing import Any

import pytest

from gpumagic.source import loop_code
from gpumagic.source.loop_code import Creation
from gpumagic.transfers import advice
from gpumagic.transfers.report import TransferRow

MIB = 1024**2


def row(count: int = 1, nbytes: int = MIB, **more: Any) -> TransferRow:
    given = {
        "direction": "host-to-device", "source": "cpu", "target": "cuda:0", "seconds": 0.0, "line": 2, "code": None,
        "name": "x", "cause": ".to",
    }  # fmt: skip
    return TransferRow(count=count, nbytes=nbytes, **{**given, **more})


def code(text: str) -> tuple[tuple[int, str], ...]:
    return tuple(enumerate(text.splitlines(), 1))


def suggestions(*args: Any, **more: Any) -> tuple[str, ...]:
    return tuple(map(str, advice.suggestions(*args, **more)))


LOOP = code("for batch in loader:\n    y = x.to('cuda:0')")
READ = {"direction": "device-to-host", "source": "cuda:0", "target": "cpu", "cause": ".item"}


# ---- Moved again and again


def test_the_same_tensor_moved_in_a_loop() -> None:
    (said,) = suggestions([row(300, 300 * 512 * MIB, repeats=299)], {}, lines=LOOP)
    assert (
        said
        == "150.0 GiB copied to cuda:0 300 times by line 2: move x before the loop (saves 149.5 GiB)"
    )


def test_the_same_tensor_moved_by_a_function_that_is_called_often() -> None:
    (said,) = suggestions(
        [row(300, 300, repeats=299)], {}, lines=code("def load():\n    return x.to('cuda:0')")
    )
    assert (
        said
        == "300 B copied to cuda:0 300 times by line 2: move x once and keep the copy (saves 299 B)"
    )


def test_what_one_line_copies_again_as_often_is_one_suggestion_and_the_larger_comes_first() -> None:
    alike = [
        row(9, 9 * MIB, repeats=8),
        row(9, 9 * MIB, repeats=8, name="y"),
        row(9, 99 * MIB, repeats=8, line=1),
    ]
    assert suggestions(alike, {}, lines=LOOP) == (
        "99.0 MiB copied to cuda:0 9 times by line 1: move x once and keep the copy (saves 88.0 MiB)",
        "18.0 MiB copied to cuda:0 9 times by line 2: move x, y before the loop (saves 16.0 MiB)",
    )


def test_every_epoch_moves_the_same_batches_again() -> None:
    (said,) = suggestions([row(30, 30 * MIB, repeats=20)], {}, lines=LOOP)
    assert said.startswith(
        "20.0 MiB of 30.0 MiB copied to cuda:0 by line 2 had been copied before: keep the copies"
    )


@pytest.mark.parametrize(
    "alike",
    [
        row(300, 300 * MIB), row(2, 2 * MIB, repeats=1), row(300, 1200, repeats=299, **READ),
        row(300, 1200, repeats=299, **{**READ, "cause": "print"}),
    ],
)  # fmt: skip
def test_new_batches_moves_that_happened_twice_and_reads_are_no_such_thing(
    alike: TransferRow,
) -> None:
    assert suggestions([alike], {}, lines=LOOP) == ()


# ---- Waiting


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (
            ".item",
            "1,000 syncs by .item() in a loop, line 2: accumulate on the device, read once at the end",
        ),
        (
            "float()",
            "1,000 syncs by float() in a loop, line 2: accumulate on the device, read once at the end",
        ),
        (
            "bool()",
            "1,000 syncs by a condition on the device in a loop, line 2: test it less often",
        ),
        ("print", "1,000 syncs by print in a loop, line 2: print less often"),
    ],
)
def test_a_read_in_a_loop_is_told_by_what_read(cause: str, said: str) -> None:
    assert suggestions([row(1000, 4000, **{**READ, "cause": cause})], {2: 1000}, lines=LOOP) == (
        said,
    )


def test_waiting_without_a_read_is_told_by_its_count_alone() -> None:
    assert suggestions([], {2: 500}, lines=LOOP) == (
        "500 syncs in a loop, line 2: wait once, at the end",
    )


def test_a_loss_read_now_and_then_is_nothing_to_change() -> None:
    assert suggestions([row(99, 396, **READ)], {2: 99}, lines=LOOP) == ()


# ---- Created in the wrong place


@pytest.mark.parametrize(
    ("text", "line", "name", "said"),
    [
        (
            "m = torch.zeros(9, device='cpu')\ny = m.to('cuda:0')",
            2,
            "m",
            "m created on cpu by line 1, copied by line 2",
        ),
        (
            "m = torch.randn(9)\nm = m.cuda()",
            2,
            "m",
            "m created on cpu by line 1, copied by line 2",
        ),
        (
            "pass\ny = torch.ones(3).to('cuda:0')",
            2,
            None,
            "1.0 MiB created on cpu and copied by line 2",
        ),
    ],
)
def test_what_is_created_only_to_be_moved(
    text: str, line: int, name: str | None, said: str
) -> None:
    found = suggestions([row(line=line, name=name)], {}, lines=code(text))
    assert found == (said + ': create it with device="cuda:0" (saves 1.0 MiB)',)


@pytest.mark.parametrize(
    "text",
    [
        "m = torch.zeros(9)\ny = m.to('cuda:0')\nz = m + 1",  # used on the host, too
        "m = torch.zeros(9)\nm[0] = 1; y = m.to('cuda:0')",  # filled on the host
        "m = torch.rand(9, generator=g)\ny = m.to('cuda:0')",  # the generator's device is meant
        "m = torch.empty(9, pin_memory=True)\ny = m.to('cuda:0')",
        "m = torch.tensor(data)\ny = m.to('cuda:0')",  # its values come from the host
        "m = torch.from_numpy(a)\ny = m.to('cuda:0')",
        "m = load()\ny = m.to('cuda:0')",
        "m = torch.zeros(9)\ny = m.to(torch.float16)\nz = n.to('cuda:0')",
    ],
)
def test_what_must_be_made_on_the_host_is_not_told_to_be_made_elsewhere(text: str) -> None:
    lines = code(text)
    assert suggestions([row(line=len(lines), name="n")], {}, lines=lines) == ()
    if "n.to" not in text:
        assert suggestions([row(line=2, name="m")], {}, lines=lines) == ()


def test_a_creation_that_moved_nothing_is_not_spoken_of() -> None:
    assert suggestions([], {}, lines=code("y = torch.zeros(3).to('cuda:0')")) == ()


# ---- Pinned memory


def test_a_stream_of_batches_from_pageable_memory() -> None:
    (said,) = suggestions([row(100, 100 * MIB, pageable=100 * MIB, name="batch")], {}, lines=LOOP)
    assert said.startswith(
        "100.0 MiB copied from pageable memory by line 2 in 100 transfers: DataLoader(..., pin_memory=True)"
    )


def test_pinning_is_for_what_a_loader_gives() -> None:
    stream = row(100, 100 * MIB, pageable=100 * MIB)
    assert any("pin_memory" in str(each) for each in suggestions([stream], {}, lines=LOOP))
    assert suggestions([stream], {}, lines=LOOP, has_loader=False) == ()


@pytest.mark.parametrize(
    "alike",
    [
        row(100, 100 * MIB, pageable=None),  # a device for which it makes no difference
        row(100, 100 * MIB, pageable=0),  # pinned
        row(100, 100_000, pageable=100_000),  # small
        row(1, 900 * MIB, pageable=900 * MIB),  # once: pinning would cost a copy itself
    ],
)
def test_pinning_is_not_spoken_of_where_it_would_not_pay(alike: TransferRow) -> None:
    assert not any("pin_memory" in str(each) for each in suggestions([alike], {}, lines=LOOP))


@pytest.mark.parametrize(
    "alike", [row(99, 9900), row(200, 200 * MIB), row(200, 20_000, cause="Module.to")]
)
def test_few_copies_large_ones_and_those_of_a_module_are_not_advised_to_be_joined(
    alike: TransferRow,
) -> None:
    assert suggestions([alike], {}, lines=LOOP) == ()


# ---- Reading the code


def test_lines_in_loops_are_found_with_their_loop() -> None:
    text = (
        "a = 1\nfor i in range(3):\n    b = i\n    while b > 0:\n        b -= 1\n"
        "c = [\n    x.item()\n    for x in y\n]\ndef f():\n    return 1"
    )
    assert dict(loop_code.read_loops(code(text)).loops) == {
        3: 2,
        4: 4,
        5: 4,
        6: 6,
        7: 6,
        8: 6,
        9: 6,
    }


def test_magics_and_lines_numbered_from_further_down_are_read() -> None:
    lines = ((10, "%%ondevice 0"), (11, "y = torch.zeros(3).to(1)"), (12, "!ls"))
    assert loop_code.read_loops(lines).creations == (Creation(None, 11, 11),)


@pytest.mark.parametrize("text", ["", "for", "x = (", "\0"])
def test_code_that_cannot_be_parsed_says_nothing(text: str) -> None:
    assert loop_code.read_loops(code(text)) == loop_code.LoopCode()
