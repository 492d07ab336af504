"""What of a notebook is sent and how: by name, by its parts, or as a word for it."""

from __future__ import annotations

import copyreg
import functools
import io
import logging
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from gpumagic._compat import torch_private
from gpumagic.backends import IN_TREE
from gpumagic.dryrun import parts
from gpumagic.heap.storages import plain, undisturbed


def _cell(cell: types.CellType) -> Any:
    try:
        contents: tuple[Any, ...] = (cell.cell_contents,)
    except ValueError:
        contents = ()
    return types.CellType, (), contents, None, None, parts.fill_cell


def _is_general(obj: Any) -> bool:
    """Return whether a stream or an event is torch's of any accelerator, of one that has no class of its own."""
    return type(obj).__module__ == "torch" and obj.device.type not in IN_TREE


def _stream(stream: Any) -> Any:
    if _is_general(stream):
        return type(stream), (str(stream.device),)
    number = getattr(stream, f"{stream.device.type}_stream", stream.stream_id)
    return parts.make_stream, (str(stream.device), int(number), int(getattr(stream, "priority", 0)))


def _loader_iterator(iterator: Any) -> Any:
    """Let it begin anew: what it has of its own is a generator or its processes."""
    from torch.utils.data import DataLoader, IterableDataset

    loader = torch_private.loader_of(iterator)
    if loader is None or isinstance(loader.dataset, IterableDataset):
        return _absent(iterator)
    again = DataLoader(loader.dataset, batch_sampler=loader.sampler, collate_fn=loader.collate)
    return iter, (again,)


def _weak(reference: weakref.ReferenceType[Any]) -> Any:
    """Return a reference to what is sent of the object, without a callback; what only it leads to is gone there too."""
    target = reference()
    if target is None:
        return parts.dead_reference, ()
    key = (reference.key,) if type(reference) is weakref.KeyedRef else ()
    return type(reference), (target, None, *key)


def _as_it_is(obj: Any) -> Any:
    """Return it with its attributes: its own way of being pickled saves tensors of the device as bytes."""
    return object.__new__, (type(obj),), dict(vars(obj)), None, None, parts.fill_object


def _absent(obj: object) -> Any:
    return parts.Absent, (described(obj),)


def _cached(function: Any) -> Any:
    """Return how a function of `functools.lru_cache` is sent: without what it has cached."""
    wrapped = (parts.make_cached, (function.__wrapped__, function.cache_parameters()))
    return NotImplemented if is_importable(function) else wrapped


def _type_variable(variable: Any) -> Any:
    """Return how a variable of types is sent that the notebook has made: by its name alone."""
    return (
        (type(variable), (variable.__name__,))
        if variable.__module__ == "__main__"
        else NotImplemented
    )


def _hook(handle: Any) -> Any:
    """Return how a hook's handle is sent whose module is gone; None for others, which go as they are."""
    there = [handle.hooks_dict_ref(), *(ref() for ref in handle.extra_dict_ref)]
    return (parts.Absent, (described(handle),)) if any(each is None for each in there) else None


_EXACTLY: dict[type, Callable[[Any], Any]] = {
    functools._lru_cache_wrapper: _cached,
    typing.TypeVar: _type_variable,
    typing.ParamSpec: _type_variable,
    typing.NewType: lambda obj: (typing.NewType, (obj.__name__, obj.__supertype__)),
    types.CellType: _cell,
    weakref.ReferenceType: _weak,
    weakref.WeakMethod: _weak,
    weakref.KeyedRef: _weak,
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
    threading.local: lambda _: (threading.local, ()),
    types.MappingProxyType: lambda obj: (types.MappingProxyType, (dict(obj),)),
}
"""How objects are sent that go in another way than pickle's."""
_BY_BASE: dict[str, Callable[[Any], Any]] = {
    "builtins.property": lambda obj: (type(obj), (obj.fget, obj.fset, obj.fdel, obj.__doc__)),
    "builtins.staticmethod": lambda obj: (type(obj), (obj.__func__,)),
    "builtins.classmethod": lambda obj: (type(obj), (obj.__func__,)),
    "_io._IOBase": _absent,
    "threading.Condition": _absent,  # whoever waits for it would wait for ever
    "threading.Thread": _absent,
    "logging.Handler": lambda _: (logging.NullHandler, ()),
    "concurrent.futures.thread.ThreadPoolExecutor": lambda obj: (type(obj), (obj._max_workers,)),
    "skorch.net.NeuralNet": _as_it_is,
    "torch.utils.hooks.RemovableHandle": _hook,
    "builtins.BaseException": lambda obj: (
        copyreg.__newobj__,  # type: ignore[attr-defined]
        (type(obj), *obj.args),
        dict(vars(obj)) or None,
    ),
    "torch.Stream": _stream,
    "torch.Event": lambda obj: (
        (type(obj), (str(obj.device),))
        if _is_general(obj)
        else (parts.make_event, (obj.device.type,))
    ),
    torch_private.GENERATOR: lambda obj: (
        None
        if obj.device.type == "cpu"
        else (parts.make_generator, (str(obj.device), obj.initial_seed()))
    ),
    torch_private.LOADER_ITERATOR: _loader_iterator,
}
"""The same by the name of a class, for objects of classes that are made of it."""
_LOGS = (
    "wandb.",
    "comet_ml.",
    "aim.",
    "clearml.",
    "neptune.",
    "tensorboardX.",
    "torch.utils.tensorboard.",
)
"""Libraries whose objects take notes of a run and decide nothing."""
_usual: weakref.WeakSet[type] = weakref.WeakSet([io.StringIO, io.BytesIO])
"""Classes that were looked up in vain, and files that have all in them."""


