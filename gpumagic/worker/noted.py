"""Numbers and arrays that the host read from a device and no dry run knows: each notes what is decided by it.

A loss that is printed, logged, summed or averaged decides nothing, and one run is enough. So `.item()` returns neither
a float nor an int but an object that says it is one: arithmetic carries it on, a comparison or a truth is told to
`UnknownValues`. C code, which could not tell, has to ask for the plain number by `__float__`, `__index__` or
`__array__`, and that is told, too. (A subclass of float would be read by numpy and by torch without a word.)
`.numpy()` returns such an object in place of an array, where the notebook's own code calls it. Code that takes only a
real float or array raises; the cell is run again then with plain ones.
"""

from __future__ import annotations

import builtins
import dis
import functools
import json
import math
import operator
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from gpumagic.dryrun.wire import Kind
from gpumagic.worker import cell
from gpumagic.worker.guesses import Read
from gpumagic.worker.modules import tensors_in

if TYPE_CHECKING:
    from gpumagic.dryrun.wire import Key
    from gpumagic.worker.guesses import UnknownValues

_LOGS = (
    "logging", "tqdm", "json", "pprint", "csv", "rich", "wandb", "mlflow", "matplotlib", "tensorboard", "tensorboardX",
    "torch.utils.tensorboard", "torch._tensor_str",
)  # fmt: skip
"""Modules that show a number, or write it to a file."""
_MOST_LISTED = 1 << 16
"""Numbers of a tensor that are noted one by one."""
_MATH = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "pow",
    "fabs",
    "tanh",
    "fsum",
    "hypot",
)
_TESTS = ("isnan", "isinf", "isfinite")
_AVERAGES = ("mean", "fmean", "average", "sum", "median", "std", "var", "stdev", "pstdev", "nanmean", "percentile",
             "round", "max", "min", "stack")  # fmt: skip
_FILLS = ("fill", "full", "setitem", "scalar_tensor")
"""What puts a number on a device, from where it may be read again."""
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "and", "or", "xor", "lshift",
               "rshift", "matmul")  # fmt: skip
_OF_ONE = {"trunc": int, "floor": math.floor, "ceil": math.ceil, "round": round, "neg": operator.neg,
           "pos": operator.pos, "abs": abs, "invert": operator.inv}  # fmt: skip
_numpy: Any = sys.modules.get("numpy")  # which torch imports, where it is installed
_NUMPYS: tuple[type, ...] = (
    (_numpy.ndarray, _numpy.number, _numpy.bool_) if _numpy else ()
)
_PLAIN = (int, float, complex, *_NUMPYS)
_SIZED = frozenset({
    "unique", "nonzero", "flatnonzero", "argwhere", "bincount", "extract", "compress", "repeat", "intersect1d",
    "union1d", "setdiff1d", "delete", "trim_zeros", "split", "array_split", "resize", "tobytes", "searchsorted",
})  # fmt: skip
"""What of numpy's returns as much as values say, or what cannot note."""
_ORDINARY = frozenset({int, float})
_SHOWN: deque[tuple[str, Noted]] = deque(maxlen=64)
"""Numbers that were made a text lately, to know them again where the notebook makes a number of that."""


