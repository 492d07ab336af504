"""What an operator returned for operands of some metadata, kept: the same metadata get the same again.

The key has what torch's meta kernels look at: shapes, strides, types, offsets and devices of the operands, which of
them share a storage and how large that is, and every other argument. Numbers that scale or fill count by their type
only, so that a learning rate that changes is not a new key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gpumagic.dryrun.worker.fake.calls import Call
from gpumagic.dryrun.worker.fake.storages import SPACING, Form, Storages, as_view

Key = tuple[Any, ...]
MOST = 20_000
"""Keys of an operator; of one that is called with ever other sizes all are forgotten then."""
_NUMBERS = frozenset(
    {"number", "float", "List[number]", "List[float]", "Optional[float]", "Optional[number]", "Tensor"}
)
_SCALES = ("_foreach_", "_fused_", "_amp_")
_WITHIN = SPACING - 1


class Operands:
    """The tensors of a call on the device, and their storages' keys."""

    __slots__ = ("_nbytes", "key", "keys", "tensors")

    def __init__(self, operator: Operator, nbytes: dict[int, int], args: Iterable[Any], kwargs: dict[str, Any]) -> None:
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
                device, value.dtype, value.shape, value.stride(), address & _WITHIN, self._nbytes.get(key),
                seen.setdefault(key, len(seen)),
            )  # fmt: skip
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

    def keep(self, key: Key, plan: Plan) -> None:
        """Keep what it returned."""
        if len(self.plans) >= MOST:
            self.plans.clear()
        self.plans[key] = plan


class Given:
    """An operand itself, by its place among the tensors."""

    def __init__(self, place: int) -> None:
        self.place = place


class View:
    """A view: of an operand by its place, or of what was made before, counted backwards from -1."""

    def __init__(self, place: int, shape: torch.Tensor) -> None:
        self.place = place
        self.how = shape.dtype, shape.shape, shape.stride(), shape.storage_offset()


class Fixed:
    """What is no tensor."""

    def __init__(self, value: object) -> None:
        self.value = value


Recipe = Given | View | Fixed | Form | list["Recipe"] | tuple["Recipe", ...]


class Plan:
    """What a call returns.

    Args:
        call: the call.
        operands: its tensors.
        returned: what the meta kernel returned, or an operand.
        device: the index of the device on which new tensors are.
        scratch: the bytes of what the kernel allocates for itself.
    """

    __slots__ = ("_made", "_scratch", "recipe")

    def __init__(self, call: Call, operands: Operands, returned: Any, device: int, scratch: Iterable[int]) -> None:
        self._scratch = [Form((nbytes,), (1,), torch.uint8, device) for nbytes in scratch]
        self._made: dict[int, int] = {}
        tensors = {id(each): place for place, each in enumerate(operands.tensors)}
        self.recipe = self._recipe(call, tensors, returned, device)

    def _recipe(self, call: Call, tensors: dict[int, int], value: Any, device: int) -> Recipe:
        if isinstance(value, list | tuple):
            return type(value)(self._recipe(call, tensors, each, device) for each in value)
        if not isinstance(value, torch.Tensor):
            return Fixed(value)
        known = call.by_twin.get(id(value)) if value.is_meta else value
        if known is not None:
            return Given(tensors[id(known)])
        storage = value.untyped_storage()
        owner = call.owners.get(storage._cdata)
        if owner is not None:
            return View(tensors[id(owner)], value)
        if storage._cdata in self._made:
            return View(-1 - self._made[storage._cdata], value)
        self._made[storage._cdata] = len(self._made)
        if value.storage_offset():
            raise NotImplementedError("a new tensor that begins within its storage")
        return Form(value.shape, value.stride(), value.dtype, device, storage.nbytes())

    def result(self, tensors: list[torch.Tensor], storages: Storages) -> Any:
        """Return what the call returns, in new storages."""
        recipe = self.recipe
        if type(recipe) is Form:
            result: Any = storages.make(recipe)
        elif type(recipe) is Given:
            result = tensors[recipe.place]
        else:
            result = _result(recipe, tensors, storages, [])
        if self._scratch:
            [storages.make(form) for form in self._scratch]
        return result


def _result(recipe: Recipe, tensors: list[torch.Tensor], storages: Storages, made: list[torch.Tensor]) -> Any:
    if isinstance(recipe, list | tuple):
        return type(recipe)(_result(each, tensors, storages, made) for each in recipe)
    if isinstance(recipe, Form):
        made.append(storages.make(recipe))
        return made[-1]
    if isinstance(recipe, Given):
        return tensors[recipe.place]
    if isinstance(recipe, View):
        return as_view(tensors[recipe.place] if recipe.place >= 0 else made[-1 - recipe.place], *recipe.how)
    return recipe.value
