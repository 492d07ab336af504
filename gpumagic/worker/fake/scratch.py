"""What CUDA's kernels allocate besides their results, by the rules in torch's own source, `ATen/native/cuda`.

Kernels copy what does not lie as they take it, such as an expanded gradient; those that are made of others hold what
these return; those that sort have room for keys and places. All of it counts as if it were held at once, where a kernel
has several such phases that of the largest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._meta_registrations import calc_conv_nd_return_shape
from torch._prims_common import suggest_memory_format

from gpumagic.worker.fake import attention, backend
from gpumagic.worker.fake.calls import Call
from gpumagic.worker.fake.reductions import PARTS, parts_of

Given = dict[str, Any]
"""A call's arguments by name."""
is_unknown = re.compile(
    r"_?linalg_(?!vector_norm|cross)|_?cholesky|_fft|geqrf|ormqr|triangular_solve|lu_|m?sort|argsort|topk|kthvalue|median"
    r"|nanmedian|mode|_?unique|multinomial|randperm|histc|bincount|_histogramdd|_ctc_loss|_cudnn|convolution"
).match
"""Finds operators whose kernels sort or call a library, which has memory of its own."""
_CONTIGUOUS = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), ("input",)),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward"), ("grad_out", "input")
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "im2col", "col2im"), ("self",)),
    "_log_softmax_backward_data": ("grad_output", "output"),
}
"""Operands that kernels copy where they are not contiguous."""
_TAKES_A_GRADIENT = re.compile(r"(pool.*|upsample_.*|reflection_pad[12]d)_backward").search
"""Finds kernels that copy a gradient which does not lie as their input does."""
_HOW_TO_CONVOLVE = ("stride", "padding", "dilation", "transposed", "groups")
_LOSSES = frozenset(
    {"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"}
)
"""What is computed for each element, and then reduced."""
_KEPT_LOSSES = frozenset({"mse_loss", "smooth_l1_loss", "binary_cross_entropy"})
"""Of these the mean lies where the loss of each element was to be."""
_SORTED_IN_PLACE = 4096
"""Elements along a dimension that are sorted without room for others."""
_SORTING_HALVES = 9 << 19
"""Bytes that sorting numbers in half precision takes besides copies of all: an estimate."""


def scratch(call: Call) -> list[int]:
    """Return the bytes that an operator's kernel allocates for itself on CUDA, in order; nothing for most."""
    name, given = call.name, call.given
    if name in PARTS:
        return parts_of(name, given)
    operands = (given[each] for each in _CONTIGUOUS.get(name, ()))
    copied = [each.nbytes for each in operands if not each.is_contiguous()]
    if _TAKES_A_GRADIENT(name):
        copied = _as_input(given)
    return copied + (_RULES[name](given) if name in _RULES else [])


def as_left(call: Call, returned: Any) -> Any:
    """Return an operator's results as CUDA's kernel leaves them, where torch's meta kernel tells another storage.

    Args:
        call: the call.
        returned: what the meta kernel returned.
    """
    name, given = call.name, call.given
    if name == "native_batch_norm" and not given["training"] and _is_of_cudnn(given):
        return returned[0], returned[1].new_empty(0), returned[2].new_empty(0)
    if name == "log_sigmoid_forward":
        return returned[0], returned[1].new_empty(0)
    if name == "col2im":  # it begins as large as its input
        return returned.new_empty(given["self"].shape).resize_(returned.shape)
    if name in _KEPT_LOSSES and given["reduction"]:
        return _losses(given).resize_(())
    return returned


def _as_input(given: Given) -> list[int]:
    """Return the bytes of a gradient that is copied because it does not lie as the input of the forward pass."""
    gradient: Any = given.get("grad_output", given.get("grad_out"))
    laid_out = suggest_memory_format(given.get("self", given.get("input", gradient)))
    return [] if gradient.is_contiguous(memory_format=laid_out) else [gradient.nbytes]


# ---- Norms, losses, products


