"""What the rows of an expression are computed from: which code computes each row of tensors by itself."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumagic.advice.facts import Facts, Model, TensorFact
from gpumagic.advice.rules.patterns import UNARY, index_of, positional_arguments
from gpumagic.advice.rules.regions import known_int
from gpumagic.source.text import CellText, called_name, keyword

_REDUCING = frozenset({
    "topk", "argmax", "argmin", "max", "min", "amax", "amin", "sum", "mean", "prod", "any", "all", "logsumexp", "norm",
})  # fmt: skip
"""Functions and methods that make one or a few numbers of each row."""
_ALONG = frozenset(
    {"softmax", "log_softmax", "sort", "argsort", "cumsum", "normalize", "squeeze"}
)
"""Functions and methods that leave a row as long as it is."""
_BY_ROWS = frozenset({
    "cdist", "stft", "interpolate", "flatten", "contiguous", "float", "half", "bfloat16", "one_hot",
})  # fmt: skip
"""Functions and methods that compute each row of their first argument by itself."""
_RESHAPING = ("stft", "flatten")
_OF_ELEMENTS = UNARY | {"max", "min", "maximum", "minimum", "where"}
"""Functions and methods that compute each element by itself, of one tensor or of several."""
_WITHIN = ("-1", "1", "2")
"""The dimensions of a row."""
_RESULTS = ("indices", "values", "logits", "last_hidden_state")
"""Attributes of what functions and models return."""


@dataclass(frozen=True, slots=True)
class Source:
    """Code that stands for the rows of a tensor: the tensor, or windows of it."""

    node: ast.expr
    tensor: str
    """The tensor's name."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of an expression, each of which is computed from one row of each source."""

    sources: tuple[Source, ...]
    length: int
    """How many there are."""
    dimensions: int = 0
    """Of the expression; 0 where they are not known."""
    reduces: bool = False
    """Whether a row is smaller in the end than on the way."""
    of_model: bool = False
    """Whether a model runs on them."""

    def with_dimensions(self, more: int, **fields: Any) -> Rows:
        """Return the rows with so many dimensions more, and other fields."""
        dimensions = self.dimensions + more if self.dimensions else 0
        return replace(self, dimensions=dimensions, **fields)

    def is_aligned_with(self, other: Rows) -> bool:
        """Return whether element by element, row stands beside row."""
        return self.dimensions == other.dimensions and self.length == other.length


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads what the rows of expressions are computed from."""

    facts: Facts
    text: CellText

    def rows_of(self, node: ast.expr) -> Rows | None:  # noqa: PLR0911  # one for each kind of expression
        """Return the rows of an expression; None where they are not known to be computed each by itself."""
        match node:
            case ast.Name():
                return self._of_variable(node)
            case ast.Subscript():
                return self._of_index(node)
            case ast.Attribute(value=result, attr=name) if name in _RESULTS:
                return self.rows_of(result)
            case ast.UnaryOp(operand=operand):
                return self.rows_of(operand)
            case ast.BinOp(left=left, op=ast.MatMult()):
                return self._of_matrix(left)
            case ast.BinOp(left=left, right=right):
                return self._of_elements([left, right])
            case ast.Compare(left=left, comparators=others):
                return self._of_elements([left, *others])
            case ast.Call():
                return self._of_call(node)
        return None

    def _tensor(self, code: str) -> TensorFact | None:
        return self.facts.frames.tensors.get(code)

    def _of_variable(self, node: ast.Name) -> Rows | None:
        tensor = self._tensor(node.id)
        if tensor is None or not tensor.shape:
            return None
        if tensor.device != self.facts.event.device:
            return None
        source = Source(node, node.id)
        return Rows((source,), length=tensor.shape[0], dimensions=len(tensor.shape))

    def _of_matrix(self, node: ast.expr) -> Rows | None:
        """Return the rows of a matrix product: each is computed of a row of the factor on the left."""
        rows = self.rows_of(node)
        if rows is None or rows.dimensions != 2:
            return None  # of a batch of matrices, each may go with one on the right
        return rows

    def _of_index(self, node: ast.Subscript) -> Rows | None:
        """Return the rows of ``x[:, ...]``, which has as many as `x`."""
        first, *others = map(ast.unparse, index_of(node))
        if first not in (":", "..."):
            return None
        rows = self.rows_of(node.value)
        if rows is None:
            return None
        added = others.count("None")
        taken = sum(":" not in index and index != "None" for index in others)
        return rows.with_dimensions(added - taken - (first == "..."))

    def _of_elements(self, operands: Sequence[ast.expr]) -> Rows | None:
        """Return the rows of what is computed element by element of several operands.

        Their rows stand beside each other, or all of an operand beside each row.
        """
        rows_of = dict[ast.expr, Rows | None]()
        for operand in operands:
            rows_of[operand] = (
                None if self._is_number(operand) else self.rows_of(operand)
            )
        known = [rows for rows in rows_of.values() if rows is not None]
        if not known:
            return None
        if len(known) > 1 and not all(rows.dimensions for rows in known):
            return None  # it is unclear which have the most
        largest = max(known, key=lambda rows: rows.dimensions)
        aligned = list[Rows]()
        for operand, rows in rows_of.items():
            if rows is not None and rows.is_aligned_with(largest):
                aligned.append(rows)
            elif not self._broadcasts_over_rows(operand, largest):
                return None
        sources = list[Source]()
        for rows in aligned:
            sources += rows.sources
        return Rows(
            tuple(sources),
            largest.length,
            largest.dimensions,
            reduces=all(rows.reduces for rows in aligned),
            of_model=any(rows.of_model for rows in aligned),
        )

    def _is_number(self, node: ast.expr) -> bool:
        if isinstance(node, ast.UnaryOp):
            node = node.operand
        if isinstance(node, ast.Constant) or called_name(node) == "len":
            return True
        return self.text.code(node) in self.facts.frames.numbers

    def _broadcasts_over_rows(self, node: ast.expr, rows: Rows) -> bool:
        """Return whether all of an operand goes with each row: a number, a vector beside a matrix, ``other[None]``."""
        match node:
            case ast.BinOp(left=left, right=right):
                operands = (left, right)
                return all(
                    self._broadcasts_over_rows(operand, rows) for operand in operands
                )
            case ast.Subscript():
                return ast.unparse(index_of(node)[0]) == "None"
        if self._is_number(node):
            return True
        tensor = self._tensor(self.text.code(node))
        return tensor is not None and len(tensor.shape) < rows.dimensions

    def _of_call(self, call: ast.Call) -> Rows | None:
        name = called_name(call)
        arguments = positional_arguments(call)
        if not arguments:
            return None
        first, *further = arguments
        is_within = _is_within_rows(call, further)
        if isinstance(first, ast.List) and name in ("cat", "concat"):
            return self._of_elements(first.elts) if is_within else None
        if name in _OF_ELEMENTS and _are_tensors(call, further):
            return self._of_elements(arguments)
        rows = self.rows_of(first)
        if rows is None:
            return None
        model = self._called_model(call)
        if model is not None:
            return self._of_model(rows, model, further)
        return self._of_function(rows, call, arguments, is_within=is_within)

    def _called_model(self, call: ast.Call) -> Model | None:
        if isinstance(call.func, ast.Name):
            for model in self.facts.notebook.models:
                if model.name == call.func.id:
                    return model
        return None

    def _of_model(
        self, rows: Rows, model: Model, further: Sequence[ast.expr]
    ) -> Rows | None:
        """Return the rows of a model's output, where it computes each by itself."""
        if further or self.facts.notebook.reset_code:
            return None  # what else it is given may have rows; lists that hooks fill are of all rows
        if model.training and "batch norm" in model.uneven_layers:
            return None  # statistics of a batch are of all rows
        return replace(rows, reduces=True, of_model=True, dimensions=0)

    def _of_function(
        self,
        rows: Rows,
        call: ast.Call,
        arguments: Sequence[ast.expr],
        *,
        is_within: bool,
    ) -> Rows | None:
        """Return the rows of a function or method of some rows; `is_within` tells whether it is along each."""
        name = called_name(call)
        first, *further = arguments
        match name, further:
            case ("cross_entropy", [other]) | ("gather", [_, other]):
                return self._of_pair(rows, other, is_within=is_within)
            case "unfold", [ast.Constant(value=0), size, ast.Constant(value=1)]:
                return self._of_windows(rows, call, first, size)
        is_unary = name in UNARY and all(
            isinstance(argument, ast.Constant) for argument in further
        )
        if name in _BY_ROWS or is_unary:
            return _each_by_itself(rows, name)
        return _along_each(rows, call) if is_within else None

    def _of_pair(self, rows: Rows, other: ast.expr, *, is_within: bool) -> Rows | None:
        """Return the rows of what is computed of a row and the same row of another expression."""
        others = self.rows_of(other)
        if others is None or others.length != rows.length:
            return None
        if not is_within and others.dimensions != 1:
            return None
        return replace(rows, sources=(*rows.sources, *others.sources))

    def _of_windows(
        self, rows: Rows, call: ast.Call, series: ast.expr, size: ast.expr
    ) -> Rows | None:
        """Return the rows of ``series.unfold(0, size, 1)``, a window beginning at each row."""
        width = known_int(self.facts, self.text, size)
        if width is None or not isinstance(series, ast.Name):
            return None
        windows = Source(call, series.id)
        return rows.with_dimensions(
            1, sources=(windows,), length=rows.length - width + 1
        )


