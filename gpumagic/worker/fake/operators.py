"""Answers every operator on the device by shape, from torch's own meta kernels.

torch decides above this what an operator is made of, by the same code as for a real out-of-tree device, since the
tensors are plain ones of that device. What arrives here are the kernels. Views are made by the CPU's own kernels,
which only touch sizes; everything else runs on meta tensors, and its results are given storages of their own.
Operators whose results are as large as values say (masks, positions, distinct values) are in `worker/reading.py`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.worker.fake import dtypes
from gpumagic.worker.fake.allocator import FakeLedger
from gpumagic.worker.fake.backend import FakeModule
from gpumagic.worker.fake.calls import MOST, Call, Operands, Operator, Plan
from gpumagic.worker.fake.scratch import as_left, is_unknown, scratch
from gpumagic.worker.fake.storages import CPU, Form, Storages
from gpumagic.worker.reading import FakeReading

aten = torch.ops.aten
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

VIEWS = ("as_strided", "view", "view.dtype", "_reshape_alias", "alias", "unfold", "view_as_real", "view_as_complex",
         "_conj", "_neg_view", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
         "detach", "squeeze", "squeeze.dim", "squeeze.dims", "_unsafe_view", "resolve_conj", "resolve_neg")  # fmt: skip
"""Kernels of the CPU's that look at sizes only and give a view of the tensor they get."""

_FINITE = "gradients are taken to be finite, so that a gradient scaler steps"
WHOLE = ("record_stream", "equal", "convolution_overrideable", "convolution_backward_overrideable", "native_layer_norm",
         "native_group_norm", "_fused_rms_norm", "native_channel_shuffle", "silu_backward", "mish_backward", "all.dims",
         "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "conj_physical_", "addr", "mode.values",
         "_linalg_solve_ex", "index.Tensor", "mse_loss", "smooth_l1_loss")  # fmt: skip
"""Operators that devices run as one kernel and that torch would else take apart."""


