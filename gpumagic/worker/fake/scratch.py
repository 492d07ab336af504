"""What CUDA's kernels allocate besides their results, by the rules in torch's own source, `ATen/native/cuda`.

Kernels copy operands that do not lie in memory as they take them, such as an expanded gradient; kernels that call
others hold what these return; those that sort have room for keys and indices. All of it counts as if it were held at
once; of a kernel with several phases, the largest counts. The rules are for what common training and inference runs; of
other kernels that sort or call a library, `is_unknown` says that this is not known. Runs in the worker's process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._meta_registrations import calc_conv_nd_return_shape
from torch._prims_common import suggest_memory_format

from gpumagic.memory.allocator import rounded
from gpumagic.worker.fake import attention, backend, reductions
from gpumagic.worker.fake.calls import Call, Given
from gpumagic.worker.fake.reductions import PARTIALS

Rule = Callable[[Given], list[int]]
"""Returns the bytes of each block that a kernel allocates for itself."""
is_unknown = re.compile(
    r"_?linalg_(?!vector_norm|cross)|_?cholesky|_fft|geqrf|ormqr|triangular_solve|lu_|m?sort|argsort|topk|kthvalue"
    r"|(nan)?median|mode|_?unique|multinomial|randperm|bernoulli(_\.Tensor|$)|count_nonzero|histc|bincount|_histogramdd"
    r"|_ctc_loss|_cudnn|convolution"
).match
"""Finds operators of whose kernels it is not known what they allocate: they sort, or call a library, or are rare."""

_CONTIGUOUS = {
    "native_layer_norm": ("input",),
    "native_layer_norm_backward": ("grad_out", "input"),
    "_fused_rms_norm": ("input",),
    "_fused_rms_norm_backward": ("grad_out", "input"),
    "_softmax": ("self",),
    "_log_softmax": ("self",),
    "_log_softmax_backward_data": ("grad_output", "output"),
    "im2col": ("self",),
    "col2im": ("self",),
}
"""Operands that kernels copy where they are not contiguous."""
_TAKES_A_GRADIENT = re.compile(
    r"(pool.*|upsample_.*|reflection_pad[12]d)_backward"
).search
"""Finds kernels that copy a gradient that does not lie in memory as their input does."""


def scratch(call: Call) -> list[int]:
    """Return the bytes that an operator's kernel allocates for itself on CUDA, in order; nothing for most."""
    name = call.name
    given = call.given
    if name in PARTIALS:
        return reductions.allocated_by(name, given)
    if _TAKES_A_GRADIENT(name):
        allocated = _copied_gradient(given)
    else:
        operands = [given[operand] for operand in _CONTIGUOUS.get(name, ())]
        allocated = _copied(*operands)
    rule = _RULES.get(name)
    if rule is not None:
        allocated += rule(given)
    return allocated


def as_left(call: Call, returned: Any) -> Any:
    """Return an operator's results as CUDA's kernel leaves them, where torch's meta kernel makes other storages.

    Args:
        call: the call.
        returned: what the meta kernel returned.
    """
    name = call.name
    given = call.given
    if name == "native_batch_norm" and not given["training"] and _is_cudnns(given):
        result, mean, deviation = returned
        return result, mean.new_empty(0), deviation.new_empty(0)
    if name == "log_sigmoid_forward":
        return returned[0], returned[1].new_empty(0)
    if name == "col2im":  # the result begins as large as the input
        return returned.new_empty(given["self"].shape).resize_(returned.shape)
    if name in _REDUCED_IN_PLACE and given["reduction"]:
        return _elementwise_loss(given).resize_(())
    return returned


# ---- Copies


def _copied(*operands: torch.Tensor) -> list[int]:
    """Return the bytes of those operands that are copied because they are not contiguous."""
    return [operand.nbytes for operand in operands if not operand.is_contiguous()]


def _copied_gradient(given: Given) -> list[int]:
    """Return the bytes of a gradient that is copied because it does not lie as the input of the forward pass."""
    gradient: Any = given.get("grad_output", given.get("grad_out"))
    forward_input = given.get("self", given.get("input", gradient))
    if gradient.is_contiguous(memory_format=suggest_memory_format(forward_input)):
        return []
    return [gradient.nbytes]


def _copied_for_cublas(given: Given) -> list[int]:
    """Return the bytes of factors in which neither rows nor columns are contiguous (`Blas.cpp`)."""
    has_summand = "beta" in given  # which is `self` then
    copied = []
    for name, matrix in given.items():
        if name == "self":
            is_factor = not has_summand
        else:
            is_factor = name.startswith(("mat", "batch"))
        if is_factor and not _is_taken_by_cublas(matrix):
            copied.append(matrix.nbytes)
    return copied


