"""Runs cells of third-party code under torch's context, `%%ondevice` and `--trace`, and writes THIRD_PARTY*.md.

A cell is right if it computes the same each time with the same copies and the same peak, its report has the copies
that the devices counted, on the lines that a debugger's hook finds, and what `%devices` says afterwards is true: each
name that it shows evaluates to that very tensor, each line that promises bytes frees so many by the allocator, in a
fork, and what it tells of a device adds up to what the allocator has. What a report advises is done to the cell, which
then saves what was said. Needs the libraries, by the names that the table has; cells of those that are not installed
are left out.

    python -m tests.transfers.third_party [--held-out] [LIBRARY ...]
    python -m gpumagic.fakecuda --devices 2 -- python -m tests.transfers.third_party
"""

from __future__ import annotations

import contextlib
import gc
import io
import linecache
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpumagic
from gpumagic import fakecuda, simgpu
from gpumagic.heap import storages
from gpumagic.tensors.leaks_view import promises
from gpumagic.transfers.run import DeviceRun
from tests.transfers import ondevice_corpus as corpus
from tests.transfers.third_party_cells import Cell, cells, held_out_cells

RESULTS = Path(__file__).parent / "THIRD_PARTY.md"
WAYS = ("torch.device", "plain", "trace")
HOOKED = "torch.device, each line followed"
"""Another run in the bare way, in which a debugger's hook looks at the devices' count of copies after each line."""
LARGEST = 1
"""Of the tensors of a cell that variables reach, `--why` is asked about so many, the largest."""
MODULES = {
    "scikit-learn": "sklearn", "pyro-ppl": "pyro", "pytorch-ignite": "ignite", "open-clip-torch": "open_clip",
    "neuraloperator": "neuralop",
}  # fmt: skip
"""The modules of libraries that are called otherwise than their packages."""
LONGEST = 6.0
"""Seconds of a cell on CUDA without kernels, of this process: a loop that ends by a value has none to end by there."""
COUNTED: Counter[str] = Counter()
"""How many lines that promise bytes were run."""


class NoValueEndsItError(Exception):
    """A cell waits for a value that no kernel computes."""


@dataclass
class Outcome:
    """What a run of a cell gave."""

    out: Any = None
    error: str = ""
    copies: Any = None
    lines: Counter[Any] = field(default_factory=Counter)
    """The copies and the bytes by line, source and target."""
    peak: int | None = None
    """Bytes of the device at most, beyond what was there before."""
    report: Any = None
    graphs: int = 0
    untrue: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Runs:
    """Runs cells on simulated devices, or on CUDA over the fake runtime, where no value is known."""

    def __init__(self, *, asks_devices: bool = True) -> None:
        self._asks_devices = asks_devices
        self.has_values = not fakecuda.is_enabled()
        self.device = "simgpu:0" if self.has_values else "cuda:0"
        if self.has_values:
            simgpu.enable(devices=2, memory="4GiB")

    def run(self, cell: Cell, way: str, *, asks_devices: bool = True) -> Outcome:
        """Run a cell in a namespace of its own."""
        found = Outcome()
        space: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
        code = self._compile(cell, way)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        _forget_graphs()
        guard = (
            DeviceRun(self.device, namespace=space, trace=way == "trace")
            if way in WAYS[1:]
            else None
        )
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            memory = self._begin()
            stack.enter_context(contextlib.nullcontext() if self.has_values else _ended_at(LONGEST))
            if way == HOOKED:
                stack.enter_context(_counting_by_line(code.co_filename, self._copies, found.lines))
            if guard is None:
                stack.enter_context(torch.device(self.device))
            else:
                guard.open()
            try:
                exec(code, space)
            except Exception as error:
                found.error = re.sub(
                    "0x[0-9a-f]+", "0x", f"{type(error).__name__}: {str(error)[:100]}"
                )
            finally:
                copies = self._copies()
                found.peak = torch.accelerator.max_memory_allocated(self.device) - memory
                if guard is not None:
                    guard.close(None)
                gc.enable()
        found.seconds = time.perf_counter() - start
        found.out, found.copies, found.graphs = space.get("out"), corpus.counted(copies), _graphs()
        if guard is not None and guard.report is not None:
            found.report = guard.report
            for row in guard.report:
                found.lines[row.line, row.source, row.target, "copies"] += row.count
                found.lines[row.line, row.source, row.target, "bytes"] += row.nbytes
            found.untrue = (
                _untrue(space, self.device) if asks_devices and self._asks_devices else []
            )
        return found

    def _compile(self, cell: Cell, way: str) -> Any:
        name, source = (
            f"<{cell.library} {cell.name} {way}>",
            cell.code.replace("DEVICE", self.device),
        )
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        return compile(source, name, "exec")

    def _begin(self) -> int:
        gc.collect()
        gc.collect()  # what finalizers of the first have let go
        if self.has_values:
            simgpu.reset_copies()
        else:
            torch.cuda.empty_cache()  # each run starts from the same memory: without kernels, left-overs are values
            fakecuda.reset()
        gc.disable()  # a collection at another time would give another peak
        torch.accelerator.reset_peak_memory_stats(self.device)
        return torch.accelerator.memory_allocated(self.device)

    def _copies(self) -> list[Any]:
        return simgpu.copies() if self.has_values else [each[:4] for each in fakecuda.copies()]


