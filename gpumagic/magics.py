"""The magics: one thin method each. Line -> options -> probe -> report; a report shows itself."""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from traitlets import Bool, Float

from gpumagic import api
from gpumagic._compat import output_can_be_silenced
from gpumagic.errors import GpuMagicError, OptionError
from gpumagic.memory import devices
from gpumagic.notebook.cells import running_cell
from gpumagic.notebook.guards import BodyRuns, Guard
from gpumagic.options import ENGINE_TIMEOUT, PARSERS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumagic.cluster.report import ClusterReport
    from gpumagic.notebook.cells import CellSessions
    from gpumagic.tensors.report import TensorReport


def _magic(method: Callable[..., object]) -> Callable[..., object]:
    """Make a method that takes options into a magic: parse the line, answer --help, report errors in one line.

    This is the only place where our errors become IPython's `UsageError`.
    """
    declared = PARSERS[method.__name__]

    @functools.wraps(method)
    def magic(self: GPUMagic, line: str, *cell: str | None) -> object:
        __tracebackhide__ = True
        try:
            options = declared.parse_line(line)
            if options.help:
                print(declared.format_help())  # noqa: T201  # help is what was asked for
                return None
            result = method(self, options, *cell)
        except GpuMagicError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt as interrupt:
            # Without the frames of gpumagic that it came in: IPython shows this in place of a traceback
            vars(interrupt)["_render_traceback_"] = lambda: ["KeyboardInterrupt"]
            raise interrupt.with_traceback(None) from None
        if cell and cell[0] is not None:
            assert callable(result)
            result = result()  # the body, ready to run: its errors are the user's own
        return None if line.rstrip().endswith(";") else result

    magic.__doc__ = declared.format_help()
    silenced: Callable[..., object] = output_can_be_silenced(magic)
    return silenced


