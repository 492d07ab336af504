"""No code of the user's runs while a report is made: objects that write down every call are never called.

An overridden method may be slow, raise, print, or change what is looked at. What the cell itself calls is the cell's.
"""

from __future__ import annotations

import collections.abc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpumagic
from tests.stages import sample

PACKAGE = str(Path(gpumagic.__file__).parent)
calls: list[str] = []
armed = False
NOT_RECORDED = {
    # making, ending, and what a class is made of
    "__new__", "__init__", "__del__", "__init_subclass__", "__subclasshook__", "__class__", "__dict__", "__weakref__",
    "__doc__", "__module__", "__slots__", "__abstractmethods__", "__annotations__", "__prepare__", "__mro__",
    "__bases__", "__base__", "__name__", "__qualname__", "__basicsize__", "__itemsize__", "__flags__", "__dictoffset__",
    "__weakrefoffset__", "__text_signature__", "__type_params__", "__static_attributes__", "__firstlineno__",
    "__subclasses__", "__class_getitem__",
    "__getnewargs__", "__orig_bases__", "__parameters__", "__annotate__", "__annotations_cache__",
}  # fmt: skip
KINDS = (
    object,
    int,
    str,
    list,
    dict,
    set,
    type,
    torch.Tensor,
    torch.nn.Module,
    torch.optim.SGD,
    BaseException,
)
SPECIAL = {
    name for kind in KINDS for name in dir(kind) if name.startswith("__") and callable(getattr(kind, name, None))
} - NOT_RECORDED | {"__getattr__", "__bool__", "__index__", "__call__", "__iter__", "__next__", "__missing__",
                    "__instancecheck__", "__subclasscheck__", "__torch_function__", "__fspath__", "__length_hint__",
                    "_repr_mimebundle_", "_repr_html_", "_ipython_display_"}  # fmt: skip


def record(what: str) -> None:
    """Write down a call that gpumagic makes, with the line of it that does."""
    if not armed:
        return
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is not None:
        where = frame.f_code.co_filename[len(PACKAGE) + 1 :]
        calls.append(f"{what} by {where}:{frame.f_lineno} in {frame.f_code.co_name}")


def recorder(owner: str, name: str, given: Any) -> Any:
    if name == "__torch_function__":

        def torch_function(cls, func, types, args=(), kwargs=None):
            record(f"{owner}.__torch_function__({getattr(func, '__name__', func)})")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        return classmethod(torch_function)
    if isinstance(given, property):
        return property(lambda self: (record(f"{owner}.{name}"), given.__get__(self))[1])

    def method(self, *args, **kwargs):
        record(f"{owner}.{name}{tuple(each for each in args if isinstance(each, str))}")
        if given is None:
            raise (
                AttributeError(name)
                if name == "__getattr__"
                else TypeError(f"{owner} has no {name}")
            )
        return given(self, *args, **kwargs)

    return method


class Meta(type):
    """A metaclass that records what is asked of its classes."""

    # Not `__eq__` and `__hash__`: types are looked up in tables, a million of them where all objects are looked at.
    # An abstract class has no such metaclass here: where Python tests for one, it asks all classes below it itself.
    for _name in (
        "__getattribute__",
        "__instancecheck__",
        "__repr__",
        "__dir__",
        "__iter__",
        "__len__",
        "__contains__",
    ):
        locals()[_name] = recorder("Meta", _name, getattr(type, _name, None))


def recording(name: str, base: type, *more: str, like: Any = None, meta: type | None = None) -> Any:
    """Return a subclass that records each special method, and more of its base's."""
    own = {
        each: recorder(name, each, getattr(base, each, None)) for each in (*_special(base), *more)
    }
    own["computed"] = property(lambda self: record(f"{name}.computed"))
    own["__class__"] = property(lambda self: (record(f"{name}.__class__"), like or type(self))[1])
    return (meta or Meta)(name, (base,), own)


def _special(base: type) -> list[str]:
    missing = {"__getattr__", "__missing__"}
    return sorted(
        each for each in SPECIAL if hasattr(base, each) or (base is object) or each in missing
    )


