"""What one object holds, as branches of children, and how CPython itself reads an object's attributes.

Modules and optimizers are read by what they store: an overridden `parameters()`, property or `__iter__` is not called.
"""

from __future__ import annotations

import math
import types
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

Style = Literal["name", ".", "_parameters", "_buffers", "_modules", "[", "values", "items", "state", "in"]
"""How a child is reached: by a variable, an attribute, what a module registers, an index or key, its position among the
values or the elements, an optimizer's state, or, with an `Inside` for key, in another place."""

dict_of = type.__dict__["__dict__"].__get__
mro_of = type.__dict__["__mro__"].__get__
flags_of = type.__dict__["__flags__"].__get__
name_of_type: Callable[[type], str] = type.__dict__["__name__"].__get__
"""A class's name, whatever its metaclass says."""

VARIABLE, OWN, CONTAINED, OPTIMIZER = range(4)
"""How well a step names what it leads to; the lowest is best."""

FIELD: type = type(dict_of(namedtuple("_", "field"))["field"])  # noqa: PYI024
"""The type of what stands in the class of a named tuple for each of its fields."""
REGISTERED = ("_parameters", "_buffers", "_modules")
"""The dicts of a module that `Module.__getattr__` looks into."""

_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE


class Inside(NamedTuple):
    """A place that no attribute, index or key names by itself."""

    place: str
    """What it is called where it is only described: ``"closure"``, ``"step()"``."""
    name: str | None = None
    """A variable's name."""
    code: str | None = None
    """What is typed to reach it: ``".__closure__[0].cell_contents"``; None where no expression does."""


class Branch(NamedTuple):
    """Children of one object that are reached by the same kind of step."""

    style: Style
    rank: int
    children: Iterable[tuple[Any, object]]
    parameter: tuple[int, int] | None = None
    """For an optimizer: the `id` and the position of the parameter whose state the children are."""


class Fields(NamedTuple):
    """How CPython itself reads the attributes of a type's instances."""

    instance_dict: Callable[[object], object] | None
    slots: tuple[tuple[str, Callable[[object], object]], ...]


Read = Callable[[Any, "Reader"], Iterator[Branch]]


class Reader(NamedTuple):
    """How the instances of one type are read."""

    read: Read
    fields: Fields | None = None
    container: Any = None
    """The built-in container that it is or derives from: its own methods read it, never those of a subclass."""
    is_tensor: bool = False
    """Whether it is what is searched for: a tensor."""
    has_own_class: bool = False
    """Whether its class may keep tensors itself: it is the user's, or one made for its instances."""
    is_indexed: bool = True
    """Whether an index or a key leads to what the built-in container has there: nobody overrides `__getitem__`."""

    def length(self, value: object) -> int:
        """Return how many children a container has, 0 for anything else."""
        return int(self.container.__len__(value)) if self.container else 0


LONGEST_KEY = 200
"""Characters of a key that are written."""


def key_code(key: Any, depth: int = 0) -> str | None:
    """Return a key as it is typed; None for one that cannot be: the repr of anything else is its author's code."""
    text: str | None = None
    if type(key) is float and not math.isfinite(key):
        text = None if math.isnan(key) else f"float('{key}')"  # another nan does not find it
    elif type(key) is tuple and depth < 3:
        inner = [key_code(each, depth + 1) for each in key]
        known = [each for each in inner if each is not None]
        text = f"({', '.join(known)}{',' if len(known) == 1 else ''})" if len(known) == len(inner) else None
    elif type(key) in (str, float, bool, type(None), bytes) or (type(key) is int and key.bit_length() < 4096):
        text = repr(key)  # longer numbers may not be written (sys.set_int_max_str_digits)
    return text if text is not None and len(text) <= LONGEST_KEY else None


def is_heap_type(kind: type) -> bool:
    """Return whether a type was made by a class statement, or by one of C's that can be changed like those."""
    return bool(flags_of(kind) & _HEAP_TYPE) and not flags_of(kind) & _IMMUTABLE


