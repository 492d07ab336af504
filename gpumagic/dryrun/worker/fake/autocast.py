"""`torch.autocast` on the device of the dry run: torch's own lists of which operators run in which precision.

They are those of `ATen/autocast_mode.h`, which torch gives to CUDA and to out-of-tree devices alike; an out-of-tree
device has to apply them itself. What torch lists for CUDA and is in none of these runs in float32.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet


def _listed(names: str) -> list[str]:
    return names.split()


LOWER = _listed("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
FLOAT32_RESULT = _listed("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
WIDEST = _listed("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add stack cat
""")

_BELOW = DispatchKeySet(getattr(DispatchKey, "AutocastPrivateUse1"))  # noqa: B009  # missing from torch's own stubs


class Autocast:
    """Registers the lists.

    Args:
        device_type: the name of the device of the dry run.
    """

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._cache: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._libraries: list[Any] = []

    def register(self) -> None:
        """Make the lists hold, for the life of the process."""
        rest = torch.library.Library("_", "IMPL")
        rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        listed = torch.library.Library("aten", "IMPL")
        in_float32 = functools.partial(self._in, torch.float32)
        all_names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        ours = (each.removeprefix("aten::") for each in all_names if not each.startswith("aten::cudnn"))
        others = set(ours) - {*LOWER, *FLOAT32_RESULT, *WIDEST, "binary_cross_entropy"}
        policies = ((LOWER, self._in_lower), (others, in_float32), (FLOAT32_RESULT, self._to_float32),
                    (WIDEST, self._in_widest))  # fmt: skip
        for names, policy in policies:
            for name in names:
                self._impl(listed, name, policy)
        self._impl(listed, "binary_cross_entropy", _refuse)
        self._libraries += [rest, listed]
        clear = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            clear()
            self._cache.clear()

        torch.clear_autocast_cache = clear_autocast_cache

    def _impl(self, library: Any, name: str, policy: Callable[..., Any]) -> None:
        op = _op(name)
        if op is None:
            return  # torch's lists grow; this torch is older

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_BELOW):
                return policy(op, args, kwargs)

        library.impl(op, kernel, "AutocastPrivateUse1")

    def _in_lower(self, op: Any, args: Any, kwargs: Any) -> Any:
        return self._in(torch.get_autocast_dtype(self._type), op, args, kwargs)

    def _in(self, dtype: torch.dtype, op: Any, args: Any, kwargs: Any) -> Any:
        return op(*self._cast(args, dtype), **self._cast(kwargs, dtype))

    def _to_float32(self, op: Any, args: Any, kwargs: Any) -> Any:
        names = [argument.name for argument in op._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if self._is_eligible(args[0]) and given.get("dtype") is None:
            given["dtype"] = torch.float32
        return op(**given)

    def _in_widest(self, op: Any, args: Any, kwargs: Any) -> Any:
        flat = [each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, list) else [value])]
        is_wide = any(self._is_eligible(each) and each.dtype == torch.float32 for each in flat)
        return self._in(torch.float32 if is_wide else torch.get_autocast_dtype(self._type), op, args, kwargs)

    def _is_eligible(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        with torch._C.DisableTorchFunction():  # under `Names` the device would say another name
            is_here = value.device.type == self._type
        return bool(is_here and value.is_floating_point() and value.dtype != torch.float64)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return [self._cast(each, dtype) for each in value]
        if isinstance(value, dict):
            return {name: self._cast(each, dtype) for name, each in value.items()}
        if not self._is_eligible(value) or value.dtype == dtype:
            return value
        is_lower = dtype != torch.float32 and value.dtype == torch.float32
        is_weight = is_lower and value.requires_grad and value.is_leaf and not value._is_view()
        return self._cached(value, dtype) if is_weight else value.to(dtype)

    def _cached(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight in lower precision, made once until the outermost autocast ends."""
        known = self._cache.get(id(weight))
        if known is not None and known[0]() is weight:
            return known[1]
        made = weight.to(dtype)
        if torch.is_autocast_cache_enabled():
            self._cache[id(weight)] = weakref.ref(weight), made
        return made


def _op(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _refuse(*_: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss instead."
    )