def _objects() -> dict[str, Any]:
    """Return what a namespace holds: objects of every kind, and containers of them."""
    module_methods = (
        "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children",
        "named_children", "state_dict", "to", "_apply", "train", "extra_repr", "_get_name", "get_parameter", "cuda",
        "cpu",
    )  # fmt: skip
    mapping_methods = ("items", "keys", "values", "get", "pop", "copy", "update")
    thing = recording("Thing", object)
    proxy = recording("Proxy", object, like=torch.Tensor)
    module_proxy = recording("ModuleProxy", object, like=torch.nn.Module)
    module = recording("MyModule", torch.nn.Module, *module_methods)
    linear = recording("MyLinear", torch.nn.Linear, *module_methods)
    optimizer = recording(
        "MyOptimizer", torch.optim.SGD, "state_dict", "step", "zero_grad", "add_param_group"
    )
    tensor = recording(
        "MyTensor", torch.Tensor, "shape", "device", "dtype", "size", "numel", "data_ptr", "untyped_storage", "grad",
        "data", "requires_grad", "grad_fn", "is_leaf", "layout", "element_size", "storage_offset", "stride", "nbytes",
        "_base", "to", "is_cuda", "detach", "clone", "cpu", "item", "tolist",
        meta=type("TensorMeta", (Meta, type(torch.Tensor)), {}),
    )  # fmt: skip
    made_dict, made_list = (
        recording("MyDict", dict, *mapping_methods),
        recording("MyList", list, "append", "copy"),
    )
    made_tuple, made_set = (
        recording("MyTuple", tuple, "count", "index"),
        recording("MySet", set, "copy"),
    )
    text, number = (
        recording("MyStr", str, "startswith", "split"),
        recording("MyInt", int, "bit_length"),
    )
    mapping = _mapping()
    far = {"device": "simgpu:0"}
    holder = thing()
    holder.__dict__.update(inside=torch.ones(7, **far), deeper=[thing(), torch.ones(8, **far)])
    whole = module()
    whole.layer, whole.mine = linear(3, 2).to("simgpu:0"), thing()
    wide = linear(4, 4)
    named = text("batch")
    return {
        "thing": thing(), "proxy": proxy(), "module_proxy": module_proxy(), "holder": holder, "whole": whole,
        "wide": wide,
        "optimizer": optimizer(wide.parameters(), 0.1, momentum=0.9),
        "tensor": torch.ones(5, **far).as_subclass(tensor), "host": torch.ones(6).as_subclass(tensor),
        "table": made_dict(a=torch.ones(9, **far), b=thing(), c=tensor(3)),
        "row": made_list([torch.ones(10, **far), thing()]),
        "pair": made_tuple((torch.ones(11), thing())), "some": made_set({1}), "mapping": mapping(),
        "by_key": {named: torch.ones(12, **far), "plain": [thing(), proxy()]}, "number": number(4), "named": named,
        "kind": thing, "function": _function(thing()), "listed": [proxy(), [thing(), module_proxy()], {"x": holder}],
        "error": _failure()("no"), "plain": torch.ones(13, **far),
    }  # fmt: skip


def _mapping() -> Any:
    def init(self):
        self.kept = {"x": torch.ones(14)}

    own = {
        "__init__": init, "__getitem__": lambda self, key: self.kept[key], "__iter__": lambda self: iter(self.kept),
        "__len__": lambda self: len(self.kept),
    }  # fmt: skip
    plain = type("PlainMapping", (collections.abc.Mapping,), own)
    return recording("MyMapping", plain, "items", "keys", "values", "get", meta=type(plain))


def _failure() -> Any:
    return recording("MyError", RuntimeError, "with_traceback")


def _function(default: Any) -> Any:
    def function(argument=default):
        return default, argument

    return function


@pytest.fixture(scope="module")
def objects(two_devices, few_objects):
    return _objects()


@pytest.fixture
def shell(bare_shell, objects):
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell("import torch\nx = torch.ones(3)")
    bare_shell.user_ns.update(objects)
    calls.clear()
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    bare_shell.reset(new_session=False)
    for name in ("_", "__", "___"):  # the last results, some on a device
        bare_shell.displayhook.__dict__.pop(name, None)


