"""What runs in the worker: a device that exists for torch and has no memory, and the cell that is run on it.

Start with `process.py`, then `cuda/run.py` or `fake/run.py`.

    process.py       the warm process, of which each dry run is a fork; `forks.py` starts and ends those
    cuda/            torch's own CUDA over the fake runtime: one dry run from unpacking the notebook to the outcome
    fake/            the same on fake tensors
    cell.py          the cell's code and what it raised
    fake/accounts.py the ledger of blocks (memory/ledger.py) over an allocator that is only computed
    storages.py      storages of torch's with a size, a device and no bytes
    known.py         the few small values that are known all the same
    guesses.py       what the host is told of the others, a scenario at a time, and what is decided by it
    noted.py         numbers that note what is decided by them
    sandbox.py       data loaders, pinned memory, loading, compilers; blocks what the cell would do outside
    overlay.py       files of the process's own
    deferred_fills.py  large random fills on the host, drawn only where the host looks
    kinds.py         tells parameters, gradients, optimizer state and activations, and the cell's running line
    models.py        the models that a cell makes; `modules.py` tells by module, whichever pass asks
    passes.py        how many passes of each loop were run
"""
