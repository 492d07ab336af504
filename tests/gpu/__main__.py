"""What fakes cannot show, on a real GPU and on all cores; RESULTS.md has what came of it.

    python -m tests.gpu                    everything
    python -m tests.gpu ./logs published   the named parts; what they print is kept in a folder

The parts: `tests` (what runs on each device) and `benchmarks` run alone; side by side run `cupti` (tests/gpu, and the
owners of all bytes), `cells` (dry runs of third-party cells against what these then take), `advice` (first suggestions
after an out-of-memory, followed), `failures` (reports against torch's allocator), `published` (the figures of
tests/published on this GPU), `operators` (peaks here, over the fake runtime and of fake tensors) and `notebooks`. A
part that fails does not keep the next from running, and the page is written after each command.
"""

from __future__ import annotations

import sys

from tests.gpu.everything import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
