"""The soak's part in the kernel: what a cell must leave as it was, and how a cell is disturbed.

The driver runs `begin` once, and after each cell `check`, in a cell of its own: what a second Ctrl-C kept from being
put back, the beginning of the next cell does, so that it is looked at from there.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, MethodType
from typing import Any

import torch
import torch._dynamo  # exchanges torch.manual_seed, and an optimizer would import it anyway
import torch.nn.functional
import torch.utils._device
from IPython import get_ipython
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

import gpumagic

PACKAGE = str(Path(gpumagic.__file__).parent) + os.sep
_IDENTICAL = (
    torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.UntypedStorage, torch.storage, torch.autograd,
    torch.autograd.Function, torch.random, torch._tensor, torch.serialization, torch.utils.checkpoint,
    builtins, gc, linecache, sys, threading, traceback, warnings,
)  # fmt: skip
_CHANGES = {
    # what Python, torch and IPython themselves change
    "sys": {
        "last_type", "last_value", "last_traceback", "last_exc", "stdout", "stderr", "stdin", "path", "argv",
        "path_importer_cache",
    },
    "builtins": {"_"},
    "warnings": {"_filters_version", "filters", "_filters_mutated_lock"},
    "threading": {"_main_thread", "_active", "_limbo", "_shutdown_locks", "_dangling"},
    "linecache": {"cache"},
}  # fmt: skip
_CLASSES = ("Tensor.", "Module.", "UntypedStorage.", "Function.")
"""To which nothing is added, whereas modules import others as they go."""
_baseline: dict[str, Any] = {}
_most: dict[str, int] = {}


def begin(backend: str) -> None:
    """Remember how everything is, and have a crash tell where."""
    faulthandler.enable(2)
    get_ipython().user_ns_hidden["inside"] = sys.modules[__name__]  # `forget` leaves it there
    _baseline.update(
        backend=backend, identities=_identities(), state=_state(backend), shell=_shell_state()
    )


def arm(line: int) -> None:
    """Raise KeyboardInterrupt in the next cell, at the so many-th line of gpumagic's that it comes to."""
    Interrupt(line).arm()


def check(text: str | None, *, goes_on: bool) -> str:
    """Return, as JSON, what the last cell has left changed, and where it was interrupted.

    Args:
        text: the cell, where it was to be in the history.
        goes_on: whether the story has started on purpose what outlives a cell.
    """
    where, Interrupt.last = Interrupt.last, ""
    found = list(_differences(_baseline["identities"], _identities()))
    found += _differences(_baseline["state"], _state(_baseline["backend"]))
    found += _differences(_baseline["shell"], _shell_state()) if not goes_on else ()
    if text is not None:
        found += _history(text)
    found += _threads() if not goes_on else ()
    return json.dumps({"where": where, "found": found})


def forget(capacity: str, patience: float = 3.0) -> str:
    """End a story: drop its variables, and return as JSON what is still on a device, or open."""
    shell, backend = get_ipython(), _baseline["backend"]
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.InteractiveTB.tb = shell.InteractiveTB.pdb = None
    _clear(shell)
    shell.last_execution_result = None
    found = []
    gc.collect()
    if backend == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # torch's own, which stay until they are cleared
    deadline = time.monotonic() + patience
    while any(held := _allocated(backend)) and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    if any(held):
        found.append(f"bytes on the devices after all was deleted: {held}: {_holders()}")
    getattr(torch, backend).empty_cache()
    found += _files()
    if not any(held):
        resize(capacity)
    return json.dumps({"where": "", "found": found})


def _clear(shell: Any) -> None:
    for name in [
        each
        for each in shell.user_ns
        if each not in shell.user_ns_hidden and each not in ("In", "Out")
    ]:
        shell.user_ns.pop(name, None)
    shell.displayhook.flush()
    for names in (
        shell.user_ns,
        shell.user_ns_hidden,
    ):  # IPython 7 has its outputs in the second, too
        names.update({name: "" for name in names if re.fullmatch(r"_\d*|__|___", name)})
    vars(shell.displayhook).update({"_": "", "__": "", "___": ""})
    shell.user_ns["Out"].clear()


def resize(capacity: str) -> None:
    """Give the devices another capacity."""
    if _baseline["backend"] == "simgpu":
        gpumagic.simgpu.enable(devices=2, memory=capacity)
        return
    from gpumagic import fakecuda
    from gpumagic.report.units import parse_size

    for device in range(2):
        fakecuda.set_memory(device, capacity=parse_size(capacity))


_ballast: list[torch.Tensor] = []


def fill(fraction: float) -> None:
    """Take a part of the first device, as another process would, until `empty`."""
    module = getattr(torch, _baseline["backend"])
    free, _ = module.mem_get_info(0)
    with contextlib.suppress(torch.OutOfMemoryError):
        _ballast.append(
            torch.empty(int(free * fraction), dtype=torch.uint8, device=f"{_baseline['backend']}:0")
        )


def empty() -> None:
    """Undo `fill`."""
    _ballast.clear()


def reread_driver() -> None:
    """Have the stub of the driver read its machine again."""
    import ctypes

    ctypes.CDLL("libnvidia-ml.so.1").nvml_stub_reload()