def _is_taken_by_cublas(matrix: torch.Tensor) -> bool:
    if not matrix.numel() or matrix.is_contiguous():
        return True
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    if column_stride == 1 and row_stride >= max(1, columns):
        return True
    return bool(row_stride == 1 and column_stride >= max(1, rows))


def _copied_self(given: Given) -> list[int]:
    return [given["self"].nbytes]


def _copied_complex(given: Given) -> list[int]:
    whole = given["self"]
    return [whole.nbytes] if whole.is_complex() else []


def _rolled(given: Given) -> list[int]:
    """Return the bytes of what is rolled along one dimension after the other, of which two are held at most."""
    whole = given["self"]
    copies = len(given["shifts"]) - 1
    if not copies and not whole.is_contiguous():
        copies = 1
    return [whole.nbytes] * min(copies, 2)


# ---- Losses, norms, softmax

_LOSSES = frozenset(
    {
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "soft_margin_loss",
    }
)
"""Losses that are computed for each element and then reduced."""
_REDUCED_IN_PLACE = frozenset({"mse_loss", "smooth_l1_loss", "binary_cross_entropy"})
"""Those of them whose mean lies in the storage that was made for the loss of each element."""


def _loss(given: Given) -> list[int]:
    """Return the loss of each element, where the result does not begin as that, and the partial results of the sum."""
    if not given["reduction"]:
        return []
    losses = _elementwise_loss(given)
    allocated = [] if "weight" in given else [losses.nbytes]
    return allocated + reductions.allocated_by("sum", {"self": losses})


def _elementwise_loss(given: Given) -> torch.Tensor:
    """Return a stand-in for the loss of each element."""
    whole = given["self"]
    target = given["target"]
    shape = torch.broadcast_shapes(whole.shape, target.shape)
    dtype = torch.result_type(whole, target)
    return torch.empty(shape, dtype=dtype, device="meta")


def _batch_norm_backward(given: Given) -> list[int]:
    return _copied_gradient(given) if given["train"] and _is_cudnns(given) else []


def _is_cudnns(given: Given) -> bool:
    """Return whether cuDNN computes a batch norm."""
    weight = given["weight"]
    if weight is None:
        return False
    has_pixels: bool = given["input"].dim() > 2
    return has_pixels and weight.dtype == torch.float32


def _group_norm(given: Given) -> list[int]:
    """Return what a group norm keeps of each group and channel (`group_norm_kernel.cu`)."""
    dtype: torch.dtype = given["input"].dtype
    keeps_statistics = dtype.itemsize < 4  # the results are not as precise
    of_channels, of_groups = _group_norm_sizes(given)
    allocated = [of_groups, of_groups] if keeps_statistics else []
    if _scales_channels(given):
        allocated += [of_channels, of_channels]
    return allocated


def _group_norm_backward(given: Given) -> list[int]:
    of_channels, of_groups = _group_norm_sizes(given)
    allocated = [of_channels, of_channels]
    computes_input_gradient = given["output_mask"][0]
    if computes_input_gradient:
        allocated += [of_groups, of_groups]
        if _scales_channels(given):
            allocated.append(of_channels)
    return allocated


def _group_norm_sizes(given: Given) -> tuple[int, int]:
    """Return the bytes of a number for each channel, and for each group, of each image."""
    images = given["N"]
    size = max(4, given["input"].dtype.itemsize)
    of_channels = images * given["C"] * size
    of_groups = images * given["group"] * size
    return of_channels, of_groups


def _scales_channels(given: Given) -> bool:
    has_parameters = given.get("weight") is not None or given.get("bias") is not None
    return given["HxW"] > 1 and has_parameters


def _softmax_backward(given: Given) -> list[int]:
    """Return the gradient times the output, and where the gradient is transposed, a copy of it."""
    gradient = given["grad_output"]
    nbytes = given["output"].nbytes
    is_transposed = not gradient.is_contiguous() and 0 not in gradient.stride()
    return [nbytes, nbytes] if is_transposed else [nbytes]


# ---- Convolutions

_CONVOLUTION_SETTINGS = ("stride", "padding", "dilation", "transposed", "groups")


