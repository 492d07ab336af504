"""One operator's call, with stand-ins for its tensors on torch's meta device; and what it returned, kept in a plan.

Calls with operands of the same metadata get the same again. The key of a plan has what torch's meta kernels look at:
shapes, strides, types, offsets and devices of the operands, which of them share a storage and how large that is, and
every other argument. Numbers that scale or fill count by their type only, so that a learning rate that changes is not
a new key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from gpumagic.worker.fake.storages import SPACING, Form, Storages, as_view, span

META = DispatchKeySet(DispatchKey.Meta)
_TAKE_HOST_INDICES = frozenset({
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put",
    "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_unsafe_masked_index",
    "aten::_unsafe_masked_index_put_accumulate",
})  # fmt: skip
_LIKE = {
    **dict.fromkeys(
        (
            "multi_margin_loss_backward",
            "multilabel_margin_loss_backward",
            "fractional_max_pool3d_backward",
            "_logcumsumexp",
        ),
        "self",
    ),
    "_ctc_loss_backward": "log_probs",
}
"""Operators for which torch has no meta kernel, and the operand that the result is like."""


class Call:
    """A call of an operator with tensors of the dry run.

    Args:
        op: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        device_type: the name of the device of the dry run.

    Raises:
        RuntimeError: operands on different devices, in torch's words.
    """

    def __init__(
        self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], device_type: str
    ) -> None:
        self.op = op
        self.name: str = op._schema.name.removeprefix("aten::").rstrip("_")
        """The operator's, in place or not, without its overload."""
        self.given: dict[str, Any] = {}
        """Every argument, by name."""
        like = next(
            (each for each in args if isinstance(each, torch.Tensor) and each.dtype != torch.bool),
            None,
        )
        for place, argument in enumerate(op._schema.arguments):
            value = (
                args[place]
                if place < len(args)
                else kwargs.get(argument.name, argument.default_value)
            )
            if str(argument.type) == "Tensor" and isinstance(value, int | float | complex):
                # torch made a tensor of a Python number, and that arrives here as the number again.
                value = torch.tensor(
                    value,
                    dtype=None if like is None else torch.result_type(like, value),
                    device="cpu",
                )
            self.given[argument.name] = value
        self._type = device_type
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.by_twin: dict[int, torch.Tensor] = {}
        """What each stand-in stands for, by its identity."""
        self.owners: dict[int, torch.Tensor] = {}
        """The same by the stand-in's storage."""
        self.is_indexing = op._name in _TAKE_HOST_INDICES
        self.device = self._common_device()

    def tensors(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield (schema argument, tensor) of every tensor, those in lists included."""
        for argument, value in zip(self.op._schema.arguments, self.given.values(), strict=True):
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, torch.Tensor):
                    yield argument, each

    def fills_by_mask(self) -> bool:
        """Return whether it writes one number where a mask says, for which CUDA lays out no positions."""
        if not self.is_indexing or not any(
            argument.is_write for argument in self.op._schema.arguments
        ):
            return False
        masks = [each for each in self.given["indices"] if each is not None]
        is_one = len(masks) == 1 and masks[0].dtype in {torch.bool, torch.uint8}
        return is_one and not self.given["accumulate"] and self.given["values"].dim() == 0

    def written(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (tensor, stand-in) of every argument that the operator writes to."""
        for argument, tensor in self.tensors():
            if argument.is_write and id(tensor) in self._twins:
                yield self._twins[id(tensor)]

    def on_meta(self) -> Any:
        """Return what torch's meta kernel returns for stand-ins."""
        stand_ins = {name: self._meta(value) for name, value in self.given.items()}
        if "generator" in stand_ins:
            stand_ins["generator"] = None
        returns = self.op._schema.returns
        if not torch._C._dispatch_has_kernel_for_dispatch_key(self.op._name, "Meta"):
            if self.name in _LIKE:
                return torch.empty_like(stand_ins[_LIKE[self.name]])
            if not returns:  # it writes to what it is given
                return None
        returned = self.op.redispatch(META, **stand_ins)
        if (
            len(returns) == 1
            and returns[0].alias_info is not None
            and returns[0].alias_info.is_write
        ):
            return next(
                twin for _, twin in self.written()
            )  # of which some kernels in Python return a copy
        return returned

    def _common_device(self) -> int | None:
        found: torch.device | None = None
        for argument, tensor in self.tensors():
            if self.is_indexing and argument.name == "indices":
                continue
            if tensor.device.type == "cpu" and tensor.dim() == 0 and not argument.is_write:
                continue
            if found is None:
                found = tensor.device
            elif found != tensor.device:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {found} and "
                    f"{tensor.device}! (when checking argument for argument {argument.name} in method {self.op._name})"
                )
        if found is not None and found.type != self._type:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {found} and {self._type}"
            )
        return None if found is None else int(found.index)

    def _meta(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == self._type:
                return self._twin(value)
            return torch.empty((), dtype=value.dtype, device="meta") if value.dim() == 0 else value
        if isinstance(value, list | tuple):
            return [self._meta(each) for each in value]
        return torch.device("meta") if isinstance(value, torch.device) else value

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._twins.get(id(tensor))
        if known is not None:
            return known[1]
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        if offset:
            whole = torch.empty(offset + span(size, stride), dtype=tensor.dtype, device="meta")
            twin = whole.as_strided(size, stride, offset)
        else:
            twin = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        self._twins[id(tensor)] = (tensor, twin)
        self.by_twin[id(twin)] = tensor
        self.owners[twin.untyped_storage()._cdata] = tensor
        return twin


# ---- What it returned

Key = tuple[Any, ...]
MOST = 20_000
"""Plans that are kept of an operator."""
_NUMBERS = frozenset(
    {
        "number",
        "float",
        "List[number]",
        "List[float]",
        "Optional[float]",
        "Optional[number]",
        "Tensor",
    }
)
_SCALES = ("_foreach_", "_fused_", "_amp_")
_WITHIN = SPACING - 1


class Operands:
    """The tensors of a call on the device, and their storages' keys."""

    __slots__ = ("_nbytes", "key", "keys", "tensors")

    def __init__(
        self,
        operator: Operator,
        nbytes: dict[int, int],
        args: Iterable[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.keys: list[int] = []
        self._nbytes = nbytes
        parts: list[Any] = []
        seen: dict[int, int] = {}
        for place, value in enumerate(args):
            self._look(value, parts, seen, place in operator.loose)
        for name, value in kwargs.items():
            parts.append(name)
            self._look(value, parts, seen, name in operator.loose)
        self.key: Key = tuple(parts)

    def _look(self, value: Any, parts: list[Any], seen: dict[int, int], is_loose: bool) -> None:
        if isinstance(value, torch.Tensor):
            device = value.get_device()
            if device < 0:
                parts += (value.device, value.dtype, value.shape)
                return
            address = value.data_ptr()
            key = address // SPACING
            self.tensors.append(value)
            self.keys.append(key)
            parts += (
                device,
                value.dtype,
                value.shape,
                value.stride(),
                address & _WITHIN,
                self._nbytes.get(key),
                seen.setdefault(key, len(seen)),
            )
        elif isinstance(value, list | tuple):
            parts.append(len(value))
            for each in value:
                self._look(each, parts, seen, is_loose)
        elif not isinstance(value, torch.Generator):
            parts.append(type(value))
            if not (is_loose and isinstance(value, int | float | complex)):
                parts.append(value)


class Operator:
    """One of torch's operators, and what it returned so far.

    Args:
        op: the operator.
    """

    __slots__ = ("loose", "name", "op", "plans")

    def __init__(self, op: Any) -> None:
        self.op = op
        self.name = op._name.removeprefix("aten::")
        self.plans: dict[Key, Plan] = {}
        keeps_size = torch.Tag.pointwise in op.tags or self.name.partition(".")[0].endswith("_")
        scales = keeps_size or self.name.startswith(_SCALES)
        self.loose: set[int | str] = set()
        """Arguments that are numbers on which no result's size or type depends."""
        for place, argument in enumerate(op._schema.arguments):
            kind = str(argument.type)
            if kind == "Tensor" or (scales and kind in _NUMBERS):
                self.loose |= {place, argument.name}


class Plan:
    """What a call returns.

    Args:
        call: the call.
        operands: its tensors.
        returned: what the meta kernel returned, or an operand.
        device: the index of the device on which new tensors are.
        scratch: the bytes of what the kernel allocates for itself.
    """

    __slots__ = ("_device", "_made", "_recipe", "_scratch")

    def __init__(
        self, call: Call, operands: Operands, returned: Any, device: int, scratch: Iterable[int]
    ) -> None:
        self._device = device
        self._scratch = [Form((nbytes,), (1,), torch.uint8, device) for nbytes in scratch]
        self._made: dict[int, int] = {}
        """Where among what is made a new storage of the meta kernel's is."""
        self._recipe = self._recipe_of(
            call, {id(each): at for at, each in enumerate(operands.tensors)}, returned
        )

    def _recipe_of(self, call: Call, tensors: dict[int, int], value: Any) -> Recipe:
        """Return what makes a value: an operand itself, a view of one, a new tensor or a view of one, or no tensor."""
        if isinstance(value, list | tuple):
            kind, parts = type(value), [self._recipe_of(call, tensors, each) for each in value]
            return lambda given, storages, made: kind(part(given, storages, made) for part in parts)
        if not isinstance(value, torch.Tensor):
            return lambda *_: value
        known = call.by_twin.get(id(value)) if value.is_meta else value
        if known is not None:
            at = tensors[id(known)]
            return lambda given, *_: given[at]
        storage = value.untyped_storage()
        how = value.dtype, value.shape, value.stride(), value.storage_offset()
        owner = call.owners.get(storage._cdata)
        if owner is not None:
            at = tensors[id(owner)]
            return lambda given, *_: as_view(given[at], *how)
        if storage._cdata in self._made:
            at = self._made[storage._cdata]
            return lambda _, __, made: as_view(made[at], *how)
        self._made[storage._cdata] = len(self._made)
        if value.storage_offset():
            raise NotImplementedError("a new tensor that begins within its storage")
        form = Form(value.shape, value.stride(), value.dtype, self._device, storage.nbytes())

        def make(
            _: list[torch.Tensor], storages: Storages, made: list[torch.Tensor]
        ) -> torch.Tensor:
            made.append(storages.make(form))
            return made[-1]

        return make

    def result(self, tensors: list[torch.Tensor], storages: Storages) -> Any:
        """Return what the call returns, in new storages."""
        result = self._recipe(tensors, storages, [])
        if self._scratch:
            [storages.make(form) for form in self._scratch]
        return result


Recipe = Callable[[list[torch.Tensor], Storages, list[torch.Tensor]], Any]
"""Makes a result of a call's tensors, in new storages; the third is what has been made before."""