def _of_losses(given: Given) -> list[int]:
    """Return the loss of each element, where the result does not begin as that, and the parts of their sum."""
    if not given["reduction"]:
        return []
    losses = _losses(given)
    return [*([] if "weight" in given else [losses.nbytes]), *parts_of("sum", {"self": losses})]


def _losses(given: Given) -> torch.Tensor:
    """Return a stand-in for the loss of each element."""
    one, other = given["self"], given["target"]
    shape = torch.broadcast_shapes(one.shape, other.shape)
    return torch.empty(shape, dtype=torch.result_type(one, other), device="meta")


def _is_of_cudnn(given: Given) -> bool:
    """Return whether cuDNN computes a norm of batches."""
    weight = given["weight"]
    return weight is not None and weight.dtype == torch.float32 and given["input"].dim() > 2


def _of_groups(given: Given) -> list[int]:
    """Return what a norm of groups keeps of each channel and group (`group_norm_kernel.cu`)."""
    dtype: torch.dtype = given["input"].dtype
    wide = max(4, dtype.itemsize)
    channels, groups = (
        [given["N"] * given["C"] * wide] * 2,
        [given["N"] * given["group"] * wide] * 2,
    )
    scaled = (
        channels
        if given["HxW"] > 1 and any(given.get(each) is not None for each in ("weight", "bias"))
        else []
    )
    if "output_mask" not in given:
        return scaled if dtype.itemsize == wide else groups + scaled
    return channels + groups + scaled[:1] if given["output_mask"][0] else channels


def _of_softmax_backward(given: Given) -> list[int]:
    """Return the gradient times the output, and where it lies turned, a copy of it."""
    gradient, output = given["grad_output"], given["output"]
    is_turned = not gradient.is_contiguous() and 0 not in gradient.stride()
    return [output.nbytes] * (1 + is_turned)


def _for_cublas(given: Given) -> list[int]:
    """Return the bytes of factors of which neither rows nor columns lie one after the other (`Blas.cpp`)."""
    names = [
        name
        for name in given
        if name.startswith(("mat", "batch")) or (name == "self" and "beta" not in given)
    ]
    return [given[each].nbytes for each in names if _is_copied(given[each])]


def _is_copied(matrix: torch.Tensor) -> bool:
    if not matrix.numel() or matrix.is_contiguous():
        return False
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    return not ((down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns)))


def _of_convolution(given: Given) -> list[int]:
    """Return the bytes of cuDNN's workspace."""
    images, weight, how = (
        given["input"],
        given["weight"],
        [given[each] for each in _HOW_TO_CONVOLVE],
    )
    shape = calc_conv_nd_return_shape(
        images, weight, *how, given["output_padding"] if given["transposed"] else None
    )
    result = weight.new_empty(shape, device="meta")
    return [_for_cudnn(images, weight, result.to(memory_format=suggest_memory_format(images)))]


def _of_convolution_backward(given: Given) -> list[int]:
    """Return the copied gradient, and cuDNN's workspace or the parts of the bias's, whichever is larger."""
    gradient, (for_images, for_weight, for_bias) = given["grad_output"], given["output_mask"]
    of_weight = (
        _for_cudnn(given["input"], given["weight"], gradient, of_weight=True) if for_weight else 0
    )
    of_images = _for_cudnn(given["input"], given["weight"], gradient) if for_images else 0
    workspace = max(
        of_weight, of_images - given["weight"].nbytes * for_weight
    )  # the images' gradient comes first
    biases = {"self": gradient, "dim": [0, *range(2, gradient.dim())]} if for_bias else {}
    return max([*_as_input(given), workspace], parts_of("sum", biases), key=sum)


