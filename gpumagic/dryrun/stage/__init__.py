"""What runs in the worker: a device that exists for torch and has no memory, and the cell that is run on it.

Start with `run.py`.

    run.py           one dry run, from unpacking the notebook to the account of its memory
    arena.py         where an allocator would put each block, and when it would give up
    ledger.py        every block: who asked for it, when, what it is; the peak
    storages.py      storages of torch's with a size, a device and no bytes
    backend.py       makes torch believe in the device; `names.py` lets it go by the name of CUDA's
    operators.py     answers every operator on the device by shape; `calls.py` is one operator's call
    contents.py      the few small values that are known all the same, and what is assumed for the others
    autocast.py      the device's autocast
    surroundings.py  data loaders, pinned memory, loading, compilers; blocks what the cell would do outside
    kinds.py         tells parameters, gradients, optimizer state and activations, and the cell's running line
    loops.py         leaves out passes that repeat; `passes.py` is one run of a loop
    source.py        the changed source that makes a loop ask, with the arithmetic in `rules.py`
    items.py         what a pass gets: the sizes in its item, and what the host draws at random
    turns.py         what the host's numbers decide in later passes
    counted.py       how many passes of each loop were run
"""
