"""What goes on in one run right now: its default device, its log, and which call is being handled.

The handlers of `calls` and `indexing` write down here what they see. Imports torch at its top, so it is itself imported
only when a cell is run on a device.

Gradients that flow back through a move are copied by autograd in C++, where no function of Python's is called. So the
graph's node of a move that a line asked for gets a hook, which is removed when the run ends; it keeps no tensor, and
leaves gradients alone. A move that was made before the run has none.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from gpumagic.errors import StrayTensor
from gpumagic.memory.sampler import CellMemory
from gpumagic.source import frames
from gpumagic.source.call_sites import CallSites
from gpumagic.transfers.log import Made, TransferLog, is_host

CAUSE = "backward"
_MANY = 1000
"""Hooks remembered before those whose graphs are gone are looked for."""
Function = Callable[..., Any]
Handler = Callable[["Recorder", Function, tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class GradientHooks:
    """The hooks of one run."""

    handles: list[Any] = field(default_factory=list)
    _full: int = _MANY

    def add(self, handle: Any) -> None:
        """Remember one."""
        if len(self.handles) > self._full:
            self.handles = [each for each in self.handles if each.hooks_dict_ref() is not None]
            self._full = 2 * len(self.handles) + _MANY
        self.handles.append(handle)

    def remove(self) -> None:
        """Take all away."""
        while self.handles:
            self.handles.pop().remove()


@dataclass
class Request:
    """A move that a line asks for, while it is made; the tracer counts what crosses meanwhile as this."""

    cause: str
    subject: object


@dataclass(eq=False)
class Recorder:
    """One run: its default device, its log, and what is going on in it right now."""

    device: torch.device
    log: TransferLog
    is_traced: bool = False
    """Whether a dispatch mode counts the copies that it sees, so that handlers only name them."""
    counted: int = 0
    """How many moves have been counted."""
    has_mode: bool = False
    """Whether calls come by a function mode."""
    watches_threads: bool = True
    """Whether functions are exchanged, so that calls of threads without the mode come, too."""
    inside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Makes the calls of a function that is being handled come to the handlers too."""
    cause: str | None = None
    """What to say did a move, instead of the function itself (`print` calls many)."""
    request: Request | None = None
    is_busy: bool = field(default=False)
    """Whether a handler is at work: what the function itself calls is not handled again."""
    is_suspended: bool = False
    """Whether new tensors go where torch would put them, as they do in `backward` under torch's own context."""
    is_explicit: bool = False
    """Whether the call being handled says itself which device it works on."""
    change_over: Callable[[str], None] | None = None
    """Goes on under the function mode, for the reason given."""
    memory: CellMemory | None = None
    """Where the tracer notes what each operator allocates."""
    device_before: torch.device | None = None
    """What torch noted as the default device before this run."""
    refuses: bool = False
    """Whether what no line asks for is an error."""
    thread: int = field(default_factory=get_ident)
    threads_before: frozenset[int] = field(default_factory=lambda: frozenset(sys._current_frames()))
    landed: Made | None = None
    """The sum of the tensors made on the default device, once there is one."""
    others: dict[int, Recorder] = field(default_factory=dict)
    """By thread, what other threads do for the same run; each has sums of its own, so none waits for another."""
    hooks: GradientHooks | None = field(default_factory=GradientHooks)
    """Where the hooks are kept that see gradients; None where a dispatch mode does."""

    def beside(self, thread: int, sites: CallSites, *, is_bystander: bool = False) -> Recorder:
        """Return what records the calls of another thread for this run; torch's default device is another there.

        Args:
            thread: its number, or the negative of it for what it does that is none of this run's business.
            sites: finds the run's lines on that thread's stack.
            is_bystander: that it is none of it: its moves are told, but not the tensors it makes.
        """
        found = self.others.get(thread)
        if found is None:
            log = TransferLog(sites, is_bystanders=is_bystander)
            found = Recorder(self.device, log, is_suspended=True, hooks=self.hooks, thread=abs(thread))
            found = self.others.setdefault(thread, found)
        return found

    def here(self) -> Recorder:
        """Return what records this thread's calls, in one of autograd's threads too."""
        thread = get_ident()
        return self if thread == self.thread else self.beside(thread, self.log.sites)

    def settle(self) -> None:
        """Add up what other threads did, and leave the graphs that the run has hooked."""
        if self.hooks is not None:
            self.hooks.remove()
        while self.others:
            self.log.absorb(self.others.popitem()[1].log)

    def call(self, func: Function, args: Any, kwargs: dict[str, Any], cause: str, subject: object) -> tuple[Any, Any]:
        """Return what the function returns for a line that asks for a move, and the seconds it took.

        They are None where a dispatch mode has counted the move already.
        """
        __tracebackhide__ = True
        outer, self.request = self.request, Request(self.cause or cause, subject)
        counted, start = self.counted, time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            self.request = outer
        return result, None if self.counted != counted else time.perf_counter() - start

    def add_created(self, tensor: torch.Tensor) -> None:
        """Count a new tensor."""
        device = tensor.device
        nbytes = 0 if device.type == "meta" else whole(tensor).numel() * tensor.element_size()
        if not nbytes and _is_unpickled():
            return
        total = self.log.add_created(device, nbytes)
        if device == self.device and device.type != "meta":
            self.landed = total

    def add_move(
        self, subject: object, result: torch.Tensor, seconds: float | None, cause: str, *, non_blocking: bool = False
    ) -> None:
        """Count a move if ``result`` lies elsewhere than ``subject``; reading back to the host is also a wait.

        Where a move also converts, CUDA does that on the host, or on the device where it is non-blocking, and between
        devices after the copy (torch's aten/src/ATen/native/cuda/Copy.cu, with peer access between devices).
        """
        __tracebackhide__ = True
        source = device_of(subject) if isinstance(subject, torch.Tensor) else "cpu"
        target = device_of(result)
        if source == target or "meta" in (source, target):
            return
        converted = not non_blocking if is_host(source) else is_host(target) and non_blocking
        crossing = result if converted or not isinstance(subject, torch.Tensor) else subject
        nbytes = whole(result).numel() * crossing.element_size()
        if not nbytes:
            return  # nothing is copied, and nobody waits
        self.add_copy(source, target, nbytes, seconds, cause, subject, result)

    def add_copy(
        self,
        source: str,
        target: str,
        nbytes: int,
        seconds: float | None,
        cause: str,
        subject: object,
        result: object = None,
    ) -> None:
        """Count bytes that went from one device to another; the host waits for what comes to it."""
        __tracebackhide__ = True
        self.counted += 1
        self.log.add_move(source, target, nbytes, seconds, self.cause or cause, subject, result)
        if is_host(target):
            self.log.add_sync()

    def add_read(self, tensor: torch.Tensor, nbytes: int, seconds: float, cause: str) -> None:
        """Count Python values read from a device tensor: a copy to the host that the host waits for."""
        self.add_copy(device_of(tensor), "cpu", nbytes, seconds, cause, tensor)

    def refuse(self, subject: object, what: str) -> None:
        """Raise for something that a line does unasked.

        Raises:
            StrayTensor: always; with the line, the variable and what to write.
        """
        __tracebackhide__ = True
        site = self.log.sites.find(subject)
        where = f"line {site.line}: " if site.line is not None else ""
        kind = "a tensor" if isinstance(subject, torch.Tensor) else f"a {type(subject).__name__}"
        move = f'{site.name}.to("{self.device}")' if isinstance(subject, torch.Tensor) else f"torch.tensor({site.name})"
        mend = f"move it: {site.name} = {move}" if site.name else "move it where a line says so"
        raise StrayTensor(f"{where}{site.name or kind} {what}, in a cell on {self.device}; {mend}")

    @contextlib.contextmanager
    def looking_inside(self, cause: str) -> Iterator[None]:
        """Handle the calls made by the function that is being handled, as done by ``cause``."""
        outer = self.cause, self.is_busy, self.request
        self.cause, self.is_busy, self.request = cause, False, Request(cause, None)
        try:
            with self.inside():
                yield
        finally:
            self.cause, self.is_busy, self.request = outer