class Noted(Read):
    """A number from a device that notes what it decides; `guesses` is told."""

    __slots__ = ("guesses", "hashed")

    def __init__(
        self, number: Any, key: Key, may_be_known: bool, guesses: UnknownValues
    ) -> None:
        super().__init__(number, key, may_be_known)
        self.guesses = guesses
        self.hashed: int | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.number)

    def _carried(self, result: Any, *others: Any) -> Any:
        """Return the result of an operation on this number and others, noted as this one is."""
        if type(result) in {tuple, list}:
            return type(result)(self._carried(part, *others) for part in result)
        if type(result) is bool:
            return self.decide(result)
        if type(result) not in _ORDINARY and not isinstance(result, _NUMPYS):
            return result
        may_be_known = self.may_be_known
        for other in others:
            may_be_known = may_be_known or (
                isinstance(other, Noted) and other.may_be_known
            )
        return note(result, Read(result, self.key, may_be_known), self.guesses)

    def lose(self) -> Any:
        """Return the plain number to code that cannot note what it does with it."""
        if not cell.runs_in(*_LOGS):
            self.guesses.lose(self)
        return self.number

    def decide(self, outcome: bool) -> bool:
        """Return what is decided, which a run may turn over."""
        is_of_c = _operation().startswith("CALL")
        return self.guesses.decide(
            self, bool(outcome), Kind.ORDER if is_of_c else Kind.TRUTH
        )

    def _beside(self, other: Any) -> Any:
        """Return the plain number for an operation with another value, told where that could not note it."""
        is_on_device = isinstance(other, torch.Tensor) and not other.is_cpu
        return self.number if is_on_device or isinstance(other, _PLAIN) else self.lose()

    def _combined(
        self, function: Callable[[Any, Any], Any], other: Any, *, is_right: bool = False
    ) -> Any:
        own = self._beside(other)
        theirs = other.number if isinstance(other, Noted) else other
        result = function(theirs, own) if is_right else function(own, theirs)
        return self._carried(result, other)

    def _compared(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        if _is_array(self.number) or _is_array(other):
            return self._combined(function, other)
        if isinstance(other, str | None):
            return function(self.number, other)
        if not isinstance(other, _PLAIN):
            return function(self._beside(other), other)
        # Another noted number says that it is a plain one, so its attributes tell.
        other_hash = getattr(other, "hashed", None)
        if function in {operator.eq, operator.ne} and None not in (
            self.hashed,
            other_hash,
        ):
            return function(self.hashed, other_hash)  # keys of one dict
        if getattr(other, "may_be_known", False):
            self.guesses.begin_again()
        return self.decide(function(self.number, getattr(other, "number", other)))

    def __bool__(self) -> bool:
        return self.decide(bool(self.number))

    def __hash__(self) -> int:
        """Let all keys of a dict be alike or all be different: comparing each with each would be as many decisions."""
        if self.hashed is None:
            is_alike = self.guesses.decide(self, True, Kind.ORDER)
            self.hashed = hash(self.number) if is_alike else id(self)
        return self.hashed

    def __float__(self) -> float:
        return float(self.number if _is_formatting() else self.lose())

    def __int__(self) -> int:
        return int(self.number if _is_formatting() else self.lose())

    def __index__(self) -> int:
        index = operator.index(self.number)  # which raises for what is none
        self.lose()
        return index

    def _of_one(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._carried(function(self.number, *args))

    def __format__(self, spec: str) -> str:
        return self._shown(format(self.number, spec))

    def __repr__(self) -> str:
        return self._shown(repr(self.number))

    def _shown(self, text: str) -> str:
        _SHOWN.append((text.strip(), self))
        return text

    def __copy__(self, *_: Any) -> Noted:
        return self

    __deepcopy__ = __copy__

    def __reduce__(self) -> Any:
        return type(self.number), (self.number,)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.number, name)
        if (
            not isinstance(self.number, _NUMPYS)
            or name.startswith("_")
            or name in _SIZED
        ):
            self.lose()
            return found
        if callable(found):
            return functools.partial(self._called, found)
        if isinstance(found, _NUMPYS):
            return self._carried(found)
        return found  # a shape or a type is what it is

    def _called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function of numpy's makes of plain numbers, carried on."""
        met = [self]
        args, kwargs = _plain((args, kwargs), met)
        return self._carried(function(*args, **kwargs), *met)

    def __array__(self, dtype: Any = None, **_: Any) -> Any:
        return _numpy.asarray(self.lose(), dtype)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        if "out" in kwargs:
            self.lose()
        return self._called(getattr(ufunc, method), *inputs, **kwargs)

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        is_sized = function.__name__ in _SIZED or (
            function.__name__ == "where" and len(args) == 1
        )
        if is_sized:
            return _with_plain(_lose, function)(*args, **kwargs)
        return self._called(function, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Give a torch function plain numbers: what is only computed with on a device decides nothing there."""
        met: list[Noted] = []
        args, kwargs = _plain((args, kwargs or {}), met)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        # A `foreach` function may return nothing.
        reached = list(tensors_in(result)) or list(tensors_in(args))
        is_fill = any(word in name for word in _FILLS)
        stays_on_device = bool(reached) and not any(tensor.is_cpu for tensor in reached)
        for noted in met:
            if type(noted.number) is int or is_fill or not stays_on_device:
                noted.lose()
        return result


class NotedArray(Noted):
    """An array of numbers from a device."""

    __slots__ = ()
    __hash__: Any = None

    def __len__(self) -> int:
        return len(self.number)

    def __iter__(self) -> Any:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        met: list[Noted] = []
        index = _plain(index, met)
        for noted in met:
            noted.lose()  # it may be a mask
        return self._carried(self.number[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.number[_plain(index, [])] = _plain(value, [])

    def __contains__(self, value: Any) -> bool:
        return self.decide(value in self.number)


def note(value: Any, read: Read, guesses: UnknownValues) -> Any:
    """Return a value that was read, of which the numbers note what they decide."""
    if isinstance(value, list):
        return [note(part, read, guesses) for part in value]
    kind = NotedArray if _is_array(value) else Noted
    return kind(value, read.key, read.may_be_known, guesses)


def _is_array(value: Any) -> bool:
    return _numpy is not None and isinstance(value, _numpy.ndarray)


for _name in _ARITHMETIC:
    _function = divmod if _name == "divmod" else getattr(operator, f"__{_name}__")
    setattr(Noted, f"__{_name}__", functools.partialmethod(Noted._combined, _function))
    setattr(
        Noted,
        f"__r{_name}__",
        functools.partialmethod(Noted._combined, _function, is_right=True),
    )
for _name in _COMPARISONS:
    setattr(
        Noted,
        f"__{_name}__",
        functools.partialmethod(Noted._compared, getattr(operator, _name)),
    )
for _name, _function in _OF_ONE.items():
    setattr(Noted, f"__{_name}__", functools.partialmethod(Noted._of_one, _function))


def _plain(value: Any, met: list[Noted]) -> Any:
    """Return a value with plain numbers in place of noted ones, which join `met`."""
    if isinstance(value, Noted):
        met.append(value)
        return value.number
    if type(value) in {list, tuple, deque}:
        return type(value)(_plain(part, met) for part in value)
    if type(value) is dict:
        return {name: _plain(part, met) for name, part in value.items()}
    return value


def _operation() -> str:
    """Return what the innermost frame outside of this module does: a name in `dis`, with the operator if it has one."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return _operations(frame.f_code).get(frame.f_lasti, "")


@functools.lru_cache(maxsize=64)
def _operations(code: CodeType) -> dict[int, str]:
    operations: dict[int, str] = {}
    for instruction in dis.get_instructions(code):
        operations[instruction.offset] = f"{instruction.opname} {instruction.argrepr}"
    return operations


def _is_formatting() -> bool:
    """Return whether text is made by ``%``, which asks for a plain number."""
    return _operation() in {"BINARY_MODULO ", "BINARY_OP %", "BINARY_OP %="}


def install(guesses: UnknownValues) -> None:
    """Note numbers wherever the host reads one of an accelerator's, for the rest of the process.

    Functions of Python that would lose the note for nothing are replaced.

    Args:
        guesses: tells what is read.
    """
    setattr(builtins, "__dry_run_number__", _converting)  # noqa: B010
    _replace(
        functools.partial(_reading, guesses), torch.Tensor, ("item", "tolist", "numpy")
    )
    carry = functools.partial(_with_plain, _carry)
    _replace(carry, builtins, ("min", "max"))
    _replace(carry, math, (*_MATH, *_TESTS))
    _replace(carry, statistics, _AVERAGES)
    _replace(carry, _numpy, _AVERAGES)
    _replace(
        functools.partial(_with_plain, _carry_in_notebook), _numpy, ("array", "asarray")
    )
    _replace(
        functools.partial(_with_plain, _as_made),
        json.JSONEncoder,
        ("encode", "iterencode"),
    )
    remember = functools.partial(_with_plain, _remember)
    _replace(remember, torch, ("tensor", "as_tensor", "from_numpy"))


def _replace(
    replacing: Callable[[Callable[..., Any]], Callable[..., Any]],
    owner: Any,
    names: Iterable[str],
) -> None:
    """Put what a function returns of each in the place of those functions of an owner that there are."""
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, replacing(getattr(owner, name)))


def _reading(guesses: UnknownValues, read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that reads a tensor with its numbers noted."""
    is_array = read.__name__ == "numpy"

    def noted(tensor: torch.Tensor, **kwargs: Any) -> Any:
        if is_array:
            may_note = guesses.notes and guesses.is_read_by_notebook()
        else:
            may_note = guesses.is_noted(tensor.dtype) and tensor.numel() <= _MOST_LISTED
        if tensor.is_meta or not may_note:
            return read(tensor, **kwargs)
        if tensor.is_cpu:
            origin = guesses.host.materialize(tensor)
            if origin is None:
                return read(tensor, **kwargs)
            value = guesses.host.undisturbed(read, tensor, **kwargs)
        else:
            with guesses.noting() as reads:
                value = read(tensor, **kwargs)
            if not reads:
                return value
            origin = reads[0]
        guesses.has_noted = True
        return note(value, origin, guesses)

    return noted


def _converting(kind: Any) -> Any:
    """Return what the notebook's code calls for `float(x)` and `int(x)`."""

    def convert(*args: Any) -> Any:
        if len(args) != 1:
            return kind(*args)
        value = args[0]
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_cpu:
            value = value.item()
        elif type(value) is str:
            shown = _shown_as(value.strip())
            value = value if shown is None else shown
        if type(value) is Noted:
            return value._carried(kind(value.number))
        return kind(value)

    return convert if kind is int or kind is float else kind


def _shown_as(text: str) -> Noted | None:
    """Return the number that was made a text lately."""
    for shown, number in _SHOWN:
        if shown == text:
            return number
    return None


def _with_plain(
    finish: Callable[[Any, list[Noted]], Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that is given plain numbers, and whose result is finished with the noted ones that it met."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and _ORDINARY.issuperset(map(type, args)):
            return function(*args)
        met: list[Noted] = []
        plain_args, plain_kwargs = _plain((args, kwargs), met)
        if not met:
            return function(*args, **kwargs)
        return finish(function(*plain_args, **plain_kwargs), met)

    return called


def _carry(made: Any, met: list[Noted]) -> Any:
    """Carry the note on: what `min` returns decides no more than its operands."""
    return met[0]._carried(made, *met)


def _carry_in_notebook(made: Any, met: list[Noted]) -> Any:
    """Carry it on where the notebook's code has called; a library may give an array to C code."""
    if met[0].guesses.is_read_by_notebook():
        return _carry(made, met)
    return _lose(made, met)


def _remember(made: torch.Tensor, met: list[Noted]) -> torch.Tensor:
    """Remember of a tensor on the host what it was made of; what is read of a device later is not known to be that."""
    if not made.is_cpu:
        return _lose(made, met)
    met[0].guesses.host.remember(made, met[0])
    return made


def _lose(made: Any, met: list[Noted]) -> Any:
    for noted in met:
        noted.lose()
    return made


def _as_made(made: Any, _: list[Noted]) -> Any:
    return made
