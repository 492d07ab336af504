"""What one object holds, as branches of children, how CPython itself reads its attributes, and the paths of those.

A path from a variable to a tensor is written as code that evaluates to the tensor, or described. What is typed may lead
elsewhere than what is stored: a property hides an attribute, a class overrides `__getitem__`, a `Sequential` counts its
layers. A step is code only where Python's own rules lead to what was found; what no expression reaches is described,
with angle brackets: ``it.<...>[0]``.
"""

from __future__ import annotations

import keyword
import math
import types
import unicodedata
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from gpumagic._compat import torch_private

Style = Literal[
    "name",
    ".",
    "_parameters",
    "_buffers",
    "_modules",
    "[",
    "values",
    "items",
    "state",
    "in",
]
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
REGISTERED = torch_private.REGISTERED
"""The dicts of a module that `Module.__getattr__` looks into."""

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE

Get: TypeAlias = Callable[[object], object]
"""Reads one attribute of an object."""
Attributes: TypeAlias = list[tuple[str, object]]
"""Names with what they lead to."""


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

    instance_dict: Get | None
    slots: tuple[tuple[str, Get], ...]


Branches: TypeAlias = Iterator[Branch]
Read: TypeAlias = "Callable[[Any, Reader], Branches]"


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
        if self.container is None:
            return 0
        return int(self.container.__len__(value))


LONGEST_KEY = 200
"""Characters of a key that are written."""
_LONGEST_NUMBER = 4096
"""Bits of a number that is written."""
_DEEPEST_KEY = 3
"""Tuples in each other that are written."""


def key_code(key: Any, depth: int = 0) -> str | None:
    """Return a key as it is typed; None for one that cannot be: the repr of anything else is its author's code."""
    if (
        type(key) is int and key.bit_length() < 64
    ):  # thousands of tensors may stand in one list
        return repr(key)
    text: str | None = None
    if type(key) is float and math.isinf(key):
        text = f"float('{key}')"
    elif type(key) is float and math.isnan(key):
        text = None  # another nan does not find it
    elif type(key) is tuple and depth < _DEEPEST_KEY:
        text = _tuple_code(key, depth)
    elif type(key) is int:
        if (
            key.bit_length() < _LONGEST_NUMBER
        ):  # others may not be (sys.set_int_max_str_digits)
            text = repr(key)
    elif type(key) in (str, float, bool, type(None), bytes):
        text = repr(key)
    if text is None or len(text) > LONGEST_KEY:
        return None
    return text


def _tuple_code(key: tuple[Any, ...], depth: int) -> str | None:
    items: list[str] = []
    for item in key:
        code = key_code(item, depth + 1)
        if code is None:
            return None
        items.append(code)
    if len(items) == 1:
        return f"({items[0]},)"
    return f"({', '.join(items)})"


def is_heap_type(kind: type) -> bool:
    """Return whether a type was made by a class statement, or by one of C's that can be changed like those."""
    flags = flags_of(kind)
    return bool(flags & _HEAP_TYPE) and not flags & _IMMUTABLE


def class_attribute(kind: type, name: str) -> Any:
    """Return what the classes of a type's instances have under a name, as it is stored; None if nothing."""
    for base in mro_of(kind):
        own = dict_of(base)
        if name in own:
            return own[name]
    return None


def fields_of(kind: type) -> Fields | None:
    """Return how to read the attributes of a type's instances, or None if they have none."""
    instance_dict: Get | None = None
    slots: list[tuple[str, Get]] = []
    for base in mro_of(kind):
        for name, entry in list(
            dict_of(base).items()
        ):  # a list, as another thread may add to it
            is_member = type(entry) is types.MemberDescriptorType
            if name == "__dict__":
                if is_member or type(entry) is types.GetSetDescriptorType:
                    instance_dict = instance_dict or entry.__get__
            elif is_member and is_heap_type(base):
                slots.append((name, entry.__get__))
    if instance_dict is None and not slots:
        return None
    return Fields(instance_dict, tuple(slots))


def attributes(value: object, fields: Fields | None) -> Attributes:
    """Return the slots and instance attributes of an object."""
    if fields is None:
        return []
    found = [(name, _slot(read, value)) for name, read in fields.slots]
    if fields.instance_dict is not None:
        own = fields.instance_dict(value)
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


