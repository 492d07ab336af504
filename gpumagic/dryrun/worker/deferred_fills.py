"""Large tensors on the host that are filled as weights are: nothing is drawn and no byte is written.

A model of 70 billion weights that is built from its configuration is drawn at random, cast and copied to the device,
and nobody looks at a number of it. The first weights are drawn as ever, so that a small model's, and what the cell
draws after it, are its own. From then on a large fill in place (`nn.init` and its like) leaves the storage as the
system gave it, without pages, and is kept as the way to draw it. While there are such storages a dispatch mode follows
them: what is written to one, or computed from one at the same scale, is left unwritten too. Where the host does look at
the numbers they are drawn first, and the report says on which line.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

from gpumagic.dryrun.worker.modules import leaves_of, tensors_in
from gpumagic.dryrun.worker.shown import Answering, HostStorages, before_looks, is_plain

LEAST = 1 << 20
"""Bytes of a tensor from which on it is left unwritten."""
ROOM = 256 << 20
"""Bytes that are drawn for the host to look at; what is beyond reads as zeros."""
DRAWN = 160_000_000
"""Numbers, about a second of them, that are drawn all the same: what the cell draws later, such as the lengths of its
sentences, is then what it would draw."""
OTHERS = "random numbers that the cell draws on the host after its large weights are others than its own"
_MAP_NORESERVE = 0x4000  # as Linux has it everywhere but on a few old architectures

_FILLS = ("normal_", "uniform_", "log_normal_", "cauchy_", "exponential_", "geometric_", "random_",
          "bernoulli_")  # fmt: skip
_WHOLE_FILLS = ("_no_grad_trunc_normal_", "orthogonal_")
"""Functions of `nn.init` that look at what they have drawn."""
_MAKE = {"ones": 1, "zeros": 0, "full": None, "rand": "uniform_", "randn": "normal_"}
"""Functions that make a tensor, by the number that they fill it with, None for their second argument, or the method."""
_LEAST_MADE = 256 << 20
"""Bytes from which on what those make is left unwritten: below, a mode for all operators costs more than the pages."""
_METADATA = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_empty_strided",
    "new_zeros", "new_ones", "new_full", "is_pinned", "is_same_size",
})  # fmt: skip
"""Operators that look at a tensor's size, type and device only."""


class _Unwritten(NamedTuple):
    """A storage.

    Attributes:
        draw: writes numbers into all of it; None where only a device has them.
        is_exact: whether those are the cell's own.
        span: the addresses of a file that is mapped: its parts are storages of their own, and keep it.
    """

    draw: Callable[[torch.Tensor], object] | None = None
    is_exact: bool = False
    span: range | None = None


