"""Tab after the magics, as a front end asks for it."""

from __future__ import annotations

import pytest

from gpumagic.notebook.completion import complete


@pytest.fixture(scope="module")
def loaded(start_kernel):
    kernel = start_kernel()
    assert kernel.run("%load_ext gpumagic\nmodel_a = model_b = _hidden = 1").status == "ok"
    return kernel


@pytest.fixture
def is_new(loaded):
    """Whether this IPython lets a matcher have the line to itself (8.6 and newer)."""
    return loaded.value("import IPython; IPython.version_info >= (8, 6)") == "True"


def completed(kernel, line, rest=""):
    """Return what the line may become, and do with it what a front end does."""
    reply = kernel.ask("complete", line + rest, len(line))
    assert reply["status"] == "ok"
    head, tail = line[: reply["cursor_start"]], line[reply["cursor_end"] :]
    return {head + match + tail for match in reply["matches"]}


@pytest.mark.parametrize(
    "form", ["%ondevice ", "%%ondevice ", "  %ondevice ", "%gpuinfo ", "%devices ", "r = %devices "]
)
def test_devices_are_offered(loaded, form):
    """For each magic that takes one, in every place it may stand."""
    assert form + "cuda" in completed(loaded, form + "cu")
    assert form + "cpu" in completed(loaded, form + "c")


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("%gpuinfo --", {"--processes", "--all", "--help"}),
        ("%devices --", {"--by", "--diff", "--leaks", "--free", "--why"}),
        ("%%ondevice cuda --", {"--fallback", "--quiet"}), ("%ondevice --", {"--fallback", "--quiet"}),
        ("%%oomguard --", {"--shrink", "--debug"}), ("%oomguard --", {"--shrink", "--debug"}),
        ("r = %devices --", {"--by"}),
    ],
)  # fmt: skip
def test_options_are_offered(loaded, line, options):
    """All that the magic has."""
    head = line[: line.rindex("--")]
    assert completed(loaded, line) >= {head + option for option in options}


@pytest.mark.parametrize(
    ("line", "all_offered"),
    [
        ("%ondevice ", {"cuda", "auto", "cpu", "meta"}),
        ("%gpuinfo c", {"cuda", "cpu"}),
        ("%%oomguard --k", {"--keep-going"}),
        ("%devices --by ", {"dtype", "kind", "holder"}),
    ],
)
def test_nothing_else_is_offered(loaded, is_new, line, all_offered):
    """No Python names, no files, where IPython lets us say so."""
    if not is_new:
        pytest.skip("IPython 7 mixes its own in")
    head = line[: line.rindex(" ") + 1]
    assert completed(loaded, line) == {head + each for each in all_offered}


def test_values_of_an_option_are_offered(loaded):
    """From its declaration."""
    assert "%devices --by dtype" in completed(loaded, "%devices --by dt")
    assert "%ondevice cuda --fallback cpu" in completed(loaded, "%ondevice cuda --fallback c")


def test_a_cells_body_is_completed_as_python(loaded):
    """Also under the magic's line."""
    reply = loaded.ask("complete", "%%ondevice cuda\nmodel_", len("%%ondevice cuda\nmodel_"))
    assert {"model_a", "model_b"} <= set(reply["matches"])


def test_the_magics_line_is_completed_above_a_body(loaded):
    """Though the rest of the cell is Python."""
    assert "%%ondevice cuda" in completed(loaded, "%%ondevice cu", rest="\nx = 1\n")


def test_after_unloading_nothing_is_offered(loaded):
    """Neither options nor devices."""
    loaded.run("%unload_ext gpumagic")
    try:
        assert "%ondevice --fallback" not in completed(loaded, "%ondevice --fa")
    finally:
        loaded.run("%load_ext gpumagic")


def test_devices_with_an_index_are_completed_past_the_colon(loaded, monkeypatch):
    """IPython 7 takes the colon for the end of a word."""
    loaded.run(
        "import gpumagic.memory.devices as n\nold = n.BUILTIN_DEVICES\nn.BUILTIN_DEVICES = ('simgpu:0', 'simgpu:1')"
    )
    try:
        for line in (
            "%ondevice simgpu:",
            "%ondevice simgpu:1",
            "%ondevice sim",
            "%%ondevice simgpu:",
        ):
            assert completed(loaded, line) >= {line.split()[0] + " simgpu:1"}
    finally:
        loaded.run("n.BUILTIN_DEVICES = old")


@pytest.mark.parametrize(
    ("line", "fragment", "names"),
    [
        ("%devices --by=k", "k", ["kind"]),
        ("%ondevice cuda --fallback=me", "me", ["meta"]),
        ("%ondevice -o ", "", []),
        ("%devices -n ", "", []),
        ("%%oomguard ", "", []),
        ("%ondevice --quiet --qui", "--qui", []),
    ],
)
def test_what_stands_before_the_cursor_decides(line, fragment, names):
    """An option's value after it, nothing for a new variable's name or a number, no option twice."""
    assert complete(line, {"DEVICE": lambda: ["cpu", "meta"]}) == (fragment, names)


def test_variables_are_offered_where_one_is_asked_for(loaded, is_new):
    """Not what IPython puts beside the user's."""
    assert "%devices --why model_a" in completed(loaded, "%devices --why mod")
    assert "r = %devices --why=model_b" in completed(loaded, "r = %devices --why=mo")
    line = "%%ondevice cpu --move "
    if is_new:
        assert not completed(loaded, line) & {
            line + name for name in ("In", "Out", "exit", "open", "_hidden")
        }
        assert line + "model_a,model_b" in completed(loaded, line + "model_a,mo")


def test_the_numbers_of_the_variables_and_of_the_cell_are_offered_to_be_fitted(loaded, is_new):
    """`batch_size = 64` in the cell below the line is one."""
    below = "\nbatch_size = 64\nfor step in range(10):\n    pass"
    assert "%%dryrun --fit model_a" in completed(loaded, "%%dryrun --fit ", below)
    if is_new:
        assert completed(loaded, "%%oomguard --shrink b", below) == {
            "%%oomguard --shrink batch_size"
        }
        assert "%%dryrun --fit exit" not in completed(loaded, "%%dryrun --fit ", below)
