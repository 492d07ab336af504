"""What runs in the worker: a device that exists for torch and has no memory, and the cell that is run on it.

- `arena`: where an allocator would put each block, and when it would give up
- `ledger`: every block's life: who asked for it, when, what it is; the peak
- `storages`: storages of torch's with a size, a device and no bytes
- `backend`: makes torch believe in the device; `names` lets it go by the name of CUDA's
- `operators`: answers every operator on the device by shape; `calls` is one operator's call, `fused` and `selections`
  are kernels that need more than that
- `contents`: the few small values that are known all the same, and what is assumed for the others
- `autocast`: the device's autocast
- `surroundings`: data loaders, pinned memory, loading, compilers
- `kinds`: tells parameters, gradients, optimizer state and activations
- `loops`: leaves out passes that repeat: `source` (with `rules`, `sites`) is what makes a loop ask, `items` and `turns`
  tell what a pass is made of, `passes` is one run, `endings` decides; `chance` is what the host draws at random
- `lines`: tells the cell's running line
- `effects`: blocks and lists what the cell would do outside; `magics` is its `get_ipython()`
- `run`: one rehearsal, from unpacking to the account
"""