def called(shell, *cells: str) -> list[str]:
    """Return what gpumagic has called of the user's while it ran some cells."""
    global armed  # noqa: PLW0603  # the recorders ask it
    armed = True
    try:
        for cell in cells:
            shell.run_cell(cell, store_history=True)
    finally:
        armed = False
    return sorted(set(calls))


LOOKS = [
    "%gpuinfo", "%gpuinfo -p", "%gpuinfo -a", "%devices", "%devices --by kind", "%devices --by holder",
    "%devices -n 100",
    "%devices -n 3 simgpu:0", "%devices --diff", "a = 1\n%devices --diff", "%devices --leaks",
    "%devices --free",
    "%devices --why plain", "%devices --why by_key['batch']", "%devices --why holder.inside", "%devices --why whole",
]  # fmt: skip
CELLS = [
    "%%ondevice 1\ny = torch.ones(3)\ny.cpu()", "%%ondevice 1 --trace\ny = torch.ones(3)\ny.cpu()",
    "%%ondevice 1 -o kept\n1 / 0", "%%oomguard\ny = torch.ones(3)",
    "%%ondevice 1\n%%oomguard\ny = torch.ones(3)",
    "%%ondevice 0\nfrom torch import zeros\nz = [zeros(3), x.to('simgpu:0')]",
]  # fmt: skip
FAILING = [
    "%%oomguard\ntorch.empty(2**40, device='simgpu:0')",
    "%%oomguard --keep-going\ntorch.empty(2**40, device='simgpu:0')",
    "%%oomguard --debug\ntorch.empty(2**40, device='simgpu:0')",
    "%%oomguard --fallback simgpu:1\ntorch.empty(2**40, device='simgpu:0')",
    "%oomguard on", "torch.empty(2**40, device='simgpu:0')", "%oomguard off",
]  # fmt: skip
DRY = [
    "%%dryrun --run\ntorch.ones(3, device='simgpu:0')",
    "%%oomguard --shrink size\nsize = 1099511627776\ntorch.empty(size, device='simgpu:0')",
    "%%dryrun\ntorch.ones(3, device='simgpu:0')", "%%dryrun --capacity 1GiB -o kept\ntorch.ones(3, device='simgpu:0')",
    "%%dryrun --fit size --capacity 1GiB\nsize = 4\ntorch.ones(size, 1024, device='simgpu:0')",
]  # fmt: skip


@pytest.mark.parametrize("cell", sample([*LOOKS, *CELLS, *FAILING], 3))
def test_no_code_of_the_users_runs(shell, warm_worker, cell) -> None:
    assert called(shell, cell) == []


@pytest.mark.parametrize("cell", sample(DRY, 4))
def test_a_dry_run_runs_none_of_objects_that_the_cell_does_not_use(
    shell, warm_worker, cell
) -> None:
    """What holds tensors is copied as pickle does it, by the `__reduce__` of its class; the rest is left alone."""
    for name in ("whole", "wide", "optimizer", "tensor", "host", "table", "row", "pair", "by_key"):
        del shell.user_ns[name]
    assert called(shell, cell) == []


def test_what_cannot_be_moved_is_refused_without_it(shell) -> None:
    """What can is moved by its own `to`, as the cell would."""
    for name in ("thing", "proxy", "module_proxy", "holder", "mapping", "listed", "named"):
        assert called(shell, f"%%ondevice 1 --move {name}\ny = 1") == []


LINES = (
    "%devices --why ",
    "%%ondevice 0 --move ",
    "%%ondevice ",
    "%%oomguard --shrink ",
    "%%dryrun --fit ",
)


@pytest.mark.filterwarnings("ignore:.Completer.complete")
@pytest.mark.parametrize("line", LINES)
def test_completion_runs_none(shell, line) -> None:
    assert called(shell, f"names = get_ipython().complete('', {line!r}, {len(line)})") == []
    assert shell.user_ns["names"][1]


def test_the_recorders_do_record(shell) -> None:
    """Else an empty record would say nothing."""
    assert called(shell, "import gpumagic.source.frames as f\nf.summary_line(error)") != []
