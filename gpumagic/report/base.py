"""What every report is: rows, a DataFrame, JSON-ready data, and a picture of itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from gpumagic.report.rendering import to_html, to_text

if TYPE_CHECKING:
    import pandas as pd


Row = TypeVar("Row")
Key = TypeVar("Key")
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in the order in which they come."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


class Report(Generic[Row]):
    """A sequence of rows that shows itself in a notebook and a terminal, and becomes a DataFrame or JSON."""

    __slots__ = ()
    row_type: ClassVar[type[Any]]
    """The frozen dataclass or named tuple of one row; its fields are the columns of `to_pandas`."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, in the order in which they are shown."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    def __bool__(self) -> bool:
        return True  # a report without rows is an answer too: `if report` must not mean `if rows`

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a record with raw numbers; the columns are the same whatever was found.

        A figure that is absent is NaN, also where no row has it, so that columns of figures are always numbers.
        """
        columns = columns_of(self.row_type)
        return frame(columns, [[getattr(row, name) for name in columns] for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON-ready data: dicts, lists, strings, numbers and None."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return plain

    def __str__(self) -> str:
        return to_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


def frame(columns: Mapping[str, str], rows: Sequence[Sequence[object]]) -> pd.DataFrame:
    """Return a DataFrame of columns that are given with their types; None in a column of figures is NaN."""
    import pandas as pd

    figures = [name for name, kind in columns.items() if kind in _FIGURES]
    found = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
    found.update((name, [math.nan if each is None else each for each in found[name]]) for name in figures)
    table = pd.DataFrame(found, dtype=None if rows else object)
    return table if rows else table.astype(dict.fromkeys(figures, "float64"))


_FIGURES = ("int", "float", "int | None", "float | None")


def columns_of(row_type: type[Any]) -> dict[str, str]:
    """Return the fields of a row with their types, as they are written."""
    if dataclasses.is_dataclass(row_type):
        return {field.name: str(field.type) for field in dataclasses.fields(row_type)}
    return {name: kind.__forward_arg__ for name, kind in row_type.__annotations__.items()}  # of a named tuple


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class Holder:
    """A name of the notebook, and the bytes it keeps on one device."""

    name: str
    device: str
    nbytes: int
    kind: str = "plain"
