"""What every report is: rows, a DataFrame, JSON-ready data, the process it is about, and how it is shown.

A report becomes a neutral document, which `text` and `html` render. Nothing here measures or imports torch or IPython.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args, overload

from gpumagic.errors import OptionError
from gpumagic.report import html, progress, text
from gpumagic.report.document import Document, document_of, unfolded

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

    def __init_subclass__(cls) -> None:
        (cls.row_type,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]  # `Report[Row]`

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, in the order in which they are shown: what the field has that is a tuple of them."""
        annotation = f"tuple[{self.row_type.__name__}, ...]"
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.type == annotation:
                rows: tuple[Row, ...] = getattr(self, field.name)
                return rows
        raise TypeError(f"{type(self).__name__} has no field of type {annotation}")

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
        return frame(columns, [_values(row, columns) for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON-ready data: dicts, lists, strings, numbers and None."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return plain

    def details(self) -> Details:
        """Return the report with all that it folds: alone on a line of a cell it shows itself."""
        return Details(Document(tuple(unfolded(to_document(self).blocks))))

    def save(self, path: str | Path) -> Path:
        """Write the report to a file as one HTML page, which needs no other files, and return its path.

        Raises:
            OptionError: the file does not end in ``.html``.
        """
        path = Path(path)
        if path.suffix != ".html":
            raise OptionError(
                f"{path.name!r} does not end in .html; to_pandas() and to_dict() have the figures"
            )
        path.write_text(html.page(to_document(self)), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return to_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(self)

    def _ipython_display_(self) -> None:
        if not progress.replaced_by(self._repr_mimebundle_()):
            raise NotImplementedError  # IPython then shows it as any value

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


@dataclass(frozen=True, repr=False)
class Details:
    """A report with nothing folded, as text and as HTML."""

    document: Document

    def __str__(self) -> str:
        return text.render(self.document)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.render(self.document)


def _values(row: object, names: Iterable[str]) -> list[object]:
    return [getattr(row, name) for name in names]


def frame(columns: Mapping[str, str], rows: Sequence[Sequence[object]]) -> pd.DataFrame:
    """Return a DataFrame of columns that are given with their types; None in a column of figures is NaN."""
    import pandas as pd

    values: dict[str, list[object]] = {}
    figures = []
    for place, (name, kind) in enumerate(columns.items()):
        values[name] = [row[place] for row in rows]
        if kind in _FIGURES:
            figures.append(name)
    if not rows:
        empty = pd.DataFrame(values, dtype=object)
        return empty.astype(dict.fromkeys(figures, "float64"))
    for name in figures:
        values[name] = [math.nan if value is None else value for value in values[name]]
    return pd.DataFrame(values)


_FIGURES = ("int", "float", "int | None", "float | None")


def columns_of(row_type: type[Any]) -> dict[str, str]:
    """Return the fields of a row with their types, as they are written."""
    if dataclasses.is_dataclass(row_type):
        return {field.name: str(field.type) for field in dataclasses.fields(row_type)}
    # A named tuple keeps what is written as references that are yet to be resolved.
    return {
        name: kind.__forward_arg__ for name, kind in row_type.__annotations__.items()
    }


def _plain(value: object) -> object:
    """Return a value with records and named tuples as dicts, and other tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
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
    shared_with: tuple[str, ...] = ()
    """Further names that reach the same memory: it is free only once all of them are gone."""

    @property
    def names(self) -> tuple[str, ...]:
        """All the names that keep it."""
        return (self.name, *self.shared_with)


def to_text(
    report: object, width: int | None = None, unicode: bool | None = None
) -> str:
    """Return a report as plain text of at most ``width`` columns (default: the terminal's, 100 in notebooks)."""
    return text.render(to_document(report), width, unicode)


def to_html(report: object) -> str:
    """Return a report as one HTML `<div>` that needs neither styles nor scripts of its own."""
    return html.render(to_document(report))


def to_document(report: object) -> Document:
    """Return the neutral document of a report.

    How a report looks is registered with `document_of` by the module `view` of the folder it is defined in, or by the
    one that its class names as its ``view_module``.
    """
    folder = type(report).__module__.rpartition(".")[0]
    import_module(f"{folder}.{getattr(report, 'view_module', 'view')}")
    return document_of(report)


@dataclass(frozen=True, slots=True)
class Origin:
    """The process that a report is about."""

    host: str = ""
    """The machine's name; empty where it is not known."""
    pid: int | None = None
    rank: int | None = None
    """Its number among the processes of a distributed run (torch.distributed's, else MPI's); None outside one."""
    local_rank: int | None = None
    """Its number among those of its machine."""


RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""torchrun's, Open MPI's, PMIx's, MPICH's and Slurm's; Slurm's also stands in a batch script, so it comes last."""
LOCAL_RANKS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


def current_origin() -> Origin:
    """Return this process's origin. Imports nothing."""
    distributed: Any = sys.modules.get("torch.distributed")
    if (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
    ):
        rank = distributed.get_rank()
    else:
        rank = _number_in_environment(RANKS)
    return Origin(
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=rank,
        local_rank=_number_in_environment(LOCAL_RANKS),
    )


def _number_in_environment(names: Sequence[str]) -> int | None:
    """Return the number that the first of some environment variables has that has one."""
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None
