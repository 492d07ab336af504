"""Tensors on the host of which the contents are not the cell's: unwritten weights, and copies of what a device has.

A model of 70 billion weights that is built from its configuration is drawn at random, cast and copied to the device,
and nobody looks at a number of it. The first weights are drawn as ever, so that a small model's, and what the cell
draws after it, are its own. From then on a large fill leaves the storage as the system gave it, without pages, and is
kept as the way to draw it. What is copied, cast or moved from one stays unwritten. Where the host does look at the
numbers they are drawn first, and the report says on which line.

Predictions that are copied from a device decide nothing either while they are collected, saved or shown. So such a
copy is filled with something, or is left unwritten if it is large, and is remembered, as is whatever is computed from
it: a number of it is a noted one (see `noted`), and a truth is decided as one of those is. Otherwise something is
decided where its numbers go to numpy, or say how large something is.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.utils._device import _device_constructors

from gpumagic.worker.known import MAKE_ROOM, SHAPES, SIZED, Known, Shown, is_plain
from gpumagic.worker.modules import tensors_in

if TYPE_CHECKING:
    from gpumagic.worker.guesses import Read, UnknownValues

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
"""Bytes from which on what those make is left unwritten: below, following operators costs more than the pages."""
_COPIES = frozenset({"to", "_to_copy", "clone", "pin_memory"})


_Draw = Callable[[torch.Tensor], object]


@dataclass(eq=False)
class _Note:
    """What is noted of a storage, as an attribute of it, which torch keeps for as long as the storage is.

    Attributes:
        read: what is told of it where something is decided, if it is written: it was copied from a device.
        draw: writes numbers into all of it; None where only a device has them.
        is_exact: whether those are the cell's own.
        span: the addresses of a file that is mapped: its parts are storages of their own, and keep it.
    """

    read: Read | None = None
    draw: _Draw | None = None
    is_exact: bool = False
    span: range | None = None


class Host:
    """The tensors of one run.

    Args:
        guesses: fills what the host looks at, and is told where something is decided by it.
        shown: shows the operators, once there is such a tensor.
        known: what is known of the device's values, if that is followed.
        draws: whether numbers like the cell's are drawn for unwritten weights that the host looks at.
    """

    def __init__(
        self, guesses: UnknownValues, shown: Shown, known: Known | None, *, draws: bool
    ) -> None:
        self._guesses = guesses
        self._shown = shown
        self._known = known
        self._draws = draws
        self._notes: WeakSet[_Note] = WeakSet()
        self._files: WeakSet[_Note] = WeakSet()
        """Those of storages that are alive, and the files among them."""
        self._room = ROOM
        self._left_to_draw = self._left_to_copy = DRAWN
        self._skipped: torch.Tensor | None = None
        """Where the generator was after the last weights, if some were not drawn."""
        self._is_drawing = False
        self._thread = threading.get_ident()

    def install(self) -> None:
        """Leave large fills undone, and remember what is copied to the host, for the rest of the process."""
        _device_constructors()  # which of torch's functions make tensors is found before they are replaced
        tensor: Any = torch.Tensor
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (tensor, "__bool__", self._deciding),
            (torch.nn.Parameter, "__deepcopy__", self._deep_copying),
            (torch.nn.Module, "_apply", self._moving),
        ]
        for name in _FILLS:
            replaced.append(
                (tensor, name, functools.partial(self._filling, is_method=True))
            )
        for name in _WHOLE_FILLS:
            filling = functools.partial(self._filling, is_method=False)
            replaced.append((torch.nn.init, name, filling))
        for name, fill in _MAKE.items():
            replaced.append((torch, name, functools.partial(self._making, fill)))
        for name in ("numpy", "tolist", "__array__", "__dlpack__"):
            replaced.append((tensor, name, self._looking))
        for owner, name, instead in replaced:
            setattr(owner, name, instead(getattr(owner, name)))
        for name in _MAKE:  # for TorchScript, which knows functions by their identity
            torch.jit._builtins._register_builtin(getattr(torch, name), f"aten::{name}")
        # Else transformers casts in threads, some of which began before.
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
        from_file = torch.UntypedStorage.from_file

        def mapped(*args: Any, **kwargs: Any) -> Any:
            made = from_file(*args, **kwargs)
            if made.nbytes() >= LEAST:
                note = _Note(
                    span=range(made.data_ptr(), made.data_ptr() + made.nbytes())
                )
                self._files.add(note)
                self._add(made, note)
            return made

        torch.UntypedStorage.from_file = staticmethod(mapped)
        self._shown.to(self._follow, self._answer)

    # ---- What makes such tensors

    def _filling(
        self, fill: Callable[..., Any], *, is_method: bool
    ) -> Callable[..., Any]:
        def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_refused = is_method and tensor.requires_grad and torch.is_grad_enabled()
            given = (*args, *kwargs.values())
            has_generator = any(
                isinstance(argument, torch.Generator) for argument in given
            )
            if is_refused or has_generator or not self._may_leave(tensor):
                made = fill(tensor, *args, **kwargs)
                if self._skipped is not None:
                    self._skipped = torch.get_rng_state()
                return made
            if self._of(tensor) is None and self._may_draw(tensor):
                self.undisturbed(fill, tensor, *args, **kwargs)
                return tensor
            if (
                is_method
            ):  # on a tensor of nothing, which raises what the arguments deserve
                fill(tensor.detach().new_empty(0), *args, **kwargs)
            return self._leave(tensor, _drawing(fill, tensor.shape, args, kwargs))

        return filled

    def _making(
        self, fill: str | int | None, make: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not _is_on_host(kwargs):
                return make(*args, **kwargs)
            like = make(*args, **{**kwargs, "device": "meta"})
            if like.nbytes < _LEAST_MADE or not like.is_floating_point():
                return make(*args, **kwargs)
            is_random = isinstance(fill, str)
            if is_random and self._may_draw(like):
                return make(*args, **kwargs)
            numbers: tuple[Any, ...]
            if isinstance(fill, str):
                method = getattr(torch.Tensor, fill)
                numbers = ()
            else:
                method = torch.Tensor.fill_
                numbers = (
                    (kwargs.get("fill_value", args[-1]),) if fill is None else (fill,)
                )
            draw = _drawing(method, like.shape, numbers, {})
            blank = self._leave(_blank(like), draw, is_exact=not is_random)
            return blank.requires_grad_(like.requires_grad)

        return made

    def _deep_copying(self, copied: Callable[..., Any]) -> Callable[..., Any]:
        def deep_copied(parameter: torch.nn.Parameter, memo: dict[int, Any]) -> Any:
            """Leave copies of weights that were drawn unwritten too, beyond the first: of 32 layers, 31 are copies."""
            if (
                id(parameter) in memo
                or not self._may_leave(parameter)
                or self._of(parameter)
            ):
                return copied(parameter, memo)
            self._left_to_copy -= parameter.numel()
            if self._left_to_copy >= 0:
                return copied(parameter, memo)
            blank = self._leave(_blank(parameter.detach()))
            return memo.setdefault(
                id(parameter), type(parameter)(blank, parameter.requires_grad)
            )

        return deep_copied

    def _moving(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def applied(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Take a module to a device: what it held before is gone then, and operators may be no more shown."""
            made = apply(module, *args, **kwargs)
            if not self._notes:
                self._shown.end(self)
            return made

        return applied

    def _may_draw(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is among the first, whose numbers are drawn as in the cell."""
        self._left_to_draw -= tensor.numel()
        if self._left_to_draw < 0:
            self._skipped = torch.get_rng_state()
        return self._left_to_draw >= 0

    @property
    def draws_others(self) -> bool:
        """Whether the cell has drawn random numbers that are not the ones it would have, besides weights."""
        return self._skipped is not None and not torch.equal(
            self._skipped, torch.get_rng_state()
        )

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is large and is the cell's; other threads' operators may not be shown."""
        is_followed = not self._is_drawing and threading.get_ident() == self._thread
        return (
            is_followed
            and tensor.is_cpu
            and is_plain(tensor)
            and tensor.nbytes >= LEAST
        )

    def skip_copy(self, host: torch.Tensor) -> bool:
        """Leave a tensor unwritten that a device was copied to, if it is large; return whether it is."""
        is_left = self._may_leave(host)
        if is_left:
            self._leave(host)
        return is_left

    def remember(self, tensor: torch.Tensor, read: Read) -> None:
        """Remember what was copied from a device.

        Args:
            tensor: it.
            read: what is told of it where something is decided.
        """
        if self.read_of(tensor) is None:
            self._add(tensor.untyped_storage(), _Note(read))

    # ---- What is noted

    def _add(self, storage: Any, note: _Note) -> None:
        self._shown.begin(self)
        self._notes.add(note)
        storage._dry_run_note = note

    def _note_of(self, tensor: torch.Tensor) -> _Note | None:
        if not self._notes or not tensor.is_cpu or not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        note: _Note | None = getattr(storage, "_dry_run_note", None)
        if note is not None or not self._files:
            return note
        address = storage.data_ptr()
        for file in self._files:
            if file.span is not None and address in file.span:
                return file
        return None

    def read_of(self, tensor: torch.Tensor) -> Read | None:
        """Return what is remembered of a tensor that was copied from a device, or computed from one."""
        note = self._note_of(tensor)
        return None if note is None else note.read

    def _of(self, tensor: torch.Tensor) -> _Note | None:
        """Return what is noted of a tensor that is not written."""
        note = self._note_of(tensor)
        return None if note is None or note.read is not None else note

    def _leave(
        self, tensor: torch.Tensor, draw: _Draw | None = None, *, is_exact: bool = False
    ) -> torch.Tensor:
        """Note that a tensor's storage is not written."""
        self._add(tensor.untyped_storage(), _Note(draw=draw, is_exact=is_exact))
        return tensor

    def _draw_of(self, tensor: torch.Tensor) -> _Draw | None:
        """Return what writes an unwritten tensor."""
        note = self._of(tensor)
        return None if note is None else note.draw

    # ---- Where the host looks

    def _looking(self, look: Callable[..., Any]) -> Callable[..., Any]:
        def looked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_drawing:
                return look(tensor, *args, **kwargs)
            read = self.materialize(tensor)
            if read is not None:
                self._guesses.lose(read, is_all=True)
            with self._guesses.looking():
                return look(tensor, *args, **kwargs)

        return looked

    def _deciding(self, is_true: Callable[..., bool]) -> Callable[..., bool]:
        def decided(tensor: torch.Tensor) -> bool:
            read = self.materialize(tensor)
            if read is None:
                return is_true(tensor)
            return self._guesses.decide(read, self.undisturbed(is_true, tensor))

        return decided

    def materialize(self, tensor: torch.Tensor) -> Read | None:
        """Write a tensor at which the host looks, if it is unwritten, and return what is remembered of it."""
        self._write(tensor)
        return self.read_of(tensor)

    def undisturbed(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that fills, or reads what was filled, and follow nothing that it does."""
        was_drawing = self._is_drawing
        self._is_drawing = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_drawing = was_drawing

    def _write(self, tensor: torch.Tensor) -> None:
        """Write what is in a tensor's storage, if it is unwritten: the host looks at it."""
        known = self._of(tensor)
        if known is None or known.span is not None:
            return
        storage: Any = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage)
        if not known.is_exact:
            is_room = storage.nbytes() <= self._room
            is_noted = self.undisturbed(
                self._guesses.fill, whole if is_room else whole[:0]
            )
            if not (is_room and is_noted):
                return
            self._room -= storage.nbytes()
        if known.draw is not None and (known.is_exact or self._draws):
            self.undisturbed(known.draw, whole)
        if known.is_exact:
            storage._dry_run_note = None  # else `fill` has noted what is told of it

    # ---- Operators on them

    def _answer(  # noqa: C901  # one case after the other, the most frequent first
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of an operator that only copies what nobody reads, unwritten; else write what it reads."""
        if self._is_drawing or not self._notes:
            return NotImplemented
        unwritten = [
            tensor
            for tensor in tensors_in((args, kwargs))
            if self._of(tensor) is not None
        ]
        if not unwritten:
            return NotImplemented
        name = op._schema.name.removeprefix("aten::")
        is_differentiated = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in unwritten
        )
        if unwritten[0] is args[0] and name in _COPIES and not is_differentiated:
            return self._copied(op, name, args, kwargs)
        if _looks_at_no_number(op, name):
            return NotImplemented
        if name == "copy_" and not args[0].is_cpu:
            source = (
                args[1]
                if args[1].dtype == args[0].dtype
                else _blank(args[1], args[0].dtype)
            )
            return op(args[0], source, *args[2:], **kwargs)
        targets: list[torch.Tensor] = []
        if op._schema.is_mutable and name.endswith("_"):
            targets = list(tensors_in(args[0]))
        if targets and all(map(self._may_leave, targets)) and not is_differentiated:
            for target in targets:
                self._leave(target, self._draw_of(unwritten[0]))
            return args[0] if op._schema.returns else None
        ids = set(map(id, targets))
        if not all(id(tensor) in ids for tensor in unwritten):
            # It reads one; else it writes to little, such as a row.
            for tensor in unwritten:
                self._write(tensor)
        return NotImplemented

    def _copied(
        self, op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a copy of an unwritten tensor, of another type or in another place."""
        source = args[0]
        if name == "pin_memory":
            return torch.empty_strided(
                source.shape, source.stride(), dtype=source.dtype, pin_memory=True
            )
        like = op(source.new_empty(0), *args[1:], **kwargs)
        if like.is_cpu and (name == "clone" or like.dtype != source.dtype):
            return self._leave(_blank(source, like.dtype), self._draw_of(source))
        if like.dtype != source.dtype:
            source = _blank(source, like.dtype)
        return op(source, *args[1:], **kwargs)

    def _follow(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """Remember what was computed from a copy of a device's tensor."""
        if self._is_drawing or not self._notes:
            return
        reads = map(self.read_of, tensors_in((args, kwargs)))
        read = next((read for read in reads if read is not None), None)
        if read is None:
            return
        results = list(tensors_in(made))
        if op._schema.is_mutable:
            results += tensors_in(args[:1])
        is_sized = {
            torch.Tag.data_dependent_output,
            torch.Tag.dynamic_output_shape,
        } & set(op.tags)
        if is_sized or op._schema.name.removeprefix("aten::") in SIZED:
            self._guesses.lose(read, is_all=True)
        for result in results:
            if result.is_cpu and is_plain(result):
                self.remember(result, read)
            elif self._known is not None and self._known.is_here(result):
                self._known.write(result, None)


def _drawing(
    fill: Callable[..., Any],
    shape: torch.Size,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Draw:
    """Return what fills a storage as a tensor of some shape over it was to be."""

    def draw(whole: torch.Tensor) -> object:
        target = whole.view(shape) if shape.numel() == whole.numel() else whole
        return fill(target, *args, **kwargs)

    return draw


def _is_on_host(given: dict[str, Any]) -> bool:
    """Return whether a function that makes a tensor makes one on the host, in a way that `_making` knows."""
    others = ("out", "layout", "generator", "names", "pin_memory")
    if any(given.get(name) is not None for name in others):
        return False
    return bool(torch.empty(0, device=given.get("device")).is_cpu)


def _looks_at_no_number(op: Any, name: str) -> bool:
    """Return whether an operator is a view, or looks at its tensors' sizes, types and devices only."""
    if name in SHAPES | MAKE_ROOM or torch.Tag.inplace_view in op.tags:
        return True
    returns = op._schema.returns
    returns_tensor = any("Tensor" in str(result.type) for result in returns)
    if not op._schema.is_mutable and not returns_tensor:
        return name not in SIZED and torch.Tag.data_dependent_output not in op.tags
    aliases = [result.alias_info for result in returns if result.alias_info is not None]
    return any(not alias.is_write for alias in aliases)


def _blank(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new tensor on the host like one, of which nothing is written."""
    dtype = dtype or tensor.dtype
    nbytes = tensor.numel() * dtype.itemsize
    if nbytes < _LEAST_MADE or not tensor.is_contiguous() or sys.platform != "linux":
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype, device="cpu"
        )
    # Linux refuses more than it has, unless it is told that not all of it will be written.
    memory = mmap.mmap(
        -1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    )
    return torch.frombuffer(memory, dtype=dtype).view(tensor.shape)
