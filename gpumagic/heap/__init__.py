"""Python's heap as a tensor sees it: names, holders, storages, gradients, graphs and reference cycles.

Start with `graph.py`: what some roots reach, and by which references.

    storages.py    the storages under tensors, numbered; bytes that are occupied and viewed
    branches.py    what one object holds, as records, how CPython reads its attributes, and a path as code
    kinds.py       what tensors are for: parameters, buffers, gradients, optimizer state, what autograd graphs keep
    readers.py     what an object holds, read without running anybody's code: containers, instances, modules, classes
    calls.py       what types written in C hold: functions, generators, frames, exceptions, arrays, columns, iterators
    graph.py       what is reached from some roots: every reference, once; names, holders and ownership are read from it
    held.py        what keeps a tensor that no variable reaches, as records
    holders.py     the roots, IPython's outputs and the last error among them, and what keeps tensors without a name
    cycles.py      tensors that only a reference cycle keeps, or an installed module
    workspaces.py  what cuBLAS keeps in torch's allocator, told by its size
    release.py     releases what a failure pins, and IPython's outputs
"""
