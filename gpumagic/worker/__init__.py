"""The other process of a dry run: a device that exists for torch and has no memory, and the cell that is run on it.

All of this runs in the worker's process, and nothing in the notebook's imports it; what the two say to each other
is in `dryrun.wire`. Start with `process.py`, then `run.py`.

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
    exchange.py      what ranks exchange by way of the host: a store, and collectives of objects
    host.py          unwritten weights on the host, and copies of what a device has
    passes.py        how many passes of each loop were run

Nothing computes on the device, so values that the host reads from it are unknown. The words for them, in
`guesses`, `noted`, `reading`, `known`, `host` and `cell`:

    read        a value that the host took from the device, made up where it is unknown
    noted       of a number: it remembers which read it comes from, through arithmetic
    decides     of a read: a comparison, a truth, a size or an index hangs on it; then other runs are made
    place       the expression of the cell that reads or decides, a `wire.Key`
    overridden  of a place: this run takes another outcome there than the first one did
    lost        of a noted number: it went to code that cannot note what it does with it, so it counts as deciding
    known       of contents of the device: the host put them there, and every operator since was followed
    unwritten   of a tensor on the host: its contents are not the cell's, and nobody has looked at them yet
"""
