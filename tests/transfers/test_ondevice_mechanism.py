"""A cell under `%%ondevice` sees torch's own functions, runs as under `with torch.device(...)`, and leaves no trace."""

from __future__ import annotations

import contextlib
import functools
import json
import linecache
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils._device
from torch.overrides import TorchFunctionMode

import gpumagic
from gpumagic import simgpu
from gpumagic.source import frames
from gpumagic.transfers import operators, recorder, recording
from gpumagic.transfers.run import DeviceRun
from tests.transfers import ondevice_corpus as corpus
from tests.transfers import transformed
from tests.transfers.ondevice_corpus import SETUP

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(autouse=True)
def _leaves_torch_alone() -> Iterator[None]:
    yield
    assert torch.zeros(1).device.type == "cpu"
    assert torch.utils._device.CURRENT_DEVICE is None
    assert recording.is_idle()
    assert torch._C._len_torch_function_stack() == 0
    assert not has_our_kernels()


def has_our_kernels() -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has("aten::copy_", "PrivateUse1") or has("aten::nonzero", "PrivateUse1")


def run(cell: str, setup: str = "", **names: Any) -> dict[str, Any]:
    """Run a cell on simgpu:1 as the magic does; return its names."""
    space: dict[str, Any] = {}
    exec(SETUP + setup, space)
    space.update(names)
    source = textwrap.dedent(cell).strip()
    code = compile(source, "<cell>", "exec")
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(keepends=True), "<cell>")
    guard = DeviceRun("simgpu:1", namespace=space)
    guard.open()
    try:
        exec(code, space)
    finally:
        guard.close(None)
    return space


def test_what_a_cell_sees_of_torch_is_torchs_own() -> None:
    owners = {
        "torch": torch,
        "Tensor": torch.Tensor,
        "UntypedStorage": torch.UntypedStorage,
        "fft": torch.fft,
    }
    before = {name: dict(vars(owner)) for name, owner in owners.items()}
    seen = run("seen = {name: dict(vars(owner)) for name, owner in owners.items()}", owners=owners)[
        "seen"
    ]
    changed = [
        f"{name}.{key}"
        for name, own in before.items()
        for key in own
        if seen[name][key] is not own[key]
    ]
    assert changed == []


@pytest.mark.parametrize(
    "kept",
    [
        "f",
        "[f][0]",
        "functools.partial(f)",
        "type('Net', (), {'make': staticmethod(f)}).make",
        "lambda n, g=f: g(n)",
    ],
)
def test_a_function_lands_on_the_device_whoever_keeps_it(kept: str) -> None:
    make = eval(kept, {"f": torch.zeros, "functools": functools})
    assert str(run("made = make(2)", make=make)["made"].device) == "simgpu:1"


def test_other_threads_make_their_tensors_where_they_did() -> None:
    names = run(
        """
        import threading
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.zeros(1)))
        thread.start(); thread.join()
        """
    )
    assert names["made"][0].device.type == "cpu"


def test_two_threads_run_on_two_devices_at_once() -> None:
    made, inside = {}, threading.Barrier(2)

    def work(device: str) -> None:
        with gpumagic.ondevice(device):
            inside.wait()
            made[device] = str(torch.zeros(1).device)
            inside.wait()

    threads = [threading.Thread(target=work, args=(f"simgpu:{index}",)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {"simgpu:0": "simgpu:0", "simgpu:1": "simgpu:1"}


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch says so of contexts since 2.8")
def test_the_default_device_is_what_torch_says_it_is() -> None:
    names = run("said = torch.get_default_device()")
    assert str(names["said"]) == "simgpu:1"


def test_an_inner_device_context_wins_and_ends() -> None:
    names = run(
        """
        with torch.device('cpu'):
            inner = torch.zeros(1).device, torch.get_default_device(), torch.tensor([1]).device
        outer = torch.zeros(1).device
        """
    )
    assert [each.type for each in names["inner"]] == ["cpu"] * 3
    assert str(names["outer"]) == "simgpu:1"


def test_a_function_mode_of_the_cell_sees_calls_as_it_would_under_torchs_context() -> None:
    calls = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append((func, "device" in (kwargs or {})))
            return func(*args, **(kwargs or {}))

    names = run("with seen: made = torch.zeros(2)", seen=Seen())
    assert calls == [(torch.zeros, False)]
    assert str(names["made"].device) == "simgpu:1"


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="before, a context counts for more there")
def test_a_default_device_that_the_cell_sets_stays_as_what_any_line_sets() -> None:
    try:
        names = run("torch.set_default_device('cpu'); inner = torch.zeros(1).device")
        assert names["inner"].type == "cpu"
        assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)


def test_an_outer_default_returns() -> None:
    torch.set_default_device("simgpu:0")
    try:
        assert str(run("made = torch.zeros(1)")["made"].device) == "simgpu:1"
        assert str(torch.zeros(1).device) == "simgpu:0"
    finally:
        torch.set_default_device(None)


