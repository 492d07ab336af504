"""One operator's call, with stand-ins for its tensors on torch's meta device; and what it returned, kept in a plan.

Runs in the worker's process. Calls with operands of the same metadata get the same again. The key of a plan has what
torch's meta kernels look at: shapes, strides, types, offsets and devices of the operands, which of them share a storage
and how large that is, and every other argument. Numbers that scale or fill count by their type only, so that a learning
rate that changes is not a new key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from gpumagic.worker.fake.storages import (
    SPACING,
    Form,
    Storages,
    as_view,
    form_of_bytes,
    span,
)

Given = dict[str, Any]
"""A call's arguments by name."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor and its stand-in."""
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
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device_type: str,
    ) -> None:
        self.op = op
        self.name: str = op._schema.name.removeprefix("aten::").rstrip("_")
        """The operator's, in place or not, without its overload."""
        self.given: Given = {}
        """Every argument, by name."""
        for place, argument in enumerate(op._schema.arguments):
            if place < len(args):
                value = args[place]
            else:
                value = kwargs.get(argument.name, argument.default_value)
            is_number = isinstance(value, int | float | complex)
            if is_number and str(argument.type) == "Tensor":
                value = _as_tensor(value, args)
            self.given[argument.name] = value
        self._type = device_type
        self._twins: dict[int, Pair] = {}
        """Each tensor with its stand-in, by the tensor's identity."""
        self.by_twin: dict[int, torch.Tensor] = {}
        """What each stand-in stands for, by the stand-in's identity."""
        self.owners: dict[int, torch.Tensor] = {}
        """The same by the stand-in's storage."""
        self.is_indexing = op._name in _TAKE_HOST_INDICES
        """Whether it takes indices on the host beside operands on the device."""
        self.device = self._common_device()
        """The index of the device that all operands are on; None where it has none."""

    def tensors(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield (schema argument, tensor) of every tensor, those in lists included."""
        for argument in self.op._schema.arguments:
            value = self.given[argument.name]
            items = value if isinstance(value, list | tuple) else (value,)
            for item in items:
                if isinstance(item, torch.Tensor):
                    yield argument, item

    def fills_by_mask(self) -> bool:
        """Return whether it writes one number where a mask says; CUDA then does not compute the positions."""
        writes = any(argument.is_write for argument in self.op._schema.arguments)
        if not self.is_indexing or not writes or self.given["accumulate"]:
            return False
        indices = [index for index in self.given["indices"] if index is not None]
        if len(indices) != 1 or indices[0].dtype not in _MASKS:
            return False
        return bool(self.given["values"].dim() == 0)

    def written(self) -> Iterator[Pair]:
        """Yield every argument that the operator writes to, with its stand-in."""
        for argument, tensor in self.tensors():
            if argument.is_write and id(tensor) in self._twins:
                yield self._twins[id(tensor)]

    def on_meta(self) -> Any:
        """Return what torch's meta kernel returns for stand-ins."""
        stand_ins = {name: self._stand_in(value) for name, value in self.given.items()}
        if "generator" in stand_ins:
            stand_ins["generator"] = None
        returns = self.op._schema.returns
        if not torch._C._dispatch_has_kernel_for_dispatch_key(self.op._name, "Meta"):
            if self.name in _LIKE:
                return torch.empty_like(stand_ins[_LIKE[self.name]])
            if not returns:  # it writes to what it is given
                return None
        returned = self.op.redispatch(META, **stand_ins)
        if len(returns) == 1:
            alias = returns[0].alias_info
            if alias is not None and alias.is_write:
                # The operand itself is returned; some meta kernels in Python return a copy.
                _, written = next(self.written())
                return written
        return returned

    def _common_device(self) -> int | None:
        common: torch.device | None = None
        for argument, tensor in self.tensors():
            if self.is_indexing and argument.name == "indices":
                continue
            device = tensor.device
            is_number_of_host = device.type == "cpu" and tensor.dim() == 0
            if is_number_of_host and not argument.is_write:
                continue
            if common is None:
                common = device
            elif common != device:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {common} and "
                    f"{device}! (when checking argument for argument {argument.name} in method {self.op._name})"
                )
        if common is None:
            return None
        if common.type != self._type:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {common} and {self._type}"
            )
        return int(common.index)

    def _stand_in(self, value: Any) -> Any:
        """Return an argument as the meta kernel gets it."""
        if isinstance(value, torch.Tensor):
            if value.device.type == self._type:
                return self._twin(value)
            if value.dim() == 0:
                return torch.empty((), dtype=value.dtype, device="meta")
            return value
        if isinstance(value, list | tuple):
            return [self._stand_in(item) for item in value]
        if isinstance(value, torch.device):
            return torch.device("meta")
        return value

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a tensor, always the same."""
        known = self._twins.get(id(tensor))
        if known is not None:
            return known[1]
        size = tensor.shape
        stride = tensor.stride()
        offset = tensor.storage_offset()
        if offset:
            extent = offset + span(size, stride)
            whole = torch.empty(extent, dtype=tensor.dtype, device="meta")
            twin = whole.as_strided(size, stride, offset)
        else:
            twin = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        self._twins[id(tensor)] = (tensor, twin)
        self.by_twin[id(twin)] = tensor
        self.owners[twin.untyped_storage()._cdata] = tensor
        return twin


_MASKS = frozenset({torch.bool, torch.uint8})


def _as_tensor(number: complex, args: Sequence[Any]) -> torch.Tensor:
    """Return the tensor that torch had made of a Python number, which arrives as the number again.

    Args:
        number: the number.
        args: the call's arguments, of which the first tensor that is no mask says the type.
    """
    dtype = None
    for value in args:
        if isinstance(value, torch.Tensor) and value.dtype != torch.bool:
            dtype = torch.result_type(value, number)
            break
    return torch.tensor(number, dtype=dtype, device="cpu")


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
"""Types of arguments, as a schema says them, that may be a Python number or some."""
_SCALES = ("_foreach_", "_fused_", "_amp_")
"""How the names of operators begin that only scale or fill by the numbers that they are given."""
_WITHIN = SPACING - 1
"""Masks an address, for where in its storage it lies."""


class Operands:
    """The tensors of a call on the device, and their storages' keys.

    It is made at every call, so it looks at each argument once.

    Args:
        operator: what is called.
        nbytes: of each storage, by its key.
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

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

    def _look(
        self, value: Any, parts: list[Any], seen: dict[int, int], is_loose: bool
    ) -> None:
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
            for item in value:
                self._look(item, parts, seen, is_loose)
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
        is_in_place = self.name.partition(".")[0].endswith("_")
        keeps_size = torch.Tag.pointwise in op.tags or is_in_place
        scales = keeps_size or self.name.startswith(_SCALES)
        self.loose: set[int | str] = set()
        """Arguments that may be numbers on which no result's size or type depends, by place and by name."""
        for place, argument in enumerate(op._schema.arguments):
            kind = str(argument.type)
            if kind == "Tensor" or (scales and kind in _NUMBERS):
                self.loose.add(place)
                self.loose.add(argument.name)


