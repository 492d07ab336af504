"""What torch says of devices, in the words of every backend, is told as what is where and the line that mends it."""

from __future__ import annotations

import pytest

from gpumagic.transfers import device_errors
from gpumagic.transfers.device_errors import DeviceError
from gpumagic.transfers.report import Operand

HERE = ("cuda:0", "cuda:1", "cpu", "meta")
MIXED = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors on cuda:0",
    "Input and parameter tensors are not at the same device, found input tensor at cpu and parameter tensor at cuda:0",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same or",
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    "Placeholder storage has not been allocated on MPS device!",
)
X = Operand("x", ("cpu",), 2 * 2**30)
MODEL = Operand("model", ("cuda:0",), 1000, "module")


def told(text: str, *operands: Operand, device: str = "cuda:0", **more: object):
    return device_errors.interpret(
        DeviceError(text, device, HERE, 3, "y = model(x)", operands=operands, **more)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("text", MIXED)
def test_operands_are_told_by_name_and_place_whatever_the_words(text: str) -> None:
    found = told(text, MODEL, X)
    assert found.what == "model is on cuda:0, x (2.0 GiB) on cpu."
    assert found.fix == 'x = x.to("cuda:0")'
    assert found.operands == (MODEL, X)
    assert str(found) == f"line 3: {found.what}\nfix: {found.fix}"


@pytest.mark.parametrize(
    ("operand", "fix"),
    [
        (Operand("net", ("cpu",), 9, "module"), 'net.to("cuda:0")'),
        (Operand("batch['x']", ("cpu",), 9), "batch['x'] = batch['x'].to(\"cuda:0\")"),
        (
            Operand("parts", ("cpu", "cuda:0"), 9, "container"),
            'parts = [each.to("cuda:0") for each in parts]',
        ),
        (
            Operand("self.mask", ("cpu",), 9, is_unregistered=True),
            'self.register_buffer("mask", ...)  # in __init__, so that .to("cuda:0") takes it along',
        ),
        (
            Operand("opt", ("cuda:0", "cpu"), 9, "optimizer"),
            "opt.load_state_dict(opt.state_dict())  # takes its state to its parameters",
        ),
    ],
)
def test_each_kind_of_stray_has_its_own_remedy(operand: Operand, fix: str) -> None:
    assert told(MIXED[0], MODEL, operand).fix == fix


def test_an_index_goes_to_the_data_and_not_the_data_to_the_index() -> None:
    found = told(MIXED[5], X, Operand("rows", ("cuda:0",), 8, is_index=True))
    assert found.fix == 'rows = rows.to("cpu")'


def test_what_has_no_name_is_said_to_have_none() -> None:
    assert (
        told(MIXED[0], MODEL).what
        == "model is on cuda:0; what is made in the line or inside the call is on cpu."
    )
    assert "none of them has a name" in told(MIXED[0]).what


def test_what_the_cell_made_where_it_runs_is_not_what_must_move() -> None:
    found = told(MIXED[0], X)
    assert found.fix == 'x = x.to("cuda:0")'


def test_types_that_differ_on_one_device_are_not_taken_for_devices() -> None:
    text = "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same"
    assert told(text, MODEL, Operand("x", ("cuda:0",))) is None


@pytest.mark.parametrize(("grad", "fix"), [(False, "x.cpu()"), (True, "x.detach().cpu()")])
def test_numpy_is_given_a_copy_on_the_host(grad: bool, fix: str) -> None:
    text = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    x = Operand("x", ("cuda:0",), 12, requires_grad=grad)
    assert told(text, x, Operand("y", ("cpu",))).fix == fix


def test_what_a_comprehension_binds_is_moved_inside_it() -> None:
    row = Operand("row[:4]", ("cpu",), 9)
    assert told(MIXED[0], MODEL, row, inner=frozenset({"row"})).fix == 'row[:4].to("cuda:0")'


def test_an_ordinal_that_is_not_there_is_told_with_those_that_are() -> None:
    text = "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"
    found = told(text)
    assert (
        found.what
        == "The line asks for a device number that does not exist; there are cuda:0, cuda:1."
    )


def test_a_loader_that_pins_what_is_on_the_device_is_told_not_to() -> None:
    text = "cannot pin 'torch.cuda.LongTensor' only dense CPU tensors can be pinned"
    found = told(text)
    assert "new tensors are on cuda:0" in found.what
    assert found.fix.startswith("DataLoader(..., pin_memory=False)")


def test_a_generator_is_made_where_the_numbers_go() -> None:
    text = "Expected a 'cuda' device type for generator but found 'cpu'"
    assert (
        told(text, Operand("gen", ("cpu",), 0, "generator")).fix
        == 'gen = torch.Generator("cuda:0")'
    )
    assert told(text).fix == 'generator=torch.Generator("cuda:0")'


@pytest.mark.parametrize(
    "text", ["", "shape mismatch", "CUDA out of memory. Tried to allocate 2.00 GiB", "device"]
)
def test_other_errors_are_left_alone(text: str) -> None:
    assert told(text, MODEL, X) is None


@pytest.mark.parametrize(
    "text",
    [
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        "Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1.",
    ],
)
def test_a_file_of_another_machine_is_loaded_with_map_location(text: str) -> None:
    assert told(text).fix == 'torch.load(..., map_location="cuda:0")'


def test_a_forked_process_is_told_from_a_loaders_worker() -> None:
    text = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn'"
    assert told(text).fix.startswith('torch.multiprocessing.set_start_method("spawn")')
    found = told(f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback: {text}")
    assert found.fix.startswith('batch = batch.to("cuda:0")')
    assert "num_workers=0" in found.what
