"""One operator's call: its tensors on the device, their stand-ins on torch's meta device, and which are written to."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from gpumagic.dryrun.worker.fake.storages import span

META = DispatchKeySet(DispatchKey.Meta)
_TAKE_HOST_INDICES = frozenset({
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put",
    "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_unsafe_masked_index",
    "aten::_unsafe_masked_index_put_accumulate",
})  # fmt: skip


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

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> None:
        self.op = op
        # torch made a tensor of a Python number, and that arrives here as the number again.
        self.args = [
            torch.tensor(value, device="cpu")
            if str(argument.type) == "Tensor" and isinstance(value, int | float | complex)
            else value
            for argument, value in zip(op._schema.arguments, args, strict=False)
        ]
        self.kwargs = kwargs
        self._type = device_type
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.by_twin: dict[int, torch.Tensor] = {}
        """What each stand-in stands for, by its identity."""
        self.owners: dict[int, torch.Tensor] = {}
        """The same by the stand-in's storage."""
        self.asked_for: torch.device | None = None
        self.target: torch.Tensor
        """What a call that is settled returns."""
        self.is_indexing = op._name in _TAKE_HOST_INDICES
        self.device = self._common_device()

    def named(self) -> Iterator[tuple[Any, Any]]:
        """Yield (schema argument, value) of every argument that was given."""
        schema = self.op._schema.arguments
        for position, argument in enumerate(schema):
            if position < len(self.args):
                yield argument, self.args[position]
            elif argument.name in self.kwargs:
                yield argument, self.kwargs[argument.name]

    def set(self, name: str, value: Any) -> bool:
        """Replace an argument, a list of tensors; return whether it is what it was."""
        names = [argument.name for argument in self.op._schema.arguments]
        place = names.index(name)
        if place < len(self.args):
            before, self.args[place] = self.args[place], value
        else:
            before, self.kwargs = self.kwargs[name], {**self.kwargs, name: value}
        return len(before) == len(value) and all(map(operator.is_, before, value))

    def tensors(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield (schema argument, tensor) of every tensor, those in lists included."""
        for argument, value in self.named():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, torch.Tensor):
                    yield argument, each

    def is_settled(self) -> bool:
        """Return whether it writes element by element to a tensor that has the right size already.

        Most calls are of this kind, since torch makes room before it calls a kernel; they need no meta kernel.
        """
        if torch.Tag.pointwise not in self.op.tags or self.device is None:
            return False
        shapes: list[Any] = []
        targets: list[Any] = []
        for argument, value in self.named():
            if isinstance(value, torch.Tensor):
                (targets if argument.is_write else shapes).append(value.shape)
        if len(targets) != 1:
            return False
        self.target = next(value for argument, value in self.named() if argument.is_write)
        # In-place operators read what they write to.
        return len(self.op._schema.returns) == 1 and _broadcast(shapes or targets, targets[0])

    def fills_by_mask(self) -> bool:
        """Return whether it writes one number where a mask says, for which CUDA lays out no positions."""
        if not self.is_indexing or not any(argument.is_write for argument in self.op._schema.arguments):
            return False
        given = {argument.name: value for argument, value in self.named()}
        masks = [each for each in given["indices"] if each is not None]
        is_one = len(masks) == 1 and masks[0].dtype in {torch.bool, torch.uint8}
        return is_one and not given.get("accumulate") and given["values"].dim() == 0

    def written(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (tensor, stand-in) of every argument that the operator writes to."""
        for argument, tensor in self.tensors():
            if argument.is_write and id(tensor) in self._twins:
                yield self._twins[id(tensor)]

    def on_meta(self) -> Any:
        """Return what torch's meta kernel returns for stand-ins."""
        kwargs = {name: self._meta(value) for name, value in self.kwargs.items() if name != "generator"}
        return self.op.redispatch(META, *(self._meta(value) for value in self.args), **kwargs)

    def _common_device(self) -> int | None:
        found: torch.device | None = None
        for _, value in self.named():
            if isinstance(value, torch.device):
                self.asked_for = value
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
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} and {self._type}")
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


def _broadcast(shapes: list[Any], target: Any) -> bool:
    """Return whether tensors of these shapes together have the target's; a smaller one may be written in place."""
    reached = [1] * len(target)
    for shape in shapes:
        if len(shape) > len(target):
            return False
        for place in range(1, len(shape) + 1):
            extent = shape[-place]
            if extent not in {1, target[-place]}:
                return False
            if extent != 1:
                reached[-place] = extent
    return reached == list(target)
