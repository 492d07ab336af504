"""Lets the device of the dry run go by the name of one that torch knows, so that code that says ``cuda`` finds it.

torch keeps the names of its own devices from out-of-tree ones. So the device has a name of ours, and this mode
changes one into the other wherever Python meets torch: ``device="cuda"`` on the way in, ``x.device`` on the way out,
`torch.cuda` and `torch.autocast("cuda")` altogether. Attention goes to the kernels of CUDA's; what cuDNN does with an
LSTM is refused.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpumagic.dryrun.parts import CannotDryRun
from gpumagic.memory.devices import Device
from gpumagic.worker.fake import attention
from gpumagic.worker.fake.backend import OURS, FakeModule, Stream


class DeviceGenerator(torch.Generator):
    """A generator of the device of the dry run: it has a seed and no numbers."""


def generators(known: str) -> type:
    """Return what stands for `torch.Generator`: of a device of that name it makes one of the dry run's."""
    real = torch.Generator

    class Generators(type):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return DeviceGenerator("cpu") if torch.device(device).type == known else real(device)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    return Generators("Generator", (), {})


class Names(TorchFunctionMode):
    """Changes one device's name into the other's.

    Args:
        known: the name that the code uses, such as ``"cuda"``.
    """

    def __init__(self, known: str) -> None:
        super().__init__()
        self._known = known
        self._current: Callable[[], int] = lambda: 0
        is_known = getattr(getattr(torch.Tensor, f"is_{known}"), "__get__", None)
        self._handlers: dict[Any, Any] = {
            # What the code makes and compares keeps the name that it gave.
            torch.device: lambda device, args, kwargs: device(*args, **kwargs),
            _DEVICE: self._known_device,
            is_known: lambda _, args, __: _is_here(args[0]),
        }
        """How functions of torch's are called that need more than names; a handler may leave that to the others."""
        recurrent = dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), self._refuse_recurrent)
        of_cuda = (
            {"scaled_dot_product_attention": _attend, "group_norm": _norm_groups}
            if known == "cuda"
            else {}
        )
        self._by_name = {known: self._move, **recurrent, **of_cuda}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in self._handlers:
            self._handlers[func] = self._by_name.get(getattr(func, "__name__", ""))
        handler = self._handlers[func]
        if handler is not None:
            made = handler(func, args, kwargs or {})
            if made is not NotImplemented:
                return made
        args = tuple([self.ours(each) if type(each) in _NAMING else each for each in args])
        if not kwargs:
            return func(*args)
        return func(*args, **{name: self.ours(value) for name, value in kwargs.items()})

    def _known_device(self, get: Any, args: tuple[Any, ...], _: dict[str, Any]) -> torch.device:
        found: torch.device = get(*args)
        return torch.device(self._known, found.index) if found.type == OURS else found

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(args[0], torch.Tensor):
            return NotImplemented
        how = (
            dict(zip(("device", "non_blocking", "memory_format"), args[1:], strict=False)) | kwargs
        )
        wanted = how.pop("device", None)
        named = self._known if wanted is None else wanted
        device = (
            torch.device(OURS, named) if isinstance(named, int) else self.ours(torch.device(named))
        )
        return torch.Tensor.to(args[0], device, **how)

    def _refuse_recurrent(self, func: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
        if args and _is_here(args[0]):
            raise CannotDryRun(
                f"it uses {func.__name__} on {self._known}, and what cuDNN takes for that is not known"
            )
        return NotImplemented

    def ours(self, value: Any) -> Any:
        """Return a device by our name, anything else as it is; a generator of ours is none."""
        kind = type(value)
        if kind is torch.device:
            if value.type != self._known:
                return value
            return torch.device(OURS, self._current() if value.index is None else value.index)
        if kind is str and Device.parse(value).backend == self._known:
            return self.ours(torch.device(value))
        return None if kind is DeviceGenerator else value

    def install(self, module: FakeModule) -> None:
        """Make the names hold for the rest of the process."""
        self._current = module.current_device
        _share(getattr(torch, self._known), module)
        torch.__future__.set_swap_module_params_on_conversion(
            True
        )  # a module keeps its parameters' identity on CUDA
        torch.utils.swap_tensors = functools.partial(_swap, torch.utils.swap_tensors)
        autocast = torch.amp.autocast_mode.autocast
        begin = autocast.__init__

        def renamed(made: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            begin(
                made,
                OURS if Device.parse(device_type).backend == self._known else device_type,
                *args,
                **kwargs,
            )

        autocast.__init__ = renamed
        set_default_device = torch.set_default_device
        torch.set_default_device = lambda device: set_default_device(self.ours(device))
        for name in (
            "get_autocast_dtype",
            "is_autocast_enabled",
            "set_autocast_dtype",
            "set_autocast_enabled",
        ):
            setattr(torch, name, functools.partial(self._called_ours, getattr(torch, name)))
        torch.Tensor.record_stream = lambda _tensor, _stream: (
            None
        )  # no stream uses a tensor later here
        if self._known == "cuda":  # torch's own functions call it past a mode
            functional = torch.nn.functional
            composite = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = lambda *args, **kwargs: _attend(
                composite, args, kwargs
            )
        # A mode is off while it handles `Tensor.backward` or an operator, and what torch calls from there starts with
        # the modes that are on then. It has to hold there too: in what runs again within a backward pass, a
        # checkpointed part of a model, and in hooks.
        torch.autograd._engine_run_backward = self._under(torch.autograd._engine_run_backward)
        hooks = torch.autograd.graph.saved_tensors_hooks
        make = hooks.__init__

        def hook(made: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
            make(made, self._under(pack), self._under(unpack))

        hooks.__init__ = hook
        threads: Any = threading.Thread  # a mode is one thread's
        threads._bootstrap_inner = self._under(threads._bootstrap_inner)
        self.__enter__()

    def _called_ours(self, real: Callable[..., Any], *args: Any) -> Any:
        return real(*[OURS if each == self._known else each for each in args])

    def _under(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def under(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return under


_NAMING = frozenset({torch.device, str, DeviceGenerator})
_DEVICE = torch.Tensor.device.__get__


def _attend(composite: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_here = _is_here(args[0] if args else kwargs.get("query"))
    return attention.attend(composite, *args, **kwargs) if is_here else composite(*args, **kwargs)


def _norm_groups(norm: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take an image whose channels lie last as CUDA does, which copies it first."""
    if not args or not _is_here(args[0]):
        return NotImplemented
    return norm(args[0].contiguous(), *args[1:], **kwargs)


def _swap(swap: Callable[..., None], one: Any, other: Any) -> None:
    """Swap two tensors, each of which keeps its class and attributes, as a module's parameter does on CUDA."""
    swap(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def _is_here(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return bool(value.device.type == OURS)


def _share(theirs: Any, module: FakeModule) -> None:
    """Give `torch.cuda` the device of the dry run's functions and streams; graphs are refused."""
    for name in dir(FakeModule):
        for home in (theirs, getattr(theirs, "random", theirs), getattr(theirs, "memory", theirs)):
            if hasattr(home, name) and not name.startswith("__"):
                setattr(home, name, getattr(module, name))
    others = {
        **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), Stream),
        "stream": lambda chosen: chosen or Stream(),
        "_initialized": True,
        "is_current_stream_capturing": lambda: False,
        **{
            name: type(name, (_Refused,), {"__module__": theirs.__name__})
            for name in (
                "ExternalStream",
                "CUDAGraph",
                "graph",
                "make_graphed_callables",
                "MemPool",
            )
        },
    }
    for name, value in others.items():
        if hasattr(theirs, name):
            setattr(theirs, name, value)
    for name in (
        "broadcast",
        "broadcast_coalesced",
        "scatter",
        "gather",
    ):  # which torch has for CUDA only
        setattr(torch._C, f"_{name}", type("DataParallel", (_Refused,), {"__module__": "torch.nn"}))


class _Refused:
    """What a dry run does not have; libraries may name it in their annotations."""

    def __init__(self, *_: object, **__: object) -> None:
        raise CannotDryRun(
            f"it uses {type(self).__module__}.{type(self).__name__}, which is not part of a dry run"
        )
