"""Answers every operator on the device by shape, from torch's own meta kernels.

torch decides above this what an operator is made of, by the same code as for a real out-of-tree device, since the
tensors are plain ones of that device. What arrives here are the kernels. Views are made by the CPU's own kernels,
which only touch sizes; everything else runs on meta tensors, and its results are given storages of their own.
Operators whose results are as large as values say (masks, positions, distinct values) are `Selections`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.dryrun.stage.backend import DeviceModule
from gpumagic.dryrun.stage.calls import Call
from gpumagic.dryrun.stage.contents import Contents
from gpumagic.dryrun.stage.ledger import Ledger
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
            "aten::_fused_sdp_choice": attention,
            "aten::_thnn_fused_gru_cell": gru_cell,
            "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
            "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
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
        self.is_running = False
        self.give_up_after: Callable[[], None] | None = None
        """Called when the operator that runs has ended."""

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
                raise CannotDryRun(f"it calls {name}, an operator whose memory is not known")
            self.is_running = True
            self._ledger.begin(name.removeprefix("aten::"))
            try:
                return self._kernel(op, name, args, kwargs)
            except Exception as error:
                if self._ledger.in_backward:
                    self.give_up(error)
                raise
            finally:
                self.is_running = False
                if self.give_up_after is not None:
                    self.give_up_after()

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


class Selections:
    """Sizes such results by what is known of the values, or assumed.

    Args:
        contents: knows small values, and says what is assumed for the others.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def indices(self, call: Call, here: torch.device) -> list[torch.Tensor | None]:
        """Return the indices as the device's kernel gets them: on the device, masks turned into positions."""
        moved: list[torch.Tensor | None] = []
        for index in next(value for argument, value in call.named() if argument.name == "indices"):
            if index is None or index.dtype not in {torch.bool, torch.uint8}:
                moved.append(index if index is None else index.to(here))
                continue
            count = self._contents.selected(index)
            moved += [torch.empty(count, dtype=torch.int64, device=here) for _ in range(index.dim())]
        return moved

    def positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `nonzero` returns."""
        value = self._contents.of(tensor)
        if value is not None:
            return value.nonzero().to(tensor.device)
        count = self._contents.selected(tensor)
        # CUDA's and the CPU's kernels both lay the positions out by dimension.
        return torch.empty(tensor.dim(), count, dtype=torch.int64, device=tensor.device).t()

    def masked(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return what `masked_select` returns."""
        whole = torch.broadcast_tensors(mask, tensor)[0]
        return torch.empty(self._contents.selected(whole), dtype=tensor.dtype, device=tensor.device)

    def unique(self, tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Return what `unique` returns where all values are distinct."""
        self._contents.suppose("all values are taken to be distinct")
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        index = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device)
        return flat, index, torch.empty(tensor.numel(), dtype=torch.int64, device=tensor.device)


def gru_cell(_input_gates: Any, _hidden_gates: Any, hx: Any, *_: Any) -> tuple[Any, ...]:
    """Return the new state and what backward needs."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def gru_cell_backward(grad: Any, _workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    """Return the gradients of gates, state and biases."""
    rows, columns = grad.shape
    gates = [grad.new_empty(rows, 3 * columns) for _ in range(2)]
    biases = [grad.new_empty(3 * columns) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


def lstm_cell_backward(dhy: Any, dcy: Any, cx: Any, _cy: Any, workspace: Any, has_bias: bool) -> Any:
    """Return the gradients of gates, cell and bias."""
    if dhy is None and dcy is None:
        return None, None, None
    gates = torch.empty_like(workspace)
    return gates, torch.empty_like(cx), workspace.new_empty(workspace.shape[1]) if has_bias else None


def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Let the CPU's kernel choose, which reads sizes only: tensors never written to cost no memory."""

    def host(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").requires_grad_(
            tensor.requires_grad and tensor.is_floating_point()
        )

    choice: int = torch._fused_sdp_choice(
        host(query), host(key), host(value), *map(host, args), **{k: host(v) for k, v in kwargs.items()}
    )
    return choice
