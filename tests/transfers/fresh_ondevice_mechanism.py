"""`%%ondevice` behaves as `with torch.device(...)` does, whichever way it works, and leaves torch as it found it."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import linecache
import pickle
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from ondevice_corpus import SETUP
from torch.overrides import TorchFunctionMode

import gpumagic
from gpumagic.transfers import calls, function_holders, patches, recorder
from gpumagic.transfers.run import DeviceRun

pytestmark = pytest.mark.usefixtures("two_devices")

ZEROS = torch.zeros


def bindings() -> list[int]:
    """Return by id what every watched name is bound to; the functions themselves would be seen to be held here."""
    own = [id(vars(torch.Tensor).get(each.name)) for each in calls.methods()]
    return [id(vars(each.owner)[each.name]) for each in calls.functions()] + own + [id(torch.compile)]


@pytest.fixture(autouse=True)
def _leaves_torch_alone() -> Iterator[None]:
    before = bindings()
    yield
    gc.collect()  # a cell's functions and its globals hold each other
    assert bindings() == before
    assert torch.get_default_device().type == "cpu"
    assert torch.utils._device.CURRENT_DEVICE is None
    assert recorder.is_idle()
    assert torch._C._len_torch_function_stack() == 0


def run(cell: str, setup: str = "", **names: Any) -> dict[str, Any]:
    """Run a cell on simgpu:1 as the magic does; return its names, with the reason for the mode as `blocker`."""
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
    return {**space, "blocker": guard._recording.blocker}


def test_a_plain_cell_runs_without_a_function_mode() -> None:
    names = run("modes = torch._C._len_torch_function_stack(); made = torch.zeros(2)")
    assert names["blocker"] is None
    assert names["modes"] == 0
    assert str(names["made"].device) == "simgpu:1"


def test_names_imported_earlier_land_on_the_device() -> None:
    module = types.ModuleType("elsewhere")
    exec("from torch import eye", vars(module))
    names = run("made = zeros(2), module.eye(2)", "from torch import zeros", module=module)
    assert [str(each.device) for each in names["made"]] == ["simgpu:1"] * 2
    assert names["blocker"] is None
    assert names["zeros"] is torch.zeros
    assert module.eye is torch.eye


@pytest.mark.parametrize(
    "kept",
    [
        "[f]", "(f,)", "{1: f}", "{f}", "functools.partial(f, 2)", "type('Net', (), {'make': f})", "lambda g=f: g",
        "(lambda g: lambda: g)(f)",
    ],
)  # fmt: skip
def test_a_function_kept_where_it_cannot_be_exchanged_costs_the_mode_and_no_exactness(kept: str) -> None:
    space = {"f": torch.zeros, "functools": functools}
    kept_object = eval(kept, space)
    del space
    names = run("pass", kept=kept_object)
    assert "torch.zeros is kept in a" in names["blocker"]
    del names, kept_object
    gc.collect()
    assert run("pass")["blocker"] is None


def test_a_function_in_a_list_lands_on_the_device() -> None:
    assert str(run("made = makers[0](2)", makers=[torch.zeros])["made"].device) == "simgpu:1"


def test_a_running_functions_variable_costs_the_mode_and_no_exactness() -> None:
    make = torch.full
    with gpumagic.ondevice("simgpu:1"):
        made = make((2,), 3.0)
    assert str(made.device) == "simgpu:1"
    assert function_holders.search(patches._functions(), {})[1] == "torch.full is kept by a running function"


def test_what_a_cell_keeps_of_torch_is_torchs_own_afterwards() -> None:
    names = run(
        """
        from torch import zeros
        class Holder: pass
        holder = Holder()
        (holder.make, many, pair) = (getattr(torch, 'eye'), [getattr(torch, 'ones')], {'f': getattr(torch, 'full')})
        import functools
        part = functools.partial(getattr(torch, 'rand'), 3)
        def closed(f=None):
            f = getattr(torch, 'arange')
            return lambda: f
        inner = closed()
        """
    )
    assert names["blocker"] is None
    assert names["zeros"] is torch.zeros
    assert names["holder"].make is torch.eye
    assert names["many"][0] is torch.ones
    assert names["pair"]["f"] is torch.full
    assert names["part"].func is torch.rand
    assert names["inner"]() is torch.arange


def test_an_exchanged_function_equals_pickles_and_reads_as_torchs_own() -> None:
    entry = patches._wrappers()[torch.zeros]
    assert entry == ZEROS
    assert (ZEROS == entry) is True  # noqa: SIM300  the other side's equality
    assert {ZEROS: 1}[entry] == {entry: 1}[ZEROS] == 1
    assert (repr(entry), entry.__name__, entry.__doc__) == (repr(ZEROS), "zeros", ZEROS.__doc__)
    assert isinstance(entry, types.BuiltinFunctionType)
    assert inspect.isbuiltin(entry)
    assert pickle.loads(pickle.dumps(entry)) is copy.deepcopy(entry) is ZEROS
    assert entry in torch.utils._device._device_constructors()


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
    assert names["blocker"] == "Seen overrides __torch_function__"
    del Seen
    gc.collect()


def test_a_default_device_that_the_cell_sets_stays_as_what_any_line_sets() -> None:
    try:
        names = run("torch.set_default_device('cpu'); inner = torch.zeros(1).device")
        assert names["inner"].type == "cpu"
        assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)


def test_under_an_outer_default_the_mode_is_used_and_the_outer_one_returns() -> None:
    torch.set_default_device("simgpu:0")
    try:
        names = run("made = torch.zeros(1)")
        assert str(names["made"].device) == "simgpu:1"
        assert "default device" in names["blocker"]
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
    names = run(
        """
        from torch.utils.checkpoint import checkpoint
        made = []
        def layer(x):
            made.append(str(torch.zeros(1).device))
            return (x * 2).sin()
        checkpoint(layer, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
        """
    )
    assert names["made"] == ["simgpu:1"] * 2


def test_a_compiled_function_puts_its_tensors_on_the_device() -> None:
    """Compiling changes over to the function mode; later cells, which may run what is compiled, start there."""
    cell = """
        import torch._dynamo
        try:
            f = torch.compile(lambda x: x + torch.ones(3), backend='eager')
            made = f(torch.ones(3)).device
            modes = torch._C._len_torch_function_stack()
        finally:
            torch._dynamo.reset()
        """
    names = run(cell)
    assert str(names["made"]) == "simgpu:1"
    assert names["blocker"] == "torch.compile was called"
    assert names["modes"] == 1


def test_a_script_is_compiled_from_torchs_own_functions() -> None:
    names = run(
        """
        scripted = torch.jit.script(the_function)
        made = scripted(2)
        """,
        the_function=for_script,
    )
    assert names["made"].shape == (2,)
    assert names["blocker"] == "torch.script was called"


def for_script(n: int) -> torch.Tensor:
    return torch.zeros([n])


def test_what_the_user_patched_in_the_cell_stays_and_a_patch_taken_back_late_heals() -> None:
    patch = mock.patch.object(torch, "eye", return_value="mine")
    names = run("patch.start(); made = torch.eye(2)", patch=patch)
    assert names["made"] == torch.eye(2) == "mine"
    patch.stop()
    assert torch.eye(1).device.type == "cpu"
    run("pass")


@pytest.mark.parametrize("step", ["open", "close"])
def test_an_interrupt_at_any_line_leaves_torch_as_it_was(step: str) -> None:
    """Ctrl-C before each fifteenth line of the module that exchanges and puts back."""
    patches.find_holders({})
    for line in range(0, 100_000, 15):
        guard = DeviceRun("simgpu:1", namespace={})
        if step == "close":
            guard.open()
        with interrupt_before(line) as was_interrupted, contextlib.suppress(KeyboardInterrupt):
            guard.open() if step == "open" else guard.close(None)
        if step == "open" and not was_interrupted:
            guard.close(None)
        assert recorder.is_idle()
        assert torch.zeros is ZEROS
        if not was_interrupted:
            break
    assert line > 100


@contextlib.contextmanager
def interrupt_before(number: int) -> Iterator[list[bool]]:
    """Raise KeyboardInterrupt before so manieth line of `patches` and `recorder`; what is yielded then has True."""
    lines, done = iter(range(10**9)), []

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in (patches.__file__, recorder.__file__):
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


def test_a_class_is_changed_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumagic._compat.CLASSES_COUNT_CHANGES", True)
    monkeypatch.setattr(patches, "times_patched", patches.MAX_PATCHED_CELLS)
    assert "400 such cells" in str(patches.find_blocker({}, ""))


def test_the_heap_is_searched_only_when_somebody_new_holds_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.find_holders({})
    search = mock.Mock(wraps=function_holders.search)
    monkeypatch.setattr(function_holders, "search", search)
    patches.find_holders({})
    assert not search.called
    kept = [torch.eye]
    assert "torch.eye is kept in a list" in patches.find_holders({}).unpatchable
    del kept