class DeferredFills:
    """The unwritten storages of one run.

    Args:
        fill: puts something into a tensor that the host looks at, and notes it.
        draws: whether numbers like the cell's are drawn then.
    """

    def __init__(self, fill: Callable[[torch.Tensor], object], *, draws: bool) -> None:
        self._guess = fill
        self._draws = draws
        self._storages = HostStorages[_Unwritten]()
        self._files: list[_Unwritten] = []
        self._mode = Answering(self._follow)
        self._room = ROOM
        self._left_to_draw = self._left_to_copy = DRAWN
        self._skipped: torch.Tensor | None = None
        """Where the generator was after the last weights, if some were not drawn."""
        self._is_drawing = False
        self._thread = threading.get_ident()

    def install(self) -> None:
        """Leave large fills undone for the rest of the process."""
        _device_constructors()  # which of torch's functions make tensors is found before they are replaced
        tensors = torch.Tensor
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (tensors, name, functools.partial(self._filling, is_method=True)) for name in _FILLS
        ]
        replaced += [(torch.nn.init, name, functools.partial(self._filling, is_method=False)) for name in _WHOLE_FILLS]
        replaced += [(torch, name, functools.partial(self._making, _MAKE[name])) for name in _MAKE]
        for owner, name, instead in replaced:
            setattr(owner, name, instead(getattr(owner, name)))
        before_looks(self._look)
        for name in _MAKE:  # for TorchScript, which knows functions by their identity
            torch.jit._builtins._register_builtin(getattr(torch, name), f"aten::{name}")
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers casts in threads, where no mode follows
        from_file, apply = torch.UntypedStorage.from_file, torch.nn.Module._apply

        def mapped(*args: Any, **kwargs: Any) -> Any:
            made = from_file(*args, **kwargs)
            if made.nbytes() >= LEAST:
                span = range(made.data_ptr(), made.data_ptr() + made.nbytes())
                self._leave(made, _Unwritten(span=span))
            return made

        def applied(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Take a module to a device: then what it held before is gone."""
            made = apply(module, *args, **kwargs)
            if self._storages:
                self._storages.sweep()
                self._files = [each for each in self._storages.notes() if each.span is not None]
                if not self._storages:
                    self._mode.end()
            return made

        torch.nn.Parameter.__deepcopy__ = self._deep_copying(torch.nn.Parameter.__deepcopy__)
        torch.UntypedStorage.from_file = staticmethod(mapped)
        torch.nn.Module._apply = applied
        torch.autograd._engine_run_backward = self._without_mode(torch.autograd._engine_run_backward)

    def _without_mode(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's backward pass without the mode, if it comes to a device: under one it adds none in place."""

        def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            is_off = self._storages and any(each.device.type != "cpu" for each in (*roots, *leaves_of(roots)))
            with self._mode.paused() if is_off else contextlib.nullcontext():
                return run(roots, *args, **kwargs)

        return backward

    def _filling(self, fill: Callable[..., Any], *, is_method: bool) -> Callable[..., Any]:
        def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_refused = is_method and tensor.requires_grad and torch.is_grad_enabled()
            has_its_own = any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
            if is_refused or has_its_own or not self._is_followed() or not _is_large(tensor):
                made = fill(tensor, *args, **kwargs)
                self._skipped = None if self._skipped is None else torch.get_rng_state()
                return made
            if self._of(tensor) is None and self._may_draw(tensor):
                self._undisturbed(fill, tensor, *args, **kwargs)
                return tensor
            if is_method:
                fill(tensor.detach().new_empty(0), *args, **kwargs)  # which raises what the arguments deserve
            self._leave(tensor.untyped_storage(), _Unwritten(_drawing(fill, tensor.shape, args, kwargs)))
            return tensor

        return filled

    def _deep_copying(self, copied: Callable[..., Any]) -> Callable[..., Any]:
        def deep_copied(parameter: torch.nn.Parameter, memo: dict[int, Any]) -> Any:
            """Leave copies of weights that were drawn unwritten too, beyond the first: of 32 layers, 31 are copies."""
            if id(parameter) in memo or not self._is_followed() or not _is_large(parameter) or self._of(parameter):
                return copied(parameter, memo)
            self._left_to_copy -= parameter.numel()
            if self._left_to_copy >= 0:
                return copied(parameter, memo)
            blank = _blank(parameter.detach())
            self._leave(blank.untyped_storage(), _Unwritten())
            return memo.setdefault(id(parameter), type(parameter)(blank, parameter.requires_grad))

        return deep_copied

    def _making(self, fill: str | int | None, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not _is_on_host(kwargs):
                return make(*args, **kwargs)
            like = make(*args, **{**kwargs, "device": "meta"})
            is_random = isinstance(fill, str)
            if like.nbytes < _LEAST_MADE or not like.is_floating_point() or not self._is_followed():
                return make(*args, **kwargs)
            if is_random and self._may_draw(like):
                return make(*args, **kwargs)
            blank = _blank(like)
            numbers = () if is_random else (kwargs.get("fill_value", args[-1]) if fill is None else fill,)
            method = getattr(torch.Tensor, fill if isinstance(fill, str) else "fill_")
            draw = _drawing(method, blank.shape, numbers, {})
            self._leave(blank.untyped_storage(), _Unwritten(draw, is_exact=not is_random))
            return blank.requires_grad_(like.requires_grad)

        return made

    def _may_draw(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is among the first, whose numbers are drawn as in the cell."""
        self._left_to_draw -= tensor.numel()
        if self._left_to_draw < 0:
            self._skipped = torch.get_rng_state()
        return self._left_to_draw >= 0

    @property
    def draws_others(self) -> bool:
        """Whether the cell has drawn random numbers that are not the ones it would have, besides weights."""
        return self._skipped is not None and not torch.equal(self._skipped, torch.get_rng_state())

    def _undisturbed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function that fills for real."""
        was_drawing, self._is_drawing = self._is_drawing, True
        try:
            function(*args, **kwargs)
        finally:
            self._is_drawing = was_drawing

    def _is_followed(self) -> bool:
        """Return whether what the caller makes is followed: the mode is one thread's."""
        return not self._is_drawing and threading.get_ident() == self._thread

    def leave(self, host: torch.Tensor) -> bool:
        """Leave a tensor unwritten that a device was copied to, if it is large; return whether it is."""
        if not _is_large(host) or not self._is_followed():
            return False
        self._leave(host.untyped_storage(), _Unwritten())
        return True

    def _look(self, tensor: torch.Tensor) -> None:
        if self._storages:
            self._write(tensor)

    # ---- The storages

    def _of(self, tensor: torch.Tensor) -> _Unwritten | None:
        found = self._storages.of(tensor)
        if found is None and self._files and tensor.is_cpu and _is_plain(tensor):
            at = tensor.untyped_storage().data_ptr()
            return next((each for each in self._files if each.span is not None and at in each.span), None)
        return found

    def _leave(self, storage: torch.UntypedStorage, unwritten: _Unwritten) -> None:
        """Note that a storage is not written."""
        if not self._storages:
            self._mode.begin()
        self._storages.add(storage, unwritten)
        if unwritten.span is not None:
            self._files.append(unwritten)

    def _write(self, tensor: torch.Tensor) -> None:
        """Write what is in a tensor's storage, if it is unwritten: the host looks at it."""
        known = self._of(tensor)
        if known is None or known.span is not None:
            return
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage)
        if not known.is_exact:
            is_room = storage.nbytes() <= self._room
            self._undisturbed(self._guess, whole if is_room else whole[:0])
            if not is_room:
                return
            self._room -= storage.nbytes()
        if known.draw is not None and (known.is_exact or self._draws):
            self._undisturbed(known.draw, whole)
        self._storages.remove(storage)

    # ---- Operators on them

    def _follow(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; where it would only write what nobody reads, make its result without."""
        met = [] if self._is_drawing else [each for each in tensors_in((args, kwargs)) if self._of(each) is not None]
        if not met or not _uses_numbers(op):
            return op(*args, **kwargs)
        name = op._schema.name.removeprefix("aten::")
        targets = list(tensors_in(args[0])) if op._schema.is_mutable and name.endswith("_") else []
        if name == "copy_" and args[0].device.type != "cpu":
            return op(args[0], _blank(args[1], args[0].dtype), *args[2:], **kwargs)
        if name == "_to_copy" and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return op(_blank(args[0], kwargs.get("dtype")), *args[1:], **kwargs)
        if targets and all(_is_large(each) for each in targets):
            self._leave_all(targets, met)
            return args[0] if op._schema.returns else None
        if not op._schema.is_mutable and (made := _by_shape(op, name, args, kwargs)) is not None:
            return self._leave_all(made, met)
        if not all(any(each is one for one in targets) for each in met):  # else it writes to little, such as a row
            for each in met:
                self._write(each)
        return op(*args, **kwargs)

    def _leave_all(self, made: Any, met: list[torch.Tensor]) -> Any:
        known = self._of(met[0])
        for each in tensors_in(made):
            self._leave(each.untyped_storage(), _Unwritten(None if known is None else known.draw))
        return made


def _uses_numbers(op: Any) -> bool:
    """Return whether an operator reads or writes numbers of its tensors."""
    if not isinstance(op, torch._ops.OpOverload) or op.is_view or torch.Tag.inplace_view in op.tags:
        return False
    return op._schema.name.removeprefix("aten::") not in _METADATA


def _drawing(
    fill: Callable[..., Any], shape: torch.Size, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[torch.Tensor], object]:
    """Return what fills a storage as a tensor of some shape over it was to be."""
    return lambda whole: fill(whole.view(shape) if shape.numel() == whole.numel() else whole, *args, **kwargs)


def _is_on_host(given: dict[str, Any]) -> bool:
    """Return whether a function that makes a tensor makes one on the host, in a way that `_making` knows."""
    device = given.get("device")
    device = torch.get_default_device() if device is None else torch.device(device)
    return device.type == "cpu" and all(
        given.get(each) is None for each in ("out", "layout", "generator", "names", "pin_memory")
    )


def _is_large(tensor: torch.Tensor) -> bool:
    return _is_plain(tensor) and tensor.nbytes >= LEAST and tensor.device.type == "cpu"


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and is_plain(tensor)


def _blank(tensor: torch.Tensor, dtype: torch.dtype | None = None, device: str = "cpu") -> torch.Tensor:
    """Return a new tensor like one, of which nothing is written."""
    dtype = dtype or tensor.dtype
    nbytes = tensor.numel() * dtype.itemsize
    if device != "cpu" or nbytes < _LEAST_MADE or not tensor.is_contiguous() or sys.platform != "linux":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    # Linux refuses more than it has, unless it is told that not all of it will be written.
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(tensor.shape)


def _by_shape(op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an operator's results, unwritten; None where they are small or no fractions, or depend on values."""
    if any(each.device.type != "cpu" for each in tensors_in((args, kwargs))):
        return None
    if name == "_pin_memory":
        return torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, pin_memory=True)
    sent = tree_map_only(torch.Tensor, lambda each: _blank(each, device="meta"), (args, kwargs))
    try:
        made = op(*sent[0], **{**sent[1], **({"device": "meta"} if sent[1].get("device") else {})})
    except Exception:  # no kernel for shapes alone
        return None
    found = list(tensors_in(made))
    if not found or any(each.nbytes < LEAST or not each.is_floating_point() for each in found):
        return None
    return tree_map_only(torch.Tensor, lambda each: _blank(each, device="cpu"), made)
