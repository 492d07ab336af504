"""Numbers that the host read from a device and that no dry run knows: each notes what is decided by it.

A loss that is printed, logged, summed or averaged decides nothing, and one run is enough. So `.item()` returns neither
a float nor an int but an object that says it is one: arithmetic carries it on, a comparison or a truth is told to
`Guesses`, and C code, which could not tell, has to ask for the plain number by `__float__`, `__index__` or `__array__`
and is told, too. (A subclass of float would be read by numpy and by torch without a word.) Code that takes only a real
float raises; the cell is run again then with plain numbers.
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
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from gpumagic.dryrun.worker import cell
from gpumagic.dryrun.worker.guesses import ORDER, TRUTH, Read
from gpumagic.dryrun.worker.modules import tensors_in

if TYPE_CHECKING:
    from gpumagic.dryrun.worker.guesses import Guesses, Key

_LOGS = (
    "logging", "tqdm", "json", "pprint", "csv", "rich", "wandb", "mlflow", "matplotlib", "tensorboard", "tensorboardX",
    "torch.utils.tensorboard", "torch._tensor_str",
)  # fmt: skip
"""Modules that show a number, or write it to a file."""
_MOST_LISTED = 1 << 16
"""Numbers of a tensor that are noted one by one."""
_MATH = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "pow", "fabs", "tanh", "fsum", "hypot")
_TESTS = ("isnan", "isinf", "isfinite")
_AVERAGES = ("mean", "fmean", "average", "sum", "median", "std", "var", "stdev", "pstdev", "nanmean", "percentile",
             "round")  # fmt: skip
_FILLS = ("fill", "full", "setitem", "scalar_tensor")
"""What puts a number on a device, from where it may be read again."""
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "and", "or", "xor", "lshift",
               "rshift")  # fmt: skip
_OF_ONE = {"trunc": int, "floor": math.floor, "ceil": math.ceil, "round": round, "neg": operator.neg,
           "pos": operator.pos, "abs": abs}  # fmt: skip
_PLAIN = (int, float, complex)
_ORDINARY = frozenset({int, float})
_SHOWN: deque[tuple[str, Any]] = deque(maxlen=64)
"""Numbers that were made a text lately, to know them again where the notebook makes a number of that."""


class Noted(Read):
    """A number from a device that notes what it decides; `guesses` is told."""

    __slots__ = ("guesses", "hashed")

    def __init__(self, number: Any, key: Key, may_be_known: bool, guesses: Guesses) -> None:
        super().__init__(number, key, may_be_known)
        self.guesses = guesses
        self.hashed: int | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.number)

    def _like(self, number: Any, *others: Any) -> Any:
        """Return the result of an operation as it is carried on."""
        if type(number) is tuple:
            return tuple(self._like(each, *others) for each in number)
        if type(number) not in {int, float}:
            return number
        known = self.may_be_known or any(type(each) is Noted and each.may_be_known for each in others)
        return Noted(number, self.key, known, self.guesses)

    def lose(self) -> Any:
        """Return the plain number to code that cannot note what it does with it."""
        if not cell.runs_in(*_LOGS):
            self.guesses.lose(self)
        return self.number

    def decide(self, outcome: bool) -> bool:
        """Return what is decided, which a run may turn over."""
        is_of_c = _operation().startswith("CALL")
        return self.guesses.decide(self, outcome, ORDER if is_of_c else TRUTH)

    def _beside(self, other: Any) -> Any:
        """Return the plain number for an operation with another value, told where that could not note it."""
        is_on_device = isinstance(other, torch.Tensor) and not other.is_cpu
        return self.number if is_on_device or isinstance(other, _PLAIN) else self.lose()

    def _combined(self, function: Callable[[Any, Any], Any], other: Any, *, is_right: bool = False) -> Any:
        pair = self._beside(other), other.number if type(other) is Noted else other
        return self._like(function(*(pair[::-1] if is_right else pair)), other)

    def _compared(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        if not isinstance(other, _PLAIN):
            return function(self.number if isinstance(other, str | None) else self._beside(other), other)
        theirs: Any = other
        is_equality = function in {operator.eq, operator.ne}
        if is_equality and self.hashed is not None and getattr(theirs, "hashed", None) is not None:  # keys of one dict
            return function(self.hashed, theirs.hashed)
        if getattr(theirs, "may_be_known", False):
            self.guesses.begin_again()
        return self.decide(function(self.number, getattr(theirs, "number", theirs)))

    def __bool__(self) -> bool:
        return self.decide(bool(self.number))

    def __hash__(self) -> int:
        """Let all keys of a dict be alike or all be different: comparing each with each would be as many decisions."""
        if self.hashed is None:
            self.hashed = hash(self.number) if self.guesses.decide(self, True, ORDER) else id(self)
        return self.hashed

    def __float__(self) -> float:
        return float(self.number if _is_formatting() else self.lose())

    def __int__(self) -> int:
        return int(self.number if _is_formatting() else self.lose())

    def __index__(self) -> int:
        if type(self.number) is not int:
            raise TypeError("'float' object cannot be interpreted as an integer")
        return int(self)

    def _of_one(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._like(function(self.number, *args))

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
        self.lose()
        return found

    def __array__(self, dtype: Any = None, **_: Any) -> Any:
        import numpy as np

        return np.asarray(self.lose(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        others = [each for each in inputs if type(each) is not Noted]
        plain = all(getattr(each, "ndim", 0) == 0 for each in others) and method == "__call__" and not kwargs
        numbers = [(each.number if plain else each.lose()) if type(each) is Noted else each for each in inputs]
        made = getattr(ufunc, method)(*numbers, **kwargs)
        if not plain or isinstance(made, tuple):
            return made
        value = made.item()
        return self.decide(value) if isinstance(value, bool) else self._like(value, *inputs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give a torch function plain numbers: what is only computed with on a device decides nothing there."""
        met: list[Noted] = []
        args, kwargs = _plain((args, kwargs or {}), met)
        made = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        reached = list(tensors_in(made)) or list(tensors_in(args))  # a `foreach` function may return nothing
        stays = bool(reached) and not any(each.is_cpu for each in reached) and not any(each in name for each in _FILLS)
        for each in met:
            if type(each.number) is int or not stays:
                each.lose()
        return made