class Operators:
    """The device's kernels, for the life of the process.

    Args:
        module: knows the current device.
        storages: makes storages.
        ledger: is told which operator runs.
        contents: knows small values.
        assume: called with a sentence for each thing that is assumed.
        is_cuda: whether the device stands for CUDA's.
    """

    def __init__(
        self,
        module: FakeModule,
        storages: Storages,
        ledger: FakeLedger,
        contents: FakeReading,
        assume: Callable[[str], None],
        is_cuda: bool,
    ) -> None:
        self._module = module
        self._is_cuda = is_cuda
        self._storages = storages
        self._ledger = ledger
        self._contents = contents
        self._name = torch._C._get_privateuse1_backend_name()
        self._special: dict[str, Callable[..., Any]] = {
            "aten::empty.memory_format": self._empty,
            "aten::empty_strided": self._empty_strided,
            "aten::_copy_from": self._copy_from,
            "aten::_copy_from_and_resize": self._copy_from_and_resize,
            "aten::_local_scalar_dense": contents.scalar,
            "aten::equal": contents.equal,
            "aten::resize_": self._resize,
            "aten::set_": lambda tensor: self._resize(tensor, (0,)),
            "aten::record_stream": lambda *_: None,
            "aten::_fused_sdp_choice": (lambda *_, **__: 0)
            if is_cuda
            else attention,  # `names` has chosen
            "aten::_thnn_fused_gru_cell": gru_cell,
            "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
            "aten::_thnn_fused_lstm_cell": lstm_cell,
            "aten::nonzero": contents.positions,
            "aten::masked_select": contents.masked,
            "aten::_unique2": contents.unique,
            "aten::_amp_foreach_non_finite_check_and_unscale_": lambda *_: assume(_FINITE),
            "aten::convolution_overrideable": functools.partial(
                self._by_shape, Operator(aten.convolution.default)
            ),
            "aten::convolution_backward_overrideable": self._convolution_backward,
        }
        self._convolving_back = functools.partial(
            self._by_shape, Operator(aten.convolution_backward.default)
        )
        self._everything = torch.library.Library("_", "IMPL")
        self._each = torch.library.Library("aten", "IMPL")
        self._one_at_a_time = threading.RLock()  # of the cell's threads
        self.seen: set[str] = set()
        """The operators that were answered."""
        self.is_running = False
        """Whether an operator runs, whose blocks are not all accounted for."""
        self.give_up: Callable[[Exception], None] = lambda _: None
        """Called before a kernel's error leaves into a backward pass, where torch's guard would end the process."""
        self._everything.fallback(self._fallback, "PrivateUse1")
        for operator in taken_apart():
            self._kernel(operator)
        for lazy in (
            "Conjugate",
            "Negative",
        ):  # which torch resolves by copying: the copy must take them as they are
            self._each.impl("_copy_from", torch.library.fallthrough_kernel, lazy)

    def unknown(self) -> list[str]:
        """Return the operators that were answered and of which CUDA's kernels have more than is known."""
        found = {
            name.partition(".")[0].removesuffix("_overrideable")
            for name in self.seen
            if is_unknown(name)
        }
        return sorted(found) if self._is_cuda else []

    def _fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer an operator for the first time; from then on torch finds its kernel, which is quicker."""
        if op.namespace not in {"aten", "prims"}:
            raise CannotDryRun(f"it calls {op._name}, an operator whose memory is not known")
        return self._kernel(Operator(op))(*args, **kwargs)

    def _kernel(self, operator: Operator) -> Callable[..., Any]:
        """Return the kernel of an operator, which is registered then."""
        special = self._special.get(operator.op._name) or functools.partial(
            self._by_shape, operator
        )
        if operator.name in VIEWS:
            special = functools.partial(operator.op.redispatch, CPU)
        kernel = functools.partial(self._answer, operator.name, special)
        if operator.op.namespace == "aten":
            self._each.m.impl(operator.name, "PrivateUse1", kernel, False)
        return kernel

    def _answer(self, name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._one_at_a_time, torch._C.DisableTorchFunction():
            self.is_running = True
            self.seen.add(name)
            self._ledger.begin_operator(name)
            try:
                return kernel(*args, **kwargs)
            except Exception as error:
                if self._ledger.in_backward:
                    self.give_up(error)
                raise
            finally:
                self.is_running = False

    # ---- Making tensors

    def _device(self, device: torch.device | None) -> int:
        index = self._module.index(device)
        if not 0 <= index < self._module.device_count():
            raise RuntimeError(f"{self._name} error: invalid device ordinal")
        return index

    def _empty(
        self, size: Any, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
    ) -> Any:
        return self._new(tuple(size), memory_format or torch.contiguous_format, dtype, device)

    def _empty_strided(
        self, size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any
    ) -> Any:
        return self._new(tuple(size), tuple(stride), dtype, device)

    def _new(
        self,
        size: tuple[int, ...],
        how: Any,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> Any:
        return self._storages.make(
            _form(size, how, dtype or torch.get_default_dtype(), self._device(device))
        )

    def _resize(self, tensor: torch.Tensor, size: Any, memory_format: Any = None) -> torch.Tensor:
        self._fit(tensor, torch.empty(size, dtype=tensor.dtype, device="meta"))
        return tensor

    def _fit(self, tensor: torch.Tensor, shape: torch.Tensor) -> None:
        """Give a tensor another size, and a larger storage if it needs one."""
        needed = shape.untyped_storage().nbytes()
        if needed <= self._storages.nbytes_of(tensor):
            aten.as_strided_.default.redispatch(
                CPU, tensor, shape.shape, shape.stride(), tensor.storage_offset()
            )
            return
        self._ledger.operator = "resize_"
        storage = self._storages.make(
            Form((needed,), (1,), torch.uint8, tensor.device.index)
        ).untyped_storage()
        aten.set_.source_Storage_storage_offset.redispatch(
            CPU, tensor, storage, tensor.storage_offset(), shape.shape, shape.stride()
        )

    # ---- Copies

    def _copy_from(
        self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        (self._contents.copy if target.device.type == self._name else self._contents.fetch)(
            source, target
        )
        return target

    def _copy_from_and_resize(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.resize_(source.shape)
        return self._copy_from(source, target)

    # ---- Kernels by shape

    def _by_shape(self, operator: Operator, *args: Any, **kwargs: Any) -> Any:
        operands = Operands(operator, self._storages.nbytes, args, kwargs)
        plan = operator.plans.get(operands.key)
        if plan is None:
            return self._by_meta_kernel(operator, operands, args, kwargs)
        result = plan.result(operands.tensors, self._storages)
        known = self._contents.known
        if known.may_follow(operator.op, operands.keys):
            known.follow(operator.op, args, kwargs, result)
        return result

    def _by_meta_kernel(
        self, operator: Operator, operands: Operands, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        op = operator.op
        call = Call(op, args, kwargs, self._name)
        dtypes.refuse(call, self._is_cuda)
        is_like_others = True
        """Whether another call of the same metadata does the same."""
        fills = self._is_cuda and call.fills_by_mask()
        if call.is_indexing and not fills:
            indices, before = (
                self._contents.indices(call, torch.device(self._name, call.device)),
                call.given["indices"],
            )
            is_like_others = len(indices) == len(before) and all(
                a is b for a, b in zip(indices, before, strict=True)
            )
            call.given["indices"] = indices
        device = call.device if call.device is not None else self._device(call.given.get("device"))
        if fills:
            returned = args[0]
        else:
            returned = as_left(call, call.on_meta()) if self._is_cuda else call.on_meta()
            for tensor, twin in call.written():
                if twin.shape != tensor.shape or twin.stride() != tensor.stride():
                    self._fit(tensor, twin)
                    is_like_others = False
        plan = Plan(call, operands, returned, device, scratch(call) if self._is_cuda else ())
        result = plan.result(operands.tensors, self._storages)
        self._contents.known.follow(op, args, kwargs, result)
        if is_like_others:
            if len(operator.plans) >= MOST:  # it is called with ever other sizes
                operator.plans.clear()
            operator.plans[operands.key] = plan
        return result

    def _convolution_backward(self, grad: Any, images: Any, weight: Any, *how: Any) -> Any:
        is_transposed, groups = how[3], how[5]
        channels = [weight.shape[1] * groups if is_transposed else weight.shape[0]]
        return self._convolving_back(grad, images, weight, channels, *how)


@functools.cache
def _form(size: tuple[int, ...], how: Any, dtype: torch.dtype, device: int) -> Form:
    """Return what an empty tensor looks like, by its strides or its memory format."""
    if isinstance(how, tuple):
        return Form(size, how, dtype, device)
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=how)
    return Form(shape.shape, shape.stride(), dtype, device)


@functools.cache
def taken_apart() -> list[Operator]:
    """Return the operators that a device runs as one kernel and that torch would call as "make room", "fill it".

    It takes a tenth of a second, once: dry runs find them in the process that they are forked from.
    """
    made_by_torch = torch._C._dispatch_get_registrations_for_dispatch_key(
        "CompositeExplicitAutogradNonFunctional"
    )
    names = {
        name for name in WHOLE if hasattr(aten, name.partition(".")[0])
    }  # not all are in every torch
    for name in made_by_torch:
        if name.startswith("aten::") and "linalg" not in name and _has_kernel(name, "CPU"):
            names.add(name.removeprefix("aten::"))
    split = (name.partition(".") for name in sorted(names))
    return [
        Operator(getattr(getattr(aten, base), overload or "default")) for base, _, overload in split
    ]


def gru_cell(_input_gates: Any, _hidden_gates: Any, hx: Any, *_: Any) -> tuple[Any, ...]:
    """Return the new state and what backward needs."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def gru_cell_backward(grad: Any, _workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    """Return the gradients of gates, state and biases."""
    rows, columns = grad.shape
    gates = [grad.new_empty(rows, 3 * columns) for _ in range(2)]
    biases = [grad.new_empty(3 * columns) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


def lstm_cell(input_gates: Any, _hidden_gates: Any, cx: Any, *_: Any) -> tuple[Any, ...]:
    """Return the new state and cell, and what backward needs."""
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)


def attention(*args: Any, **kwargs: Any) -> int:
    """Let the CPU's kernel choose, which reads sizes only: tensors never written to cost no memory."""

    def host(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return made.requires_grad_(value.requires_grad)

    return int(
        torch._fused_sdp_choice(
            *map(host, args), **{name: host(value) for name, value in kwargs.items()}
        )
    )
