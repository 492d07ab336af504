"""What runs in the worker: a device that exists for torch and has no memory, and the cell that is run on it.

Start with `on_cuda.py` or `on_fake.py`.

    on_cuda.py       one dry run on torch's own CUDA, from unpacking the notebook to the outcome
    on_fake.py       the same on fake tensors
    allocator.py     where an allocator would put each block, and when it would give up
    ledger.py        every block: who asked for it, when, what it is; the peak
    storages.py      storages of torch's with a size, a device and no bytes
    backend.py       makes torch believe in the device; `names.py` lets it go by the name of CUDA's
    operators.py     answers every operator on the device by shape; `calls.py` is one operator's call
    plans.py         what an operator returned for operands of some metadata, kept
    scratch.py       what CUDA's kernels allocate besides their results; `attention.py` those of attention, and which
    known.py         the few small values that are known all the same; `contents.py` asks for them
    guesses.py       what the host is told of the others, a scenario at a time; `reading.py` answers it on CUDA
    autocast.py      the device's autocast
    sandbox.py       data loaders, pinned memory, loading, compilers; blocks what the cell would do outside
    deferred_fills.py  large random fills on the host, drawn only where the host looks
    history.py       the CUDA allocator's history as a ledger; `layout.py` puts back what the notebook holds
    overlay.py       files of the process's own
    modules.py       tells by module, whichever pass asks
    kinds.py         tells parameters, gradients, optimizer state and activations, and the cell's running line
    collectives.py   copies of one tensor to many devices, and back
    passes.py        how many passes of each loop were run
"""
