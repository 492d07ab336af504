"""Two threads of a kernel, such as subshells and pools of threads, look at the heap at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from gpumagic.heap import holders, storages


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(*works: Callable[[], object]) -> list[object]:
    """Run works in threads that begin together; return what each returned, or raise what one of them raised."""
    barrier = threading.Barrier(len(works))
    results: list[object] = [None] * len(works)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        barrier.wait()
        try:
            results[place] = works[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_a_storage_has_one_number_whichever_thread_sees_it_first() -> None:
    tensors = [torch.empty(1) for _ in range(20_000)]
    shown = [tensor.untyped_storage() for tensor in tensors]

    def numbers() -> list[int]:
        return [storages.number_of(storage) for storage in shown]

    one, other = at_once(numbers, numbers)
    assert one == other


class Opaque:
    """Stands for a tensor that shows no storage."""


def test_records_are_freed_while_another_thread_makes_some() -> None:
    tensors = [Opaque() for _ in range(20_000)]

    def make() -> None:
        for tensor in tensors:
            storages.number_of_tensor(tensor)

    def forget() -> None:
        for _ in range(100):
            storages.forget_expired()

    at_once(make, forget)


def test_outputs_are_read_while_another_subshell_shows_some() -> None:
    outputs: dict[int, object] = dict.fromkeys(range(500))
    shell = SimpleNamespace()

    def show() -> None:
        for number in range(500, 100_000):
            outputs[number] = None
            outputs.pop(number - 500)

    def read() -> None:
        for _ in range(300):
            holders.hidden_roots({"_oh": outputs}, shell)

    at_once(show, read)
