"""Answers every operator on the device by shape, from torch's own meta kernels. Runs in the worker's process.

torch decides above this what an operator is made of, by the same code as for a real out-of-tree device, since the
tensors are plain ones of that device. What arrives here are the kernels. Views are made by the CPU's own kernels, which
only touch sizes; everything else runs on meta tensors, and its results are given storages of their own. Operators whose
results are as large as values say (masks, positions, distinct values) are in `worker/reading.py`.
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
from gpumagic.worker.fake.backend import Args, FakeModule, Kwargs
from gpumagic.worker.fake.calls import MOST, Call, Operands, Operator, Plan
from gpumagic.worker.fake.scratch import as_left, is_unknown, scratch
from gpumagic.worker.fake.storages import CPU, Form, Storages, form_of_bytes
from gpumagic.worker.reading import FakeReading

Kernel = Callable[..., Any]
"""Answers an operator."""
aten = torch.ops.aten
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

VIEWS = ("as_strided", "view", "view.dtype", "_reshape_alias", "alias", "unfold", "view_as_real", "view_as_complex",
         "_conj", "_neg_view", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
         "detach", "squeeze", "squeeze.dim", "squeeze.dims", "_unsafe_view", "resolve_conj", "resolve_neg")  # fmt: skip
"""Kernels of the CPU's that look at sizes only and return a view of the tensor that they get."""

_FINITE = "gradients are taken to be finite, so that a gradient scaler steps"
WHOLE = ("record_stream", "equal", "convolution_overrideable", "convolution_backward_overrideable", "native_layer_norm",
         "native_group_norm", "_fused_rms_norm", "native_channel_shuffle", "silu_backward", "mish_backward", "all.dims",
         "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "conj_physical_", "addr", "mode.values",
         "_linalg_solve_ex", "index.Tensor", "mse_loss", "smooth_l1_loss")  # fmt: skip
"""Operators that devices run as one kernel and that torch would otherwise take apart."""


