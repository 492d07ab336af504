"""Lets the device of the dry run go by the name of one that torch knows, so that code that says ``cuda`` finds it.

Runs in the worker's process. torch keeps the names of its own devices from out-of-tree ones. So the device has a name
of ours, and this mode changes one into the other wherever Python meets torch: ``device="cuda"`` on the way in,
``x.device`` on the way out, `torch.cuda` and `torch.autocast("cuda")` altogether. Attention goes to the kernels that
CUDA has for it; an LSTM, whose memory is cuDNN's, is refused.
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
from gpumagic.worker.fake.backend import OURS, Args, FakeModule, Kwargs, Stream

Function = Callable[..., Any]


class DeviceGenerator(torch.Generator):
    """A generator of the device of the dry run: it has a seed and no numbers."""


def generators(known: str) -> type:
    """Return what stands for `torch.Generator`, and of a device of that name makes a generator of the dry run."""
    real = torch.Generator

    class Generators(type):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            if torch.device(device).type == known:
                return DeviceGenerator("cpu")
            return real(device)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    return Generators("Generator", (), {})


Handler = Callable[[Any, Args, Kwargs], Any]
"""Calls a function of torch's with its arguments, or returns NotImplemented where they need nothing but other names."""


class Names(TorchFunctionMode):
    """Changes one device's name into the other's.

    Args:
        known: the name that the code uses, such as ``"cuda"``.
    """

    def __init__(self, known: str) -> None:
        super().__init__()
        self._known = known
        self._current: Callable[[], int] = lambda: 0
        """Returns the index of the current device."""
        property_of_known = getattr(torch.Tensor, f"is_{known}")  # such as `is_cuda`
        is_known = getattr(property_of_known, "__get__", None)
        self._handlers: dict[Any, Handler | None] = {
            # What the code makes and compares keeps the name that it gave.
            torch.device: lambda device, args, kwargs: device(*args, **kwargs),
            _DEVICE: self._known_device,
            is_known: lambda _, args, __: _is_here(args[0]),
        }
        """By function of torch's what calls it; None for those that need other names only."""
        self._by_name: dict[str, Handler] = {
            known: self._move,
            **dict.fromkeys(
                ("lstm", "gru", "rnn_tanh", "rnn_relu"), self._refuse_recurrent
            ),
        }
        if known == "cuda":
            self._by_name["scaled_dot_product_attention"] = _attend
            self._by_name["group_norm"] = _norm_groups

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        if func not in self._handlers:
            name = getattr(func, "__name__", "")
            self._handlers[func] = self._by_name.get(name)
        handler = self._handlers[func]
        if handler is not None:
            result = handler(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        # A list is built quicker than a generator is gone through, and this is called for each function of torch's.
        args = tuple(
            [self.ours(value) if type(value) in _NAMING else value for value in args]
        )
        if not kwargs:
            return func(*args)
        return func(*args, **{name: self.ours(value) for name, value in kwargs.items()})

    def _known_device(self, get: Any, args: Args, _: Kwargs) -> torch.device:
        """Return a tensor's device by the name that the code uses."""
        device: torch.device = get(*args)
        if device.type != OURS:
            return device
        return torch.device(self._known, device.index)

    def _move(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Do what `Tensor.cuda` does."""
        tensor, *settings = args
        if not isinstance(tensor, torch.Tensor):
            return NotImplemented
        names = ("device", "non_blocking", "memory_format")
        given = dict(zip(names, settings, strict=False)) | kwargs
        named = given.pop("device", None)
        if named is None:
            named = self._known
        if isinstance(named, int):
            device = torch.device(OURS, named)
        else:
            device = self.ours(torch.device(named))
        return torch.Tensor.to(tensor, device, **given)

    def _refuse_recurrent(self, func: Any, args: Args, _: Kwargs) -> Any:
        if args and _is_here(args[0]):
            raise CannotDryRun(
                f"it uses {func.__name__} on {self._known}, and what cuDNN takes for that is not known"
            )
        return NotImplemented

    def ours(self, value: Any) -> Any:
        """Return a device by our name, None for a generator of ours, anything else as it is."""
        kind = type(value)
        if kind is torch.device:
            if value.type != self._known:
                return value
            index = self._current() if value.index is None else value.index
            return torch.device(OURS, index)
        if kind is str and Device.parse(value).backend == self._known:
            return self.ours(torch.device(value))
        return None if kind is DeviceGenerator else value

    def install(self, module: FakeModule) -> None:
        """Make the names hold for the rest of the process."""
        self._current = module.current_device
        _share(getattr(torch, self._known), module)
        # A module that is moved keeps its parameters' identity on CUDA.
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.utils.swap_tensors = functools.partial(_swap, torch.utils.swap_tensors)
        # No stream uses a tensor later here.
        torch.Tensor.record_stream = lambda _tensor, _stream: None
        set_default_device = torch.set_default_device
        torch.set_default_device = lambda device: set_default_device(self.ours(device))
        self._rename_autocast()
        if self._known == "cuda":
            _take_attention()
        self._hold_within_torch()
        self.__enter__()

    def _rename_autocast(self) -> None:
        autocast = torch.amp.autocast_mode.autocast
        begin = autocast.__init__

        def renamed(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            if Device.parse(device_type).backend == self._known:
                device_type = OURS
            begin(context, device_type, *args, **kwargs)

        autocast.__init__ = renamed
        for name in (
            "get_autocast_dtype",
            "is_autocast_enabled",
            "set_autocast_dtype",
            "set_autocast_enabled",
        ):
            function = getattr(torch, name)
            setattr(torch, name, functools.partial(self._called_ours, function))

    def _called_ours(self, function: Function, *args: Any) -> Any:
        return function(*[OURS if value == self._known else value for value in args])

    def _hold_within_torch(self) -> None:
        """Let the mode hold where torch calls back, and in threads.

        It is off while it handles `Tensor.backward` or an operator, and what torch calls from there starts with the
        modes that are on then. It has to hold there too: in what runs again within a backward pass, such as a
        checkpointed part of a model, and in hooks. And a mode is one thread's.
        """
        torch.autograd._engine_run_backward = self._under(
            torch.autograd._engine_run_backward
        )
        hooks = torch.autograd.graph.saved_tensors_hooks
        begin = hooks.__init__

        def hooked(context: Any, pack: Function, unpack: Function) -> None:
            begin(context, self._under(pack), self._under(unpack))

        hooks.__init__ = hooked
        threads: Any = threading.Thread
        threads._bootstrap_inner = self._under(threads._bootstrap_inner)

    def _under(self, function: Function) -> Function:
        def under(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return under


_NAMING = frozenset({torch.device, str, DeviceGenerator})
"""Types of arguments that may name a device."""
_DEVICE = torch.Tensor.device.__get__


def _take_attention() -> None:
    """Let attention be `_attend` where torch's own functions call it, which they do past a mode."""
    functional = torch.nn.functional
    composite = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = lambda *args, **kwargs: _attend(
        composite, args, kwargs
    )


def _attend(composite: Function, args: Args, kwargs: Kwargs) -> Any:
    query = args[0] if args else kwargs.get("query")
    if _is_here(query):
        return attention.attend(composite, *args, **kwargs)
    return composite(*args, **kwargs)


def _norm_groups(norm: Function, args: Args, kwargs: Kwargs) -> Any:
    """Copy an image whose channels lie last before its groups are normalised, as CUDA does."""
    if not args or not _is_here(args[0]):
        return NotImplemented
    image, *others = args
    return norm(image.contiguous(), *others, **kwargs)


def _swap(swap: Callable[..., None], one: Any, other: Any) -> None:
    """Swap two tensors but for their classes and attributes, as where a module is moved to CUDA."""
    swap(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def _is_here(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return bool(value.device.type == OURS)


def _share(theirs: Any, module: FakeModule) -> None:
    """Give `torch.cuda` the functions and streams of the device of the dry run; graphs are refused."""
    homes = [
        theirs,
        getattr(theirs, "random", theirs),
        getattr(theirs, "memory", theirs),
    ]
    for name in dir(FakeModule):
        for home in homes:
            if hasattr(home, name) and not name.startswith("__"):
                setattr(home, name, getattr(module, name))
    replaced: dict[str, Any] = {
        **dict.fromkeys(
            ("Stream", "Event", "current_stream", "default_stream"), Stream
        ),
        "stream": lambda chosen: chosen or Stream(),
        "_initialized": True,
        "is_current_stream_capturing": lambda: False,
    }
    for name in _REFUSED:
        replaced[name] = _refused(name, theirs.__name__)
    for name, value in replaced.items():
        if hasattr(theirs, name):
            setattr(theirs, name, value)
    for name in _OF_DATA_PARALLEL:
        setattr(torch._C, name, _refused("DataParallel", "torch.nn"))


_REFUSED = ("ExternalStream", "CUDAGraph", "graph", "make_graphed_callables", "MemPool")
"""What of `torch.cuda` a dry run does not have."""
_OF_DATA_PARALLEL = ("_broadcast", "_broadcast_coalesced", "_scatter", "_gather")
"""What torch has for CUDA only."""


def _refused(name: str, module: str) -> type:
    """Return a class that is refused as soon as it is called, by a name in a module."""
    return type(name, (_Refused,), {"__module__": module})


class _Refused:
    """What a dry run does not have; libraries may name it in their annotations."""

    def __init__(self, *_: object, **__: object) -> None:
        refused = type(self)
        raise CannotDryRun(
            f"it uses {refused.__module__}.{refused.__name__}, which is not part of a dry run"
        )
