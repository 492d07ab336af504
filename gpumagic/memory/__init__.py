"""The torch allocators' statistics and segments, the host's memory, and the timeline of a cell.

Start with `allocator`, which every feature reads; `timeline` has the records of a cell's memory over time.

    allocator.py   statistics of each device's allocator, read without initialising a backend
    ledger.py      the life of every block: the account of a peak, by line, part and module
    history.py     the CUDA allocator's own history of a cell, for memory_viz
    segments.py    the allocator's segments and blocks, from `memory_snapshot`
    host.py        the RAM that is available to this process
    timeline.py    allocated memory over a cell: records, and the log that they are made from
    sampler.py     the thread that samples the allocators while a cell runs
    view.py        a timeline as blocks of a report, and as a plot
"""