class Operators:
    """The device's kernels, for the life of the process.

    Args:
        module: knows the current device.
        storages: makes storages.
        ledger: notes which operator runs.
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
        self._convolve = self._kernel_by_shape(Operator(aten.convolution.default))
        self._convolve_back = self._kernel_by_shape(
            Operator(aten.convolution_backward.default)
        )
        self._special: dict[str, Kernel] = {
            "aten::empty.memory_format": self._empty,
            "aten::empty_strided": self._empty_strided,
            "aten::_copy_from": self._copy_from,
            "aten::_copy_from_and_resize": self._copy_from_and_resize,
            "aten::_local_scalar_dense": contents.scalar,
            "aten::equal": contents.equal,
            "aten::resize_": self._resize,
            "aten::set_": lambda tensor: self._resize(tensor, (0,)),
            "aten::record_stream": lambda *_: None,
            # For CUDA, `names` has chosen already.
            "aten::_fused_sdp_choice": _composite_attention if is_cuda else attention,
            "aten::_thnn_fused_gru_cell": gru_cell,
            "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
            "aten::_thnn_fused_lstm_cell": lstm_cell,
            "aten::nonzero": contents.positions,
            "aten::masked_select": contents.masked,
            "aten::_unique2": contents.unique,
            "aten::_amp_foreach_non_finite_check_and_unscale_": lambda *_: assume(
                _FINITE
            ),
            "aten::convolution_overrideable": self._convolve,
            "aten::convolution_backward_overrideable": self._convolution_backward,
        }
        """Operators that are answered in another way than by shape."""
        self._every_operator = torch.library.Library("_", "IMPL")
        self._by_name = torch.library.Library("aten", "IMPL")
        self._one_at_a_time = threading.RLock()  # of the cell's threads
        self.seen: set[str] = set()
        """The operators that were answered."""
        self.is_running = False
        """Whether an operator runs, of which not all blocks are accounted for yet."""
        self.give_up: Callable[[Exception], None] = lambda _: None
        """Called before a kernel's error leaves into a backward pass, where torch's guard would end the process."""
        self._every_operator.fallback(self._fallback, "PrivateUse1")
        for operator in taken_apart():
            self._register(operator)
        # torch resolves lazy conjugates and negatives by copying: the copy has to take them as they are.
        for lazy in ("Conjugate", "Negative"):
            self._by_name.impl("_copy_from", torch.library.fallthrough_kernel, lazy)

    def unknown(self) -> list[str]:
        """Return the operators that were answered and of which it is not known what CUDA's kernels allocate."""
        if not self._is_cuda:
            return []
        names = set()
        for name in self.seen:
            if is_unknown(name):
                base, _, _ = name.partition(".")
                names.add(base.removesuffix("_overrideable"))
        return sorted(names)

    def _fallback(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer an operator for the first time; from then on torch finds its kernel, which is quicker."""
        if op.namespace not in {"aten", "prims"}:
            raise CannotDryRun(
                f"it calls {op._name}, an operator whose memory is not known"
            )
        kernel = self._register(Operator(op))
        return kernel(*args, **kwargs)

    def _register(self, operator: Operator) -> Kernel:
        """Register the kernel of an operator, and return it."""
        op = operator.op
        if operator.name in VIEWS:
            answer: Kernel = functools.partial(op.redispatch, CPU)
        else:
            answer = self._special.get(op._name) or self._kernel_by_shape(operator)
        kernel = functools.partial(self._answer, operator.name, answer)
        if op.namespace == "aten":
            self._by_name.m.impl(operator.name, "PrivateUse1", kernel, False)
        return kernel

    def _kernel_by_shape(self, operator: Operator) -> Kernel:
        return functools.partial(self._by_shape, operator)

    def _answer(self, name: str, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
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
        self,
        size: Any,
        dtype: Any = None,
        device: Any = None,
        memory_format: Any = None,
        **_: Any,
    ) -> Any:
        return self._new(
            tuple(size), memory_format or torch.contiguous_format, dtype, device
        )

    def _empty_strided(
        self,
        size: Any,
        stride: Any,
        dtype: Any = None,
        device: Any = None,
        **_: Any,
    ) -> Any:
        return self._new(tuple(size), tuple(stride), dtype, device)

    def _new(
        self,
        size: tuple[int, ...],
        how: Any,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> Any:
        if dtype is None:
            dtype = torch.get_default_dtype()
        form = _form(size, how, dtype, self._device(device))
        return self._storages.make(form)

    def _resize(
        self, tensor: torch.Tensor, size: Any, memory_format: Any = None
    ) -> torch.Tensor:
        shape = torch.empty(size, dtype=tensor.dtype, device="meta")
        self._fit(tensor, shape)
        return tensor

    def _fit(self, tensor: torch.Tensor, shape: torch.Tensor) -> None:
        """Give a tensor the size and strides of another, and a larger storage if it needs one."""
        size = shape.shape
        stride = shape.stride()
        offset = tensor.storage_offset()
        needed = shape.untyped_storage().nbytes()
        if needed <= self._storages.nbytes_of(tensor):
            aten.as_strided_.default.redispatch(CPU, tensor, size, stride, offset)
            return
        self._ledger.operator = "resize_"
        larger = self._storages.make(form_of_bytes(needed, tensor.device.index))
        aten.set_.source_Storage_storage_offset.redispatch(
            CPU, tensor, larger.untyped_storage(), offset, size, stride
        )

    # ---- Copies

    def _copy_from(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        non_blocking: bool = False,
    ) -> torch.Tensor:
        if target.device.type == self._name:
            self._contents.copy(source, target)
        else:
            self._contents.fetch(source, target)
        return target

    def _copy_from_and_resize(
        self, source: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        target.resize_(source.shape)
        return self._copy_from(source, target)

    # ---- Kernels by shape

    def _by_shape(self, operator: Operator, *args: Any, **kwargs: Any) -> Any:
        """Answer a call by the plan that an earlier call of the same metadata made, or make one."""
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
        self,
        operator: Operator,
        operands: Operands,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Answer a call of metadata that was not seen yet, and keep how for the next one where it will be alike."""
        op = operator.op
        call = Call(op, args, kwargs, self._name)
        dtypes.refuse(call, self._is_cuda)
        is_repeatable = True
        """Whether another call of the same metadata does the same."""
        fills = self._is_cuda and call.fills_by_mask()
        if call.is_indexing and not fills:
            is_repeatable = self._take_indices(call)
        device = call.device
        if device is None:
            device = self._device(call.given.get("device"))
        if fills:
            returned = args[0]
        else:
            returned = call.on_meta()
            if self._is_cuda:
                returned = as_left(call, returned)
            for tensor, twin in call.written():
                is_same = (
                    twin.shape == tensor.shape and twin.stride() == tensor.stride()
                )
                if not is_same:
                    self._fit(tensor, twin)
                    is_repeatable = False
        allocated = scratch(call) if self._is_cuda else ()
        plan = Plan(call, operands, returned, device, allocated)
        result = plan.result(operands.tensors, self._storages)
        self._contents.known.follow(op, args, kwargs, result)
        if is_repeatable:
            if len(operator.plans) >= MOST:  # each call has other sizes
                operator.plans.clear()
            operator.plans[operands.key] = plan
        return result

    def _take_indices(self, call: Call) -> bool:
        """Give a call its indices on the device, masks as positions; return whether they are those that it had."""
        before = call.given["indices"]
        device = torch.device(self._name, call.device)
        indices = self._contents.indices(call, device)
        call.given["indices"] = indices
        if len(indices) != len(before):
            return False
        return all(
            index is original for index, original in zip(indices, before, strict=True)
        )

    def _convolution_backward(
        self, grad: Any, images: Any, weight: Any, *settings: Any
    ) -> Any:
        _stride, _padding, _dilation, is_transposed, _output_padding, groups, *_ = (
            settings
        )
        channels = weight.shape[0]
        if is_transposed:
            channels = weight.shape[1] * groups
        return self._convolve_back(grad, images, weight, [channels], *settings)


@functools.cache
def _form(size: tuple[int, ...], how: Any, dtype: torch.dtype, device: int) -> Form:
    """Return what an empty tensor looks like, by its strides or by its memory format."""
    if isinstance(how, tuple):
        return Form(size, how, dtype, device)
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=how)
    return Form(shape.shape, shape.stride(), dtype, device)


