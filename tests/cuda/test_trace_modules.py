"""`--trace` by module on torch's own CUDA: together the modules are what its caching allocator has."""

from __future__ import annotations

import traced_modules


def test_modules_add_up_to_torchs_allocator_and_have_their_parts() -> None:
    report = traced_modules.traced_training("cuda")
    traced_modules.check_sums(report)
    traced_modules.check_parts(report)
