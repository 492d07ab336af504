"""The plain Python API: the magics without IPython, for scripts, functions and notebooks that have no magics."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from gpumagic import notebook
from gpumagic.memory.devices import resolve

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumagic.dryrun.report import DryRunReport
    from gpumagic.gpus.report import GPUReport
    from gpumagic.oom.guard import OomGuard
    from gpumagic.options import Ranks
    from gpumagic.tensors.report import FreedReport, TensorReport, WhyReport
    from gpumagic.transfers.lines import Function
    from gpumagic.transfers.run import DeviceRun


def gpuinfo(
    *devices: str, processes: bool = False, everything: bool = False
) -> GPUReport:
    """Return the state of the GPUs joined with this process's use of them; never initialises CUDA.

    Args:
        devices: only these, such as ``"cuda:1"``; all without.
        processes: also show the processes on each GPU.
        everything: also show all figures that a device has.

    Raises:
        DeviceNotFound: a device that is not here.
    """
    from gpumagic.gpus import probe

    # The probe reads the names itself: `resolve` asks torch, which would start CUDA's driver.
    return probe.read_gpus(devices, processes=processes, everything=everything)


def devices(
    *devices: str,
    by: str | None = None,
    limit: int | None = 20,
    namespace: Mapping[str, object] | None = None,
) -> TensorReport:
    """Return the live tensors of this process, one row per storage.

    ``report.since(earlier)`` is the difference between two reports, ``report.leaks()`` what no variable
    reaches; no report keeps a tensor alive.

    Args:
        devices: only these, such as ``"cuda:1"``; all without.
        by: show totals by ``"dtype"``, ``"kind"`` or ``"holder"`` instead of rows.
        limit: how many rows to show; the report has all.
        namespace: where names are looked up; the caller's globals by default.

    Raises:
        DeviceNotFound: a device that is not here.
    """
    from gpumagic.tensors import scan

    if namespace is None:
        namespace = sys._getframe(1).f_globals
    names = [resolve(device) for device in devices]
    return scan.scan(
        namespace,
        devices=names,
        group_by=by,
        limit=limit,
        shell=_shell_of(namespace),
        thorough=True,
    )


def why(name: str, *, namespace: Mapping[str, object] | None = None) -> WhyReport:
    """Return every holder of one tensor, with the shortest way from each and the line that releases it.

    Args:
        name: the tensor's, such as ``"model.fc.weight"``; or ``"Out[12]"``, or its number in a `LeakReport`.
        namespace: where names are looked up; the caller's globals by default.

    Raises:
        OptionError: no live tensor goes by this name.
    """
    from gpumagic.tensors import why

    if namespace is None:
        namespace = sys._getframe(1).f_globals
    return why.find_holders(name, namespace, _shell_of(namespace))


def free_leaks() -> FreedReport:
    """Have IPython and Python release outputs and the last error that hold tensors which no variable reaches.

    Variables, and outputs without such tensors, stay as they are. Variables are those of the running IPython, or
    of the main module.
    """
    from gpumagic.tensors import free

    shell = notebook.shell()
    return free.release(notebook.user_variables(shell), shell)


def _shell_of(namespace: Mapping[str, object]) -> InteractiveShell | None:
    """Return the IPython shell whose variables these are: what it keeps beside them is not the user's."""
    shell = notebook.shell()
    return shell if shell is not None and shell.user_ns is namespace else None


def ondevice(
    device: str,
    *,
    move: str | Sequence[str] = (),
    fallback: str | None = None,
    trace: bool | Function | Sequence[Function] = False,
) -> DeviceRun:
    """Return a context manager in which new tensors land on ``device``; its ``report`` has the copies.

    Args:
        device: ``"cuda:1"``, ``"1"``, ``"auto"`` (most free memory), ``"cpu"``, ``"meta"``...
        move: variables of the caller's module or notebook that go there first, ``"model,x"`` or ``["model", "x"]``:
            all of them or, with an error, none.
        fallback: the device to use where ``device`` is not on this machine.
        trace: follow every line, and read the memory around every operator: ``report.by_line`` has time, memory,
            transfers and syncs of each. Functions, or their names such as ``"model.forward"``, alone or in a list, have
            their lines in it too. Small operators then take several times as long.

    Raises:
        DeviceNotFound: the device is not here, and no fallback is given.
        OptionError: a name that cannot be moved. On entering, also that what is to be moved is not there or does not
            fit (`GpuMagicError`).
    """
    from gpumagic.options import variable_names
    from gpumagic.transfers import run

    listed = move if isinstance(move, str) else ",".join(move)
    names = variable_names(listed) if move else []
    functions = (
        trace if isinstance(trace, bool | list | tuple) else [cast("Function", trace)]
    )
    return run.for_caller(resolve(device, fallback), names, trace=functions)