def test_backward_runs_hooks_without_the_default_device_but_in_sight() -> None:
    """As under `with torch.device`, whose function mode torch takes away for the time of `backward`."""
    cell = """
        made = []
        w = torch.ones(3, requires_grad=True)
        w.register_hook(lambda grad: made.append(torch.zeros(1).device) or grad)
        (w * 2).sum().backward()
        """
    plain: dict[str, Any] = {"torch": torch}
    with torch.device("simgpu:1"):
        exec(textwrap.dedent(cell), plain)
    assert run(cell)["made"] == plain["made"]


def test_checkpointing_recomputes_on_the_device() -> None:
    """As under `with torch.device`, which checkpoints did not take with them in torch 2.6."""
    cell = """
        from torch.utils.checkpoint import checkpoint
        made = []
        def layer(x):
            made.append(str(torch.zeros(1).device))
            return (x * 2).sin()
        checkpoint(layer, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
        """
    plain: dict[str, Any] = {"torch": torch}
    with torch.device("simgpu:1"):
        exec(textwrap.dedent(cell), plain)
    assert run(cell)["made"] == plain["made"]
    assert plain["made"] == ["simgpu:1"] * 2 or torch.__version__ < (2, 11)


def operators_in(graph: str) -> list[str]:
    """Return what a graph does, without its inputs."""
    lines = [line.partition(";")[0].strip() for line in graph.splitlines()]
    return [line for line in lines if "(" in line and not line.startswith("def ")]


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("what", transformed.COMPILED)
def test_compiling_makes_the_same_graphs_and_counts_the_copies_that_run(
    what: str, trace: bool
) -> None:
    def graphs(around: contextlib.AbstractContextManager[Any]) -> tuple[list[str], Any, Any]:
        torch._dynamo.reset()
        made: list[str] = []
        space: dict[str, Any] = {"count": lambda graph, _: made.append(graph.code) or graph.forward}
        exec(SETUP, space)
        simgpu.reset_copies()
        with around as run:
            exec(transformed.COMPILED[what], space)
        copies = corpus.counted(simgpu.copies())
        for name in [name for name, value in space.items() if isinstance(value, torch.Tensor)]:
            del space[name]  # torch keeps the space
        return made, copies, run

    try:
        bare, copies, _ = graphs(torch.device("simgpu:1"))
        under, _, run = graphs(gpumagic.ondevice("simgpu:1", trace=trace))
    finally:
        torch._dynamo.reset()
    if (
        trace
    ):  # its hooks of modules are traced too, and then a graph's inputs come in another order
        under, bare = [operators_in(each) for each in under], [operators_in(each) for each in bare]
    assert under == bare
    assert corpus.reported(run.report) == copies


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("what", transformed.TRACED)
def test_what_runs_under_torchs_context_runs_with_its_copies_counted(
    what: str, trace: bool
) -> None:
    def outcome(around: contextlib.AbstractContextManager[Any]) -> tuple[Any, Any]:
        space: dict[str, Any] = {}
        exec(SETUP + transformed.SETUP, space)
        simgpu.reset_copies()
        with around as run:
            exec(transformed.TRACED[what], space)
        return corpus.counted(simgpu.copies()), run

    copies, _ = outcome(torch.device("simgpu:1"))
    counted, run = outcome(gpumagic.ondevice("simgpu:1", trace=trace))
    assert counted == copies
    assert corpus.reported(run.report) == counted
    json.dumps(run.report.to_dict())


def test_a_script_is_compiled_from_torchs_own_functions() -> None:
    assert run("made = torch.jit.script(the_function)(2)", the_function=for_script)[
        "made"
    ].shape == (2,)


def for_script(n: int) -> torch.Tensor:
    return torch.zeros([n])


@pytest.mark.parametrize("step", ["open", "close"])
def test_an_interrupt_at_any_line_leaves_torch_as_it_was(step: str) -> None:
    """Ctrl-C before each third line of the modules that put in place and put back."""
    for line in range(0, 100_000, 3):
        guard = DeviceRun("simgpu:1", namespace={})
        if step == "close":
            guard.open()
        with interrupt_before(line) as was_interrupted, contextlib.suppress(KeyboardInterrupt):
            guard.open() if step == "open" else guard.close(None)
        if step == "open" and not was_interrupted:
            guard.close(None)
        assert recording.is_idle()
        assert not has_our_kernels()
        if not was_interrupted:
            break
    assert line > 20


@contextlib.contextmanager
def interrupt_before(number: int) -> Iterator[list[bool]]:
    """Raise KeyboardInterrupt before so manieth line of these modules; what is yielded then has True."""
    files = {each.__file__ for each in (recording, recorder, operators)}
    lines, done = iter(range(10**9)), []

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and not done and next(lines) == number:
            done.append(True)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield done
    finally:
        sys.settrace(before)