_PARAMETRIZED = "torch.nn.utils.parametrize.Parametrized"
"""How the names of classes begin that torch makes for one module each; their objects refuse to be pickled."""


def special(obj: Any) -> Any:
    """Return how an object is sent that goes in another way than pickle's; None for others."""
    kind = type(obj)
    if kind in _EXACTLY:
        return _EXACTLY[kind](obj)
    if kind in _usual:
        return None
    names = [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]
    if names[0].startswith(_LOGS):
        return parts.Absent, (described(obj), True)
    if names[0].startswith(_PARAMETRIZED):
        return _as_it_is(obj)
    found = next((_BY_BASE[name] for name in names if name in _BY_BASE), None)
    if found is None:
        _usual.add(kind)
    return None if found is None else found(obj)


IS_HEAP_TYPE = 1 << 9


def builtin_class(kind: type) -> Any:
    """Return how to find a class of C's that has no name where it says, such as that of functions."""
    name = next((name for name, each in vars(types).items() if each is kind), None)
    return (
        (parts.Absent, (f"the class {kind.__name__}",))
        if name is None
        else (getattr, (types, name))
    )


def _is_found(module: types.ModuleType | None) -> bool:
    is_ours = module is None or module.__name__ in {"__main__", "__mp_main__"}
    return not is_ours and bool(getattr(module, "__file__", "builtin"))


def module_of(names: Mapping[str, Any]) -> str | None:
    """Return the module that has these global names, if a fresh process finds it; no code of the user's is asked."""
    name = names.get("__name__") if type(names) is dict else None
    module = sys.modules.get(name) if type(name) is str else None
    return (
        module.__name__
        if module is not None and vars(module) is names and _is_found(module)
        else None
    )


def is_importable(obj: Any) -> bool:
    """Return whether a fresh process finds the same object by its name."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if not _is_found(module):
        return False
    found: Any = module
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def shared_state(obj: Any) -> dict[str, Any] | None:
    """Return the attributes that all objects of a class share, as those of accelerate's states do; None for others."""
    attributes: dict[str, Any] | None = getattr(obj, "__dict__", None)
    shares = attributes is not None and attributes is getattr(type(obj), "_shared_state", None)
    return dict(attributes) if shares and attributes is not None else None


def holders(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names that hold tensors: they keep alive what the cell may let go of."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = []
    for name, value in list(namespace.items()):
        within = list(value.values()) if type(value) is dict else value
        if any(
            _holds(torch, each)
            for each in (within[:1000] if type(within) in {list, tuple} else [value])
        ):
            found.append(name)
    return found


def _holds(torch: Any, value: Any) -> bool:
    """Return whether it may keep something of a device's alive, which a tensor on the CPU does not."""
    if issubclass(type(value), torch.Tensor):
        with undisturbed():
            return bool(plain(value, "device").type != "cpu")
    return issubclass(type(value), (torch.nn.Module, torch.optim.Optimizer))


def described(obj: Any) -> str:
    """Return a word for an object that cannot be sent."""
    kind = type(obj)
    article = "an" if kind.__name__[:1].lower() in "aeiou" else "a"
    return f"{article} {kind.__module__}.{kind.__qualname__}"
