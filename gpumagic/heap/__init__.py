"""Python's heap as a tensor sees it: names, holders, storages, gradients, graphs and reference cycles.

Start with `holders.py`: from which names and other places a tensor is reached.

    storages.py    the storages under tensors, numbered; bytes that are occupied and viewed
    kinds.py       what tensors are for: parameters, buffers, gradients, optimizer state, what autograd graphs keep
    readers.py     what an object holds, read without running anybody's code
    holders.py     the search for tensors from variables, outputs, running functions and modules; names as code
    references.py  every reference below some roots: all paths to one tensor
    cycles.py      tensors that only a reference cycle keeps
    outputs.py     IPython's outputs and the last error: what they keep, and how they are made to forget it
    release.py     releases the memory that a failure pins
"""
