"""What can hold a tensor, beside lists and dicts: the objects that tests of names and of holders are made of."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import threading
import types

import numpy as np
import pytest
import torch

from gpumagic.heap.branches import Names
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.holders import excluded_objects, variables
from gpumagic.heap.storages import StorageTable, gc_disabled, number_of, undisturbed


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("__weakref__", "item")

    def __init__(self, item):
        self.item = item


@dataclasses.dataclass
class Batch:
    """What a collate function returns."""

    inputs: torch.Tensor


Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024  the form found in notebooks


class Hidden:
    """An object whose attribute a property hides."""

    def __init__(self, item):
        self.__dict__["item"] = item

    item = property(lambda self: pytest.fail("a property ran"), lambda self, value: None)


class Attentive:
    """An object whose every attribute access is an event."""

    calls = 0

    def __init__(self, tensor):
        object.__setattr__(self, "tensor", tensor)

    def __getattribute__(self, name):
        Attentive.calls += 1
        raise RuntimeError(name)

    def __iter__(self):
        Attentive.calls += 1
        raise RuntimeError

    __len__ = __bool__ = __hash__ = __eq__ = __iter__


class Loud(dict):
    """A dict whose methods nobody may call."""

    def __getitem__(self, key):
        pytest.fail("a method ran")

    __iter__ = __len__ = keys = values = items = __getitem__


class Method(Slotted):
    """An object with a method."""

    def method(self):
        """Do nothing."""


class DataLoaderLike:
    """An object that answers every attribute itself."""

    def __init__(self, tensor):
        object.__setattr__(self, "batch", [tensor])

    def __getattribute__(self, name):
        raise AttributeError(name)


class Shadowing(torch.nn.Module):
    """A module whose class has something else under the name of a parameter."""

    def __init__(self, tensor):
        super().__init__()
        self._parameters["shadowed"] = torch.nn.Parameter(tensor)

    shadowed = 3


def module(**items):
    """Return a module that registers these tensors and modules, and keeps anything else."""
    made = torch.nn.Module()
    for name, item in items.items():
        if isinstance(item, torch.nn.Parameter):
            made.register_parameter(name, item)
        elif isinstance(item, torch.Tensor):
            made.register_buffer(name, item)
        elif isinstance(item, torch.nn.Module):
            made.add_module(name, item)
        else:
            setattr(made, name, item)
    return made


def keyword_only(tensor):
    """Return a function with a keyword default."""
    return lambda *, k=tensor: None


def with_old(owner, tensor):
    """Return a tensor with another in an attribute."""
    owner.old = tensor
    return owner


def of_objects(values):
    """Return an array of these objects."""
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # all at once, numpy would ask a tensor for its numbers
        array[place] = value
    return array


def thread_local(value):
    """Return a thread local with a value of this thread."""
    local = threading.local()
    local.batch = value
    return local


def context_variable(value):
    """Return a context variable that is set."""
    variable = contextvars.ContextVar("var")
    VARIABLES.append((variable, variable.set(value)))
    return variable


def context_with(tensor):
    """Return a context in which a variable is set."""
    context = contextvars.copy_context()
    context.run(contextvars.ContextVar("inner").set, tensor)
    return context


def hooked(tensor):
    """Return a parameter whose hook has a tensor for its default."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda gradient, t=tensor: None)
    parameter._backward_hooks = collections.OrderedDict(
        enumerate(parameter._backward_hooks.values())
    )
    return parameter


def of_a_class(tensor):
    """Return an instance of a class that keeps a tensor."""
    return type("Trainer", (), {"best": tensor, "__module__": __name__})()


def with_static_method(tensor):
    """Return a class with a static method that keeps a tensor."""
    return type("Table", (), {"make": staticmethod(lambda t=tensor: None)})


def with_property(tensor):
    """Return a class with a property that keeps a tensor."""

    def keep(self, tensor):
        self.__dict__["size"] = tensor
        return self

    return type("Table", (), {"size": property(lambda self, t=tensor: None), "keep": keep})


def with_attribute(function, tensor):
    """Return a function with a tensor in an attribute."""
    function.cache = {"k": tensor}
    return function


def cached_call(tensor):
    """Return a cached function that remembers a tensor."""

    @functools.lru_cache
    def call():
        return kept.pop()

    kept = [tensor]
    call()
    return call


def generator(mine):
    """Yield forever with a tensor in hand."""
    while True:
        yield 0


def started(generator):
    """Return a generator that stands at its first yield."""
    next(generator)
    return generator


def awaiting(tensor):
    """Return a coroutine that waits with a tensor in hand."""

    @types.coroutine
    def wait():
        yield

    async def call(mine):
        await wait()

    coroutine = call(tensor)
    coroutine.send(None)
    return coroutine


def failed(tensor):
    """Return the error of a call that failed with a tensor in hand."""

    def fails(local):
        raise ValueError

    try:
        fails(tensor)
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next
        return error


def caused(cause):
    """Return an error with a cause."""
    error = RuntimeError()
    error.__cause__ = cause
    return error


def filled(queue, tensor):
    """Return a queue with a tensor waiting in it."""
    queue.put(tensor)
    return queue


def half_read(iterators):
    """Return iterators after the first item of the first."""
    next(iter(iterators[0]))
    return iterators


def thread_local_of_another(tensor):
    """Return a thread local that another thread, which runs, has set."""
    local, go, ends = threading.local(), threading.Event(), threading.Event()

    waiting = [tensor]
    del tensor

    def work():
        local.mine = waiting
        go.set()
        ends.wait()

    RUNNING.append((threading.Thread(target=work, daemon=True), ends))
    RUNNING[-1][0].start()
    go.wait()
    return local


RUNNING: list[tuple[threading.Thread, threading.Event]] = []
VARIABLES: list[tuple[contextvars.ContextVar, contextvars.Token]] = []
"""What outlives the objects that use it, until `nothing_left`."""


@pytest.fixture
def nothing_left():
    """End the threads and reset the context variables of a test."""
    yield
    while VARIABLES:
        variable, token = VARIABLES.pop()
        variable.reset(token)
    while RUNNING:
        thread, ends = RUNNING.pop()
        ends.set()
        thread.join()


def name_storages(namespace, shell=None):
    """Return every name that reaches a storage, best first, by the storage's number."""
    graph, table = HeapGraph(excluded_objects(namespace, shell)), StorageTable()
    found = {}
    try:
        with undisturbed(), gc_disabled():
            names = Names(graph.explore(variables(namespace, shell)))
            for key, tensor in graph.tensors.items():
                storage, parts = table.find(tensor)
                for each in parts or [storage]:
                    found.setdefault(each.number, []).extend(names.of(key))
    finally:
        graph.release()
    return {number: tuple(dict.fromkeys(names)) for number, names in found.items()}


def names_of(tensor, namespace, shell=None):
    """Return the names of a tensor's storage."""
    return name_storages(namespace, shell).get(number_of(tensor.untyped_storage()), ())
