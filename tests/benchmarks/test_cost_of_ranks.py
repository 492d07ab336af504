"""What the dry run of one rank of many costs, over fakecuda: `pytest -m benchmark -s`.

The processor time is that of the whole dry run, with torch's import and every rank that is run, and not the clock's: it
is the same on a machine that has other work. The memory is that of the largest process.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpumagic import fakecuda

if not fakecuda.is_enabled():
    pytest.skip("needs torch's CUDA build over the fake runtime", allow_module_level=True)

from tests.cuda.torchtitan_cell import LLAMA_8B, LLAMA_70B, LLAMA_405B, training

pytestmark = pytest.mark.benchmark

CASES = {
    "Llama-3-8B on 1,024": (training(LLAMA_8B, 2, 8192, is_selective=True), 1024, 17),
    "70B on 256": (training(LLAMA_70B, 1, 8192), 256, 18),
    "405B on 512": (training(LLAMA_405B, 1, 8192, tensor_parallel=8), 512, 55),
}
"""The cell, the number of GPUs, and what a script that is one of them took, in seconds."""
TIMES, HOST = 1.5, 2 << 30
MEASURED = """
import json, resource, sys
import gpumagic
from gpumagic.dryrun import client
code, number = json.load(sys.stdin)
report = gpumagic.dry_run(code, {}, gpu="H100", capacity="95GiB", ranks=number, time_limit=500)
client.close()
used = resource.getrusage(resource.RUSAGE_CHILDREN)
reserved = max(each.reserved for each in report.ranks)
figures = [report.fits, used.ru_utime + used.ru_stime, used.ru_maxrss << 10, reserved]
print(json.dumps([len(report.ranks), *figures]))
"""


@pytest.mark.parametrize("name", CASES)
def test_a_training_of_many_gpus_is_dry_run_within_its_budget(name: str) -> None:
    code, number, alone = CASES[name]
    told = subprocess.run(
        [sys.executable, "-c", MEASURED],
        input=json.dumps([code, number]),
        capture_output=True,
        text=True,
        check=True,
    )
    ranks, fits, seconds, host, reserved = json.loads(told.stdout)
    print(
        f"\n{name}: {ranks} ranks in {seconds:.1f} s of processor time (bar {TIMES * alone:.1f}), "
        f"{host / 2**30:.2f} GiB of the host; reserved {reserved / 2**30:.2f} GiB"
    )
    assert fits
    assert seconds < TIMES * alone
    assert host < HOST