def class_attribute(kind: type, name: str) -> Any:
    """Return what the classes of a type's instances have under a name, as it is stored; None if nothing."""
    return next((own[name] for own in map(dict_of, mro_of(kind)) if name in own), None)


def fields_of(kind: type) -> Fields | None:
    """Return how to read the attributes of a type's instances, or None if they have none."""
    instance_dict, slots = None, []
    for base in mro_of(kind):
        for name, entry in dict_of(base).items():
            if name == "__dict__" and type(entry) in (types.GetSetDescriptorType, types.MemberDescriptorType):
                instance_dict = instance_dict or entry.__get__
            elif type(entry) is types.MemberDescriptorType and is_heap_type(base):
                slots.append((name, entry.__get__))
    return Fields(instance_dict, tuple(slots)) if instance_dict or slots else None


def attributes(value: object, fields: Fields | None) -> list[tuple[str, object]]:
    """Return the slots and instance attributes of an object."""
    if fields is None:
        return []
    found = [(name, _slot(read, value)) for name, read in fields.slots]
    own = fields.instance_dict(value) if fields.instance_dict else None
    if isinstance(own, dict):
        found += list(dict.items(own))
    return found


def attributes_of(value: object) -> dict[str, Any]:
    """Return the slots and instance attributes of an object by name."""
    return dict(attributes(value, fields_of(type(value))))


def stored_attribute(owner: object, name: str, default: object = None) -> Any:
    """Return an attribute as an instance stores it, or a parameter, buffer or submodule as a module does."""
    own = attributes_of(owner)
    for registered in map(own.get, REGISTERED):
        if isinstance(registered, dict) and name in registered:
            return registered[name]
    return own.get(name, default)


def _slot(read: Callable[[object], object], value: object) -> object:
    try:
        return read(value)
    except AttributeError:  # it was never set
        return None


# ---- Modules and optimizers


def modules_in(module: object) -> Iterator[tuple[str, Any]]:
    """Yield a module and all inside it with their paths, each once, as `named_modules` of torch would."""
    waiting, seen = [("", module)], set()
    while waiting:
        path, each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each
        below = list(children_of(each))
        waiting += [(f"{path}.{name}" if path else name, child) for name, child in reversed(below)]


def children_of(module: object) -> Iterator[tuple[str, Any]]:
    """Yield what a module has registered as its own modules."""
    yield from registered(module, "_modules")


def registered(module: object, kind: str) -> list[tuple[str, Any]]:
    """Return what a module has under ``"_modules"``, ``"_parameters"`` or ``"_buffers"``, by name."""
    import torch

    if not issubclass(type(module), torch.nn.Module):
        return []
    # Read as torch's own class has it: no property of a subclass is called, nor are the attributes of a class searched.
    found: Any = vars(torch.nn.Module)["__dict__"].__get__(module).get(kind)
    if isinstance(found, dict):
        entries = list(dict.items(found))
    elif dict_of(type(found)).get("__module__") == "torch.jit._script":  # a dictionary of C++'s
        entries = list(found.items())
    else:
        entries = []
    return [(name, each) for name, each in entries if each is not None]


def parameters_of(module: object) -> list[Any]:
    """Return the parameters of a module and of all inside it, each once."""
    found: dict[int, Any] = {}
    for _, each in modules_in(module):
        found.update((id(tensor), tensor) for _, tensor in registered(each, "_parameters"))
    return list(found.values())


_WRAPPED = ("optimizer", "_optimizer")
"""What the optimizers of accelerate and Lightning call the one that they wrap."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that has the parameters: the one inside, where this is a wrapper such as accelerate's."""
    import torch

    stored = attributes_of(optimizer)
    inner = [stored[name] for name in _WRAPPED if issubclass(type(stored.get(name)), torch.optim.Optimizer)]
    return unwrapped(inner[0]) if inner and "param_groups" not in stored else optimizer


def parameter_groups(optimizer: object) -> list[dict[str, Any]]:
    """Return an optimizer's groups of parameters."""
    groups = attributes_of(optimizer).get("param_groups")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
