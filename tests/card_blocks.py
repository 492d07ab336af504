"""Reads where the simulated card's blocks lie, out of its own memory, and tells it in the form of CUDA's snapshot.

simgpu has no `memory_snapshot`. This one follows the pointers of `gpumagic/simgpu/allocator.h` (as g++ on 64-bit Linux
lays out its structs), so that tests can ask of simgpu what the product asks of CUDA. What it finds must add up to the
card's own figures; the product looks at that too.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

WORD = 8
INDEX, SMALL_CACHED, LARGE_CACHED = 40, 72, 120  # of a Card: behind its mutex, among its figures
SIZE, SMALL, PREVIOUS, NEXT = 8, 24, 32, 40  # of a Block, which begins with its address
ROOT, LEFT, RIGHT, VALUE = 16, 16, 24, 32  # of a set, and of its nodes


def install() -> None:
    """Give `torch.simgpu` a `memory_snapshot`."""
    import torch

    torch.simgpu.memory_snapshot = snapshot


def remove() -> None:
    """Take it away again."""
    import torch

    del torch.simgpu.memory_snapshot


def snapshot() -> list[dict[str, object]]:
    """Return the segments of all cards; a storage that no tensor in Python reaches is told without its address."""
    import torch

    from gpumagic.simgpu import _module

    library = ctypes.CDLL(_module.native.__file__)
    cards = ctypes.c_void_p.in_dll(library, "_ZZN6simgpu5cardsEvE8instance").value
    numbers = {_word(_word(cards) + index * WORD): index for index in range(torch.simgpu.device_count())}
    places: list[dict[int, int]] = [{} for _ in numbers]
    for card, block, address in _storages(set(numbers)):
        places[numbers[card]][block] = address
    return [
        segment
        for card, index in numbers.items()
        for segment in _segments(card, index, places[index], torch.simgpu.memory_reserved(index))
    ]


def _segments(card: int, index: int, places: dict[int, int], reserved: int) -> Iterator[dict[str, object]]:
    assert _word(card + INDEX) & 0xFF == index
    free = {*_members(card + SMALL_CACHED), *_members(card + LARGE_CACHED)}
    heads = {_head(block) for block in (*free, *places)}
    for head in sorted(heads, key=_word):
        blocks = list(_chain(head, free, places))
        reserved -= sum(each["size"] for each in blocks)
        yield _segment(index, _word(head), bool(_word(head + SMALL) & 0xFF), blocks)
    if reserved:  # whole segments of which no tensor is seen: some graph's
        yield _segment(index, 1 << 60, False, [{"address": 1 << 60, "size": reserved, "state": "active_allocated"}])


def _segment(index: int, address: int, small: bool, blocks: list[dict[str, object]]) -> dict[str, object]:
    kind = "small" if small else "large"
    return {"device": index, "address": address, "stream": 0, "segment_type": kind, "blocks": blocks}


def _chain(block: int, free: set[int], places: dict[int, int]) -> Iterator[dict[str, object]]:
    while block:
        state = "inactive" if block in free else "active_allocated"
        yield {"address": places.get(block, (1 << 60) + _word(block)), "size": _word(block + SIZE), "state": state}
        block = _word(block + NEXT)


def _head(block: int) -> int:
    while before := _word(block + PREVIOUS):
        block = before
    return block


def _members(tree: int) -> Iterator[int]:
    waiting = [_word(tree + ROOT)]  # the header comes behind the comparison, its parent is the root
    while waiting:
        node = waiting.pop()
        if node:
            yield _word(node + VALUE)
            waiting += [_word(node + LEFT), _word(node + RIGHT)]


def _storages(cards: set[int]) -> Iterator[tuple[int, int, int]]:
    """Yield card, block and address of every storage there that a tensor in Python or a graph of one reaches."""
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address:
            for memory in _owned(storage._cdata, address):
                if _is_readable(memory) and _word(memory) in cards:
                    yield _word(memory), _word(memory + WORD), address


def _owned(storage: int, address: int) -> list[int]:
    """Return what a storage's pointer may own: one of the words behind it."""
    words = [_word(storage + place * WORD) for place in range(12)]
    at = words.index(address)
    return words[at + 1 : at + 3]


def _is_readable(address: int) -> bool:
    return 1 << 16 < address < 1 << 47 and address % WORD == 0


def _tensors() -> Iterator[object]:
    import torch

    from gpumagic.probes.graphs import Graphs

    graphs = Graphs()
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "simgpu":
            yield each
            if each.grad_fn is not None:
                graph = graphs.of(each.grad_fn)
                yield from (saved for saved in graph.tensors if saved.device.type == "simgpu")


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
