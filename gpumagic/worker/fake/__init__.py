"""A dry run on fake tensors, where torch has no CUDA: every operator on the device is answered by shape.

run.py           one dry run
allocator.py     where an allocator would put each block, and when it would give up; the ledger of that
backend.py       makes torch believe in the device, its autocast too; `names.py` lets it go by the name of CUDA's
storages.py      storages of torch's with a size, a device and no bytes
operators.py     answers every operator on the device by shape
dtypes.py        refuses the dtypes that the device's kernels refuse
calls.py         one operator's call, and what it returned for operands of some metadata, kept
scratch.py       what CUDA's kernels allocate besides their results
reductions.py    the same of sums and the like
attention.py     the same of attention, and which of its kernels are run
"""