def test_an_error_in_the_cell_is_the_cells_own() -> None:
    with pytest.raises(TypeError, match="zeros"):
        run("torch.zeros('a')")


def test_an_error_has_no_frame_of_ours() -> None:
    for trace in (False, True):
        try:
            with gpumagic.ondevice("simgpu:1", trace=trace):
                torch.ones(3) + torch.ones(3, device="cpu")
        except RuntimeError as error:
            steps = [
                each.tb_frame.f_globals["__name__"]
                for each in frames.traceback_steps(error.__traceback__)
            ]
        assert steps == [__name__]


def test_a_shell_shows_an_error_without_a_frame_of_ours(
    bare_shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bare_shell.run_line_magic("load_ext", "gpumagic")
    for options in ("", "--trace"):
        bare_shell.run_cell(
            f"%%ondevice simgpu:1 -q {options}\nimport torch\nx = torch.ones(3, device='cpu')\ntorch.ones(3) + x"
        )
        shown = capsys.readouterr().out
        assert "----> 4 torch.ones(3)" in shown
        assert "gpumagic/" not in shown
        assert "hidden" not in shown
    assert "showtraceback" not in vars(bare_shell)
    bare_shell.run_line_magic("unload_ext", "gpumagic")


@pytest.mark.skipif(
    torch.__version__ < (2, 9), reason="rarely one meets a kernel that was to fall through"
)
def test_threads_that_copy_and_read_never_notice_that_cells_begin_and_end() -> None:
    """Each needs the GIL to enter a kernel in Python, and waits for it while the dispatcher forgets the kernel."""
    done, errors = threading.Event(), []

    def work() -> None:
        here, far = torch.ones(4), torch.ones(4, device="simgpu:0")
        try:
            while not done.is_set():
                far.copy_(here)
                assert (far.sum().item(), far.nonzero().tolist()) == (4, [[0], [1], [2], [3]])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for each in threads:
            each.start()
        for _ in range(300):
            with gpumagic.ondevice("simgpu:1"):
                pass
    finally:
        done.set()
        for each in threads:
            each.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert not has_our_kernels()


def test_a_thread_that_copies_just_as_the_run_ends_is_not_disturbed() -> None:
    """The run takes what its threads have counted, and another thread may be about to count."""

    class Emptied(dict):
        def setdefault(self, key, value):
            return value  # and it is gone again

    with gpumagic.ondevice("simgpu:1") as run:
        run._recording.recorder.by_thread = Emptied()
        errors = []

        def copy() -> None:
            try:
                torch.ones(3).to("simgpu:0")
            except KeyError as error:
                errors.append(error)

        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
    assert errors == []


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="there ours stand at BackendSelect")
def test_a_kernel_that_another_library_has_put_there_is_called_while_it_is_there() -> None:
    far, calls = torch.ones(4, device="simgpu:0"), []
    own = operators._computed_kernel(torch.ops.aten.nonzero.default, "PrivateUse1")

    def nonzero(keyset: Any, tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.shape)
        return own.call_boxed(keyset, tensor)

    with gpumagic.ondevice("simgpu:1"):
        assert far.nonzero().shape == (4, 1)
    library = torch.library.Library("aten", "IMPL")
    library.impl("nonzero", nonzero, "PrivateUse1", with_keyset=True)
    for count in (1, 2):
        with gpumagic.ondevice("simgpu:1") as run:
            assert far.nonzero().shape == (4, 1)
        assert len(calls) == count
        assert [move.cause for move in run.report.moves] == [".nonzero"]
    library._destroy()
    with gpumagic.ondevice("simgpu:1"):
        assert far.nonzero().shape == (4, 1)
    assert len(calls) == 2


@pytest.fixture
def earlier_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels = operators.CountingKernels()
    monkeypatch.setattr(operators, "kernels", kernels)
    monkeypatch.setattr(operators, "_CAN_CALL_TORCHS", False)
    yield
    kernels._library._destroy()
    kernels._fallthrough_library._destroy()


@pytest.mark.usefixtures("earlier_torch")
@pytest.mark.parametrize(
    "cell",
    ["y = x.to('simgpu:0') + 1; z = y.cpu(); y[0] = 2; x[x > 0] = 3", "y = g.sum().item() + x.sum().item()",
     "y = g.nonzero(); z = x.nonzero(); w = g[g > 0]", "y = torch.unique(g); z = torch.unique_consecutive(g, dim=0)"],
)  # fmt: skip
def test_before_torch_2_9_kernels_count_the_same_and_fall_through_in_between(cell: str) -> None:
    has_kernel, is_open = (
        torch._C._dispatch_has_kernel_for_dispatch_key,
        ("aten::copy_", "BackendSelect"),
    )
    for _ in range(2):
        report, copies, _ = corpus.run(cell)
        assert corpus.reported(report) == corpus.counted(copies)
        assert has_kernel(*is_open)
        assert operators.kernels.is_idle()
        assert torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(*is_open)
