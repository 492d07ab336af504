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


MOUNTS = """\
24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
"""
OLDER_MOUNTS = """\
35 24 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup rw
36 24 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
37 24 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""


def group(path, limit, used):
    """Return the files of a group of the newer kind."""
    return {f"{path}/memory.max": f"{limit}\n", f"{path}/memory.current": f"{used}\n"}


def test_the_limit_of_the_process_s_own_group_counts_wherever_it_is(machine) -> None:
    """As a batch system or systemd sets it: that of the root, which has none, or of another job says nothing."""
    slice_ = "sys/fs/cgroup/system.slice"
    machine(**{
        "proc/self/mountinfo": MOUNTS,
        "proc/self/cgroup": "0::/system.slice/job_7\n",
        **group(f"{slice_}/job_7", 4 * GIB, GIB),
        **group(f"{slice_}/job_8", GIB, GIB),
    })  # fmt: skip
    assert devices.available_memory() == (3 * GIB, 4 * GIB)


def test_of_nested_groups_the_one_that_leaves_least_counts(machine) -> None:
    """The group of a step of a job may leave more than the job's, which other steps fill."""
    job = "sys/fs/cgroup/job_7"
    machine(**{
        "proc/self/mountinfo": MOUNTS,
        "proc/self/cgroup": "0::/job_7/step_0/task_0\n",
        **group(job, 6 * GIB, 5 * GIB),
        **group(f"{job}/step_0", 4 * GIB, GIB),
        **group(f"{job}/step_0/task_0", "max", GIB),
    })  # fmt: skip
    assert devices.available_memory() == (GIB, 6 * GIB)


@pytest.mark.parametrize(
    ("mounted", "place"),
    [("/", "sys/fs/cgroup/memory/slurm/job_7/"), ("/slurm/job_7", "sys/fs/cgroup/memory/")],
    ids=["on the machine", "in a container that sees its own part alone"],
)
def test_so_does_the_own_group_of_the_older_kind(machine, mounted, place) -> None:
    machine(**{
        "proc/self/mountinfo": OLDER_MOUNTS.format(root=mounted),
        "proc/self/cgroup": "9:memory:/slurm/job_7\n4:cpu,cpuacct:/\n0::/init.scope\n",
        f"{place}memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{place}memory.usage_in_bytes": f"{GIB}\n",
        f"{place}memory.stat": f"inactive_file 1\ntotal_inactive_file {2**20}\n",
    })  # fmt: skip
    assert devices.available_memory() == (GIB + 2**20, 2 * GIB)


def test_a_group_outside_of_what_is_mounted_leaves_the_limit_of_the_mount(machine) -> None:
    machine(**{
        "proc/self/mountinfo": MOUNTS.replace(" / /sys/fs/cgroup", " /box /sys/fs/my\\040groups"),
        "proc/self/cgroup": "0::/../elsewhere\n",
        **group("sys/fs/my groups", 2 * GIB, GIB),
    })  # fmt: skip
    assert devices.available_memory() == (GIB, 2 * GIB)


def test_where_nothing_can_be_read_nothing_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(devices, "HOST_ROOT", tmp_path)
    assert devices.available_memory() is None
