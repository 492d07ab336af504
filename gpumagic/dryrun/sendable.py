"""What of a notebook is sent and how: by name, by its parts, through shared memory, or as a word for it."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from gpumagic.dryrun import parts
from gpumagic.heap.storages import plain, undisturbed


def _cell(cell: types.CellType) -> Any:
    try:
        contents: tuple[Any, ...] = (cell.cell_contents,)
    except ValueError:
        contents = ()
    return types.CellType, (), contents, None, None, parts.fill_cell


def _file(file: Any) -> Any:
    """Return how an open file is sent: what is read goes on where it stands, what is written goes nowhere."""
    for name in "stdin", "stdout", "stderr":
        if file is getattr(sys, name):
            return getattr, (sys, name)
    try:
        binary = "b" if not isinstance(file, io.TextIOBase) else ""
        if file.writable():
            return open, (os.devnull, f"w{binary}")
        return parts.open_again, (str(file.name), f"r{binary}", getattr(file, "encoding", None), file.tell())
    except (OSError, ValueError, AttributeError):  # closed, or no file of the system's
        return parts.Absent, (described(file),)


def _stream(stream: Any) -> Any:
    number = getattr(stream, f"{stream.device.type}_stream", stream.stream_id)
    return parts.make_stream, (str(stream.device), int(number), int(getattr(stream, "priority", 0)))


def _loader_iterator(iterator: Any) -> Any:
    """Leave out what it has of its own: a generator or its processes."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    usual = {*_BaseDataLoaderIter.__init__.__code__.co_names} - {"_sampler_iter", "_dataset_fetcher"}
    return parts.make_loader_iterator, ({name: value for name, value in vars(iterator).items() if name in usual},)


def _weak(reference: weakref.ReferenceType[Any]) -> Any:
    """Return a reference to what is sent of the object, without a callback; what only it leads to is gone there too."""
    target = reference()
    if target is None:
        return parts.dead_reference, ()
    key = (reference.key,) if type(reference) is weakref.KeyedRef else ()
    return type(reference), (target, None, *key)


_WRITES = ("execute", "executemany", "executescript", "commit", "rollback", "close", "cursor")
"""What a database is told; what it answers is not known."""
_LOGS = (
    "torch.utils.tensorboard.writer.SummaryWriter", "tensorboardX.writer.SummaryWriter", "wandb.sdk.wandb_run.Run",
    "comet_ml.experiment.BaseExperiment", "aim.sdk.run.Run", "clearml.task.Task", "neptune.metadata_containers.run.Run",
)  # fmt: skip
"""Classes whose objects take notes of a run and decide nothing."""
SPECIAL: dict[type, Callable[[Any], Any]] = {
    types.CellType: _cell,
    property: lambda obj: (property, (obj.fget, obj.fset, obj.fdel, obj.__doc__)),
    staticmethod: lambda obj: (staticmethod, (obj.__func__,)),
    classmethod: lambda obj: (classmethod, (obj.__func__,)),
    weakref.ReferenceType: _weak,
    weakref.WeakMethod: _weak,
    weakref.KeyedRef: _weak,
    type(threading.Lock()): lambda _: (parts.make_lock, ()),
    type(threading.RLock()): lambda _: (parts.make_lock, (True,)),
    threading.Condition: lambda obj: (parts.Absent, (described(obj), "acquire", "release", "notify", "notify_all")),
    threading.local: lambda _: (threading.local, ()),
    types.MappingProxyType: lambda obj: (types.MappingProxyType, (dict(obj),)),
    types.GetSetDescriptorType: lambda obj: (getattr, (obj.__objclass__, obj.__name__)),
    types.MemberDescriptorType: lambda obj: (getattr, (obj.__objclass__, obj.__name__)),
}
_BY_BASE: dict[str, Callable[[Any], Any]] = {
    "threading.Thread": lambda obj: (parts.Absent, (described(obj), "join")),
    "logging.Handler": lambda _: (logging.NullHandler, ()),
    "_io.TextIOWrapper": _file, "_io.BufferedReader": _file, "_io.BufferedWriter": _file, "_io.BufferedRandom": _file,
    "_io.FileIO": _file, "_io._TextIOBase": _file,
    "_csv.writer": lambda obj: (parts.Absent, (described(obj), "writerow", "writerows")),
    "sqlite3.Connection": lambda obj: (parts.Absent, (described(obj), *_WRITES)),
    "sqlite3.Cursor": lambda obj: (parts.Absent, (described(obj), *_WRITES)),
    "concurrent.futures.thread.ThreadPoolExecutor": lambda obj: (type(obj), (obj._max_workers,)),
    "torch.Stream": _stream,
    "torch.Event": lambda obj: (parts.make_event, (obj.device.type,)),
    "torch.utils.data.dataloader._BaseDataLoaderIter": _loader_iterator,
    **dict.fromkeys(_LOGS, lambda obj: (parts.Absent, (described(obj), "*"))),
}  # fmt: skip
"""The same by the name of a class, for objects of classes that are made of it."""


def special(obj: Any) -> Any:
    """Return how an object is sent that goes in another way than pickle's; None for others."""
    kind = type(obj)
    reduce = SPECIAL.get(kind)
    if reduce is None and kind not in _PLAIN:
        names = (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
        reduce = next((_BY_BASE[name] for name in names if name in _BY_BASE), None)
        if reduce is None:
            _PLAIN.add(kind)
    return None if reduce is None else reduce(obj)


_PLAIN: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that were looked up in vain."""


PICKLES_ITSELF = frozenset({type(None), type(NotImplemented), type(...)})
IS_HEAP_TYPE = 1 << 9


def builtin_class(kind: type) -> Any:
    """Return how to find a class of C's that has no name where it says, such as that of functions."""
    name = next((name for name, each in vars(types).items() if each is kind), None)
    return (parts.Absent, (f"the class {kind.__name__}",)) if name is None else (getattr, (types, name))


def is_importable(obj: Any) -> bool:
    """Return whether a fresh process finds the same object by its name."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or module.__name__ in {"__main__", "__mp_main__"} or not getattr(module, "__file__", "builtin"):
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
        if any(_holds(torch, each) for each in (within[:1000] if type(within) in {list, tuple} else [value])):
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
