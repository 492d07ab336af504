"""What types written in C hold: numpy's arrays, cells, iterators, pandas' columns, thread locals.

They have no attributes to read. Those that notebooks keep tensors in have expressions of their own; for the rest the
gc shows what they hold, and no expression reaches it.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

from gpumagic.heap.branches import CONTAINED, Branch, Inside, Read, Reader, attributes, flags_of, is_heap_type, mro_of

_HAS_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC


def read_by_base(kind: type) -> Read | None:
    """Return how to read the instances of a type that derives from one of C's or of pandas', or None."""
    return next((read for base, read in _bases() if issubclass(kind, base)), None)


def _bases() -> Iterator[tuple[type, Read]]:
    yield types.CellType, _cell
    numpy: Any = sys.modules.get("numpy")
    pandas: Any = sys.modules.get("pandas")
    if hasattr(numpy, "ndarray"):
        yield numpy.ndarray, _array
    if hasattr(pandas, "DataFrame") and hasattr(pandas, "Series"):
        yield pandas.DataFrame, _columns
        yield pandas.Series, _columns


def shows_more(kind: type) -> bool:
    """Return whether instances of a type may hold what only the gc shows: it is C's, or derives from one of C's."""
    return any(flags_of(base) & _HAS_GC and not is_heap_type(base) for base in mro_of(kind) if base is not object)


def read_opaque(value: object, reader: Reader) -> Iterator[Branch]:
    """Read what the gc shows of an object, but for what its attributes hold."""
    own = attributes(value, reader.fields)
    yield Branch(".", CONTAINED, own)
    known = {id(each) for _, each in own}
    held = [each for each in gc.get_referents(value) if id(each) not in known and not _is_of_no_use(each, own)]
    yield Branch("in", CONTAINED, [(Inside("..."), each) for each in held])


def _is_of_no_use(value: object, own: list[tuple[str, object]]) -> bool:
    if issubclass(type(value), type | types.ModuleType):
        return True
    return type(value) is dict and bool(own) and value.keys() <= {name for name, _ in own}  # the attributes themselves


def _cell(value: types.CellType, _reader: Reader) -> Iterator[Branch]:
    held = gc.get_referents(value)
    yield Branch("in", CONTAINED, [(Inside("cell", code=".cell_contents"), each) for each in held])


def _array(value: Any, reader: Reader) -> Iterator[Branch]:
    for place, each in _elements(value):
        code = f"[{', '.join(map(str, place)) or '()'}]" if reader.is_indexed else None
        yield Branch("in", CONTAINED, [(Inside("array", code=code), each)])
    yield Branch(".", CONTAINED, attributes(value, reader.fields))


def _elements(array: Any) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yield the elements of an array of objects that may hold something, with their indices."""
    import numpy as np

    base = np.ndarray
    if base.dtype.__get__(array).kind != "O":
        return
    shape = base.shape.__get__(array)
    places = itertools.product(*map(range, shape))
    for place, each in zip(places, base.flatten(array).tolist(), strict=True):
        if type(each) not in (str, int, float, bool, type(None)):
            yield place, each


def _columns(value: Any, reader: Reader) -> Iterator[Branch]:
    """Read the columns of objects of a DataFrame or a Series, as pandas stores them: in blocks of columns."""
    own = dict(attributes(value, reader.fields))
    manager = own.pop("_mgr", None)
    for columns, array in _blocks(manager):
        for place, each in _elements(array):
            code = f"[{place[0]}]" if len(place) == 1 else f"[{place[1]}, {columns[place[0]]}]"
            yield Branch("in", CONTAINED, [(Inside("iloc", code=f".iloc{code}"), each)])
    yield Branch(".", CONTAINED, own.items())


def _blocks(manager: Any) -> Iterator[tuple[list[int], Any]]:
    """Yield pandas' arrays of objects, with the columns that they are."""
    import numpy as np

    for block in getattr(manager, "blocks", ()):
        array, columns = getattr(block, "values", None), getattr(getattr(block, "mgr_locs", None), "as_array", None)
        if type(array) is np.ndarray and columns is not None:
            yield columns.tolist(), array
