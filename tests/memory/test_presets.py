"""The GPUs that are known by name: how they may be written, and what is suggested for what is not one."""

from __future__ import annotations

import pytest

from gpumagic.errors import OptionError
from gpumagic.memory import presets
from gpumagic.memory.presets import GPUS, USUAL

GIB = 1 << 30
LABELS = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 180, 192, 288)
"""The sizes, in GB, that are printed on the boxes of GPUs."""


def label(name: str) -> int:
    """Return the size of a GPU's memory as its maker tells it: the next one above what CUDA says."""
    return next(size for size in LABELS if size * GIB >= GPUS[name].capacity)


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_known_by_its_name_however_that_is_written(name: str) -> None:
    for written in (
        name,
        name.lower(),
        name.replace(" ", "-"),
        name.replace(" ", "").replace("-", ""),
        name.removeprefix("RTX ").removeprefix("GTX "),
    ):
        assert presets.name_of(written) == name, written


def test_a_gpu_is_known_by_the_name_that_torch_has_for_it() -> None:
    assert [name for name, gpu in GPUS.items() if presets.name_of(gpu.name) != name] == [
        "RTX 4060 Ti 16GB"
    ]


def test_no_two_gpus_are_written_alike() -> None:
    plain = [presets._plain(name) for name in GPUS]
    assert len(set(plain)) == len(plain)


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_a_little_less_than_its_label_says(name: str) -> None:
    assert 0.91 < GPUS[name].capacity / (label(name) * GIB) <= 1


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX3060", "RTX 3060"),
        ("3090ti", "RTX 3090 Ti"),
        ("A100-80", "A100"),
        ("A100-40", "A100-40GB"),
        ("A100-SXM4-80GB", "A100"),
        ("h100 pcie", "H100 PCIe"),
        ("H100 SXM", "H100"),
        ("V100 32GB", "V100-32GB"),
        ("RTX PRO 6000 Blackwell", "RTX PRO 6000"),
        ("GeForce GTX 1080Ti", "GTX 1080 Ti"),
    ],
)
def test_what_people_write_is_understood(written: str, name: str) -> None:
    assert presets.name_of(written) == name


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("A10O", "'A10O' is not a GPU that is known here; did you mean A10"),
        ("RTX 6000", "did you mean RTX-A6000 or RTX-PRO-6000 or RTX-6000-Ada?"),
        ("4090 D", "did you mean RTX-4090?"),
        ("MI300", "did you mean MI300X?"),
        ("K80", "there are T4, L4, A10G, RTX-3090, "),
        ("", "B200 and others (--gpu list names all"),
        ("48 GB", "--capacity 48GiB takes a size"),
    ],
)
def test_what_is_no_gpu_is_answered_with_what_may_be_meant(written: str, said: str) -> None:
    with pytest.raises(OptionError) as raised:
        presets.name_of(written)
    assert said in str(raised.value)


def test_the_list_names_all_as_the_line_takes_them() -> None:
    with pytest.raises(OptionError) as raised:
        presets.name_of("list")
    listed = str(raised.value).removeprefix("there are ").split(", ")
    assert [presets.name_of(each) for each in listed] == list(GPUS)
    assert not any(" " in each for each in listed)


def test_the_usual_ones_are_no_laptops_and_of_many_sizes() -> None:
    assert not any("Laptop" in GPUS[name].name for name in USUAL)
    assert sorted({label(name) for name in USUAL}) == [16, 24, 32, 40, 48, 80, 141, 180]