def oomguard(
    *,
    debug: bool = False,
    keep_going: bool = False,
    shrink: str | None = None,
    fallback: str | None = None,
) -> OomGuard:
    """Return a context manager and decorator that turns out-of-memory into a report and gives the memory back.

    What calls again needs a function to call, so ``shrink`` and ``fallback`` are for decorating one:
    ``@gpumagic.oomguard(shrink="batch_size")`` above a function with that parameter.

    Args:
        debug: keep the failed frames for a debugger, and say what they hold.
        keep_going: swallow the failure after the report instead of raising `OutOfMemory`.
        shrink: the parameter to halve, from the value it is called with, until the call fits.
        fallback: the device to call it on at last; ``"auto"`` is the emptiest other one.

    Raises:
        DeviceNotFound: the device to fall back to is not here.
    """
    from gpumagic.oom import rerun
    from gpumagic.oom.guard import OomGuard
    from gpumagic.oom.rerun import Plan

    plan = Plan(shrink, fallback)
    plan.check()
    calls_again = plan != Plan()
    return OomGuard(
        debug=debug,
        keep_going=keep_going,
        namespace=sys._getframe(1).f_globals,
        rerun=functools.partial(rerun.decorate, plan) if calls_again else None,
    )


def dry_run(
    code: str | Callable[[], object],
    namespace: Mapping[str, object] | None = None,
    *,
    device: str | None = None,
    capacity: int | str | None = None,
    gpu: str | None = None,
    ranks: int | str | Ranks | None = None,
    fit: str | None = None,
    time_limit: float = 60.0,
) -> DryRunReport:
    """Return the peak memory that code would need, without running it here and without touching a device.

    It is run in another process, on a device without bytes; nothing of this one changes. The first call starts that
    process, which takes some seconds; it is kept for the next ones.

    Args:
        code: code as a notebook's cell has it, or a callable without arguments.
        namespace: the names that the code sees; the caller's globals by default.
        device: the device asked about, such as ``"cuda:1"``; the first accelerator by default.
        capacity: what a device is to have, in bytes or as ``"16GiB"``; what is free and this process's own without.
        gpu: a GPU that need not be here, such as ``"T4"``: it has that one's properties and memory.
        ranks: how many GPUs each run the code, in a process that torchrun has started: 64, or ``"8x8"`` for machines
            times GPUs of each. Ranks that may differ are run, and the report is of the fullest; see ``report.ranks``.
        fit: an int that the code writes, or that it reads from the namespace, of which to find the largest value with
            which it fits: ``report.largest``; ``"ranks"`` for the fewest of those: ``report.fewest``. The rest of the
            report is of the run with that value.
        time_limit: seconds after which a dry run is stopped; a search for the largest value may take four times that.

    Raises:
        DeviceNotFound: a device that is not here.
        OptionError: the code, the capacity, the GPU or the name cannot be read, or there is no accelerator and neither
            a capacity nor a GPU is given.
        DryRunUnavailable: this system or this torch cannot.
    """
    from gpumagic.dryrun import fitting, run, targets
    from gpumagic.dryrun.script import script_of
    from gpumagic.options import number_of_ranks
    from gpumagic.report.units import parse_size

    if namespace is None:
        namespace = sys._getframe(1).f_globals
    if isinstance(capacity, str):
        capacity = parse_size(capacity)
    processes = None if ranks is None else number_of_ranks(ranks)
    target = targets.choose(device, capacity, gpu, processes)
    script = script_of(code)
    if fit is not None:
        return fitting.largest(script, fit, namespace, target, time_limit)
    return run.dry_run(script, namespace, target, time_limit=time_limit)