@functools.cache
def taken_apart() -> list[Operator]:
    """Return the operators that a device runs as one kernel and that torch would split into several.

    It takes a tenth of a second, once: dry runs find them in the process that they are forked from.
    """
    made_by_torch = torch._C._dispatch_get_registrations_for_dispatch_key(
        "CompositeExplicitAutogradNonFunctional"
    )
    names = set()
    for name in WHOLE:
        base, _, _ = name.partition(".")
        if hasattr(aten, base):  # not every torch has all of them
            names.add(name)
    for name in made_by_torch:
        if (
            name.startswith("aten::")
            and "linalg" not in name
            and _has_kernel(name, "CPU")
        ):
            names.add(name.removeprefix("aten::"))
    operators = []
    for name in sorted(names):
        base, _, overload = name.partition(".")
        op = getattr(getattr(aten, base), overload or "default")
        operators.append(Operator(op))
    return operators


def _composite_attention(*_: Any, **__: Any) -> int:
    """Return torch's number for attention that is computed in steps."""
    return 0


def gru_cell(
    _input_gates: Any, _hidden_gates: Any, hx: Any, *_: Any
) -> tuple[Any, ...]:
    """Return the new state and what backward needs."""
    rows, columns = hx.shape
    return torch.empty_like(hx), hx.new_empty(rows, 5 * columns)


def gru_cell_backward(grad: Any, _workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    """Return the gradients of gates, state and biases."""
    rows, columns = grad.shape
    width = 3 * columns
    gates = [grad.new_empty(rows, width) for _ in range(2)]
    biases = [None, None]
    if has_bias:
        biases = [grad.new_empty(width) for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


def lstm_cell(
    input_gates: Any, _hidden_gates: Any, cx: Any, *_: Any
) -> tuple[Any, ...]:
    """Return the new state and cell, and what backward needs."""
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)


def attention(*args: Any, **kwargs: Any) -> int:
    """Return the kernel that the CPU chooses for attention; it reads sizes only."""
    on_host = [_like_on_host(value) for value in args]
    named_on_host = {name: _like_on_host(value) for name, value in kwargs.items()}
    return int(torch._fused_sdp_choice(*on_host, **named_on_host))


def _like_on_host(value: Any) -> Any:
    """Return a tensor of the same size on the host, which costs no memory as nothing is written to it."""
    if not isinstance(value, torch.Tensor):
        return value
    size = value.shape
    stride = value.stride()
    like = torch.empty_strided(size, stride, dtype=value.dtype, device="cpu")
    return like.requires_grad_(value.requires_grad)
