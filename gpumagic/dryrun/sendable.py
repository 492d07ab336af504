"""How each object of a notebook is sent: by its name, in parts, or as a word for it. Runs in the notebook's process."""

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

How = Any
"""How an object is sent, as `pickle.Pickler.reducer_override` returns it: a function that makes it, and its arguments;
NotImplemented for pickle's own way; None where nothing is known of such objects."""


def _cell(cell: types.CellType) -> How:
    try:
        contents: tuple[Any, ...] = (cell.cell_contents,)
    except ValueError:  # it is empty
        contents = ()
    return types.CellType, (), contents, None, None, parts.fill_cell


def _is_general(obj: Any) -> bool:
    """Return whether a stream or an event is of torch's class for accelerators that have none of their own."""
    return type(obj).__module__ == "torch" and obj.device.type not in IN_TREE


def _stream(stream: Any) -> How:
    device = stream.device
    if _is_general(stream):
        return type(stream), (str(device),)
    number = int(getattr(stream, f"{device.type}_stream", stream.stream_id))
    priority = int(getattr(stream, "priority", 0))
    return parts.make_stream, (str(device), number, priority)


def _event(event: Any) -> How:
    if _is_general(event):
        return type(event), (str(event.device),)
    return parts.make_event, (event.device.type,)


def _generator(generator: Any) -> How:
    device = generator.device
    if device.type == "cpu":
        return None
    return parts.make_generator, (str(device), generator.initial_seed())


def _loader_iterator(iterator: Any) -> How:
    """Send it as an iterator that begins anew: what it has of its own is a generator, or its processes."""
    from torch.utils.data import DataLoader, IterableDataset

    loader = torch_private.loader_of(iterator)
    if loader is None or isinstance(loader.dataset, IterableDataset):
        return _absent(iterator)
    again = DataLoader(
        loader.dataset, batch_sampler=loader.sampler, collate_fn=loader.collate
    )
    return iter, (again,)


def _weak(reference: weakref.ReferenceType[Any]) -> How:
    """Send a reference to the sent object, without a callback; what only such references lead to is gone there."""
    target = reference()
    if target is None:
        return parts.dead_reference, ()
    if type(reference) is weakref.KeyedRef:
        return type(reference), (target, None, reference.key)
    return type(reference), (target, None)


def _by_attributes(obj: Any) -> How:
    """Send an object by its attributes: its own way of being pickled saves tensors of the device as bytes."""
    return object.__new__, (type(obj),), dict(vars(obj)), None, None, parts.fill_object


def _absent(obj: object) -> How:
    return parts.Absent, (described(obj),)


def _cached(function: Any) -> How:
    """Send a function under `functools.lru_cache` without what it has cached."""
    if is_importable(function):
        return NotImplemented
    return parts.make_cached, (function.__wrapped__, function.cache_parameters())


def _type_variable(variable: Any) -> How:
    """Send a type variable that the notebook has made by its name alone."""
    if variable.__module__ != "__main__":
        return NotImplemented
    return type(variable), (variable.__name__,)


def _hook(handle: Any) -> How:
    """Send a word for a hook's handle whose module is gone; others are sent as they are."""
    references = [handle.hooks_dict_ref, *handle.extra_dict_ref]
    if any(reference() is None for reference in references):
        return _absent(handle)
    return None


def _property(obj: property) -> How:
    return type(obj), (obj.fget, obj.fset, obj.fdel, obj.__doc__)


def _method_of_class(method: Any) -> How:
    return type(method), (method.__func__,)


def _exception(error: BaseException) -> How:
    make: Any = copyreg.__newobj__  # type: ignore[attr-defined]
    return make, (type(error), *error.args), dict(vars(error)) or None