def _convolution(given: Given) -> list[int]:
    """Return the bytes of cuDNN's workspace."""
    images = given["input"]
    weight = given["weight"]
    settings = [given[name] for name in _CONVOLUTION_SETTINGS]
    output_padding = given["output_padding"] if given["transposed"] else None
    shape = calc_conv_nd_return_shape(images, weight, *settings, output_padding)
    result = weight.new_empty(shape, device="meta")
    result = result.to(memory_format=suggest_memory_format(images))
    return [_cudnn_workspace(images, weight, result)]


def _convolution_backward(given: Given) -> list[int]:
    """Return the copied gradient, and cuDNN's workspace or the partial sums of the bias, whichever is larger."""
    images = given["input"]
    weight = given["weight"]
    gradient = given["grad_output"]
    for_images, for_weight, for_bias = given["output_mask"]
    workspace = 0
    if for_images:
        workspace = _cudnn_workspace(images, weight, gradient)
    if for_weight:
        if for_images:  # that comes first, when there is no gradient of the weight yet
            workspace -= weight.nbytes
        of_weight = _cudnn_workspace(images, weight, gradient, of_weight=True)
        workspace = max(of_weight, workspace)
    sums = []
    if for_bias:
        all_but_channels = [0, *range(2, gradient.dim())]
        sums = reductions.allocated_by(
            "sum", {"self": gradient, "dim": all_but_channels}
        )
    return max([*_copied_gradient(given), workspace], sums, key=sum)


def _cudnn_workspace(
    images: Any, weight: Any, result: Any, *, of_weight: bool = False
) -> int:
    """Return the bytes of cuDNN's workspace, by the rules of `fakecuda/native/cudnn.c`.

    Args:
        images: what is convolved.
        weight: of the convolution.
        result: what comes of it, or its gradient.
        of_weight: whether the weight's gradient is computed.
    """
    has_tensor_cores = weight.itemsize == 2 or backend.gpu.major >= 8
    is_depthwise = weight.shape[1] == 1
    if weight.itemsize > 4 or not has_tensor_cores or is_depthwise:
        return 0
    filters, channels = weight.shape[:2]
    is_pointwise = weight.numel() == filters * channels
    if is_pointwise:
        return 1 << 20 if of_weight else 0
    multiple = 16 // weight.itemsize
    copies = 0
    are_taken_as_they_are = True
    for tensor in (images, weight, result):
        channels = tensor.shape[1]
        padded_channels = rounded(channels, multiple)
        if padded_channels != channels or tensor.stride(1) != 1:
            are_taken_as_they_are = False
        if tensor.numel():
            copies += tensor.nbytes // channels * padded_channels
    if not are_taken_as_they_are:
        copies += _padding_of_filters(weight, multiple)
    parts = copies // 4 if of_weight else 0
    return parts if are_taken_as_they_are else copies + parts


def _padding_of_filters(weight: Any, multiple: int) -> int:
    """Return the bytes of the filters by which the copy of a weight has more, so that their number is a multiple."""
    number, channels = weight.shape[:2]
    one_filter = weight[:1].nbytes
    padded_filter: int = one_filter // channels * rounded(channels, multiple)
    missing: int = -number % multiple
    return padded_filter * missing


# ---- Distances, indices, sums along a dimension


def _distances_backward(given: Given) -> list[int]:
    """Return every difference's gradient, and the partial results of their sum (`DistanceKernel.cu`)."""
    if not given["p"]:
        return []
    if "x2" in given:
        points = given["x1"]
        others = given["x2"].shape[-2]
    else:
        points = given["self"]
        others = points.shape[-2] - 1
    *batch, number, width = points.shape
    gradients = points.new_empty((*batch, others, number, width), device="meta")
    added = {"self": gradients, "dim": points.dim() - 2}
    return [gradients.nbytes, *reductions.allocated_by("sum", added)]


def _sorting(count: int) -> int:
    """Return the bytes that sorting so many pairs takes besides copies of all: an estimate."""
    return count // 3 + 8192


_SUMMED_WITHOUT_SORTING = 3072
"""Indices of a table up to which its gradient is added up without sorting them."""
_ROWS_OF_A_PART = 10
"""Rows of equal index of which one sum is made, before the sums are added up."""
_MAX = 2
"""The mode of a bag of embeddings in which each element has one index."""


