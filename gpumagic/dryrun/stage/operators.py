"""Answers every operator on the rehearsed device: by shape, from torch's own meta kernels.

torch decides above this what an operator is made of, by the same code as for a real out-of-tree device, since the
tensors are plain ones of that device. What arrives here are the kernels. Views are made by the CPU's own kernels,
which only touch sizes; everything else runs on meta tensors, and what comes back is given storages of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from gpumagic.dryrun.parts import NotRehearsed
from gpumagic.dryrun.stage import selections
from gpumagic.dryrun.stage.backend import DeviceModule
from gpumagic.dryrun.stage.calls import Call
from gpumagic.dryrun.stage.contents import Contents
from gpumagic.dryrun.stage.ledger import Ledger
from gpumagic.dryrun.stage.selections import Selections
from gpumagic.dryrun.stage.storages import CPU, Storages, key_of

aten = torch.ops.aten
META = DispatchKeySet(DispatchKey.Meta)
DEVICE_TYPE = "privateuseone"

VIEWS = ("as_strided", "view", "view.dtype", "_reshape_alias", "alias", "unfold", "view_as_real", "view_as_complex",
         "_conj", "_neg_view", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
         "detach", "squeeze", "squeeze.dim", "squeeze.dims", "_unsafe_view", "resolve_conj", "resolve_neg")  # fmt: skip
"""Kernels of the CPU's that look at sizes only and give a view of the tensor they get."""

_KNOWN = frozenset({"aten", "prims"})
WHOLE = ("native_layer_norm", "native_group_norm", "native_channel_shuffle", "silu_backward", "mish_backward",
         "all.dims", "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "conj_physical_", "mode.values",
         "_linalg_solve_ex", "index.Tensor", "mse_loss", "smooth_l1_loss")  # fmt: skip
"""Operators that devices run as one kernel and that torch would else take apart."""