class Interrupt:
    """Raises KeyboardInterrupt in the next cell, at a line of gpumagic's that had not run in it before."""

    last = ""

    def __init__(self, line: int) -> None:
        self._left = line
        self._seen: set[tuple[Any, int]] = set()
        self._starts = 0

    def arm(self) -> None:
        get_ipython().events.callbacks["pre_run_cell"].insert(0, self._cell_starts)

    def _cell_starts(self, info: Any) -> None:
        self._starts += 1
        if self._starts == 1:
            sys.settrace(self._trace)
            return
        sys.settrace(None)
        get_ipython().events.callbacks["pre_run_cell"].remove(self._cell_starts)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if self._left < 0 or not file.startswith(PACKAGE):
            return None
        place = (frame.f_code, frame.f_lineno)
        if event == "line" and place not in self._seen:
            self._seen.add(place)
            self._left -= 1
            if self._left < 0:
                Interrupt.last = (
                    f"{file[len(PACKAGE) :]}:{frame.f_lineno} in {frame.f_code.co_name}"
                )
                raise KeyboardInterrupt
        return self._trace


def _identities() -> dict[str, object]:
    return {
        f"{owner.__name__}.{name}": _identity(value)
        for owner in _IDENTICAL
        for name, value in list(vars(owner).items())
        if name not in _CHANGES.get(owner.__name__, ()) and not name.startswith("__")
    }


def _identity(value: Any) -> object:
    return (id(value.__func__), id(value.__self__)) if isinstance(value, MethodType) else id(value)


def _state(backend: str) -> dict[str, object]:
    hooks = torch.nn.modules.module
    return {
        "default device": str(torch.get_default_device()),
        "noted device": str(torch.utils._device.CURRENT_DEVICE),
        "current device": getattr(torch, backend).current_device(),
        "function modes": _len_torch_function_stack(),
        "dispatch modes": _len_torch_dispatch_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled(backend)),
        "anomaly detection": torch.is_anomaly_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "saved tensors hooks": str(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "modules' hooks": {
            name: len(some)
            for name, some in vars(hooks).items()
            if re.match("_global_.*hooks$", name)
        },
        "profiler": torch.autograd._profiler_enabled(),
        "signal": str(signal.getsignal(signal.SIGINT)),
        "trace": (str(sys.gettrace()), str(sys.getprofile())),
        "threads' trace": (str(threading._trace_hook), str(threading._profile_hook)),
        "gc": (gc.isenabled(), gc.get_freeze_count() > 0, [str(each) for each in gc.callbacks]),
        "interval": sys.getswitchinterval(),
        "meta path": [str(each) for each in sys.meta_path],
        "recursion limit": sys.getrecursionlimit(),
    }


def _shell_state() -> dict[str, object]:
    shell = get_ipython()
    sessions = shell.magics_manager.registry["GPUMagic"]._sessions
    events = {
        f"event {name}": [_callback(each) for each in some if not _is_ours(each)]
        for name, some in shell.events.callbacks.items()
    }
    return {
        **events,
        "transformers": [
            _callback(each)
            for each in shell.input_transformers_cleanup + shell.input_transformers_post
        ],
        "ast transformers": len(shell.ast_transformers),
        "own attributes": sorted(
            name for name, value in vars(shell).items() if callable(value) and "__" not in name
        ),
        "matchers": len(getattr(shell.Completer, "custom_matchers", ())),
        "configurables": len(shell.configurables),
        "magics": {kind: len(table) for kind, table in shell.magics_manager.magics.items()},
        "sessions": [
            (len(state.sessions), len(state.begun), len(state.cells))
            for state in sessions._threads.values()
        ],
        "showtraceback": _callback(shell._showtraceback),
        "recorded": _is_idle(),
    }


def _is_ours(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), Interrupt)


def _is_idle() -> dict[str, bool]:
    operators = sys.modules.get("gpumagic.transfers.operators")
    recording = sys.modules.get("gpumagic.transfers.recording")
    idle = {}
    if operators is not None:
        idle["operators"] = operators.kernels.is_idle()
    if recording is not None:
        idle["recording"] = recording.is_idle()
    return idle


def _callback(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name, value in before.items():
        if name not in now:
            yield f"{name} is gone"
        elif now[name] != value:
            yield f"{name} was {value}, is {now[name]}"
    for name in now.keys() - before.keys():
        if name.startswith(_CLASSES):
            yield f"{name} is new"


def _history(text: str) -> Iterator[str]:
    shell = get_ipython()
    raw = shell.history_manager.input_hist_raw
    if raw[-1].strip() != text.strip():
        yield f"the history ends with {raw[-1][:200]!r} instead of {text[:200]!r}"
    if len(raw) != len(shell.user_ns["In"]):
        yield f"the history has {len(raw)} entries, In {len(shell.user_ns['In'])}"


def _threads(patience: float = 2.0) -> Iterator[str]:
    deadline = time.monotonic() + patience
    while True:
        ours = [each.name for each in threading.enumerate() if "gpumagic" in each.name]
        if not ours or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if ours:
        yield f"threads still run: {ours}"


def _files() -> Iterator[str]:
    opened = [_link(path) for path in Path("/proc/self/fd").iterdir()]
    most = _most.setdefault("files", len(opened) + 30)
    if len(opened) > most:
        yield f"{len(opened)} open files: {sorted(opened)}"
    if threading.active_count() > _most.setdefault("threads", threading.active_count() + 15):
        yield f"{threading.active_count()} threads: {sorted(each.name for each in threading.enumerate())}"


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _allocated(backend: str) -> list[int]:
    module = getattr(torch, backend)
    return [module.memory_allocated(index) for index in range(module.device_count())]


def _holders() -> list[str]:
    from gpumagic.tensors import scan

    report = scan.scan(get_ipython().user_ns, shell=get_ipython(), thorough=True)
    return [f"{row.names} {row.nbytes} {row.holder}" for row in report.rows if row.device != "cpu"][
        :5
    ]
