"""What runs in the worker: a device that exists for torch and has no memory, and the cell that is run on it.

arena.py       where an allocator would put each block, and when it would give up
ledger.py      every block's life: who asked for it, when, what it is; the peak
storages.py    storages of torch's with a size, a device and no bytes
backend.py     makes torch believe in the device
operators.py   answers every operator on the device by shape
contents.py    the few small values that are known all the same, and what is assumed for the others
autocast.py    the device's autocast
"""
