"""What runs in the worker: a device that exists for torch and has no memory, and the cell that is run on it.

Start with `process.py`, then `run.py`.

    process.py       the warm process, of which each dry run is a fork
    run.py           one dry run from unpacking the notebook to the outcome
    cuda/            what of that is done on torch's own CUDA over the fake runtime
    fake/            the same on fake tensors
    cell.py          the cell's running line, and what is to be said of it
    modules.py       tells parameters, gradients, optimizer state and activations, by module
    guesses.py       what the host is told where it reads a value, and what is decided by it
    reading.py       what the host reads of a device, on either engine
    noted.py         numbers that were read, and note what is decided by them
    known.py         the few small values that are known, since the host put them there; shows every operator
    sandbox.py       data loaders, pinned memory, loading, compilers; blocks what the cell would do outside
    box/             what the machine's kernel keeps in; files of the process's own
    ranks.py         one rank of many, and what libraries make ranks agree on
    host.py          unwritten weights on the host, and copies of what a device has
    passes.py        how many passes of each loop were run
"""