def _for_cudnn(images: Any, weight: Any, result: Any, *, of_weight: bool = False) -> int:
    """Return the bytes of cuDNN's workspace by the rules of `fakecuda/native/cudnn.c`."""
    multiple, has_tensor_cores = (
        16 // weight.itemsize,
        weight.itemsize == 2 or backend.gpu.major >= 8,
    )
    if weight.itemsize > 4 or not has_tensor_cores or weight.shape[1] == 1:
        return 0
    if weight.numel() == weight.shape[0] * weight.shape[1]:
        return of_weight << 20
    pads = [(each, -each.shape[1] % multiple) for each in (images, weight, result)]
    copies: int = sum(
        each.nbytes // each.shape[1] * (each.shape[1] + pad) for each, pad in pads if each.numel()
    )
    if all(each.stride(1) == 1 and not pad for each, pad in pads):
        return copies // 4 * of_weight
    copies += (
        weight[:1].nbytes
        // weight.shape[1]
        * (weight.shape[1] + pads[1][1])
        * (-weight.shape[0] % multiple)
    )
    return copies + copies // 4 * of_weight


def _of_distances_backward(given: Given) -> list[int]:
    """Return every difference's gradient, and the parts of their sum (`DistanceKernel.cu`)."""
    if not given["p"]:
        return []
    one: Any = given.get("x1", given.get("self"))
    rows = given["x2"].shape[-2] if "x2" in given else one.shape[-2] - 1
    gradients = one.new_empty((*one.shape[:-2], rows, *one.shape[-2:]), device="meta")
    return [gradients.nbytes, *parts_of("sum", {"self": gradients, "dim": one.dim() - 2})]


# ---- Indices and sorting


def _sorting(count: int) -> int:
    """Return the bytes that sorting so many pairs takes besides copies of all: an estimate."""
    return count // 3 + 8192


def _of_table_backward(given: Given) -> list[int]:
    """Return what a table's gradient is summed in: sorted rows, parts of ten of each (`EmbeddingBackwardKernel.cu`)."""
    indices, rows = given["indices"], given["num_weights"]
    gradient: Any = given.get("grad_output", given.get("grad"))
    copied = [] if gradient.is_contiguous() else [gradient.nbytes]
    count, columns, counts = indices.numel(), gradient.shape[-1], given["scale_grad_by_freq"]
    if given["mode"] == 2 if "mode" in given else count <= 3072 and not counts:
        return copied
    each, most = count * indices.itemsize, min(count, rows)
    parts = count // 10 + most
    sorting = (
        5 * each + _sorting(count) - rows * columns * gradient.itemsize
    )  # before there is the result
    summing = (
        [each] * (3 + counts)
        + [512, 512]
        + [most * indices.itemsize] * 2
        + [parts * indices.itemsize]
    )
    return copied + max([*summing, parts * columns * max(4, gradient.itemsize)], [sorting], key=sum)


def _of_indices(given: Given) -> list[int]:
    """Return the bytes of indices that are laid out alike."""
    spread = torch.broadcast_tensors(*(each for each in given["indices"] if each is not None))
    is_alike = len({each.stride() for each in spread}) < 2
    return [] if is_alike else [each.nbytes for each in spread if not each.is_contiguous()]


def _of_putting(given: Given) -> list[int]:
    """Return what is added, copied, and sorted places (`Indexing.cu`), with an estimate of the sort's own."""
    if not given["accumulate"]:
        return _of_indices(given)
    whole, values = given["self"], given["values"]
    dims = [dim for dim, each in enumerate(given["indices"]) if each is not None]
    found = [given["indices"][dim] for dim in dims]
    is_turned = (
        dims[-1] - dims[0] >= len(dims) or not whole.is_contiguous()
    )  # these dimensions come first
    count = torch.broadcast_tensors(*found)[0].numel()
    sorting = 16 * count + _sorting(count) if count > 1024 else 512
    copied = [whole.nbytes] * is_turned + [values.nbytes] * (not values.is_contiguous())
    return [*copied, *[8 * count] * 4, sorting]


def _of_sorting(given: Given) -> list[int]:
    """Return places, and room for both values and places where a dimension is long (`Sort.cu`): an estimate."""
    keys = given["self"]
    count, length = keys.numel(), keys.shape[given.get("dim", -1)] if keys.dim() else 1
    if length <= _SORTED_IN_PLACE:
        return [8 * length]
    more = 512 if count > length else _SORTING_HALVES if keys.itemsize == 2 else _sorting(count)
    return [8 * count, keys.nbytes + 8 * count + more]