class Operators:
    """The device's kernels.

    Args:
        module: knows the current device.
        storages: makes storages.
        ledger: is told which operator runs.
        contents: knows small values.
    """

    def __init__(self, module: DeviceModule, storages: Storages, ledger: Ledger, contents: Contents) -> None:
        self._module = module
        self._storages = storages
        self._ledger = ledger
        self._contents = contents
        self._selections = Selections(contents)
        self._name = torch._C._get_privateuse1_backend_name()
        self._special: dict[str, Callable[..., Any]] = {
            "aten::empty.memory_format": self._empty,
            "aten::empty_strided": self._empty_strided,
            "aten::_copy_from": self._copy_from,
            "aten::_copy_from_and_resize": self._copy_from_and_resize,
            "aten::_local_scalar_dense": contents.scalar,
            "aten::equal": contents.equal,
            "aten::resize_": self._resize,
            "aten::set_": self._set_nothing,
            "aten::record_stream": lambda *_: None,
            "aten::_fused_sdp_choice": selections.attention,
            "aten::_thnn_fused_gru_cell": selections.gru_cell,
            "aten::_thnn_fused_gru_cell_backward": selections.gru_cell_backward,
            "aten::_thnn_fused_lstm_cell_backward_impl": selections.lstm_cell_backward,
            "aten::nonzero": self._selections.positions,
            "aten::masked_select": self._selections.masked,
            "aten::_unique2": self._selections.unique,
            "aten::convolution_overrideable": self._renamed(aten.convolution.default),
            "aten::convolution_backward_overrideable": self._convolution_backward,
        }
        for view in VIEWS:
            self._special[f"aten::{view}"] = self._viewing
        self._libraries: list[Any] = []
        self.give_up: Callable[[Exception], None] = lambda _: None
        """Called before a kernel's error leaves into a backward pass, where torch's guard would end the process."""

    def register(self) -> None:
        """Make these the device's kernels, for the life of the process."""
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(self._answer, "PrivateUse1")
        whole = torch.library.Library("aten", "IMPL")
        for name in (*WHOLE, "record_stream", "equal", "convolution_overrideable",
                     "convolution_backward_overrideable"):  # fmt: skip
            base, _, overload = name.partition(".")
            op = getattr(getattr(aten, base), overload or "default")
            whole.impl(op, _bound(self._answer, op), "PrivateUse1")
        for lazy in ("Conjugate", "Negative"):  # which torch resolves by copying: the copy must take them as they are
            whole.impl("_copy_from", torch.library.fallthrough_kernel, lazy)
        self._libraries += [everything, whole]

    def _answer(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            name = op._name
            if op.namespace not in _KNOWN:
                raise NotRehearsed(f"it calls {name}, an operator whose memory is not known")
            self._ledger.begin(name.removeprefix("aten::"))
            try:
                return self._kernel(op, name, args, kwargs)
            except Exception as error:
                if self._ledger.in_backward:
                    self.give_up(error)
                raise

    def _kernel(self, op: Any, name: str, args: Any, kwargs: Any) -> Any:
        special = self._special.get(name)
        if special is None:
            return self._by_shape(op, args, kwargs)
        if special == self._viewing:
            return op.redispatch(CPU, *args, **kwargs)
        return special(*args, **kwargs)

    def _viewing(self) -> None:
        """Stand for the kernels in `VIEWS`."""

    # ---- Making tensors

    def _device(self, device: torch.device | None) -> int:
        index = self._module.index(device)
        if not 0 <= index < self._module.device_count():
            raise RuntimeError(f"{self._name} error: invalid device ordinal")
        return index

    def _empty(
        self, size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
        memory_format: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
        return self._storages.new(shape.shape, shape.stride(), shape.dtype, self._device(device))

    def _empty_strided(
        self, size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> torch.Tensor:
        return self._storages.new(size, stride, dtype or torch.get_default_dtype(), self._device(device))

    def _resize(self, tensor: torch.Tensor, size: Any, memory_format: Any = None) -> torch.Tensor:
        shape = torch.empty(size, dtype=tensor.dtype, device="meta")
        self._fit(tensor, shape)
        return tensor

    def _set_nothing(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._resize(tensor, (0,))

    def _fit(self, tensor: torch.Tensor, shape: torch.Tensor) -> None:
        """Give a tensor another size, and a larger storage if it needs one."""
        needed = shape.untyped_storage().nbytes()
        if needed <= self._storages.nbytes_of(tensor):
            aten.as_strided_.default.redispatch(CPU, tensor, shape.shape, shape.stride(), tensor.storage_offset())
            return
        self._ledger.operator = "resize_"
        storage = self._storages.new((needed,), (1,), torch.uint8, tensor.device.index).untyped_storage()
        aten.set_.source_Storage_storage_offset.redispatch(
            CPU, tensor, storage, tensor.storage_offset(), shape.shape, shape.stride()
        )

    # ---- Copies

    def _copy_from(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if target.device.type == self._name:
            self._contents.copy(source, target)
            if source.device.type == "cpu":
                self._ledger.came_from_host(key_of(target))
            return target
        self._contents.fetch(source, target)
        return target

    def _copy_from_and_resize(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.resize_(source.shape)
        return self._copy_from(source, target)

    # ---- Kernels by shape

    def _by_shape(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(op, args, kwargs, self._name)
        if call.is_indexing:
            call.set("indices", self._selections.indices(call, torch.device(self._name, call.device)))
        if call.is_settled():
            result = call.result()
            self._contents.follow(call, result)
            return result
        device = call.device if call.device is not None else self._device(call.asked_for)
        returned = op.redispatch(META, *call.meta_args(), **call.meta_kwargs())
        for tensor, twin in call.written():
            if twin.shape != tensor.shape or twin.stride() != tensor.stride():
                self._fit(tensor, twin)
        made = self._take_back(call, returned, device)
        self._contents.follow(call, made)
        return made

    def _take_back(self, call: Call, returned: Any, device: int) -> Any:
        storages: dict[int, torch.Tensor] = {}

        def one(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            known = call.original(value)
            if known is not None:
                return known
            storage = value.untyped_storage()
            owner = call.owner(storage._cdata) or storages.get(storage._cdata)
            if owner is None:
                made = self._storages.new(value.shape, value.stride(), value.dtype, device, storage.nbytes())
                storages[storage._cdata] = made
                return made if not value.storage_offset() else _view(made, value)
            return _view(owner, value)

        if isinstance(returned, tuple | list):
            return type(returned)(
                one(each) if not isinstance(each, list) else [one(e) for e in each] for each in returned
            )
        return one(returned)

    def _renamed(self, op: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._by_shape(op, args, kwargs)

    def _convolution_backward(
        self, grad: Any, images: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: Any,
        output_padding: Any, groups: Any, output_mask: Any,
    ) -> Any:  # fmt: skip
        channels = [weight.shape[1] * groups if transposed else weight.shape[0]]
        how = stride, padding, dilation, transposed, output_padding, groups, output_mask
        return self._by_shape(aten.convolution_backward.default, (grad, images, weight, channels, *how), {})


def _view(owner: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    flat = aten.view.dtype.redispatch(CPU, owner, shape.dtype) if owner.dtype != shape.dtype else owner
    made: torch.Tensor = aten.as_strided.default.redispatch(
        CPU, flat, shape.shape, shape.stride(), shape.storage_offset()
    )
    return made


def _bound(answer: Callable[..., Any], op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer(op, *args, **kwargs)
