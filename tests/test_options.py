"""Lines are read as their users mean them, and what cannot be read is said in one line with a suggestion."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.errors import OptionError, nearest
from gpumagic.options import MAGICS, PARSERS
from gpumagic.report.units import parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512", 512),
        ("1k", 1024),
        ("1KiB", 1024),
        ("1 kB", 1024),
        ("1.5GiB", 3 * 2**29),
        ("2g", 2**31),
    ],
)
def test_sizes_are_binary_however_they_are_written(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["3parsecs", "", "-1", "1e9", "GiB", "1 2", "nan", "1.GiB", "١"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        OptionError, match=r"is not a size; write bytes or a unit: 4096, 100MiB, 1\.5GiB"
    ):
        parse_size(text)


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "k", "KiB", "MB", "g", "TiB"]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "k": 2**10, "KiB": 2**10, "MB": 2**20, "g": 2**30, "TiB": 2**40}[unit]
    assert abs(parse_size(f"{number}{unit}") - number * factor) <= number * factor * 1e-15


@pytest.mark.parametrize(
    ("magic", "line", "message"),
    [
        (
            "dryrun",
            "--capacity 3parsecs",
            "argument --capacity: '3parsecs' is not a size; write bytes or a unit",
        ),
        ("dryrun", "--capacity 16", "'16' is 16 bytes; write a unit, such as 16GiB"),
        ("oomguard", "onn", "invalid choice: 'onn' (choose from"),
        ("oomguard", "--retry 2", "%%oomguard has no option '--retry'"),
        ("oomguard", "--shink batch", "%%oomguard has no option '--shink'; did you mean --shrink?"),
        ("devices", "--leeks", "%devices has no option '--leeks'; did you mean --leaks?"),
        ("gpuinfo", "--proceses", "%gpuinfo has no option '--proceses'; did you mean --processes?"),
        ("devices", "--by weight", "invalid choice: 'weight'"),
        (
            "devices",
            "--proceses",
            "%devices has no option '--proceses'; it has -n, --by, --diff, --leaks",
        ),
        ("devices", "--by knid", "argument --by: invalid choice: 'knid' (choose from"),
        ("devices", "--di", "did you mean --diff?"),
        ("gpuinfo", "-x", "%gpuinfo has no option '-x'; it has --processes, --all"),
        ("gpuinfo", "--each-cell of", "argument --each-cell: invalid choice: 'of' (choose from"),
        ("ondevice", "cuda --trcae", "did you mean --trace?"),
        ("dryrun", "--gpu=T4 --fti n", "did you mean --fit?"),
        (
            "dryrun",
            "cuda:1",
            "'cuda:1' is one argument too many; each device that the cell uses is looked at",
        ),
        ("ondevice", "cuda:0 cuda:1", "'cuda:1' is one argument too many"),
        (
            "ondevice",
            "cuda:0 --trace step",
            "'step' is one argument too many; did you mean --trace=step?",
        ),
        ("ondevice", "cuda -o 1x", "'1x' cannot be a variable"),
        ("devices", "'cuda", "close it or leave it out"),
        ("devices", "-n 0", "'0' is not a whole number of at least 1"),
        ("devices", "--why", "expected at least one argument"),
    ],
)
def test_a_bad_line_is_one_line_that_says_what_would_be_right(
    magic: str, line: str, message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        PARSERS[magic].parse_line(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["16GiB", "16 GiB", "16 gb", "16G", "=16 GiB"])
def test_a_capacity_may_have_a_space_before_its_unit(text: str) -> None:
    options = PARSERS["dryrun"].parse_line(f"--capacity {text} --fit n".replace(" =", "="))
    assert (options.capacity, options.fit) == (2**34, "n")


def test_a_comment_and_a_semicolon_are_not_arguments() -> None:
    assert PARSERS["devices"].parse_line("cuda:1 # the second").devices == ["cuda:1"]
    assert PARSERS["devices"].parse_line("# all of them").devices == []
    assert PARSERS["devices"].parse_line("cuda:1;").devices == ["cuda:1"]
    assert PARSERS["devices"].parse_line("""--why "batch['a #1']" # why?""").why == [
        "batch['a #1']"
    ]
    assert PARSERS["devices"].parse_line("cuda:1 # don't").devices == ["cuda:1"]


@pytest.mark.parametrize(
    "line", ["0 --move model,x", "--move model, x 0", "0 --move 'model, x'", "--move=model, x 0"]
)
def test_a_list_of_names_may_have_spaces(line: str) -> None:
    options = PARSERS["ondevice"].parse_line(line)
    assert (options.device, options.move) == ("0", ["model", "x"])


@pytest.mark.parametrize(
    "line", ["cuda:0 cuda:1", "cuda:0,cuda:1", "cuda:0, cuda:1", "cuda:0, cuda:1 -n 3"]
)
def test_a_list_of_devices_may_have_commas(line: str) -> None:
    assert PARSERS["devices"].parse_line(line).devices == ["cuda:0", "cuda:1"]


@given(magic=st.sampled_from(MAGICS), line=st.text(max_size=60))
def test_any_line_is_read_or_refused_in_one_printable_error(magic: str, line: str) -> None:
    try:
        PARSERS[magic].parse_line(line)
    except OptionError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017  # both outcomes are right, anything else is not


@pytest.mark.parametrize("magic", MAGICS)
def test_help_names_every_option_and_does_not_need_the_device(magic: str) -> None:
    assert PARSERS[magic].parse_line("--help").help
    text = PARSERS[magic].format_help()
    assert all(
        option in text
        for option in PARSERS[magic].option_strings()
        if option not in {"-h", "--help"}
    )


@pytest.mark.parametrize("magic", MAGICS)
def test_help_fits_a_terminal_of_80_by_24(magic: str) -> None:
    lines = PARSERS[magic].format_help().splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize("magic", MAGICS)
def test_the_help_has_examples_that_are_right(magic: str) -> None:
    text = PARSERS[magic].format_help()
    examples = re.findall(rf"^ {{4}}(?:\w+ = )?%+{magic} (.*?)(?: {{3,}}.*)?$", text, re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        PARSERS[magic].parse_line(example)


@pytest.mark.parametrize(
    ("word", "valid", "meant"),
    [
        ("modle", ["model", "mode"], "model"), ("cuad:1", ["cuda:0", "cuda:1", "cpu"], "cuda:1"),
        ("cuda", ["cpu", "meta"], None), ("x", ["y"], None), ("proc", ["processes", "all"], "processes"),
        ("--de", ["--devices", "--debug"], None), ("CPUU", ["cpu"], "cpu"), ("anything", [], None),
    ],
)  # fmt: skip
def test_a_suggestion_is_a_valid_word_with_few_letters_changed(
    word: str, valid: list[str], meant: str | None
) -> None:
    assert nearest(word, valid) == meant