def _of_sums(given: Given) -> list[int]:
    """Return what is summed up in its type, laid out, and of one row the parts (`ScanKernels.cpp`): a little over."""
    values = given["self"]
    is_whole = not (values.is_floating_point() or values.is_complex())
    dtype: torch.dtype = given.get("dtype") or (torch.int64 if is_whole else values.dtype)
    whole = values.numel() * dtype.itemsize
    is_one_row = values.dim() and values.numel() == values.shape[given["dim"]]
    parts = [whole * dtype.itemsize // 3584 + 1280] if is_one_row else []
    return [whole] * ((dtype != values.dtype) + (not values.is_contiguous())) + parts


def _of_median(given: Given) -> list[int]:
    keys = given["self"]
    return (
        []
        if "dim" in given
        else [keys.nbytes, 8 * keys.numel(), *_of_sorting({"self": keys.flatten()})]
    )


def _of_permutation(given: Given) -> list[int]:
    """Return random keys and places, twice (`Randperm.cu`)."""
    places, keys = 8 * given["n"], (4 if given["n"] < 30_000 else 8) * given["n"]
    return [places, keys, keys, places + keys + _sorting(given["n"])]


def _of_count(given: Given) -> list[int]:
    truths = torch.empty(given["self"].shape, dtype=torch.bool, device="meta")
    return [truths.nbytes, *parts_of("sum", {"self": truths, "dim": given.get("dim")})]


def _of_mean(given: Given) -> list[int]:
    """Return how many are added up in each place, and ones to count them with."""
    ones: Any = given.get("src", given.get("source"))
    if given["reduce"] != "mean":
        return []
    return [*_whole(given), ones.nbytes, *[given["self"].numel()] * ("src" in given)]


def _whole(given: Given, times: int = 1) -> list[int]:
    return [given["self"].nbytes] * times


_RULES: dict[str, Callable[[Given], list[int]]] = {
    **dict.fromkeys(_LOSSES, _of_losses),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "_addmm_activation"), _for_cublas),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _of_groups),
    "native_batch_norm_backward": lambda given: (
        _as_input(given) if given["train"] and _is_of_cudnn(given) else []
    ),
    "_softmax_backward_data": _of_softmax_backward,
    "convolution": _of_convolution,
    "convolution_backward": _of_convolution_backward,
    **dict.fromkeys(("_cdist_backward", "_pdist_backward"), _of_distances_backward),
    **dict.fromkeys(("embedding_dense_backward", "_embedding_bag_backward"), _of_table_backward),
    "index": _of_indices,
    **dict.fromkeys(("_index_put_impl", "index_put"), _of_putting),
    "sort": _of_sorting,
    **dict.fromkeys(("median", "nanmedian"), _of_median),
    **dict.fromkeys(("cumsum", "cumprod", "_logcumsumexp"), _of_sums),
    "randperm": _of_permutation,
    "count_nonzero": _of_count,
    "multinomial": lambda given: _whole(
        given, 3 if given["replacement"] and given["num_samples"] > 1 else 1
    ),
    **dict.fromkeys(("scatter_reduce", "index_reduce"), _of_mean),
    "masked_scatter": lambda given: [8 * given["mask"].numel()],
    "bernoulli": lambda given: (
        [4 * given["self"].numel()] if getattr(given.get("p"), "itemsize", 4) == 2 else []
    ),
    "im2col": _whole,
    "roll": lambda given: _whole(
        given, min(max(len(given["shifts"]) - 1, not given["self"].is_contiguous()), 2)
    ),
    **dict.fromkeys(("abs", "angle"), lambda given: _whole(given, given["self"].is_complex())),
    "_fft_c2r": _whole,
    "_fft_c2c": lambda given: _whole(given, len(given["dim"]) > 3),
    "_scaled_dot_product_flash_attention": attention.flash,
    "_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
}
"""What else kernels take, by operator."""
