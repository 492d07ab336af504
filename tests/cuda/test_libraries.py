"""The compute libraries below torch's CUDA: cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT and NCCL without a GPU.

Nothing is computed, so these tests are of what runs, which shapes come out, what is allocated, and what is asked for
that the fake libraries do not have: that is named on stderr.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.cuda.comm
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumagic import fakecuda

Shape = tuple[int, ...]


@pytest.fixture(autouse=True)
def _nothing_is_missing(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "fakecuda:" not in capfd.readouterr().err


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Let torch allocate what it keeps: the workspaces of cuBLAS and cuBLASLt, here and where backward runs."""
    for dtype in NUMBERS[:3]:
        given = on_device(4, 4, dtype=dtype)
        nn.functional.dropout(
            given @ given + nn.functional.linear(given, given, given[0])
        ).sum().backward()
    gc.collect()
    gc.freeze()  # what is imported by now need not be searched for garbage before each test


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).cuda().requires_grad_()


def occupied(*tensors: torch.Tensor) -> int:
    """Return what the allocator counts for the storages of some tensors: multiples of 512 bytes."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(-(-size // 512) * 512 for size in sizes.values())


def tensors_of(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return (
        [tensor for part in result for tensor in tensors_of(part)]
        if isinstance(result, (tuple, list))
        else []
    )


def backward(result: object) -> list[torch.Tensor]:
    outputs = tensors_of(result)
    torch.autograd.backward([output.abs().sum() for output in outputs if output.requires_grad])
    return outputs


def check(run: Callable[..., object], given: list[torch.Tensor], expected: Shape) -> None:
    """Run an operation forward and backward and compare what stays allocated with the shapes of what it returned."""
    before = torch.cuda.memory_allocated()
    outputs = backward(run(*given))
    assert outputs[0].shape == expected
    gradients = [tensor.grad for tensor in given]
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in given]
    allocated, shapes = torch.cuda.memory_allocated() - before, occupied(*outputs, *gradients)
    assert allocated == shapes


def convolution(
    dimensions: int, *, transposed: bool = False
) -> tuple[Callable[..., torch.Tensor], Shape, Shape]:
    run = getattr(
        nn.functional, f"conv_transpose{dimensions}d" if transposed else f"conv{dimensions}d"
    )
    weight = (4, 8) if transposed else (8, 4)
    return run, (*weight, *[3] * dimensions), (8, *[11 if transposed else 7] * dimensions)


@pytest.mark.parametrize("benchmark", [False, True], ids=["", "benchmark"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_run_through_cudnn(
    dimensions: int,
    transposed: bool,
    dtype: torch.dtype,
    benchmark: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    run, weight, expected = convolution(dimensions, transposed=transposed)
    batch = 3 if benchmark else 2  # torch keeps its plans, by the shapes
    given = [
        on_device(*shape, dtype=dtype) for shape in ((batch, 4, *[9] * dimensions), weight, (8,))
    ]
    check(run, given, (batch, *expected))
    if (
        dimensions < 3 or dtype is torch.float32
    ):  # torch 2.9 has convolutions of its own for the others
        assert (
            fakecuda.unknown_sizes()["cudnn graph"] >= 3
        )  # forward, and backward for the data and for the weight


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"num_layers": 3, "dropout": 0.5}, {"batch_first": True}],
    ids=str,
)
def test_the_weights_of_a_recurrent_network_are_one_storage_of_their_own_size(
    cell: type[nn.RNNBase], options: dict[str, object]
) -> None:
    network = cell(10, 20, **options).cuda()
    output, state = network(on_device(4, 3, 10))
    backward((output, state))
    weights = list(network.parameters())
    assert output.shape == (4, 3, 40 if network.bidirectional else 20)
    assert {weight.untyped_storage().nbytes() for weight in weights} == {
        sum(weight.nbytes for weight in weights)
    }
    assert all(weight.grad.shape == weight.shape for weight in weights)
    assert fakecuda.unknown_sizes()["cudnnGetRNNTempSpaceSizes"] > 0


def test_a_recurrent_network_without_biases_runs() -> None:
    network = nn.GRU(10, 20, bias=False).cuda()
    backward(network(on_device(4, 3, 10)))
    assert network.weight_hh_l0.grad.shape == (60, 20)


def test_the_weights_of_a_projected_lstm_are_one_storage_too() -> None:
    network = nn.LSTM(10, 20, num_layers=2, proj_size=5, bidirectional=True).cuda()
    weights = list(network.parameters())
    assert network(on_device(4, 3, 10))[0].shape == (4, 3, 10)
    assert {weight.untyped_storage().nbytes() for weight in weights} == {
        sum(weight.nbytes for weight in weights)
    }


def test_weights_come_back_from_a_recurrent_network_as_they_went() -> None:
    network = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    for name, weight in network.cuda().state_dict().items():
        assert torch.equal(weight.cpu(), before[name])


def test_packed_sequences_run_through_a_recurrent_network() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(on_device(4, 3, 10), [4, 3, 1])
    output, _ = nn.GRU(10, 20).cuda()(packed)
    assert output.data.shape == (8, 20)
    backward(output.data)


def test_ctc_loss_runs_through_cudnn() -> None:
    lengths = torch.full((16,), 50, dtype=torch.int32), torch.full((16,), 30, dtype=torch.int32)
    labels = torch.randint(1, 20, (16 * 30,), dtype=torch.int32)
    given = on_device(50, 16, 20)
    probabilities = given.log_softmax(2)
    nn.functional.ctc_loss(
        probabilities, labels.cuda(), *(length.cuda() for length in lengths)
    ).backward()
    assert given.grad.shape == given.shape
    assert fakecuda.unknown_sizes()["cudnnGetCTCLossWorkspaceSize_v8"] > 0


@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_trains_and_evaluates(channels_last: bool) -> None:
    layer = nn.BatchNorm2d(8).cuda()
    given = on_device(4, 8, 5, 5, dtype=torch.float16).detach()
    given = given.to(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    ).requires_grad_()
    backward(layer(given))
    assert layer.eval()(given).shape == given.grad.shape == (4, 8, 5, 5)


@pytest.mark.parametrize(
    "backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_runs_forward_and_backward(
    backend: SDPBackend, dtype: torch.dtype, is_causal: bool
) -> None:
    given = [on_device(2, 4, 32, 64, dtype=dtype) for _ in range(3)]
    with sdpa_kernel(backend):
        check(
            lambda q, k, v: nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal
            ),
            given,
            (2, 4, 32, 64),
        )


# The forms that leave it to the caller to look whether it went well, where there are some: no values, no answer.
LINALG: dict[str, tuple[Callable[..., object], Shape]] = {
    "inv": (lambda a: torch.linalg.inv_ex(a)[0], (5, 5)),
    "solve": (lambda a: torch.linalg.solve_ex(a, a)[0], (5, 5)),
    "cholesky": (lambda a: torch.linalg.cholesky_ex(a)[0], (5, 5)),
    "qr": (torch.linalg.qr, (5, 5)),
    "svd": (lambda a: torch.linalg.svd(a, full_matrices=False), (5, 5)),
    "svdvals": (torch.linalg.svdvals, (5,)),
    "eigh": (torch.linalg.eigh, (5,)),
    "eigvalsh": (torch.linalg.eigvalsh, (5,)),
    "det": (torch.linalg.det, ()),
    "slogdet": (torch.linalg.slogdet, ()),
    "lu": (torch.linalg.lu, (5, 5)),
    "lu_factor": (lambda a: torch.linalg.lu_factor_ex(a)[0], (5, 5)),
    "pinv": (torch.linalg.pinv, (5, 5)),
    "solve_triangular": (lambda a: torch.linalg.solve_triangular(a, a, upper=True), (5, 5)),
}


@pytest.fixture
def _zeros() -> Iterator[None]:
    """Allocate in memory that nothing was written to: what torch reads from it to check a result is then 0."""
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        yield


@pytest.mark.usefixtures("_zeros")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["", "batch"])
@pytest.mark.parametrize("name", LINALG)
def test_linalg_runs_forward_and_backward(name: str, batch: Shape, dtype: torch.dtype) -> None:
    run, expected = LINALG[name]
    given = on_device(*batch, 5, 5, dtype=dtype)
    outputs = backward(run(given))
    assert outputs[1 if name == "lu" else 0].shape == (
        *batch,
        *expected,
    )  # lu's first is the permutation
    assert given.grad.shape == given.shape


@pytest.mark.usefixtures("_zeros")
def test_least_squares_are_solved() -> None:
    given = on_device(3, 5, 4).detach()
    assert torch.linalg.lstsq(given, given).solution.shape == (3, 4, 4)


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "fft2", "rfft2", "fftn", "hfft"])
def test_fourier_transforms_run_forward_and_backward(name: str) -> None:
    given = on_device(2, 8, 8)
    result = getattr(torch.fft, name)(given)
    backward(result)
    assert result.shape == getattr(torch.fft, name)(torch.empty(2, 8, 8)).shape
    assert fakecuda.unknown_sizes()["cufftXtMakePlanMany"] >= 0
    assert given.grad.shape == given.shape


def test_the_workspace_of_a_new_fourier_transform_is_counted_as_unknown() -> None:
    torch.backends.cuda.cufft_plan_cache.clear()
    torch.fft.fft(torch.zeros(17, 19, device="cuda"))
    assert fakecuda.unknown_sizes()["cufftXtMakePlanMany"] > 0


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_matrix_times_a_dense_one(layout: str) -> None:
    sparse = getattr(torch.eye(8), f"to_sparse_{layout}")().cuda().requires_grad_()
    dense = on_device(8, 4)
    result = torch.sparse.mm(sparse, dense)
    backward(result)
    assert result.shape == (8, 4)
    assert dense.grad.shape == (8, 4)
    assert sparse.grad.layout == sparse.layout


def test_sparse_matrices_of_one_process_add_and_multiply() -> None:
    sparse = torch.eye(8).to_sparse_csr().cuda()
    assert (sparse + sparse).shape == (sparse @ sparse).shape == (8, 8)
    assert (sparse @ torch.ones(8).cuda()).shape == (8,)


PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], list[Shape], Shape]] = {
    "mm": (torch.mm, [(16, 32), (32, 8)], (16, 8)),
    "mv": (torch.mv, [(16, 32), (32,)], (16,)),
    "dot": (torch.dot, [(32,), (32,)], ()),
    "addmm": (torch.addmm, [(8,), (16, 32), (32, 8)], (16, 8)),
    "bmm": (torch.bmm, [(4, 16, 32), (4, 32, 8)], (4, 16, 8)),
    "baddbmm": (torch.baddbmm, [(4, 16, 8), (4, 16, 32), (4, 32, 8)], (4, 16, 8)),
    "linear": (nn.functional.linear, [(16, 32), (8, 32), (8,)], (16, 8)),
    "einsum": (lambda a, b: torch.einsum("bij,kj->bik", a, b), [(4, 16, 32), (8, 32)], (4, 16, 8)),
}
NUMBERS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_allocate_their_result_and_gradients(name: str, dtype: torch.dtype) -> None:
    run, shapes, expected = PRODUCTS[name]
    check(run, [on_device(*shape, dtype=dtype) for shape in shapes], expected)


def test_products_of_integers_and_with_an_activation_run() -> None:
    ones = torch.ones(32, 32, device="cuda")
    assert torch._int_mm(ones.to(torch.int8), ones.to(torch.int8)).dtype == torch.int32
    assert torch._addmm_activation(ones[0], ones, ones, use_gelu=True).shape == (32, 32)


def test_nothing_is_found_by_values_whatever_the_memory_held_before() -> None:
    given, numbers = torch.arange(1.0, 1001.0).cuda(), torch.randint(0, 9, (1000,)).cuda()
    held = [torch.full((size,), 7).cuda() for size in (8, 64, 500, 1000, 5000)]
    del held
    assert given.nonzero().shape == (0, 1)
    assert given[given > 0].shape == given.masked_select(given > 0).shape == (0,)
    assert numbers.unique().shape == torch.unique_consecutive(numbers).shape == (0,)
    assert "device='cuda:0'" in repr(given)  # which looks for the elements that are not 0
    assert not (given > 0).any()
    assert torch.linalg.inv(torch.eye(5).expand(3, 5, 5).cuda()).shape == (
        3,
        5,
        5,
    )  # any() is how it looks for errors
    assert given[1].item() == 2


def residual_network() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    )
    return nn.Sequential(body, nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 10))


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_a_convolutional_network_trains_a_step(autocast: bool) -> None:
    model = residual_network().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda", enabled=autocast):
        loss = nn.functional.cross_entropy(
            model(torch.randn(4, 3, 16, 16).cuda()), torch.randint(10, (4,)).cuda()
        )
    loss.backward()
    optimizer.step()
    assert all(
        set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values()
    )
    assert len(optimizer.state) == len(list(model.parameters()))


def test_a_resnet_of_timm_trains_a_step() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet18", num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nn.functional.cross_entropy(
        model(torch.randn(2, 3, 64, 64).cuda()), torch.zeros(2, dtype=torch.long).cuda()
    ).backward()
    optimizer.step()
    assert all(weight.grad.shape == weight.shape for weight in model.parameters())


def test_data_parallel_trains_on_both_devices() -> None:
    model = nn.DataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).cuda()
    )
    fakecuda.reset()
    result = model(torch.randn(8, 4).cuda())
    assert result.shape == (8, 2)
    assert result.device == torch.device("cuda:0")
    backward(result)
    assert model.module[0].weight.grad.shape == (8, 4)
    assert ("device-to-device", "cuda:0", "cuda:1", 4 * 4 * 4) in {
        copy[:4] for copy in fakecuda.copies()
    }


def test_a_broadcast_moves_its_contents_and_no_copy_is_logged() -> None:
    there = torch.arange(8.0).to("cuda:0")
    fakecuda.reset()
    first, second = torch.cuda.comm.broadcast(there, [0, 1])
    assert not fakecuda.copies()
    assert torch.equal(second.cpu(), torch.arange(8.0))
    assert second.device == torch.device("cuda:1")
    assert torch.cuda.comm.reduce_add([first, second]).shape == (8,)


def test_what_is_scattered_is_gathered_again() -> None:
    parts = torch.cuda.comm.scatter(torch.arange(8.0).cuda(), [0, 1])
    assert [part.shape for part in parts] == [(4,), (4,)]
    assert torch.equal(torch.cuda.comm.gather(parts, destination=1).cpu(), torch.arange(8.0))


def test_one_rank_of_nccl_keeps_its_values(tmp_path: object) -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        given = torch.arange(4.0).cuda()
        gathered = torch.empty(4, device="cuda")
        dist.all_reduce(given)
        dist.all_gather_into_tensor(gathered, given)
        dist.barrier()
        assert torch.equal(gathered.cpu(), torch.arange(4.0))
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda())
        backward(model(given))
    finally:
        dist.destroy_process_group()


ON_HOPPER = """
import torch
left = torch.randn(32, 64).cuda().to(torch.float8_e4m3fn)
right = torch.randn(32, 64).cuda().to(torch.float8_e4m3fn).t()
one = torch.ones(()).cuda()
assert torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16).shape == (32, 32)
given = [torch.randn(2, 4, 32, 64, dtype=torch.float16).cuda().requires_grad_() for _ in range(3)]
result = torch.nn.functional.scaled_dot_product_attention(*given)
result.sum().backward()
print(type(result.grad_fn).__name__, torch.cuda.get_device_name())
"""


def test_a_hopper_has_products_of_eight_bits_and_attention_as_torch_chooses() -> None:
    run = subprocess.run(
        [sys.executable, "-c", ON_HOPPER],
        env={**os.environ, **fakecuda.environment("H100")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ScaledDotProduct" in run.stdout, run.stderr
    assert "H100" in run.stdout
    assert "fakecuda:" not in run.stderr
