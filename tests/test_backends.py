"""What differs between backends stands in one record for each."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import gpumagic
from gpumagic import backends
from gpumagic.backends import Allocator, backend_named

PACKAGE = Path(gpumagic.__file__).parent
OF_THEM_ALONE = {
    "backends.py",
    "gpus/torch_devices.py",  # their versions, and what their modules say of devices
    "oom/recognition.py",  # the texts of their errors
}
OTHERS = {"xpu", "mps", "hpu", "npu"}


def test_backends_other_than_cuda_are_named_where_their_records_are() -> None:
    named = set()
    for path in PACKAGE.rglob("*.py"):
        constants = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if constants & OTHERS:
            named.add(str(path.relative_to(PACKAGE)))
    assert named <= OF_THEM_ALONE


def test_a_backend_that_nobody_has_heard_of_is_one_of_the_dispatchers_private_use() -> None:
    backend = backend_named("rocket")
    assert (backend.name, backend.dispatch_key) == ("rocket", "PrivateUse1")
    assert backend.allocator is Allocator.CACHING
    assert not backend.copies_pinned


def test_each_in_tree_backend_is_a_module_of_torch_with_kernels_under_its_key() -> None:
    for name in backends.IN_TREE:
        assert getattr(torch, name).__name__ == f"torch.{name}"
        assert hasattr(torch._C.DispatchKey, backend_named(name).dispatch_key)


def test_methods_that_copy_to_a_device_are_tensors_own() -> None:
    built_in = {"cuda", "xpu"}
    assert built_in <= backends.DEVICE_METHODS
    assert all(hasattr(torch.Tensor, method) for method in built_in)
    assert not hasattr(torch.Tensor, "mps")
