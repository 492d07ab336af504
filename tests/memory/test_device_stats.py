"""What the allocators of backends say, where they say less than CUDA's."""

from __future__ import annotations

import torch

from gpumagic.memory import allocator


def test_a_backend_whose_allocator_keeps_no_figures_has_none(monkeypatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    for name in ("memory_stats", "memory_stats_as_nested_dict"):
        monkeypatch.delattr(torch.xpu, name, raising=False)
    assert allocator.device_stats("xpu:0") is None
    assert "xpu:0" not in allocator.all_device_stats()
