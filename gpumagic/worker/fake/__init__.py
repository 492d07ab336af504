"""A dry run on fake tensors, where torch has no CUDA: every operator on the device is answered by shape.

All of it runs in the worker's process.

run.py           one dry run
allocator.py     where torch's allocator would put each block, and when it would give up; the ledger of that
backend.py       makes torch believe in the device, its autocast too; `names.py` lets it go by the name of CUDA's
storages.py      torch's storages with a size, a device and no bytes
operators.py     answers every operator on the device by shape
dtypes.py        refuses the dtypes that the device's kernels refuse
calls.py         one operator's call, and the plan of what it returned for operands of some metadata
scratch.py       what CUDA's kernels allocate besides their results
reductions.py    the same for sums and other reductions
attention.py     the same for attention, and which of its kernels CUDA runs
"""
