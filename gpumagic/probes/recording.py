"""The mode that sets the default device and sees the moves: torch's own device context, with eyes.

It is a subclass of the context that `with torch.device(...)` enters, so torch treats it as that everywhere
(`torch.get_default_device`, `torch.compile`, nesting). Functions that neither create nor move pass with one
dictionary look-up.

This module defines a subclass of a torch class, so it imports torch at its top; it is itself imported only when
a cell is run on a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from gpumagic.probes.transfers import TransferLog, is_host

Handler = Callable[["RecordingContext", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class RecordingContext(DeviceContext):
    """The default device of a block, and the record of what its calls create and move.

    Args:
        device: where new tensors go.
        log: where calls are counted.
        cause: what to say did a move, instead of the function itself (`print` calls many).
    """

    def __init__(self, device: str, log: TransferLog, cause: str | None = None) -> None:
        super().__init__(device)
        self.log = log
        self.cause = cause
        self._handler = _handlers().get

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True  # IPython leaves such frames out of the user's traceback
        handler = self._handler(func)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def add_move(
        self, subject: object, result: torch.Tensor, seconds: float, cause: str, *, non_blocking: bool = False
    ) -> None:
        """Count a move if ``result`` lies elsewhere than ``subject``; reading back to the host is also a wait.

        Where a move also converts, CUDA does that before the copy on the way to a device and in a non-blocking
        read, else after it (torch's aten/src/ATen/native/cuda/Copy.cu, with peer access between devices).
        """
        source = _device(subject) if isinstance(subject, torch.Tensor) else "cpu"
        target = _device(result)
        if source == target or "meta" in (source, target):
            return
        converted = is_host(source) or (is_host(target) and non_blocking)
        crossing = result if converted or not isinstance(subject, torch.Tensor) else subject
        nbytes = result.numel() * crossing.element_size()
        self.log.add_move(source, target, nbytes, seconds, self.cause or cause, subject, result)
        if is_host(target):
            self.log.add_sync()

    def add_read(self, tensor: torch.Tensor, nbytes: int, seconds: float, cause: str) -> None:
        """Count Python values read from a device tensor: a copy to the host that the host waits for."""
        self.log.add_move(_device(tensor), "cpu", nbytes, seconds, self.cause or cause, tensor)
        self.log.add_sync()


@cache
def _handlers() -> dict[Callable[..., Any], Handler]:
    tensor = torch.Tensor
    table: dict[Callable[..., Any], Handler] = {}
    table.update(dict.fromkeys(_device_constructors(), _construct))
    table.update(dict.fromkeys(_found(torch, _CREATORS) + _found(tensor, _METHOD_CREATORS), _create))
    table.update(dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), _construct_from_host))
    table[tensor.new_tensor] = _new_tensor
    backend = torch._C._get_privateuse1_backend_name()
    table.update(dict.fromkeys(_found(tensor, ("to", "cuda", "cpu", "xpu", "type", backend)), _move))
    table[tensor.copy_] = _copy
    table.update(dict.fromkeys(_found(tensor, _ITEMS) + _found(torch, ("is_nonzero",)), _item))
    table[tensor.tolist] = _tolist
    table[tensor.__repr__] = _print
    table[tensor.__format__] = _format
    table.update(dict.fromkeys(_found(torch, _SYNCS) + _found(tensor, _SYNCS), _sync))
    return table


_CREATORS = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "normal")
_METHOD_CREATORS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
_ITEMS = ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero")
_SYNCS = ("nonzero", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "argwhere")


def _found(owner: object, names: tuple[str, ...]) -> list[Callable[..., Any]]:
    return [getattr(owner, name) for name in names if hasattr(owner, name)]


def _construct(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    if kwargs.get("device") is None:
        generator = kwargs.get("generator")
        # A generator works on its own device only, so it says where; DataLoader's sampler relies on it.
        kwargs = {**kwargs, "device": context.device if generator is None else generator.device}
    return _create(context, func, args, kwargs)


def _create(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        context.log.add_created(_device(result), _nbytes(result))
    return result


def _construct_from_host(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    if kwargs.get("device") is None and not _has_device(args):
        kwargs = {**kwargs, "device": context.device}
    subject = args[0] if args else next(iter(kwargs.values()), None)
    return _from_host(context, func, args, kwargs, subject)


def _has_device(args: tuple[Any, ...]) -> bool:
    return any(isinstance(each, torch.device) for each in args[1:])  # as_tensor(x, dtype, device) takes it by place


def _new_tensor(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    return _from_host(context, func, args, kwargs, args[1] if len(args) > 1 else kwargs.get("data"))


def _from_host(
    context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], subject: object
) -> Any:
    """Call a constructor that copies Python, numpy or tensor data, which is a move if the target is elsewhere."""
    __tracebackhide__ = True
    start = time.perf_counter()
    result = func(*args, **kwargs)
    seconds = time.perf_counter() - start
    if result is not subject:
        context.log.add_created(_device(result), _nbytes(result))
    context.add_move(subject, result, seconds, func.__name__)
    return result


def _move(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    start = time.perf_counter()
    result = func(*args, **kwargs)
    seconds = time.perf_counter() - start
    if isinstance(result, torch.Tensor):  # tensor.type() without arguments names the type
        context.add_move(args[0], result, seconds, f".{func.__name__}", non_blocking=_is_non_blocking(args, kwargs))
    return result


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # The first flag by place, in every form of `to`, `cuda`, `cpu` and `copy_`.
    return bool(kwargs.get("non_blocking", next((each for each in args if isinstance(each, bool)), False)))


def _copy(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    start = time.perf_counter()
    result = func(*args, **kwargs)
    seconds = time.perf_counter() - start
    source = args[1] if len(args) > 1 else kwargs["src"]
    context.add_move(source, result, seconds, "copy_", non_blocking=_is_non_blocking(args, kwargs))
    return result


def _item(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    tensor = args[0]
    if _is_free_to_read(tensor) or tensor.numel() != 1:
        return func(*args, **kwargs)
    start = time.perf_counter()
    result = func(*args, **kwargs)
    context.add_read(tensor, tensor.element_size(), time.perf_counter() - start, _spoken(func.__name__))
    return result


def _tolist(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    start = time.perf_counter()
    result = func(*args, **kwargs)
    if not _is_free_to_read(args[0]):
        context.add_read(args[0], _nbytes(args[0]), time.perf_counter() - start, ".tolist")
    return result


def _format(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    if args[0].dim() == 0:
        return _item(context, func, args, kwargs)
    text = _print(context, torch.Tensor.__repr__, args[:1], {})
    return format(text, args[1])


def _print(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Format a tensor with a second context in force, so that the copies formatting makes are seen one by one."""
    from torch._tensor_str import _str

    tensor = args[0]
    if _is_free_to_read(tensor) or type(tensor).__repr__ is not torch.Tensor.__repr__:
        return func(*args, **kwargs)
    with RecordingContext(str(context.device), context.log, cause="print"):
        return _str(tensor, **kwargs)


def _sync(context: RecordingContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    result = func(*args, **kwargs)
    if isinstance(args[0], torch.Tensor) and not is_host(_device(args[0])):
        context.log.add_sync()
    return result


def _spoken(name: str) -> str:
    """Return ``"bool()"`` for ``"__bool__"`` and ``".item"`` for ``"item"``."""
    return f"{name.strip('_')}()" if name.startswith("__") else f".{name}"


def _is_free_to_read(tensor: torch.Tensor) -> bool:
    return tensor.device.type in ("cpu", "meta")


def _device(tensor: torch.Tensor) -> str:
    return str(tensor.device)


def _nbytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.numel() * tensor.element_size()