def _slot(read: Get, value: object) -> object:
    try:
        return read(value)
    except AttributeError:  # it was never set
        return None


# ---- Paths, and how they are written


class Path(NamedTuple):
    """One reference, from a parent to a child, and with its parents the path to it; the first step is a name."""

    parent: Path | None
    style: Style
    key: Any
    rank: int
    """How well this step names what it leads to."""
    depth: int
    kind: type | None = None
    """The type of what the step leads to."""
    target: int = 0
    """The `id` of what it leads to; 0 for an optimizer's state, which is a step in a name and no object."""

    def start(self) -> Path:
        """Return the first step: its key is a variable's name, or a `held.Holder`."""
        path = self
        while path.parent is not None:
            path = path.parent
        return path

    def root(self) -> str:
        """Return the name that the path starts from."""
        return str(self.start().key)

    def owner(self) -> int | None:
        """Return the `id` of the object that refers to what the path leads to; None for a root."""
        parent = self.parent
        if parent is not None and parent.style == "state":
            parent = parent.parent
        if parent is None:
            return None
        return parent.target

    def quality(self) -> tuple[int, int]:
        """Return how well the path names what it leads to, the lowest best: its worst step, then its length."""
        worst = max(step.rank for step in self.steps())
        return worst, self.depth

    def steps(self) -> list[Path]:
        """Return the path's beginnings, from its root to itself."""
        path: Path | None = self
        upward: list[Path] = []
        while path is not None:
            upward.append(path)
            path = path.parent
        return upward[::-1]


def _attribute(before: str, style: str, name: str, owner: type | None) -> str | None:
    """Return the code of an attribute, or of what a module registers, of an object whose code is ``before``.

    It is None where the class of the object overrides how all attributes are read.
    """
    if owner is None:
        return None
    getattribute = class_attribute(owner, "__getattribute__")
    if type(getattribute) is not types.WrapperDescriptorType:
        return None
    stands_in_class = class_attribute(owner, name)
    if style in REGISTERED:
        is_hidden = stands_in_class is not None
        return before + _registered_code(style, name, owner, is_hidden=is_hidden)
    kind = type(stands_in_class)
    is_slot = kind in (types.MemberDescriptorType, types.GetSetDescriptorType, FIELD)
    # A data descriptor of the class comes before an attribute of the instance.
    is_hidden = any(
        class_attribute(kind, method) is not None
        for method in ("__set__", "__delete__")
    )
    if is_typeable(name) and (is_slot or not is_hidden):
        return f"{before}.{name}"
    key = None if is_slot else key_code(name)
    if key is None:
        return None
    return f"{before}.__dict__[{key}]"


def _registered_code(style: str, name: str, owner: type, *, is_hidden: bool) -> str:
    """Return what is typed behind a module to reach what it registers.

    That is an attribute where `Module.__getattr__` finds it, or one that asks it first.
    """
    from torch import nn

    getattr_ = class_attribute(owner, "__getattr__")
    is_torchs = getattr_ is nn.Module.__getattr__
    if type(getattr_) is types.FunctionType:
        is_torchs |= "__getattr__" in getattr_.__code__.co_names
    if is_torchs and not is_hidden and is_typeable(name):
        return f".{name}"
    key = key_code(name)
    getitem = class_attribute(owner, "__getitem__")
    if getitem in (nn.ModuleDict.__getitem__, nn.ParameterDict.__getitem__):
        return f"[{key}]"
    return f".{style}[{key}]"