_EXACTLY: dict[type, Callable[[Any], How]] = {
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
"""By an object's own class what says how it is sent."""
_BY_BASE: dict[str, Callable[[Any], How]] = {
    "builtins.property": _property,
    "builtins.staticmethod": _method_of_class,
    "builtins.classmethod": _method_of_class,
    "_io._IOBase": _absent,
    "threading.Condition": _absent,  # whoever waits for it would wait for ever
    "threading.Thread": _absent,
    "logging.Handler": lambda _: (logging.NullHandler, ()),
    "concurrent.futures.thread.ThreadPoolExecutor": lambda obj: (
        type(obj),
        (obj._max_workers,),
    ),
    "skorch.net.NeuralNet": _by_attributes,
    "torch.utils.hooks.RemovableHandle": _hook,
    "builtins.BaseException": _exception,
    "torch.Stream": _stream,
    "torch.Event": _event,
    torch_private.GENERATOR: _generator,
    torch_private.LOADER_ITERATOR: _loader_iterator,
}
"""The same by the name of a class, for it and all classes that inherit from it."""
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
"""Classes that pickle knows how to send: those that were looked up in vain, and files in memory."""


_PARAMETRIZED = "torch.nn.utils.parametrize.Parametrized"
"""How the names of classes begin that torch makes for one module each; their objects refuse to be pickled."""


def special(obj: Any) -> How:
    """Return how an object is sent, None where pickle knows how."""
    kind = type(obj)
    if kind in _EXACTLY:
        return _EXACTLY[kind](obj)
    if kind in _usual:
        return None
    own_name = _full_name(kind)
    if own_name.startswith(_LOGS):
        return parts.Absent, (described(obj), True)
    if own_name.startswith(_PARAMETRIZED):
        return _by_attributes(obj)
    for base in kind.__mro__:
        send = _BY_BASE.get(_full_name(base))
        if send is not None:
            return send(obj)
    _usual.add(kind)
    return None


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


IS_HEAP_TYPE = 1 << 9
"""The flag of classes that were made while Python ran, as a ``class`` statement does."""


def builtin_class(kind: type) -> How:
    """Send a class of C's that is not where its name says, such as that of functions."""
    for name, known in vars(types).items():
        if known is kind:
            return getattr, (types, name)
    return parts.Absent, (f"the class {kind.__name__}",)


def _is_found(module: types.ModuleType | None) -> bool:
    """Return whether a fresh process finds a module by its name, and the same one."""
    if module is None or module.__name__ in {"__main__", "__mp_main__"}:
        return False
    return bool(getattr(module, "__file__", "builtin"))


def module_of(names: Mapping[str, Any]) -> str | None:
    """Return the module that has these global names, if a fresh process finds it; no code of the user's is run."""
    if type(names) is not dict:
        return None
    name = names.get("__name__")
    module = sys.modules.get(name) if type(name) is str else None
    if module is None or vars(module) is not names:
        return None
    return module.__name__ if _is_found(module) else None


def is_importable(obj: Any) -> bool:
    """Return whether a fresh process finds the same object by its name."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if not _is_found(module):
        return False
    value: Any = module
    for part in obj.__qualname__.split("."):
        value = getattr(value, part, None)
    return value is obj


def shared_state(obj: Any) -> dict[str, Any] | None:
    """Return the attributes that all objects of a class share, as those of accelerate's states do; None for others."""
    attributes: Any = getattr(obj, "__dict__", None)
    shared: Any = getattr(type(obj), "_shared_state", None)
    if attributes is None or attributes is not shared:
        return None
    return dict(attributes)


_MOST_LOOKED_AT = 1000
"""Items of a list or a dict that are looked at for tensors."""


def holders(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names of variables that hold tensors: they keep alive what the cell may let go of."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    names = []
    for name, value in list(namespace.items()):
        if any(_holds(torch, item) for item in _items_of(value)):
            names.append(name)
    return names


def _items_of(value: Any) -> list[Any]:
    """Return the first items of a list, a tuple or a dict; of anything else, itself."""
    kind = type(value)
    if kind is dict:
        return list(value.values())[:_MOST_LOOKED_AT]
    if kind in {list, tuple}:
        return list(value[:_MOST_LOOKED_AT])
    return [value]


def _holds(torch: Any, value: Any) -> bool:
    """Return whether a value may keep something of a device alive, which a tensor on the CPU does not."""
    if issubclass(type(value), torch.Tensor):
        with undisturbed():
            return bool(plain(value, "device").type != "cpu")
    return issubclass(type(value), (torch.nn.Module, torch.optim.Optimizer))


def described(obj: Any) -> str:
    """Return a word for an object that cannot be sent."""
    kind = type(obj)
    begins_with_vowel = kind.__name__[:1].lower() in "aeiou"
    article = "an" if begins_with_vowel else "a"
    return f"{article} {_full_name(kind)}"
