"""All that was never tried on a real GPU, in one run: half an hour, and RESULTS.md has what came of it.

    python -m tests.gpu                everything
    python -m tests.gpu published      the named parts

The parts: `tests` (tests/gpu, and what runs on each device), `benchmarks`, `cells` (dry runs of third-party cells
against what these then take), `published` (the figures of tests/published, measured on this GPU), `notebooks`. A part
that fails does not keep the next from running.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "cuda")]

from gpu.everything import main  # noqa: E402  # the path first

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