class Names:
    """The names of tensors by their `id`, best first; spelled only when asked for."""

    def __init__(self, paths: Mapping[int, list[Path]]) -> None:
        self.paths_to = paths
        self._known: dict[int, tuple[Path, str | None]] = {}
        """The code of a path by its `id`; the path is kept with it."""

    def code(self, path: Path) -> str | None:
        """Return a path as code that evaluates to what it leads to: ``model.layers[3].weight``; None if none does."""
        if path.parent is None:
            return str(path.key)
        known = self._known.get(id(path))
        if known is None:
            known = (path, self._spelled(path))
            self._known[id(path)] = known
        return known[1]

    def _spelled(self, path: Path) -> str | None:
        """Return the code of a path, of which only its beginnings are known."""
        if path.parent is None:
            return str(path.key)
        before = self.code(path.parent)
        if before is None:
            return None
        return self._extended(before, path, path.parent)

    def description(self, path: Path) -> str:
        """Return a path as one reads it: ``last traceback.<step()>.hidden``; code where that is no longer."""
        if path.parent is None:
            return str(path.key)
        before = self.description(path.parent)
        if path.style == "in":
            inside: Inside = path.key
            described = f"{before}.<{inside.place}>"
            if inside.name and inside.name.isidentifier():
                described += f".{inside.name}"
            return described
        code = self._extended(before, path, path.parent)
        if code is None:
            return f"{before}.<...>"
        return code

    def _extended(self, before: str, path: Path, parent: Path) -> str | None:
        """Return the code of a path whose parent has this code."""
        style = path.style
        key = path.key
        code: str | None = None
        if style == "[":
            typed = key_code(key)
            if typed is not None:
                code = f"{before}[{typed}]"
        elif style == "items":
            code = f"[*{before}][{key}]"
        elif style == "values":
            code = f"[*{before}.values()][{key}]"
        elif style == "state":
            parameter, position = key
            name = self.best(parameter)
            code = f"[*{before}.state.values()][{position}]"
            if name is not None:
                code = f"{before}.state[{name}]"
        elif style == "in":
            if key.code is not None:
                code = before + key.code
        elif type(key) is str:
            code = _attribute(before, style, key, parent.kind)
        return code

    def of(self, tensor_id: int) -> list[str]:
        """Return the names of a tensor, a plain variable before a module's path before other containers."""
        paths = self.paths_to.get(tensor_id, ())
        if not paths:
            return []
        if len(paths) == 1:
            # Thousands have one path, and nothing to compare it with or to remember it for.
            name = self._spelled(paths[0])
            return [] if name is None else [name]
        qualities: list[tuple[tuple[int, int], str]] = []
        for path in sorted(bounded(paths, Path.root), key=Path.quality):
            name = self.code(path)
            if name is not None:
                qualities.append((path.quality(), name))
        return [name for _, name in sorted(qualities)]

    def best(self, tensor_id: int) -> str | None:
        """Return the best name of a tensor that does not lead through an optimizer's state."""
        paths = self.paths_to.get(tensor_id, ())
        for path in sorted(paths, key=Path.quality):
            styles = [step.style for step in path.steps()]
            name = None if "state" in styles else self.code(path)
            if name is not None:
                return name
        return None

    def described(self, tensor_id: int) -> tuple[str, str, str] | None:
        """Return the variable that a tensor is inside of, what holds it there, and the path; None if it has none.

        For a tensor without a name: ``("it", "list_iterator it", "it.<...>[0]")``.
        """
        paths = self.paths_to.get(tensor_id)
        if not paths:
            return None
        path = min(paths, key=lambda path: (path.depth, path.quality()))
        owner = self._last_with_code(path)
        kind = "object"
        if owner.kind is not None:
            kind = name_of_type(owner.kind)
        place = self.code(owner) or self.description(owner)
        holder = f"{kind} {place}"
        return path.root(), holder, self.description(path)

    def _last_with_code(self, path: Path) -> Path:
        """Return the last step before the first one that no expression reaches; the whole path if there is none."""
        for step in path.steps():
            if self.code(step) is None:
                return step.parent or path
        return path


MAX_PATHS = 16
"""Paths of one tensor that become names, but for those from further variables; views of it may have thousands."""
Item = TypeVar("Item")


def bounded(items: list[Item], root: Callable[[Item], str]) -> list[Item]:
    """Return the first of many paths or names, and one from each further root."""
    if len(items) <= MAX_PATHS:
        return items
    kept = items[:MAX_PATHS]
    roots = set(map(root, kept))
    for item in items[MAX_PATHS:]:
        if root(item) not in roots:
            roots.add(root(item))
            kept.append(item)
    return kept


def is_typeable(name: str) -> bool:
    """Return whether Python reads a name as it is stored: it normalises what is typed, ``ﬁ`` to ``fi`` (PEP 3131)."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return False
    return name.isascii() or unicodedata.normalize("NFKC", name) == name