for _name in _ARITHMETIC:
    _function = divmod if _name == "divmod" else getattr(operator, f"__{_name}__")
    setattr(Noted, f"__{_name}__", functools.partialmethod(Noted._combined, _function))
    setattr(Noted, f"__r{_name}__", functools.partialmethod(Noted._combined, _function, is_right=True))
for _name in _COMPARISONS:
    setattr(Noted, f"__{_name}__", functools.partialmethod(Noted._compared, getattr(operator, _name)))
for _name, _function in _OF_ONE.items():
    setattr(Noted, f"__{_name}__", functools.partialmethod(Noted._of_one, _function))


def _plain(value: Any, met: list[Noted]) -> Any:
    """Return a value with plain numbers in place of noted ones, which join `met`."""
    if type(value) is Noted:
        met.append(value)
        return value.number
    if type(value) in {list, tuple}:
        return type(value)(_plain(each, met) for each in value)
    return {name: _plain(each, met) for name, each in value.items()} if type(value) is dict else value


def _operation() -> str:
    """Return what the innermost frame outside of this module does: a name in `dis`, with the operator if it has one."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return _operations(frame.f_code).get(frame.f_lasti, "")


@functools.lru_cache(maxsize=64)
def _operations(code: CodeType) -> dict[int, str]:
    return {each.offset: f"{each.opname} {each.argrepr}" for each in dis.get_instructions(code)}


def _is_formatting() -> bool:
    """Return whether text is made by ``%``, which asks for a plain number."""
    return _operation() in {"BINARY_MODULO ", "BINARY_OP %", "BINARY_OP %="}


def install(guesses: Guesses) -> None:
    """Note numbers wherever the host reads one of an accelerator's, for the rest of the process.

    Functions of Python that would lose the note for nothing are replaced.

    Args:
        guesses: tells what is read.
    """
    tensor: Any = torch.Tensor
    encoder: Any = json.JSONEncoder
    setattr(builtins, "__dry_run_number__", _converting)  # noqa: B010
    carrying: list[tuple[Any, str]] = [(builtins, "min"), (builtins, "max"), *((math, name) for name in _MATH)]
    carrying += [(each, name) for each in (statistics, sys.modules.get("numpy")) for name in _AVERAGES]
    for replacing, places in (
        (functools.partial(_reading, guesses), [(tensor, "item"), (tensor, "tolist")]),
        (functools.partial(_with_plain, _carry), carrying),
        (functools.partial(_with_plain, lambda made, met: met[0].decide(made)), [(math, name) for name in _TESTS]),
        (functools.partial(_with_plain, lambda made, _: made), [(encoder, "encode"), (encoder, "iterencode")]),
        (functools.partial(_with_plain, _lose), [(torch, "tensor"), (torch, "as_tensor")]),
    ):
        for owner, name in places:
            if hasattr(owner, name):
                setattr(owner, name, replacing(getattr(owner, name)))


def _reading(guesses: Guesses, read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that reads a tensor with its numbers noted."""

    def wrapped(value: Any, origin: Read) -> Any:
        if isinstance(value, list):
            return [wrapped(each, origin) for each in value]
        return Noted(value, origin.key, origin.may_be_known, guesses)

    def noted(tensor: torch.Tensor) -> Any:
        if tensor.is_meta or not guesses.is_noted(tensor.dtype) or tensor.numel() > _MOST_LISTED:
            return read(tensor)
        if tensor.is_cpu:
            origin = guesses.host.read_of(tensor)
            value = read(tensor) if origin is None else guesses.host.undisturbed(read, tensor)
        else:
            with guesses.noting() as reads:
                value = read(tensor)
            origin = next(iter(reads), None)
        guesses.noted |= origin is not None
        return value if origin is None else wrapped(value, origin)

    return noted


def _converting(kind: Any) -> Any:
    """Return what the notebook's code calls for `float(x)` and `int(x)`."""

    def convert(*args: Any) -> Any:
        value = args[0] if len(args) == 1 else None
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_cpu:
            args = (value := value.item(),)
        elif type(value) is str:
            value = next((number for text, number in _SHOWN if text == value.strip()), None)
        return value._like(kind(value.number)) if type(value) is Noted else kind(*args)

    return convert if kind is int or kind is float else kind


def _with_plain(finish: Callable[[Any, list[Noted]], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is given plain numbers, and whose result is finished with the noted ones that it met."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and _ORDINARY.issuperset(map(type, args)):
            return function(*args)
        met: list[Noted] = []
        plain = _plain((args, kwargs), met)
        return finish(function(*plain[0], **plain[1]), met) if met else function(*args, **kwargs)

    return called


def _carry(made: Any, met: list[Noted]) -> Any:
    """Carry the note on: what `min` returns decides no more than its operands."""
    value = made.item() if hasattr(made, "item") and getattr(made, "ndim", 1) == 0 else made
    return met[0]._like(value, *met)


def _lose(made: Any, met: list[Noted]) -> Any:
    for each in met:
        each.lose()
    return made
