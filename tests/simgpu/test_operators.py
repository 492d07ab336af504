"""Every operator of torch's own list gives the CPU's values on a simulated GPU, and refuses mixed devices."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tests.simgpu import known_gaps as gaps

SAMPLES = 12
FIRST_CHOICE = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.float64)
IGNORED_WARNINGS = pytest.mark.filterwarnings("ignore")
Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]


@pytest.fixture(
    params=[pytest.param(12, id="sample"), pytest.param(1, id="all", marks=pytest.mark.deep)]
)
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Torch's list of operators with samples, by name: one in twelve, or all."""
    listed = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    # For every sample torch looks through the whole stack, source files included, for a test class of its own.
    for module in ("common_utils", "opinfo.core"):
        monkeypatch.setattr(f"torch.testing._internal.{module}.extract_test_fn", lambda: None)
    names = {
        f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op
        for op in listed
    }
    assert len(names) > 600
    compared = sorted(set(names) - set(gaps.NOT_COMPARABLE))
    return {name: names[name] for name in compared[:: request.param]}


def samples_of(op: Any, dtype: torch.dtype, requires_grad: bool = False) -> list[Sample]:
    """Return the first samples on the CPU, or none where the operator lacks the type."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    try:
        samples = list(
            itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), SAMPLES)
        )
    except (RuntimeError, NotImplementedError):
        return []
    return [(s.input, s.args, s.kwargs) for s in samples]


def main_dtype(op: Any) -> torch.dtype:
    return next(
        (dtype for dtype in FIRST_CHOICE if dtype in op.supported_dtypes("cpu")), torch.float16
    )


def on_card(sample: Sample) -> Sample:
    """Return the sample with its tensors on the first simulated GPU, and the name of the device changed."""
    moved: Sample = tree_map_only(
        torch.Tensor, lambda t: t.detach().to("simgpu").requires_grad_(t.requires_grad), sample
    )
    kwargs = {
        key: torch.device("simgpu") if key == "device" else value for key, value in moved[2].items()
    }
    return moved[0], moved[1], kwargs


def tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def compare(expected: object, found: object, values: bool = True, strides: bool = True) -> None:
    """Assert equal values, types, shapes and strides, with the found tensors on the simulated GPU."""
    for want, have in zip(tensors(expected), tensors(found), strict=True):
        assert have.device.type == "simgpu"
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        assert have.stride() == want.stride() or not strides
        if values:
            torch.testing.assert_close(
                have.detach().cpu(), want.detach(), equal_nan=True, rtol=1e-3, atol=1e-3
            )


def failures(operators: dict[str, Any], check: Callable[[Any], None]) -> dict[str, str]:
    found = {}
    for name, op in operators.items():
        try:
            check(op)
        except (Exception, pytest.fail.Exception) as error:  # noqa: PERF203  whatever goes wrong is what is listed
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def assert_only_known(found: dict[str, str], known: dict[str, str], tried: dict[str, Any]) -> None:
    assert {name: why for name, why in found.items() if name not in known} == {}
    assert set(known) & set(tried) - set(found) == set(), "these work now: take them off the list"


def check_values(op: Any) -> None:
    for sample in samples_of(op, main_dtype(op)):
        torch.manual_seed(0)
        expected = op(sample[0], *sample[1], **sample[2])
        moved = on_card(sample)
        torch.manual_seed(0)
        compare(expected, op(moved[0], *moved[1], **moved[2]), values="empty" not in op.name)


@IGNORED_WARNINGS
def test_values_are_the_cpus(operators: dict[str, Any]) -> None:
    """Forward, some 700 operators; random ones too, from the same seed."""
    assert_only_known(failures(operators, check_values), gaps.VALUES, operators)


def gradients(op: Any, sample: Sample) -> tuple[torch.Tensor | None, ...]:
    torch.manual_seed(0)
    outputs = [out for out in tensors(op(sample[0], *sample[1], **sample[2])) if out.requires_grad]
    inputs = [leaf for leaf in tensors(sample) if leaf.requires_grad]
    if not outputs or not inputs:
        return ()
    return torch.autograd.grad([out.abs().sum() for out in outputs], inputs, allow_unused=True)


def check_gradients(op: Any) -> None:
    if not op.supports_autograd:
        return
    for sample in samples_of(op, torch.float32, requires_grad=True):
        try:
            expected = gradients(op, sample)
        except RuntimeError:
            continue  # not differentiable on the CPU either
        # Some gradients come transposed: attention's, where the CPU has a fused kernel, and those of conversions.
        compare(expected, gradients(op, on_card(sample)), strides=False)


@IGNORED_WARNINGS
def test_gradients_are_the_cpus(operators: dict[str, Any]) -> None:
    """Backward, wherever the CPU has one; the sparse ones of VALUES have none to compare."""
    differentiable = {name: op for name, op in operators.items() if "empty" not in op.name}
    found = failures(differentiable, check_gradients)
    assert_only_known(found, gaps.VALUES, {})


def check_in_place(op: Any) -> None:
    change = op.get_inplace()
    for sample in samples_of(op, main_dtype(op)) if change else []:
        copies = tree_map_only(torch.Tensor, torch.clone, sample)
        torch.manual_seed(0)
        try:
            expected = change(copies[0], *copies[1], **copies[2])
        except RuntimeError:
            continue  # the result does not fit into the first operand
        moved = on_card(sample)
        torch.manual_seed(0)
        found = change(moved[0], *moved[1], **moved[2])
        assert found is moved[0] or not isinstance(found, torch.Tensor)
        compare(expected, found)


@IGNORED_WARNINGS
def test_in_place_operators_change_their_operand(operators: dict[str, Any]) -> None:
    """`x.add_(y)` and all others return x itself, with the CPU's values."""
    assert_only_known(failures(operators, check_in_place), {}, operators)