@magics_class
class GPUMagic(Magics):
    """What the magics do where their line does not say."""

    keep_going = Bool(
        help="Let Run All go on after out-of-memory in a guarded cell."
    ).tag(config=True)
    advice_seconds = Float(
        8.0,
        min=0,
        help="How long dry runs may try the advice of %%oomguard; 0 tries nothing.",
    ).tag(config=True)
    engine_timeout = Float(
        ENGINE_TIMEOUT,
        min=0.1,
        help="Seconds to wait for engines to answer; three times as long before a cell.",
    ).tag(config=True)

    def __init__(self, shell: InteractiveShell, sessions: CellSessions) -> None:
        super().__init__(shell)
        self._sessions = sessions
        self._last: tuple[TensorReport, str] | None = None
        """What `%devices` listed last, and where that was: `--diff` compares with it. It keeps no tensor alive."""

    @line_magic
    @_magic
    def gpuinfo(self, options: Namespace) -> object:
        """Return the state of the GPUs, or follow it."""
        if options.engines is not None:
            return self._on_engines("gpuinfo", options)
        ask = functools.partial(
            api.gpuinfo,
            *options.devices,
            processes=options.processes,
            everything=options.all,
        )
        if not options.each_cell and options.watch is None:
            return ask()
        from gpumagic.gpus import live

        if options.each_cell:
            live.cell_monitor(self.shell).switch(options.each_cell == "on")
        if options.watch == 0:
            live.stop_watching(self.shell)
        if not options.watch:
            return None
        report = ask()
        if not report.rows:  # why there is none does not change by the second
            return report
        return live.watch(self.shell, ask, options.watch)

    @line_magic
    @_magic
    def devices(self, options: Namespace) -> object:
        """Return the live tensors, what changed among them, or what keeps them."""
        if options.engines is not None:
            return self._on_engines("devices", options)
        from gpumagic.tensors import free, scan, why

        words = (
            options.why or []
        )  # of a name, such as "last traceback"; devices may stand behind it
        while len(words) > 1 and devices.is_readable(words[-1]):
            options.devices.append(words.pop())
        only = [devices.resolve(name) for name in options.devices]
        if words:
            return why.find_holders(
                " ".join(words), self.shell.user_ns, self.shell, only
            )
        if options.free:
            return free.release(self.shell.user_ns, self.shell, only)
        everything = scan.scan(
            self.shell.user_ns,
            group_by=options.by,
            limit=options.n,
            shell=self.shell,
            thorough=options.leaks,
        )
        report = everything.narrowed(only)
        last = self._last
        # Since IPython 9.8 `execution_count` is the next cell's (ipython PR#15088).
        self._last = (
            everything,
            f"%devices in cell {self.shell.displayhook.prompt_count}",
        )
        if options.diff:
            if last is not None:
                return report.since(*last)
            from gpumagic.tensors.report import DiffReport

            note = "no %devices came before this one; the next --diff compares with it"
            return DiffReport((), notes=(note,))
        return report.leaks() if options.leaks else report

    @line_cell_magic
    @_magic
    def ondevice(self, options: Namespace, cell: str | None = None) -> object:
        """Run the cell, or the rest of it, on a device."""
        from gpumagic.transfers import move
        from gpumagic.transfers.run import DeviceRun

        if options.device is None:
            here = ", ".join(devices.available())
            raise OptionError(f"%%ondevice needs a device; there are {here}")
        if options.engines is not None:
            return self._cell_of_engines("ondevice", options, cell, options.device)
        device = devices.resolve(options.device, options.fallback)
        if options.move:
            move.check_names(options.move, self.shell.user_ns)
        run = DeviceRun(
            device,
            namespace=self.shell.user_ns,
            move=options.move,
            trace=options.trace,
            show=not options.quiet,
            store=self._store(options.out),
        )
        return self._run(run, cell)

    @line_cell_magic
    @_magic
    def oomguard(self, options: Namespace, cell: str | None = None) -> object:
        """Run the cell, or the rest of it, or every cell, guarded."""
        from gpumagic.oom.guard import OomGuard
        from gpumagic.oom.rerun import Plan

        if options.engines is not None:
            options.keep_going = options.keep_going or self.keep_going
            return self._cell_of_engines(
                "oomguard", options, None if options.state else cell
            )
        plan = Plan(options.shrink, options.fallback)
        runs_again = plan != Plan()
        if runs_again and cell is None:
            raise OptionError(
                "--shrink and --fallback run the cell again, so they need all of it: write %%oomguard on its first line"
            )
        guard = functools.partial(
            OomGuard,
            self.shell,
            debug=options.debug,
            keep_going=options.keep_going or self.keep_going,
            namespace=self.shell.user_ns,
            store=self._store(options.out),
            quiet=options.quiet,
            seconds=self.advice_seconds,
        )
        if options.state:
            from gpumagic.oom import shell

            if cell is not None:
                alone = f"write %oomguard {options.state} in a cell of its own"
                raise OptionError(
                    f"{options.state} is for every cell, not for this one: {alone}"
                )
            print(shell.switch(self.shell, options.state, self._sessions, guard))  # noqa: T201  # how it stands
            return None
        if not runs_again:
            return self._run(guard(is_running=cell is None), cell)
        from gpumagic.oom.rerun import Rerun

        assert cell is not None
        return self._sessions.ready_body(
            Rerun(plan, guard(), self.shell.user_ns, self.shell), cell
        )

    @line_cell_magic
    @_magic
    def dryrun(self, options: Namespace, cell: str | None = None) -> object:
        """Tell what the cell would need, and run it only if it is asked to and fits."""
        from IPython.display import display

        report = api.dry_run(
            self._code(cell),
            self.shell.user_ns,
            capacity=options.capacity,
            ranks=options.ranks,
            fit=options.fit,
            gpu=None if options.gpu is None else " ".join(options.gpu),
        )
        if options.out is not None:
            self.shell.user_ns[options.out] = report
        if not options.run:
            return lambda: report
        display(report)
        if not report.fits:
            raise GpuMagicError(
                f"not run: {report.verdict[:1].lower()}{report.verdict[1:]}"
            )
        return None if cell is None else self._sessions.ready_body(BodyRuns(), cell)

    def _code(self, body: str | None) -> str:
        """Return the body of a cell, below as many lines as stand above it there, which a report counts."""
        info = running_cell(self.shell)
        cell = "" if info is None else info.raw_cell
        if body is None:  # IPython runs the cell, with the line magic on its first line
            line = re.search(r"(?m)^[ \t]*%%dryrun(?!\S).*$", cell)
            if line is None or not cell[line.end() :].strip():
                raise OptionError(
                    "a dry run needs the whole cell: write %%dryrun on its first line, and code below it"
                )
            body = cell[line.end() + 1 :]
        text = body.rstrip()
        whole = cell.rstrip()
        if not whole.endswith(text):
            return body
        above = whole.removesuffix(text)
        return "\n" * above.count("\n") + body

    def _run(self, guard: Guard, cell: str | None) -> object:
        if cell is None:
            self._sessions.start(guard)
            return None
        return self._sessions.ready_body(BodyRuns(guard), cell)

    def _on_engines(self, magic: str, options: Namespace) -> object:
        """Return one report of all engines."""
        from gpumagic.cluster import engines

        return engines.of_line(magic, options, self.engine_timeout)

    def _cell_of_engines(
        self,
        magic: str,
        options: Namespace,
        cell: str | None,
        device: str | None = None,
    ) -> Callable[[], None]:
        """Return what runs a cell on the engines and shows their report."""
        from IPython.display import display

        from gpumagic.cluster import engines

        store = self._store(options.out)

        def show(report: ClusterReport) -> None:
            if store is not None:
                store(report)
            # What the engines raised is shown already.
            has_more = magic != "oomguard" or bool(report.reports)
            if has_more and not options.quiet:
                display(report)

        # Engines that are to run a cell may have to import torch first, so they have three times as long.
        return engines.of_cell(
            magic, options, cell, 3 * self.engine_timeout, show, device
        )

    def _store(self, name: str | None) -> Callable[[object], None] | None:
        return (
            None
            if name is None
            else functools.partial(self.shell.user_ns.__setitem__, name)
        )
