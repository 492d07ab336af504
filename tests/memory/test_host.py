"""How much host memory is left, by the kernel's and the container's account."""

from __future__ import annotations

import pytest

from gpumagic.memory import devices

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"
V1 = "sys/fs/cgroup/memory/memory."


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that writes the files of a machine with 8 of 16 GiB available."""
    monkeypatch.setattr(devices, "HOST_ROOT", tmp_path)

    def write(**files):
        for path, text in {"proc/meminfo": MEMINFO, **files}.items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)

    return write


def test_without_a_limit_the_machines_memory_counts(machine) -> None:
    machine(**{"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "123\n"})
    assert devices.available_memory() == (8 * GIB, 16 * GIB)


def test_a_containers_limit_counts_less_what_it_uses_beside_its_file_cache(machine) -> None:
    machine(**{
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 5\n",
    })  # fmt: skip
    assert devices.available_memory() == (2 * GIB, 4 * GIB)


def test_so_does_one_of_the_older_kind(machine) -> None:
    machine(**{
        f"{V1}limit_in_bytes": str(2 * GIB), f"{V1}usage_in_bytes": str(2 * GIB - 2**20), f"{V1}stat": "cache 9\n",
    })  # fmt: skip
    assert devices.available_memory() == (2**20, 2 * GIB)


def test_where_nothing_can_be_read_nothing_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(devices, "HOST_ROOT", tmp_path)
    assert devices.available_memory() is None
