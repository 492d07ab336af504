"""Published figures of real GPUs, run again over the fake CUDA runtime.

    python -m tests.published              all rows that this environment's versions can have; RESULTS.md is written
    python -m tests.published WORD ...     those whose name has each word
    python -m tests.published --check      nothing is written, and what trains on many GPUs is left out

It ends with 1 where a row is further off than `measured.csv` has it.
What models of the time need an older transformers has been measured in an environment that has it, too.
"""

from __future__ import annotations

import sys

from tests.published.results import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
