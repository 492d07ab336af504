"""Every operator that a cell's code calls, shown to what has to follow values.

A dispatch mode would change what is run: under one autograd adds no gradients in place, and some operators are composed
in another way. So a kernel in Python shows them, at a key above all others that torch has for its own tests. It costs
some ten microseconds an operator, so it is on only where something is followed.

Each operator has a kernel of its own: one for all of them (`Library.fallback`) fails under the modes of others, where
torch looks a kernel in Python up by the operator's name. To register them takes a tenth of a second, so that is done in
the warm process. Operators that the cell registers are not shown.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Follow = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]
"""Called with an operator, its arguments and what it returned."""
_SWEPT = 64
"""Storages from which on those that are gone are looked for, and again whenever there are twice as many."""
_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._dispatch_key_parse(_NAME)
_VIEWS = {
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "expand", "permute", "select.int", "slice.Tensor", "split.Tensor",
        "squeeze.dim", "t", "transpose.int", "unbind.int", "unsqueeze", "view",
    )
}  # fmt: skip
"""Operators that move no contents and are not shown; C++ relies on what `alias` and `detach` return being new."""


class _Kernel:
    """An operator's; the object that Python has for the operator is looked up once it is called."""

    __slots__ = ("_name", "_op")

    def __init__(self, name: str) -> None:
        self._name = name
        self._op: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._op is None:
            space, _, name = self._name.partition("::")
            name, _, overload = name.partition(".")
            self._op = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        _show(False)
        try:
            made = self._op(*args, **kwargs)
            for follow in _followers:
                follow(self._op, args, kwargs, made)
        except BaseException:
            args, kwargs = (), {}  # the traceback would keep them
            raise
        finally:
            _show(True)
        return made


_libraries: dict[str, Any] = {}
"""What keeps the kernels, by the operators' namespace."""
_ready: set[str] = set()
"""The operators that have one."""
_followers: list[Follow] = []


def get_ready() -> None:
    """Give a kernel to each operator that has none yet; none is called before `Shown.begin`."""
    if not _libraries:
        _libraries["_"] = torch.library.Library("_", "IMPL")
        _libraries["_"].fallback(torch.library.fallthrough_kernel, _NAME)
    for full_name in torch._C._dispatch_get_all_op_names():
        if full_name in _ready:
            continue
        _ready.add(full_name)
        space, _, name = full_name.partition("::")
        if space not in _libraries:
            _libraries[space] = torch._C._dispatch_library("IMPL", space, "", __file__, 1)
        kernel = torch.library.fallthrough_kernel if full_name in _VIEWS else _Kernel(full_name)
        _libraries[space].impl(name, _NAME, kernel, False)


class Shown:
    """Shows operators from `begin` on, in the thread that calls it and in those that begin later."""

    def __init__(self) -> None:
        self._is_on = False

    def to(self, follow: Follow) -> None:
        """Show operators also to `follow`, after those who were there before."""
        _followers.append(follow)

    def begin(self) -> None:
        """Show what is called from now on, for the rest of the process."""
        if self._is_on:
            return
        self._is_on = True
        get_ready()
        threads: Any = threading.Thread
        begin = threads._bootstrap_inner

        def begin_shown(thread: threading.Thread) -> None:
            _show(True)
            begin(thread)

        threads._bootstrap_inner = begin_shown
        _show(True)


class Answering(TorchDispatchMode):
    """Calls back for each operator between `begin` and `end`, which need not be at the same depth of the cell's code.

    So it lies below the modes that the cell may have entered, and leaves them where they are.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile does not give up for it

    def __init__(self, follow: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._callback = follow
        self._is_running = self._is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._is_running = True
        try:
            return self._callback(func, args, kwargs or {})
        finally:
            self._is_running = False

    def begin(self) -> None:
        self._is_on = True
        if not self._is_running:  # else it is off the stack for the moment
            self._place(lambda others: [self, *others])

    def end(self) -> None:
        self._is_on = False
        self._place(lambda others: others)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Be off, also where it would begin meanwhile."""
        was_running, self._is_running = self._is_running, True
        self._place(lambda others: others)
        try:
            yield
        finally:
            self._is_running = was_running
            if self._is_on:
                self.begin()

    def _place(self, arrange: Callable[[list[Any]], list[Any]]) -> None:
        modes = [each for each in _get_current_dispatch_mode_stack() if getattr(each, "_mode_key", None) is None]
        for _ in modes:
            torch._C._pop_torch_dispatch_stack(None)
        for each in arrange([each for each in modes if each is not self]):
            torch._C._push_on_torch_dispatch_stack(each)


def _show(is_shown: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, is_shown)


T = TypeVar("T")


class HostStorages(Generic[T]):
    """What is noted of some storages on the host, without keeping them."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[StorageWeakRef, T]] = {}
        self._most = _SWEPT

    def __len__(self) -> int:
        return len(self._all)

    def of(self, tensor: torch.Tensor) -> T | None:
        """Return what is noted of a tensor's storage."""
        if not self._all or not tensor.is_cpu or tensor.layout is not torch.strided or not is_plain(tensor):
            return None
        found = self._all.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def add(self, storage: torch.UntypedStorage, note: T) -> None:
        """Note something of a storage."""
        if storage._cdata not in self._all and len(self._all) >= self._most:
            self.sweep()
        self._all[storage._cdata] = StorageWeakRef(storage), note

    def remove(self, storage: torch.UntypedStorage) -> None:
        """Note nothing of a storage any more."""
        del self._all[storage._cdata]

    def sweep(self) -> None:
        """Forget the storages that are gone; until then no other one can have the number of one of them."""
        self._all = {key: each for key, each in self._all.items() if not each[0].expired()}
        self._most = max(_SWEPT, 2 * len(self._all))

    def notes(self) -> list[T]:
        """Return what is noted."""
        return [note for _, note in self._all.values()]


def before_looks(call: Callable[[torch.Tensor], object]) -> None:
    """Call back before a tensor's memory is read by no operator, for the rest of the process."""

    def calling(look: Callable[..., Any]) -> Callable[..., Any]:
        def looked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            call(tensor)
            return look(tensor, *args, **kwargs)

        return looked

    for name in ("numpy", "tolist", "__array__", "__dlpack__"):
        setattr(torch.Tensor, name, calling(getattr(torch.Tensor, name)))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own, and neither a class nor a transform answers for it."""
    is_its_own = type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__
    return not is_its_own and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