def _each_by_itself(rows: Rows, name: str) -> Rows:
    """Return the rows of a function that computes each of some rows by itself, whatever it is told."""
    if name in _RESHAPING:
        return replace(rows, dimensions=0)
    return rows.with_dimensions(1 if name == "one_hot" else 0)


def _along_each(rows: Rows, call: ast.Call) -> Rows | None:
    """Return the rows of a function that computes along each of some rows."""
    name = called_name(call)
    if name in _ALONG:
        return rows
    if name not in _REDUCING:
        return None
    keeps_dimension = name == "topk" or keyword(call, "keepdim") is not None
    return rows.with_dimensions(0 if keeps_dimension else -1, reduces=True)


def _is_within_rows(call: ast.Call, further: Sequence[ast.expr]) -> bool:
    """Return whether a function computes along a dimension of each row, by what it is told beside its tensor."""
    is_topk = called_name(call) == "topk"
    named = keyword(call, "dim")
    if named is not None:
        return ast.unparse(named.value) in _WITHIN
    positions = further[1:] if is_topk else further  # the first tells `topk` how many
    if positions:
        return ast.unparse(positions[0]) in _WITHIN
    return is_topk  # which is along the last unless told


def _are_tensors(call: ast.Call, further: Sequence[ast.expr]) -> bool:
    """Return whether a function is told of other tensors beside its first, rather than a dimension or bounds."""
    if not further or keyword(call, "dim") is not None:
        return False
    return not ast.unparse(further[0]).lstrip("-").isdigit()
