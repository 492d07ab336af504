"""The contents of small tensors on the device, as far as the host put them there, and how every operator is shown.

Lengths that a loop reads back, a scale, the mask of a generator of text that ends at its longest length: an operator
whose operands are known is run again on the CPU, over copies of them or over the device's own memory. Whatever else an
operator writes to is forgotten.

For that operators are shown, and to `host.Host`. A dispatch mode would change what is run: under one autograd adds no
gradients in place, and some operators are composed in another way. So a kernel in Python shows them, at a key above all
others that torch has for its own tests. It costs some ten microseconds an operator, so it is on only where something is
followed. Each operator has a kernel of its own: one for all of them (`Library.fallback`) fails under the modes of
others, where torch looks a kernel in Python up by the operator's name. To register them takes a tenth of a second, so
that is done in the warm process. Operators that the cell registers are not shown.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gpumagic.worker.modules import tensors_in

LARGEST = 1 << 14
"""Bytes of a storage up to which its contents are kept."""
_OVERWRITES = frozenset({"fill_", "zero_", "copy_"})
"""Operators of which what was in their first operand does not matter."""
SHAPES = frozenset({
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like",
})  # fmt: skip
"""Operators that take from their first operand no more than what it looks like."""
MAKE_ROOM = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
)
SIZED = frozenset({
    "where", "argwhere", "nonzero_numpy", "repeat_interleave", "tensor_split", "narrow", "allclose", "is_nonzero",
    "_nested_tensor_from_mask_left_aligned", "_choose_qparams_per_tensor", "_pack_padded_sequence",
})  # fmt: skip
"""Operators that return as much, or something else, as values say, or are composed of such, and that have no tag."""
_FROM_HOST = "lift_fresh"
"""What `torch.tensor` calls last, when the contents are there."""
_LEAVES_FINITE = "_amp_foreach_non_finite_check_and_unscale_"
_ABSORBING = {
    "bitwise_or": True, "logical_or": True, "__or__": True, "__ior__": True,
    "bitwise_and": False, "logical_and": False, "__and__": False, "__iand__": False,
}  # fmt: skip
"""What an operand must be throughout for the other one not to matter."""


class _Traits(NamedTuple):
    """What an operator does with contents.

    Attributes:
        names: those of its arguments.
        is_view: whether its result may be its operand's memory.
        computes: whether its result follows from its operands.
        written: the arguments that it writes to.
        overwritten: those of which what was there does not matter.
        absorbing: see `_ABSORBING`.
    """

    name: str
    names: list[str]
    is_view: bool
    computes: bool
    written: set[str]
    overwritten: set[str]
    absorbing: bool | None

    @property
    def is_free(self) -> bool:
        """Whether it may make known what nothing known went into."""
        return self.absorbing is not None or bool(self.overwritten)


@functools.cache
def _traits(op: Any) -> _Traits:
    name = op._schema.name.removeprefix("aten::")
    arguments = op._schema.arguments
    aliased = [each for each in arguments if each.alias_info is not None]
    written = {each.name for each in aliased if each.is_write}
    if "norm" in name:  # their schemas do not say that they write to these
        written |= {each.name for each in arguments} & {"running_mean", "running_var"}
    free = {each.name for each in arguments if each.kwarg_only} & written
    if name in _OVERWRITES | SHAPES:
        free.add(arguments[0].name)
    return _Traits(
        name,
        [each.name for each in arguments],
        is_view=bool(aliased) and not written and name != _FROM_HOST,
        computes=torch.Tag.nondeterministic_seeded not in op.tags and name not in MAKE_ROOM,
        written=written,
        overwritten=free,
        absorbing=_ABSORBING.get(name, _ABSORBING.get(name.rstrip("_"))),
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


class Known:
    """Small contents by storage.

    Args:
        device_type: the name of the device of the dry run.
        key_of: tells the storage of a tensor on it; 0 for none.
        memory_of: returns the bytes of a tensor's whole storage, as a tensor on the CPU that is kept.
        nbytes_of: tells the bytes of a tensor's whole storage.
    """

    def __init__(
        self,
        device_type: str,
        key_of: Callable[[torch.Tensor], int],
        memory_of: Callable[[torch.Tensor], torch.Tensor],
        nbytes_of: Callable[[torch.Tensor], int] = _nbytes,
    ) -> None:
        self._type = device_type
        self._key_of = key_of
        self._memory_of = memory_of
        self._nbytes_of = nbytes_of
        self._kept: dict[int, torch.Tensor] = {}

    def forget(self, key: int) -> None:
        """Drop what was known of a storage."""
        self._kept.pop(key, None)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's contents on the CPU, over the memory that they are kept in; None if they are not known."""
        if tensor.device.type != self._type:
            return tensor if tensor.device.type == "cpu" else None
        if not is_plain(tensor):
            return None
        raw = self._kept.get(self._key_of(tensor))
        if raw is None or raw.numel() != self._nbytes_of(tensor):
            return None
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made.set_(
            raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def write(self, target: torch.Tensor, value: torch.Tensor | None) -> None:
        """Note what a tensor holds from now on; None if that is not known."""
        place = None if value is None else self.of(target)
        is_whole = is_plain(target) and target.numel() * target.itemsize >= self._nbytes_of(target)
        if value is not None and place is None and is_whole:
            self._kept[self._key_of(target)] = self._memory_of(target)
            place = self.of(target)
        if value is None or place is None:
            self.forget(self._key_of(target))
        else:
            place.copy_(value)

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Note what an operator did, where all that it read is known; else forget what it wrote to.

        Args:
            op: the operator, an overload of it.
            args: its positional arguments.
            kwargs: its keyword arguments.
            made: what it returned.
        """
        traits = _traits(op)
        results = [each for each in tensors_in(made) if self.is_here(each)]
        operands = [self._key_of(each) for each in tensors_in((args, kwargs)) if self.is_here(each)]
        if traits.is_view:
            results = [each for each in results if self._key_of(each) not in operands]
        if traits.name == _FROM_HOST:  # what lies in its memory is what the host put there
            small = (
                each for each in results if self._nbytes_of(each) <= LARGEST and self._key_of(each)
            )
            self._kept |= {self._key_of(each): self._memory_of(each) for each in small}
        elif not self.may_follow(op, operands):
            self._forget(results)
        elif op.namespace == "c10d":
            self._share(traits.name, args)
        elif (
            results or not traits.is_view
        ) and traits.name != _LEAVES_FINITE:  # gradients are taken to be finite
            given = {**dict(zip(traits.names, args, strict=False)), **kwargs}
            written = [
                each
                for name in traits.written
                for each in tensors_in(given.get(name))
                if self.is_here(each)
            ]
            is_small = (
                traits.computes and results and all(each.nbytes <= LARGEST for each in results)
            )
            is_computed = is_small and self._repeat(op, args, kwargs, given, results, written)
            if not is_computed and not (is_small and self._absorb(traits, args, results)):
                self._forget([*results, *written])

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        if self._kept:
            for each in tensors:
                self.forget(self._key_of(each))

    def _share(self, name: str, args: tuple[Any, ...]) -> None:
        """Note what a collective did, of which all ranks are taken to send the same; sums of that are not known."""
        if name.endswith("::broadcast_"):
            return
        given = (
            next(filter(self.is_here, tensors_in(args[1])), None) if "allgather" in name else None
        )
        value = None if given is None else self.of(given)
        for each in filter(self.is_here, tensors_in(args[0])):
            is_whole = value is not None and value.numel() and not each.numel() % value.numel()
            made = (
                value.flatten().repeat(each.numel() // value.numel())
                if is_whole and value is not None
                else None
            )
            self.write(each, None if made is None else made.view(each.shape))

    def may_follow(self, op: Any, keys: list[int]) -> bool:
        """Return whether an operator on tensors of some storages may change what is known."""
        traits = _traits(op)
        is_free = traits.absorbing is not None or bool(traits.overwritten)
        return is_free or not keys or any(key in self._kept for key in keys)

    def _repeat(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: dict[str, Any],
        results: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> bool:
        """Run the operator on what is known; return whether all it needed was."""
        traits = _traits(op)
        twins: dict[int, torch.Tensor] = {}
        for name, value in given.items():
            for tensor in tensors_in(value):
                twin = self.of(tensor)
                if name in traits.overwritten and twin is None:
                    twin = torch.empty_like(tensor, device="cpu")
                elif name in traits.written and twin is not None:
                    twin = twin.clone()  # it is written to once, below
                if twin is None:
                    return False
                twins[id(tensor)] = twin
        try:
            returned = op(*_swapped(args, twins), **_swapped(kwargs, twins))
        except Exception:  # a kernel the CPU lacks: its result stays unknown
            return False
        for tensor, value in zip(results, tensors_in(returned), strict=False):
            self.write(
                tensor, value if value.shape == tensor.shape else None
            )  # a buffer that is the CPU's alone
        for tensor in written:
            self.write(tensor, twins[id(tensor)])
        return True

    def _absorb(self, traits: _Traits, args: tuple[Any, ...], results: list[torch.Tensor]) -> bool:
        """Note what follows from one operand alone, such as truths from an "or" with truths; return whether it does.

        A generator of text ends when the longest length is reached, whatever the unknown tokens say.
        """
        wanted = traits.absorbing
        if wanted is None or (wanted and any(each.dtype != torch.bool for each in results)):
            return False
        known = (
            self.of(each) if isinstance(each, torch.Tensor) else torch.as_tensor(each, device="cpu")
            for each in args
        )
        if not any(each is not None and (each == wanted).all() for each in known):
            return False
        for tensor in results:
            self.write(tensor, torch.full(tensor.shape, wanted, dtype=tensor.dtype, device="cpu"))
        return True

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device of the dry run."""
        return tensor.device.type == self._type and tensor.layout is torch.strided


def _swapped(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return twins.get(id(value), value)
    if isinstance(value, list | tuple):
        return [_swapped(each, twins) for each in value]
    if isinstance(value, dict):
        kept = {
            name: each for name, each in value.items() if name not in {"generator", "pin_memory"}
        }
        return {name: _swapped(each, twins) for name, each in kept.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value


# ---- Operators, shown

Follow = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]
"""Called with an operator, its arguments and what it returned."""
Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called with an operator and its arguments before it runs; returns what it is to return, or NotImplemented."""
_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._dispatch_key_parse(_NAME)
_VIEWS = {
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "expand", "permute", "select.int", "slice.Tensor", "split.Tensor",
        "squeeze.dim", "t", "transpose.int", "unbind.int", "unsqueeze", "view",
    )
}  # fmt: skip
"""Operators that move no contents and are not shown; C++ relies on what `alias` and `detach` return being new."""


class _Kernel:
    """An operator's; the object that Python has for the operator is looked up once it is called."""

    __slots__ = ("_name", "_op")

    def __init__(self, name: str) -> None:
        self._name = name
        self._op: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._op is None:
            space, _, name = self._name.partition("::")
            name, _, overload = name.partition(".")
            self._op = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        _show(False)
        try:
            answers = (answer(self._op, args, kwargs) for answer in _answerers)
            made = next((each for each in answers if each is not NotImplemented), NotImplemented)
            if made is NotImplemented:
                made = self._op(*args, **kwargs)
            for follow in _followers:
                follow(self._op, args, kwargs, made)
        except BaseException:
            args, kwargs = (), {}  # the traceback would keep them
            raise
        finally:
            _show(True)
        return made


_libraries: dict[str, Any] = {}
"""What keeps the kernels, by the operators' namespace."""
_ready: set[str] = set()
"""The operators that have one."""
_followers: list[Follow] = []
_answerers: list[Answer] = []


def get_ready() -> None:
    """Give a kernel to each operator that has none yet; none is called before `Shown.begin`."""
    if not _libraries:
        _libraries["_"] = torch.library.Library("_", "IMPL")
        _libraries["_"].fallback(torch.library.fallthrough_kernel, _NAME)
    for full_name in torch._C._dispatch_get_all_op_names():
        if full_name in _ready:
            continue
        _ready.add(full_name)
        space, _, name = full_name.partition("::")
        if space not in _libraries:
            _libraries[space] = torch._C._dispatch_library("IMPL", space, "", __file__, 1)
        kernel = torch.library.fallthrough_kernel if full_name in _VIEWS else _Kernel(full_name)
        _libraries[space].impl(name, _NAME, kernel, False)


class Shown:
    """Shows operators while anybody wants it, in the thread that asks first and in those that begin later."""

    def __init__(self) -> None:
        self._wanted: list[object] = []
        self._is_installed = False

    def to(self, follow: Follow, answer: Answer | None = None) -> None:
        """Show operators also to `follow`, after those who were there before, and before they run to `answer`."""
        _followers.append(follow)
        _answerers.extend([] if answer is None else [answer])

    def begin(self, who: object) -> None:
        """Show what is called from now on, until `end` was called for each `who`."""
        if any(each is who for each in self._wanted):
            return
        self._wanted.append(who)
        if not self._is_installed:
            self._is_installed = True
            get_ready()
            threads: Any = threading.Thread
            begin = threads._bootstrap_inner

            def begin_shown(thread: threading.Thread) -> None:
                _show(bool(self._wanted))
                begin(thread)

            threads._bootstrap_inner = begin_shown
        _show(True)

    def end(self, who: object) -> None:
        """Show no more operators to one."""
        self._wanted = [each for each in self._wanted if each is not who]
        _show(bool(self._wanted))


def _show(is_shown: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, is_shown)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own, and neither a class nor a transform answers for it."""
    is_its_own = (
        type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__
        or tensor.layout != torch.strided
    )
    return not is_its_own and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
