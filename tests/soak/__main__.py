"""A soak: cells of the tests' corpora in real kernels, disturbed, and after each a look at what it has left behind.

    python -m tests.soak --minutes 30
    python -m tests.soak --minutes 30 --python /path/to/another/environment/bin/python
    python -m tests.soak --minutes 30 --only dryrun oom
    python -m tests.soak --seed 5 --session 12          one session again

A session is a kernel and some stories; a story is a few cells of one corpus on empty devices. A cell may be disturbed:
by SIGINT at a random moment, by KeyboardInterrupt at a random line of gpumagic's code, by a device that is nearly full,
by a driver that fails. `inside.py` says what is looked at after each. Where the kernel's torch is a CUDA build, it runs
over the fake CUDA runtime. `SOAK.md` has what was found.
"""

from __future__ import annotations

from tests.soak.driver import main

if __name__ == "__main__":
    raise SystemExit(main())