def _table_backward(given: Given) -> list[int]:
    """Return what the gradient of a table is summed in (`EmbeddingBackwardKernel.cu`): sorted indices, partial sums."""
    indices = given["indices"]
    gradient: Any = given.get("grad_output", given.get("grad"))
    weighs_by_count = given["scale_grad_by_freq"]
    count = indices.numel()
    is_sorted = count > _SUMMED_WITHOUT_SORTING or weighs_by_count
    if "mode" in given:  # of a bag of embeddings
        is_sorted = given["mode"] != _MAX
    copied = _copied(gradient)
    if not is_sorted:
        return copied
    rows = given["num_weights"]
    columns = gradient.shape[-1]
    size = indices.itemsize
    of_indices = count * size
    of_result = rows * columns * gradient.itemsize
    sorting = 5 * of_indices + _sorting(count) - of_result  # which is not there yet

    segments = min(count, rows)
    parts = count // _ROWS_OF_A_PART + segments
    summing = [of_indices] * 3
    if weighs_by_count:
        summing.append(of_indices)
    summing += [512, 512, segments * size, segments * size, parts * size]
    summing.append(parts * columns * max(4, gradient.itemsize))
    return copied + max(summing, [sorting], key=sum)


def _index(given: Given) -> list[int]:
    """Return the bytes of copied indices: all get the same layout."""
    indices = [index for index in given["indices"] if index is not None]
    broadcast = torch.broadcast_tensors(*indices)
    layouts = {index.stride() for index in broadcast}
    return [] if len(layouts) < 2 else _copied(*broadcast)


_COPIED_TO_SORT = 1024
"""Places beyond which sorting them takes room for copies."""


def _index_put(given: Given) -> list[int]:
    """Return what is allocated to put values where indices say (`Indexing.cu`).

    To add values up, as the backward pass of an index does, the places are computed, sorted and kept with their order.
    What the sort itself takes is an estimate.
    """
    if not given["accumulate"]:
        return _index(given)
    whole = given["self"]
    dims = []
    indices = []
    for dim, index in enumerate(given["indices"]):
        if index is not None:
            dims.append(dim)
            indices.append(index)
    first = dims[0]
    last = dims[-1]
    are_neighbours = last - first == len(dims) - 1
    copied = []
    if (
        not are_neighbours or not whole.is_contiguous()
    ):  # apart, they are made to come first
        copied.append(whole.nbytes)
    copied += _copied(given["values"])
    count = torch.broadcast_tensors(*indices)[0].numel()
    places = 8 * count
    sorting = 512
    if count > _COPIED_TO_SORT:
        sorting = 2 * places + _sorting(count)
    return [*copied, places, places, places, places, sorting]


def _cumulative(given: Given) -> list[int]:
    """Return copies in the type of the result and contiguous, and the partial sums of a single row (`ScanKernels.cpp`).

    The partial sums are told a little too high.
    """
    values = given["self"]
    dtype: torch.dtype | None = given.get("dtype")
    if dtype is None:
        is_fractional = values.is_floating_point() or values.is_complex()
        dtype = values.dtype if is_fractional else torch.int64
    whole = values.numel() * dtype.itemsize
    allocated = []
    if dtype != values.dtype:
        allocated.append(whole)
    if not values.is_contiguous():
        allocated.append(whole)
    if values.dim() and values.shape[given["dim"]] == values.numel():  # it is one row
        allocated.append(whole * dtype.itemsize // 3584 + 1280)
    return allocated


def _reduced_by_index(given: Given) -> list[int]:
    """Return what a mean takes: how many are added up in each place, and ones to count them with."""
    if given["reduce"] != "mean":
        return []
    is_scattered = "src" in given
    source: Any = given["src"] if is_scattered else given["source"]
    whole = given["self"]
    allocated = [whole.nbytes, source.nbytes]
    if is_scattered:
        allocated.append(whole.numel())
    return allocated


def _masked_scatter(given: Given) -> list[int]:
    """Return the index of each element's value."""
    return [8 * given["mask"].numel()]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation"), _copied_for_cublas
    ),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_batch_norm_backward": _batch_norm_backward,
    "_softmax_backward_data": _softmax_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_cdist_backward": _distances_backward,
    "_pdist_backward": _distances_backward,
    "embedding_dense_backward": _table_backward,
    "_embedding_bag_backward": _table_backward,
    "index": _index,
    "index_put": _index_put,
    "_index_put_impl": _index_put,
    "cumsum": _cumulative,
    "cumprod": _cumulative,
    "_logcumsumexp": _cumulative,
    "scatter_reduce": _reduced_by_index,
    "index_reduce": _reduced_by_index,
    "masked_scatter": _masked_scatter,
    "im2col": _copied_self,
    "roll": _rolled,
    "abs": _copied_complex,
    "angle": _copied_complex,
    "_scaled_dot_product_flash_attention": attention.flash,
    "_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
}
"""What else kernels allocate, by the operator's name."""
