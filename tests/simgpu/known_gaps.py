"""What of torch's own list of operators the simulated GPU does not do, or does otherwise, each with the reason.

`test_operators.py` fails when an entry here starts to work and when an operator that is not here stops working.
"""

from __future__ import annotations

SPARSE = "simgpu has dense tensors only"

VALUES = {
    "sparse.sampled_addmm": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "to_sparse": SPARSE,
}
"""Operators whose result differs from the CPU's or that raise."""

NOT_COMPARABLE = {
    "to": "the samples name the CPU as the target",
    "as_strided.partial_views": "the samples read past a view's end, into storage that a copy of the view lacks",
    "tensor_split": "wants its indices on the CPU, as it does for CUDA tensors",
    "bmm.triton_optimized": "needs triton",
    "jiterator_unary": "needs CUDA",
    "jiterator_binary": "needs CUDA",
    "jiterator_4inputs_with_extra_args": "needs CUDA",
    "jiterator_binary_return_by_ref": "needs CUDA",
    "jiterator_2inputs_2outputs": "needs CUDA",
}
"""Operators whose samples say nothing about simgpu."""

SHAPE_ONLY = "reads only the other tensor's shape"
COPIES = "copies one operand into the other's device"
READS_NUMBERS = "reads the tensor as a number"

ACCEPT_OTHER_DEVICES = {
    "broadcast_tensors": SHAPE_ONLY,
    "expand_as": SHAPE_ONLY,
    "reshape_as": SHAPE_ONLY,
    "view_as": SHAPE_ONLY,
    "resize_as_": SHAPE_ONLY,
    "diagonal_scatter": COPIES,
    "as_strided_scatter": COPIES,
    "select_scatter": COPIES,
    "slice_scatter": COPIES,
    "linspace.tensor_overload": READS_NUMBERS,
    "logspace.tensor_overload": READS_NUMBERS,
    "narrow": READS_NUMBERS,
    "index_put": "indices may be on the CPU",
    "_unsafe_masked_index": "indices may be on the CPU",
    "_unsafe_masked_index_put_accumulate": "indices may be on the CPU",
    "nn.functional.ctc_loss": "moves targets and lengths to the log-probabilities",
    "nn.functional.bilinear": "an empty batch is answered without looking at the weight",
    "addr": "with beta=0 the first operand is not read",
    "atleast_1d": "each operand is treated alone",
    "atleast_2d": "each operand is treated alone",
    "atleast_3d": "each operand is treated alone",
    "linalg.pinv": "of an empty matrix, the tolerance is not read",
}
"""Operators that accept operands on different devices, because torch does, on CUDA as well."""

REFUSE_IN_OTHER_WORDS = {
    "sparse.sampled_addmm": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "nn.functional.conv1d": "convolution checks types of input and weight first",
    "nn.functional.conv2d": "convolution checks types of input and weight first",
    "nn.functional.conv3d": "convolution checks types of input and weight first",
    "nn.functional.conv_transpose1d": "convolution checks types of input and weight first",
    "nn.functional.conv_transpose2d": "convolution checks types of input and weight first",
    "nn.functional.conv_transpose3d": "convolution checks types of input and weight first",
    "take_along_dim": "has a check of its own",
    "inner": "has a check of its own",
}
"""Operators that refuse with another message, because torch does, on CUDA as well."""