class Plan:
    """What a call returns.

    Args:
        call: the call.
        operands: its tensors.
        returned: what the meta kernel returned, or an operand.
        device: the index of the device on which new tensors are.
        scratch: the bytes of each block that the kernel allocates for itself.
    """

    __slots__ = ("_device", "_made", "_recipe", "_scratch")

    def __init__(
        self,
        call: Call,
        operands: Operands,
        returned: Any,
        device: int,
        scratch: Iterable[int],
    ) -> None:
        self._device = device
        self._scratch = [form_of_bytes(nbytes, device) for nbytes in scratch]
        self._made: dict[int, int] = {}
        """The number of each new storage of the meta kernel's, in the order in which a recipe makes them."""
        places = {id(tensor): place for place, tensor in enumerate(operands.tensors)}
        self._recipe = self._recipe_of(call, places, returned)

    def _recipe_of(self, call: Call, places: dict[int, int], value: Any) -> Recipe:
        """Return what makes a value that the meta kernel returned: an operand, a view of one, or something new.

        Args:
            call: the call.
            places: where among the call's tensors each operand is, by its identity.
            value: the value, or a part of it.
        """
        if isinstance(value, list | tuple):
            parts = [self._recipe_of(call, places, item) for item in value]
            return _sequence_of(type(value), parts)
        if not isinstance(value, torch.Tensor):
            return lambda *_: value
        operand = call.by_twin.get(id(value)) if value.is_meta else value
        if operand is not None:
            place = places[id(operand)]
            return lambda tensors, *_: tensors[place]
        storage = value.untyped_storage()
        geometry = (value.dtype, value.shape, value.stride(), value.storage_offset())
        owner = call.owners.get(storage._cdata)
        if owner is not None:
            place = places[id(owner)]
            return lambda tensors, *_: as_view(tensors[place], *geometry)
        number = self._made.get(storage._cdata)
        if number is not None:
            return lambda _, __, made: as_view(made[number], *geometry)
        self._made[storage._cdata] = len(self._made)
        if value.storage_offset():
            raise NotImplementedError("a new tensor that begins within its storage")
        form = Form(
            size=value.shape,
            stride=value.stride(),
            dtype=value.dtype,
            device=self._device,
            nbytes=storage.nbytes(),
        )
        return _new_tensor(form)

    def result(self, tensors: list[torch.Tensor], storages: Storages) -> Any:
        """Return what the call returns, in new storages."""
        result = self._recipe(tensors, storages, [])
        if self._scratch:
            # All are alive at once, and end together.
            [storages.make(form) for form in self._scratch]
        return result


Tensors = list[torch.Tensor]
Recipe = Callable[[Tensors, Storages, Tensors], Any]
"""Makes a result of a call's tensors, in new storages; the third is what has been made before."""


def _sequence_of(
    kind: Callable[[Iterable[Any]], Any], parts: Sequence[Recipe]
) -> Recipe:
    return lambda tensors, storages, made: kind(
        part(tensors, storages, made) for part in parts
    )


def _new_tensor(form: Form) -> Recipe:
    def make(
        _: list[torch.Tensor], storages: Storages, made: list[torch.Tensor]
    ) -> torch.Tensor:
        tensor = storages.make(form)
        made.append(tensor)
        return tensor

    return make