def empty_like(tree: object, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda t: torch.empty(0, dtype=t.dtype, device=device), tree)


def check_out(op: Any) -> None:
    for sample in samples_of(op, main_dtype(op)) if op.supports_out else []:
        expected = empty_like(op(sample[0], *sample[1], **sample[2]), "cpu")
        moved, out = on_card(sample), empty_like(expected, "simgpu")
        torch.manual_seed(0)
        try:
            op(sample[0], *sample[1], out=expected, **sample[2])
        except (RuntimeError, TypeError):
            continue  # the CPU does not take it either
        torch.manual_seed(0)
        op(moved[0], *moved[1], out=out, **moved[2])
        for want, have in zip(tensors(expected), tensors(out), strict=True):
            assert have.shape == want.shape
            torch.testing.assert_close(have.cpu(), want, equal_nan=True, rtol=1e-3, atol=1e-3)


@IGNORED_WARNINGS
def test_out_tensors_grow_to_the_result(operators: dict[str, Any]) -> None:
    """`out=` tensors of length zero are resized on the card and filled."""
    real = {name: op for name, op in operators.items() if "empty" not in op.name}
    found = failures(real, check_out)
    assert_only_known(found, gaps.VALUES, {})


def mixtures(sample: Sample) -> Iterator[Sample]:
    """Yield the sample with one tensor at a time on another device than the rest."""
    leaves, spec = tree_flatten(
        (sample[0], sample[1], on_card(sample)[2] if "device" in sample[2] else sample[2])
    )
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len({id(leaves[i]) for i in places}) < 2:
        return
    for odd, device in itertools.product(places, ("cpu", "simgpu:1")):
        if leaves[odd].numel() == 0 or (device == "cpu" and leaves[odd].dim() == 0):
            continue  # a 0-dim tensor on the CPU is a number
        yield tree_unflatten(
            [
                leaf.to(device if i == odd else "simgpu:0") if i in places else leaf
                for i, leaf in enumerate(leaves)
            ],
            spec,
        )


def check_refusals(op: Any) -> None:
    for sample in samples_of(op, main_dtype(op)):
        for args in mixtures(sample):
            with pytest.raises(RuntimeError, match="same device"):
                op(args[0], *args[1], **args[2])


@IGNORED_WARNINGS
def test_operands_on_different_devices_are_refused(operators: dict[str, Any]) -> None:
    """Whichever operand is elsewhere, on the other GPU or on the CPU."""
    found = failures(operators, check_refusals)
    assert_only_known(found, gaps.ACCEPT_OTHER_DEVICES | gaps.REFUSE_IN_OTHER_WORDS, operators)
    accepted = {name for name, why in found.items() if "DID NOT RAISE" in why}
    assert accepted <= set(gaps.ACCEPT_OTHER_DEVICES)