def _is_unpickled() -> bool:
    """Return whether a new tensor is the empty one that `torch.load` makes to put what it has read into."""
    caller = next((each for each in frames.stack(sys._getframe(2)) if not _is_ours(each)), None)
    return caller is not None and caller.f_globals.get("__name__") == "torch._utils"


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("gpumagic.")


def is_free_to_read(tensor: torch.Tensor) -> bool:
    """Return whether reading the tensor's values costs no copy."""
    return tensor.device.type in ("cpu", "meta")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of all examples, where `vmap` shows a function one."""
    if torch.compiler.is_compiling():  # the compiler reads this function and cannot look into the next
        return tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def device_of(tensor: torch.Tensor) -> str:
    """Return a tensor's device by name."""
    return str(tensor.device)


def watch_gradients(recorder: Recorder, source: object, result: object) -> None:
    """Count the copy that a gradient makes on its way back from ``result`` to ``source``, if ever it does."""
    if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)) or recorder.hooks is None:
        return
    if not source.requires_grad or source.device == result.device or "meta" in (source.device.type, result.device.type):
        return
    node = _node(result)
    if node is None:  # under no_grad
        return
    run = weakref.ref(recorder)

    def count(given: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]) -> None:
        recorder = run()
        if recorder is not None:
            _count(recorder, given, arrived)

    recorder.hooks.add(node.register_hook(count))


def _node(result: torch.Tensor) -> Any:
    """Return the node of the graph that copies back; of what was written to a view, its base's."""
    node, base = result.grad_fn, result._base
    is_view = node is not None and base is not None and "Copy" not in node.name()
    return base.grad_fn if is_view and base is not None else node


def _count(recorder: Recorder, given: tuple[Any, ...], arrived: tuple[Any, ...]) -> None:
    start = next((each for each in arrived if each is not None), None)
    if start is None:
        return
    for gradient in given:
        if gradient is not None and gradient.device != start.device:
            recorder.here().add_move(start, gradient, None, CAUSE)
            watch_gradients(recorder, start, gradient)  # where the gradient itself is differentiated
