"""What a soak runs: stories of a few cells, drawn from the corpora of the tests."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

SMALL, LARGE = "128MiB", "1GiB"


@dataclass(frozen=True)
class Story:
    """Cells of one corpus, on devices of their own size."""

    name: str
    setup: tuple[str, ...]
    cells: tuple[str, ...]
    """Those that may be disturbed."""
    ends: tuple[str, ...] = ()
    """What puts away what the cells have started on purpose."""
    memory: str = LARGE
    fails: str | None = ""
    """How the cells fail where nothing disturbs them: "" not at all, None is unknown."""


LOOKS = (
    "%gpuinfo", "%gpuinfo -p", "%gpuinfo -a", "r = %gpuinfo", "%devices", "%devices --by kind",
    "%devices --diff", "%devices --leaks", "%devices --free",
    "%devices -n 3 --by holder", "%devices --why x", "%reload_ext gpumagic",
)  # fmt: skip
_STARTED = (
    ("%gpuinfo --each-cell on", "%gpuinfo --each-cell off"),
    ("%gpuinfo -w 0.2", "%gpuinfo -w off"),
    ("%oomguard on", "%oomguard off"),
)
_KEEPS = ("", "", "-q", "-o kept")


def draw(rng: random.Random, backend: str, kinds: tuple[str, ...] = ()) -> Story:
    """Return a random story for a backend, of these kinds only where any are given."""
    makers = {
        "ondevice": _on_device,
        "oom": _out_of_memory,
        "dryrun": _dry_run,
        "looking": _looking,
        "all": _under_all,
    }
    return makers[rng.choice(kinds or ("ondevice", *makers))](rng, backend)


def _on_device(rng: random.Random, backend: str) -> Story:
    cell = rng.choice(_ondevice_cells(backend))
    lines, fails = ["%%ondevice " + " ".join((rng.choice("01"), rng.choice(_KEEPS)))], None
    if rng.random() < 0.4:
        lines[0] += " --trace"
    if cell.asks:
        lines[0] += f" --move {cell.asks}"
    if rng.random() < 0.2:
        lines.insert(rng.randrange(2), "%%oomguard")
    return Story(
        f"ondevice, {cell.name}",
        (_setup_on_device(backend),),
        ("\n".join((*lines, cell.code)),),
        fails=fails,
    )


def _out_of_memory(rng: random.Random, backend: str) -> Story:
    case = rng.choice(_failing_cells())
    options = rng.choice(("", "", "--keep-going", "--debug", "--fallback cpu", "--shrink batch"))
    above = rng.choice(("", "", "", "%%ondevice 0\n"))
    cell = case.cell.replace("-o report", f"{rng.choice(_KEEPS)} {options}", 1)
    earlier = (_PRELUDE, *case.setup)
    story = Story(f"oom, {case.name}", earlier, (above + cell,), memory=case.memory, fails=None)
    return _of_backend(story, backend)


def _dry_run(rng: random.Random, backend: str) -> Story:
    name, (setup, cell) = rng.choice(_dryrun_cells())
    options = rng.choice(
        ("", "", "--capacity 4GiB", "--fit batch --capacity 4GiB", "--run", "-o kept")
    )
    fails = "UsageError" if "--fit" in options and "batch = " not in cell else ""
    earlier = (_dryrun_common(), *([setup] if setup else []))
    return _of_backend(
        Story(
            f"dryrun, {name}",
            earlier,
            (f"%%dryrun {options}\n{cell.strip()}",),
            fails=fails or None,
        ),
        backend,
    )


def _looking(rng: random.Random, backend: str) -> Story:
    start, end = rng.choice(_STARTED)
    cell = rng.choice(_ondevice_cells(backend))
    looks = rng.sample(LOOKS, 3)
    cells = (start, looks[0], f"%%ondevice 1\n{cell.code}", looks[1], looks[2])
    return Story(
        f"looking, {cell.name}", (_setup_on_device(backend),), cells, ends=(end,), fails=None
    )


def _under_all(rng: random.Random, backend: str) -> Story:
    """Return a cell of one corpus after another, on the same devices."""
    cells = tuple(f"%%ondevice {rng.choice('01')} -o kept{n}\n{cell.code}"
                  for n, cell in enumerate(rng.sample(_ondevice_cells(backend), 3)))  # fmt: skip
    looks = tuple(rng.sample(LOOKS, 2))
    return Story("several on devices", (_setup_on_device(backend),), (*cells, *looks), fails=None)


def _of_backend(story: Story, backend: str) -> Story:
    def said(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(text.replace("simgpu", backend) for text in texts)

    return Story(
        story.name,
        said(story.setup),
        said(story.cells),
        said(story.ends),
        story.memory,
        story.fails,
    )


def _setup_on_device(backend: str) -> str:
    from tests.transfers import ondevice_corpus

    return str(ondevice_corpus.SETUP.replace("simgpu", backend))


@functools.cache
def _ondevice_cells(backend: str) -> list:
    from dataclasses import replace

    from tests.transfers import ondevice_corpus

    found = [
        each for each in ondevice_corpus.cells() if each.needs is None or each.needs == backend
    ]
    return [replace(each, code=each.code.replace("simgpu", backend)) for each in found]


@functools.cache
def _failing_cells() -> list:
    from tests.oom import oom_corpus

    return [each for each in oom_corpus.cases() if not each.strangers]


_PRELUDE = "import torch\nfrom torch import nn\nimport torch.nn.functional as F"


@functools.cache
def _dryrun_cells() -> list:
    from tests.dryrun import dryrun_cells

    return list(dryrun_cells.CELLS.items())


def _dryrun_common() -> str:
    from tests.dryrun import dryrun_cells

    return str(dryrun_cells.COMMON)
