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
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    }
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
    names = [argument.name for argument in arguments]
    aliased = [argument for argument in arguments if argument.alias_info is not None]
    written = {argument.name for argument in aliased if argument.is_write}
    if "norm" in name:  # their schemas do not say that they write to these
        written |= {"running_mean", "running_var"}.intersection(names)
    outputs = {argument.name for argument in arguments if argument.kwarg_only}
    overwritten = outputs & written
    if name in _OVERWRITES | SHAPES:
        overwritten.add(names[0])
    return _Traits(
        name,
        names,
        is_view=bool(aliased) and not written and name != _FROM_HOST,
        computes=torch.Tag.nondeterministic_seeded not in op.tags
        and name not in MAKE_ROOM,
        written=written,
        overwritten=overwritten,
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
            raw.untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )

    def write(self, target: torch.Tensor, value: torch.Tensor | None) -> None:
        """Note what a tensor holds from now on; None if that is not known."""
        place = None if value is None else self.of(target)
        is_whole = is_plain(
            target
        ) and target.numel() * target.itemsize >= self._nbytes_of(target)
        if value is not None and place is None and is_whole:
            self._kept[self._key_of(target)] = self._memory_of(target)
            place = self.of(target)
        if value is None or place is None:
            self.forget(self._key_of(target))
        else:
            place.copy_(value)

    def follow(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """Note what an operator did, where all that it read is known; else forget what it wrote to.

        Args:
            op: the operator, an overload of it.
            args: its positional arguments.
            kwargs: its keyword arguments.
            made: what it returned.
        """
        traits = _traits(op)
        results = [tensor for tensor in tensors_in(made) if self.is_here(tensor)]
        operands = self._keys_of((args, kwargs))
        if traits.is_view:
            results = [
                result for result in results if self._key_of(result) not in operands
            ]
        if traits.name == _FROM_HOST:
            self._keep_small(results)
        elif not self.may_follow(op, operands):
            self._forget(results)
        elif op.namespace == "c10d":
            self._apply_collective(traits.name, args)
        elif traits.name != _LEAVES_FINITE and (results or not traits.is_view):
            self._compute(op, args, kwargs, results)

    def _keys_of(self, values: Any) -> list[int]:
        """Return the storages of the tensors on the device of the dry run."""
        return [
            self._key_of(tensor)
            for tensor in tensors_in(values)
            if self.is_here(tensor)
        ]

    def _keep_small(self, made: list[torch.Tensor]) -> None:
        """Keep the contents of small tensors whose memory has what the host put there."""
        for tensor in made:
            key = self._key_of(tensor)
            if key and self._nbytes_of(tensor) <= LARGEST:
                self._kept[key] = self._memory_of(tensor)

    def _compute(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[torch.Tensor],
    ) -> None:
        """Note what an operator computed of what is known; else forget its results and what it wrote to."""
        traits = _traits(op)
        given = {**dict(zip(traits.names, args, strict=False)), **kwargs}
        written: list[torch.Tensor] = []
        for name in traits.written:
            written += filter(self.is_here, tensors_in(given.get(name)))
        if (
            traits.computes
            and results
            and all(result.nbytes <= LARGEST for result in results)
        ):
            if self._replay_on_cpu(op, args, kwargs, given, results, written):
                return
            if self._short_circuit(traits, args, results):
                return
        self._forget([*results, *written])

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        if self._kept:
            for tensor in tensors:
                self.forget(self._key_of(tensor))

    def _apply_collective(self, name: str, args: tuple[Any, ...]) -> None:
        """Note what a collective did, of which all ranks are taken to send the same; sums of that are not known."""
        if name.endswith("::broadcast_"):
            return
        value = None
        if "allgather" in name:
            sent = next(filter(self.is_here, tensors_in(args[1])), None)
            value = None if sent is None else self.of(sent)
        for target in filter(self.is_here, tensors_in(args[0])):
            if value is None or not value.numel() or target.numel() % value.numel():
                self.write(target, None)
            else:
                gathered = value.flatten().repeat(target.numel() // value.numel())
                self.write(target, gathered.view(target.shape))

    def may_follow(self, op: Any, keys: list[int]) -> bool:
        """Return whether an operator on tensors of some storages may change what is known."""
        return _traits(op).is_free or not keys or any(key in self._kept for key in keys)

    def _replay_on_cpu(
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
            is_same = (
                value.shape == tensor.shape
            )  # else it is a buffer that only the CPU's kernel has
            self.write(tensor, value if is_same else None)
        for tensor in written:
            self.write(tensor, twins[id(tensor)])
        return True

    def _short_circuit(
        self, traits: _Traits, args: tuple[Any, ...], results: list[torch.Tensor]
    ) -> bool:
        """Note what follows from one operand alone, such as truths from an "or" with truths; return whether it does.

        A generator of text ends when the longest length is reached, whatever the unknown tokens say.
        """
        wanted = traits.absorbing
        if wanted is None or (
            wanted and any(result.dtype != torch.bool for result in results)
        ):
            return False
        for operand in args:
            if isinstance(operand, torch.Tensor):
                value = self.of(operand)
            else:
                value = torch.as_tensor(operand, device="cpu")
            if value is not None and (value == wanted).all():
                break
        else:
            return False
        for result in results:
            self.write(
                result,
                torch.full(result.shape, wanted, dtype=result.dtype, device="cpu"),
            )
        return True

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device of the dry run."""
        return tensor.device.type == self._type and tensor.layout is torch.strided


def _swapped(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    """Return arguments for the CPU's kernel: with twins in place of tensors, and its device in place of any."""
    if isinstance(value, torch.Tensor):
        return twins.get(id(value), value)
    if isinstance(value, list | tuple):
        return [_swapped(part, twins) for part in value]
    if isinstance(value, dict):
        swapped = {name: _swapped(part, twins) for name, part in value.items()}
        for name in ("generator", "pin_memory"):
            swapped.pop(name, None)
        return swapped
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
            self._op = getattr(
                getattr(getattr(torch.ops, space), name), overload or "default"
            )
        _show(False)
        try:
            made = NotImplemented
            for answer in _answerers:
                made = answer(self._op, args, kwargs)
                if made is not NotImplemented:
                    break
            if made is NotImplemented:
                made = self._op(*args, **kwargs)
            for follow in _followers:
                follow(self._op, args, kwargs, made)
        except BaseException:
            del args, kwargs  # the traceback would keep them
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
            _libraries[space] = torch._C._dispatch_library(
                "IMPL", space, "", __file__, 1
            )
        kernel = (
            torch.library.fallthrough_kernel
            if full_name in _VIEWS
            else _Kernel(full_name)
        )
        _libraries[space].impl(name, _NAME, kernel, False)


class Shown:
    """Shows operators while anybody wants it, in the thread that asks first and in those that begin later."""

    def __init__(self) -> None:
        self._wanted: list[object] = []
        self._is_installed = False

    def to(self, follow: Follow, answer: Answer | None = None) -> None:
        """Show operators also to `follow`, after those who were there before, and before they run to `answer`."""
        _followers.append(follow)
        if answer is not None:
            _answerers.append(answer)

    def begin(self, who: object) -> None:
        """Show what is called from now on, until `end` was called for each `who`."""
        if any(other is who for other in self._wanted):
            return
        self._wanted.append(who)
        if not self._is_installed:
            self._is_installed = True
            get_ready()
            self._show_to_later_threads()
        _show(True)

    def _show_to_later_threads(self) -> None:
        threads: Any = threading.Thread
        begin = threads._bootstrap_inner

        def begin_shown(thread: threading.Thread) -> None:
            _show(bool(self._wanted))
            begin(thread)

        threads._bootstrap_inner = begin_shown

    def end(self, who: object) -> None:
        """Show no more operators to one."""
        self._wanted = [other for other in self._wanted if other is not who]
        _show(bool(self._wanted))


def _show(is_shown: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, is_shown)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own, and neither a class nor a transform answers for it."""
    if type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
        return False
    if tensor.layout != torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
