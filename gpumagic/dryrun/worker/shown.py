"""Every operator that a cell's code calls, shown to what has to follow values.

A dispatch mode would change what is run: under one autograd adds no gradients in place, and some operators are composed
in another way. So a kernel in Python shows them, at a key above all others that torch has for its own tests. It costs
some ten microseconds an operator, so it is on only where something is followed.

Each operator has a kernel of its own: one for all of them (`Library.fallback`) fails under the modes of others, where
torch looks a kernel in Python up by the operator's name. To register them takes a tenth of a second, so that is done in
the warm process. Operators that the cell registers are not shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Follow = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]
"""Called with an operator, its arguments and what it returned."""
Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called with an operator and its arguments before it runs; returns what it is to return, or NotImplemented."""
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
            answers = (answer(self._op, args, kwargs) for answer in _answerers)
            made = next((each for each in answers if each is not NotImplemented), NotImplemented)
            if made is NotImplemented:
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
_answerers: list[Answer] = []


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
    """Shows operators while anybody wants it, in the thread that asks first and in those that begin later."""

    def __init__(self) -> None:
        self._wanted: list[object] = []
        self._is_installed = False

    def to(self, follow: Follow, answer: Answer | None = None) -> None:
        """Show operators also to `follow`, after those who were there before, and before they run to `answer`."""
        _followers.append(follow)
        _answerers.extend([] if answer is None else [answer])

    def begin(self, who: object) -> None:
        """Show what is called from now on, until `end` was called for each `who`."""
        if any(each is who for each in self._wanted):
            return
        self._wanted.append(who)
        if not self._is_installed:
            self._is_installed = True
            get_ready()
            threads: Any = threading.Thread
            begin = threads._bootstrap_inner

            def begin_shown(thread: threading.Thread) -> None:
                _show(bool(self._wanted))
                begin(thread)

            threads._bootstrap_inner = begin_shown
        _show(True)

    def end(self, who: object) -> None:
        """Show no more operators to one."""
        self._wanted = [each for each in self._wanted if each is not who]
        _show(bool(self._wanted))


def _show(is_shown: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, is_shown)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own, and neither a class nor a transform answers for it."""
    is_its_own = type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__
    return not is_its_own and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