@contextlib.contextmanager
def _counting_by_line(
    filename: str, copies: Callable[[], list[Any]], lines: Counter[Any]
) -> Iterator[None]:
    """Count each line's copies in the frames of a file, by asking the devices after each line that runs there."""
    running: list[int] = []
    seen = 0

    def tell() -> None:
        nonlocal seen
        now = copies()
        for _, source, target, nbytes in now[seen:]:
            if running and source != target:
                lines[running[-1], source, target, "copies"] += 1
                lines[running[-1], source, target, "bytes"] += nbytes
        seen = len(now)

    def follow(frame: Any, event: str, _: object) -> Any:
        if frame.f_code.co_filename != filename:
            return None
        tell()
        if event == "call":
            running.append(frame.f_lineno)
        elif event == "line":
            running[-1] = frame.f_lineno
        elif event == "return":
            running.pop()
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        yield
    finally:
        sys.settrace(before)
        tell()


@contextlib.contextmanager
def _ended_at(limit: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise NoValueEndsItError(
            f"it runs on for {limit:.0f} s and more, where no kernel computes what would end it"
        )

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _forget_graphs() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()


def _graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else dynamo.utils.counters["stats"]["unique_graphs"]


def _untrue(space: dict[str, Any], device: str) -> list[str]:
    """Return what `%devices` says that is not so."""
    gc.unfreeze()  # `%devices` sees what libraries keep
    gc.collect()
    gc.disable()  # else a collection takes, some time, what is told to come back by one
    try:
        report = gpumagic.devices(namespace=space)
        return [
            *_wrong_names(report, space),
            *_wrong_sums(report),
            *_wrong_promises(report, space, device),
        ]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        gc.enable()


def _wrong_names(report: Any, space: dict[str, Any]) -> Iterator[str]:
    for row in report:
        for name in row.names:
            try:
                value = eval(name, space)
            except Exception as error:
                yield f"{name}: {type(error).__name__}"
                continue
            if isinstance(value, torch.UntypedStorage):
                numbers = [storages.number_of(value)]
            else:
                numbers = storages.StorageTable().numbers(value)
            if set(row.numbers).isdisjoint(numbers):
                yield f"{name} is another tensor"


def _wrong_sums(report: Any) -> Iterator[str]:
    for device in report.by_device:
        if device.allocated is not None and device.unexplained is not None:
            total = device.in_rows + (device.workspaces or 0) + device.unexplained
            if total != device.allocated or device.unexplained < 0:
                yield f"{device.device} adds up to {total:,} of {device.allocated:,}"


def _wrong_promises(report: Any, space: dict[str, Any], device: str) -> Iterator[str]:
    """Run each line that promises bytes of a device in a fork."""
    held = [row for row in report.leaks() if row.device == device]
    lines = [
        ("\n".join(promise.lines()), sum(row.nbytes for row in promise.rows))
        for promise in promises(held)
    ]
    largest = sorted(
        (row for row in report if row.device == device and row.name),
        key=lambda row: -(row.nbytes or 0),
    )
    for row in largest[:LARGEST]:
        why = gpumagic.why(row.name, namespace=space)
        if why.frees is not None:
            lines += [("; ".join(why.lines()), why.frees)]
    for line, promised in dict(lines).items():
        freed = _freed_by(line, space, device)
        COUNTED["promises"] += 1
        if freed != promised:
            yield (
                f"{line!r} frees {freed:,}, not {promised:,}"
                if isinstance(freed, int)
                else f"{line!r}: {freed}"
            )


def _freed_by(line: str, space: dict[str, Any], device: str) -> int | str:
    """Return the bytes that a line frees, by the allocator, in a fork, where it changes nothing for others."""
    kind, _, number = device.partition(":")

    def allocated(index: int) -> int:
        if kind == "cuda":  # torch.cuda.memory_allocated is 0 in a fork
            return torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"]["current"]
        return getattr(torch, kind).memory_allocated(index)

    return freed_in_fork(lambda: exec(line, space), lambda: allocated(int(number)))


def freed_in_fork(free: Callable[[], object], allocated: Callable[[], int]) -> int | str:
    """Return the bytes that a function frees in a fork, or how it failed there."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads: torch's wait for work, and hold no lock
        child = os.fork()
    if not child:
        try:
            before = allocated()
            free()
            told = str(before - allocated())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return int(told) if told.lstrip("-").isdigit() else told or "it died"


def same(one: Any, other: Any) -> bool:
    """Return whether two results are the same, but for rounding."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(
            one.cpu().double(), other.cpu().double(), equal_nan=True
        )
    if isinstance(one, float):
        return (
            one == other
            or abs(one - other) <= 1e-5 * max(abs(one), abs(other))
            or (isnan(one) and isnan(other))
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def faults(found: dict[str, Outcome], *, has_values: bool) -> list[str]:
    """Return what is wrong with a cell's runs."""
    base, said = found["torch.device"], []
    for way in WAYS[1:]:
        here = found[way]
        if here.error != base.error:
            said.append(f"{way}: {here.error or 'no error'}, not {base.error or 'none'}")
        elif has_values and not base.error and not same(base.out, here.out):
            said.append(f"{way}: another result")
        if has_values and not base.error and here.copies != base.copies:
            said.append(f"{way}: copied {_brief(here.copies)}, bare {_brief(base.copies)}")
        hooked = found.get(HOOKED, base)  # the second run: the first may fill a library's caches
        if has_values and not base.error and here.peak not in (base.peak, hooked.peak):
            said.append(f"{way}: a peak of {here.peak:,} B, bare {hooked.peak:,} B")
        if here.graphs != base.graphs:
            said.append(f"{way}: {here.graphs} graphs, not {base.graphs}")
        if here.report is None:
            continue
        told = corpus.reported(here.report)
        if _differ(told, here.copies):
            said.append(f"{way}: told {_brief(told)}, made {_brief(here.copies)}")
        if HOOKED in found and not base.error and here.lines != hooked.lines:
            said.append(
                f"{way}: on lines {dict(here.lines - hooked.lines)}, not {dict(hooked.lines - here.lines)}"
            )
    return said


@dataclass(frozen=True)
class Followed:
    """What became of a cell once a piece of advice was followed."""

    advice: str
    said: int
    """What it saves: bytes, or copies or syncs where no bytes are told."""
    saved: int
    fault: str


def follow(runs: Runs, cell: Cell, bare: Outcome, plain: Outcome) -> list[Followed]:
    """Do to a cell what each piece of advice about it says, alone, and compare."""
    found = []
    for advice in plain.report.advice if plain.report is not None else ():
        edits = next((edits for phrase, edits in cell.edits.items() if phrase in str(advice)), ())
        code = cell.code
        for old, new in edits:
            code = code.replace(old, new)
        if code == cell.code:
            found.append(Followed(str(advice), 0, 0, "nobody followed it"))
            continue
        after = runs.run(replace(cell, code=code), "plain", asks_devices=False)
        said, saved = _savings(advice, plain, after)
        fault = after.error or ("" if same(bare.out, after.out) else "another result")
        if not fault and any(each.problem == advice.problem for each in after.report.advice):
            fault = "it is advised still"
        if not fault and (saved != said if advice.saves is not None else saved < 0.9 * said):
            fault = f"saves {saved:,}, not {said:,}"
        found.append(Followed(str(advice), said, saved, fault))
    return found


def _savings(advice: Any, before: Outcome, after: Outcome) -> tuple[int, int]:
    """Return what a piece of advice says that it saves, and what it saved."""
    if advice.saves is not None:
        return advice.saves, sum(before.copies[1].values()) - sum(after.copies[1].values())
    found = re.match(r"([\d,]+) (copies|syncs)", advice.problem)
    if found is None:
        return 0, 0  # what overlaps or goes is not counted here
    is_of_syncs = found[2] == "syncs"
    counts = [
        (each.report.syncs if is_of_syncs else each.copies[0]).values() for each in (before, after)
    ]
    return int(found[1].replace(",", "")), sum(counts[0]) - sum(counts[1])


def _differ(told: Any, made: Any) -> bool:
    return [+each for each in told] != [+each for each in made]


def _brief(totals: Any) -> str:
    return ", ".join(
        f"{source} to {target} {n} of {totals[1][source, target]:,} B"
        for (source, target), n in totals[0].items()
    )


def main(libraries: list[str]) -> None:
    """Run the cells and write the table."""
    held_out = "--held-out" in libraries
    libraries = [each for each in libraries if each != "--held-out"]
    runs, rows, wrong = Runs(), Counter[str](), []
    total, whole = Counter[str](), Counter[str]()
    skipped, advised = [], []
    for cell in held_out_cells() if held_out else cells():
        if cell.library not in (libraries or [cell.library]) or not _import_what_it_imports(cell):
            continue
        total[cell.library] += 1
        found = {"torch.device": runs.run(cell, "torch.device")}
        if NoValueEndsItError.__name__ in found["torch.device"].error:
            skipped.append(f"- {cell.library}, {cell.name}: {found['torch.device'].error}")
            continue
        if held_out and runs.has_values:
            found[HOOKED] = runs.run(cell, HOOKED)
        found |= {way: runs.run(cell, way) for way in WAYS[1:]}
        said = faults(found, has_values=runs.has_values)
        said += [f"%devices after it: {each}" for each in found["plain"].untrue[:3]]
        followed = follow(runs, cell, found["torch.device"], found["plain"]) if held_out else []
        said += [f"{each.advice}: {each.fault}" for each in followed if each.fault]
        advised += [
            f"| {cell.name} | {each.advice} | {each.said:,} | {each.saved:,} |" for each in followed
        ]
        rows[cell.library] += not said
        if not found["torch.device"].error:
            whole[cell.library] += 1
        else:
            skipped.append(f"- {cell.library}, {cell.name}: {found['torch.device'].error}")
        if said:
            wrong.append(f"- {cell.library}, {cell.name}: {'; '.join(said)}")
            print(wrong[-1], flush=True)
        text = _table(runs, total, whole, rows, skipped, wrong, advised)
        if not libraries:
            kind = "_HELD_OUT" * held_out + "_CUDA" * (not runs.has_values)
            RESULTS.with_stem(RESULTS.stem + kind).write_text(text, encoding="utf-8")
    print(text)


def is_installed(cell: Cell) -> bool:
    """Return whether the library is here that a cell is about."""
    return find_spec(MODULES.get(cell.library, cell.library.replace("-", "_"))) is not None


def _import_what_it_imports(cell: Cell) -> bool:
    """Import first what a cell imports, which counts for no run; return whether that is installed."""
    if not is_installed(cell):
        return False
    for line in cell.code.splitlines():
        if line.startswith(("import ", "from ")):
            try:
                exec(line.partition(";")[0], {})
            except Exception as error:
                print(f"{cell.library} cannot be imported: {error}")
                return False
    gc.collect()
    gc.freeze()  # what is imported need not be looked through before each run
    return True


def _table(
    runs: Runs, total: Counter[str], whole: Counter[str], right: Counter[str], failing: list[str], wrong: list[str],
    advised: list[str],
) -> str:  # fmt: skip
    about = (
        f"Written by `third_party.py` on {runs.device.partition(':')[0]}, Python {sys.version.split()[0]}, torch "
        f"{torch.__version__}. Each ran under `with torch.device(...)`, `%%ondevice` and `--trace`. It is right if "
        "results, graphs, copies and peaks are the same, the report equals the devices' own count of copies, and what "
        "`%devices` says afterwards is true: every name is that tensor, the sums are the allocator's, and lines that "
        f"promise bytes free so many by the allocator ({COUNTED['promises']:,} lines, each run in a fork)."
    )
    lines = [
        "# Cells of third-party code under `%%ondevice`", "", about, "",
        "| library | version | cells | run to their end | right |",
        "| --- | --- | ---: | ---: | ---: |",
        *(f"| {name} | {version(name)} | {n} | {whole[name]} | {right[name]} |" for name, n in sorted(total.items())),
        f"| all | | {sum(total.values())} | {sum(whole.values())} | {sum(right.values())} |", "",
    ]  # fmt: skip
    if advised:
        lines += [
            "## Advice that was followed", "", "Bytes, or copies or syncs where no bytes are told.", "",
            "| cell | advice | says | saved |", "| --- | --- | ---: | ---: |", *advised, "",
        ]  # fmt: skip
    if wrong:
        lines += ["## Not right", "", *wrong, ""]
    if failing:
        why = "; no kernel computes a value here, so cells that need one fail, or do not end and are not compared"
        lines += [
            f"## Fail under `with torch.device(...)` too{'' if runs.has_values else why}",
            "",
            *failing,
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    gpumagic.__version__  # noqa: B018  # fails here where gpumagic is not on the path
    main(sys.argv[1:])
