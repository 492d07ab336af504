"""What a user mistypes is answered in one line, and changes nothing; with the real magics in a real kernel."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ipython

BAD = {
    "%%ondevice cuda:9": "there are",
    "%%ondevice gpux": "there are",
    "%%dryrun --capacity 3parsecs": "100MiB",
    "%%oomguard --retry 3": "has no option",
    "%%ondevice cpu --fallbak cpu": "did you mean --fallback?",
    "%%ondevice": "needs a device",
    "%gpuinfo --proceses": "did you mean --processes?",
}
# Everything of a session that a magic that went wrong could have changed.
STATE = """(
    sorted(name for name in globals() if not name.startswith('_')),
    len(get_ipython().input_transformers_cleanup),
    {event: len(calls) for event, calls in get_ipython().events.callbacks.items()},
    str(torch.get_default_device()), torch.zeros(1).device.type,
    len(torch.overrides._get_current_function_mode_stack()), torch.is_grad_enabled(),
)"""


@pytest.fixture(scope="module")
def session(start_kernel):
    kernel = start_kernel()
    assert kernel.run("import torch, torch.overrides\n%load_ext gpumagic").status == "ok"
    return kernel


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_is_one_line_that_says_what_would_be_right(session, line):
    """A UsageError without a traceback, and with a suggestion."""
    cell = session.run(f"{line}\nran = 1")
    assert (cell.status, cell.ename) == ("error", "UsageError")
    assert cell.tracebacks == cell.reports == []
    assert cell.stderr.startswith("UsageError: ")
    assert cell.stderr.count("\n") == 1
    assert BAD[line] in cell.stderr


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_stops_run_all_before_the_body(session, line):
    """Neither the body nor the next cell runs."""
    first, second = session.run_all(f"{line}\nran = 1", "ran = 2")
    assert (first.status, second.status) == ("error", "aborted")
    assert session.value("'ran' in globals()") == "False"


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_changes_nothing_of_the_session(session, line):
    """No name, no hook, no mode."""
    before = session.value(STATE)
    session.run(f"{line}\nran = 1")
    assert session.value(STATE) == before
    assert before is not None
